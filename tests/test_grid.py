"""`bert-jax sweep --grid`: points, output files, and the results page."""

import tempfile

import pytest

from bert_jax import cli
from bert_jax.errors import UserError
from bert_jax.tools.sweep import experiment, grid_files

COMMAND = ["pretrain", "--config", "tiny,32", "--rows", "rows", "--config.steps=4"]
CHOICES = {"optim.learning_rate": ["1e-4", "1e-3"], "model": ["L1-H16-A2", "L2-H16-A2"]}
GRID = ["--grid=optim.learning_rate=1e-4,1e-3", "--grid", "model=L1-H16-A2,L2-H16-A2"]


def test_every_combination_is_a_point():
    points = grid_files.points(COMMAND, CHOICES)
    assert [point.facts for point in points] == [
        {"optim.learning_rate": rate, "model": size}
        for rate in ("1e-4", "1e-3")
        for size in ("L1-H16-A2", "L2-H16-A2")
    ]
    assert points[3].command == (
        "pretrain", "--config", "L2-H16-A2,32", "--rows", "rows", "--config.steps=4",
        "--config.optim.learning_rate=1e-3",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--config=base", "--config=L1-H16-A2"),
        ("--config pretrain:base,128=0.9,512=0.1", "--config pretrain:L1-H16-A2,128=0.9,512=0.1"),
        ("--config configs/pretrain.py:base,8", "--config configs/pretrain.py:L1-H16-A2,8"),
    ],
)
def test_model_size_replaces_the_one_in_the_config(given, expected):
    (point,) = grid_files.points(["pretrain", *given.split()], {"model": ["L1-H16-A2"]})
    assert list(point.command) == ["pretrain", *expected.split()]


def test_model_size_becomes_the_argument_of_a_config_file(tmp_path):
    path, sizes = tmp_path / "mine.py", {"model": ["L1-H16-A2"]}
    path.write_text("from bert_jax.configs.pretrain import get_config\n")
    (point,) = grid_files.points(["pretrain", "--config", str(path)], sizes)
    assert point.command == ("pretrain", "--config", f"{path}:L1-H16-A2")
    # Others take no argument, one that is no size, or do not use it.
    path.write_text("from bert_jax.config.schema import Config\nget_config = lambda: Config()\n")
    ignores = tmp_path / "ignores.py"
    ignores.write_text(
        "from bert_jax.config.schema import Config\nget_config = lambda size: Config()\n"
    )
    for config in (path, ignores, "squad"):
        with pytest.raises(UserError, match="--grid model=…"):
            grid_files.points(["pretrain", f"--config={config}"], sizes)
    with pytest.raises(UserError, match=r"missing\.py"):
        grid_files.points(["pretrain", "--config=missing.py"], sizes)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--grid", "steps", "--", *COMMAND], "KEY=VALUE"),
        (["--grid", "steps=1,", "--", *COMMAND], "KEY=VALUE"),
        (["--grid", "steps=1", "--grid", "steps=2", "--", *COMMAND], "already given"),
        (["--grid", "stpes=1,2", "--", *COMMAND], "config.steps"),
        (["--grid", "model=huge", "--", *COMMAND], "'huge'"),
        (["--grid", "steps=1,2"], "after --"),
        (["--grid", "steps=1,2", "--", "vocab", "text"], "pretrain or finetune"),
        (["--grid", "steps=1,2", "--", *COMMAND, "--workdir=x"], "--workdir"),
        (["--grid", "steps=1", "--seeds=3", "--", *COMMAND], "--seeds 3"),
        (["--grid", "steps=1", "--init=x", "--", *COMMAND], "--init x"),
        (["--grid", "steps=1", "--scale=paper", "--", *COMMAND], "--scale paper"),
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
    assert "--config L2-H16-A2,32" in out
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
        }
        for i, point in enumerate(grid_files.points(COMMAND, CHOICES)[:3])
    ]
    blocks = grid_files.blocks(CHOICES, lines)
    table = blocks["table"].markdown(lines, folder)
    assert "| learning_rate=1e-3, model=L1-H16-A2 | 7.0000 |" in table
    assert "| learning_rate=1e-3, model=L2-H16-A2 | not run |" in table
    blocks["curve"].markdown(lines, folder)
    assert (folder / "curve.svg").exists()
    assert experiment.sweep.load(folder, experiment.sweep.SweepArgs()).points[3].facts["model"]
