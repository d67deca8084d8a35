"""Tagging: CoNLL columns, conlleval scores, sequences of words, predictions and their files."""

import bz2
import gzip
import io
import json
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config.schema import TaskConfig
from bert_jax.data.examples import NO_EXAMPLE
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.tasks import conll_score
from bert_jax.tasks.conll import TokenClassification

BIO = conll_score.Tagging()
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


def refused(key, function, *arguments, **options):
    with pytest.raises(UserError, match=key):
        function(*arguments, **options)


def perfect(dataset, split="train"):
    """Return logits that are correct wherever there is a label, and wrong elsewhere."""
    logits = []
    for target in dataset.splits[split].token_targets["label"]:
        each = np.zeros((len(target), len(dataset.labels)), np.float32)
        each[:, -1] = 5
        each[np.arange(len(target)), np.maximum(target, 0)] += 9
        logits.append(each)
    return logits


TWO = [
    [("john", "B-PER"), ("smith", "I-PER"), ("saw", "O"), ("paris", "B-LOC")],
    [("he", "O"), ("left", "O"), (".", "O")],
]


# Columns


@pytest.mark.parametrize(
    "text",
    [
        "ab\tO\ncd\tB-x\n\nef\tO\n",
        "ab\tO\r\ncd\tB-x\r\n\r\nef\tO\r\n",
        "\ufeffab  O \ncd B-x\n\n\n \t\nef O\n\n",
        "ab\tO\ncd\tB-x\n\t\nef\tO\n",  # WNUT-17's training file has tabs between sentences
        "-DOCSTART- -X- O O\n\nab O\ncd B-x\n\nef O",
    ],
)
def test_columns_are_read_from_every_dialect(tmp_path, text):
    path = tmp_path / "x.conll"
    for data in (text.encode(), gzip.compress(text.encode())):
        path.write_bytes(data)
        rows = [sentence.rows for sentence in conll_score.read(path)]
        assert rows == [[["ab", "O"], ["cd", "B-x"]], [["ef", "O"]]]


def test_document_and_line_numbers_and_unusual_spaces(tmp_path):
    path = tmp_path / "x"
    path.write_text("a O\n\n-DOCSTART- -X- O\nb O\n\nc\u2028d O\n-DOCSTART-\ne\u00a0f O\n")
    result = conll_score.read(path)
    assert [(s.line, s.document) for s in result] == [(1, 0), (4, 1), (6, 1), (8, 2)]
    assert [s.column(0) for s in result] == [["a"], ["b"], ["c\u2028d"], ["e\u00a0f"]]
    path.write_text("New York\tB-x\n")
    assert conll_score.read(path)[0].rows == [["New York", "B-x"]]


@pytest.mark.parametrize("tab", [False, True])
def test_comments_before_sentences_are_skipped(tmp_path, tab):
    path = tmp_path / "x"
    text = "# newdoc\n# text = # c O\n#\n# O\n# B-x\n\n#a B-x\nb O\n\n# id 2\n# O\nc O\n"
    words = [["#", "#"], ["#a", "b"], ["#", "c"]]
    if tab:
        text = re.sub(r"^(#?\w*) (B-x|O)$", r"\1\t\2", text, flags=re.M)
    path.write_text(text)
    result = conll_score.read(path)
    assert [s.column(0) for s in result] == words
    assert [s.line for s in result] == [4, 7, 11]


def test_json_lines_are_read_as_columns(tmp_path):
    lines = [{"tokens": [w for w, _ in s], "ner_tags": [t for _, t in s]} for s in TWO]
    path = tmp_path / "train.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    columns = conll_score.read(write(tmp_path / "gold.txt", TWO))
    assert [s.rows for s in conll_score.read(path)] == [s.rows for s in columns]
    assert conll_score.score_file(tmp_path / "gold.txt", path)["f1"] == 1
    config = TaskConfig(kind="tagging", data=str(tmp_path))
    dataset = TokenClassification(config, VOCABULARY)
    assert dataset.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    path.write_text(json.dumps({"tokens": ["he", "left"]}))
    new = TokenClassification(config, VOCABULARY, labels=dataset.labels, new=str(path))
    assert new._sentences["new"].words == [["he", "left"]]
    for second, key in (
        ({"tokens": ["a", "b"], "ner_tags": ["O"]}, "jsonl:2: 2 tokens but 1"),
        ({"tokens": ["a\n"], "ner_tags": ["O"]}, "jsonl:2: .*line breaks"),
        ({"tokens": ["a", "b"], "ner_tags": ["O", "E-LOC"]}, "jsonl:2: .*'E-LOC'"),
    ):
        path.write_text(f"{json.dumps(lines[0])}\n{json.dumps(second)}\n")
        refused(key, TokenClassification, config, VOCABULARY)


@pytest.mark.parametrize("name", ["x.txt", "x.conll", "x.jsonl"])
def test_files_without_sentences_are_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text("\n\n")
    refused(f"{name}: no words", conll_score.read, path)
    options = {"labels": ("O", "B-x"), "new": str(path)}
    refused(
        f"{name}: no words", TokenClassification, TaskConfig(kind="tagging"), VOCABULARY, **options
    )


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (b"a O\nb NN O\n", "x:2"),
        (b"a O\n\tO\n", "x:2"),
        (b"a O\n\nb\xff O\n", "x:3"),
        (gzip.compress(b"a O\n" * 99, mtime=0)[:-9], "x: .*damaged"),
        (None, "cannot read .*x"),
    ],
)
def test_invalid_columns_error_names_the_line(tmp_path, data, key):
    if data is not None:
        (tmp_path / "x").write_bytes(data)
    refused(key, conll_score.read, tmp_path / "x")


# Scores


def test_scores_match_hand_computed_values():
    gold = ["B-a I-a O B-b O".split(), "B-a O".split()]
    predicted = ["B-a I-a O B-a O".split(), "I-a I-a".split()]
    # The first is correct, the second has the wrong type, and the third is too long.
    means = {name: 1 / 3 for name in ("precision", "recall", "f1")}
    result = conll_score.score(gold, predicted, BIO)
    assert result == pytest.approx({"accuracy": 4 / 7, **means, "f1_a": 2 / 5, "f1_b": 0})
    counts = conll_score.count(gold, predicted, BIO)
    assert counts == {"a": (2, 3, 1), "b": (1, 0, 0)}
    assert conll_score.table(counts).splitlines() == [
        "type\tprecision\trecall\tf1\tgold\tfound\tcorrect",
        "a\t0.3333\t0.5000\t0.4000\t2\t3\t1",
        "b\t0.0000\t0.0000\t0.0000\t1\t0\t0",
        "all\t0.3333\t0.3333\t0.3333\t3\t3\t1",
    ]
    assert conll_score.score([["NN", "O"]], [["NN", "VB"]], None) == {"accuracy": 0.5}


SCHEMES = {"BI": None, "BIES": "IOBES", "BILU": "BILOU"}
STYLES = ("{letter}-{kind}", "{letter}_{kind}", "{kind}-{letter}", "{letter}")


@pytest.mark.parametrize("letters", SCHEMES)
@pytest.mark.parametrize("style", STYLES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_scores_match_seqeval(letters, style, data):
    from seqeval import metrics, scheme

    kinds = ["_"] if style == "{letter}" else ["a", "b", "c-d"]
    tag = st.one_of(st.none(), st.tuples(st.sampled_from(letters), st.sampled_from(kinds)))
    pair = st.tuples(tag, tag) | tag.map(lambda tag: (tag, tag))
    pairs = data.draw(st.lists(st.lists(pair, min_size=1, max_size=8), min_size=1, max_size=5))

    def tags(i, style):
        return [
            ["O" if tag[i] is None else style.format(letter=tag[i][0], kind=tag[i][1]) for tag in x]
            for x in pairs
        ]

    gold, predicted = tags(0, STYLES[0]), tags(1, STYLES[0])
    result = conll_score.score(tags(0, style), tags(1, style), conll_score.Tagging(letters, style))
    options = {"zero_division": 0}
    if SCHEMES[letters]:
        options |= {"mode": "strict", "scheme": getattr(scheme, SCHEMES[letters])}
    assert result["accuracy"] == pytest.approx(metrics.accuracy_score(gold, predicted))
    if all(x is None for pair in pairs for x in pair for x in x):  # seqeval's strict mode fails
        return
    for name in ("precision", "recall", "f1"):
        expected = getattr(metrics, f"{name}_score")(gold, predicted, **options)
        assert result[name] == pytest.approx(float(expected))
    if any(tag != "O" for tags in gold for tag in tags):
        report = metrics.classification_report(gold, predicted, output_dict=True, **options)
        for kind in report.keys() - {"micro avg", "macro avg", "weighted avg"}:
            assert result.get(f"f1_{kind}", 0) == pytest.approx(float(report[kind]["f1-score"]))


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O I", ("BI", "{letter}")),
        ("O x-B x-I S-B", ("BI", "{kind}-{letter}")),
        ("O B-x I-x E-x S-y", ("BIES", "{letter}-{kind}")),
        ("O S-x", ("BIES", "{letter}-{kind}")),
        ("B I E S", ("BIES", "{letter}")),
        ("O B-x I-x B-y S-x", ("BI", "{letter}-{kind}")),  # S-x is a mistake: B-x has no end
        ("O B-x M-x E-x S-x", ("BIES", "{letter}-{kind}")),  # M-x is another scheme's
        ("NN VB S-N O", None),
        ("N-S V-S N-P", None),
        ("S V O", None),
        ("B I NN", None),
        ("O", None),
    ],
)
def test_tagging_is_found_from_the_tags(tags, expected):
    assert conll_score.find_tagging(tags.split()) == expected


def test_tags_are_scored_from_one_file_or_two(tmp_path):
    data = write(tmp_path / "gold", TWO)
    tags = [["B-PER", "O", "O", "B-LOC"], ["O", "O", "B-LOC"]]
    both = [
        [(*row, tag) for row, tag in zip(*pair, strict=True)]
        for pair in zip(TWO, tags, strict=True)
    ]
    three = write(tmp_path / "three", both)
    expected = conll_score.score([[t for _, t in s] for s in TWO], tags, BIO)
    assert expected["f1"] == 2 * 1 / (2 + 3)
    for files in ((three,), (three, three), (data, three)):
        assert conll_score.score_file(*files) == expected
    refused("gold:1: 2 columns", conll_score.score_file, data)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("john O\nsmith O\nsaw O\nlondon O\n\nhe O\nleft O\n. O\n", "other:4: .*'london'"),
        ("john O\nsmith O\nsaw O\nparis O\n", "other:end"),
        ("john O\nsmith E-x\nsaw O\nparis O\n\nhe O\nleft O\n. O\n", "other:2: .*'E-x'"),
    ],
)
def test_predictions_for_other_words_are_rejected(tmp_path, text, key):
    data, path = write(tmp_path / "gold", TWO), tmp_path / "other"
    path.write_text(text)
    refused(key, conll_score.score_file, data, str(path))


# Sequences


def test_first_pieces_are_labelled(tmp_path):
    dataset = tagging(tmp_path, TWO, tokens=32)
    assert dataset.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert (dataset.head, dataset.objective, dataset.best_by) == ("token", "class", "f1")
    examples = dataset.splits["train"]
    assert examples.a_length == [19, 7 + 2]
    assert VOCABULARY.decode(examples.tokens[0]) == "[CLS] john smith saw paris [SEP]"
    label, expected = examples.token_targets["label"][0], np.full(19, NO_EXAMPLE, np.int32)
    expected[[1, 5, 10, 13]] = [3, 4, 0, 1]
    np.testing.assert_array_equal(label, expected, strict=True)
    assert dataset.report == ["train: 2 sentences of 7 words"]


WORD = st.tuples(
    st.text(st.sampled_from("abc"), min_size=1, max_size=7), st.sampled_from(["O", "B-x", "I-x"])
)
TEXTS = st.lists(st.lists(WORD, min_size=1, max_size=9), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(3, 14), st.booleans(), st.sets(st.integers(0, 4)))
def test_every_word_is_labelled_exactly_once(
    tmp_path_factory, sentences, tokens, context, documents
):
    options = dict(document_context=context, documents=documents, labels=("O", "B-x", "I-x"))
    dataset = tagging(tmp_path_factory.mktemp("x"), sentences, tokens=tokens, **options)
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
    documents = {"documents": (0, 4), "tokens": 11}
    alone = tagging(tmp_path, sentences, **documents)
    assert [len(t) for t in alone.splits["train"].tokens] == [5] * 6
    dataset = tagging(tmp_path, sentences, document_context=True, **documents)
    # Nine pieces. Room that one side cannot use goes to the other.
    first, middle, last = "aa a bb b cc c", "bb b cc c dd d", "ee e ff f"
    lines = tmp_path / "lines.txt"  # a line is a document of its own
    lines.write_text("aa a\nbb b\n")

    def new(path):
        options = {"labels": dataset.labels, "new": str(path)}
        return TokenClassification(dataset.config, VOCABULARY, **options).splits["new"]

    for split, shown in (
        (dataset.splits["train"], [first, first, middle, middle, last, last]),
        (new(tmp_path / "train.txt"), [first, first, middle, middle, last, last]),
        (new(lines), ["aa a", "bb b"]),
    ):
        assert [VOCABULARY.decode(t) for t in split.tokens] == [f"[CLS] {x} [SEP]" for x in shown]
    labelled = [np.flatnonzero(t >= 0) for t in dataset.splits["train"].token_targets["label"]]
    np.testing.assert_array_equal(labelled, [[1, 3], [4, 6], [4, 6], [7, 9], [1, 3], [4, 6]])
    assert not any("one document" in line for line in dataset.report)
    dataset = tagging(tmp_path, sentences, document_context=True)
    assert any("one document" in line for line in dataset.report)


def test_long_sentences_are_split_evenly_and_reported(tmp_path):
    dataset = tagging(tmp_path, [[("a", "O")] * 11, [("b", "B-x")]], tokens=12)
    examples = dataset.splits["train"]
    # 6 and 5 words are labelled; the remaining room shows other words of the sentence.
    assert [(t >= 0).sum() for t in examples.token_targets["label"]] == [6, 5, 1]
    assert [len(t) for t in examples.tokens] == [12, 12, 3]
    assert "train: 1 sentences longer than 10 word pieces split" in dataset.report


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


@pytest.mark.parametrize(
    ("letters", "style", "tag"),
    [
        ("BI", "{letter}", "B"),
        ("BI", "{letter}-{kind}", "B-x"),
        ("BIES", "{kind}-{letter}", "x-S"),
        ("BILU", "{letter}_{kind}", "U_x"),
    ],
)
def test_labels_are_of_all_letters_also_of_those_that_the_data_lack(tmp_path, letters, style, tag):
    dataset = tagging(tmp_path, [[("a", tag), ("b", "O")]])
    assert (dataset.tagging, dataset.best_by) == ((letters, style), "f1")
    assert dataset.labels == ("O", *(style.format(letter=x, kind="x") for x in letters))
    assert dataset.score("train", perfect(dataset))["f1"] == 1


def test_plain_labels_are_scored_by_accuracy(tmp_path):
    dataset = tagging(tmp_path, [[("a", "NN"), ("b", "VB"), ("c", "O")]])
    assert dataset.labels == ("NN", "O", "VB")
    assert dataset.best_by == "accuracy"
    assert dataset.score("train", perfect(dataset)) == {"accuracy": 1}
    dataset.write("train", perfect(dataset), tmp_path)
    assert "VB\t1.0000\t1.0000\t1.0000\t1\t1\t1" in (tmp_path / "per_type.tsv").read_text()


@pytest.mark.parametrize(
    ("train", "dev", "key"),
    [
        ([*TWO, [("a", "O"), ("b", "S-PER")]], None, "train.txt:11: .*'S-PER'"),
        ([[("a", "B-x"), ("b", "NN")]], None, "train.txt:2: .*'NN'"),
        (TWO, [[("x", "B-ORG")]], "dev.txt:1: .*'B-ORG', not one of O, B-LOC"),
        (TWO, [[("x",)]], "dev.txt:1: 1 columns"),
        ([[("a", "O"), ("b", "O")]], None, "train.txt: .*'O'"),
    ],
)
def test_invalid_tag_error_names_the_line(tmp_path, train, dev, key):
    files = {} if dev is None else {"dev": write(tmp_path / "dev.txt", dev)}
    refused(key, tagging, tmp_path, train, **files)


def test_sources_of_the_label_set(tmp_path):
    train, dev = write(tmp_path / "a.txt", TWO), write(tmp_path / "b.txt", TWO[1:])
    config = TaskConfig(kind="tagging", train=train, dev=dev)
    only = TokenClassification(config, VOCABULARY, training=False)
    assert set(only.splits) == {"dev"}
    assert only.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    names = tmp_path / "labels.txt"
    names.write_text("B-z\nO\n")
    for labels, expected in (("O,B-z,I-z", ("O", "B-z", "I-z")), (str(names), ("B-z", "O"))):
        config = TaskConfig(kind="tagging", dev=dev, labels=labels)
        assert TokenClassification(config, VOCABULARY).labels == expected
    config.labels = ""
    refused(r"task\.labels", TokenClassification, config, VOCABULARY)
    assert TokenClassification(config, VOCABULARY, labels=("O", "B-z")).labels == ("O", "B-z")


def test_columns_are_selected_by_number(tmp_path):
    path = tmp_path / "x"
    path.write_text("1 john NN B-PER\n2 saw VB O\n")
    config = TaskConfig(kind="tagging", train=str(path), text_a="2", label="3")
    dataset = TokenClassification(config, VOCABULARY)
    assert dataset.labels == ("NN", "VB")
    assert dataset._sentences["train"].words == [["john", "saw"]]
    config.label = "7"
    refused("x:1: 4 columns", TokenClassification, config, VOCABULARY)
    config.label = "tag"
    refused(r"task\.label='tag'", TokenClassification, config, VOCABULARY)


def test_splits_are_found_in_a_folder(tmp_path):
    config = TaskConfig(kind="tagging", data=str(tmp_path))
    refused(r"train\.txt, valid\.txt", TokenClassification, config, VOCABULARY)
    write(tmp_path / "eng.train", TWO)
    (tmp_path / "valid.txt.bz2").write_bytes(bz2.compress(b"a O\n"))
    assert set(TokenClassification(config, VOCABULARY).splits) == {"train", "dev"}


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
    assert whole[1:4] == [f"{result[k]:.4f}" for k in ("precision", "recall", "f1")]
    lines = [json.loads(line) for line in (out / "probabilities.jsonl").open()]
    assert [line["words"] for line in lines] == [[w for w, _ in s] for s in sentences]
    for line in lines:
        table = np.array([line["probabilities"][label] for label in dataset.labels])
        np.testing.assert_allclose(table.sum(0), 1, atol=1e-5)
        assert line["predicted"] == [dataset.labels[i] for i in table.argmax(0)]


JOHN = [["john", "saw", "paris"], ["he", "left"]]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.txt", "john saw paris\n\nhe left\n", [JOHN[0], [], JOHN[1]]),
        ("-", "john saw paris\n\nhe left\n", [JOHN[0], [], JOHN[1]]),
        ("x.jsonl", '{"text": "john saw paris"}\n{"text": "he left"}\n', JOHN),
        ("x.conll", "john\nsaw\nparis\n\nhe\nleft\n", JOHN),
        # A .txt file may hold columns, of which the last are known tags.
        ("x.txt", "john B-x\nsaw O\nparis I-x\n\nhe O\nleft O\n", JOHN),
        ("x.txt", "john\nsaw\nparis\n\nhe\nleft\n", JOHN),
        ("x.txt", "saw type O\nhe left\n", [["saw", "type", "O"], ["he", "left"]]),
        ("x.txt", "one\n\ntwo\n", [["one"], [], ["two"]]),
    ],
)
def test_new_text_needs_no_tags(tmp_path, monkeypatch, name, text, words):
    config, labels = TaskConfig(kind="tagging"), ("O", "B-x", "I-x")
    if name == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    else:
        (tmp_path / name).write_text(text)
        name = str(tmp_path / name)
    dataset = TokenClassification(config, VOCABULARY, labels=labels, new=name)
    assert set(dataset.splits) == {"new"}
    logits = random_logits(dataset, "new")
    assert dataset.score("new", logits) == {}
    dataset.write("new", logits, tmp_path)
    lines = (tmp_path / "probabilities.jsonl").read_text().splitlines()
    assert [json.loads(line)["words"] for line in lines] == words
    rows = [s.rows for s in conll_score.read(tmp_path / "predictions.conll")]
    assert [[row[0] for row in some] for some in rows] == [some for some in words if some]
    assert all(len(row) == 2 and row[1] in labels for some in rows for row in some)
    assert not (tmp_path / "per_type.tsv").exists()


def test_tags_are_optional_in_a_test_file(tmp_path):
    train, test = write(tmp_path / "a.txt", TWO), write(tmp_path / "b.txt", [[("john",)]])
    fine_tuned = {"labels": ("O", "B-x")}  # whose dev set may lack them too
    for split, files, options in (("dev", {}, fine_tuned), ("test", {"train": train}, {})):
        config = TaskConfig(kind="tagging", **files, **{split: test})
        dataset = TokenClassification(config, VOCABULARY, **options)
        assert dataset.score(split, random_logits(dataset, split)) == {}
        assert (dataset.splits[split].token_targets["label"][0] == NO_EXAMPLE).all()


def test_words_with_spaces_are_written_tab_separated(tmp_path):
    path = tmp_path / "x"
    path.write_text("new york\tB-x\nis\tO\n")
    dataset = TokenClassification(TaskConfig(kind="tagging", train=str(path)), VOCABULARY)
    dataset.write("train", perfect(dataset), tmp_path)
    assert conll_score.score_file(tmp_path / "predictions.conll")["f1"] == 1
