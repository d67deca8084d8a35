"""Classification and regression of texts and text pairs, single-label or multilabel, from tables.

Sequences are BERT's (Devlin et al., section 4.1): `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`.
"""

import collections
import contextlib
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from bert_jax.config.schema import TaskConfig
from bert_jax.data import tables
from bert_jax.data.compressed import SUFFIXES
from bert_jax.data.examples import NO_EXAMPLE, Examples, pair
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError, counted, did_you_mean
from bert_jax.storage import files
from bert_jax.tasks import metrics
from bert_jax.tasks.base import NEW, FinetuneDataset, Logits, Prediction, Text

PREDICTIONS = "predictions.tsv"
# Separates the labels in a multilabel cell; JSON and Parquet use lists instead.
SEPARATOR = "|"
THRESHOLD = 0.5
_MAX_LABELS_SHOWN = 12  # in messages
T = TypeVar("T")


class Row(NamedTuple):
    """A text or a text pair as read from a table.

    Attributes:
        where: "file:line", for messages.
        index: its identifier in prediction files.
        a: the first text.
        b: the second text of a pair, else None.
        label: the value in the file; None if missing.
    """

    where: str
    index: str
    a: str
    b: str | None
    label: Any


class Classification(FinetuneDataset):
    """A dataset of labeled texts or text pairs in tables.

    With the objective "class" a row has one label, with "number" a number, with "classes" any number
    of labels: a list in JSON and Parquet, names separated by "|" in a cell. The labels are those of
    the model, `config.labels` or the sorted ones of the training data. New data are a table, lines of
    text (pairs: tab-separated) or "-" for lines from standard input.
    """

    head = "sequence"
    # Columns of a row's identifier, of which the first that a file has counts; else its number.
    _index_columns: tuple[str, ...] = ()

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        training: bool = True,
        labels: tuple[str, ...] = (),
        new: str | Sequence[Text] = "",
    ):
        self.config, self.objective = config, config.objective
        self.report: list[str] = []
        names = {"class": "accuracy", "classes": "micro_f1"}
        self.best_by = names.get(config.objective, "pearson")
        self._model_labels = labels
        sources: dict[str, Any] = {NEW: new} if new else self.sources()
        rows = read_splits(sources, training, self.rows)
        self.labels = labels or self._find_labels(rows, sources)
        ids = {label: i for i, label in enumerate(self.labels)}
        self._rows = rows
        self.splits = {
            name: self._examples(name, split_rows, ids, vocabulary)
            for name, split_rows in rows.items()
        }
        if "train" in rows and not self.is_number:
            self._report_absent_labels()

    @property
    def is_number(self) -> bool:
        """Whether the label is a number."""
        return self.objective in ("number", "relevance")

    # --- Reading ----------------------------------------------------------------------------------

    def sources(self) -> dict[str, str]:
        """Return the path of each split that has a file."""
        return table_files(self.config)

    def rows(self, split: str, source: str | Sequence[Text]) -> Iterator[Row]:
        """Yield the rows of a split's file, or of new texts."""
        if not isinstance(source, str):
            for i, text in enumerate(source):
                a, b = (text, None) if isinstance(text, str) else text
                yield Row(f"text {i}", str(i), a, b, None)
            return
        config, required = self.config, requires_labels(split, self._model_labels)
        texts = [config.text_a, config.text_b] if config.text_b else [config.text_a]
        records = read_records(source, split, texts, (config.label, *self._index_columns))
        for number, (where, fields) in enumerate(records):
            index = next((fields[name] for name in self._index_columns if name in fields), number)
            multilabel = self.objective == "classes"
            label = get_label(where, fields, config.label, required, multilabel)
            b = fields[config.text_b] if config.text_b else None
            yield Row(where, str(index), fields[config.text_a], b, label)

    def _find_labels(self, rows: dict[str, list[Row]], sources: dict[str, str]) -> tuple[str, ...]:
        if self.is_number:
            return (self.config.label,)
        if self.config.labels:
            return read_labels(self.config.labels)
        train = rows.get("train", [])
        if not train and "train" in sources:  # is not a split of an evaluation
            train = self.rows("train", sources["train"])
        names = {name for row in train for name in self._row_labels(row)}
        if len(names) < 2:
            problem = f"only the label {next(iter(names))!r}" if names else "no labels"
            raise UserError(
                f"{problem} in {sources.get('train') or 'the training data'}: at least two are needed; set "
                "config.task.labels to name them all"
            )
        comma = next((name for name in sorted(names) if "," in name), None)
        if comma and self.objective == "classes":
            self.report.append(
                f"{comma!r} is read as one label; write several labels as a{SEPARATOR}b"
            )
        return tuple(sorted(names, key=_label_order(names)))

    def _row_labels(self, row: Row) -> list[str]:
        """Return a row's labels; for "class" at most one."""
        label = row.label
        if self.objective == "classes":
            if isinstance(label, str):
                label = [name for name in label.split(SEPARATOR) if name.strip()]
            elif not isinstance(label, list):
                label = [] if label is None else [label]
            return [_label_name(name, row.where) for name in label]
        if isinstance(label, list):
            raise UserError(
                f"{row.where}: a list of labels: set config.task.objective='classes' to use lists"
            )
        return [] if label is None else [_label_name(label, row.where)]

    def _target(self, row: Row, ids: dict[str, int]) -> Any:
        if self.is_number:
            if row.label is None:
                return math.nan
            advice = "correct it, or set config.task.objective='class' for labels"
            return read_number(row.where, row.label, advice)
        label_ids = []
        for name in self._row_labels(row):
            if name not in ids:
                listed = ", ".join(self.labels[:_MAX_LABELS_SHOWN])
                listed += ", …" * (len(ids) > _MAX_LABELS_SHOWN)
                advice = (
                    "leave it empty" if self._model_labels else "set config.task.labels to list all"
                )
                raise UserError(
                    f"{row.where}: unknown label {name!r}, not one of the {len(ids)} labels ({listed})"
                    f"{did_you_mean(name, self.labels)}; correct it, or {advice}"
                )
            label_ids.append(ids[name])
        if self.objective == "class":
            return label_ids[0] if label_ids else NO_EXAMPLE
        target = np.full(len(ids), math.nan if row.label is None else 0.0, np.float32)
        target[label_ids] = 1.0
        return target

    def _examples(
        self, split: str, rows: list[Row], ids: dict[str, int], vocabulary: Vocabulary
    ) -> Examples:
        targets = [self._target(row, ids) for row in rows]
        dtype = np.int32 if self.objective == "class" else np.float32
        shape = (len(rows), len(ids)) if self.objective == "classes" else (len(rows),)
        tokens, a_length, note = encode(
            vocabulary, [row.a for row in rows], [row.b for row in rows], self.config.tokens
        )
        self.report.append(f"{split}: {counted(len(rows), 'example')}{note}")
        return Examples(tokens, a_length, {"label": np.array(targets, dtype).reshape(shape)})

    def _report_absent_labels(self) -> None:
        values = self.splits["train"].targets["label"]
        if self.objective == "class":
            counts = np.bincount(values[values >= 0], minlength=len(self.labels))
        else:
            counts = np.nansum(values, 0)
        absent = [label for label, n in zip(self.labels, counts, strict=True) if not n]
        if absent:
            self.report.append(f"no training example of: {', '.join(absent)[:200]}")

    # --- Scoring ----------------------------------------------------------------------------------

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """Return the metrics of a split's labeled examples; empty if none is labeled."""
        targets, values = self.splits[split].targets["label"], self.stacked(logits)
        known = _is_labeled(targets)
        return self.measure(targets[known], values[known]) if known.any() else {}

    def measure(self, truth: np.ndarray, logits: Float[np.ndarray, "E C"]) -> dict[str, float]:
        """Return the metrics of logits against labels."""
        if self.is_number:
            return metrics.regression(truth, logits[:, 0])
        if self.objective == "class":
            return metrics.classification(truth, logits.argmax(1), len(self.labels))
        return metrics.multilabel_metrics(truth > 0.5, probabilities(logits, "classes") > THRESHOLD)

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Write predictions.tsv: index, label (or number), the probability of every label, and the texts."""
        stacked = self.stacked(logits)
        if self.is_number:
            header, cells = ["index", self.labels[0]], [[f"{x:.6g}"] for x in stacked[:, 0]]
        else:
            probs = probabilities(stacked, self.objective)
            header = ["index", "label", *(f"probability:{label}" for label in self.labels)]
            cells = [
                [SEPARATOR.join(names), *(f"{p:.6f}" for p in row)]
                for names, row in zip(self.predicted(stacked), probs, strict=True)
            ]
        lines = [
            [row.index, *more, *text_cells(row.a, row.b)]
            for row, more in zip(self._rows[split], cells, strict=True)
        ]
        header += filter(None, (self.config.text_a, self.config.text_b))
        write_table(folder / PREDICTIONS, [header, *lines])

    def predictions(self, split: str, logits: Logits) -> list[Prediction]:
        """Return the label or labels of each example with their probabilities, or its number."""
        stacked = self.stacked(logits)
        if self.is_number:
            return [Prediction(float(value), {}) for value in stacked[:, 0]]
        return [
            Prediction(
                names if self.objective == "classes" else names[0],
                dict(zip(self.labels, row.tolist(), strict=True)),
            )
            for names, row in zip(
                self.predicted(stacked), probabilities(stacked, self.objective), strict=True
            )
        ]

    def stacked(self, logits: Logits) -> Float[np.ndarray, "E C"]:
        """Stack the logits of all examples."""
        return np.array([np.asarray(x) for x in logits], np.float64).reshape(-1, len(self.labels))

    def predicted(self, logits: Float[np.ndarray, "E C"]) -> list[tuple[str, ...]]:
        """Return each example's labels, one for "class"."""
        if self.objective == "class":
            return [(self.labels[i],) for i in logits.argmax(1)]
        positive = probabilities(logits, "classes") > THRESHOLD
        return [tuple(self.labels[i] for i in np.flatnonzero(row)) for row in positive]


def read_splits(
    sources: Mapping[str, Any], training: bool, read: Callable[[str, Any], Iterable[T]]
) -> dict[str, list[T]]:
    """Return the rows of each split that is needed. Only the split "new" may have none.

    Args:
        sources: path of each split's file.
        training: whether the training data are needed.
        read: function from a split and its path to its rows.
    """
    names = [name for name in sources if training or name != "train"]
    rows = {name: list(read(name, sources[name])) for name in names}
    for name in names:
        if not rows[name] and name != NEW:
            raise UserError(f"{sources[name]} ({name}) holds no rows: add at least one")
    return rows


def table_files(config: TaskConfig) -> dict[str, str]:
    """Return the path of each split whose file the config names."""
    if config.data and not config.name:
        raise UserError(
            f"config.task.data is {config.data!r}, but it is for benchmarks; set config.task.train and "
            "config.task.dev to the files of your table, or config.task.name to a benchmark"
        )
    paths = {"train": config.train, "dev": config.dev, "test": config.test}
    return {split: path for split, path in paths.items() if path}


def requires_labels(split: str, model_labels: Sequence[str]) -> bool:
    """Whether every row of a split needs a label, given the labels of a fine-tuned model.

    GLUE does not publish the labels of its test sets and of "ax".
    """
    return split == "train" or not (model_labels or split.startswith(("test", "ax", NEW)))


def find_files(
    config: TaskConfig, folder: str | pathlib.Path, names: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the path of each split's file: that of the config, else the first that a folder has.

    Args:
        config: the task. Without `config.data` the folder is not used.
        folder: the folder of the benchmark's files, which may be compressed.
        names: by split, names of its file.
    """
    paths = {}
    for split, candidates in names.items():
        found = (existing(pathlib.Path(folder, name)) for name in candidates if config.data)
        if path := getattr(config, split, "") or next(filter(None, found), ""):
            paths[split] = path
    if not paths:
        known = ", ".join(name for candidates in names.values() for name in candidates[:1])
        raise UserError(
            f"no data: set config.task.train and config.task.dev, or config.task.data "
            f"({config.data!r}) to a folder with {known or 'the files of config.task.name'}, which may "
            "be compressed"
        )
    return paths


def existing(path: pathlib.Path) -> str:
    """Return the path of a file that exists plain or compressed, else ""."""
    names = [f"{path.name}{suffix}" for suffix in ("", *SUFFIXES)]
    return next((str(path.with_name(name)) for name in names if path.with_name(name).is_file()), "")


def read_records(
    source: str, split: str, texts: Sequence[str], optional: Sequence[str]
) -> Iterator[tables.Record]:
    """Read the records of a user's table. The split "new" may also be plain text, and empty."""
    is_text = source == tables.STANDARD_INPUT or tables.kind_of(source) == ".txt"
    if is_text and split != NEW:
        raise UserError(f"{source}: .txt has no columns: use .tsv, .csv, .jsonl or .parquet")
    kind, header = (".txt", texts) if is_text else ("", None)
    return tables.read(
        source, texts, optional=optional, kind=kind, header=header, empty=split == NEW
    )


def get_label(
    where: str, fields: dict[str, Any], label: str, required: bool, multilabel: bool = False
) -> Any:
    """Return the label of a record: None if missing or NaN, [] for an empty multilabel cell."""
    value = fields.get(label)
    if value != value:  # NaN, the missing value of pandas
        value = None
    empty = isinstance(value, str) and not value.strip()
    if empty and multilabel:
        return []
    if value is not None and not empty:
        return value
    if required:
        problem = f"{label!r} is empty" if empty else f"no {label!r}"
        raise UserError(
            f"{where}: {problem} (it has: {', '.join(fields)[:200]}); label the row, or name the column "
            "of the labels: --config.task.label=COLUMN"
        )
    return None


def read_labels(names: str) -> tuple[str, ...]:
    """Read labels from a file, one per line, or from a comma-separated list."""
    path = pathlib.Path(names)
    if path.is_file():
        records = tables.read(path, ["label"], kind=".txt", header=["label"])
        labels = [_label_name(record.fields["label"], record.where) for record in records]
    elif path.suffix in tables.KINDS:
        raise UserError(f"config.task.labels: file {names} does not exist")
    else:
        labels = [_label_name(name, "config.task.labels") for name in names.split(",")]
    duplicates = [name for name, n in collections.Counter(labels).items() if n > 1]
    if duplicates or len(labels) < 2:
        problem = f"duplicate label {duplicates[0]!r}" if duplicates else "fewer than two labels"
        raise UserError(f"config.task.labels ({names[:80]}): {problem}; name each label once")
    return tuple(labels)


def _label_name(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # Integer columns with missing values are read as floats.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = str(value).strip()
    is_label = isinstance(value, str | int | float) and value == value  # NaN is none
    if not is_label or not name or not name.isprintable():
        raise UserError(f"{where}: {value!r} is not a label: labels are words on one line")
    return name


def _label_order(names: Iterable[str]) -> Any:
    """Return a key that sorts labels by their value if all are numbers, else by name."""
    with contextlib.suppress(ValueError):
        if all(math.isfinite(float(name)) for name in names):
            return lambda name: (float(name), name)
    return str


def read_number(where: str, value: Any, advice: str = "correct it") -> float:
    """Return a finite number of a table, which may be text; Python's `1_5` is none."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        # JSON integers can exceed the range of float.
        with contextlib.suppress(ValueError, OverflowError):
            if "_" not in str(value) and math.isfinite(number := float(value)):
                return number
    raise UserError(f"{where}: {value!r} is not a number: {advice}")


def encode(
    vocabulary: Vocabulary, a: Sequence[str], b: Sequence[str | None], max_tokens: int
) -> tuple[list[np.ndarray], list[int], str]:
    """Tokenize texts or pairs to sequences of at most `max_tokens` tokens.

    Returns:
        The sequences, the number of tokens of segment a in each, and a note on truncation for the
        report ("" if nothing was truncated).
    """
    tokens, a_length, num_truncated, num_lost = [], [], 0, 0
    texts = [text for pair_ in zip(a, b, strict=True) for text in pair_ if text is not None]
    encoded = iter(vocabulary.encode_all(texts))
    for text_b in b:
        first = next(encoded).ids.tolist()
        second = None if text_b is None else next(encoded).ids.tolist()
        ids, length, excess = pair(vocabulary, first, second, max_tokens)
        tokens.append(ids)
        a_length.append(length)
        num_truncated, num_lost = num_truncated + (excess > 0), num_lost + excess
    note = (
        f", {num_truncated:,} sequences cut to {max_tokens} tokens ({num_lost:,} tokens lost)"
        if num_truncated
        else ""
    )
    return tokens, a_length, note


def probabilities(
    logits: Float[np.ndarray, "E C"], objective: str = "class"
) -> Float[np.ndarray, "E C"]:
    """Return probabilities: softmax over the labels, or a sigmoid per label for "classes"."""
    from scipy import special

    return special.expit(logits) if objective == "classes" else special.softmax(logits, 1)


def _is_labeled(targets: np.ndarray) -> Any:
    """Return a mask of the examples that have a label."""
    if targets.dtype == np.int32:
        return np.not_equal(targets, NO_EXAMPLE)
    return ~np.isnan(targets.reshape(len(targets), -1)).any(1)


def text_cells(*texts: str | None) -> list[str]:
    """Return texts as cells, without those that are None: tabs and line breaks become spaces."""
    return [" ".join(text.split()) for text in texts if text is not None]


def write_table(path: pathlib.Path, rows: Iterable[Sequence[str]], delimiter: str = "\t") -> None:
    """Write rows of cells, which must not contain the delimiter, replacing the file."""
    files.write(path, "".join(f"{delimiter.join(row)}\n" for row in rows))
