"""Multiple choice: SWAG and the user's own tables (Devlin et al., section 4.4).

A question with n choices becomes n sequences `[CLS] context [SEP] choice [SEP]`, each with a score.
"""

import contextlib
import csv
import io
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.config.schema import TaskConfig
from bert_jax.data import tables
from bert_jax.data.examples import NO_EXAMPLE, Examples
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError, counted
from bert_jax.storage import files
from bert_jax.tasks.base import NEW, FinetuneDataset, Logits
from bert_jax.tasks.tables import (
    encode,
    find_files,
    get_label,
    probabilities,
    read_number,
    read_splits,
    requires_labels,
    table_files,
)

_SWAG = {"train": ("train.csv",), "dev": ("val.csv",), "test": ("test.csv",)}
_ENDINGS = ("ending0", "ending1", "ending2", "ending3")


class _Question(NamedTuple):
    context: str
    choices: tuple[str, ...]
    label: int


class MultipleChoice(FinetuneDataset):
    """A multiple-choice dataset: select the choice that fits a context.

    With `config.name` "swag", columns are those of SWAG's files. In the user's own tables `text_a` is
    the context, `text_b` (if not "") is prepended to each of the columns `choices`, and `label` is the
    index of the correct choice from 0 or its column's name.
    """

    head = "choice"
    best_by = "accuracy"

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        training: bool = True,
        labels: tuple[str, ...] = (),
        new: str = "",
    ):
        self._a, self._b, self._label = config.text_a, config.text_b, config.label
        self.choices = tuple(config.choices)
        sources = {NEW: new} if new else {}
        if config.name == "swag":
            sources = sources or find_files(config, config.data, _SWAG)
            self._a, self._b, self._label, self.choices = "sent1", "sent2", "label", _ENDINGS
        if len(self.choices) < 2 or len({*self.choices}) < len(self.choices):
            raise UserError(
                f"config.task.choices is {self.choices!r}: name the columns of at least two "
                "choices, each once"
            )
        self.labels = labels or ("score",)
        self.report: list[str] = []
        self.splits = {}
        for name, questions in read_splits(
            sources or table_files(config),
            training,
            lambda name, source: self._questions(source, requires_labels(name, labels)),
        ).items():
            context = [q.context for q in questions for _ in q.choices]
            choices = [choice for q in questions for choice in q.choices]
            tokens, a_length, note = encode(vocabulary, context, choices, config.tokens)
            targets = {"label": np.array([q.label for q in questions], np.int32)}
            self.splits[name] = Examples(tokens, a_length, targets, group=len(self.choices))
            self.report.append(f"{name}: {counted(len(questions), 'question')}{note}")

    def _questions(self, source: str, required: bool) -> Iterator[_Question]:
        optional = [self._b, self._label] if self._b else [self._label]
        for where, fields in tables.read(source, [self._a, *self.choices], optional=optional):
            choices = tuple(fields[name] for name in self.choices)
            if self._b:
                prefix = fields.get(self._b)
                if not isinstance(prefix, str):
                    raise UserError(
                        f"{where}: no text in {self._b!r}, which is prepended to each choice"
                    )
                choices = tuple(f"{prefix} {choice}".strip() for choice in choices)
            value = get_label(where, fields, self._label, required)
            yield _Question(
                fields[self._a],
                choices,
                NO_EXAMPLE if value is None else self._choice_index(value, where),
            )

    def _choice_index(self, value: object, where: str) -> int:
        if value in self.choices:
            return self.choices.index(value)
        with contextlib.suppress(UserError):
            index = read_number(where, value)
            if index in range(len(self.choices)):
                return int(index)
        raise UserError(
            f"{where}: {value!r} is not a choice: it must be 0 to {len(self.choices) - 1} or one "
            f"of {', '.join(self.choices)[:200]}"
        )

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """Return the accuracy on a split's labeled questions; empty if none is labeled."""
        labels = self.splits[split].targets["label"]
        correct = np.array([np.argmax(x) for x in logits], np.int64) == labels
        known = labels != NO_EXAMPLE
        return {"accuracy": float(correct[known].mean())} if known.any() else {}

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Write the chosen indices to predictions.csv, in the format of SWAG's csv_predict.py.

        The probability of every choice goes to probabilities.csv.
        """
        scores = np.array([np.asarray(x) for x in logits], np.float64)
        scores = scores.reshape(-1, len(self.choices))
        predictions = [["", "pred"], *enumerate(scores.argmax(1))]
        rows = ([i, *(f"{p:.6f}" for p in row)] for i, row in enumerate(probabilities(scores)))
        _write_csv(folder / "predictions.csv", predictions)
        _write_csv(folder / "probabilities.csv", [["index", *self.choices], *rows])


def _write_csv(path: pathlib.Path, rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    files.write(path, text.getvalue())
