"""Experiments: commands parse, and pages match the recorded results."""

import functools
import itertools
import json
import pathlib
import shutil
import sys

import pytest

from bert_jax import cli
from bert_jax.config import flags
from bert_jax.config.schema import Config, FinetuneConfig
from bert_jax.tools import sweep
from bert_jax.tools.sweep import SCALES, SweepArgs, experiment
from tests.helpers import processes, tasks
from tests.helpers.runs import ONE_DEVICE
from tests.test_classification import SWAG, SWAG_HEADER
from tests.test_glue import folder  # noqa: F401 (a fixture)

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
    option = "--workdir" if point.verb in ("pretrain", "finetune") else "--out"
    config, rest = flags.split([*point.display_command(DATA), option, "x"])
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


CHAIN = """
import sys
sys.path.insert(0, "experiments/paper")
import recipes

recipes._PAPER |= dict.fromkeys(("model.layers", "model.heads"), 1)
recipes._PAPER |= {"model.hidden": 16, "model.feed_forward": 32, "optim.warmup_steps": 10}
recipes._PAPER |= {"steps": 1_000, "batch_size": 2, "evaluate_every_steps": 500}
COLUMNS = {t: recipes.Column(spec.metric, {"task": t}) for t, spec in recipes.TASKS["paper"].items()}

def get_points(args):
    start = ["--init", recipes.base(args)]
    for task in COLUMNS:
        yield recipes.finetuned(args, "base", start, task, {"epochs": 1, "batch_size": 2})

def get_blocks(results):
    return {"table": recipes.Table({"base": {"model": "base"}}, COLUMNS)}
"""


@pytest.mark.nightly
def test_thousandth_of_the_steps_reaches_the_tables(tmp_path, folder):  # noqa: F811
    for name in ("QQP", "QNLI"):
        shutil.copy(folder / name / "train.tsv", folder / name / "dev.tsv")
    for name in ("text/wikipedia", "text/books", "squad", "swag", "conll2003"):
        (tmp_path / name).mkdir(parents=True)
    words = [f"w{i % 50} w{i * 7 % 50} w{i * 3 % 50} ." for i in range(3_000)]
    (tmp_path / "text/books/a.txt").write_text("\n".join(words))
    documents = [f'<doc id="{i}" title="t">\n' + "\n".join(words[i::20]) for i in range(20)]
    (tmp_path / "text/wikipedia/a").write_text("\n</doc>\n".join([*documents, ""]))
    for version, split in itertools.product(("1.1", "2.0"), ("train", "dev")):
        path = tmp_path / f"squad/{split}-v{version}.json"
        tasks.squad_file(path)
        if version == "1.1":
            squad = json.loads(path.read_text())
            for paragraph in squad["data"][0]["paragraphs"]:
                paragraph["qas"] = [each for each in paragraph["qas"] if each["answers"]]
            path.write_text(json.dumps(squad))
    for split in ("train", "val"):
        (tmp_path / f"swag/{split}.csv").write_text("\n".join([SWAG_HEADER, *SWAG]))
    for split in ("train", "valid", "test"):
        tasks.conll_file(tmp_path / f"conll2003/{split}.txt")
    experiment_folder = tmp_path / "chain"
    experiment_folder.mkdir()
    (experiment_folder / "sweep.py").write_text(CHAIN)
    (experiment_folder / "README.md").write_text("<!-- table -->\n<!-- /table -->\n")
    arguments = ["--scale", "paper", "--seeds", "1", "--data", tmp_path]
    arguments += ["--runs", tmp_path / "runs"]
    command = [sys.executable, "-m", "bert_jax", "sweep", experiment_folder, *arguments]
    processes.run(command, env=ONE_DEVICE, timeout=1_800, check=True)
    assert "not run" not in experiment.readme(experiment_folder)
