"""Tagging: CoNLL columns, conlleval scores, sequences of words, predictions and their files."""

import bz2
import gzip
import io
import itertools
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config.schema import TaskConfig
from bert_jax.data.examples import NO_EXAMPLE
from bert_jax.data.wordpiece import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.tasks import conll_score
from bert_jax.tasks.conll import TokenClassification, _chunks

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = Vocabulary((*SPECIAL, *LETTERS, *(f"##{c}" for c in LETTERS), ".", "-"), True)


def write(path, sentences, between=" ", documents=()):
    """Write (word, tag) pairs as columns; a document starts before each sentence in `documents`."""
    lines = []
    for i, sentence in enumerate(sentences):
        if i in documents:
            lines += ["-DOCSTART- -X- O", ""]
        lines += [*(between.join(row) for row in sentence), ""]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def tagging(tmp_path, sentences, *, documents=(), labels=(), **fields):
    path = write(tmp_path / "train.txt", sentences, documents=documents)
    config = TaskConfig(kind="tagging", train=path, **{"tokens": 16} | fields)
    return TokenClassification(config, VOCABULARY, labels=labels)


def perfect(dataset, split="train"):
    """Return logits that are correct wherever there is a label, and wrong elsewhere."""
    logits = []
    for target in dataset.splits[split].token_targets["label"]:
        each = np.zeros((len(target), len(dataset.labels)), np.float32)
        each[:, -1] = 5
        each[np.arange(len(target)), np.maximum(target, 0)] += 9
        logits.append(each)
    return logits


def errors(path, function, *arguments):
    with pytest.raises(UserError) as error:
        function(*arguments)
    message = str(error.value)
    assert "\n" not in message
    return message.replace(str(path), "FILE")


TWO = [
    [("john", "B-PER"), ("smith", "I-PER"), ("saw", "O"), ("paris", "B-LOC")],
    [("he", "O"), ("left", "O"), (".", "O")],
]


# Columns


@pytest.mark.parametrize(
    "text",
    [
        "ab\tO\ncd\tB-x\n\nef\tO\n",
        "ab O\ncd B-x\n\nef O",
        "ab\tO\r\ncd\tB-x\r\n\r\nef\tO\r\n",
        "\ufeffab  O \ncd B-x\n\n\n \t\nef O\n\n",
        "ab\tO\ncd\tB-x\n\t\nef\tO\n",  # WNUT-17's training file has tabs between sentences
        "-DOCSTART- -X- O O\n\nab O\ncd B-x\n\nef O\n",
    ],
)
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_columns_are_read_from_every_dialect(tmp_path, text, compress):
    path = tmp_path / "x.conll"
    path.write_bytes(compress(text.encode()))
    result = conll_score.read(path)
    assert [s.rows for s in result] == [[["ab", "O"], ["cd", "B-x"]], [["ef", "O"]]]


def test_document_and_line_numbers_and_unusual_spaces(tmp_path):
    path = tmp_path / "x"
    path.write_text("a O\n\n-DOCSTART- -X- O\nb O\n\nc\u2028d O\n-DOCSTART-\ne\u00a0f O\n")
    result = conll_score.read(path)
    assert [(s.line, s.document) for s in result] == [(1, 0), (4, 1), (6, 1), (8, 2)]
    assert [s.column(0) for s in result] == [["a"], ["b"], ["c\u2028d"], ["e\u00a0f"]]
    path.write_text("New York\tB-x\n")
    assert conll_score.read(path)[0].rows == [["New York", "B-x"]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a O\nb NN O\n", "FILE:2: 3 columns, but line 1 has 2"),
        (b"a\tO\n\nb\n", "FILE:3: 1 columns"),
        (b"a O\n\tO\n", "FILE:2: empty column"),
        (b"a O\nb \0\n", "FILE:2: not text"),
        (b"a O\n\nb\xff O\n", "FILE:3: not UTF-8"),
        (b"\n\n", "FILE: no words"),
        (gzip.compress(b"a O\n" * 99, mtime=0)[:-9], "FILE: the compressed data"),
    ],
)
def test_invalid_columns_error_names_the_line(tmp_path, data, words):
    path = tmp_path / "x"
    path.write_bytes(data)
    assert errors(path, conll_score.read, path).startswith(words)


def test_missing_file_gives_a_one_line_error(tmp_path):
    assert errors(tmp_path / "x", conll_score.read, tmp_path / "x").startswith("cannot read FILE")


# Scores


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O O", []),
        ("B-a I-a O B-b", [("a", 0, 2), ("b", 3, 4)]),
        ("B-a B-a", [("a", 0, 1), ("a", 1, 2)]),
        ("I-a I-a O I-a", [("a", 0, 2), ("a", 3, 4)]),  # IOB1
        ("B-a I-b I-b", [("a", 0, 1), ("b", 1, 3)]),
        ("B-creative-work I-creative-work", [("creative-work", 0, 2)]),
        ("", []),
    ],
)
def test_entities_match_hand_computed_spans(tags, expected):
    assert conll_score.entities(tags.split()) == expected


def test_scores_match_hand_computed_values():
    gold = ["B-a I-a O B-b O".split(), "B-a O".split()]
    predicted = ["B-a I-a O B-a O".split(), "I-a I-a".split()]
    # The first is correct, the second has the wrong type, and the third is too long.
    result = conll_score.score(gold, predicted, True)
    assert result == pytest.approx(
        {
            "accuracy": 4 / 7,
            "precision": 1 / 3,
            "recall": 1 / 3,
            "f1": 1 / 3,
            "f1_a": 2 / 5,
            "f1_b": 0,
        }
    )
    counts = conll_score.count(gold, predicted, True)
    assert counts == {"a": (2, 3, 1), "b": (1, 0, 0)}
    assert conll_score.table(counts).splitlines() == [
        "type\tprecision\trecall\tf1\tgold\tfound\tcorrect",
        "a\t0.3333\t0.5000\t0.4000\t2\t3\t1",
        "b\t0.0000\t0.0000\t0.0000\t1\t0\t0",
        "all\t0.3333\t0.3333\t0.3333\t3\t3\t1",
    ]
    assert conll_score.score([["NN", "O"]], [["NN", "VB"]], False) == {"accuracy": 0.5}


tag = st.sampled_from(["O", "B-a", "I-a", "B-b", "I-b", "B-c-d", "I-c-d"])
pairs = st.lists(st.lists(st.tuples(tag, tag), min_size=1, max_size=8), min_size=1, max_size=5)


@settings(deadline=None)
@given(pairs)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_scores_match_seqeval(pairs):
    from seqeval import metrics

    gold, predicted = ([[pair[i] for pair in some] for some in pairs] for i in (0, 1))
    result = conll_score.score(gold, predicted, True)
    for name in ("precision", "recall", "f1"):
        expected = getattr(metrics, f"{name}_score")(gold, predicted, zero_division=0)
        assert result[name] == pytest.approx(float(expected))
    assert result["accuracy"] == pytest.approx(metrics.accuracy_score(gold, predicted))
    if any(tag != "O" for tags in gold for tag in tags):
        report = metrics.classification_report(gold, predicted, output_dict=True, zero_division=0)
        for kind in report.keys() - {"micro avg", "macro avg", "weighted avg"}:
            assert result[f"f1_{kind}"] == pytest.approx(float(report[kind]["f1-score"]))


@settings(deadline=None)
@given(pairs)
def test_perfect_predictions_score_1(pairs):
    gold = [[pair[0] for pair in some] for some in pairs]
    result = conll_score.score(gold, gold, True)
    entities = any(tag != "O" for tags in gold for tag in tags)
    assert result["accuracy"] == 1
    assert {v for k, v in result.items() if k != "accuracy"} == {float(entities)}


def test_tags_are_scored_from_one_file_or_two(tmp_path):
    data = write(tmp_path / "gold", TWO)
    tags = [["B-PER", "O", "O", "B-LOC"], ["O", "O", "B-LOC"]]
    three = write(
        tmp_path / "three",
        [
            [(*row, t) for row, t in zip(s, some, strict=True)]
            for s, some in zip(TWO, tags, strict=True)
        ],
    )
    expected = conll_score.score([[t for _, t in s] for s in TWO], tags, True)
    assert expected["f1"] == 2 * 1 / (2 + 3)
    assert conll_score.score_file(three) == expected
    assert conll_score.score_file(three, three) == expected
    assert conll_score.score_file(data, three) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("john O\nsmith O\nsaw O\nlondon O\n\nhe O\nleft O\n. O\n", "FILE:4: the word 'london'"),
        ("john O\nsmith O\nsaw O\n\nhe O\nleft O\n. O\n", "FILE:4: the word ''"),
        ("john O\nsmith O\nsaw O\nparis O\n", "FILE:end: the word ''"),
        ("john\nsmith\nsaw\nparis\n\nhe\nleft\n.\n", "FILE:1: 1 columns"),
        ("john O\nsmith E-x\nsaw O\nparis O\n\nhe O\nleft O\n. O\n", "FILE:2: the tag 'E-x'"),
    ],
)
def test_predictions_for_other_words_are_rejected(tmp_path, text, words):
    data, path = write(tmp_path / "gold", TWO), tmp_path / "other"
    path.write_text(text)
    assert errors(path, conll_score.score_file, data, str(path)).startswith(words)


def test_scoring_one_file_requires_three_columns(tmp_path):
    data = write(tmp_path / "gold", TWO)
    assert errors(data, conll_score.score_file, data).startswith("FILE:1: 2 columns")


# Sequences


def test_first_pieces_are_labelled(tmp_path):
    dataset = tagging(tmp_path, TWO, tokens=32)
    assert dataset.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert (dataset.head, dataset.objective, dataset.best_by) == ("token", "class", "f1")
    examples = dataset.splits["train"]
    assert VOCABULARY.decode(examples.tokens[0]) == "[CLS] john smith saw paris [SEP]"
    label = examples.token_targets["label"][0]
    assert label.dtype == np.int32
    expected = np.full(19, NO_EXAMPLE)
    expected[[1, 5, 10, 13]] = [3, 4, 0, 1]
    np.testing.assert_array_equal(label, expected)
    assert examples.a_length == [19, 7 + 2]
    assert dataset.report == ["train: 2 sentences of 7 words"]


words = st.text(st.sampled_from("abc"), min_size=1, max_size=7)
texts = st.lists(
    st.lists(st.tuples(words, st.sampled_from(["O", "B-x", "I-x"])), min_size=1, max_size=9),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(texts, st.integers(3, 14), st.booleans(), st.sets(st.integers(0, 4)))
def test_every_word_is_labelled_exactly_once(
    tmp_path_factory, sentences, tokens, context, documents
):
    folder = tmp_path_factory.mktemp("x")
    dataset = tagging(
        folder,
        sentences,
        tokens=tokens,
        document_context=context,
        documents=documents,
        labels=("O", "B-x", "I-x"),
    )
    examples = dataset.splits["train"]
    seen = []
    for ids, target in zip(examples.tokens, examples.token_targets["label"], strict=True):
        assert len(ids) == len(target) <= tokens
        assert ids[0] == VOCABULARY.cls_id
        assert ids[-1] == VOCABULARY.sep_id
        pieces = [VOCABULARY.tokens[i] for i in ids]
        assert not pieces[1].startswith("##")  # whole words, including the context
        for place in np.flatnonzero(target != NO_EXAMPLE):
            end = place + 1
            while pieces[end].startswith("##"):
                end += 1
            word = "".join(piece.removeprefix("##") for piece in pieces[place:end])
            seen.append((word, dataset.labels[target[place]]))
    iob2 = [tag for tags in dataset._sentences["train"].tags for tag in tags]
    flat = [word[: tokens - 2] for sentence in sentences for word, _ in sentence]
    assert seen == list(zip(flat, iob2, strict=True))
    result = dataset.score("train", perfect(dataset))
    assert result["accuracy"] == 1
    assert result["f1"] == float(any(tag != "O" for tag in iob2))


def test_context_is_limited_to_the_document(tmp_path):
    sentences = [[(c * 2, "B-x"), (c, "O")] for c in "abcdef"]
    dataset = tagging(tmp_path, sentences, documents=(0, 4), document_context=True, tokens=11)
    shown = [VOCABULARY.decode(ids) for ids in dataset.splits["train"].tokens]
    assert shown == [  # nine pieces; room that one side cannot use goes to the other
        "[CLS] aa a bb b cc c [SEP]",
        "[CLS] aa a bb b cc c [SEP]",
        "[CLS] bb b cc c dd d [SEP]",
        "[CLS] bb b cc c dd d [SEP]",
        "[CLS] ee e ff f [SEP]",
        "[CLS] ee e ff f [SEP]",
    ]
    labelled = [np.flatnonzero(t >= 0) for t in dataset.splits["train"].token_targets["label"]]
    np.testing.assert_array_equal(labelled, [[1, 3], [4, 6], [4, 6], [7, 9], [1, 3], [4, 6]])
    assert not any("one document" in line for line in dataset.report)
    dataset = tagging(tmp_path, sentences, document_context=True)
    assert any("the file is read as one document" in line for line in dataset.report)
    alone = tagging(tmp_path, sentences, documents=(0, 4), tokens=11)
    assert [len(t) for t in alone.splits["train"].tokens] == [5] * 6


def test_new_data_have_the_context_of_their_document(tmp_path):
    sentences = [[(c * 2, "B-x"), (c, "O")] for c in "abcdef"]
    dataset = tagging(tmp_path, sentences, documents=(0, 4), document_context=True, tokens=11)

    def new(path):
        options = {"labels": dataset.labels, "new": str(path)}
        return TokenClassification(dataset.config, VOCABULARY, **options).splits["new"].tokens

    for tokens, expected in zip(
        new(tmp_path / "train.txt"), dataset.splits["train"].tokens, strict=True
    ):
        np.testing.assert_array_equal(tokens, expected)
    lines = tmp_path / "lines.txt"
    lines.write_text("aa a\nbb b\n")
    assert [VOCABULARY.decode(ids) for ids in new(lines)] == [
        "[CLS] aa a [SEP]",
        "[CLS] bb b [SEP]",
    ]


def test_long_sentences_are_split_evenly_and_reported(tmp_path):
    dataset = tagging(tmp_path, [[("a", "O")] * 11, [("b", "B-x")]], tokens=12)
    examples = dataset.splits["train"]
    # 6 and 5 words are labelled; the remaining room shows other words of the sentence.
    assert [(t >= 0).sum() for t in examples.token_targets["label"]] == [6, 5, 1]
    assert [len(t) for t in examples.tokens] == [12, 12, 3]
    assert "train: 1 sentences longer than 10 word pieces split" in dataset.report


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), max_size=30), st.integers(6, 20))
def test_chunks_fit_and_cover_all_words(lengths, room):
    chunks = _chunks(lengths, room)
    assert sum(chunks) == len(lengths)
    assert all(chunks)
    edges = np.cumsum([0, *chunks])
    assert all(sum(lengths[a:b]) <= room for a, b in itertools.pairwise(edges))


def test_unusual_words_keep_their_labels(tmp_path):
    sentences = [[("a", "B-x"), ("\u200d", "O"), ("b" * 30, "I-x"), ("日", "O")]]
    dataset = tagging(tmp_path, sentences, tokens=12)
    assert "train: 1 words longer than that truncated" in dataset.report
    assert any("1 words without any valid character" in line for line in dataset.report)
    targets = dataset.splits["train"].token_targets["label"]
    assert sum((t >= 0).sum() for t in targets) == 4
    assert dataset.score("train", perfect(dataset))["accuracy"] == 1


# Labels


def test_iob1_is_read_as_bio(tmp_path):
    tags = ["I-x", "I-x", "B-x", "O", "I-y"]
    dataset = tagging(tmp_path, [[("a", tag) for tag in tags]])
    assert dataset._sentences["train"].tags == [["B-x", "I-x", "B-x", "O", "B-y"]]
    assert any("1 sentences with entities beginning with I-" in line for line in dataset.report)
    assert dataset.labels == ("O", "B-x", "I-x", "B-y", "I-y")


def test_plain_labels_are_scored_by_accuracy(tmp_path):
    dataset = tagging(tmp_path, [[("a", "NN"), ("b", "VB"), ("c", "O")]])
    assert dataset.labels == ("NN", "O", "VB")
    assert dataset.best_by == "accuracy"
    assert dataset.score("train", perfect(dataset)) == {"accuracy": 1}
    dataset.write("train", perfect(dataset), tmp_path)
    assert "VB\t1.0000\t1.0000\t1.0000\t1\t1\t1" in (tmp_path / "per_type.tsv").read_text()


def test_invalid_tag_error_names_the_line(tmp_path):
    path = tmp_path / "train.txt"
    message = errors(path, tagging, tmp_path, [*TWO, [("a", "O"), ("b", "S-PER")]])
    assert message.startswith("FILE:11: the tag 'S-PER' is not BIO")
    message = errors(path, tagging, tmp_path, [[("a", "B-x"), ("b", "NN")]])
    assert message.startswith("FILE:2: the tag 'NN' is not BIO")
    train, dev = write(tmp_path / "a.txt", TWO), write(tmp_path / "b.txt", [[("x", "B-ORG")]])
    config = TaskConfig(kind="tagging", train=train, dev=dev)
    message = errors(dev, TokenClassification, config, VOCABULARY)
    assert message.startswith("FILE:1: unknown label 'B-ORG', not one of O, B-LOC, ")
    plain = write(tmp_path / "c.txt", [[("x", "NN"), ("y", "VB")]])
    config = TaskConfig(kind="tagging", train=plain, dev=dev)
    assert errors(dev, TokenClassification, config, VOCABULARY).startswith(
        "FILE:1: unknown label 'B-ORG'"
    )
    message = errors(path, tagging, tmp_path, [[("a", "O"), ("b", "O")]])
    assert message.startswith("FILE: every word has the tag 'O'")
    path.write_text("alone\n")
    config = TaskConfig(kind="tagging", train=str(path))
    assert errors(path, TokenClassification, config, VOCABULARY).startswith(
        "FILE:1: 1 columns, expected at"
    )


def test_sources_of_the_label_set(tmp_path):
    train, dev = write(tmp_path / "a.txt", TWO), write(tmp_path / "b.txt", TWO[1:])
    config = TaskConfig(kind="tagging", train=train, dev=dev)
    only = TokenClassification(config, VOCABULARY, training=False)
    assert set(only.splits) == {"dev"}
    assert only.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    config = TaskConfig(kind="tagging", dev=dev, labels="O,B-z,I-z")
    assert TokenClassification(config, VOCABULARY).labels == ("O", "B-z", "I-z")
    (tmp_path / "labels.txt").write_text("B-z\nO\n")
    config.labels = str(tmp_path / "labels.txt")
    assert TokenClassification(config, VOCABULARY).labels == ("B-z", "O")
    config.labels = ""
    with pytest.raises(UserError, match="labels are unknown"):
        TokenClassification(config, VOCABULARY)
    assert TokenClassification(config, VOCABULARY, labels=("O", "B-z")).labels == ("O", "B-z")


def test_columns_are_selected_by_number(tmp_path):
    path = tmp_path / "x"
    path.write_text("1 john NN B-PER\n2 saw VB O\n")
    config = TaskConfig(kind="tagging", train=str(path), text_a="2", label="3")
    dataset = TokenClassification(config, VOCABULARY)
    assert dataset.labels == ("NN", "VB")
    assert dataset._sentences["train"].words == [["john", "saw"]]
    config.label = "7"
    assert errors(path, TokenClassification, config, VOCABULARY).startswith(
        "FILE:1: 4 columns, expected at l"
    )
    config.label = "tag"
    with pytest.raises(UserError, match=r"config\.task\.label='tag'"):
        TokenClassification(config, VOCABULARY)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "no data"),
        ({"data": "tfds"}, "folder with train.txt, valid.txt"),
        ({"train": "/nowhere"}, "/nowhere"),
    ],
)
def test_invalid_configuration_is_rejected(fields, words):
    with pytest.raises(UserError, match=words):
        TokenClassification(TaskConfig(kind="tagging", **fields), VOCABULARY)


def test_splits_are_found_in_a_folder(tmp_path):
    write(tmp_path / "eng.train", TWO)
    (tmp_path / "valid.txt.bz2").write_bytes(bz2.compress(b"a O\n"))
    dataset = TokenClassification(TaskConfig(kind="tagging", data=str(tmp_path)), VOCABULARY)
    assert set(dataset.splits) == {"train", "dev"}


# Predictions


def random_logits(dataset, split):
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(len(t), len(dataset.labels))).astype(np.float32)
        for t in dataset.splits[split].tokens
    ]


def test_written_files_reproduce_the_scores(tmp_path):
    sentences = TWO * 20
    dataset = tagging(tmp_path, sentences, tokens=9)
    logits = random_logits(dataset, "train")
    for each, right in zip(logits, perfect(dataset), strict=True):
        each += 0.15 * right
    out = tmp_path / "out"
    out.mkdir()
    dataset.write("train", logits, out)
    result = dataset.score("train", logits)
    assert 0.2 < result["f1"] < 0.98
    assert conll_score.score_file(out / "predictions.conll") == result
    assert conll_score.score_file(tmp_path / "train.txt", out / "predictions.conll") == result
    whole = (out / "per_type.tsv").read_text().splitlines()[-1].split("\t")
    assert whole[:4] == ["all", *(f"{result[k]:.4f}" for k in ("precision", "recall", "f1"))]
    lines = [json.loads(line) for line in (out / "probabilities.jsonl").open()]
    assert [line["words"] for line in lines] == [[w for w, _ in s] for s in sentences]
    for line in lines:
        table = np.array([line["probabilities"][label] for label in dataset.labels])
        np.testing.assert_allclose(table.sum(0), 1, atol=1e-5)
        assert line["predicted"] == [dataset.labels[i] for i in table.argmax(0)]


def test_predictions_are_assigned_to_their_words(tmp_path):
    """Hand-computed, for a sentence split into two sequences and words of several pieces."""
    dataset = tagging(tmp_path, [[("abc", "O"), ("d", "O"), ("ef", "B-x")]], tokens=6)
    first, second = dataset.splits["train"].tokens
    assert VOCABULARY.decode(first) == "[CLS] abc d [SEP]"
    assert VOCABULARY.decode(second) == "[CLS] d ef [SEP]"
    logits = [np.zeros((len(first), 3)), np.zeros((len(second), 3))]
    logits[0][1] = [0, np.log(2), 0]  # abc
    logits[0][2] = [0, 0, 50]  # ##b: ignored
    logits[0][4] = [50, 0, 0]  # d as context
    logits[1][1] = [0, 0, np.log(2)]  # d
    logits[1][2] = [np.log(2), 0, 0]  # ef
    (result,) = dataset.predict("train", logits)
    np.testing.assert_allclose(result, [[0.25, 0.5, 0.25], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]])


def test_new_text_needs_no_tags(tmp_path, monkeypatch):
    config = TaskConfig(kind="tagging", text_a="text")
    labels = ("O", "B-x", "I-x")
    lines = tmp_path / "x.txt"
    lines.write_text("john saw paris\n\nhe left\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.read_bytes())))
    records = tmp_path / "x.jsonl"
    records.write_text('{"text": "john saw paris"}\n{"text": ""}\n{"text": "he left"}\n')
    columns = tmp_path / "x.conll"
    columns.write_text("john\nsaw\nparis\n\nhe\nleft\n")
    for source in (lines, records, "-", columns):
        dataset = TokenClassification(config, VOCABULARY, labels=labels, new=str(source))
        assert set(dataset.splits) == {"new"}
        logits = random_logits(dataset, "new")
        assert dataset.score("new", logits) == {}
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        dataset.write("new", logits, out)
        results = [json.loads(line)["words"] for line in (out / "probabilities.jsonl").open()]
        kept = [["john", "saw", "paris"], [], ["he", "left"]]
        assert results == [some for some in kept if some or source != columns]
        rows = [s.rows for s in conll_score.read(out / "predictions.conll")]
        assert [[row[0] for row in some] for some in rows] == [kept[0], kept[2]]
        assert all(len(row) == 2 and row[1] in labels for some in rows for row in some)
        assert not (out / "per_type.tsv").exists()


def test_column_files_are_recognized_by_their_tags(tmp_path):
    config, path = TaskConfig(kind="tagging"), tmp_path / "test.txt"
    for text, expected in (
        ("john B-x\nsaw O\n\nhe O\n", [["john", "saw"], ["he"]]),
        ("john\nsaw\n\nhe\n", [["john", "saw"], ["he"]]),
        ("john saw\nhe left\n", [["john", "saw"], ["he", "left"]]),
        ("saw type O\nhe left\n", [["saw", "type", "O"], ["he", "left"]]),
        ("one\n\ntwo\n", [["one"], [], ["two"]]),  # lines, one of them empty
    ):
        path.write_text(text)
        dataset = TokenClassification(config, VOCABULARY, labels=("O", "B-x", "I-x"), new=str(path))
        assert dataset._sentences["new"].words == expected, text


def test_tags_are_optional_in_a_test_file(tmp_path):
    train, test = write(tmp_path / "a.txt", TWO), tmp_path / "b.txt"
    test.write_text("john\nsaw\n")
    with pytest.raises(UserError, match="1 columns"):
        TokenClassification(TaskConfig(kind="tagging", train=train, dev=str(test)), VOCABULARY)
    dataset = TokenClassification(
        TaskConfig(kind="tagging", dev=str(test)), VOCABULARY, labels=("O", "B-x")
    )
    assert dataset.score("dev", random_logits(dataset, "dev")) == {}
    dataset = TokenClassification(
        TaskConfig(kind="tagging", train=train, test=str(test)), VOCABULARY
    )
    assert dataset.score("test", random_logits(dataset, "test")) == {}
    assert (dataset.splits["test"].token_targets["label"][0] == NO_EXAMPLE).all()


def test_words_with_spaces_are_written_tab_separated(tmp_path):
    path = tmp_path / "x"
    path.write_text("new york\tB-x\nis\tO\n")
    dataset = TokenClassification(TaskConfig(kind="tagging", train=str(path)), VOCABULARY)
    dataset.write("train", perfect(dataset), tmp_path)
    assert conll_score.score_file(tmp_path / "predictions.conll")["f1"] == 1


# Real data


def test_wnut_17(shared_data):
    paths = {
        "train": shared_data("ner/wnut17train.conll.gz"),
        "dev": shared_data("ner/emerging.dev.conll.gz"),
        "test": shared_data("ner/emerging.test.annotated.gz"),
    }
    config = TaskConfig(kind="tagging", tokens=64, **{k: str(v) for k, v in paths.items()})
    dataset = TokenClassification(config, VOCABULARY)
    assert len(dataset.labels) == 13
    sizes = {k: (len(v.words), sum(map(len, v.words))) for k, v in dataset._sentences.items()}
    assert sizes == {"train": (3394, 62730), "dev": (1009, 15733), "test": (1287, 23394)}
    entities = {"train": 1975, "dev": 836, "test": 1079}
    for split, n in entities.items():
        tags = dataset._sentences[split].tags
        assert sum(c.gold for c in conll_score.count(tags, tags, True).values()) == n
        targets = dataset.splits[split].token_targets["label"]
        assert sum((t != NO_EXAMPLE).sum() for t in targets) == sizes[split][1]
        result = dataset.score(split, perfect(dataset, split))
        assert result["f1"] == result["accuracy"] == 1
    assert not any("IOB1" in line for line in dataset.report)
