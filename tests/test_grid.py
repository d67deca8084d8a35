"""`bert-jax sweep --grid`: points, output files, and the results page."""

import dataclasses
import tempfile

import pytest

from bert_jax import cli
from bert_jax.config import flags
from bert_jax.errors import UserError
from bert_jax.tools.sweep import experiment, grid_files

COMMAND = ["pretrain", "--config", "tiny,32", "--rows", "rows", "--config.steps=4"]
CHOICES = {"optim.learning_rate": ["1e-4", "1e-3"], "model": ["L1-H16-A2", "L2-H16-A2"]}
SHAPES = {"L1-H16-A2": (1, 16, 2), "tiny": (2, 128, 2), "base": (12, 768, 12)}
GRID = ["--grid=optim.learning_rate=1e-4,1e-3", "--grid", "model=L1-H16-A2,L2-H16-A2"]


def configs(command, **choices):
    points = grid_files.points(command.split(), choices)
    return [flags.load(flags.split([*point.command[1:]])[0]) for point in points]


def test_model_size_changes_only_the_shape_of_the_config():
    command = "pretrain --config mini,8=0.5,32=0.5 --config.steps=9"
    (base,) = configs(command, steps=["9"])
    for size, config in zip(SHAPES, configs(command, model=[*SHAPES]), strict=True):
        layers, hidden, heads = SHAPES[size]
        shape = {"layers": layers, "hidden": hidden, "heads": heads, "feed_forward": 4 * hidden}
        expected = dataclasses.replace(base, model=dataclasses.replace(base.model, **shape))
        assert config == expected


@pytest.mark.parametrize(
    ("command", "choices", "expected"),
    [
        ("mini", {"model.hidden": ["128", "64"]}, [512, 256]),
        ("modern-base", {"model": ["L2-H128-A2"]}, [192]),
        ("mini", {"model.hidden": ["64"], "model.feed_forward": ["8", "9"]}, [8, 9]),
        ("mini --config.model.feed_forward=8", {"model": ["tiny"]}, [8]),
        ("mini --config.model.feed_forward 8", {"model.hidden": ["64"]}, [8]),
    ],
)
def test_feed_forward_changes_with_hidden_unless_it_is_given(command, choices, expected):
    found = configs(f"pretrain --config {command}", **choices)
    assert [config.model.feed_forward for config in found] == expected


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--grid", "steps=1,", "--", *COMMAND], "KEY=VALUE"),
        (["--grid", "steps=1", "--grid", "steps=2", "--", *COMMAND], "already given"),
        (["--grid", "stpes=1,2", "--", *COMMAND], "config.steps"),
        (["--grid", "model=huge", "--", *COMMAND], "'huge'"),
        (["--grid", "model=tiny,modern-base", "--", *COMMAND], "give it to --config"),
        (["--grid", "model=tiny", "--", "pretrain", "--rows=x"], "add --config"),
        (["--grid", "steps=1,2"], "after --"),
        (["--grid", "steps=1,2", "--", "vocab", "text"], "pretrain or finetune"),
        (["--grid", "steps=1,2", "--", *COMMAND, "--workdir=x"], "--workdir"),
        (["--grid", "steps=1", "--seeds=3", "--", *COMMAND], "--seeds 3"),
        (["here", "--", *COMMAND], "--grid"),
        ([], "sweep.py"),
    ],
)
def test_invalid_arguments_are_rejected_before_anything_is_written(
    arguments, key, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for options in ([], ["--dry-run"]):
        assert cli.main(["sweep", *options, *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert key in line
    assert not list(tmp_path.iterdir())


def test_dry_run_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cli.main(["sweep", "--dry-run", *GRID, "--", *COMMAND]) == 0
    out = capsys.readouterr().out
    assert "4 points" in out
    assert "--config.model.layers=2" in out
    assert not list(tmp_path.iterdir())


def test_grid_results_page(tmp_path):
    folder = tmp_path / "learning_rate_model"
    grid_files.write(folder, COMMAND, CHOICES)
    grid_files.write(folder, COMMAND, CHOICES)  # the same grid again: a resume
    with pytest.raises(UserError, match="learning_rate_model"):
        grid_files.write(folder, COMMAND, {"steps": ["1", "2"]})
    lines = [
        {
            "facts": point.facts,
            "metrics": {"masked_lm_loss": 5.0 + i},
            "curve": {"step": [2, 4], "loss": [6.0, 5.0 + i]},
            **({"parameters": 14_390} if i else {}),  # results of older versions have none
        }
        for i, point in enumerate(grid_files.points(COMMAND, CHOICES)[:3])
    ]
    blocks = grid_files.blocks(CHOICES, lines)
    table = blocks["table"].markdown(lines, folder)
    assert "| learning_rate=1e-4, model=L1-H16-A2 |  | 5.0000 |" in table
    assert "| learning_rate=1e-3, model=L1-H16-A2 | 14.39k | 7.0000 |" in table
    assert "| learning_rate=1e-3, model=L2-H16-A2 |  | not run |" in table
    assert blocks["metrics"].markdown(lines, folder) == "![masked_lm_loss](masked_lm_loss.svg)"
    blocks["curve"].markdown(lines, folder)
    assert {path.name for path in folder.glob("*.svg")} == {"curve.svg", "masked_lm_loss.svg"}
    assert experiment.sweep.load(folder, experiment.sweep.SweepArgs()).points[3].facts["model"]
    text = (folder / "README.md").read_text()
    assert all(f"<!-- {name} -->" in text for name in blocks)


def test_seeds_of_a_grid_are_one_row(tmp_path):
    seeds = {"seed": ["0", "1"]}
    lines = [
        {"facts": point.facts, "metrics": {"loss": 5.0 + float(point.facts["seed"])}}
        for point in grid_files.points(COMMAND, CHOICES | seeds)
    ]
    table = grid_files.blocks(CHOICES | seeds, lines)["table"].markdown(lines, tmp_path)
    assert "| learning_rate=1e-4, model=L1-H16-A2 |  | 5.5000 ± 0.7071 (2) |" in table
    assert "| all |  | 5.5000" in grid_files.blocks(seeds, lines)["table"].markdown(lines, tmp_path)
