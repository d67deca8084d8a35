"""`bert-jax report`: the HTML page and the picture of runs."""

import html
import json
import re

import pytest

from bert_jax import cli
from bert_jax.config.schema import Config, FinetuneConfig, PhaseConfig, TaskConfig
from bert_jax.runs import workdir
from bert_jax.tools.report import curves, plots, runs
from tests.helpers.runs import VOCABULARY, refused

ODD = "<b>tuned & $x$"
HELDOUT = {"step": 3, "split": "heldout", "loss": 0.6, "accuracy": 0.5}
FAST = {"step": 3, "steps_per_second": 2.0, "real_tokens_per_second": 100.0}


def hand_written(folder, metrics, speed=(), samples=(), config=None, start="", seed=0):
    """Write the workdir of a run without checkpoints, by default of a fine-tuning run."""
    data = [{"digest": "0" * 64, "start": start}]
    best = {"best_by": "accuracy", "highest": True}
    if config:
        data = [{"digest": str(phase.tokens), "tokens": phase.tokens} for phase in config.phases]
        best = {"best_by": "masked_lm_loss", "highest": False}
    config = config or FinetuneConfig(task=TaskConfig(train="a.csv"), steps=9, seed=seed)
    folder.mkdir(parents=True)
    workdir.write_or_check_config(folder, config, data, best, False, VOCABULARY)
    for name, lines in (("metrics", metrics), ("speed", speed), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def two_phases(seed=0, learning_rate=1e-4):
    """Return the config of a pretraining run of 4 steps on T=8, then 6 steps on T=32."""
    phases = (PhaseConfig(tokens=8, fraction=0.4), PhaseConfig(tokens=32, fraction=0.6))
    config = Config(phases=phases, seed=seed, steps=10)
    config.optim.learning_rate = learning_rate
    return config


def losses(values, split="train", first=1):
    return [
        {"step": step, "split": split, "masked_lm_loss": value}
        for step, value in enumerate(values, first)
    ]


def tables(page):
    """Return the rows of each table of a page, as lists of texts."""
    return [
        [
            [html.unescape(cell) for cell in re.findall("<t[hd].*?>(.*?)</t[hd]>", row)]
            for row in re.findall("<tr>(.*?)</tr>", table)
        ]
        for table in re.findall("<table.*?</table>", page)
    ]


# --- Reading --------------------------------------------------------------------------------------


def test_run_names_are_unique_and_a_seed_without_metrics_is_skipped(tmp_path):
    seeds = [f"many/seed_{seed}" for seed in (0, 2, 10, 11)]
    for name in ("a/x/run", "a/y/run", "b/y/run", "c", *seeds):
        hand_written(tmp_path / name, [HELDOUT] * (name != seeds[-1]))
    given = ["a/x/run", "a/y/run", "b/y/run", "c", "c/../c", "many"]
    result = curves.read([str(tmp_path / name) for name in given])
    assert [run.name for run in result] == ["x/run", "a/y/run", "b/y/run", "c", *seeds[:-1]]


def test_best_metrics_are_on_the_rows_of_the_last_phase():
    lines = losses((2.0, 5.0, 4.0, 4.5), "heldout")
    best = {"best_by": "masked_lm_loss", "highest": False, "since": 2}
    run = curves.Recorded("run", Config(), lines, [], [], best, [])
    assert run.best_heldout == lines[2]
    tie = losses([4.0], "heldout", first=5)
    assert run._replace(metrics=lines + tie).best_heldout == tie[0]
    assert run._replace(best=best | {"since": 0}).best_heldout == lines[0]
    assert run._replace(best=best | {"since": 5}).best_heldout is None


# --- Drawing --------------------------------------------------------------------------------------


def test_curves_are_not_joined_across_phases(tmp_path):
    """The last step of a phase belongs to it; the next phase begins at a vertical line."""
    folder = hand_written(tmp_path / "run", losses([3.0] * 9), config=two_phases())
    (axes,) = plots.draw_loss(curves.read([str(folder)])).axes
    steps = [line.get_xdata().tolist() for line in axes.lines if line.get_alpha()]
    assert steps == [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [4, 4] in [list(line.get_xdata()) for line in axes.lines]


def test_seeds_are_drawn_as_mean_and_range(tmp_path):
    """Copies of a run, and runs with other settings or initial weights, are not seeds of it."""
    values = {0: (4.0, 3.0, 2.0), 1: (5.0, 2.0), 2: (9.0, 1.0, 0.5)}
    folders = [
        hand_written(tmp_path / f"seed {seed}", losses(each), config=two_phases(seed))
        for seed, each in values.items()
    ]
    folders.append(hand_written(tmp_path / "copy", losses((7.0, 7.0)), config=two_phases(0)))
    other = two_phases(3, learning_rate=1.0)
    folders.append(hand_written(tmp_path / "other", losses((8.0, 8.0)), config=other))
    recorded = curves.read([*map(str, folders)])
    figure = plots.draw_loss(recorded)
    (axes,) = figure.axes
    # The steps that all seeds have.
    assert [line.get_ydata().tolist() for line in axes.lines] == [[6.0, 2.0], [7.0] * 2, [8.0] * 2]
    (band,) = axes.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(1, 4), (1, 9), (2, 1), (2, 3)}
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:3] == ["seed 0, …: mean and range of 3 seeds", "copy", "other"]

    tuned = [
        str(hand_written(tmp_path / f"tuned {seed}", [HELDOUT], start=start, seed=seed))
        for seed, start in enumerate("aab")
    ]
    assert [len(seeds) for seeds in curves.by_seed(curves.read(tuned))] == [2, 1]


@pytest.mark.filterwarnings("error:Glyph")
def test_pictures_in_all_formats_with_names_that_matplotlib_would_change(tmp_path):
    names = ("_old", "日本", "b\udcff", r"$\nothing$", ODD)  # the fourth is not valid mathtext
    folders = [str(hand_written(tmp_path / name, [HELDOUT])) for name in names]
    for suffix, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        out = tmp_path / f"a{suffix}"
        assert cli.main(["report", *folders, "--out", str(out)]) == 0
        assert out.read_bytes().startswith(start)
    drawn = out.read_text()
    for name in ("_old", "日本", r"$\nothing$", html.escape(ODD)):
        assert f"<!-- {name} -->" in drawn  # matplotlib's comment on a text


# --- The page -------------------------------------------------------------------------------------


def test_page_is_static_and_has_the_tables_of_two_runs(tmp_path):
    """The first of them was killed while writing a line."""
    metrics = [
        {"step": 3, "split": "train", "loss": 0.7, "gradient_norm": 1.5},
        {"step": 3, "split": "heldout", "loss": 0.6, "accuracy": 0.75},
        {"step": 6, "split": "train", "loss": float("nan"), "note": "text", "x": None},
        {"step": 6, "split": "heldout", "loss": 0.5, "accuracy": 0.25},
    ]
    speed = [{**FAST, "step": 3600, "model_flops_utilization": 0.25}]
    mask = [{"token": "mill", "probability": 0.25}, {"token": "<b>", "probability": 0.125}]
    samples = [{"step": step, "text": "The [MASK].", "masks": [mask]} for step in range(1, 31)]
    folder = hand_written(tmp_path / ODD, metrics, speed, samples)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "split": "tr')
    just_started = hand_written(tmp_path / "b", losses([2.5]), config=two_phases())
    assert runs.write([str(folder), str(just_started)], str(tmp_path / "deep" / "page.html"))
    page = (tmp_path / "deep" / "page.html").read_text()
    assert not re.search(r"<script|script-src|https?://|url\(|@import", page)
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(source.startswith("data:") for source in sources)
    groups = re.findall("<section><h2>(.*?)</h2>", page)
    assert groups == ["Loss", "Quality", "Optimization", "Speed"]
    assert ODD not in page
    headlines, samples, metrics, settings = tables(page)
    assert headlines[1:] == [
        [ODD, "accuracy 0.75 at step 3", "6 of 9", "180k", "0.5", "100", "25%"],
        ["b", "—", "1 of 10", "0", "0", "—", "—"],
    ]
    assert samples[-1] == [ODD, "30", "mill 25%, <b> 12%"]
    assert len(samples) == 9
    assert metrics == [
        ["run", "step", "split", "loss", "accuracy", "masked_lm_loss"],
        [ODD, "3", "heldout", "0.6", "0.75", "—"],
        ["b", "1", "train", "—", "—", "2.5"],
    ]
    changed = {row[0]: row[1:] for row in settings}
    assert changed["steps"] == ["9", "10"]
    assert changed["masking.rate"] == ["—", "0.15"]
    assert "seed" not in changed


# --- Errors ---------------------------------------------------------------------------------------


def test_bad_input_gives_one_line_error(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contents = {"half": b'{"step": 1, "split"', "binary": b"\xff\xfe\xff"}
    for name, content in contents.items():
        (hand_written(tmp_path / name, []) / "metrics.jsonl").write_bytes(content)
    (hand_written(tmp_path / "orphan", [HELDOUT]) / "config.json").unlink()
    (hand_written(tmp_path / "folder", [HELDOUT]) / "speed.jsonl").unlink()
    (tmp_path / "folder" / "speed.jsonl").mkdir()
    good, file = str(hand_written(tmp_path / "good", [HELDOUT])), tmp_path / "file"
    hand_written(tmp_path / "none", [{"step": 1, "split": "train"}])
    file.write_text("")
    for argv, key in (
        *(([name], name) for name in ("gone", *contents)),
        (["orphan"], "orphan holds no run"),
        (["x" * 300], "too long"),
        (["folder"], "speed.jsonl: it is a folder"),
        (["none", "--out", "x.png"], "none has no loss"),
        ([good, "--out", file / "x.html"], "cannot write"),
        ([good, "--out", "x.doc"], "x.doc"),
    ):
        assert key in refused(capsys, "report", *argv)
    assert not (tmp_path / "report.html").exists()
    assert cli.main(["report", good]) == 0
    assert (tmp_path / "report.html").exists()


def test_malformed_lines_are_skipped(tmp_path):
    """Files of another program or an older version are shown as far as they can be read."""
    numbers = [
        {**HELDOUT, "loss": 1e308},
        {**HELDOUT, "step": 6, "loss": -1e308},
        {**HELDOUT, "loss": 10**400},
    ]
    metrics = [{"step": 3}, 5, {**HELDOUT, "accuracy": None, "loss": "x"}, HELDOUT, *numbers]
    speed = [{"step": 3, "steps_per_second": 2.0}, {**FAST, "steps_per_second": float("nan")}]
    masks = (None, ["x"], [{}], [[{"token": "x"}]])
    samples = [{"step": 3, "text": "a [MASK]", "masks": each} for each in masks]
    folder = str(hand_written(tmp_path / "run", metrics, [*speed, FAST], samples))
    assert cli.main(["report", folder, "--out", str(tmp_path / "runs.html")]) == 0
    (curve,) = curves.curves(curves.read([folder]))["accuracy"]
    assert curve.values.tolist() == [[0.5, 0.5]]
