"""`bert-jax rows`: the output matches the contents of the rows."""

import dataclasses
import json
import re

import numpy as np
import pytest

from bert_jax import cli
from bert_jax.data import vocabulary_files
from bert_jax.data.loader import RowDataset
from bert_jax.data.prepare import prepare
from bert_jax.data.rows import read_manifest
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.tools import show_rows
from tests.helpers.runs import refused


def test_rows_are_shown_as_text(rows, capsys):
    folder = rows(32, 3)
    assert cli.main(["rows", str(folder), "--split", "heldout", "--index", "1", "--show", "2"]) == 0
    output = capsys.readouterr().out
    opened, tokens = RowDataset(folder, "heldout"), vocabulary_files.load(folder).tokens
    batch = opened.read([1, 2])
    texts = re.findall(r"^    (\[CLS\].*)$", output, re.M)
    expected = []
    for row in range(2):
        real = batch["tokens"][row, : batch["length"][row].sum()]
        expected += [tokens[i] for i in real]
    assert " ".join(texts).split() == expected
    headers = re.findall(r"^  sequence \d+, (\d+) tokens, (next|random) sentence$", output, re.M)
    assert [int(length) for length, _ in headers] == [x for x in batch["length"].ravel() if x]
    assert [kind for _, kind in headers] == [
        "random" if label else "next" for label in batch["label"].ravel() if label >= 0
    ]
    # Every sequence has predictions, whose labels are the tokens at their positions.
    predictions = re.findall(r"^    predict (.*)$", output, re.M)
    assert len(predictions) == len(texts)
    for text, predicted in zip(texts, predictions, strict=True):
        words = text.split()
        result = re.findall(r"(\d+): (\S+) -> (\S+)", predicted)
        assert len(result) == max(1, round(0.15 * len(words)))
        assert all(words[int(position)] == label for position, label, _ in result)
    assert "[MASK]" in output.split("predict", 1)[1]


def test_split_statistics(rows, capsys):
    folder = rows(32, 3)
    assert cli.main(["rows", str(folder), "--show", "0"]) == 0
    output, manifest = capsys.readouterr().out, read_manifest(folder)
    train = manifest.train
    for name in ("documents", "sequences", "rows"):
        assert f" {getattr(train, name):,} {name}" in output.splitlines()[1]
    labels = RowDataset(folder, "train").read(range(train.rows))["label"]
    share = (labels == 1).sum() / (labels >= 0).sum()
    assert f"{share:.1%} of pairs random" in output.splitlines()[1]
    assert "sequence 0" not in output


def test_lengths_of_any_number_of_sequences(rows, monkeypatch):
    folder = str(rows(32, 3))
    manifest = read_manifest(folder)
    lengths = np.repeat(np.arange(33), manifest.length_histogram)
    quartiles = np.percentile(lengths, (0, 25, 50, 75, 100), method="lower")
    expected = f"mean {lengths.mean():.1f}, quartiles {', '.join(map(str, quartiles))}"
    assert expected in "".join(show_rows.summary_lines(folder))
    many = tuple(10**12 * count for count in manifest.length_histogram)
    monkeypatch.setattr(
        show_rows.rows_lib,
        "read_manifest",
        lambda _: dataclasses.replace(manifest, length_histogram=many),
    )
    assert f"mean {lengths.mean():.1f}, " in "".join(show_rows.summary_lines(folder))


def test_random_tokens_may_be_padding_of_the_vocabulary(tmp_path, capsys):
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *"abcĠĊ", "<mask>"]
    ids = {token: i for i, token in enumerate(tokens)}
    padded = vocabulary_files.from_files(
        {"vocab.json": json.dumps(ids).encode(), "merges.txt": b"#version: 0.2\n"}
    ).resized(5000)
    (tmp_path / "text.txt").write_text("a b c\n" * 200)
    out = tmp_path / "rows"
    prepare([f"google:{tmp_path}/text.txt"], padded, out, tokens=64, pairs="none", workers=1)
    assert cli.main(["rows", str(out), "--show", "5"]) == 0
    assert "-> [row" in capsys.readouterr().out


def test_splits_of_one_row_or_none_are_shown(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a b c\n")
    tokens = Vocabulary((*SPECIAL, *"abc"), True)
    out = str(tmp_path / "rows")
    source = f"google:{tmp_path}/text.txt"
    prepare([source], tokens, out, pairs="none", heldout_fraction=0.0, workers=1)
    capsys.readouterr()
    for split, shown in (("train", 1), ("heldout", 0)):
        assert cli.main(["rows", out, "--split", split]) == 0
        output = capsys.readouterr().out
        assert "heldout: empty" in output
        assert output.count("\nrow ") == shown
        error = refused(capsys, "rows", out, "--split", split, "--show", "2")
        assert f"row {shown} in {split}" in error


@pytest.mark.parametrize(("option", "value"), [("--index", 9999), ("--index", -1), ("--show", -1)])
def test_invalid_arguments_are_rejected(rows, capsys, option, value):
    assert str(value) in refused(capsys, "rows", rows(32, 3), option, value)
