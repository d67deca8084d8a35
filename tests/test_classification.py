"""User tables for classification, regression and multiple choice: parsing, metrics, errors."""

import csv
import io
import json
import math
import types

import numpy as np
import pyarrow
import pytest
import sklearn.metrics
from pyarrow import parquet

from bert_jax.config.schema import TaskConfig
from bert_jax.data.examples import NO_EXAMPLE
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.tasks import metrics
from bert_jax.tasks.base import FinetuneDataset
from bert_jax.tasks.swag import MultipleChoice
from bert_jax.tasks.tables import Classification, _is_labeled, probabilities

WORDS = [f"w{i}" for i in range(30)]
VOCABULARY = Vocabulary((*SPECIAL, *WORDS), True)


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def json_lines(path, *rows):
    return write(path, map(json.dumps, rows))


def written(dataset, split, logits, folder):
    """Write predictions to a new folder; return the names and the content of its files."""
    folder.mkdir()
    dataset.write(split, list(np.array(logits)), folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def task(
    tmp_path, train=("w1\tyes", "w2 w3\tno", "w4\tno"), dev=None, header="text\tlabel", **more
):
    files = {"train": write(tmp_path / "train.tsv", [header, *train])} if train else {}
    if dev is not None:
        files["dev"] = write(tmp_path / "dev.tsv", [header, *dev])
    return TaskConfig(**files, **more)


def words(ids):
    return " ".join(VOCABULARY.tokens[i] for i in ids)


def refused(config, key, dataset=Classification, **more):
    with pytest.raises(UserError, match=key):
        dataset(config, VOCABULARY, **more)


# --- Reading --------------------------------------------------------------------------------------


def test_single_label_table(tmp_path):
    dataset = Classification(task(tmp_path, dev=["w5 ,w6\tyes"]), VOCABULARY)
    assert isinstance(dataset, FinetuneDataset)
    assert (dataset.head, dataset.objective, dataset.best_by) == ("sequence", "class", "accuracy")
    assert dataset.labels == ("no", "yes")
    train, dev = dataset.splits["train"], dataset.splits["dev"]
    assert train.targets["label"].tolist() == [1, 0, 0]
    assert train.targets["label"].dtype == np.int32
    assert [words(x) for x in train.tokens][1] == "[CLS] w2 w3 [SEP]"
    assert words(dev.tokens[0]) == "[CLS] w5 [UNK] w6 [SEP]"
    assert train.a_length == [3, 4, 3]
    assert dataset.report == ["train: 3 examples", "dev: 1 example"]


def test_text_pairs_are_truncated_longest_first(tmp_path):
    rows = ["w1 w1 w1 w1 w1\tw2 w2\t0", "w1\tw2\t1", "w1 w1 w1\tw2 w2 w2\t1"]
    config = task(tmp_path, rows, header="a\tb\tlabel", text_a="a", text_b="b", tokens=8)
    dataset = Classification(config, VOCABULARY)
    tokens = [words(x) for x in dataset.splits["train"].tokens]
    assert tokens == [
        "[CLS] w1 w1 w1 [SEP] w2 w2 [SEP]",
        "[CLS] w1 [SEP] w2 [SEP]",
        "[CLS] w1 w1 w1 [SEP] w2 w2 [SEP]",
    ]
    assert dataset.splits["train"].a_length == [5, 3, 5]
    assert dataset.report == ["train: 3 examples, 2 sequences cut to 8 tokens (3 tokens lost)"]


def test_numeric_labels_are_sorted_by_value(tmp_path):
    rows = [f"w1\t{label}" for label in ["10", "9", "-1", "2.5", "9"]]
    dataset = Classification(task(tmp_path, rows), VOCABULARY)
    assert dataset.labels == ("-1", "2.5", "9", "10")
    assert dataset.splits["train"].targets["label"].tolist() == [3, 2, 0, 1, 2]


def test_json_and_parquet_labels_become_strings(tmp_path):
    rows = [{"text": "w1", "label": value} for value in (True, False, 3, 4.0, "x ")]
    config = TaskConfig(train=json_lines(tmp_path / "a.jsonl", *rows))
    assert Classification(config, VOCABULARY).labels == ("3", "4", "false", "true", "x")
    table = pyarrow.table({"text": ["w1", "w2"], "label": [1.0, 0.0]})
    parquet.write_table(table, tmp_path / "a.parquet")
    dataset = Classification(TaskConfig(train=str(tmp_path / "a.parquet")), VOCABULARY)
    assert dataset.labels == ("0", "1")
    assert dataset.splits["train"].targets["label"].tolist() == [1, 0]


@pytest.mark.parametrize("as_file", [False, True])
def test_label_names_from_config_or_file(tmp_path, as_file):
    names = write(tmp_path / "names.txt", ["yes", "no", "maybe"]) if as_file else "yes, no, maybe"
    dataset = Classification(task(tmp_path, labels=names), VOCABULARY)
    assert dataset.labels == ("yes", "no", "maybe")
    assert dataset.splits["train"].targets["label"].tolist() == [0, 1, 1]
    assert dataset.report[-1] == "no training example of: maybe"


def test_multilabel_table(tmp_path):
    labels = {"w1": ["b", "a, c"], "w2": [], "w3": "b| d", "w4": "d"}
    rows = [{"text": text, "label": label} for text, label in labels.items()]
    config = TaskConfig(train=json_lines(tmp_path / "a.jsonl", *rows), objective="classes")
    dataset = Classification(config, VOCABULARY)
    assert dataset.labels == ("a, c", "b", "d")
    targets = dataset.splits["train"].targets["label"]
    assert targets.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert targets.dtype == np.float32
    assert "'a, c' is read as one label" in dataset.report[0]
    config = task(tmp_path, ["w1\ta|b", "w2\t", "w3\tb"], objective="classes")
    cells = Classification(config, VOCABULARY)
    assert cells.splits["train"].targets["label"].tolist() == [[1, 1], [0, 0], [0, 1]]
    logits = np.array([[3.0, 1.0], [-1.0, -1.0], [0.1, 2.0]])
    # All 3 true labels are predicted, 3 of 4 predicted ones are true; "a" has F1 2/3, "b" 1.
    expected = {"micro_f1": 6 / 7, "macro_f1": 5 / 6, "exact_match": 2 / 3}
    assert cells.score("train", list(logits)) == pytest.approx(expected)
    predictions = written(cells, "train", logits, tmp_path / "out")["predictions.tsv"].decode()
    results = [line.split("\t") for line in predictions.splitlines()]
    labels = [row[:2] for row in results]
    assert labels == [["index", "label"], ["0", "a|b"], ["1", ""], ["2", "a|b"]]
    assert float(results[1][2]) == pytest.approx(1 / (1 + np.exp(-3)), abs=1e-6)


def test_regression_table(tmp_path):
    rows = ["w1\t1", "w2\t-2.5", "w3\t1e1"]
    config = task(tmp_path, rows, objective="number", header="text\tgrade", label="grade")
    dataset = Classification(config, VOCABULARY)
    assert dataset.labels == ("grade",)
    assert dataset.splits["train"].targets["label"].dtype == np.float32
    logits = [np.array([x], np.float32) for x in (2.0, 0.0, 3.0)]
    score = dataset.score("train", logits)
    assert score["spearman"] == pytest.approx(1)
    assert score["pearson"] == pytest.approx(np.corrcoef([1, -2.5, 10], [2, 0, 3])[0, 1])
    assert score["mean_squared_error"] == pytest.approx((1 + 6.25 + 49) / 3)
    files = written(dataset, "train", logits, tmp_path / "out")
    assert files["predictions.tsv"] == b"index\tgrade\ttext\n0\t2\tw1\n1\t0\tw2\n2\t3\tw3\n"


def test_test_split_may_lack_labels(tmp_path):
    config = task(tmp_path, dev=["w9\tno"])
    config.test = write(tmp_path / "test.tsv", ["text", "w5", "w6"])
    assert set(Classification(config, VOCABULARY).splits) == {"train", "dev", "test"}
    # Only labelled examples are scored.
    config.test = write(tmp_path / "test.tsv", ["text\tlabel", "w5\tno", "w6\t", "w7\tno"])
    dataset = Classification(config, VOCABULARY, training=False)
    assert dataset.splits["test"].targets["label"].tolist() == [0, NO_EXAMPLE, 0]
    assert dataset.score("test", list(np.array([[1, 0], [0, 1], [0, 1]])))["accuracy"] == 0.5
    assert list(dataset.splits) == ["dev", "test"]
    assert dataset.labels == ("no", "yes")  # still read from the training data


@pytest.mark.parametrize("objective", ["class", "classes", "number"])
def test_labels_may_be_missing(tmp_path, objective):
    """pandas writes a missing value of a column of numbers as NaN, to JSON Lines and to Parquet."""
    columns = {"text": ["w1", "w2"], "label": [math.nan, 1.0]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "test.parquet")
    lines = ['{"text": "w1", "label": NaN}', '{"text": "w2", "label": 1.0}']
    labels = ("label",) if objective == "number" else ("0", "1")
    for path in (str(tmp_path / "test.parquet"), write(tmp_path / "test.jsonl", lines)):
        config = TaskConfig(objective=objective, test=path)
        dataset = Classification(config, VOCABULARY, labels=labels)
        assert _is_labeled(dataset.splits["test"].targets["label"]).tolist() == [False, True]
        refused(TaskConfig(objective=objective, train=path), "no 'label'")
    config.test = write(tmp_path / "test.tsv", ["text", "w1"])
    dataset = Classification(config, VOCABULARY, labels=labels)
    logits = np.zeros((1, len(labels)))
    assert dataset.score("test", list(logits)) == {}
    assert written(dataset, "test", logits, tmp_path / "out").keys() == {"predictions.tsv"}


def test_new_texts_from_csv_stdin_and_txt(tmp_path, monkeypatch):
    def new(source, **config):
        return Classification(TaskConfig(**config), VOCABULARY, labels=("x", "y"), new=source)

    table = write(tmp_path / "new.csv", ["text,label", "w1,y", '"w2\nw3",', ",x"])
    split = new(table).splits["new"]
    assert [words(x) for x in split.tokens][1:] == ["[CLS] w2 w3 [SEP]", "[CLS] [SEP]"]
    assert split.targets["label"].tolist() == [1, NO_EXAMPLE, 0]
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(b"w1\tw2\n\nw3\n")))
    assert [len(x) for x in new("-").splits["new"].tokens] == [4, 2, 3]
    pairs = new(write(tmp_path / "new.txt", ["w1\tw2 w3", "w4\t"]), text_b="b").splits["new"]
    assert [words(x) for x in pairs.tokens] == [
        "[CLS] w1 [SEP] w2 w3 [SEP]",
        "[CLS] w4 [SEP] [SEP]",
    ]
    nothing = new(write(tmp_path / "new.txt", []))
    assert list(nothing.splits) == ["new"]
    assert nothing.score("new", []) == {}
    files = written(nothing, "new", [], tmp_path / "out")
    assert len(files["predictions.tsv"].splitlines()) == 1


def test_dev_split_may_lack_labels_after_fine_tuning(tmp_path):
    config = TaskConfig(dev=write(tmp_path / "dev.tsv", ["text", "w1"]))
    dataset = Classification(config, VOCABULARY, labels=("x", "y"))
    assert dataset.splits["dev"].targets["label"].tolist() == [NO_EXAMPLE]
    refused(config, "dev.tsv:2: no 'label'")
    refused(TaskConfig(test=config.dev), "no labels in the training data")


@pytest.mark.parametrize(
    ("rows", "more", "key"),
    [
        (["w1\tyes", "w2\tyes"], {}, "only .*'yes'"),
        (["w1\tyes"], {"label": "class"}, "train.tsv:2: no 'class'"),
        (["w1\tyes"], {"objective": "number"}, "train.tsv:2: 'yes'"),
        (["w1\tyes"], {"labels": "no,maybe"}, "train.tsv:2: .*'yes', not one of the 2"),
        (["w1\tyes"], {"labels": "no,no"}, "duplicate label 'no'"),
        (["w1\tyes"], {"labels": "no"}, "task.labels"),
        (["w1\tyes"], {"labels": "names.txt"}, "task.labels: .*names.txt"),
        (["w1\tyes"], {"test": "texts.txt"}, "texts.txt: .txt"),
        (["w1\tyes"], {"dev": []}, "dev.tsv"),
    ],
)
def test_invalid_table_error_names_the_place(tmp_path, rows, more, key):
    refused(task(tmp_path, rows, **more), key)


@pytest.mark.parametrize(
    ("label", "objective", "key"),
    [
        (["a"], "class", "a.jsonl:1: a list"),
        ([["a"]], "classes", r"a.jsonl:1: \['a'\]"),
        (["a", math.nan], "classes", "a.jsonl:1: nan"),
        (10**400, "number", "a.jsonl:1: 10{99}.* is not a number"),
        ("a\tb", "class", r"a.jsonl:1: 'a\\tb'"),
    ],
)
def test_invalid_label_values_are_rejected(tmp_path, label, objective, key):
    path = json_lines(tmp_path / "a.jsonl", {"text": "w1", "label": label})
    refused(TaskConfig(train=path, objective=objective), key)


# --- Metrics --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:A single label")
def test_classification_metrics_match_scikit_learn():
    rng = np.random.default_rng(0)
    for classes in (2, 3, 7) * 20:
        truth, other = rng.integers(0, rng.integers(1, classes + 1, (2, 1)), (2, 30))
        predicted = np.where(rng.random(30) < 0.5, truth, other)
        expected = {
            "accuracy": sklearn.metrics.accuracy_score(truth, predicted),
            "macro_f1": sklearn.metrics.f1_score(truth, predicted, average="macro"),
            "matthews": sklearn.metrics.matthews_corrcoef(truth, predicted),
        }
        if classes == 2:
            expected["f1"] = sklearn.metrics.f1_score(truth, predicted, zero_division=0)
        assert metrics.classification(truth, predicted, classes) == pytest.approx(expected)
        truth, predicted = rng.random((2, 30, classes)) < 0.3
        expected = {
            f"{average}_f1": sklearn.metrics.f1_score(truth, predicted, average=average)
            for average in ("micro", "macro")
        }
        expected["exact_match"] = sklearn.metrics.accuracy_score(truth, predicted)
        assert metrics.multilabel_metrics(truth, predicted) == pytest.approx(expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("truth", "predicted"), [([1, 1], [0, 1]), ([0, 1], [0, 0])])
def test_undefined_metrics_are_0(truth, predicted):
    truth, predicted = np.array(truth), np.array(predicted)
    assert metrics.classification(truth, predicted, 2)["matthews"] == 0
    assert metrics.classification(truth, 0 * predicted, 2)["f1"] == 0
    result = metrics.regression(truth.astype(np.float32), predicted.astype(np.float32))
    assert result == {"pearson": 0, "spearman": 0, "mean_squared_error": 0.5}
    nothing = metrics.multilabel_metrics(truth[None] > 1, predicted[None] > 1)
    assert nothing == {"micro_f1": 0, "macro_f1": 0, "exact_match": 1}


@pytest.mark.filterwarnings("error")
def test_probabilities_do_not_overflow():
    result = probabilities(np.array([[1000.0, -1000.0], [1.0, 2.0]]))
    each = probabilities(np.array([[1000.0, -1000.0], [0.0, 2.0]]), "classes")
    assert np.allclose(result, [[1, 0], [1 / (1 + np.e), np.e / (1 + np.e)]])
    assert np.allclose(each, [[1, 0], [0.5, 1 / (1 + np.exp(-2))]])


# --- Files ----------------------------------------------------------------------------------------


def test_written_probabilities(tmp_path):
    rows = [("w1", "w2\tw3\u2028w4", "yes"), ("w2", "w1", "no"), ("w4", "w5", "no")]
    rows = [dict(zip(("a", "b", "label"), row, strict=True)) for row in rows]
    path = json_lines(tmp_path / "train.jsonl", *rows)
    dataset = Classification(TaskConfig(train=path, text_a="a", text_b="b"), VOCABULARY)
    logits = [[0.0, 1.0], [2.0, 0.0], [0.0, 0.5]]
    score = dataset.score("train", list(np.array(logits)))
    assert score["accuracy"] == score["f1"] == pytest.approx(2 / 3)
    files = written(dataset, "train", logits, tmp_path / "out")
    header, *rows = files["predictions.tsv"].decode().splitlines()
    assert header == "index\tlabel\tprobability:no\tprobability:yes\ta\tb"
    assert [row.split("\t")[4:] for row in rows[:2]] == [["w1", "w2 w3 w4"], ["w2", "w1"]]
    assert [row.split("\t")[:2] for row in rows] == [["0", "yes"], ["1", "no"], ["2", "yes"]]
    assert float(rows[0].split("\t")[3]) == pytest.approx(np.e / (1 + np.e), abs=1e-6)


# --- Multiple choice ------------------------------------------------------------------------------

SWAG_HEADER = (
    ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label"
)
SWAG = [
    "0,lsmdc_1,1,w0 w1,w0,w1,gold,w2,w3,w4,w5 w5,3",
    '1,lsmdc_2,2,"w6, w1","w6, w7",w1,gold,w2,w3,w4,w5,0',
]


def test_swag(tmp_path):
    write(tmp_path / "train.csv", [SWAG_HEADER, *SWAG])
    write(tmp_path / "val.csv", [SWAG_HEADER, SWAG[1]])
    no_labels = [line.rpartition(",")[0] for line in [SWAG_HEADER, *SWAG]]
    write(tmp_path / "test.csv", no_labels)
    dataset = MultipleChoice(TaskConfig(kind="choice", name="swag", data=str(tmp_path)), VOCABULARY)
    assert isinstance(dataset, FinetuneDataset)
    assert (dataset.head, dataset.objective, len(dataset.labels)) == ("choice", "class", 1)
    train = dataset.splits["train"]
    assert (len(train), train.group, len(train.tokens)) == (2, 4, 8)
    assert [words(x) for x in train.tokens[2:5]] == [
        "[CLS] w0 [SEP] w1 w4 [SEP]",
        "[CLS] w0 [SEP] w1 w5 w5 [SEP]",
        "[CLS] w6 [UNK] w7 [SEP] w1 w2 [SEP]",
    ]
    assert train.a_length == [3] * 4 + [5] * 4
    assert train.targets["label"].tolist() == [3, 0]
    assert list(dataset.splits) == ["train", "dev", "test"]
    assert dataset.splits["test"].targets["label"].tolist() == [NO_EXAMPLE] * 2
    logits = [np.array([0, 0, 0, 1.0]), np.array([0, 2.0, 0, 0])]
    assert dataset.score("train", logits) == {"accuracy": 0.5}
    assert dataset.score("test", logits) == {}
    files = written(dataset, "test", logits, tmp_path / "out")
    assert files["predictions.csv"] == b",pred\n0,3\n1,1\n"
    chances = list(csv.reader(files["probabilities.csv"].decode().splitlines()))
    assert chances[0] == ["index", "ending0", "ending1", "ending2", "ending3"]
    assert float(chances[1][4]) == pytest.approx(np.e / (np.e + 3), abs=1e-6)
    assert dataset.report[0] == "train: 2 questions"


def test_multiple_choice_with_custom_columns(tmp_path):
    question = {"q": "w1", "yes": "w2", "no, sir": "w3"}
    long = {"q": "w1 w1 w1 w1", "yes": "w2 w2", "no, sir": "w3", "label": 0}
    rows = {**question, "label": "no, sir"}, long
    columns = {"text_a": "q", "choices": ("yes", "no, sir"), "tokens": 8}
    config = TaskConfig(train=json_lines(tmp_path / "a.jsonl", *rows), **columns)
    dataset = MultipleChoice(config, VOCABULARY)
    train = dataset.splits["train"]
    assert (train.group, train.targets["label"].tolist()) == (2, [1, 0])
    assert words(train.tokens[2]) == "[CLS] w1 w1 w1 [SEP] w2 w2 [SEP]"
    assert dataset.report == ["train: 2 questions, 1 sequences cut to 8 tokens (1 tokens lost)"]
    for label, name in ((0.5, "0.5"), (math.inf, "inf")):
        half = json_lines(tmp_path / "half.jsonl", {**question, "label": label})
        refused(TaskConfig(train=half, **columns), f"half.jsonl:1: {name}", MultipleChoice)
    files = written(dataset, "train", np.eye(2), tmp_path / "out")
    header = next(csv.reader(files["probabilities.csv"].decode().splitlines()))
    assert header == ["index", "yes", "no, sir"]
    names = ("a\nb", 'a, "c"')
    quoted = json_lines(tmp_path / "b.jsonl", {"q": "w1", "label": 0, **dict.fromkeys(names, "w2")})
    dataset = MultipleChoice(TaskConfig(train=quoted, text_a="q", choices=names), VOCABULARY)
    content = written(dataset, "train", np.eye(2)[:1], tmp_path / "q")["probabilities.csv"]
    assert next(csv.reader(io.StringIO(content.decode(), newline=""))) == ["index", *names]
    new = {"labels": ("score",), "new": json_lines(tmp_path / "new.jsonl", question)}
    dataset = MultipleChoice(config, VOCABULARY, **new)
    assert dataset.splits["new"].targets["label"].tolist() == [NO_EXAMPLE]


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ([SWAG[0][:-1] + "4"], "a.csv:2: '4' .* 0 to 3"),
        ([SWAG[0][:-1]], "a.csv:2: 'label'"),
        ([], r"a.csv \(train\)"),
    ],
)
def test_invalid_questions_are_rejected(tmp_path, lines, key):
    path = write(tmp_path / "a.csv", [SWAG_HEADER, *lines])
    refused(TaskConfig(name="swag", train=path), key, MultipleChoice)


@pytest.mark.parametrize("dataset", [Classification, MultipleChoice])
def test_data_folder_is_refused_for_custom_tables(dataset):
    config = TaskConfig(data="folder", train="train.csv", choices=("a", "b"))
    refused(config, "task.data is 'folder'.* set config.task.train", dataset)


@pytest.mark.parametrize("choices", [(), ("yes", "yes")])
def test_missing_and_repeated_choices_are_rejected(choices):
    refused(TaskConfig(train="a.csv", choices=choices), "task.choices", MultipleChoice)
