"""GLUE: each task's files and their quirks, scores, submission; TFDS."""

import errno
import gzip
import pathlib
import re
import sys
import zipfile

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from bert_jax.config.schema import TaskConfig
from bert_jax.data import wordpiece
from bert_jax.data.examples import NO_EXAMPLE
from bert_jax.data.wordpiece import SPECIAL, Vocabulary
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
    root = tmp_path / "glue"
    write(
        root / "CoLA" / "train.tsv",
        ("gj04", 1, "", "w1 w2"),
        ("gj04", 0, "*", 'w3 " w4'),
        ("bc01", 1, "", "w5"),
    )
    write(root / "CoLA" / "dev.tsv", ("gj04", 0, "*", "w1"), ("gj04", 1, "", "w2"))
    write(root / "CoLA" / "test.tsv", ("index", "sentence"), (0, "w1"), (1, "w2"))
    write(root / "SST-2" / "train.tsv.gz", ("sentence", "label"), ("w1 ", 1), ("w2 w3 ", 0))
    write(root / "SST-2" / "dev.tsv", ("sentence", "label"), ("w1 ", 0))
    write(root / "SST-2" / "test.tsv", ("index", "sentence"), (0, "w1"))
    write(root / "MRPC" / "train.tsv", MRPC, (1, 11, 12, 'w1 " w2', "w3"), (0, 13, 14, "w4", "w5"))
    write(root / "MRPC" / "dev.tsv", MRPC, (1, 15, 16, "w1", "w2"))
    write(root / "MRPC" / "test.tsv", ["index", *MRPC[1:]], (0, 17, 18, "w1", "w2"))
    write(
        root / "QQP" / "train.tsv",
        QQP,
        (133273, 1, 2, 'w1 "w2', "w3?", 0),
        (402555, 3, 4, "w1", "", 1),
        (360472, 5, 6, "a line broken off"),
        ("in a question", "w2", 1),
        (183004, 7, 8, "w4", "w5", 1),
    )
    write(
        root / "QQP" / "test.tsv", ("id", "question1", "question2"), (0, "w1", '"w2'), (1, "w3", "")
    )
    row = ["main-news", "MSRvid", "2012", "0001", "none", "none"]
    write(
        root / "STS-B" / "train.tsv",
        STSB,
        [0, *row, "w1", "w2", "5.000"],
        [1, *row, "w1", "w3", "0.25"],
    )
    write(
        root / "STS-B" / "dev.tsv",
        STSB,
        *([i, *row, "w1", "w2", x] for i, x in enumerate((5, 0, 2.5, 4))),
    )
    write(root / "STS-B" / "test.tsv", STSB[:-1], *([i, *row, "w1", "w2"] for i in range(3)))
    parses = ["p", "x", "fiction", "( w1 )", "( w2 )", "(ROOT (w1))", "(ROOT (w2))"]
    write(
        root / "MNLI" / "train.tsv",
        [*MNLI, "label1", "gold_label"],
        [0, *parses, "w1", "w2", "neutral", "neutral"],
        [1, *parses, 'w1 ("w3")', "n/a", "entailment", "contradiction"],
        [2, *parses, "w1", "w2", "neutral", "entailment"],
    )
    votes = [f"label{i}" for i in range(1, 6)]
    for name, label in (("dev_matched", "neutral"), ("dev_mismatched", "entailment")):
        lines = [0, *parses, "w1", "w2", *["contradiction"] * 5, label]
        write(root / "MNLI" / f"{name}.tsv", [*MNLI, *votes, "gold_label"], lines)
    for i, name in enumerate(("test_matched", "test_mismatched")):
        write(root / "MNLI" / f"{name}.tsv", MNLI, [9796 + i, *parses, "w1", "w2"])
    write(
        root / "diagnostic" / "diagnostic.tsv", ("index", "sentence1", "sentence2"), (0, "w1", "w2")
    )
    pair = ("w1", "w2")
    write(
        root / "QNLI" / "train.tsv",
        ("index", "question", "sentence", "label"),
        (0, 'w1 "?', "w2", "entailment"),
        (1, *pair, "not_entailment"),
    )
    for name in ("RTE", "WNLI"):
        labels = ("not_entailment", "entailment") if name == "RTE" else (0, 1)
        header = ("index", "sentence1", "sentence2")
        write(
            root / name / "train.tsv",
            (*header, "label"),
            *((i, *pair, x) for i, x in enumerate(labels)),
        )
        write(root / name / "dev.tsv", (*header, "label"), (0, *pair, labels[1]))
        write(root / name / "test.tsv", header, (0, *pair), (1, *pair))
    return root


def dataset(folder, name, **more):
    return Glue(TaskConfig(name=name, data=str(folder)), VOCABULARY, **more)


def words(examples, i):
    return " ".join(VOCABULARY.tokens[t] for t in examples.tokens[i])


def made(folder):
    folder.mkdir(parents=True)
    return folder


def refused(says, *args, **more):
    with pytest.raises(UserError) as error:
        dataset(*args, **more)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "labels", "targets", "first", "best_by", "splits"),
    [
        ("cola", "0 1", [1, 0, 1], "[CLS] w1 w2 [SEP]", "matthews", "train dev test"),
        ("sst2", "0 1", [1, 0], "[CLS] w1 [SEP]", "accuracy", "train dev test"),
        ("mrpc", "0 1", [1, 0], '[CLS] w1 " w2 [SEP] w3 [SEP]', "accuracy_f1", "train dev test"),
        (
            "qqp",
            "0 1",
            [0, 1, 1],
            '[CLS] w1 " w2 [SEP] w3 [UNK] [SEP]',
            "accuracy_f1",
            "train test",
        ),
        (
            "stsb",
            "score",
            [5, 0.25],
            "[CLS] w1 [SEP] w2 [SEP]",
            "pearson_spearman",
            "train dev test",
        ),
        (
            "mnli",
            "contradiction entailment neutral",
            [2, 0, 1],
            "[CLS] w1 [SEP] w2 [SEP]",
            "accuracy",
            "train dev dev_mismatched test test_mismatched ax",
        ),
        (
            "qnli",
            "entailment not_entailment",
            [0, 1],
            '[CLS] w1 " [UNK] [SEP] w2 [SEP]',
            "accuracy",
            "train",
        ),
        (
            "rte",
            "entailment not_entailment",
            [1, 0],
            "[CLS] w1 [SEP] w2 [SEP]",
            "accuracy",
            "train dev test",
        ),
        ("wnli", "0 1", [0, 1], "[CLS] w1 [SEP] w2 [SEP]", "accuracy", "train dev test"),
    ],
)
def test_every_task_is_read(folder, name, labels, targets, first, best_by, splits):
    result = dataset(folder, name)
    assert isinstance(result, FinetuneDataset)
    assert result.labels == tuple(labels.split())
    train = result.splits["train"]
    assert train.targets["label"].tolist() == targets
    assert words(train, 0) == first
    assert result.best_by == best_by
    assert list(result.splits) == splits.split()
    for split in result.splits:
        if split.startswith("test") or split == "ax":
            assert (
                result.score(split, [np.zeros(len(result.labels))] * len(result.splits[split]))
                == {}
            )
        else:
            logits = [np.ones(len(result.labels))] * len(result.splits[split])
            assert best_by in result.score(split, logits)
    own = dataset(folder / glue.TASKS[name].folder, name)  # the task's own folder works too
    assert len(own.splits["train"]) == len(train)


def test_quotes_are_literal_and_empty_questions_are_kept(folder):
    result = dataset(folder, "qqp")
    assert words(result.splits["train"], 1) == "[CLS] w1 [SEP] [SEP]"
    assert words(result.splits["test"], 0) == '[CLS] w1 [SEP] " w2 [SEP]'
    assert len(result.splits["test"]) == 2
    left_out = f"train: 2 rows skipped for missing columns, the first {folder}/QQP/train.tsv:4: 4"
    assert result.report[0].startswith(left_out)
    cola = dataset(folder, "cola").splits
    assert words(cola["train"], 1) == '[CLS] w3 " w4 [SEP]'
    assert (len(cola["train"]), len(cola["test"])) == (3, 2)


def test_mnli_matched_and_mismatched_are_separate_splits(folder):
    result = dataset(folder, "mnli")
    assert result.splits["dev"].targets["label"].tolist() == [2]
    assert result.splits["dev_mismatched"].targets["label"].tolist() == [1]
    assert result.splits["ax"].targets["label"].tolist() == [NO_EXAMPLE]
    evaluated = dataset(folder, "mnli", training=False).splits
    assert list(evaluated) == [name for name in result.splits if name != "train"]


def test_original_mrpc_files(tmp_path):
    root = tmp_path / "MRPC"
    header = ["\ufeffQuality", *MRPC[1:]]
    rows = [(i % 2, i, i + 100, f"w{i}", '"w9') for i in range(5)]
    write(root / "msr_paraphrase_train.txt", header, *rows)
    write(root / "msr_paraphrase_test.txt", header, (1, 7, 8, "w1", "w2"))
    refused("has no dev_ids.tsv", tmp_path, "mrpc")
    names = {
        split: str(root / f"msr_paraphrase_{x}.txt")
        for split, x in (("train", "train"), ("dev", "test"))
    }
    named = Glue(TaskConfig(name="mrpc", **names), VOCABULARY)
    assert [len(named.splits[split]) for split in ("train", "dev")] == [5, 1]
    write(root / "dev_ids.tsv", (3, 103), (0, 100), (102, 2))
    result = dataset(tmp_path, "mrpc")
    assert [words(result.splits["dev"], i) for i in (0, 1)] == [
        '[CLS] w0 [SEP] " w9 [SEP]',
        '[CLS] w3 [SEP] " w9 [SEP]',
    ]
    assert result.splits["train"].targets["label"].tolist() == [1, 0, 0]
    assert result.splits["test"].targets["label"].tolist() == [1]  # the test file has labels
    result.write("test", [np.array([0.0, 1.0])], tmp_path)
    assert (tmp_path / "MRPC.tsv").read_text() == "index\tprediction\n0\t1\n"


def test_single_files_and_new_data(folder, tmp_path):
    sample = write(
        tmp_path / "sample.tsv.gz",
        ("index", "question", "sentence", "label"),
        (0, "w7", "w8", "entailment"),
    )
    config = TaskConfig(name="qnli", data=str(folder), train=str(sample))
    assert words(Glue(config, VOCABULARY).splits["train"], 0) == "[CLS] w7 [SEP] w8 [SEP]"
    labels = ("entailment", "not_entailment")
    new = write(tmp_path / "new.tsv", ("question", "sentence"), ("w1", "w2"))
    result = Glue(TaskConfig(name="qnli"), VOCABULARY, labels=labels, new=str(new))
    assert words(result.splits["new"], 0) == "[CLS] w1 [SEP] w2 [SEP]"
    config = TaskConfig(name="qnli", text_a="a", text_b="b")
    lines = write(tmp_path / "new.txt", ("w3", "w4"))
    result = Glue(config, VOCABULARY, labels=labels, new=str(lines))
    assert words(result.splits["new"], 0) == "[CLS] w3 [SEP] w4 [SEP]"
    result.write("new", [np.array([0.0, 1.0])], made(tmp_path / "out"))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["predictions.tsv"]


@pytest.mark.parametrize("name", ["qqp", "rte"])
def test_predictions_of_new_data_have_the_identifiers_of_the_file(folder, tmp_path, name):
    task = glue.TASKS[name]
    column = "id" if name == "qqp" else "index"
    data = write(
        tmp_path / "dev.tsv",
        (column, *task.texts, task.label),
        *((i, "w1", "w2", task.labels[i % 2]) for i in (17, 4)),
    )
    new = Glue(TaskConfig(name=name), VOCABULARY, labels=task.labels, new=str(data))
    new.write("new", [np.array([0.0, 1.0]), np.array([1.0, 0.0])], made(tmp_path / "out"))
    assert glue.score(name, str(data), str(tmp_path / "out/predictions.tsv"))["accuracy"] == 1


# --- Scores ---------------------------------------------------------------------------------------


def test_scores_match_glue_definitions(folder):
    rng = np.random.default_rng(0)
    root = folder / "MRPC"
    truth = rng.integers(0, 2, 60)
    write(root / "dev.tsv", MRPC, *((y, i, i, "w1", "w2") for i, y in enumerate(truth)))
    result = dataset(folder, "mrpc")
    logits = rng.normal(size=(60, 2))
    logits[np.arange(60), truth] += 1
    predicted = logits.argmax(1)
    score = result.score("dev", list(logits))
    precision, recall = sk.precision_score(truth, predicted), sk.recall_score(truth, predicted)
    f1 = 2 * precision * recall / (precision + recall)
    assert score["f1"] == pytest.approx(f1)
    assert score["accuracy_f1"] == pytest.approx(((truth == predicted).mean() + f1) / 2)

    result = dataset(folder, "stsb")
    values = [4.0, 1.0, 2.0, 9.0]
    score = result.score("dev", [np.array([x]) for x in values])
    truth = [5, 0, 2.5, 4]
    pearson = np.corrcoef(truth, values)[0, 1]
    spearman = np.corrcoef(stats.rankdata(truth), stats.rankdata(values))[0, 1]
    assert spearman == pytest.approx(0.8)  # by hand: 1 - 6 (1 + 1) / (4 · 15)
    assert score["pearson_spearman"] == pytest.approx((pearson + spearman) / 2)


def test_cola_matthews_correlation(folder):
    write(folder / "CoLA" / "dev.tsv", *(("s", y, "", "w1") for y in (1, 1, 1, 0, 0, 0, 0, 0)))
    result = dataset(folder, "cola")
    logits = [np.array([0.0, 1.0]) if y else np.array([1.0, 0.0]) for y in (1, 1, 0, 1, 0, 0, 0, 0)]
    assert result.score("dev", logits)["matthews"] == pytest.approx(7 / 15)


def test_prediction_files_are_scored(folder, tmp_path):
    data = str(folder / "STS-B" / "dev.tsv")
    path = write(
        tmp_path / "p.tsv", ("index", "prediction"), (3, 9.0), (0, 4.0), (1, 1.0), (2, "2")
    )
    logits = [np.array([x]) for x in (4.0, 1.0, 2.0, 9.0)]
    own = dataset(folder, "stsb")
    assert glue.score("stsb", data, str(path)) == pytest.approx(own.score("dev", logits))
    for name, width in (("mnli", 3), ("cola", 2), ("rte", 2), ("stsb", 1)):
        own = dataset(folder, name, training=False)
        task = glue.TASKS[name].folder
        data = folder / task / ("dev_matched.tsv" if name == "mnli" else "dev.tsv")
        logits = list(np.random.default_rng(1).normal(size=(len(own.splits["dev"]), width)))
        own.write("dev", logits, made(tmp_path / name))
        result = glue.score(name, str(data), str(tmp_path / name / "predictions.tsv"))
        assert result == pytest.approx(own.score("dev", logits), rel=1e-4)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([("index", "prediction"), (0, "entailment"), (0, "entailment")], "p.tsv:3: duplicate"),
        ([("index", "prediction"), (1, "entailment")], "no prediction for index 0 ("),
        (
            [("index", "prediction"), (0, "entailment"), (7, "entailment")],
            "p.tsv:3: prediction for",
        ),
        ([("index", "prediction"), (0, "1")], "p.tsv:2: '1' is not entailment or not_entailment"),
        ([("index", "guess"), (0, "entailment")], "p.tsv:2: no column 'prediction'"),
        ([("prediction",), ("entailment",)], "p.tsv:1: no column 'index'"),
    ],
)
def test_invalid_predictions_give_a_one_line_error(folder, tmp_path, rows, says):
    path = write(tmp_path / "p.tsv", *rows)
    with pytest.raises(UserError) as error:
        glue.score("rte", str(folder / "RTE" / "dev.tsv"), str(path))
    assert says in str(error.value)


# --- Submission -----------------------------------------------------------------------------------


def test_submission(folder, tmp_path):
    for name in glue.TASKS:
        result = dataset(folder, name)
        for split, examples in result.splits.items():
            logits = [np.linspace(2, -1, len(result.labels)) * 4 for _ in range(len(examples))]
            result.write(split, logits, made(tmp_path / "runs" / name / split))
    out = tmp_path / "runs"
    assert (out / "mnli/test_mismatched/MNLI-mm.tsv").read_text() == (
        "index\tprediction\n9797\tcontradiction\n"
    )
    assert (out / "rte/test/RTE.tsv").read_text().endswith("\n0\tentailment\n1\tentailment\n")
    assert (out / "cola/test/CoLA.tsv").read_text() == "index\tprediction\n0\t0\n1\t0\n"
    assert (out / "stsb/test/STS-B.tsv").read_text().splitlines()[1] == "0\t5.000"  # 8 is clipped
    assert "\t8\n" in (out / "stsb/test/predictions.tsv").read_text()
    assert not (out / "cola/dev/CoLA.tsv").exists()
    notes = glue.submission([out], tmp_path / "glue.zip")
    with zipfile.ZipFile(tmp_path / "glue.zip") as archive:
        assert set(archive.namelist()) == set(glue.SUBMISSION) - {"QNLI.tsv"}
        assert archive.read("AX.tsv") == b"index\tprediction\n0\tcontradiction\n"
    assert "QNLI.tsv is missing: the server requires all files" in notes
    assert any(note.endswith("WNLI.tsv: 2 predictions instead of 146") for note in notes)
    first = (tmp_path / "glue.zip").read_bytes()
    glue.submission([out / name for name in glue.TASKS], tmp_path / "glue.zip")
    assert (tmp_path / "glue.zip").read_bytes() == first
    write(out / "rte/predictions_7/test/RTE.tsv", ("index", "prediction"))  # of another checkpoint
    glue.submission([out], tmp_path / "glue.zip")
    assert (tmp_path / "glue.zip").read_bytes() == first
    write(tmp_path / "again" / "RTE.tsv", ("index", "prediction"))
    with pytest.raises(UserError, match="are for the same task"):
        glue.submission([out, tmp_path / "again"], tmp_path / "glue.zip")
    with pytest.raises(UserError, match=r"no CoLA\.tsv, SST-2\.tsv, MRPC\.tsv, … below"):
        glue.submission([tmp_path / "nothing"], tmp_path / "glue.zip")
    assert (tmp_path / "glue.zip").read_bytes() == first


def test_submission_reports_a_folder_that_vanishes(tmp_path, monkeypatch):
    """As happens below /proc, and in a folder that another process cleans up."""

    def vanish(self, pattern):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", f"{self}/gone")

    monkeypatch.setattr(pathlib.Path, "rglob", vanish)
    with pytest.raises(UserError, match=f"^cannot read {re.escape(str(tmp_path))}: "):
        glue.submission([tmp_path], tmp_path / "glue.zip")


# --- Invalid input --------------------------------------------------------------------------------


def test_invalid_files_give_a_one_line_error(folder):
    for name in ("nowhere", "diagnostic"):
        refused("folder with train.tsv, dev.tsv, test.tsv", folder / name, "rte")
    path = folder / "RTE" / "train.tsv"
    header = ("index", "sentence1", "sentence2", "label")
    write(path, header, (0, "w1", "w2", "entails"))
    refused(f"{path}:2: unknown label 'entails', not one of the 2", folder, "rte")
    write(path, header, (0, "w1", "w2", "entailment"), (1, "w1", "w2"))
    refused(f"{path}:3: 3 columns where 4 columns are expected", folder, "rte")
    write(path, header[:-1], (0, "w1", "w2"))
    refused(f"{path}:2: no 'label' (columns: index, sentence1, sentence2)", folder, "rte")
    write(path, ("index", "premise", "sentence2", "label"), (0, "w1", "w2", "entailment"))
    refused(f"{path}:1: no column 'sentence1'", folder, "rte")
    write(folder / "STS-B" / "train.tsv", STSB, [*STSB[:-1], "five"])
    refused("train.tsv:2: 'five' is not a number", folder, "stsb")
    write(folder / "CoLA" / "train.tsv", ("index", "sentence"), (0, "w1"))
    refused(
        "train.tsv:1: 2 columns where 4 columns are expected (source, label, mark", folder, "cola"
    )
    with pytest.raises(UserError, match=r"qnli takes a pair: set config\.task\.text_b"):
        Glue(TaskConfig(name="qnli", text_a="q"), VOCABULARY, labels=("a", "b"), new="new.txt")


def test_lines_of_text_pairs_need_no_column_names(tmp_path):
    lines = write(tmp_path / "new.txt", ("w3", "w4"))
    dataset = Glue(TaskConfig(name="qnli"), VOCABULARY, labels=("a", "b"), new=str(lines))
    assert VOCABULARY.decode(dataset.splits["new"].tokens[0]) == "[CLS] w3 [SEP] w4 [SEP]"


# --- TensorFlow Datasets --------------------------------------------------------------------------


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Stand-ins for TFDS's glue/rte, glue/mrpc and glue/stsb on disk."""
    import tensorflow_datasets as tfds

    features = tfds.features
    labels = {
        "rte": features.ClassLabel(names=["entailment", "not_entailment"]),
        "mrpc": features.ClassLabel(names=["not_equivalent", "equivalent"]),
        "stsb": features.Scalar(np.float32),
    }

    class Glue(tfds.core.GeneratorBasedBuilder):
        BUILDER_CONFIGS = [  # noqa: RUF012 (TFDS's way)
            tfds.core.BuilderConfig(name=name, version=tfds.core.Version("1.0.0"), description=name)
            for name in labels
        ]

        def _info(self):
            texts = {name: features.Text() for name in ("sentence1", "sentence2")}
            label = labels[self.builder_config.name]
            kinds = features.FeaturesDict({**texts, "label": label, "idx": np.int32})
            return tfds.core.DatasetInfo(builder=self, features=kinds)

        def _split_generators(self, dl_manager):
            return {name: self._made(name) for name in ("train", "validation", "test")}

        def _made(self, split):
            for i in range(20):
                label = -1 if split == "test" else i % 2
                yield i, {"sentence1": f"w{i}", "sentence2": split, "label": label, "idx": i}

        def _generate_examples(self):
            raise NotImplementedError

    for name in labels:
        builder = Glue(config=name, data_dir=tmp_path, file_format="array_record")
        builder.download_and_prepare()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))


def test_tfds(prepared, tmp_path):
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
    assert "tensorflow" not in sys.modules


def test_unavailable_tfds_gives_a_one_line_error(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no network\nat all")

    monkeypatch.setattr("tensorflow_datasets.data_source", fail)
    refused("tfds glue/rte: no network; prepare it on a machine with network access", "tfds", "rte")


# --- Real data ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dev", "positive"), [("cola", 1_043, 721), ("sst2", 872, 444), ("rte", 277, 131)]
)
def test_real_glue_files(shared_data, name, dev, positive):
    vocabulary = wordpiece.load(shared_data("vocab/bert-base-uncased-vocab.txt"))
    result = Glue(TaskConfig(name=name, data=str(shared_data("glue"))), vocabulary, training=False)
    assert len(result.splits["dev"]) == dev
    labels = result.splits["dev"].targets["label"]
    assert int((labels == 1).sum()) == positive
