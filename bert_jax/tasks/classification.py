"""Classification of texts and of pairs: one label, several labels, or a number; tables of one's own.

The sequences are BERT's (Devlin et al., section 4.1): `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`.
"""

import collections
import difflib
import math
import pathlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from bert_jax import files, metrics
from bert_jax.config import TaskConfig
from bert_jax.data import tables
from bert_jax.data.examples import NO_EXAMPLE, Examples, pair
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.tasks.problem import Logits

PREDICTIONS = "predictions.tsv"
NEW = "new"
# Between several labels in one cell. A JSON or Parquet list needs none.
SEPARATOR = "|"
THRESHOLD = 0.5
_NAMED_LABELS = 12  # in messages


class Row(NamedTuple):
    """A text or a pair as it was read.

    Attributes:
        where: "file:line", for messages.
        index: what predictions call it.
        a: the text.
        b: the second one of a pair.
        label: as the file has it; None where it has none.
    """

    where: str
    index: str
    a: str
    b: str | None
    label: Any


class Classification:
    """A `Problem` of labelled texts or pairs in tables.

    Args:
        config: the task; `objective` "class" has one label a row, "number" a number, "classes" any
            number of labels: a list in JSON and Parquet, names with "|" between in a cell.
        vocabulary: of the model.
        splits: which of "train", "dev" and "test" to read; None all there are.
        labels: those of a fine-tuned model. Without them `config.labels`, or the ones of the
            training data in order. With them only training data must be labelled.
        new: a table, lines of text (of pairs: with a tab between), or "-" for lines from standard
            input, to be read as the one split "new"; it need not be labelled.

    Raises:
        UserError: a file or a row that is not as it should be; a label that is none of them.
    """

    head = "sequence"

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        splits: Collection[str] | None = None,
        labels: tuple[str, ...] = (),
        new: str = "",
    ):
        self.config, self.objective = config, config.objective
        self.report: list[str] = []
        self.best_by = {"class": "accuracy", "classes": "micro_f1", "number": "pearson"}[
            config.objective
        ]
        self._model_labels = labels
        sources = {NEW: new} if new else self.sources()
        names = [NEW] if new else list(sources if splits is None else splits)
        for name in names:
            if not sources.get(name):
                raise UserError(
                    f"no {name!r} split: set config.task.{name.partition('_')[0]} or look at what "
                    f"config.task.data holds (there is: {', '.join(sources) or 'nothing'})"
                )
        rows = {name: list(self.rows(name, sources[name])) for name in names}
        for name, found in rows.items():
            if not found and name != NEW:
                raise UserError(f"{sources[name]} ({name}) holds no rows; it needs one at least")
        self.labels = labels or self._find_labels(rows, sources)
        ids = {label: i for i, label in enumerate(self.labels)}
        self.splits: dict[str, Examples] = {}
        self._rows: dict[str, list[Row]] = rows
        for name, found in rows.items():
            self.splits[name] = self._examples(name, found, ids, vocabulary)
        if "train" in rows and self.objective != "number":
            self._note_absent()

    # --- Reading ----------------------------------------------------------------------------------

    def sources(self) -> dict[str, str]:
        """The file of each split there is."""
        named = {"train": self.config.train, "dev": self.config.dev, "test": self.config.test}
        return {name: path for name, path in named.items() if path}

    def rows(self, split: str, source: str) -> Iterator[Row]:
        """What a split's file holds."""
        config, must = self.config, self.must_be_labelled(split)
        texts = [config.text_a, config.text_b] if config.text_b else [config.text_a]
        records = own_records(source, split, texts, (config.label,))
        for index, (where, fields) in enumerate(records):
            several = self.objective == "classes"
            label = labelled(where, fields, config.label, must, several)
            b = fields[config.text_b] if config.text_b else None
            yield Row(where, str(index), fields[config.text_a], b, label)

    def must_be_labelled(self, split: str) -> bool:
        """Whether a row without a label is an error."""
        trains = split == "train" or not self._model_labels
        return trains and not split.startswith(("test", NEW))

    def _find_labels(self, rows: dict[str, list[Row]], sources: dict[str, str]) -> tuple[str, ...]:
        if self.objective == "number":
            return (self.config.label,)
        if self.config.labels:
            return read_labels(self.config.labels)
        train = rows.get("train") or (
            self.rows("train", sources["train"]) if "train" in sources else ()
        )
        found = {name for row in train for name in self._names(row)}
        if len(found) < 2:
            what = f"only the label {next(iter(found))!r}" if found else "no labels"
            raise UserError(
                f"{what} in {sources.get('train') or 'the training data (there is none)'}: there "
                "must be two at least; set config.task.labels to name them all"
            )
        if any("," in name for name in found) and self.objective == "classes":
            comma = next(name for name in sorted(found) if "," in name)
            self.report.append(
                f"{comma!r} is taken as one label; several in a cell are written a{SEPARATOR}b"
            )
        return tuple(sorted(found, key=_label_order(found)))

    def _names(self, row: Row) -> list[str]:
        """The labels a row has; for "class" one or, where it is unknown, none."""
        label = row.label
        if self.objective == "classes":
            if isinstance(label, str):
                label = [name for name in label.split(SEPARATOR) if name.strip()]
            elif not isinstance(label, list):
                label = [] if label is None else [label]
            return [_label_name(name, row.where) for name in label]
        if isinstance(label, list):
            raise UserError(
                f"{row.where}: a list of labels; config.task.objective='classes' is for several"
            )
        return [] if label is None else [_label_name(label, row.where)]

    def _target(self, row: Row, ids: dict[str, int]) -> Any:
        if self.objective == "number":
            return math.nan if row.label is None else _number(row)
        found = []
        for name in self._names(row):
            if name not in ids:
                raise UserError(_unseen(row.where, name, self.labels, bool(self._model_labels)))
            found.append(ids[name])
        if self.objective == "class":
            return found[0] if found else NO_EXAMPLE
        known = np.full(len(ids), math.nan if row.label is None else 0.0, np.float32)
        known[found] = 1.0
        return known

    def _examples(
        self, split: str, rows: list[Row], ids: dict[str, int], vocabulary: Vocabulary
    ) -> Examples:
        targets = [self._target(row, ids) for row in rows]
        kind = np.int32 if self.objective == "class" else np.float32
        shape = (len(rows), len(ids)) if self.objective == "classes" else (len(rows),)
        tokens, a_length, note = encode(
            vocabulary, [row.a for row in rows], [row.b for row in rows], self.config.tokens
        )
        self.report.append(f"{split}: {len(rows):,} examples{note}")
        return Examples(tokens, a_length, {"label": np.array(targets, kind).reshape(shape)})

    def _note_absent(self) -> None:
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
        """The metrics of a split's labelled examples; none where there are no labels."""
        truth, values = self.splits[split].targets["label"], self.stacked(logits)
        known = _known(truth)
        return self.measure(truth[known], values[known]) if known.any() else {}

    def measure(self, truth: np.ndarray, logits: Float[np.ndarray, "E C"]) -> dict[str, float]:
        """The metrics of logits."""
        if self.objective == "number":
            return metrics.regression(truth, logits[:, 0])
        if self.objective == "class":
            return metrics.classification(truth, logits.argmax(1), len(self.labels))
        return metrics.several_labels(truth > 0.5, probabilities(logits, "classes") > THRESHOLD)

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Writes predictions.tsv: index, label (or number), the probability of every label.

        Where labels are known also a picture: confusion.png, or scatter.png for numbers.
        """
        values = self.stacked(logits)
        if self.objective == "number":
            header, cells = ["index", self.labels[0]], [[f"{x:.6g}"] for x in values[:, 0]]
        else:
            chances = probabilities(values, self.objective)
            header = ["index", "label", *(f"probability:{label}" for label in self.labels)]
            cells = [
                [name, *(f"{p:.6f}" for p in row)]
                for name, row in zip(self.predicted(values), chances, strict=True)
            ]
        lines = [[row.index, *more] for row, more in zip(self._rows[split], cells, strict=True)]
        with files.one_line_errors(f"cannot write predictions to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            write_table(folder / PREDICTIONS, [header, *lines])
            truth = self.splits[split].targets["label"]
            known = _known(truth)
            if not known.any() or self.objective == "classes":
                return
            if self.objective == "number":
                draw_scatter(truth[known], values[known, 0], folder / "scatter.png")
            else:
                counts = np.zeros((len(self.labels), len(self.labels)), np.int64)
                np.add.at(counts, (truth[known], values[known].argmax(1)), 1)
                draw_confusion(counts, self.labels, folder / "confusion.png")

    def stacked(self, logits: Logits) -> Float[np.ndarray, "E C"]:
        """The logits of all examples."""
        return np.array([np.asarray(x) for x in logits], np.float64).reshape(-1, len(self.labels))

    def predicted(self, logits: Float[np.ndarray, "E C"]) -> list[str]:
        """The label of each example, or its labels with "|" between."""
        if self.objective == "class":
            return [self.labels[i] for i in logits.argmax(1)]
        over = probabilities(logits, "classes") > THRESHOLD
        return [SEPARATOR.join(self.labels[i] for i in np.flatnonzero(row)) for row in over]


def own_records(
    source: str, split: str, texts: Sequence[str], optional: Sequence[str]
) -> Iterator[tables.Record]:
    """The records of a table of one's own; the split "new" may be lines of text, and empty ones."""
    kind = ""
    if split == NEW and (source == tables.STANDARD_INPUT or tables.kind_of(source) == ".txt"):
        kind = ".txt"
    elif tables.kind_of(source) == ".txt":
        raise UserError(f"{source}: .txt has no columns; a table is .tsv, .csv, .jsonl or .parquet")
    yield from tables.read(
        source,
        texts,
        optional=optional,
        kind=kind,
        header=texts if kind == ".txt" else None,
        empty=split == NEW,
    )


def labelled(
    where: str, fields: dict[str, Any], label: str, must: bool, several: bool = False
) -> Any:
    """The label in a record; None where it has none, [] for an empty cell of several labels.

    Raises:
        UserError: it must have one.
    """
    value = fields.get(label)
    empty = isinstance(value, str) and not value.strip()
    if empty and several:
        return []
    if value is not None and not empty:
        return value
    if must:
        what = f"{label!r} is empty" if empty else f"no {label!r}"
        raise UserError(
            f"{where}: {what} (it has: {', '.join(fields)[:200]}); label that row, or set "
            "config.task.label to the column of the labels"
        )
    return None


def read_labels(names: str) -> tuple[str, ...]:
    """The labels in a file, one a line, or in a line with commas between.

    Raises:
        UserError: fewer than two, one twice, or something that looks like a missing file.
    """
    path = pathlib.Path(names)
    if path.is_file():
        records = tables.read(path, ["label"], kind=".txt", header=["label"])
        found = [_label_name(record.fields["label"], record.where) for record in records]
    elif path.suffix in tables.KINDS:
        raise UserError(f"config.task.labels: there is no file {names}")
    else:
        found = [_label_name(name, "config.task.labels") for name in names.split(",")]
    twice = [name for name, n in collections.Counter(found).items() if n > 1]
    if twice or len(found) < 2:
        what = f"{twice[0]!r} is there twice" if twice else "fewer than two labels"
        raise UserError(f"config.task.labels ({names[:80]}): {what}; each label is named once")
    return tuple(found)


def _label_name(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():  # as a table with a gap in it has them
        value = int(value)
    name = str(value).strip()
    if not isinstance(value, str | int | float) or not name or not name.isprintable():
        raise UserError(f"{where}: {value!r} is no label; one is a word or a few on one line")
    return name


def _label_order(names: Iterable[str]) -> Any:
    try:
        if all(math.isfinite(float(name)) for name in names):
            return lambda name: (float(name), name)
    except ValueError:
        pass
    return str


def _unseen(where: str, name: str, labels: Sequence[str], learned: bool) -> str:
    shown = ", ".join(labels[:_NAMED_LABELS]) + ", …" * (len(labels) > _NAMED_LABELS)
    nearest = difflib.get_close_matches(name, labels, 1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return (
        f"{where}: the label {name!r} is none of the {len(labels)} there are ({shown}); {hint}"
        f"mend it, or {'leave it empty' if learned else 'name all labels in config.task.labels'}"
    )


def _number(row: Row) -> float:
    try:
        if isinstance(row.label, str | int | float) and math.isfinite(float(row.label)):
            return float(row.label)
    except (ValueError, OverflowError):  # JSON may hold whole numbers of any size
        pass
    raise UserError(
        f"{row.where}: {row.label!r} where a number is expected; mend it, or set "
        "config.task.objective='class' for labels"
    )


def encode(
    vocabulary: Vocabulary, a: Sequence[str], b: Sequence[str | None], most: int
) -> tuple[list[np.ndarray], list[int], str]:
    """Texts or pairs as sequences of at most `most` tokens.

    Returns:
        The sequences, how many tokens of each belong to segment a, and, for people, what was cut.
    """
    tokens, a_length, cut, lost = [], [], 0, 0
    texts = [text for pair_ in zip(a, b, strict=True) for text in pair_ if text is not None]
    found = iter(vocabulary.encode_all(texts))
    for text_b in b:
        first = next(found).ids.tolist()
        second = None if text_b is None else next(found).ids.tolist()
        ids, length, over = pair(vocabulary, first, second, most)
        tokens.append(ids)
        a_length.append(length)
        cut, lost = cut + (over > 0), lost + over
    note = f", {cut:,} sequences cut to {most} tokens ({lost:,} tokens lost)" if cut else ""
    return tokens, a_length, note


def probabilities(
    logits: Float[np.ndarray, "E C"], objective: str = "class"
) -> Float[np.ndarray, "E C"]:
    """Of logits: they add up to 1 over the labels, or for "classes" each is for itself."""
    if objective == "classes":
        return 0.5 * (1 + np.tanh(logits / 2))
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _known(truth: np.ndarray) -> np.ndarray:
    """Which examples have a label."""
    if truth.dtype == np.int32:
        return truth != NO_EXAMPLE
    return ~np.isnan(truth.reshape(len(truth), -1)).any(1)


def write_table(path: pathlib.Path, rows: Iterable[Sequence[str]], delimiter: str = "\t") -> None:
    """Replaces a file by rows of cells, which hold no delimiters."""
    files.write(path, "".join(f"{delimiter.join(row)}\n" for row in rows))


# --- Pictures -------------------------------------------------------------------------------------


def draw_confusion(
    counts: Int[np.ndarray, "C C"], labels: Sequence[str], path: pathlib.Path
) -> None:
    """Draws how often each label (a row) was taken for which (a column)."""
    from matplotlib.figure import Figure

    n = len(labels)
    cell, font = (0.7, 10) if n <= 6 else (0.45, 10) if n <= 25 else (0.24, 8)  # inches, points
    names = [label if len(label) <= 30 else f"{label[:29]}…" for label in labels]
    figure = Figure(figsize=(cell * n + 1, cell * n + 1))
    axes = figure.add_axes((0, 0, 1, 1))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # The root makes what is rare visible.
    axes.imshow(np.sqrt(shares), cmap="Blues", vmin=0, vmax=1.1)
    axes.set_xticks(range(n), names, rotation=90, fontsize=font, parse_math=False)
    axes.set_yticks(range(n), names, fontsize=font, parse_math=False)
    axes.set_xticks(np.arange(n - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(n - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="0.85", lw=0.5)
    axes.tick_params(which="minor", length=0)
    for i, j in zip(*np.nonzero(counts), strict=True):
        axes.text(
            j,
            i,
            f"{counts[i, j]}" if counts[i, j] < 10_000 else f"{counts[i, j] / 1000:.0f}k",
            ha="center",
            va="center",
            color="white" if shares[i, j] > 0.4 else "black",
            fontsize=min(10, cell * 25),
        )
    axes.set(xlabel="predicted", ylabel="label (darker: a larger share of its examples)")
    _save(figure, path, 150 if n <= 25 else 90)


def draw_scatter(
    truth: Float[np.ndarray, " E"], predicted: Float[np.ndarray, " E"], path: pathlib.Path
) -> None:
    """Draws predicted numbers over the true ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5))
    axes = figure.add_subplot()
    ends = [min(truth.min(), predicted.min()), max(truth.max(), predicted.max())]
    axes.plot(ends, ends, color="gray", lw=1)
    axes.scatter(truth, predicted, s=8, alpha=0.4, edgecolors="none")
    axes.set(xlabel="true", ylabel="predicted")
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path, 150)


def _save(figure: Any, path: pathlib.Path, dots_per_inch: int) -> None:
    with files.replacing(path) as beside, warnings.catch_warnings():
        # A script that the font lacks shows as boxes; nothing a person could do about it here.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(beside, format="png", dpi=dots_per_inch, bbox_inches="tight")
