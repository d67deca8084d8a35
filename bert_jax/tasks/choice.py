"""Multiple choice: SWAG and tables of one's own (Devlin et al., section 4.4).

A question with n choices is n sequences, `[CLS] context [SEP] choice [SEP]`, with a score each.
"""

import pathlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from bert_jax import files
from bert_jax.config import TaskConfig
from bert_jax.data import tables
from bert_jax.data.compressed import SUFFIXES
from bert_jax.data.examples import NO_EXAMPLE, Examples
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.tasks.classification import NEW, encode, labelled, probabilities, write_table
from bert_jax.tasks.problem import Logits

PREDICTIONS = "predictions.csv"
PROBABILITIES = "probabilities.csv"
_SWAG = {"train": "train", "dev": "val", "test": "test"}  # its files, .csv
_ENDINGS = ("ending0", "ending1", "ending2", "ending3")


class _Question(NamedTuple):
    context: str
    choices: tuple[str, ...]
    label: int


class Choice:
    """A `Problem` of which choice goes with a context.

    Args:
        config: the task; `name` "swag" takes the columns of SWAG's files. In tables of one's own
            `text_a` is the context, `text_b` (or "") is put before each of the columns `choices`,
            and `label` is the right one's number from 0, or the name of its column.
        vocabulary: of the model.
        splits: which of "train", "dev" and "test" to read; None all there are.
        labels: not () says that a fine-tuned model predicts: only training data must be labelled.
        new: a table to be read as the one split "new"; it need not be labelled.

    Raises:
        UserError: a file or a row that is not as it should be.
    """

    head = "choice"
    objective = "class"
    best_by = "accuracy"

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        splits: Collection[str] | None = None,
        labels: tuple[str, ...] = (),
        new: str = "",
    ):
        self._a, self._b, self._label = config.text_a, config.text_b, config.label
        self.choices = tuple(config.choices)
        if config.name == "swag":
            self._a, self._b, self._label, self.choices = "sent1", "sent2", "label", _ENDINGS
        if len(self.choices) < 2 or len({*self.choices}) < len(self.choices):
            raise UserError(
                f"config.task.choices is {self.choices!r}: name the columns of two choices or more, "
                "each once"
            )
        self.labels = labels or ("score",)
        self.report: list[str] = []
        sources = {NEW: new} if new else _sources(config)
        self.splits: dict[str, Examples] = {}
        for name in [NEW] if new else list(sources if splits is None else splits):
            if not sources.get(name):
                raise UserError(
                    f"no {name!r} split: set config.task.{name} or look at what config.task.data "
                    f"holds (there is: {', '.join(sources) or 'nothing'})"
                )
            must = not name.startswith(("test", NEW)) and not (labels and name != "train")
            found = list(self._questions(sources[name], must))
            if not found and name != NEW:
                raise UserError(f"{sources[name]} ({name}) holds no rows; it needs one at least")
            context = [q.context for q in found for _ in q.choices]
            choices = [choice for q in found for choice in q.choices]
            tokens, a_length, note = encode(vocabulary, context, choices, config.tokens)
            targets = {"label": np.array([q.label for q in found], np.int32)}
            self.splits[name] = Examples(tokens, a_length, targets, group=len(self.choices))
            self.report.append(f"{name}: {len(found):,} questions{note}")

    def _questions(self, source: str, must: bool) -> Iterator[_Question]:
        optional = [self._b, self._label] if self._b else [self._label]
        for where, fields in tables.read(source, [self._a, *self.choices], optional=optional):
            choices = tuple(fields[name] for name in self.choices)
            if self._b:
                before = fields.get(self._b)
                if not isinstance(before, str):
                    raise UserError(f"{where}: no text in {self._b!r}; it goes before each choice")
                choices = tuple(f"{before} {choice}".strip() for choice in choices)
            value = labelled(where, fields, self._label, must)
            yield _Question(
                fields[self._a], choices, NO_EXAMPLE if value is None else self._place(value, where)
            )

    def _place(self, value: object, where: str) -> int:
        if value in self.choices:
            return self.choices.index(value)
        try:
            place = int(value) if isinstance(value, str | int | float) else -1
            if 0 <= place < len(self.choices) and place == float(value):
                return place
        except (ValueError, OverflowError):  # JSON may hold an Infinity
            pass
        raise UserError(
            f"{where}: {value!r} is no choice; it must be 0 to {len(self.choices) - 1} or one of "
            f"{', '.join(self.choices)[:200]}"
        )

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """How many of a split's labelled questions are answered right; none where none has a label."""
        truth = self.splits[split].targets["label"]
        right = np.array([np.argmax(x) for x in logits], np.int64) == truth
        known = truth != NO_EXAMPLE
        return {"accuracy": float(right[known].mean())} if known.any() else {}

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Writes predictions.csv, the number of the choice as SWAG's own csv_predict.py does.

        The probability of every choice goes to probabilities.csv.
        """
        values = np.array([np.asarray(x) for x in logits], np.float64)
        values = values.reshape(-1, len(self.choices))
        chosen = [["", "pred"], *([str(i), str(x)] for i, x in enumerate(values.argmax(1)))]
        chances = [["index", *(_csv_cell(name) for name in self.choices)]]
        for i, row in enumerate(probabilities(values)):
            chances.append([str(i), *(f"{p:.6f}" for p in row)])
        with files.one_line_errors(f"cannot write predictions to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            write_table(folder / PREDICTIONS, chosen, ",")
            write_table(folder / PROBABILITIES, chances, ",")


def _sources(config: TaskConfig) -> dict[str, str]:
    named = {"train": config.train, "dev": config.dev, "test": config.test}
    found = {}
    for split, path in named.items():
        folder = pathlib.Path(config.data)
        names = [f"{_SWAG[split]}.csv{suffix}" for suffix in ("", *SUFFIXES)]
        if config.name == "swag" and config.data and not path:
            path = next((str(folder / name) for name in names if (folder / name).is_file()), "")
        if path:
            found[split] = path
    return found


def _csv_cell(text: str) -> str:
    return f'"{text.replace(chr(34), chr(34) * 2)}"' if set(text) & set(',"\n') else text
