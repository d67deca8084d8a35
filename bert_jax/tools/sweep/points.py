"""Points of a sweep, and reading of sweep files."""

import dataclasses
import fnmatch
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bert_jax.errors import UserError
from bert_jax.storage import files

SCALES = ("small", "paper")
# Default folder of the points of all sweeps.
RUNS = "runs/sweeps"
# The option of each verb that names the folder it creates.
FOLDER_OPTION = {
    **dict.fromkeys(("pretrain", "finetune"), "--workdir"),
    **dict.fromkeys(("vocab", "prepare", "import", "export", "python"), "--out"),
}


class SweepArgs(NamedTuple):
    """Arguments of a sweep."""

    # One of `SCALES`: the data and sizes of the paper, or what takes a laptop an hour.
    scale: str = "small"
    # Folder of texts and tasks; its `/` also joins paths on object storage.
    data: Any = pathlib.Path()
    init: str = ""  # checkpoint to fine-tune, for sweeps that start from one
    seeds: int = 0  # number of seeds; 0 takes the sweep's default


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """A command to run."""

    name: str  # unique within the sweep, such as "L4-H256-A4/rte"
    # Arguments of `bert-jax`, starting with the verb, without the folder to create. A point in it stands for
    # that point's folder.
    command: Sequence[Any]
    # Properties of the point by name, stored with its results and used in tables. Other points of the sweep with
    # this verb must have others.
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def verb(self) -> str:
        """The first word of the command."""
        return str(self.command[0])

    @functools.cached_property
    def needs(self) -> list["Point"]:
        """The points that the command contains."""
        return [part for part in self.command if isinstance(part, Point)]

    @property
    def options(self) -> dict[str, str]:
        """Values of options by name, from `--name VALUE` and `--name=VALUE`; "" for points."""
        words = []
        for word in self.words(lambda point: "")[1:]:
            words += word.split("=", 1) if word.startswith("--") else [word]
        return dict(itertools.pairwise(words))

    def words(self, of: Callable[["Point"], str], change: Callable[[str], str] = str) -> list[str]:
        """Return the command as texts: of the points in it, and of the other arguments, changed."""
        return [of(part) if isinstance(part, Point) else change(str(part)) for part in self.command]

    def display_command(self, data: pathlib.Path | str) -> list[str]:
        """Return the command with names for points and $BERT_JAX_DATA for the data folder."""
        return self.words(lambda point: f"<{point.name}>", lambda text: without_data(text, data))

    @functools.cache  # noqa: B019 (points live as long as the program)
    def digest(self, data: pathlib.Path | str) -> str:
        """Return a hash of the command and its dependencies, independent of the data folder's path.

        For a script it includes the content of the file.
        """
        parts = self.words(lambda point: point.digest(data), lambda text: without_data(text, data))
        if self.verb == "python" and pathlib.Path(self.command[1]).is_file():
            parts.append(files.sha256(str(self.command[1])))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]


def without_data(text: str, data: pathlib.Path | str) -> str:
    """Replace the data folder, also where it begins a path but not within others, by $BERT_JAX_DATA."""
    begin, end = r"(?<![^\s=:,;'\"(\[])", r"(?![^\s/:,;'\")\]])"
    return re.sub(f"{begin}{re.escape(str(data))}{end}", "$BERT_JAX_DATA", text)


def grid(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    """Return all combinations of the choices; the last one changes fastest."""
    combinations = itertools.product(*choices.values())
    return [dict(zip(choices, values, strict=True)) for values in combinations]


class Sweep(NamedTuple):
    """A loaded sweep file."""

    path: pathlib.Path
    args: SweepArgs
    points: list[Point]  # each after its dependencies


def load(path: str | os.PathLike, args: SweepArgs) -> Sweep:
    """Load a sweep, a file or a folder that contains sweep.py; sort its points by dependencies."""
    path = pathlib.Path(path)
    path = path / "sweep.py" if path.is_dir() else path
    module = module_of(path)
    if not hasattr(module, "get_points"):
        raise UserError(f"{path} is not a sweep: it must define get_points(args)")
    yielded = call(path, lambda: list(module.get_points(args)), "get_points")
    for point in yielded:
        if not isinstance(point, Point):
            raise UserError(f"{path}: get_points yielded {point!r}, which is not a Point")
    return Sweep(path, args, ordered(path, yielded, args.data))


def call(path: pathlib.Path, function: Callable[[], Any], name: str) -> Any:
    """Return the result of a function of a sweep file."""
    try:
        return function()
    except UserError:
        raise
    except Exception as error:  # a user's program can raise anything
        raise UserError(f"{path}: {name}: {type(error).__name__}: {error}") from error


def module_of(path: pathlib.Path) -> Any:
    """Import a sweep file."""
    spec = importlib.util.spec_from_file_location(f"sweep_{path.parent.name}", path)
    if spec is None or not (loader := spec.loader) or not path.is_file():
        raise UserError(f"{path} is not a sweep: give a sweep.py, or the folder that contains it")
    module = importlib.util.module_from_spec(spec)
    # Modules shared by several sweeps are in the parent of their folders.
    parent = str(path.resolve().parent.parent)
    sys.path.insert(0, parent)
    try:
        call(path, lambda: loader.exec_module(module), "import")
    finally:
        sys.path.remove(parent)
    return module


def ordered(where: Any, yielded: Iterable[Point], data: Any) -> list[Point]:
    """Return points and their dependencies, each once and after what it depends on."""
    points: dict[str, Point] = {}
    names: dict[Any, str] = {}

    def add(point: Point) -> None:
        for needed in point.needs:
            add(needed)
        if point.verb not in FOLDER_OPTION:
            advice = f"choose one of {', '.join(FOLDER_OPTION)}"
            raise UserError(f"{where}: {point.name}: a sweep cannot run {point.verb!r}; {advice}")
        before, digest = points.setdefault(point.name, point), point.digest(data)
        if before.digest(data) != digest or before.facts != point.facts:
            raise UserError(f"{where}: two different points have the name {point.name!r}")
        same: dict[str, Any] = {"the same command": digest}
        if point.facts:  # results of points with equal facts replace each other (`results.current`)
            facts = point.verb, json.dumps(point.facts, sort_keys=True)
            same["the same verb and facts: add a fact that differs"] = facts
        for what, value in same.items():
            if (name := names.setdefault(value, point.name)) != point.name:
                raise UserError(f"{where}: {name!r} and {point.name!r} have {what}")

    for point in yielded:
        add(point)
    return list(points.values())


def select(sweep: Sweep, patterns: Sequence[str]) -> Sweep:
    """Return a sweep of the points whose names match any pattern, and their dependencies."""
    if not patterns:
        return sweep
    names = [point.name for point in sweep.points]
    matches = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    if not matches:
        raise UserError(f"no point matches {' or '.join(patterns)}; choose from {', '.join(names)}")
    chosen = [point for point in sweep.points if point.name in matches]
    return sweep._replace(points=ordered(sweep.path, chosen, sweep.args.data))
