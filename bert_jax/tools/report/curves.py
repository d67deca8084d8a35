"""Read the metrics of runs as curves."""

import itertools
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from bert_jax import guard, storage, workdir
from bert_jax.config import TrainConfig
from bert_jax.errors import UserError

# x axes and their labels.
AXES = {"step": "step", "tokens": "real tokens", "hours": "hours of training"}
# Longer curves are downsampled, to keep pages small.
MAX_POINTS = 400
SPEED = "real_tokens_per_second"
_SPEEDS = (SPEED, "model_flops_utilization")

# Groups of plots, in order, and the titles of metrics whose names do not say enough.
GROUPS = ("Loss", "Quality", "Optimization", "Speed", "Data and other")
_TITLES = {
    "loss": "Loss",
    "gradient_norm": "Gradient norm, before clipping",
    "real_fraction": "Fraction of tokens that are not padding",
    SPEED: "Real tokens per second",
    "model_flops_utilization": "Model FLOPs utilization (fraction of the peak)",
}
_GROUPS = {
    "learning_rate": 2,
    "gradient_norm": 2,
    SPEED: 3,
    "model_flops_utilization": 3,
    "real_fraction": 4,
}
_QUALITY = ("accuracy", "perplexity", "f1", "exact", "matthews", "pearson", "spearman")


class Recorded(NamedTuple):
    """Contents of a run's workdir.

    Attributes:
        name: shortest suffix of the workdir's path or URL that is unique among the runs.
        folder: the workdir.
        config: config of the run.
        metrics: lines of metrics.jsonl.
        speed: lines of speed.jsonl.
        starts: lines of starts.jsonl.
        data: description of the rows or examples of each phase, from config.json.
        incidents: step and kind of each bad step.
        samples: lines of samples.jsonl: the fillings of masked texts at evaluations.
        best: metric that selects the best checkpoint; see `workdir.read_best_by`.
    """

    name: str
    folder: pathlib.Path
    config: TrainConfig
    metrics: list[dict[str, Any]]
    speed: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    data: list[dict[str, Any]]
    best: dict[str, Any]
    incidents: list[tuple[int, str]]
    samples: list[dict[str, Any]]

    @property
    def heldout(self) -> list[dict[str, Any]]:
        """Lines of held-out metrics."""
        return [line for line in self.metrics if line["split"] == "heldout"]

    @property
    def best_heldout(self) -> dict[str, Any] | None:
        """The held-out metrics that select the best checkpoint: the highest, the newest of equal ones."""
        by, sign = self.best["best_by"], 1 if self.best["highest"] else -1
        ranked = [
            line for line in self.heldout if by in line and line["step"] >= self.best["since"]
        ]
        return max(ranked, key=lambda line: (sign * line[by], line["step"]), default=None)


class Curve(NamedTuple):
    """A curve of a plot.

    Attributes:
        run: index of the run.
        split: "train" or "heldout".
        x: increasing x values, for each available key of `AXES`.
        y: y values.
    """

    run: int
    split: str
    x: dict[str, Float[np.ndarray, " n"]]
    y: Float[np.ndarray, " n"]


def read(folders: list[str]) -> list[Recorded]:
    """Read the runs in the given folders, in order; each seed of a fine-tuning is a run.

    Runs may still be training: an incomplete last line is ignored.

    Raises:
        UserError: a folder without a run, or a run without metrics.
    """
    paths: dict[pathlib.Path, int] = {}
    as_given: dict[pathlib.Path, pathlib.Path] = {}
    for folder in map(pathlib.Path, folders):
        below = folder.glob("seed_*") if os.path.isdir(folder) else ()
        seeds = [path for path in below if os.path.exists(path / "config.json")]
        seeds.sort(key=lambda path: (len(path.name), path.name))  # seed_10 comes after seed_9
        several = bool(seeds) and not os.path.exists(folder / "config.json")
        # The last seed may have just started.
        started = [path for path in seeds if workdir.read_steps(path / "metrics.jsonl")]
        if several and started and len(started) < len(seeds):
            skipped = ", ".join(path.name for path in seeds if path not in started)
            print(f"{folder}: skipping runs without metrics: {skipped}", file=sys.stderr)
        for path in started or seeds if several else [folder]:
            absolute = pathlib.Path(os.path.abspath(path))
            # "seed_0" alone would not identify the run.
            paths[absolute], as_given[absolute] = 2 if several else 1, path
    names = _names(paths)
    return [_read(as_given[path], names[path]) for path in paths]


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
    path = folder / "metrics.jsonl"
    if not os.path.exists(path):
        if not os.path.exists(folder / "config.json"):
            raise UserError(f"{folder} is not a run: it has neither metrics.jsonl nor config.json")
        raise UserError(f"{folder} has no metrics yet: no metrics.jsonl")
    config = workdir.read_config(folder)
    metrics = [
        {key: x for key, x in line.items() if key == "split" or _is_number(x)}
        for line in workdir.read_steps(path)
        if line.get("split") in ("train", "heldout")
    ]
    if not metrics:
        raise UserError(f"{folder} has no metrics yet: metrics.jsonl has no complete line")
    speed = read_speed(folder)
    starts, best = workdir.read_steps(folder / "starts.jsonl"), workdir.read_best_by(folder)
    # The name of a folder may contain bytes that are not UTF-8.
    name = name.encode("utf-8", "replace").decode()
    return Recorded(
        name,
        folder,
        config,
        metrics,
        speed,
        starts,
        workdir.read_data(folder),
        best,
        [(step, kind) for kind in guard.KINDS[1:] for step in guard.incidents(folder, kind)],
        workdir.read_steps(folder / workdir.SAMPLES),
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

    The first line after a restart covers only part of its steps; the steps before are assumed to
    have had the same speed. Evaluations and the time between starts are not counted.

    Returns:
        "step", "tokens" (real tokens) and "hours" (of training), each starting with 0; only 0 if
        there is no speed.jsonl.
    """
    points = [(0.0, 0.0, 0.0)]
    for line in speed:
        step, tokens, hours = points[-1]
        seconds = max(line["step"] - step, 0) / line["steps_per_second"]
        points.append((line["step"], tokens + seconds * line[SPEED], hours + seconds / 3600))
    return dict(zip(AXES, np.array(points, float).T, strict=True))


def positions(run: Recorded, steps: Float[np.ndarray, " n"]) -> dict[str, Float[np.ndarray, " n"]]:
    """Return steps on each of `AXES`; on "step" alone if there is no speed.jsonl."""
    at = clock(run.speed)
    axes = AXES if len(at["step"]) > 1 else ("step",)
    return {
        axis: np.interp(steps, at["step"], at[axis]) if axis != "step" else steps for axis in axes
    }


def curves(runs: list[Recorded]) -> dict[str, list[Curve]]:
    """Return the curves of all metrics by name, the most important first.

    Values that are not finite are dropped, and long curves downsampled.
    """
    result: dict[str, list[Curve]] = {}
    for i, run in enumerate(runs):
        speeds = [("train", line) for line in run.speed]
        lines = [("train", name, speeds) for name in _SPEEDS if speeds]
        for split in ("train", "heldout"):
            metrics = [(split, line) for line in run.metrics if line["split"] == split]
            names = dict.fromkeys(name for _, line in metrics for name in line)
            lines += [(split, name, metrics) for name in names if name not in ("step", "split")]
        for split, name, records in lines:
            points = [(x["step"], x[name]) for _, x in records if name in x]
            if points:
                kept = downsample(np.array(points, float))
                curve = Curve(i, split, positions(run, kept[:, 0]), kept[:, 1])
                result.setdefault(name, []).append(curve)
    return {name: result[name] for name in sorted(result, key=_order)}


def group(name: str) -> int:
    """Return the index in `GROUPS` of a metric."""
    if name in _GROUPS:
        return _GROUPS[name]
    if name.endswith("loss"):
        return 0
    return 1 if name.endswith(_QUALITY) else 4


def label(name: str) -> str:
    """Return a metric's name in words: "masked_lm_loss" is "masked-LM loss"."""
    text = name.replace("masked_lm", "masked-LM").replace("next_sentence", "next-sentence")
    return text.replace("_", " ").replace(".", ", ")


def title(name: str) -> str:
    """Return the title of a metric's plot: "masked_lm_loss" is "Masked-LM loss (nats)"."""
    text = _TITLES.get(name) or label(name)[:1].upper() + label(name)[1:]
    return f"{text} (nats)" if name.endswith("loss") else text


def _order(name: str) -> tuple[int, int, str]:
    """Return the sort key: groups; the total loss first, and perplexities last in theirs."""
    known = list(_GROUPS)
    rank = known.index(name) if name in known else 0 if name == "loss" else 1
    return group(name), 2 if name.endswith("perplexity") else rank, "" if name in known else name


def downsample(points: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "m 2"]:
    """Downsample a curve to `MAX_POINTS`, keeping its ends and the extremes of every interval."""
    if len(points) <= MAX_POINTS:
        return points
    kept = {0, len(points) - 1}
    bounds = np.linspace(1, len(points) - 1, MAX_POINTS // 2).astype(int)
    for begin, end in itertools.pairwise(bounds):
        interval = points[begin:end, 1]
        kept |= {begin + int(interval.argmin()), begin + int(interval.argmax())}
    return points[sorted(kept)]
