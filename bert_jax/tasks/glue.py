"""GLUE's nine tasks (arXiv 1804.07461): its files with their quirks, its scores, its submission.

Labels are in the order of the reference readers: Google's run_classifier.py for CoLA, MRPC and MNLI,
GLUE's baselines for the others.
"""

import dataclasses
import os
import pathlib
import zipfile
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from bert_jax import files, metrics
from bert_jax.config import TaskConfig
from bert_jax.data import tables
from bert_jax.data.compressed import SUFFIXES
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.tasks import classification
from bert_jax.tasks.classification import NEW, Classification, Row, write_table
from bert_jax.tasks.problem import Logits

TFDS = "tfds"


class Task(NamedTuple):
    """A task's files.

    Attributes:
        folder: of its files below GLUE's.
        texts: their columns, one or two.
        label: its column.
        labels: in order; none for a number.
        best_by: GLUE's score; "A_B" is the mean of two.
        tfds_texts: the features' names where they differ.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    best_by: str = "accuracy"
    tfds_texts: tuple[str, ...] = ()


_ENTAILMENT = ("entailment", "not_entailment")
_SENTENCES = ("sentence1", "sentence2")
TASKS = {
    "cola": Task("CoLA", ("sentence",), "label", ("0", "1"), "matthews"),
    "sst2": Task("SST-2", ("sentence",), "label", ("0", "1")),
    "mrpc": Task(
        "MRPC", ("#1 String", "#2 String"), "Quality", ("0", "1"), "accuracy_f1", _SENTENCES
    ),
    "qqp": Task("QQP", ("question1", "question2"), "is_duplicate", ("0", "1"), "accuracy_f1"),
    "stsb": Task("STS-B", _SENTENCES, "score", (), "pearson_spearman"),
    "mnli": Task(
        "MNLI",
        _SENTENCES,
        "gold_label",
        ("contradiction", "entailment", "neutral"),
        tfds_texts=("premise", "hypothesis"),
    ),
    "qnli": Task("QNLI", ("question", "sentence"), "label", _ENTAILMENT),
    "rte": Task("RTE", _SENTENCES, "label", _ENTAILMENT),
    "wnli": Task("WNLI", _SENTENCES, "label", ("0", "1")),
}
# GLUE's names of a task's files, and those of TFDS's splits.
_SPLITS = {"train": "train", "dev": "dev", "test": "test"}
_MNLI_SPLITS = {
    "train": "train",
    "dev": "dev_matched",
    "dev_mismatched": "dev_mismatched",
    "test": "test_matched",
    "test_mismatched": "test_mismatched",
}
# GLUE's diagnostic set, for models of MNLI.
_AX = ("diagnostic/diagnostic", "AX/AX", "AX/diagnostic")
_COLA_COLUMNS = ("source", "label", "mark", "sentence")
_MRPC_TRAIN, _MRPC_TEST, _MRPC_DEV_IDS = (
    "msr_paraphrase_train.txt",
    "msr_paraphrase_test.txt",
    "dev_ids.tsv",
)
# Files of a submission and how many predictions the server wants in each.
SUBMISSION = {
    "CoLA.tsv": 1_063,
    "SST-2.tsv": 1_821,
    "MRPC.tsv": 1_725,
    "QQP.tsv": 390_965,
    "STS-B.tsv": 1_379,
    "MNLI-m.tsv": 9_796,
    "MNLI-mm.tsv": 9_847,
    "QNLI.tsv": 5_463,
    "RTE.tsv": 3_000,
    "WNLI.tsv": 146,
    "AX.tsv": 1_104,
}


class Glue(Classification):
    """A `Problem` of one of GLUE's tasks.

    Splits are "train", "dev" and "test"; of MNLI "dev" and "test" are the matched ones, beside
    "dev_mismatched", "test_mismatched" and, where it is there, the diagnostic set "ax".

    Args:
        config: the task: `name`, and in `data` GLUE's folder, the task's own folder, or "tfds";
            `train`, `dev` and `test` name single files in GLUE's format instead.
        vocabulary, splits, labels, new: as `Classification` has them; a new table has GLUE's
            columns unless `config.text_a` and `text_b` name others.

    Raises:
        UserError: as `Classification`; a row of QQP with missing columns is left out and counted,
            as the reference readers do, in any other task it is an error.
    """

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        splits: Collection[str] | None = None,
        labels: tuple[str, ...] = (),
        new: str = "",
    ):
        self.task, self._files = _task(config.name), config
        texts = (config.text_a, *([config.text_b] if config.text_b else []))
        if not new or texts == ("text",):
            texts = self.task.texts
        if new and len(texts) != len(self.task.texts):
            what = "a pair: set config.task.text_b too" if len(texts) == 1 else "one text"
            raise UserError(f"{config.name} is about {what} (columns: {', '.join(texts)})")
        config = dataclasses.replace(
            config,
            text_a=texts[0],
            text_b="".join(texts[1:]),
            label=self.task.label,
            labels=",".join(self.task.labels),
            objective="class" if self.task.labels else "number",
        )
        super().__init__(config, vocabulary, splits, labels, new)
        self.best_by = self.task.best_by

    def sources(self) -> dict[str, str]:
        """The file (or TFDS's split) of each split there is."""
        named = super().sources()
        if self.config.data == TFDS:
            return {**_tfds_splits(self.config.name), **named}
        if not self.config.data:
            return named
        root = pathlib.Path(self.config.data)
        if not root.is_dir():
            raise UserError(f"config.task.data: there is no folder {root}")
        folder = root / self.task.folder if (root / self.task.folder).is_dir() else root
        names = _MNLI_SPLITS if self.config.name == "mnli" else _SPLITS
        found = {split: existing(folder / f"{name}.tsv") for split, name in names.items()}
        if self.config.name == "mrpc":
            train = existing(folder / _MRPC_TRAIN)
            original = {"train": train, "dev": train, "test": existing(folder / _MRPC_TEST)}
            found = {split: path or original[split] for split, path in found.items()}
        if self.config.name == "mnli":
            places = [parent / f"{name}.tsv" for parent in (root, folder) for name in _AX]
            found["ax"] = next(filter(None, map(existing, places)), "")
        found = {split: path for split, path in {**found, **named}.items() if path}
        if not found:
            raise UserError(
                f"{folder} has none of {', '.join(f'{name}.tsv' for name in names.values())} "
                f"(plain or compressed): config.task.data is GLUE's folder or its {self.task.folder}"
            )
        return found

    def must_be_labelled(self, split: str) -> bool:
        """Whether a row without a label is an error; GLUE keeps those of its test sets."""
        return split != "ax" and super().must_be_labelled(split)

    def rows(self, split: str, source: str) -> Iterator[Row]:
        """What a split's file holds."""
        if split == NEW:
            yield from super().rows(split, source)
        elif source.startswith(f"{TFDS}:"):
            yield from _tfds_rows(self.config.name, source)
        else:
            skipped: list[str] = []
            must = self.must_be_labelled(split)
            yield from read(self.config.name, source, split, must, skipped)
            if skipped:
                self.report.append(
                    f"{split}: {len(skipped):,} rows left out for missing columns, the first "
                    f"{skipped[0]}"
                )

    def measure(self, truth: np.ndarray, logits: Float[np.ndarray, "E C"]) -> dict[str, float]:
        """GLUE's scores and their mean where it has two."""
        return _with_mean(super().measure(truth, logits), self.task)

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Writes also GLUE's file for a test split, such as MNLI-mm.tsv."""
        super().write(split, logits, folder)
        name = _submission_name(self.task, split)
        if not name:
            return
        values = self.stacked(logits)
        predictions = (
            self.predicted(values)
            if self.task.labels
            else [f"{x:.3f}" for x in np.clip(values[:, 0], 0, 5)]
        )
        rows = [[r.index, p] for r, p in zip(self._rows[split], predictions, strict=True)]
        with files.one_line_errors(f"cannot write predictions to {folder}"):
            write_table(folder / name, [["index", "prediction"], *rows])


def read(
    name: str, source: str, split: str, must_be_labelled: bool, skipped: list[str]
) -> Iterator[Row]:
    """The rows of a file in GLUE's format, or of MRPC's original files.

    Args:
        name: of the task, as in `TASKS`.
        source: the file.
        split: which it is.
        must_be_labelled: whether a row without a label is an error.
        skipped: gets a message for each row of QQP that is left out.
    """
    task, path = _task(name), pathlib.Path(source)
    bare = name == "cola" and not split.startswith("test")  # no line with the columns' names
    original = name == "mrpc" and path.name.startswith(_MRPC_TRAIN)
    dev_ids = _mrpc_dev_ids(path.parent) if original else set()
    records = tables.read(
        path,
        task.texts,
        kind=".tsv",
        header=_COLA_COLUMNS if bare else None,
        quoting=False,
        empty=True,  # QQP has empty questions
        skip=skipped.append if name == "qqp" else None,
    )
    for number, (where, fields) in enumerate(records):
        ids = (fields.get("#1 ID"), fields.get("#2 ID"))
        if original and (ids in dev_ids) != (split == "dev"):
            continue
        texts = [fields[column] for column in task.texts]
        label = classification.labelled(where, fields, task.label, must_be_labelled)
        index = fields.get("index", fields.get("id", str(number)))
        yield Row(where, index, texts[0], texts[1] if len(texts) > 1 else None, label)


def score(name: str, data: str, predictions: str) -> dict[str, float]:
    """GLUE's scores of anyone's predictions.

    Args:
        name: of the task, as in `TASKS`.
        data: the file with the labels, in GLUE's format.
        predictions: a .tsv with the columns index and prediction (as GLUE wants it) or label (as
            `Glue.write` writes it; of STS-B score).

    Raises:
        UserError: a file that is not as it should be; a prediction that is missing, there twice,
            for no row of the data, or no label.
    """
    task, given = _task(name), {}
    for where, fields in tables.read(predictions, ["index"], kind=".tsv"):
        columns = ("prediction", "label", task.label)
        value = next((fields[column] for column in columns if column in fields), None)
        if value is None:
            raise UserError(f"{where}: no column 'prediction' (it has: {', '.join(fields)[:200]})")
        if fields["index"] in given:
            raise UserError(f"{where}: a second prediction for index {fields['index']}")
        given[fields["index"]] = (where, value)
    truth, predicted = [], []
    for row in read(name, data, "dev", True, []):
        if row.index not in given:
            raise UserError(f"{predictions}: no prediction for index {row.index} ({row.where})")
        where, value = given.pop(row.index)
        truth.append(_value(task, row.label, row.where))
        predicted.append(_value(task, value, where))
    if given:
        index, (where, _) = next(iter(given.items()))
        raise UserError(f"{where}: a prediction for index {index}, which {data} does not have")
    if not truth:
        raise UserError(f"{data} holds no rows to score")
    if task.labels:
        found = metrics.classification(
            np.array(truth, np.int64), np.array(predicted, np.int64), len(task.labels)
        )
    else:
        found = metrics.regression(np.array(truth, np.float64), np.array(predicted, np.float64))
    return _with_mean(found, task)


def submission(folders: Sequence[str | pathlib.Path], out: str | pathlib.Path) -> list[str]:
    """Collects GLUE's files, wherever they are below the folders, into the zip its server takes.

    Returns:
        What the server will not like, a line each: missing files, wrong numbers of predictions.

    Raises:
        UserError: no such files, or the same one twice.
    """
    found: dict[str, pathlib.Path] = {}
    for folder in map(pathlib.Path, folders):
        for path in sorted(folder.rglob("*.tsv")):
            if path.name not in SUBMISSION:
                continue
            if path.name in found and not path.samefile(found[path.name]):
                raise UserError(
                    f"{path} and {found[path.name]} are for the same task: name one folder of each"
                )
            found[path.name] = path
    if not found:
        raise UserError(
            f"no {', '.join(list(SUBMISSION)[:3])}, … below {', '.join(map(str, folders))}: predict "
            "GLUE's test sets first"
        )
    notes = [
        f"{name} is missing; the server takes all together" for name in SUBMISSION.keys() - found
    ]
    with (
        files.one_line_errors(f"cannot write {out}"),
        files.replacing(out) as beside,
        zipfile.ZipFile(beside, "w") as archive,
    ):
        for name, path in sorted(found.items()):
            data = path.read_bytes()
            # Without the date, which would make every zip another one.
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
            rows = data.count(b"\n") - 1
            if rows != SUBMISSION[name]:
                notes.append(f"{path}: {rows:,} predictions, not {SUBMISSION[name]:,}")
    return sorted(notes)


def _task(name: str) -> Task:
    if name not in TASKS:
        raise UserError(f"config.task.name is {name!r}: GLUE's tasks are {', '.join(TASKS)}")
    return TASKS[name]


def _with_mean(found: dict[str, float], task: Task) -> dict[str, float]:
    if "_" in task.best_by:
        first, second = task.best_by.split("_")
        found[task.best_by] = (found[first] + found[second]) / 2
    return found


def _value(task: Task, text: str, where: str) -> int | float:
    if text in task.labels:
        return task.labels.index(text)
    try:
        if not task.labels and np.isfinite(float(text)):
            return float(text)
    except ValueError:
        pass
    expected = " or ".join(task.labels) or "a number"
    raise UserError(f"{where}: {text!r} where {expected} is expected")


def _submission_name(task: Task, split: str) -> str:
    if split == "ax":
        return "AX.tsv"
    if not split.startswith("test"):
        return ""
    if task.folder == "MNLI":
        return "MNLI-m.tsv" if split == "test" else "MNLI-mm.tsv"
    return f"{task.folder}.tsv"


def existing(path: pathlib.Path) -> str:
    """The path of a file that is there plain or compressed, or ""."""
    names = [f"{path.name}{suffix}" for suffix in ("", *SUFFIXES)]
    return next((str(path.with_name(name)) for name in names if path.with_name(name).is_file()), "")


def _mrpc_dev_ids(folder: pathlib.Path) -> set[tuple[str, str]]:
    """Which pairs of MRPC's original training file are GLUE's dev set."""
    path = existing(folder / _MRPC_DEV_IDS)
    if not path:
        raise UserError(
            f"{folder} has no {_MRPC_DEV_IDS}: it says which pairs of {_MRPC_TRAIN} are the dev set; "
            "get it with GLUE"
        )
    columns = ("#1 ID", "#2 ID")
    records = tables.read(path, columns, kind=".tsv", header=columns)
    return {(record.fields["#1 ID"], record.fields["#2 ID"]) for record in records}


# --- TensorFlow Datasets --------------------------------------------------------------------------


def _tfds_source(name: str, split: str | None) -> Any:
    try:
        import tensorflow_datasets as tfds

        # Random access into ArrayRecord needs no TensorFlow, unlike tfds.load.
        return tfds.data_source(
            f"glue/{name}", split=split, data_dir=os.environ.get("TFDS_DATA_DIR")
        )
    except Exception as error:  # whatever a dataset's own code, the network or the disk does
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"tfds glue/{name}: {reason.rstrip('.')}; prepare it where there is a network, with "
            'file_format="array_record", and set TFDS_DATA_DIR to its folder'
        ) from None


def _tfds_splits(name: str) -> dict[str, str]:
    names = _MNLI_SPLITS if name == "mnli" else _SPLITS
    there = _tfds_source(name, None)
    theirs = {split: ours.replace("dev", "validation") for split, ours in names.items()}
    return {split: f"{TFDS}:{name}:{each}" for split, each in theirs.items() if each in there}


def _tfds_rows(name: str, source: str) -> Iterator[Row]:
    """In the order of GLUE's files, which TFDS shuffles."""
    _, config, split = source.split(":")
    data, task = _tfds_source(config, split), _task(name)
    names = getattr(data.dataset_info.features["label"], "names", None)
    found = []
    for i in range(len(data)):
        example = data[i]
        texts = [example[k].decode(errors="replace") for k in task.tfds_texts or task.texts]
        label: Any = float(example["label"])
        if label < 0:
            label = None
        elif names is not None:  # their own order and, for "0" and "1", their own names
            label = names[int(label)] if task.labels[0] in names else str(int(label))
        index, b = int(example["idx"]), texts[1] if len(texts) > 1 else None
        found.append((index, Row(f"{source}:{index}", str(index), texts[0], b, label)))
    yield from (row for _, row in sorted(found, key=lambda numbered: numbered[0]))
