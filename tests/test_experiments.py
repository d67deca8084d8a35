"""Experiments: commands parse, and pages match the recorded results."""

import functools
import itertools
import pathlib
import shutil

import pytest

from bert_jax import cli
from bert_jax.config import flags
from bert_jax.config.schema import Config, FinetuneConfig
from bert_jax.tools import sweep
from bert_jax.tools.sweep import SCALES, SweepArgs, experiment

ROOT = pathlib.Path(__file__).parent.parent / "experiments"
PAGES = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("sweep.py"))
NAMES = [name for name in PAGES if "def get_points" in (ROOT / name / "sweep.py").read_text()]
NO_SCALE = {
    *itertools.product(("paper/more", "pretraining/base", "pretraining/mini"), ["paper"]),
    *(("speed/packing", "paper"), ("paper/table3", "small"), ("paper/table4", "small")),
}
AT_SCALES = sorted({*itertools.product(NAMES, SCALES)} - NO_SCALE)
DATA = pathlib.Path("/nowhere/data")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Run in the repository root: commands refer to configs/ by relative path."""
    monkeypatch.chdir(ROOT.parent)


@functools.cache
def load(name: str, scale: str) -> sweep.Sweep:
    return sweep.load(ROOT / name, SweepArgs(scale, DATA))


@functools.cache
def read_config(arguments: tuple[str, ...], kind: type):
    return flags.load(list(arguments), kind)


@functools.cache
def parser():
    return cli.parser()


def split(point: sweep.Point):
    """Return the config flags of a point and its parsed command-line options."""
    folder = "--workdir" if point.verb in ("pretrain", "finetune") else "--out"
    config, rest = flags.split([*point.display_command(DATA), folder, "x"])
    return tuple(config), parser().parse_args(rest)


def config_of(point: sweep.Point):
    """Return the config that the settings of a point produce."""
    kinds = {"pretrain": Config, "finetune": FinetuneConfig}
    return read_config(split(point)[0], kinds[point.verb])


@pytest.mark.parametrize(("name", "scale"), AT_SCALES)
def test_every_command_parses_without_the_data(name, scale):
    points = load(name, scale).points
    assert len({point.name for point in points}) == len(points)
    read_ = set()
    for point in points:
        if point.verb == "python":
            assert (ROOT.parent / point.command[1]).is_file()
            continue
        settings, _ = split(point)
        kind = (point.verb, settings[:1], *(each.partition("=")[0] for each in settings))
        if point.verb == "pretrain" or (point.verb == "finetune" and kind not in read_):
            config_of(point)
        read_.add(kind)  # one config per grid is enough
        if point.verb == "pretrain":
            rows = [split(needed)[1].tokens for needed in point.needs]
            assert rows == [phase.tokens for phase in config_of(point).phases]


@pytest.fixture(scope="session")
def copied(tmp_path_factory):
    """Return a copy of the experiments, for the pictures that pages write."""
    ignore = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("copied") / "experiments", ignore=ignore)


@pytest.mark.parametrize("name", PAGES)
def test_recorded_page_regenerates_from_its_results(name, copied):
    assert (ROOT / name / "README.md").read_text() == experiment.readme(copied / name)


def test_blocks_of_other_pages_regenerate_from_the_results():
    pages = sweep.module_of(ROOT / "pages.py")
    for path, block, lines in (
        ("README.md", "results", pages.module("results").front()),
        ("docs/explanation/speed.md", "speed", pages.module("speed").summary()),
    ):
        text = (ROOT.parent / path).read_text()
        assert text == pages.with_block(text, block, lines, ROOT.parent / path), path
