"""What a sweep is made of, and how its file is read."""

import dataclasses
import fnmatch
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import pathlib
import random
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bert_jax import files
from bert_jax.errors import UserError

SCALES = ("small", "paper")
# The option by which a verb is told what folder to make.
FOLDER_OPTION = {
    **dict.fromkeys(("pretrain", "finetune"), "--workdir"),
    **dict.fromkeys(("vocab", "prepare", "import", "export", "python"), "--out"),
}


class Given(NamedTuple):
    """What a sweep is asked for.

    Attributes:
        scale: one of `SCALES`: the paper's data and sizes, or what a laptop does in an hour.
        data: the folder of texts and tasks.
        init: a checkpoint to fine-tune, where the sweep is about somebody's.
        seeds: how many; 0 leaves it to the sweep.
    """

    scale: str = "small"
    data: pathlib.Path = pathlib.Path()
    init: str = ""
    seeds: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """One thing to run.

    Attributes:
        name: unique in its sweep, such as "L4-H256-A4/rte".
        command: of `bert-jax`, from the verb on, without the folder it makes; a point in it stands
            for that point's folder.
        facts: what the point is, by name: results carry them, tables are made by them.
    """

    name: str
    command: Sequence[Any]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    _digests: dict[str, str] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def verb(self) -> str:
        """The first word of the command."""
        return str(self.command[0])

    @functools.cached_property
    def needs(self) -> list["Point"]:
        """The points that the command names."""
        return [part for part in self.command if isinstance(part, Point)]

    def told(self, data: pathlib.Path | str) -> list[str]:
        """The command with points by name and the data's folder by a word, as it is published."""
        return [
            f"<{part.name}>"
            if isinstance(part, Point)
            else re.sub(rf"{re.escape(str(data))}(?=/|$)", "$BERT_JAX_DATA", str(part))
            for part in self.command
        ]

    def digest(self, data: pathlib.Path | str) -> str:
        """A hash of the command and those that it stands on, wherever the data lie.

        Of a script it is a hash of the program too.
        """
        if str(data) not in self._digests:
            parts = [
                part.digest(data) if isinstance(part, Point) else told
                for part, told in zip(self.command, self.told(data), strict=True)
            ]
            if self.verb == "python" and pathlib.Path(self.command[1]).is_file():
                parts.append(files.sha256(str(self.command[1])))
            found = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]
            self._digests[str(data)] = found
        return self._digests[str(data)]


def grid(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of the choices, the last one changing fastest."""
    return [
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    ]


def sample(count: int, seed: int, **choices: Any) -> list[dict[str, Any]]:
    """So many random combinations.

    Args:
        count: how many.
        seed: of the draws.
        choices: a list to choose from, (low, high) for a number between them, or (low, high, "log")
            for one whose logarithm is uniform.
    """
    source = random.Random(seed)

    def draw(choice: Any) -> Any:
        if isinstance(choice, list):
            return source.choice(choice)
        low, high, *log = choice
        return math.exp(source.uniform(math.log(low), math.log(high))) if log else source.uniform(low, high)  # fmt: skip

    return [{name: draw(choice) for name, choice in choices.items()} for _ in range(count)]


class Sweep(NamedTuple):
    """A sweep's file, read.

    Attributes:
        path: of the file.
        given: what it was asked for.
        points: in an order in which each comes after what it needs.
        module: the file as a module.
    """

    path: pathlib.Path
    given: Given
    points: list[Point]
    module: Any


def load(path: str | os.PathLike, given: Given) -> Sweep:
    """Reads a sweep and puts its points in order.

    Args:
        path: of the file, or of the folder with a sweep.py.
        given: handed to it.

    Raises:
        UserError: no such file, an error in it, two different points of one name.
    """
    path = pathlib.Path(path)
    path = path / "sweep.py" if path.is_dir() else path
    module = module_of(path)
    if not hasattr(module, "get_points"):
        raise UserError(f"{path} is no sweep: it has no get_points(given)")
    yielded = call(path, lambda: list(module.get_points(given)), "get_points")
    for each in yielded:
        if not isinstance(each, Point):
            raise UserError(f"{path}: get_points yielded {each!r}, which is no Point")
    return Sweep(path, given, ordered(path, yielded, given.data), module)


def call(path: pathlib.Path, function: Callable[[], Any], name: str) -> Any:
    """What a function of a sweep's file gives.

    Raises:
        UserError: an error in it.
    """
    try:
        return function()
    except UserError:
        raise
    except Exception as error:  # a program of the user's: anything may come out of it
        raise UserError(f"{path}: {name}: {type(error).__name__}: {error}") from error


def module_of(path: pathlib.Path) -> Any:
    """A sweep's file as a module.

    Raises:
        UserError: no such file, or an error in it.
    """
    spec = importlib.util.spec_from_file_location(f"sweep_{path.parent.name}", path)
    if spec is None:  # a folder without one, or a name that is no Python file's
        raise UserError(f"there is no sweep {path}: name a sweep.py, or the folder that holds it")
    module = importlib.util.module_from_spec(spec)
    # What several sweeps have in common lies beside their folders.
    beside = str(path.resolve().parent.parent)
    sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        raise UserError(f"there is no sweep {path}") from None
    except Exception as error:
        text = " ".join(str(error).split())
        raise UserError(f"cannot load {path}: {type(error).__name__}: {text}") from error
    finally:
        sys.path.remove(beside)
    return module


def ordered(where: Any, yielded: Iterable[Point], data: pathlib.Path) -> list[Point]:
    """Points and all that they need, each after what it needs and none twice.

    Raises:
        UserError: a verb that makes no folder; two different points of one name; two names of one
            command, of which results could not say which it was.
    """
    found: dict[str, Point] = {}
    names: dict[str, str] = {}

    def add(point: Point) -> None:
        for needed in point.needs:
            add(needed)
        if point.verb not in FOLDER_OPTION:
            raise UserError(
                f"{where}: {point.name}: {point.verb!r} is not among what a sweep runs: "
                + ", ".join(FOLDER_OPTION)
            )
        before, digest = found.setdefault(point.name, point), point.digest(data)
        if before.digest(data) != digest or before.facts != point.facts:
            raise UserError(f"{where}: two different points are called {point.name!r}")
        if (name := names.setdefault(digest, point.name)) != point.name:
            raise UserError(f"{where}: {name!r} and {point.name!r} are one command")

    for point in yielded:
        add(point)
    return list(found.values())


def select(sweep: Sweep, patterns: Sequence[str]) -> Sweep:
    """The points whose names match any of the patterns, and what they need.

    Raises:
        UserError: none does; lists what there are.
    """
    if not patterns:
        return sweep
    chosen = [p for p in sweep.points if any(fnmatch.fnmatch(p.name, each) for each in patterns)]
    if not chosen:
        names = ", ".join(point.name for point in sweep.points)
        raise UserError(f"no point is called {' or '.join(patterns)}; there are: {names}")
    return sweep._replace(points=ordered(sweep.path, chosen, sweep.given.data))
