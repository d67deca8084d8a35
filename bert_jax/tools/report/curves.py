"""Read the metrics of runs as curves."""

import bisect
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from bert_jax import storage
from bert_jax.config import fields as fields_lib
from bert_jax.config import schema as config_lib
from bert_jax.config.schema import Config, TrainConfig
from bert_jax.errors import UserError
from bert_jax.runs import workdir

SPEED, UTILIZATION = "real_tokens_per_second", "model_flops_utilization"


class Recorded(NamedTuple):
    """Contents of a run's workdir.

    Attributes:
        name: shortest suffix of the workdir's path or URL that is unique among the runs.
        config: config of the run.
        metrics, speed: lines of metrics.jsonl and of speed.jsonl.
        data: description of the rows or examples of each phase, from config.json.
        best: metric that selects the best checkpoint; see `workdir.read_best_by`.
        samples: lines of samples.jsonl: the fillings of masked texts at evaluations.
    """

    name: str
    config: TrainConfig
    metrics: list[dict[str, Any]]
    speed: list[dict[str, Any]]
    data: list[dict[str, Any]]
    best: dict[str, Any]
    samples: list[dict[str, Any]]

    @property
    def best_heldout(self) -> dict[str, Any] | None:
        """The held-out metrics that select the best checkpoint: the highest, the newest of equal ones."""
        by, sign = self.best["best_by"], 1 if self.best["highest"] else -1
        heldout = [x for x in self.metrics if x["split"] == "heldout" and by in x]
        ranked = [line for line in heldout if line["step"] >= self.best["since"]]
        return max(ranked, key=lambda line: (sign * line[by], line["step"]), default=None)

    @property
    def phase_ends(self) -> list[int]:
        """Last step of each phase of a pretraining run; [] for a fine-tuning run."""
        return config_lib.phase_ends(self.config) if isinstance(self.config, Config) else []

    @property
    def settings(self) -> dict[str, Any]:
        """The flattened config, and digests of the data and the initial weights."""
        digests = {
            f"{what} of phase {i}": rows[key][:10]
            for i, rows in enumerate(self.data)
            for key, what in (("digest", "data"), ("start", "initial weights"))
            if key in rows
        }
        return {**fields_lib.flatten(self.config), **digests}


class Curve(NamedTuple):
    """A metric in one phase of a run, or of runs that differ only in their seeds.

    Attributes:
        series: index in `by_seed(runs)`.
        split: "train" or "heldout".
        steps: increasing steps.
        values: the metric at these steps, a row per seed.
    """

    series: int
    split: str
    steps: Int[np.ndarray, " n"]
    values: Float[np.ndarray, "seeds n"]


def read(folders: list[str]) -> list[Recorded]:
    """Read the runs in the given folders, in order; each seed of a fine-tuning is a run.

    Runs may still be training: an incomplete last line is ignored.
    """
    paths: dict[pathlib.Path, int] = {}
    for folder in map(pathlib.Path, folders):
        is_run = (folder / "config.json").exists()
        seeds = [] if is_run else [path.parent for path in folder.glob("seed_*/config.json")]
        seeds.sort(key=lambda path: (len(path.name), path.name))  # seed_10 comes after seed_9
        # The last seed may have just started.
        started = [path for path in seeds if workdir.read_steps(path / "metrics.jsonl")]
        for path in started or seeds or [folder]:
            # "seed_0" alone would not identify the run.
            paths[pathlib.Path(os.path.abspath(path))] = 2 if seeds else 1
    return [_read(path, name) for path, name in _names(paths).items()]


def _names(paths: dict[pathlib.Path, int]) -> dict[pathlib.Path, str]:
    """Return a unique suffix of each path or URL, of at least the given number of parts."""
    counts = dict(paths)
    parts = {path: (storage.remote(path) or str(path)).split("/") for path in paths}
    for _ in range(max(map(len, parts.values()))):
        names = {path: "/".join(parts[path][-count:]) for path, count in counts.items()}
        taken = list(names.values())
        for path, name in names.items():
            counts[path] += taken.count(name) > 1
    return names


def _read(folder: pathlib.Path, name: str) -> Recorded:
    config = workdir.read_config(folder)
    metrics = [
        {key: x for key, x in line.items() if key == "split" or _is_number(x)}
        for line in workdir.read_steps(folder / "metrics.jsonl")
        if line.get("split") in ("train", "heldout")
    ]
    if not metrics:
        raise UserError(f"{folder} has no metrics yet: metrics.jsonl has no complete line")
    return Recorded(
        # The name of a folder may contain bytes that are not UTF-8.
        name.encode("utf-8", "replace").decode(),
        config,
        metrics,
        read_speed(folder),
        workdir.read_data(folder),
        workdir.read_best_by(folder),
        [line for line in workdir.read_steps(folder / workdir.SAMPLES) if _is_sample(line)],
    )


def _is_sample(line: dict[str, Any]) -> bool:
    """Whether a line of samples.jsonl has candidates for each mask."""
    masks = line.get("masks")
    return isinstance(masks, list) and all(
        isinstance(mask, list)
        and all(
            isinstance(x, dict) and "token" in x and _is_number(x.get("probability")) for x in mask
        )
        for mask in masks
    )


def read_speed(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return the lines of a run's speed.jsonl that can be plotted; [] if there is none."""
    return [
        line
        for line in workdir.read_steps(folder / "speed.jsonl")
        if _is_number(line.get(SPEED)) and _is_number(rate := line.get("steps_per_second")) and rate
    ]


def _is_number(value: Any) -> bool:
    """Whether a value can be plotted: a finite number whose differences are finite."""
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e300


def clock(speed: Sequence[Mapping[str, Any]]) -> dict[str, Float[np.ndarray, " n"]]:
    """Return the progress of a run at each line of its speed.jsonl (see `read_speed`).

    It is the "step", real "tokens" and "hours" of training, each starting with 0. The first line
    after a restart covers only part of its steps; the steps before are assumed to have had the same
    speed. Evaluations and the time between starts are not counted.
    """
    points = [(0.0, 0.0, 0.0)]
    for line in speed:
        step, tokens, hours = points[-1]
        seconds = max(line["step"] - step, 0) / line["steps_per_second"]
        points.append((line["step"], tokens + seconds * line[SPEED], hours + seconds / 3600))
    return dict(zip(("step", "tokens", "hours"), np.array(points, float).T, strict=True))


def by_seed(runs: list[Recorded]) -> list[list[Recorded]]:
    """Group runs that differ only in their seeds; those that have the same seed stay apart."""
    groups: dict[tuple[str, int], list[Recorded]] = {}
    for i, run in enumerate(runs):
        copies = [other.settings for other in runs[:i]].count(run.settings)
        groups.setdefault((repr(run.settings | {"seed": 0}), copies), []).append(run)
    return list(groups.values())


def curves(runs: list[Recorded]) -> dict[str, list[Curve]]:
    """Return the curves of each metric by name; seeds, at the steps that all of them have recorded."""
    result: dict[str, list[Curve]] = {}
    for series, seeds in enumerate(by_seed(runs)):
        points = [_points(run) for run in seeds]
        for key in dict.fromkeys(key for each in points for key in each):
            name, split, _ = key
            recorded = [each[key] for each in points if key in each]
            steps = sorted(set.intersection(*map(set, recorded)))
            if steps:
                values = np.array([[each[step] for step in steps] for each in recorded], float)
                result.setdefault(name, []).append(Curve(series, split, np.array(steps), values))
    return result


def _points(run: Recorded) -> dict[tuple[str, str, int], dict[int, float]]:
    """Return the values of a run by metric, split and phase, then by step."""
    result: dict[tuple[str, str, int], dict[int, float]] = {}
    ends, names = run.phase_ends, ("step", SPEED, UTILIZATION)
    speed = [{name: line[name] for name in names if name in line} for line in run.speed]
    for line in [*run.metrics, *speed]:
        phase = bisect.bisect_left(ends, line["step"])  # the last step of a phase belongs to it
        for name, value in line.items():
            if name not in ("step", "split") and _is_number(value):
                key = name, line.get("split", "train"), phase
                result.setdefault(key, {})[line["step"]] = value
    return result
