"""The nine GLUE tasks (arXiv 1804.07461): reading their files, official metrics, submission.

Labels are ordered as in the reference readers: Google's run_classifier.py for CoLA, MRPC and MNLI,
GLUE's baselines for the others.
"""

import dataclasses
import os
import pathlib
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from bert_jax import storage
from bert_jax.config.schema import TaskConfig
from bert_jax.data import tables
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError, missing
from bert_jax.storage import files
from bert_jax.tasks import metrics
from bert_jax.tasks import tables as classification
from bert_jax.tasks.base import NEW, Logits, Text
from bert_jax.tasks.tables import Classification, Row, existing, find_files, write_table

TFDS = "tfds"


class GlueTask(NamedTuple):
    """Files, columns and metric of a GLUE task.

    Attributes:
        folder: folder of its files in GLUE's folder.
        texts: one or two text columns.
        label: label column.
        labels: label names in order; () for regression.
        best_by: GLUE's metric; "A_B" is the mean of two.
        tfds_texts: names of the text features in TFDS if they differ.
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
    "cola": GlueTask("CoLA", ("sentence",), "label", ("0", "1"), "matthews"),
    "sst2": GlueTask("SST-2", ("sentence",), "label", ("0", "1")),
    "mrpc": GlueTask(
        "MRPC", ("#1 String", "#2 String"), "Quality", ("0", "1"), "accuracy_f1", _SENTENCES
    ),
    "qqp": GlueTask("QQP", ("question1", "question2"), "is_duplicate", ("0", "1"), "accuracy_f1"),
    "stsb": GlueTask("STS-B", _SENTENCES, "score", (), "pearson_spearman"),
    "mnli": GlueTask(
        "MNLI",
        _SENTENCES,
        "gold_label",
        ("contradiction", "entailment", "neutral"),
        tfds_texts=("premise", "hypothesis"),
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), "label", _ENTAILMENT),
    "rte": GlueTask("RTE", _SENTENCES, "label", _ENTAILMENT),
    "wnli": GlueTask("WNLI", _SENTENCES, "label", ("0", "1")),
}
# Split names to names of GLUE's files, which are also the splits of TFDS up to dev/validation.
_SPLITS = {"train": "train", "dev": "dev", "test": "test"}
_MNLI_SPLITS = {
    "train": "train",
    "dev": "dev_matched",
    "dev_mismatched": "dev_mismatched",
    "test": "test_matched",
    "test_mismatched": "test_mismatched",
}
_INDEX = ("index", "id")
# GLUE's diagnostic set, evaluated with models trained on MNLI.
_AX = ("diagnostic/diagnostic.tsv", "AX/AX.tsv", "AX/diagnostic.tsv")
_COLA_COLUMNS = ("source", "label", "mark", "sentence")
# Files of a submission and the number of predictions that the server expects in each.
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
    """A dataset of a GLUE task.

    Splits are "train", "dev" and "test". For MNLI, "dev" and "test" are the matched sets, and there
    are "dev_mismatched", "test_mismatched" and, if its file exists, the diagnostic set "ax".
    `config.data` is GLUE's folder, the task's folder, or "tfds". A new table has GLUE's columns unless
    `config.text_a` and `text_b` name others.
    """

    _index_columns = _INDEX

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        training: bool = True,
        labels: tuple[str, ...] = (),
        new: str | Sequence[Text] = "",
    ):
        self.task = TASKS[config.name]
        texts = (config.text_a, *([config.text_b] if config.text_b else []))
        if not new or texts == ("text",):
            texts = self.task.texts
        if new and len(texts) != len(self.task.texts):
            expected = "a pair: set config.task.text_b too" if len(texts) == 1 else "one text"
            raise UserError(f"{config.name} takes {expected} (columns: {', '.join(texts)})")
        config = dataclasses.replace(
            config,
            text_a=texts[0],
            text_b="".join(texts[1:]),
            label=self.task.label,
            labels=",".join(self.task.labels),
            objective="class" if self.task.labels else "number",
        )
        super().__init__(config, vocabulary, training, labels, new)
        self.best_by = self.task.best_by

    def sources(self) -> dict[str, str]:
        """Return the file, or TFDS split, of each available split."""
        if self.config.data == TFDS:
            return {**_tfds_splits(self.config.name), **super().sources()}
        root = pathlib.Path(self.config.data)
        folder = root / self.task.folder if (root / self.task.folder).is_dir() else root
        splits = _MNLI_SPLITS if self.config.name == "mnli" else _SPLITS
        names = {split: (f"{name}.tsv",) for split, name in splits.items()}
        paths = find_files(self.config, folder, names)
        if self.config.name == "mnli" and self.config.data:
            candidates = (existing(parent / name) for parent in (root, folder) for name in _AX)
            if path := next(filter(None, candidates), ""):
                paths["ax"] = path
        return paths

    def rows(self, split: str, source: str | Sequence[Text]) -> Iterator[Row]:
        """Yield the rows of a split's file, or of new texts."""
        if split == NEW or not isinstance(source, str):
            yield from super().rows(split, source)
        elif source.startswith(f"{TFDS}:"):
            yield from _tfds_rows(self.config.name, source)
        else:
            skipped: list[str] = []
            required = classification.requires_labels(split, self._model_labels)
            yield from read(self.config.name, source, split, required, skipped)
            if skipped:
                self.report.append(
                    f"{split}: {len(skipped):,} rows skipped for missing columns, the first "
                    f"{skipped[0]}"
                )

    def measure(self, truth: np.ndarray, logits: Float[np.ndarray, "E C"]) -> dict[str, float]:
        """Return GLUE's metrics, and their mean if there are two."""
        return _with_mean(super().measure(truth, logits), self.task)

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Write predictions, and for a test split GLUE's submission file, e.g. MNLI-mm.tsv."""
        super().write(split, logits, folder)
        matched = "MNLI-m.tsv" if self.config.name == "mnli" else f"{self.task.folder}.tsv"
        names = {"test": matched, "test_mismatched": "MNLI-mm.tsv", "ax": "AX.tsv"}
        if split not in names:
            return
        stacked = self.stacked(logits)
        if self.task.labels:
            predictions = [label for (label,) in self.predicted(stacked)]
        else:
            predictions = [f"{x:.3f}" for x in np.clip(stacked[:, 0], 0, 5)]
        rows = [[r.index, p] for r, p in zip(self._rows[split], predictions, strict=True)]
        write_table(folder / names[split], [["index", "prediction"], *rows])


def read(
    name: str, source: str, split: str, requires_labels: bool, skipped: list[str]
) -> Iterator[Row]:
    """Yield the rows of a file in GLUE's format.

    Args:
        name, source, split: the task, the file and the split that it holds.
        requires_labels: whether a row without a label is an error.
        skipped: list to which a message is appended for each skipped row of QQP.
    """
    task = TASKS[name]
    records = tables.read(
        source,
        task.texts,
        kind=".tsv",
        header=_COLA_COLUMNS if name == "cola" and not split.startswith("test") else None,
        quoting=False,
        empty=True,  # QQP contains empty questions
        skip=skipped.append if name == "qqp" else None,
    )
    for number, (where, fields) in enumerate(records):
        a, b = [*(fields[column] for column in task.texts), None][:2]
        label = classification.get_label(where, fields, task.label, requires_labels)
        index = next((fields[name] for name in _INDEX if name in fields), str(number))
        yield Row(where, index, a, b, label)


def score(name: str, data: str, predictions: str) -> dict[str, float]:
    """Compute GLUE's metrics of a prediction file.

    Args:
        name, data: the task and its labeled file, in GLUE's format.
        predictions: path of a .tsv with the columns index and prediction (GLUE's format) or label
            (the format of `Glue.write`; score for STS-B).
    """
    task, predictions_by_index = TASKS[name], {}
    for where, fields in tables.read(predictions, ["index"], kind=".tsv"):
        columns = ("prediction", "label", task.label)
        value = next((fields[column] for column in columns if column in fields), None)
        if value is None:
            raise UserError(f"{where}: no column 'prediction' (columns: {', '.join(fields)[:200]})")
        if fields["index"] in predictions_by_index:
            raise UserError(f"{where}: duplicate prediction for index {fields['index']}")
        predictions_by_index[fields["index"]] = (where, value)
    labels, predicted = [], []
    for row in read(name, data, "dev", True, []):
        if row.index not in predictions_by_index:
            raise UserError(f"{predictions}: no prediction for index {row.index} ({row.where})")
        where, value = predictions_by_index.pop(row.index)
        labels.append(_parse_label(task, row.label, row.where))
        predicted.append(_parse_label(task, value, where))
    if predictions_by_index:
        index, (where, _) = next(iter(predictions_by_index.items()))
        raise UserError(f"{where}: prediction for index {index}, which {data} does not have")
    if not labels:
        raise UserError(f"{data} holds no rows to score")
    truth, guesses = np.array(labels), np.array(predicted)
    if task.labels:
        return _with_mean(metrics.classification(truth, guesses, len(task.labels)), task)
    return _with_mean(metrics.regression(truth, guesses), task)


@storage.with_local_inputs("folders")
@storage.with_uploaded_output("out")
def submission(folders: Sequence[str | pathlib.Path], out: str | pathlib.Path) -> list[str]:
    """Collect GLUE's prediction files found anywhere in the folders into the server's zip.

    Those of checkpoints that were evaluated later, in predictions_STEP, are left out.

    Returns:
        What the server would reject, one line each: missing files, wrong numbers of predictions.
    """
    paths: dict[str, pathlib.Path] = {}
    for folder in map(pathlib.Path, folders):
        with files.one_line_errors(f"cannot read {folder}"):
            predictions = sorted(folder.rglob("*.tsv"))
        for path in predictions:
            parts = path.relative_to(folder).parts
            if path.name not in SUBMISSION or any(p.startswith("predictions_") for p in parts):
                continue
            if path.name in paths and not path.samefile(paths[path.name]):
                raise UserError(
                    f"{path} and {paths[path.name]} are for the same task: pass one folder per task"
                )
            paths[path.name] = path
    if not paths:
        raise UserError(
            f"no {', '.join(list(SUBMISSION)[:3])}, … below {', '.join(map(str, folders))}: "
            "predict GLUE's test sets first"
        )
    notes = [
        f"{name} is missing: the server requires all files" for name in SUBMISSION.keys() - paths
    ]
    with (
        files.one_line_errors(f"cannot write {out}"),
        files.atomic_write(out) as temporary,
        zipfile.ZipFile(temporary, "w") as archive,
    ):
        for name, path in sorted(paths.items()):
            data = path.read_bytes()
            # ZipInfo's default date makes the archive reproducible.
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
            rows = data.count(b"\n") - 1
            if rows != SUBMISSION[name]:
                notes.append(f"{path}: {rows:,} predictions instead of {SUBMISSION[name]:,}")
    return sorted(notes)


def _with_mean(values: dict[str, float], task: GlueTask) -> dict[str, float]:
    if "_" in task.best_by:
        first, second = task.best_by.split("_")
        values[task.best_by] = (values[first] + values[second]) / 2
    return values


def _parse_label(task: GlueTask, text: str, where: str) -> int | float:
    if not task.labels:
        return classification.read_number(where, text)
    if text not in task.labels:
        raise UserError(f"{where}: {text!r} is not {' or '.join(task.labels)}")
    return task.labels.index(text)


# --- TensorFlow Datasets --------------------------------------------------------------------------


def _tfds_source(name: str, split: str | None) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise missing("--data tfds needs TensorFlow Datasets", "tfds") from None
    try:
        # Unlike tfds.load, random access into ArrayRecord does not need TensorFlow.
        folder = os.environ.get("TFDS_DATA_DIR")
        return tfds.data_source(f"glue/{name}", split=split, data_dir=folder)
    except Exception as error:  # the dataset's code, the network or the disk can raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"tfds glue/{name}: {reason.rstrip('.')}; prepare it on a machine with network access, "
            'with file_format="array_record", and set TFDS_DATA_DIR to its folder'
        ) from None


def _tfds_splits(name: str) -> dict[str, str]:
    available = _tfds_source(name, None)
    names = _MNLI_SPLITS if name == "mnli" else _SPLITS
    tfds_splits = {split: value.replace("dev", "validation") for split, value in names.items()}
    return {split: f"{TFDS}:{x}" for split, x in tfds_splits.items() if x in available}


def _tfds_rows(name: str, source: str) -> Iterator[Row]:
    """Yield the rows in the order of GLUE's files; TFDS shuffles them."""
    data, task = _tfds_source(name, source.removeprefix(f"{TFDS}:")), TASKS[name]
    names = getattr(data.dataset_info.features["label"], "names", None)
    for example in sorted((data[i] for i in range(len(data))), key=lambda row: int(row["idx"])):
        texts = [example[k].decode(errors="replace") for k in task.tfds_texts or task.texts]
        label: Any = float(example["label"])
        if label < 0:
            label = None
        elif names is not None:  # TFDS orders labels differently and renames "0" and "1"
            label = names[int(label)] if task.labels[0] in names else str(int(label))
        index, (a, b) = int(example["idx"]), [*texts, None][:2]
        yield Row(f"{source}:{index}", str(index), a, b, label)
