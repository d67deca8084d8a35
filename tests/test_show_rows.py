"""`bert-jax rows`: the output matches the contents of the rows."""

import re

import pytest

from bert_jax import cli
from bert_jax.data import wordpiece
from bert_jax.data.loader import Rows
from bert_jax.data.rows import read_manifest


def test_rows_are_shown_as_text(rows, capsys):
    folder = rows(32, 3)
    assert cli.main(["rows", str(folder), "--split", "heldout", "--index", "1", "--show", "2"]) == 0
    output = capsys.readouterr().out
    opened, tokens = Rows(folder, "heldout"), wordpiece.load(folder).tokens
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
    assert (
        f"train: {train.documents:,} documents, {train.sequences:,} sequences in {train.rows:,} rows"
        in output
    )
    labels = Rows(folder, "train").read(range(train.rows))["label"]
    share = (labels == 1).sum() / (labels >= 0).sum()
    assert f"{share:.1%} of pairs random" in output.splitlines()[1]
    total = sum(n * count for n, count in enumerate(manifest.length_histogram))
    assert f"mean {total / train.sequences:.1f}, quartiles " in output
    assert "sequence 0" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--index", "9999"], r"has no row 9999 in train: choose 0 to \d+"),
        (["--index", "-1"], "has no row -1"),
        (["--show", "-1"], "--show -1: must be at least 0"),
    ],
)
def test_invalid_arguments_are_rejected(rows, capsys, arguments, message):
    assert cli.main(["rows", str(rows(32, 3)), *arguments]) == cli.EXIT_USER_ERROR
    assert re.search(message, capsys.readouterr().err)
