"""Sweeps over a grid of settings, without a Python file by the user: `bert-jax sweep --grid`.

The sweep and its page are written to a folder as any other experiment, where they can be edited.
"""

import pathlib
import pprint
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.config import flags
from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import Config, FinetuneConfig
from bert_jax.config.sizes import ARCHITECTURES, model_size
from bert_jax.errors import UserError
from bert_jax.tools.report import page, plots
from bert_jax.tools.sweep import Point, grid
from bert_jax.tools.sweep.experiment import Column, Curves, Intervals, Result, Table

_SWEEP = '''"""A grid of settings, written by `bert-jax sweep --grid`."""

from bert_jax.tools.sweep import grid_files

COMMAND = {command}
GRID = {choices}


def get_points(args):
    """Return a point for every combination."""
    return grid_files.points(COMMAND, GRID)


def get_blocks(results):
    """Return the table and the pictures of the results."""
    return grid_files.blocks({arguments})
'''
_README = """# {title}

```sh
bert-jax sweep {folder}
bert-jax report {folder}
```

Every combination of {settings} in `bert-jax {command}`.

<!-- table -->
<!-- /table -->

<!-- metrics -->
<!-- /metrics -->
{curve}"""
_CURVE = "\n<!-- curve -->\n<!-- /curve -->\n"
_MAX_METRICS = 6
_SHAPE = ("layers", "hidden", "heads")


def parse(specs: Sequence[str]) -> dict[str, list[str]]:
    """Parse KEY=VALUE,VALUE,… of each --grid."""
    choices: dict[str, list[str]] = {}
    for spec in specs:
        key, equals, values = spec.partition("=")
        key = key.removeprefix("config.")
        if not (key and equals and all(values.split(","))):
            raise UserError(f"--grid {spec}: write KEY=VALUE,VALUE,…")
        if key in choices:
            raise UserError(f"--grid {spec}: {key} is already given; list all its values in one")
        choices[key] = values.split(",")
    return choices


def name(choices: Mapping[str, Sequence[str]]) -> str:
    """Return a folder name for a grid: the last part of each key."""
    return "_".join(key.rpartition(".")[2] for key in choices)


def write(folder: pathlib.Path, command: Sequence[str], choices: Mapping[str, list[str]]) -> None:
    """Write sweep.py and README.md of a grid, unless the same are there (see `points`)."""
    has_curve = command[0] == "pretrain"
    text = _SWEEP.format(
        command=pprint.pformat(list(command)),
        choices=pprint.pformat(dict(choices), sort_dicts=False),
        arguments="GRID, results" if has_curve else "GRID, results, curve=False",
    )
    path = folder / "sweep.py"
    if path.exists():
        if path.read_text() != text:
            raise UserError(f"{folder} holds another sweep: choose another folder, or edit {path}")
        return
    settings = " and ".join(f"{key} ({', '.join(values)})" for key, values in choices.items())
    about = {"title": " and ".join(choices), "folder": folder, "settings": settings}
    about |= {"command": shlex.join(command), "curve": _CURVE if has_curve else ""}
    page.write(folder / "README.md", _README.format(**about))
    page.write(path, text)


def points(command: Sequence[str], choices: Mapping[str, Sequence[str]]) -> list[Point]:
    """Return a point for every combination, whose facts are its settings.

    `choices` are the values by config key; those of `model` are sizes, which set layers, hidden and heads.
    feed_forward keeps its ratio to hidden unless the grid or the command sets it.
    """
    if command[:1] not in (["pretrain"], ["finetune"]):
        raise UserError("--grid needs a pretrain or finetune command after --")
    if any(part.partition("=")[0] == "--workdir" for part in command):
        raise UserError("the command after -- has --workdir, which the sweep chooses: remove it")
    given, _ = flags.split(list(command[1:]))
    base = None
    is_sized = not {"model", "model.hidden"}.isdisjoint(choices)
    if is_sized and "model.feed_forward" not in [*choices, *flags.keys(given)]:
        base = flags.load(given, Config if command[0] == "pretrain" else FinetuneConfig).model
    combinations = grid(**choices)
    return [Point(_label(x), (*command, *_settings(x, base)), x) for x in combinations]


def _settings(facts: Mapping[str, str], base: ModelConfig | None) -> list[str]:
    """Return the settings of a point, which replace earlier ones; feed_forward / hidden is that of `base`."""
    settings = dict(facts)
    if size := settings.pop("model", ""):
        if size in ARCHITECTURES:
            raise UserError(f"--grid model={size}: it is more than a shape: give it to --config")
        shape = model_size(size)
        settings = {f"model.{key}": f"{getattr(shape, key)}" for key in _SHAPE} | settings
    hidden = settings.get("model.hidden", "")
    if base and hidden.isdecimal():  # anything else is rejected with the config
        settings["model.feed_forward"] = f"{int(hidden) * base.feed_forward // base.hidden}"
    return [f"--config.{key}={value}" for key, value in settings.items()]


class _Parameters(Column):
    """The column of the number of parameters, which results of older versions lack."""

    def values(self, results: Sequence[Result]) -> list[float]:
        return [float(line["parameters"]) for line in results[:1] if "parameters" in line]

    def cell(self, values: Sequence[float]) -> str:
        return "".join(map(plots.short, values))


def blocks(
    choices: Mapping[str, Sequence[str]], results: Sequence[Result], curve: bool = True
) -> dict[str, Any]:
    """Return a table and pictures of the final metrics, and the held-out curves of pretraining.

    Points that differ in `seed` alone are seeds of one row.
    """
    choices = {key: values for key, values in choices.items() if key != "seed"}
    rows = {_label(facts) or "all": facts for facts in grid(**choices)}
    metrics = {
        name: Column(name, factor=1.0, digits=4)
        for line in results[:1]
        for name, value in list(line["metrics"].items())[:_MAX_METRICS]
        if isinstance(value, int | float) and name != "real_fraction"
    }
    columns = {"parameters": _Parameters("parameters"), **metrics}
    curves = Curves("curve.svg", rows, "step", "loss", ("step", "held-out loss (nats)"))
    table = Table(rows, columns, title=", ".join(choices))
    made: dict[str, Any] = {"table": table, "metrics": Intervals(rows, [*metrics])}
    return made | ({"curve": curves} if curve else {})


def _label(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in facts.items())
