"""Sweep results: the lines of results.jsonl, and the tables and curves of a README."""

import concurrent.futures
import dataclasses
import json
import pathlib

import pytest

from bert_jax import cli
from bert_jax.config.schema import Config, PhaseConfig
from bert_jax.config.sizes import model_size
from bert_jax.runs import workdir
from bert_jax.tools.sweep import Point, SweepArgs, experiment
from bert_jax.tools.sweep.experiment import Claim, Claims, Column, Curves, Intervals, Table
from bert_jax.tools.sweep.folders import PointRun, Runs
from bert_jax.tools.sweep.results import Results, current, lines_of
from tests.helpers.runs import VOCABULARY, refused


def line(score, seed=0, **facts):
    result = {"point": "p", "scale": "small", "command": "bert-jax finetune x", "wall_seconds": 1.0}
    own = {"facts": facts, "metrics": {"score": score}, "seed": seed, "digest": str(facts)}
    return {**result, **own}


KEYS = ("scale", "facts", "digest", "metrics", "command")
LOWEST = {1: 0.5, 2: 0.8, 4: 0.51, 6: 0.518}  # of three seeds, by size
RESULTS = [
    *(
        line(low + 0.01 * i, i, size=size, pretraining_seed=i)
        for size, low in LOWEST.items()
        for i in range(3)
    ),
    *(
        line(score, i, size=size, pretraining_seed=i)
        for size, score in ((7, 0.3), (8, 0.2))
        for i in range(2)
    ),
    line(0.9, size=3),
]
TABLE = Table(
    {name: {"size": size} for size, name in enumerate("abcdefgh", 1)},
    {"score": Column("score")},
    {"a": {"score": 60.0}, "b": {"score": 70.0}},
    "size",
)


def test_table_shows_mean_std_seeds_and_paper_values_and_averages_complete_rows():
    rows = {"a": {"size": 1}, "c": {"size": 3}}
    columns = {"x": Column("score"), "y": Column("score", {"task": "y"})}
    table = Table(rows, columns, {"a": {"x": 60.0, "y": 64.0}}, "size", average=True)
    results = [line(0.5, size=1), line(0.7, size=1, task="y"), line(0.9, size=3)]
    text = table.markdown(results, pathlib.Path())
    assert "| size | x | y | average |\n|---|---|---|---|\n" in text
    # Column x has no filter, so it averages 50 and 70.
    assert "| a | 60.0 ± 14.1 (2) [60.0] | 70.0 [64.0] | 65.0 [62.0] |" in text
    assert "| c | 90.0 | not run | not run |" in text


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (Claim("score", "b", "a"), "(paper: 70.0 and 60.0): **yes**, by 30.0"),
        (Claim("score", "a", "b"), "**the opposite**, by 30.0"),
        (Claim("score", "a", "b", lower=True), "**yes**"),
        # 2.2 standard errors are not significant with three seeds each: p = 0.092.
        (Claim("score", "f", "a"), "not significant (difference +1.8, p = 0.092)"),
        (Claim("score", "g", "h"), "**yes**, by 10.0, p = 0"),
        (Claim("score", "c", "a"), "yes, by 39.0 (p: -)"),
        (Claim("score", "e", "a"), "not run"),
    ],
)
def test_claims_are_tested_for_significance(claim, expected):
    assert expected in Claims(TABLE, [claim]).markdown(RESULTS, pathlib.Path())


def test_fine_tuning_seeds_are_no_replicates_of_pretraining():
    """They are averaged for each pretraining seed, and one pretraining seed is not tested."""
    scores = {1: (0.50, 0.52), 2: (0.60, 0.63), 3: (0.9,)}  # by size and pretraining seed
    results = [
        line(score + 0.001 * i, i, size=size, **({"pretraining_seed": seed} if seed else {}))
        for size, of_seed in scores.items()
        for seed, score in enumerate(of_seed)
        for i in (-1, 0, 1)
    ]
    claims = [Claim("score", *pair) for pair in ("ba", "ca", "cb", "ea")]
    *lines, _, corrected, _, untested = (
        Claims(TABLE, claims).markdown(results, pathlib.Path()).split("\n")
    )
    p = experiment.welch(scores[2], scores[1])
    assert f"by 10.5, p = {p:.2g}" in lines[0]
    assert p > 0.01 > experiment.welch((0.6, 0.6, 0.63, 0.63), (0.5, 0.5, 0.52, 0.52))
    assert [text.endswith("(p: -).") for text in lines] == [False, True, True, False]
    assert "Holm" in corrected
    assert "one pretraining seed" in untested
    runs = [{**each, "command": "bert-jax pretrain x"} for each in RESULTS]
    for each in runs:  # the seed of a pretraining run is its pretraining seed
        each["facts"] = {"size": each["facts"]["size"]}
    assert "**yes**" in Claims(TABLE, [Claim("score", "b", "a")]).markdown(runs, pathlib.Path())


def test_p_values_are_corrected_for_the_number_of_tests():
    assert experiment.holm([0.01, 0.04, None, 0.03, 0.9]) == pytest.approx(
        [0.04, 0.09, None, 0.09, 0.9]
    )
    claims = [Claim("score", *pair) for pair in ("ba", "da", "fa")]
    texts = Claims(TABLE, claims).markdown(RESULTS, pathlib.Path()).split("\n")
    assert "yes" in texts[0]
    assert ["p = 0.29)" in texts[1], "p = 0.18)" in texts[2]] == [True, True]  # 0.092 without


def test_newest_results_of_a_point_replace_older_ones():
    """Older results do not count as extra seeds after a rerun with more seeds or other settings."""
    old = [line(0.5, seed, size=1) for seed in range(3)]
    new = [{**line(0.6, seed, size=1), "digest": "new"} for seed in range(5)]
    other = [line(0.7, size=2), {**line(0.8, size=1), "scale": "paper"}]
    verb = {**line(0.9, size=1), "command": "bert-jax pretrain x"}
    bare = [{**line(0.1), "digest": digest} for digest in ("rows128", "rows512")]
    results = [*old, *other, verb, *bare, *new]
    assert current(results) == [*other, verb, *bare, *new]


def test_newest_execution_counts(tmp_path):
    results = Results(tmp_path)
    old, new = line(0.5, size=1), line(float("nan"), size=1)
    edited = {**line(0.7, size=1), "digest": "edited"}
    for added, num_lines in ((old, 1), (new, 2), (edited, 3), (new, 4)):
        for commit in "ab":  # reading a finished point again adds nothing
            results.add([{**added, "commit": commit}])
            assert len(results.read()) == num_lines
            (kept,) = current(results.read())
            assert str(kept["metrics"]) == str(added["metrics"])


def test_truncated_and_outdated_result_lines(write_sweep_file, capsys):
    folder = write_sweep_file(BLOCKS).parent
    (folder / "README.md").write_text("<!-- sizes -->\n<!-- /sizes -->\n")
    results, report = Results(folder), ["report", str(folder)]
    whole = json.dumps(line(0.5, size=1))
    # A last line truncated by a kill is ignored, and removed by the next write.
    results.path.write_text(f"{whole}\n{whole[:40]}")
    assert results.read() == [line(0.5, size=1)]
    results.add([line(0.6, 1, size=1), line(0.5, size=1)])
    assert results.read() == [line(0.5, size=1), line(0.6, 1, size=1)]
    assert results.path.read_text().endswith("}\n")
    # A complete last line without a newline is kept.
    results.path.write_text(whole)
    results.add([line(0.6, 1, size=1)])
    assert results.read() == [line(0.5, size=1), line(0.6, 1, size=1)]
    without = ({k: v for k, v in line(0.5).items() if k != key} for key in KEYS)
    for wrong, expected in (
        (whole[:40] + "\n" + whole, "line 1 "),
        (whole + "\n" + whole[:40] + "\n", "line 2 "),
        (f"{whole}\n[1]\n", "line 2 has no 'point'"),
        *((json.dumps(old), f"no {key!r}") for key, old in zip(KEYS, without, strict=True)),
        (json.dumps({**line(0.5, size=1), "step": 7}), "no 'real_tokens'"),
    ):
        results.path.write_text(wrong + "\n")
        assert expected in refused(capsys, *report)


def test_concurrent_writers_store_each_result_once(tmp_path):
    def add(_):
        for seed in range(50):
            Results(tmp_path).add([line(0.5, seed, size=1)])

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(add, range(3)))
    assert sorted(result["seed"] for result in Results(tmp_path).read()) == list(range(50))


def result_of_run(tmp_path, metrics, speed=()):
    """Return the result of a pretraining point, given the lines of its metrics and speed."""
    point_run = PointRun(Point("m", ("pretrain", "--rows", "r")), Runs(tmp_path), tmp_path)
    out = point_run.files
    out.mkdir(parents=True)
    config = Config(model=model_size("mini"), phases=(PhaseConfig(rows="r"),), steps=400)
    config.model.vocab_size = 30_522
    best = {"best_by": "masked_lm_loss", "highest": False}
    workdir.write_or_check_config(out, config, [{"digest": ""}], best, False, VOCABULARY)
    start = {"step": 0, "commit": "c", "devices": "1 cpu", "versions": {}}
    for name, lines in (("metrics", metrics), ("speed", speed), ("starts", [start])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (result,) = lines_of(point_run, SweepArgs(data=tmp_path))
    return result


def test_results_without_heldout_rows_are_those_of_training(tmp_path):
    lines = [{"step": step, "split": "train", "masked_lm_loss": 9.0 - step} for step in (2, 4)]
    result = result_of_run(tmp_path, lines)
    assert result["metrics"] == {"train.masked_lm_loss": 5.0}
    assert result["step"] == 4
    assert not any(result["curve"].values())
    # 11.17M in BertModel, the transform and bias of the decoder, next-sentence head.
    assert result["parameters"] == 11_170_560 + 66_304 + 30_522 + 514


def test_results_of_a_resumed_run_count_all_steps(tmp_path):
    """A run that was stopped at step 290 logs steps 201 to 300 with the time of the last ten."""
    rates = {"steps_per_second": 2.0, "real_tokens_per_second": 30.0, "flops_per_second": 7.0}
    seconds = {100: 50.0, 200: 50.0, 300: 5.0, 400: 50.0}
    speed = [{"step": step, "seconds": each, **rates} for step, each in seconds.items()]
    metrics = [{"step": step, "split": "heldout", "masked_lm_loss": 1.0} for step in (250, 400)]
    result = result_of_run(tmp_path, metrics, speed)
    assert (result["step_seconds"], result["real_tokens"], result["flops"]) == (200, 6000, 1400)
    assert result["curve"] == {
        "step": [250, 400],
        "real_tokens": [3750, 6000],
        "seconds": [125, 200],
        "loss": [1.0, 1.0],
    }


def test_curves_show_means_over_seeds(tmp_path):
    def curve(seed):
        """Return the curve of a seed: packed rows have slightly different numbers of tokens."""
        losses = {"step": [1, 2], "loss": [3.0 + seed, 2.0 + seed]}
        return {**losses, "real_tokens": [10 + 4 * seed, 20 + 8 * seed]}

    results = [{**line(0, seed, kind="x"), "curve": curve(seed)} for seed in range(2)]
    curves = Curves("c.svg", {"x": {"kind": "x"}}, "step", "loss", ("step", "loss"))
    assert curves.points(results, {"kind": "x"}) == [(1, 3.5), (2, 2.5)]
    by_tokens = dataclasses.replace(curves, x="real_tokens")
    assert by_tokens.points(results, {"kind": "x"}) == [(12, 3.5), (24, 2.5)]
    assert curves.markdown(results, tmp_path) == "![loss by step](c.svg)"
    assert (tmp_path / "c.svg").exists()
    by_size = Curves("d.svg", {"all": {}}, "size", "score", ("size", "score"))
    assert by_size.points(RESULTS, {})[:2] == [(1, pytest.approx(0.51)), (2, pytest.approx(0.81))]
    assert by_size.markdown([], tmp_path) == "not run"


def test_intervals_are_those_of_student_over_seeds(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(experiment.plots, "save", lambda figure, path: figures.append(figure))
    results = [
        *(line(score, i, size=1) for i, score in enumerate((1.0, 2.0, 3.0))),
        line(5.0, size=2),
    ]
    rows = {name: {"size": size} for size, name in enumerate("abc", 1)}
    text = Intervals(rows, ["score"]).markdown(results, tmp_path)
    assert text == "![score](score.svg)"
    ((axes,),) = [figure.axes for figure in figures]
    (several, _, (bar,)), (one, _, no_bars) = axes.containers
    # 2 ± 4.3027 / √3, the quantile of Student's t with 2 degrees of freedom.
    (((low, y), (high, _)),) = bar.get_segments()
    assert (low, high, y) == (pytest.approx(-0.4841, abs=1e-4), pytest.approx(4.4841, abs=1e-4), 0)
    assert [tuple(*dot.get_xydata()) for dot in (several, one)] == [(2, 0), (5, 1)]
    assert not no_bars
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]


BLOCKS = """
from bert_jax.tools.sweep.experiment import Column, Table

def get_points(given):
    return []

def get_blocks(results):
    return {"sizes": Table({"a": {"size": 1}}, {"score": Column("score")})}
"""


def test_report_updates_only_the_blocks_of_a_readme(write_sweep_file, capsys):
    folder = write_sweep_file(BLOCKS).parent
    readme = folder / "README.md"
    readme.write_text("# Mine\n\n<!-- sizes -->\nold\n<!-- /sizes -->\n\nAfter.\n")
    Results(folder).add([line(0.5, size=1)])
    assert cli.main(["report", str(folder)]) == 0
    text = readme.read_text()
    assert text.startswith("# Mine\n\n<!-- sizes -->\n|  | score |\n|---|---|\n| a | 50.0 |\n<!--")
    assert text.endswith("\n\nAfter.\n")
    assert experiment.readme(folder) == text
    for wrong, expected in (
        ("<!-- other -->\n<!-- /other -->\n" + text, "'other'"),
        ("# Mine\n", "<!-- sizes -->"),
    ):
        readme.write_text(wrong)
        assert expected in refused(capsys, "report", folder)
    assert "--out" in refused(capsys, "report", folder, "--out", "x")
