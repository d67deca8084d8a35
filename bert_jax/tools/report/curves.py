"""What runs wrote down while they trained, as lines to draw."""

import itertools
import os
import pathlib
import sys
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from bert_jax import workdir
from bert_jax.config import TrainConfig
from bert_jax.errors import UserError

# What may stand on the x axis, as people call it.
AXES = {"step": "step", "tokens": "real tokens", "hours": "hours of training"}
# A line of more points is thinned: a page of many runs stays small, and no screen shows more.
MOST_POINTS = 400
SPEED = "real_tokens_per_second"

_LAST = ("learning_rate", "gradient_norm", SPEED)


class Recorded(NamedTuple):
    """A run as its workdir tells it.

    Attributes:
        name: its folder's, with as much of the path before it as tells it from the others.
        folder: the workdir.
        config: what it runs with.
        metrics, speed, starts: the lines of metrics.jsonl, speed.jsonl and starts.jsonl.
        data: for each phase what config.json says of its rows or examples.
        best: as `workdir.read_best_by` returns it.
    """

    name: str
    folder: pathlib.Path
    config: TrainConfig
    metrics: list[dict[str, Any]]
    speed: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    data: list[dict[str, Any]]
    best: dict[str, Any]

    @property
    def heldout(self) -> list[dict[str, Any]]:
        """The held-out lines of its metrics."""
        return [line for line in self.metrics if line["split"] == "heldout"]


class Curve(NamedTuple):
    """A line of a plot.

    Attributes:
        run: which of the runs it is of, counted from 0.
        split: "train" or "heldout".
        x: by the keys of `AXES`, those that are known: [n], rising.
        y: [n].
    """

    run: int
    split: str
    x: dict[str, Float[np.ndarray, " n"]]
    y: Float[np.ndarray, " n"]


def read(folders: list[str]) -> list[Recorded]:
    """The runs in some folders, in order; a fine-tuning over several seeds is a run a seed.

    A run may still be going on, and the last line of its files be cut short.

    Raises:
        UserError: a folder that holds no run, or one without metrics.
    """
    paths: dict[pathlib.Path, int] = {}
    given: dict[pathlib.Path, pathlib.Path] = {}
    for folder in map(pathlib.Path, folders):
        below = folder.glob("seed_*") if os.path.isdir(folder) else ()
        seeds = [path for path in below if os.path.exists(path / "config.json")]
        seeds.sort(key=lambda path: (len(path.name), path.name))  # seed_10 comes after seed_9
        several = bool(seeds) and not os.path.exists(folder / "config.json")
        # The last one may have begun just now.
        begun = [path for path in seeds if _lines(path / "metrics.jsonl")]
        if several and begun and len(begun) < len(seeds):
            left_out = ", ".join(path.name for path in seeds if path not in begun)
            print(f"{folder}: without metrics yet, and left out: {left_out}", file=sys.stderr)
        for path in begun or seeds if several else [folder]:
            where = pathlib.Path(os.path.abspath(path))
            # Of "seed_0" alone nobody knows whose it is.
            paths[where], given[where] = 2 if several else 1, path
    names = _names(paths)
    return [_read(given[where], names[where]) for where in paths]


def _names(paths: dict[pathlib.Path, int]) -> dict[pathlib.Path, str]:
    """For each path as many of its last parts, at least so many, as no other path ends in."""
    parts = dict(paths)
    for _ in range(max(len(path.parts) for path in paths)):
        names = {path: "/".join(path.parts[-count:]) for path, count in parts.items()}
        said = list(names.values())
        for path, name in names.items():
            parts[path] += said.count(name) > 1
    return names


def _read(folder: pathlib.Path, name: str) -> Recorded:
    path = folder / "metrics.jsonl"
    if not os.path.exists(path):
        if not os.path.exists(folder / "config.json"):
            raise UserError(f"{folder} holds no run: it holds no metrics.jsonl and no config.json")
        raise UserError(f"{folder} has no metrics yet: it holds no metrics.jsonl")
    config = workdir.read_config(folder)
    metrics = [
        {key: x for key, x in line.items() if key == "split" or _is_number(x)}
        for line in _lines(path)
        if line.get("split") in ("train", "heldout")
    ]
    if not metrics:
        raise UserError(f"{folder} has no metrics yet: its metrics.jsonl has no line of any")
    speed = [
        line
        for line in _lines(folder / "speed.jsonl")
        if _is_number(line.get(SPEED)) and _is_number(rate := line.get("steps_per_second")) and rate
    ]
    starts, best = _lines(folder / "starts.jsonl"), workdir.read_best_by(folder)
    # A folder's name may hold bytes that are no text.
    name = name.encode("utf-8", "replace").decode()
    return Recorded(name, folder, config, metrics, speed, starts, workdir.read_data(folder), best)


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a file that are of a step; none where there is no file."""
    if not os.path.exists(path):
        return []
    return [x for x in workdir.read_lines(path) if isinstance(x.get("step"), int)]


def _is_number(value: Any) -> bool:
    """One that can be drawn: finite, and not so large that a difference of two is not."""
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e300


def clock(run: Recorded) -> dict[str, Float[np.ndarray, " n"]]:
    """How far a run was by the end of each line of its speed.jsonl.

    A line that follows a restart tells the speed of a part of its steps; the others, whose time died
    with the process, are taken to have been as fast. Time between starts is not counted, nor that of
    evaluations.

    Returns:
        "step", "tokens" (real ones) and "hours" (of training), all beginning with 0; only 0 where
        there is no speed.jsonl.
    """
    found = [(0.0, 0.0, 0.0)]
    for line in run.speed:
        step, tokens, hours = found[-1]
        seconds = max(line["step"] - step, 0) / line["steps_per_second"]
        found.append((line["step"], tokens + seconds * line[SPEED], hours + seconds / 3600))
    return dict(zip(AXES, np.array(found, float).T, strict=True))


def curves(runs: list[Recorded]) -> dict[str, list[Curve]]:
    """Every number that runs wrote down, by name, the best known first.

    Values that are not finite are left out, and long lines thinned.
    """
    found: dict[str, list[Curve]] = {}
    for i, run in enumerate(runs):
        at = clock(run)
        told = [("train", line) for line in run.speed]
        lines = [("train", SPEED, told)] if told else []
        for split in ("train", "heldout"):
            mine = [(split, line) for line in run.metrics if line["split"] == split]
            names = dict.fromkeys(name for _, line in mine for name in line)
            lines += [(split, name, mine) for name in names if name not in ("step", "split")]
        for split, name, of in lines:
            points = [(x["step"], x[name]) for _, x in of if name in x]
            if points:
                kept = thinned(np.array(points, float))
                x = {"step": kept[:, 0]}
                if len(at["step"]) > 1:
                    for axis in ("tokens", "hours"):
                        x[axis] = np.interp(kept[:, 0], at["step"], at[axis])
                found.setdefault(name, []).append(Curve(i, split, x, kept[:, 1]))
    return {name: found[name] for name in sorted(found, key=_order)}


def _order(name: str) -> tuple[int, str | int]:
    """Sort key: the total loss, its terms, accuracies, learning rate and speed; then the rest."""
    if name.endswith("loss"):
        return 0, "" if name == "loss" else name
    if name.endswith("accuracy"):
        return 1, 0
    return (2, _LAST.index(name)) if name in _LAST else (3, 0)


def thinned(points: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "m 2"]:
    """At most `MOST_POINTS` of a line: its ends, and between them every stretch's lowest and highest.

    So what sticks out is still there.
    """
    if len(points) <= MOST_POINTS:
        return points
    kept = {0, len(points) - 1}
    bounds = np.linspace(1, len(points) - 1, MOST_POINTS // 2).astype(int)
    for begin, end in itertools.pairwise(bounds):
        stretch = points[begin:end, 1]
        kept |= {begin + int(stretch.argmin()), begin + int(stretch.argmax())}
    return points[sorted(kept)]
