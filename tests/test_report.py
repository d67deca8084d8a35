"""`bert-jax report`: HTML pages and pictures of runs."""

import json
import pathlib
import re
import shutil
import xml.etree.ElementTree as ET

import jax
import numpy as np
import pytest

from bert_jax import checkpoint, cli, workdir
from bert_jax.config import Config, FinetuneConfig, ModelConfig, OptimConfig, TaskConfig
from bert_jax.data.rows import read_manifest
from bert_jax.errors import UserError
from bert_jax.model.flops import parameter_count
from bert_jax.storage import copies
from bert_jax.tools.report import curves, page, plots, runs, sections
from tests.helpers.runs import VOCABULARY

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "pretrain.py"
ODD = "<b>tuned & $x$"


def pretrain(folder, rows, *changes):
    usual = (
        "steps=6 batch_size=8 evaluate_rows=8 model.positions=32 log_every_steps=2 "
        "evaluate_every_steps=3 checkpoint.every_steps=6 model.dropout=0"
    ).split()
    config = [f"--config.{change}" for change in (*usual, *changes)]
    argv = ["pretrain", f"--config={CONFIG}:L1-H16-A2,32", *config, "--rows", str(rows)]
    assert cli.main([*argv, "--workdir", str(folder)]) == 0
    return folder


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def hand_written(folder, metrics, speed=(), vocab_size=100, **settings):
    """Write the workdir of a fine-tuning run, without checkpoints."""
    model = ModelConfig(
        layers=11, hidden=8, heads=2, feed_forward=16, vocab_size=vocab_size, positions=16,
        masked_lm=False, next_sentence=False, head="sequence", labels=("no", "yes"), **settings,
    )  # fmt: skip
    config = FinetuneConfig(model=model, task=TaskConfig(train="train.csv"), steps=9)
    folder.mkdir(parents=True)
    data = [{"digest": "0" * 64, "examples": {"train": 1234, "dev": 7}, "start": ""}]
    workdir.write_or_check_config(
        folder, config, data, {"best_by": "accuracy", "highest": True}, False, VOCABULARY
    )
    write_lines(folder / "metrics.jsonl", metrics)
    if speed:
        write_lines(folder / "speed.jsonl", speed)
    return folder


@pytest.fixture(scope="module")
def folders(rows, tmp_path_factory):
    """Two pretraining runs, and a fine-tuning run that was killed while writing a line."""
    home = tmp_path_factory.mktemp("runs")
    metrics = [
        {"step": 3, "split": "train", "loss": 0.7, "accuracy": 0.5, "learning_rate": 3e-5},
        {"step": 3, "split": "heldout", "loss": 0.6, "accuracy": 0.75, "f1": 0.5},
        {"step": 6, "split": "train", "loss": float("nan"), "accuracy": 0.5, "learning_rate": 1e-5},
        {"step": 6, "split": "heldout", "loss": 0.5, "accuracy": 0.25, "f1": 0.25},
    ]
    tuned = hand_written(home / ODD, metrics)
    with open(tuned / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "split": "tr')
    return [
        pretrain(home / "one", rows(32, 3)),
        pretrain(home / "other", rows(32, 3), "optim.learning_rate=5e-4"),
        tuned,
    ]


@pytest.fixture(scope="module")
def report(folders, tmp_path_factory):
    """The HTML page of the three runs."""
    path = tmp_path_factory.mktemp("report") / "deep" / "runs.html"
    assert cli.main(["report", *map(str, folders), "--out", str(path)]) == 0
    return path


def data_of(path):
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())
    return json.loads(text[1])


def plot_of(data, name):
    (result,) = (plot for plot in data["plots"] if plot["file"] == name)
    return result


def table_after(opened, heading):
    """Return the cells of the first table below a heading, one list per row."""
    return opened.evaluate(
        """heading => {
          const all = [...document.querySelectorAll("h1, h2, h3, table")];
          const at = all.findIndex(e => e.tagName !== "TABLE" && e.textContent === heading);
          const table = all.slice(at).find(e => e.tagName === "TABLE");
          return [...table.rows].map(row => [...row.cells].map(cell => cell.textContent));
        }""",
        heading,
    )


def test_page_data_contains_every_metric(report, folders):
    data = data_of(report)
    assert data["runs"] == ["one", "other", ODD]
    names = [plot["file"] for plot in data["plots"]]
    assert names[:3] == ["loss", "masked_lm_loss", "next_sentence_loss"]
    quality = ["accuracy", "f1", "masked_lm_accuracy", "next_sentence_accuracy"]
    assert names[3:8] == [*quality, "masked_lm_perplexity"]
    assert names[8:11] == ["learning_rate", "gradient_norm", "real_tokens_per_second"]
    groups = re.findall("<h3>([^<]*)</h3><div class=.plots.>", report.read_text())
    assert groups == list(curves.GROUPS)
    result, expected = {}, {}
    for plot in data["plots"]:
        for line in plot["lines"]:
            if line["run"] is not None:
                points = zip(line["x"]["step"], line["y"], strict=True)
                key = (line["run"], line["split"], plot["file"])
                result[key] = [pytest.approx(point, rel=1e-5, abs=1e-12) for point in points]
    for i, folder in enumerate(folders):
        lines = workdir.read_lines(folder / "metrics.jsonl")
        if i < 2:
            for line in workdir.read_lines(folder / "speed.jsonl"):
                point = (line["step"], line["real_tokens_per_second"])
                expected.setdefault((i, "train", "real_tokens_per_second"), []).append(point)
        for line in lines:
            for name, value in line.items():
                if name not in ("step", "split") and value == value:  # skip NaN
                    key = (i, line["split"], name)
                    expected.setdefault(key, []).append((line["step"], value))
    assert result == expected
    assert len(expected[0, "train", "loss"]) == 3
    assert expected[2, "train", "loss"] == [(3, 0.7)]


def test_x_values_in_tokens_and_hours(report, folders):
    speed = workdir.read_lines(folders[1] / "speed.jsonl")
    tokens = np.cumsum([x["real_tokens_per_second"] * x["seconds"] for x in speed])
    hours = np.cumsum([x["seconds"] for x in speed]) / 3600
    lines = {(x["run"], x["split"]): x for x in plot_of(data_of(report), "loss")["lines"]}
    train, heldout = lines[1, "train"]["x"], lines[1, "heldout"]["x"]
    assert train["step"] == [2, 4, 6]
    assert train["tokens"] == pytest.approx(tokens, rel=1e-5)
    assert train["hours"] == pytest.approx(hours, rel=1e-5)
    assert heldout["step"] == [3, 6]
    assert heldout["tokens"] == pytest.approx([(tokens[0] + tokens[1]) / 2, tokens[2]], rel=1e-5)
    assert "tokens" not in lines[2, "train"]["x"], "no speed.jsonl"
    # The real (not padding) tokens of 6 batches of 8 rows.
    real = [x["real_fraction"] for x in workdir.read_lines(folders[1] / "metrics.jsonl")]
    assert tokens[-1] == pytest.approx(8 * 32 * 2 * sum(real[:2] + real[3:4]), rel=0.05)


def test_clock_of_a_killed_and_resumed_run(tmp_path):
    """The second line times only the last 4 of its 10 steps: an earlier process ran the first 6."""
    metrics = [{"step": 20, "split": "train", "loss": 1.0}]
    speed = [
        {"step": 10, "seconds": 3600.0, "steps_per_second": 10 / 3600, "real_tokens_per_second": 2.0},
        {"step": 20, "seconds": 3600.0, "steps_per_second": 4 / 3600, "real_tokens_per_second": 3.0},
    ]  # fmt: skip
    (run,) = curves.read([str(hand_written(tmp_path / "run", metrics, speed))])
    at = curves.clock(run.speed)
    assert at["step"].tolist() == [0, 10, 20]
    assert at["hours"] == pytest.approx([0, 1, 3.5])
    assert at["tokens"] == pytest.approx([0, 7200, 7200 + 2.5 * 3600 * 3])


def test_downsampling_keeps_endpoints_and_extremes():
    rng = np.random.default_rng(0)
    points = np.stack([np.arange(10_001.0), rng.normal(size=10_001)], 1)
    points[3_333, 1], points[7_777, 1] = 50, -50
    result = curves.downsample(points)
    assert curves.MAX_POINTS - 4 <= len(result) <= curves.MAX_POINTS
    assert (np.diff(result[:, 0]) > 0).all()
    for i in (0, 3_333, 7_777, -1):
        assert points[i].tolist() in result.tolist()
    assert len(curves.downsample(points[:400])) == 400


def test_remote_runs_are_named_by_their_urls(tmp_path, monkeypatch):
    """Their files are read from local copies."""
    monkeypatch.setenv("BERT_JAX_STORAGE_CACHE", str(tmp_path))
    urls = ("gs://bucket/a/base", "gs://bucket/b/base", "s3://bucket/b/base")
    folders = [copies.copy_of(url, "runs") for url in urls]
    for folder in folders:
        hand_written(folder, [{"step": 1, "split": "train", "loss": 1.0}])
    result = curves.read([*map(str, folders)])
    assert [run.name for run in result] == ["a/base", *urls[1:]]


def test_run_names_are_unique(tmp_path):
    metrics = [{"step": 1, "split": "train", "loss": 1.0}]
    for name in (
        "a/x/run",
        "a/y/run",
        "b/y/run",
        "c",
        "many/seed_0",
        "many/seed_2",
        "many/seed_10",
    ):
        hand_written(tmp_path / name, metrics)
    given = ["a/x/run", "a/y/run", "b/y/run", "c", "c/../c", "many"]
    result = curves.read([str(tmp_path / name) for name in given])
    assert [run.name for run in result] == [
        *("x/run", "a/y/run", "b/y/run", "c"), *("many/seed_0", "many/seed_2", "many/seed_10"),
    ]  # fmt: skip


def test_parameter_tables(report, folders, visit):
    _, _, params, _ = checkpoint.load_model(folders[0], "latest")
    count = sum(x.size for x in jax.tree.leaves(params))
    opened = visit(report)
    assert table_after(opened, "3 runs")[1][2] == f"{count:,}"
    assert f"one, other: {count:,} parameters" in opened.inner_text(
        "h2:text-is('Parameters') + details > summary"
    )
    parts, each = table_after(opened, "By part"), table_after(opened, "Each")
    assert [row[0] for row in parts[1:]] == [
        *("embeddings", "encoder/layer_0", "pooler", "masked_lm", "next_sentence"),
    ]
    number = lambda text: float(text.replace(",", ""))  # noqa: E731
    for rows in (parts, each):
        assert sum(number(row[-2]) for row in rows[1:]) == count
    assert sum(number(row[-1]) for row in parts[1:]) == pytest.approx(4 * count / 2**20, abs=0.03)
    result = {row[0]: (json.loads(row[1]), number(row[2])) for row in each[1:]}
    assert result["embeddings/word/embedding"] == ([150, 16], 2400)
    assert len(result) == len(jax.tree.leaves(params))


def test_parameters_with_padded_vocabulary_and_many_layers(tmp_path):
    metrics = [{"step": 1, "split": "train", "loss": 1.0}]
    recorded = curves.read([str(hand_written(tmp_path / "run", metrics, vocab_multiple=64))])
    (shapes,) = sections.parameters(recorded)
    layers = list(dict.fromkeys(p.split("/")[1] for p in shapes if p.startswith("encoder/")))
    assert layers == [f"layer_{i}" for i in range(11)]
    count = parameter_count(shapes, recorded[0].config.model)
    assert count == sum(x.size for x in shapes.values()) - 28 * 8
    text = sections.parameter_tables(recorded, [shapes])
    assert f"run: {count:,} parameters" in text
    assert "; 224 more pad the vocabulary" in text


def test_config_differences_table(report, folders, visit, tmp_path):
    opened = visit(report)
    result = {row[0]: row[1:] for row in table_after(opened, "Config")}
    assert result["optim.learning_rate"] == ["0.0001", "0.0005", "3e-05"]
    assert result["model.layers"] == ["1", "1", "11"]
    assert result["masking.rate"] == ["0.15", "0.15", "—"]
    assert (
        result["data of phase 0"][0] == result["data of phase 0"][1] != result["data of phase 0"][2]
    )
    assert "seed" not in result, "the same in all"
    two, one = tmp_path / "two.html", tmp_path / "one.html"
    two.write_text(sections.differences(curves.read([str(f) for f in folders[:2]])))
    assert table_after(visit(two), "Config")[1:] == [["optim.learning_rate", "0.0001", "0.0005"]]
    one.write_text(sections.differences(curves.read([str(folders[1])])))
    changed = {row[0]: row[1:] for row in table_after(visit(one), "Config")}
    assert changed[""] == ["default", "other"]
    assert changed["optim.learning_rate"] == [str(OptimConfig().learning_rate), "0.0005"]
    assert "optim.beta1" not in changed


def test_final_metrics_table(report, folders, visit):
    columns, *rows = table_after(visit(report), "Final metrics")
    result = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    assert result[f"{ODD}, last"]["accuracy"] == "0.25"
    assert result[f"{ODD}, best accuracy"]["accuracy"] == "0.75"
    assert result[f"{ODD}, best accuracy"]["step"] == "3"
    assert result[f"{ODD}, last"]["masked_lm_loss"] == "—"
    heldout = [x for x in workdir.read_lines(folders[0] / "metrics.jsonl") if x["split"] != "train"]
    best = min(heldout, key=lambda x: x["masked_lm_loss"])
    assert result["one, best masked_lm_loss"]["masked_lm_loss"] == f"{best['masked_lm_loss']:.5g}"
    assert result["one, last"]["loss"] == f"{heldout[-1]['loss']:.5g}"


def test_best_metrics_are_on_the_rows_of_the_last_phase(tmp_path):
    losses = enumerate((2.0, 5.0, 4.0, 4.5), start=1)
    lines = [{"step": step, "split": "heldout", "loss": loss} for step, loss in losses]
    best = {"best_by": "loss", "highest": False, "since": 2}
    run = curves.Recorded("run", tmp_path, Config(), lines, [], [], [], best, [], [])
    assert run.best_heldout == lines[2]
    tied = [*lines, {"step": 5, "split": "heldout", "loss": 4.0}]
    run_with_tie = curves.Recorded("run", tmp_path, Config(), tied, [], [], [], best, [], [])
    assert run_with_tie.best_heldout == tied[4]
    assert run._replace(best=best | {"since": 0}).best_heldout == lines[0]
    assert run._replace(best=best | {"since": 5}).best_heldout is None


def test_page_of_a_run_that_has_just_started(tmp_path, visit):
    folder = hand_written(
        tmp_path / "run", [{"step": 1, "split": "train", "loss": 2.5, "note": "text", "x": None}]
    )
    path = tmp_path / "page.html"
    runs.write([str(folder)], str(path))
    opened = visit(path)
    assert [row[:3] for row in table_after(opened, "Final metrics")[1:]] == [
        ["run, last (training)", "1", "2.5"]
    ]
    assert [plot["file"] for plot in data_of(path)["plots"]] == ["loss"]
    assert table_after(opened, "run")[1][:2] == ["run", "1 of 9"]
    opened.check("input[value=tokens]")
    assert "for lack of speed.jsonl" in opened.inner_text("main")
    opened.focus("figure")
    opened.keyboard.press("End")
    assert "2.5" in opened.inner_text(".reading")


def test_data_tables_and_length_histogram(report, folders, visit, rows, tmp_path):
    manifest = read_manifest(rows(32, 3))
    data = data_of(report)
    (line,) = plot_of(data, "lengths-0")["lines"]
    assert sum(line["y"]) == manifest.train.sequences
    assert line["y"] == list(manifest.length_histogram)
    assert len([plot for plot in data["plots"] if "lengths" in plot["file"]]) == 1, (
        "both runs' rows"
    )
    result = table_after(visit(report), "one; other")
    assert result[1][2:5] == [
        f"{n:,}"
        for n in (manifest.train.sequences, manifest.train.rows, manifest.train.real_tokens)
    ]
    assert result[1][-1] == f"{manifest.train.fill_fraction:.1%}"
    assert table_after(visit(report), "Labeled examples")[1] == [ODD, "1,234", "7"]
    # Copies of a run whose rows are missing, replaced by others, or present.
    copies = {"gone": tmp_path / "none", "others": rows(16, 2), "there": rows(32, 3)}
    for name, place in copies.items():
        output = json.loads((folders[0] / "config.json").read_text())
        output["config"]["phases"][0]["rows"] = str(place)
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(output))
        write_lines(tmp_path / name / "metrics.jsonl", [{"step": 1, "split": "train", "loss": 1.0}])
    for names, actual in (
        (["gone"], "none is not a folder of rows"),
        (["others"], "rows_16_2 now has other rows"),
        (["gone", "there"], None),
    ):
        text = runs.html_of(curves.read([str(tmp_path / name) for name in names]))
        result = re.search("No histogram of lengths: ([^<]*)", text)
        assert actual in result[1] if actual else result is None


def test_page_controls_by_keyboard_and_mouse(report, folders, visit):
    opened = visit(report, viewport={"width": 1280, "height": 900})
    assert opened.title() == "3 runs"
    assert ODD in opened.inner_text(".controls"), "as text"
    figure = opened.locator("figure").first
    chart = figure.locator(".chart")
    assert chart.get_attribute("data-axis") == "step"

    opened.focus("input[value=step]")
    opened.keyboard.press("ArrowRight")
    assert opened.locator("input[value=tokens]").is_checked()
    assert chart.get_attribute("data-axis") == "tokens"
    assert opened.locator("[data-axis=length]").is_visible()

    lines = {(x["run"], x["split"]): x for x in plot_of(data_of(report), "loss")["lines"]}
    figure.focus()
    opened.keyboard.press("Home")
    opened.keyboard.press("ArrowRight")
    reading = figure.locator(".reading")
    second = sorted({x for i in (0, 1) for s in ("train", "heldout") for x in lines[i, s]["x"]["tokens"]})[1]  # fmt: skip
    assert f"real tokens {second:,.5g}".split(".")[0][:14] in reading.inner_text()
    assert "one, held-out" in reading.inner_text()
    opened.keyboard.press("Escape")
    assert reading.inner_text() == ""

    drawn = figure.locator("[data-run]")
    assert sorted(e.get_attribute("data-run") for e in drawn.all()) == [*"0011"]
    opened.focus("input[name=run][value='0']")
    opened.keyboard.press("Space")
    assert sorted(e.get_attribute("data-run") for e in drawn.all()) == [*"11"]

    # Move the mouse over the point of the other run at step 4.
    opened.focus("input[value=tokens]")
    opened.keyboard.press("ArrowLeft")
    y = lines[1, "train"]["y"]
    path = figure.locator("[data-run='1'] path").first
    places = [[float(n) for n in pair.split()] for pair in re.findall(r"[ML]([\d.]+ [\d.]+)", path.get_attribute("d"))]  # fmt: skip
    assert len(places) == len(y) == 3
    ratio = (places[0][1] - places[1][1]) / (places[0][1] - places[2][1])
    assert ratio == pytest.approx((y[0] - y[1]) / (y[0] - y[2]), rel=0.1)
    box = figure.locator("svg").bounding_box()
    opened.mouse.move(box["x"] + places[1][0], box["y"] + places[1][1])
    assert "step 4" in reading.inner_text()
    assert f"other {y[1]:.5g}" in reading.inner_text()
    assert "one" not in reading.inner_text().split()
    mark = figure.locator(".marks circle").first
    at = [float(mark.get_attribute(name)) for name in ("cx", "cy")]
    assert at == pytest.approx(places[1], abs=0.05)

    with opened.expect_download() as download:
        figure.locator("button").click()
    assert download.value.suggested_filename == "loss.svg"
    saved = ET.parse(download.value.path()).getroot()
    drawn = [e.get("data-run") for e in saved.iter() if e.get("data-run")]
    assert set(drawn) == {"1", "2"}
    text = "".join(saved.itertext())
    assert f"— {ODD}" in text
    assert "— one" not in text


def test_zoom_log_scale_and_smoothing(report, visit):
    opened = visit(report, viewport={"width": 1280, "height": 900})
    figure = opened.locator("figure").first
    figure.scroll_into_view_if_needed()
    svg, labels = figure.locator("svg"), figure.locator("svg > text")
    box = svg.bounding_box()
    before = labels.all_text_contents()
    opened.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50)
    opened.mouse.down()
    opened.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 60)
    opened.mouse.up()
    assert opened.is_visible("input[name=reset]")
    for i in (0, 1):  # zoom applies to all plots
        ticks = opened.locator("figure").nth(i).locator("svg > text[text-anchor=middle]")
        steps = [float(text) for text in ticks.all_text_contents()[:-1]]
        assert 3.5 < min(steps) < max(steps) < 5.5
    opened.click("input[name=reset]")
    assert labels.all_text_contents() == before
    figure.focus()
    opened.keyboard.press("+")
    assert labels.all_text_contents() != before
    opened.keyboard.press("0")
    assert labels.all_text_contents() == before

    def places():
        path = figure.locator("[data-run='0'] path").first.get_attribute("d")
        return np.array([pair.split() for pair in re.findall(r"[ML]([\d.]+ [\d.]+)", path)], float)

    straight = places()
    np.testing.assert_allclose(np.diff(straight[:, 0], 2), 0, atol=0.05)  # steps 2, 4, 6
    opened.check("input[name=logx]")
    assert "step (log scale)" in labels.all_text_contents()
    gaps = np.diff(places()[:, 0])
    assert gaps[0] / gaps[1] == pytest.approx(np.log(2) / np.log(1.5), rel=0.01)
    opened.uncheck("input[name=logx]")
    assert len(figure.locator("[data-run='0'] path").all()) == 2
    opened.fill("input[name=smooth]", "0.5")
    assert len(figure.locator("[data-run='0'] path").all()) == 3
    mean = figure.locator("[data-run='0'] path").nth(1).get_attribute("d")
    mean = np.array([pair.split() for pair in re.findall(r"[ML]([\d.]+ [\d.]+)", mean)], float)
    y, raw = [], straight[:, 1]
    for i in range(3):  # weights 1/2, 1/4, …, newest point first
        weights = 0.5 ** np.arange(i, -1, -1)
        y.append(weights @ raw[: i + 1] / weights.sum())
    np.testing.assert_allclose(mean[:, 1], y, atol=0.05)


def test_page_shows_bad_steps_commands_and_samples(folders, tmp_path, visit):
    folder = tmp_path / "one"
    shutil.copytree(folders[0], folder)
    (folder / "incidents" / "step_4").mkdir(parents=True)
    (folder / "incidents" / "step_4" / "incident.json").write_text('{"kind": "spike"}')
    mask = [{"token": "mill", "probability": 0.25}, {"token": "<b>", "probability": 0.125}]
    write_lines(
        folder / "samples.jsonl",
        [{"step": step, "text": "The [MASK].", "masks": [mask]} for step in range(1, 31)],
    )
    path = tmp_path / "page.html"
    runs.write([str(folder)], str(path))
    opened = visit(path)
    incident = opened.locator("figure").first.locator(".incident title")
    assert incident.text_content() == "one: spike at step 4"
    assert opened.locator("figure[aria-label='Sequences by length'] .incident").count() == 0
    headline = opened.inner_text(".headline")
    best = min(x["masked_lm_loss"] for x in workdir.read_lines(folder / "metrics.jsonl") if x["split"] == "heldout")  # fmt: skip
    assert f"best held-out masked-LM loss\n{best:.5g}" in headline
    assert "bad steps\n1" in headline
    command = workdir.read_lines(folder / "starts.jsonl")[0]["command"]
    assert command in opened.locator("pre").text_content()
    rows = table_after(opened, "The [MASK].")
    assert rows[1] == ["1", "mill 25%, <b> 12%"]
    assert [rows[-1][0], len(rows)] == ["30", 13]


def test_page_in_dark_mode(report, visit):
    opened = visit(report, color_scheme="dark")
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = opened.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
    dark, bright = (sum(map(int, re.findall(r"\d+", x)[:3])) for x in (background, ink))
    assert dark < 150 < 600 < bright


def test_element_ids_are_unique(report):
    ids = re.findall(r' id="([^"]+)"', report.read_text())
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_pictures_are_complete_and_reproducible(report, folders, tmp_path, capsys):
    def make(name):
        argv = ["report", *map(str, folders[1:]), "--out", str(tmp_path / f"{name}.svg")]
        assert cli.main([*argv, "--pictures", str(tmp_path / name)]) == 0
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    first = make("first")
    legend = ET.fromstring(first["loss.svg"]).find(".//*[@id='legend_1']")
    assert legend is not None
    assert str(tmp_path / "first" / "loss.pdf") in capsys.readouterr().out
    names = {plot["file"] for plot in data_of(report)["plots"]}
    assert set(first) == {f"{name}{suffix}" for name in names for suffix in (".svg", ".pdf")}
    for name, content in first.items():
        if name.endswith(".svg"):
            assert ET.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
        else:
            assert content.startswith(b"%PDF")
    assert make("second") == first


def test_loss_curve_picture_formats(folders, tmp_path):
    for suffix, begin in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        path = tmp_path / f"curve{suffix}"
        assert cli.main(["report", *map(str, folders), "--out", str(path)]) == 0
        assert path.read_bytes().startswith(begin)
    drawn = re.findall("<!-- (.*), held-out -->", (tmp_path / "curve.svg").read_text())
    assert drawn == ["one", "other", page.html.escape(ODD)], (
        "what texts are drawn stands in comments"
    )


def test_axis_numbers_are_abbreviated():
    results = [plots.short(x) for x in (0, 0.25, 999, 1500, 2e6, 3.3e9, -4e12)]
    assert results == ["0", "0.25", "999", "1.5k", "2M", "3.3B", "-4T"]


def test_bad_input_gives_one_line_error(tmp_path, capsys, monkeypatch):
    metrics = [{"step": 1, "split": "train", "loss": 1.0}]
    bare = hand_written(tmp_path / "bare", metrics)
    (bare / "metrics.jsonl").unlink()
    empty = hand_written(tmp_path / "empty", [])
    half = hand_written(tmp_path / "half", metrics)
    (half / "metrics.jsonl").write_text('{"step": 1, "split"')
    orphan = hand_written(tmp_path / "orphan", metrics)
    (orphan / "config.json").unlink()
    binary = hand_written(tmp_path / "binary", metrics)
    (binary / "metrics.jsonl").write_bytes(b"\xff\xfe\xff")
    good, file = str(hand_written(tmp_path / "good", metrics)), tmp_path / "file"
    file.write_text("")
    for argv, result in (
        ([tmp_path / "gone"], "gone is not a run: it has neither metrics.jsonl nor config.json"),
        (["x" * 300], "is not a run"),
        ([good, bare], "bare has no metrics yet: no metrics.jsonl"),
        ([empty], "empty has no metrics yet: metrics.jsonl has no complete line"),
        ([half], "half has no metrics yet: metrics.jsonl has no complete line"),
        ([orphan], "orphan holds no run: it has no config.json"),
        ([binary], "binary has no metrics yet: metrics.jsonl has no complete line"),
        ([good, "--out", file / "x.html"], "cannot write the page"),
        ([good, "--out", file / "x.svg"], "cannot write the picture"),
        ([good, "--out", tmp_path / "x.doc"], "x.doc: must end in .html"),
        ([good, "--out", tmp_path / "x.html", "--pictures", file], "cannot write the picture"),
    ):
        monkeypatch.chdir(tmp_path)
        assert cli.main(["report", *map(str, argv)]) == cli.EXIT_USER_ERROR
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("bert-jax report: ")
        assert result in line
    assert not (tmp_path / "report.html").exists()
    assert cli.main(["report", good]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert (tmp_path / "report.html").exists()


def test_page_escapes_run_names_and_notes_downsampling(report):
    assert f"more than {curves.MAX_POINTS} points" in report.read_text()
    assert page.html.escape(ODD) in report.read_text()
    assert ODD not in re.sub(r"<script.*?</script>", "", report.read_text(), flags=re.DOTALL)


HELDOUT = {"step": 3, "split": "heldout", "loss": 0.6, "accuracy": 0.5}
FAST = {"step": 3, "steps_per_second": 2.0, "real_tokens_per_second": 100.0}


NOBODY_WROTE = (
    ("metrics.jsonl", [{"step": 3}, HELDOUT]),
    ("metrics.jsonl", [5, HELDOUT]),
    ("metrics.jsonl", [HELDOUT, {**HELDOUT, "accuracy": None, "loss": "x"}]),
    ("metrics.jsonl", [HELDOUT, {**HELDOUT, "loss": 10**400}]),
    ("metrics.jsonl", [{**HELDOUT, "loss": 1e308}, {**HELDOUT, "step": 6, "loss": -1e308}]),
    ("speed.jsonl", [{"step": 3, "steps_per_second": 2.0}, FAST]),
    ("speed.jsonl", [{**FAST, "steps_per_second": float("nan")}, FAST]),
    ("starts.jsonl", [5]),
    ("starts.jsonl", [{"step": 0}]),
)


def test_malformed_lines_are_skipped(tmp_path, capsys):
    """Files of another program or an older version are shown as far as they can be read."""
    folders = []
    for i, (file, lines) in enumerate(NOBODY_WROTE):
        folders.append(hand_written(tmp_path / str(i), [HELDOUT], [FAST]))
        write_lines(folders[-1] / file, lines)
    out = tmp_path / "runs.html"
    for path in (out, tmp_path / "loss.svg"):
        assert cli.main(["report", *map(str, folders), "--out", str(path)]) == 0
    lines = plot_of(data_of(out), "accuracy")["lines"]
    assert [line["y"][0] for line in lines] == [0.5] * len(folders)


def test_unreadable_files_give_one_line_errors(tmp_path, capsys):
    folder = hand_written(tmp_path / "run", [HELDOUT])
    (folder / "starts.jsonl").mkdir()
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "a.html")]) == 2
    assert re.fullmatch(r".*cannot read .*starts.jsonl: .*\n", capsys.readouterr().err)
    (folder / "starts.jsonl").rmdir()
    (folder / "starts.jsonl").write_bytes(b"\xff\xfe")  # undecodable lines are skipped
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "a.html")]) == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "data": None}))
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "a.html")]) == 2
    assert re.fullmatch(
        r".*config.json does not say what the data are.*\n", capsys.readouterr().err
    )


def test_seed_without_metrics_is_skipped(tmp_path, capsys):
    for seed in range(2):
        hand_written(tmp_path / "many" / f"seed_{seed}", [HELDOUT])
    (tmp_path / "many" / "seed_1" / "metrics.jsonl").write_text("")
    assert [run.name for run in curves.read([str(tmp_path / "many")])] == ["many/seed_0"]
    assert capsys.readouterr().err.endswith("skipping runs without metrics: seed_1\n")
    (tmp_path / "many" / "seed_0" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="seed_0 has no metrics yet"):
        curves.read([str(tmp_path / "many")])


def test_differences_include_initial_weights(tmp_path):
    for name, start in (("a", "1234567890ab"), ("b", "ffff")):
        folder = hand_written(tmp_path / name, [HELDOUT])
        output = json.loads((folder / "config.json").read_text())
        output["data"][0]["start"] = start
        (folder / "config.json").write_text(json.dumps(output))
    result = sections.differences(curves.read([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert "initial weights of phase 0</th><td>1234567890</td><td>ffff</td>" in result


@pytest.mark.filterwarnings("error:Glyph")
def test_run_names_with_special_meaning_in_matplotlib(tmp_path):
    names = ("_old", "日本", "b\udcff", r"$\nothing$")  # the last is not valid mathtext
    folders = [hand_written(tmp_path / name, [HELDOUT]) for name in names]
    argv = ["report", *map(str, folders), "--pictures", str(tmp_path / "p")]
    assert cli.main([*argv, "--out", str(tmp_path / "loss.svg")]) == 0
    assert cli.main([*argv, "--out", str(tmp_path / "runs.html")]) == 0
    assert "<!-- _old, held-out -->" in (tmp_path / "loss.svg").read_text()


def test_twenty_runs_have_distinct_colors():
    assert len({plots.color(i) for i in range(20)}) == 20
    assert plots.color(20) == plots.color(0)
