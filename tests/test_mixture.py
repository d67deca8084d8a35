"""Mixtures of row folders: shares, order, repetition, held-out losses by folder, resuming."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from bert_jax import cli
from bert_jax.config.flags import load
from bert_jax.config.schema import SourceConfig, take_rows
from bert_jax.data.loader import RowDataset, batches
from bert_jax.data.mixture import Mixture, token_shares
from bert_jax.data.prepare import prepare
from bert_jax.data.shuffle import shuffled
from bert_jax.errors import UserError
from bert_jax.objectives import pretraining
from bert_jax.runs import workdir
from bert_jax.training.evaluate import evaluate_workdir
from tests.helpers.runs import arguments, assert_same_run, refused

TWO = ",32=0.5,32=0.5"


class Numbered(RowDataset):
    """Stand-in for a dataset of `count` rows of `tokens` tokens: (number of the dataset, number of the row)."""

    def __init__(self, name, count, tokens):
        self.name, self.count = name, count
        train = SimpleNamespace(rows=count, real_tokens=count * tokens)
        self.manifest = SimpleNamespace(train=train)  # pyright: ignore

    def __len__(self):
        return self.count

    def read(self, indices):
        return {"tokens": np.array([[self.name, i] for i in indices])}


def mix(sizes, weights, used, repeats=True):
    datasets = [Numbered(name, *size) for name, size in enumerate(sizes)]
    return Mixture(datasets, weights, 0.0, used, repeats)


def rows_of(mixture, first, end):
    return mixture.read(mixture.indices(np.arange(first, end), 3))["tokens"].tolist()


def test_order_is_that_of_a_loop_with_the_shares_of_the_tokens():
    # Rows of the second folder are half full, so it needs twice as many.
    mixture = mix([(50, 100), (1000, 50), (7, 100)], [0.5, 0.4, 0.1], [20, 0, 0])
    expected, counts, order = np.array([0.5, 0.8, 0.1]) / 1.4, [20, 0, 0], rows_of(mixture, 0, 500)
    for position, (name, row) in enumerate(order):
        assert mixture.rows_before(position).tolist() == counts
        assert row == shuffled([counts[name]], (50, 1000, 7)[name], 3)[0]
        counts[name] += 1
    for first in (0, 65_500):  # also where the pattern begins again
        names = [name for name, _ in rows_of(mixture, first, first + 100)]
        assert np.abs(np.bincount(names) - 100 * expected).max() < 2.5
    before = mixture.rows_before(200_000) - [20, 0, 0]
    np.testing.assert_allclose(before / 200_000, expected, atol=2e-5)
    whole = [batch["tokens"] for batch in batches(mixture, 12, 3, 5, 8)]
    parts = zip(*(batches(mixture, 12, 3, 5, 8, i, 4) for i in range(4)), strict=True)
    np.testing.assert_array_equal(whole, [np.concatenate([b["tokens"] for b in p]) for p in parts])
    assert np.concatenate(whole).tolist() == order[60:96]


@pytest.mark.parametrize("used", [[0, 4, 0], [0, 20, 0], [30, 20, 0]])
def test_folders_without_rows_left_are_left_out(used):
    mixture = mix([(30, 10), (20, 10), (1000, 10)], [0.4, 0.3, 0.3], used, repeats=False)
    total = 1050 - sum(used)
    order = rows_of(mixture, 0, total)
    assert len({*map(tuple, order)}) == total
    assert rows_of(mixture, 40, 90) == order[40:90]
    for position in (0, 10, 54, 200):
        expected = np.bincount([name for name, _ in order[:position]], minlength=3) + used
        assert mixture.rows_before(position).tolist() == expected.tolist()
    assert {name for name, _ in rows_of(mixture, total, total + 9)} == {
        2
    }  # the last one is repeated


def test_weights_and_temperature():
    p = np.array([100_000, 1_000, 10]) / 101_010
    np.testing.assert_allclose(token_shares([1.0] * 3, [100_000, 1_000, 10], 1.0), p)
    # XLM: q = p ** alpha / sum of p ** alpha, with alpha = 0.5.
    expected = p**0.5 / (p**0.5).sum()
    np.testing.assert_allclose(token_shares([1.0] * 3, [100_000, 1_000, 10], 2.0), expected)
    with pytest.raises(UserError, match="1/65,536 or more"):
        mix([(10, 10), (10, 10)], [1.0, 1e-6], [0, 0])
    one, two = load(arguments()), load(arguments(phases=TWO))
    mixed = (SourceConfig("gs://a/x=1", 0.7), SourceConfig("b", 2.0))
    for folders in (["gs://a/x=1=0.7,b=2"], ["gs://a/x=1=0.7", "b=2"]):
        take_rows(one, folders)
        assert (one.phases[0].rows, one.phases[0].mixture) == ("", mixed)
    take_rows(two, ["a,b=1", "gs://a/x=1=0.7,b=2"])
    assert [phase.folders for phase in two.phases] == [["a,b=1"], ["gs://a/x=1", "b"]]


def test_run_on_a_mixture(rows, tmp_path, capsys):
    (tmp_path / "text").write_text("\n\n".join(f"a river {n}.\nthe war." for n in range(80)))
    other = tmp_path / "notes"
    options = {"sequences": 3, "heldout_fraction": 0.2, "workers": 1}
    prepare([str(tmp_path / "text")], str(rows()), str(other), tokens=32, **options)
    mixed, folder = f"{rows()}=0.7,{other}=0.3", tmp_path / "run"
    changes = ("steps=12", "evaluate_every_steps=4", "checkpoint.every_steps=4")
    settings = arguments(*changes, "phases[0].batch_size=16", phases=TWO)
    argv = ["pretrain", *settings, "--rows", mixed, "--rows", mixed, "--json"]
    assert cli.main([*argv, "--workdir", str(folder)]) == 0
    end, last = json.loads(capsys.readouterr().out.splitlines()[-1]), {}
    for line in workdir.read_steps(folder / "metrics.jsonl"):
        last |= line if line["split"] == "heldout" else {}
    losses = [
        evaluate_workdir(str(folder), str(place), "12")[1]["masked_lm_loss"]
        for place in (rows(), other)
    ]
    logged = [last[f"masked_lm_loss/{name}"] for name in ("rows_32_3", "notes")]
    assert logged == [end[f"masked_lm_loss/{name}"] for name in ("rows_32_3", "notes")]
    np.testing.assert_allclose(logged, losses, atol=1e-6)
    assert last["masked_lm_loss"] == pytest.approx(np.dot(losses, [0.7, 0.3]), abs=1e-6)
    text = (folder / "log.txt").read_text()
    assert "mixture: rows_32_3 70.0% of the tokens, " in text
    assert text.count(f"(rows_32_3 {losses[0]:.3f}, notes {losses[1]:.3f})") == 2  # also at the end
    # The second phase continues the epochs of both folders.
    config = load(settings)
    take_rows(config, [mixed, mixed])
    _, _, _, phases = pretraining.make_phases(config)
    start = len(RowDataset(rows(), "train"))
    seen = [i for phase in phases for step in range(6) for i in phase.row_indices(step)]
    first = [i for i in seen if i < start]
    assert first == shuffled(np.arange(len(first)), start, config.seed).tolist()

    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints" / "12")
    assert cli.main([*argv, "--workdir", str(copy)]) == 0
    assert "resuming at step 8" in capsys.readouterr().err
    assert_same_run(copy, folder)
    argv = ["pretrain", *arguments(), "--workdir", folder, "--rows"]
    error = refused(capsys, *argv, f"{rows()}=1,{rows(32, 2)}=1")
    assert "sequences is 3 and 2: to mix rows, prepare" in error
    assert "occurs twice" in refused(capsys, *argv, f"{rows()}=1,{rows()}=1")
