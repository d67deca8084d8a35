"""GLUE: each task's files and their quirks, scores, submission; TFDS."""

import gzip
import random
import types
import zipfile

import numpy as np
import pytest

from bert_jax.config.schema import TaskConfig
from bert_jax.data.examples import NO_EXAMPLE
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.tasks import glue
from bert_jax.tasks.base import FinetuneDataset
from bert_jax.tasks.glue import Glue

VOCABULARY = Vocabulary((*SPECIAL, *(f"w{i}" for i in range(30)), '"'), True)
MNLI = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse sentence1 sentence2".split()
STSB = "index genre filename year old_index source1 source2 sentence1 sentence2 score".split()
MRPC = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
QQP = "id qid1 qid2 question1 question2 is_duplicate".split()


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join("\t".join(map(str, row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def folder(tmp_path):
    """A GLUE folder with the files of every task in their original layout."""

    def save(name, *rows):
        write(tmp_path / "glue" / name, *rows)

    pair, header = ("w1", "w2"), ("index", "sentence1", "sentence2")
    save("CoLA/train.tsv", ("a", 1, "", "w1 w2"), ("a", 0, "*", 'w3 " w4'), ("b", 1, "", "w5"))
    save("CoLA/dev.tsv", ("a", 0, "*", "w1"), ("a", 1, "", "w2"))
    save("CoLA/test.tsv", ("index", "sentence"), (0, "w1"), (1, "w2"))
    save("SST-2/train.tsv.gz", ("sentence", "label"), ("w1 ", 1), ("w2 w3 ", 0))
    save("SST-2/dev.tsv", ("sentence", "label"), ("w1 ", 0))
    save("SST-2/test.tsv", ("index", "sentence"), (0, "w1"))
    save("MRPC/train.tsv", MRPC, (1, 11, 12, 'w1 " w2', "w3"), (0, 13, 14, "w4", "w5"))
    save("MRPC/dev.tsv", MRPC, (1, 15, 16, *pair))
    save("MRPC/test.tsv", ["index", *MRPC[1:]], (0, 17, 18, *pair))
    broken = (360472, 5, 6, "a line broken off"), ("in a question", "w2", 1)
    questions = (133273, 1, 2, 'w1 "w2', "w3?", 0), (402555, 3, 4, "w1", "", 1)
    save("QQP/train.tsv", QQP, *questions, *broken, (183004, 7, 8, "w4", "w5", 1))
    save("QQP/test.tsv", ("id", "question1", "question2"), (0, "w1", '"w2'), (1, "w3", ""))
    row = ["main-news", "MSRvid", "2012", "0001", "none", "none", *pair]
    save("STS-B/train.tsv", STSB, [0, *row, "5.000"], [1, *row, "0.25"])
    save("STS-B/dev.tsv", STSB, *([i, *row, x] for i, x in enumerate((5, 0, 2.5, 4))))
    save("STS-B/test.tsv", STSB[:-1], *([i, *row] for i in range(3)))
    parses = ["p", "x", "fiction", "( w1 )", "( w2 )", "(ROOT (w1))", "(ROOT (w2))"]
    save(
        "MNLI/train.tsv",
        [*MNLI, "label1", "gold_label"],
        [0, *parses, *pair, "neutral", "neutral"],
        [1, *parses, 'w1 ("w3")', "n/a", "entailment", "contradiction"],
        [2, *parses, *pair, "neutral", "entailment"],
    )
    votes, voted = [f"label{i}" for i in range(1, 6)], ["contradiction"] * 5
    for i, (name, label) in enumerate((("matched", "neutral"), ("mismatched", "entailment"))):
        lines = [0, *parses, *pair, *voted, label]
        save(f"MNLI/dev_{name}.tsv", [*MNLI, *votes, "gold_label"], lines)
        save(f"MNLI/test_{name}.tsv", MNLI, [9796 + i, *parses, *pair])
    save("diagnostic/diagnostic.tsv", header, (0, *pair))
    labels = ("entailment", "not_entailment")
    questions = (0, 'w1 "?', "w2", labels[0]), (1, *pair, labels[1])
    save("QNLI/train.tsv", ("index", "question", "sentence", "label"), *questions)
    for name, (no, yes) in (("RTE", labels[::-1]), ("WNLI", (0, 1))):
        save(f"{name}/train.tsv", (*header, "label"), (0, *pair, no), (1, *pair, yes))
        save(f"{name}/dev.tsv", (*header, "label"), (0, *pair, yes))
        save(f"{name}/test.tsv", header, (0, *pair), (1, *pair))
    return tmp_path / "glue"


def dataset(folder, name, **more):
    return Glue(TaskConfig(name=name, data=str(folder)), VOCABULARY, **more)


def words(examples, i):
    return " ".join(VOCABULARY.tokens[t] for t in examples.tokens[i])


PAIR = "[CLS] w1 [SEP] w2 [SEP]"


@pytest.mark.parametrize(
    ("name", "labels", "targets", "first", "best_by"),
    [
        ("cola", "0 1", [1, 0, 1], "[CLS] w1 w2 [SEP]", "matthews"),
        ("sst2", "0 1", [1, 0], "[CLS] w1 [SEP]", "accuracy"),
        ("mrpc", "0 1", [1, 0], '[CLS] w1 " w2 [SEP] w3 [SEP]', "accuracy_f1"),
        ("qqp", "0 1", [0, 1, 1], '[CLS] w1 " w2 [SEP] w3 [UNK] [SEP]', "accuracy_f1"),
        ("stsb", "score", [5, 0.25], PAIR, "pearson_spearman"),
        ("mnli", "contradiction entailment neutral", [2, 0, 1], PAIR, "accuracy"),
        ("qnli", "entailment not_entailment", [0, 1], f'{PAIR[:8]} " [UNK]{PAIR[8:]}', "accuracy"),
        ("rte", "entailment not_entailment", [1, 0], PAIR, "accuracy"),
        ("wnli", "0 1", [0, 1], PAIR, "accuracy"),
    ],
)
def test_every_task_is_read(folder, tmp_path, name, labels, targets, first, best_by):
    result = dataset(folder, name)
    assert isinstance(result, FinetuneDataset)
    assert result.labels == tuple(labels.split())
    train = result.splits["train"]
    assert train.targets["label"].tolist() == targets
    assert words(train, 0) == first
    assert result.best_by == best_by
    available = {
        "qqp": "train test",
        "mnli": "train dev dev_mismatched test test_mismatched ax",
        "qnli": "train",
    }
    assert list(result.splits) == available.get(name, "train dev test").split()
    rng = np.random.default_rng(1)
    for split, examples in result.splits.items():
        logits = list(rng.normal(size=(len(examples), len(result.labels))))
        score = result.score(split, logits)
        unlabelled = split.startswith("test") or split == "ax"
        assert score == {} if unlabelled else best_by in score
        if split == "dev":  # prediction files have the same score
            result.write("dev", logits, tmp_path)
            data = folder / glue.TASKS[name].folder
            data /= "dev_matched.tsv" if name == "mnli" else "dev.tsv"
            again = glue.score(name, str(data), str(tmp_path / "predictions.tsv"))
            assert again == pytest.approx(score, rel=1e-4)
    own = dataset(folder / glue.TASKS[name].folder, name)  # the task's own folder works too
    assert len(own.splits["train"]) == len(train)


def test_empty_questions_are_kept_and_broken_lines_reported(folder):
    result = dataset(folder, "qqp")
    assert words(result.splits["train"], 1) == "[CLS] w1 [SEP] [SEP]"
    assert words(result.splits["test"], 0) == '[CLS] w1 [SEP] " w2 [SEP]'
    assert len(result.splits["test"]) == 2
    assert result.report[0].startswith("train: 2 rows skipped")
    assert f"{folder}/QQP/train.tsv:4" in result.report[0]


def test_mnli_matched_and_mismatched_are_separate_splits(folder):
    result = dataset(folder, "mnli")
    assert result.splits["dev"].targets["label"].tolist() == [2]
    assert result.splits["dev_mismatched"].targets["label"].tolist() == [1]
    assert result.splits["ax"].targets["label"].tolist() == [NO_EXAMPLE]
    evaluated = dataset(folder, "mnli", training=False).splits
    assert list(evaluated) == [name for name in result.splits if name != "train"]


def test_single_files_and_new_data(folder, tmp_path):
    labels = ("entailment", "not_entailment")
    header = ("index", "question", "sentence", "label")
    sample = write(tmp_path / "sample.tsv.gz", header, (0, "w7", "w8", labels[0]))
    config = TaskConfig(name="qnli", data=str(folder), train=str(sample))
    assert words(Glue(config, VOCABULARY).splits["train"], 0) == "[CLS] w7 [SEP] w8 [SEP]"
    table = write(tmp_path / "new.tsv", ("question", "sentence"), ("w1", "w2"))
    lines = write(tmp_path / "new.txt", ("w1", "w2"))
    named = {"text_a": "a", "text_b": "b"}
    for new, columns in ((table, {}), (lines, named), (lines, {})):  # lines need no names
        result = Glue(TaskConfig(name="qnli", **columns), VOCABULARY, labels=labels, new=str(new))
        assert words(result.splits["new"], 0) == PAIR
    (tmp_path / "out").mkdir()
    result.write("new", [np.array([0.0, 1.0])], tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["predictions.tsv"]
    with pytest.raises(UserError, match=r"task\.text_b"):
        Glue(TaskConfig(name="qnli", text_a="q"), VOCABULARY, labels=labels, new=str(lines))


@pytest.mark.parametrize(("name", "column"), [("qqp", "id"), ("rte", "index")])
def test_predictions_of_new_data_have_the_identifiers_of_the_file(folder, tmp_path, name, column):
    task = glue.TASKS[name]
    rows = ((i, "w1", "w2", task.labels[i % 2]) for i in (17, 4))
    data = str(write(tmp_path / "dev.tsv", (column, *task.texts, task.label), *rows))
    new = Glue(TaskConfig(name=name), VOCABULARY, labels=task.labels, new=data)
    new.write("new", [np.array([0.0, 1.0]), np.array([1.0, 0.0])], tmp_path)
    assert glue.score(name, data, str(tmp_path / "predictions.tsv"))["accuracy"] == 1


# --- Scores ---------------------------------------------------------------------------------------


def test_scores_match_glue_definitions(folder):
    write(folder / "MRPC" / "dev.tsv", MRPC, *((y, i, i, "w1", "w2") for i, y in enumerate("1110")))
    score = dataset(folder, "mrpc").score("dev", list(np.eye(2)[[1, 1, 0, 0]]))
    assert score["f1"] == pytest.approx(0.8)  # precision 1, recall 2/3
    assert score["accuracy_f1"] == pytest.approx((0.75 + 0.8) / 2)

    truth, values = [5, 0, 2.5, 4], [4.0, 1.0, 2.0, 9.0]
    score = dataset(folder, "stsb").score("dev", [np.array([x]) for x in values])
    spearman = 0.8  # 1 - 6 (1 + 1) / (4 · 15)
    pearson = np.corrcoef(truth, values)[0, 1]
    assert score["pearson_spearman"] == pytest.approx((pearson + spearman) / 2)

    write(folder / "CoLA" / "dev.tsv", *(("s", y, "", "w1") for y in (1, 1, 1, 0, 0, 0, 0, 0)))
    score = dataset(folder, "cola").score("dev", list(np.eye(2)[[1, 1, 0, 1, 0, 0, 0, 0]]))
    assert score["matthews"] == pytest.approx(7 / 15)


def test_prediction_files_are_scored_in_any_order(folder, tmp_path):
    rows = (3, 9.0), (0, 4.0), (1, 1.0), (2, "2")
    path = write(tmp_path / "p.tsv", ("index", "prediction"), *rows)
    score = dataset(folder, "stsb").score("dev", [np.array([x]) for x in (4.0, 1.0, 2.0, 9.0)])
    data = str(folder / "STS-B" / "dev.tsv")
    assert glue.score("stsb", data, str(path)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("header", "rows", "key"),
    [
        ("index prediction", ["0 entailment", "0 entailment"], "p.tsv:3: .*index 0"),
        ("index prediction", ["1 entailment"], "index 0"),
        ("index prediction", ["0 1"], "p.tsv:2: '1'"),
        ("index guess", ["0 entailment"], "p.tsv:2: .*'prediction'"),
    ],
)
def test_invalid_predictions_error_names_the_row(folder, tmp_path, header, rows, key):
    path = write(tmp_path / "p.tsv", *(line.split() for line in (header, *rows)))
    with pytest.raises(UserError, match=key):
        glue.score("rte", str(folder / "RTE" / "dev.tsv"), str(path))


# --- Submission -----------------------------------------------------------------------------------


def test_submission(folder, tmp_path):
    out, archive = tmp_path / "runs", tmp_path / "glue.zip"
    for name in glue.TASKS:
        result = dataset(folder, name)
        for split, examples in result.splits.items():
            logits = [np.linspace(2, -1, len(result.labels)) * 4] * len(examples)
            (out / name / split).mkdir(parents=True)
            result.write(split, logits, out / name / split)
    mismatched = (out / "mnli/test_mismatched/MNLI-mm.tsv").read_text()
    assert mismatched == "index\tprediction\n9797\tcontradiction\n"
    assert (out / "rte/test/RTE.tsv").read_text().endswith("\n0\tentailment\n1\tentailment\n")
    assert (out / "cola/test/CoLA.tsv").read_text() == "index\tprediction\n0\t0\n1\t0\n"
    assert (out / "stsb/test/STS-B.tsv").read_text().splitlines()[1] == "0\t5.000"  # 8 is clipped
    assert "\t8\t" in (out / "stsb/test/predictions.tsv").read_text()
    assert not (out / "cola/dev/CoLA.tsv").exists()
    notes = glue.submission([out], archive)
    with zipfile.ZipFile(archive) as written:
        assert set(written.namelist()) == set(glue.SUBMISSION) - {"QNLI.tsv"}
        assert written.read("AX.tsv") == b"index\tprediction\n0\tcontradiction\n"
    assert any(note.startswith("QNLI.tsv is missing") for note in notes)
    assert any("WNLI.tsv: 2 predictions" in note for note in notes)
    first = archive.read_bytes()
    write(out / "rte/predictions_7/test/RTE.tsv", ("index", "prediction"))  # of another checkpoint
    for folders in ([out / name for name in glue.TASKS], [out]):
        glue.submission(folders, archive)
        assert archive.read_bytes() == first
    write(tmp_path / "again" / "RTE.tsv", ("index", "prediction"))
    for folders, key in (([out, tmp_path / "again"], r"RTE\.tsv"), ([tmp_path / "x"], "below")):
        with pytest.raises(UserError, match=key):
            glue.submission(folders, archive)
    assert archive.read_bytes() == first


# --- Invalid input --------------------------------------------------------------------------------


HEADER = ("index", "sentence1", "sentence2", "label")


@pytest.mark.parametrize(
    ("name", "rows", "key"),
    [
        ("rte", [HEADER, (0, "w1", "w2", "entails")], "train.tsv:2: .*'entails'"),
        ("rte", [("index", "premise", *HEADER[2:])], "train.tsv:1: .*'sentence1'"),
        ("stsb", [STSB, [*STSB[:-1], "five"]], "train.tsv:2: 'five'"),
        ("cola", [("index", "sentence"), (0, "w1")], "train.tsv:1: 2 columns"),
    ],
)
def test_invalid_files_error_names_the_line(folder, name, rows, key):
    write(folder / glue.TASKS[name].folder / "train.tsv", *rows)
    with pytest.raises(UserError, match=key):
        dataset(folder, name)


@pytest.mark.parametrize("name", ["nowhere", "diagnostic"])
def test_folder_without_the_files_is_refused(folder, name):
    with pytest.raises(UserError, match=r"train\.tsv, dev\.tsv, test\.tsv"):
        dataset(folder / name, "rte")


# --- TensorFlow Datasets --------------------------------------------------------------------------


class TfdsSource(list):
    """Stand-in for a `tfds.data_source`: shuffled examples and a description of the label."""

    def __init__(self, split, names):
        super().__init__({"sentence1": b"w%d" % i, "sentence2": b"x", "idx": i} for i in range(20))
        for i, example in enumerate(self):
            example["label"] = -1 if split == "test" else i % 2
        random.Random(0).shuffle(self)
        label = types.SimpleNamespace(**{"names": names} if names else {})
        self.dataset_info = types.SimpleNamespace(features={"label": label})


def test_tfds(tmp_path, monkeypatch):
    names = {
        "glue/rte": ["entailment", "not_entailment"],
        "glue/mrpc": ["not_equivalent", "equivalent"],
        "glue/stsb": None,
    }

    def data_source(name, split, data_dir):
        assert data_dir == "folder"
        splits = {x: TfdsSource(x, names[name]) for x in ("train", "validation", "test")}
        return splits[split] if split else splits

    monkeypatch.setattr("tensorflow_datasets.data_source", data_source)
    monkeypatch.setenv("TFDS_DATA_DIR", "folder")
    for name, labels in (("rte", ("entailment", "not_entailment")), ("mrpc", ("0", "1"))):
        result = dataset("tfds", name)
        assert list(result.splits) == ["train", "dev", "test"]
        assert result.labels == labels
        # TFDS shuffles; the order of GLUE is restored.
        assert result.splits["dev"].targets["label"].tolist() == [i % 2 for i in range(20)]
        assert words(result.splits["train"], 13) == "[CLS] w13 [SEP] [UNK] [SEP]"
        assert result.score("test", [np.zeros(2)] * 20) == {}
    result = dataset("tfds", "stsb")
    assert result.splits["train"].targets["label"].tolist() == [i % 2 for i in range(20)]
    assert np.isnan(result.splits["test"].targets["label"]).all()
    result.write("test", [np.array([float(i)]) for i in range(20)], tmp_path)
    assert (tmp_path / "STS-B.tsv").read_text().splitlines()[3:5] == ["2\t2.000", "3\t3.000"]
