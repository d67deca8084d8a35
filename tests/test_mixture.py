"""Mixtures of row folders: shares, order, repetition, held-out losses by folder, resuming."""

import collections
import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from bert_jax import cli
from bert_jax.config.flags import load
from bert_jax.config.schema import SourceConfig, take_rows
from bert_jax.data.loader import RowDataset, batches, row_indices
from bert_jax.data.mixture import Mixture, token_shares
from bert_jax.data.prepare import prepare
from bert_jax.data.shuffle import shuffled
from bert_jax.errors import UserError
from bert_jax.objectives import pretraining
from bert_jax.runs import workdir
from bert_jax.training.evaluate import evaluate_workdir
from tests.helpers.runs import arguments, assert_same_run, refused


class Numbered(RowDataset):
    """Stand-in for a dataset of `count` rows of `tokens` tokens, which hold the name of the dataset."""

    def __init__(self, name, count, tokens):
        self.name, self.count = name, count
        train = SimpleNamespace(rows=count, real_tokens=count * tokens)
        self.manifest = SimpleNamespace(train=train)  # pyright: ignore

    def __len__(self):
        return self.count

    def read(self, indices):
        return {"tokens": np.array([[self.name, i] for i in indices]).reshape(-1, 2)}


def mix(sizes, weights, temperature=0.0, used=None, repeats=True):
    datasets = [Numbered(name, *size) for name, size in enumerate(sizes)]
    return Mixture(datasets, weights, temperature, used or [0] * len(sizes), repeats)


def rows_of(mixture, first, end, seed=3):
    """Return (folder, row) at the positions from `first` to `end`."""
    indices = mixture.indices(np.arange(first, end), seed)
    return list(map(tuple, mixture.read(indices)["tokens"].tolist()))


def test_every_batch_has_the_shares_of_the_tokens():
    # Rows of the second folder are half full, so it needs twice as many.
    mixture = mix([(50, 100), (1000, 50), (7, 100)], [0.5, 0.4, 0.1])
    expected = np.array([0.5, 0.8, 0.1]) / 1.4
    for first, size in (
        (0, 32),
        (70_000, 256),
        (65_500, 100),
    ):  # also where the pattern begins again
        counts = collections.Counter(name for name, _ in rows_of(mixture, first, first + size))
        for name, share in enumerate(expected):
            assert abs(counts[name] - share * size) < 2.5
    np.testing.assert_allclose(mixture.rows_before(200_000) / 200_000, expected, atol=2e-5)
    np.testing.assert_allclose(mixture.shares, [0.5, 0.4, 0.1])


def test_folders_keep_their_own_shuffled_order():
    """The order is that of a loop over positions which counts the rows of each folder."""
    mixture = mix([(50, 10), (300, 10)], [1.0, 3.0], used=[20, 0])
    counts = [20, 0]
    for position, (name, row) in enumerate(rows_of(mixture, 0, 500)):
        assert mixture.rows_before(position).tolist() == counts
        assert row == shuffled([counts[name]], (50, 300)[name], 3)[0]
        counts[name] += 1
    assert rows_of(mixture, 123, 456) == rows_of(mixture, 0, 500)[123:456]
    whole = [b["tokens"].tolist() for b in batches(mixture, 12, 3, 5, 8)]
    parts = zip(*(batches(mixture, 12, 3, 5, 8, i, 4) for i in range(4)), strict=True)
    joined = [list(itertools.chain.from_iterable(b["tokens"].tolist() for b in p)) for p in parts]
    assert whole == joined
    assert row_indices(mixture, 12, 3, 5) == mixture.indices(np.arange(60, 72), 3).tolist()


def test_folders_without_rows_left_are_left_out():
    mixture = mix([(30, 10), (20, 10), (1000, 10)], [0.4, 0.3, 0.3], used=[0, 4, 0], repeats=False)
    order = rows_of(mixture, 0, 600)
    counts = collections.Counter(name for name, _ in order)
    assert (counts[0], counts[1]) == (30, 16)
    assert len(set(order)) == len(order)
    first = max(i for i, (name, _) in enumerate(order) if name == 1)
    assert 50 <= first < 58  # 16 / 0.3 rows
    assert rows_of(mixture, 40, 90) == order[40:90]
    for position in (0, 10, 54, 70, 200):
        names = [name for name, _ in order[:position]]
        expected = np.bincount(names, minlength=3) + np.array([0, 4, 0])
        assert mixture.rows_before(position).tolist() == expected.tolist()
    # The last folder left is repeated.
    again = collections.Counter(rows_of(mixture, 0, 2046))
    assert sorted(again.values()) == [1] * 46 + [2] * 1000


def test_temperature_raises_the_share_of_small_folders():
    tokens = [100_000, 1_000, 10]
    np.testing.assert_allclose(token_shares([1.0] * 3, tokens, 1.0), np.array(tokens) / sum(tokens))
    # XLM: the probability q = p ** alpha / sum of p ** alpha, with alpha = 0.5.
    p = np.array(tokens) / sum(tokens)
    np.testing.assert_allclose(token_shares([1.0] * 3, tokens, 2.0), p**0.5 / (p**0.5).sum())
    np.testing.assert_allclose(
        token_shares([1.0, 3.0, 0.5], tokens, 0.0), np.array([1, 3, 0.5]) / 4.5
    )
    with pytest.raises(UserError, match="1/65,536 or more"):
        mix([(10, 10), (10, 10)], [1.0, 1e-6])


def test_rows_option_names_mixtures():
    one, two = load(arguments()), load(arguments(phases=",32=0.5,32=0.5"))
    mixed = (SourceConfig("gs://a/x=1", 0.7), SourceConfig("b", 2.0))
    for folders in (["gs://a/x=1=0.7,b=2"], ["gs://a/x=1=0.7", "b=2"]):
        take_rows(one, folders)
        assert (one.phases[0].rows, one.phases[0].mixture) == ("", mixed)
    take_rows(two, ["a,b=1", "gs://a/x=1=0.7,b=2"])
    assert [phase.folders for phase in two.phases] == [["a,b=1"], ["gs://a/x=1", "b"]]
    assert (two.phases[0].mixture, two.phases[1].mixture) == ((), mixed)
    with pytest.raises(UserError, match="3 folders for 2 phases"):
        take_rows(two, ["a=1", "b=1", "c"])


# --- Runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(rows, tmp_path_factory):
    """Rows of other texts, with the vocabulary of `rows`."""
    folder = tmp_path_factory.mktemp("other")
    words = ["morning", "bridge", "war", "letter", "river"]
    texts = "\n\n".join(
        "\n".join(f"a {words[(n + m) % 5]} near a {words[n % 3]}." for m in range(n % 4 + 3))
        for n in range(60)
    )
    (folder / "text.txt").write_text(texts)
    options = {"sequences": 3, "heldout_fraction": 0.2, "workers": 1}
    prepare([str(folder / "text.txt")], str(rows()), str(folder / "notes"), tokens=32, **options)
    return folder / "notes"


def test_run_on_a_mixture(rows, other, tmp_path, capsys):
    mixed = f"{rows()}=0.7,{other}=0.3"
    changes = (
        "steps=12",
        "evaluate_every_steps=4",
        "checkpoint.every_steps=4",
        "log_every_steps=4",
    )
    changes += ("checkpoint.keep_last=3", "phases[0].batch_size=16")
    argv = ["pretrain", *arguments(*changes, phases=",32=0.5,32=0.5")]
    argv += ["--rows", mixed, "--rows", mixed, "--json"]
    folder = tmp_path / "run"
    assert cli.main([*argv, "--workdir", str(folder)]) == 0
    output = capsys.readouterr().out.splitlines()
    heldout = [x for x in workdir.read_steps(folder / "metrics.jsonl") if x["split"] == "heldout"]
    names = ("rows_32_3", "notes")
    by_folder = []
    for name, place in zip(names, (rows(), other), strict=True):
        _, metrics = evaluate_workdir(str(folder), str(place), "12")
        key = f"masked_lm_loss/{name}"
        assert metrics["masked_lm_loss"] == pytest.approx(heldout[-1][key], abs=1e-6)
        assert json.loads(output[-1])[key] == heldout[-1][key]
        by_folder.append(metrics["masked_lm_loss"])
    expected = 0.7 * by_folder[0] + 0.3 * by_folder[1]
    assert heldout[-1]["masked_lm_loss"] == pytest.approx(expected, abs=1e-6)
    assert evaluate_workdir(str(folder), which="12")[1] == pytest.approx(
        {k: x for k, x in heldout[-1].items() if k not in ("step", "split")}, abs=1e-6
    )
    text = (folder / "log.txt").read_text()
    assert "mixture: rows_32_3 70.0% of the tokens, " in text
    assert (
        text.count(f"(rows_32_3 {by_folder[0]:.3f}, notes {by_folder[1]:.3f})") == 2
    )  # also at the end
    # The second phase continues the epochs of both folders.
    config = load(arguments(*changes, phases=",32=0.5,32=0.5"))
    take_rows(config, [mixed, mixed])
    _, _, _, phases = pretraining.make_phases(config)
    seen = [phases[0].row_indices(step) for step in range(6)]
    seen += [phases[1].row_indices(step) for step in range(6)]
    start = len(RowDataset(rows(), "train"))
    first = [i for step in seen for i in step if i < start]
    assert first == shuffled(np.arange(len(first)), start, config.seed).tolist()

    copy = shutil.copytree(folder, tmp_path / "copy")
    for step in (8, 12):
        shutil.rmtree(copy / "checkpoints" / str(step))
    assert cli.main([*argv, "--workdir", str(copy)]) == 0
    assert "resuming at step 4" in capsys.readouterr().err
    assert_same_run(copy, folder)
    changed = [a.replace("=0.3", "=0.4") for a in argv]
    assert "mixture[1].weight: was 0.3, is now 0.4" in refused(
        capsys, *changed, "--workdir", folder
    )


def test_folders_that_do_not_fit_are_refused(rows, other, tmp_path, capsys):
    argv = ["pretrain", "--workdir", tmp_path / "run", *arguments()]
    longer, same = rows(32, 2), rows()
    assert "sequences is 3 and 2: to mix rows, prepare" in refused(
        capsys, *argv, "--rows", f"{same}=1", "--rows", f"{longer}=1"
    )
    assert "occurs twice" in refused(capsys, *argv, "--rows", f"{same}=1,{same}=1")
    config = load(arguments())
    take_rows(config, [f"{same}=1,{longer}=1"])
    with pytest.raises(UserError, match="sequences is 3 and 2"):
        pretraining.abstract_phases(config, 3)
    take_rows(config, [f"{same}=1,{other}=1"])
    assert pretraining.abstract_phases(config, 1)[1][0].batch_shape["length"].shape == (8, 3)
