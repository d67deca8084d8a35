"""The interface of fine-tuning data: examples, labels, official metrics and prediction files."""

import abc
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.examples import Examples

# Per example: [C] for "sequence" and "choice", [n, C] for "token" and [n, 2] for "span", where n is
# the number of tokens of its sequence.
Logits = Sequence[np.ndarray]
Text = str | tuple[str, str]
# The only split of data to predict, whose labels are optional.
NEW = "new"


class Prediction(NamedTuple):
    """What a fine-tuned model predicts for one text.

    Attributes:
        label: the label; a tuple of labels of a multilabel task or for the words of a tagging task,
            a number for regression, the answer for SQuAD.
        probabilities: by label; empty for regression, tagging and SQuAD.
    """

    label: str | float | tuple[str, ...]
    probabilities: dict[str, float]

    def __repr__(self) -> str:
        best = sorted(self.probabilities.items(), key=lambda item: -item[1])
        shown = [f"{label!r}: {probability:.4f}" for label, probability in best[:4]]
        text = ", ".join([*shown, *["…"] * (len(best) > 4)])
        return f"Prediction({self.label!r}, {{{text}}})"


class FinetuneDataset(abc.ABC):
    """A fine-tuning dataset, read and tokenized, with its metrics.

    The classes take these arguments (`Pairs` has no `new`):
        config: the task; `train`, `dev` and `test` name single files.
        vocabulary: the model's vocabulary.
        training: whether to read the training data, which an evaluation does not need.
        labels: labels of a fine-tuned model, with which only training data must be labeled.
        new: a file to read as the only split, "new", or texts (`MultipleChoice`: a file only).

    Attributes:
        head: one of `config.HEADS`.
        labels: names of the head's outputs, in order.
        objective: loss of the heads "sequence" and "choice": "class" (cross-entropy), "number"
            (squared error), "classes" or "relevance" (binary cross-entropy per label). The heads "token" and
            "span" have one loss each.
        best_by: the metric of `score` that selects the best checkpoint; higher is better.
        splits: examples by name: "train" and those to evaluate ("dev", "dev_mismatched", "test",
            …). `Examples.targets["label"]` is int32 [E] for "class" (NO_EXAMPLE if unknown),
            float32 [E] for "number", [E, C] for "classes"; int32 [E, 2], the answer's first and
            last token within its sequence, for "span". For "token", `token_targets["label"]` is
            int32 [n].
        report: notes on truncated, dropped or unusual data, one line each.
    """

    head: str
    labels: tuple[str, ...] = ()
    objective: str = "class"
    best_by: str
    splits: dict[str, Examples]
    report: list[str]

    @abc.abstractmethod
    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """Return the official metrics in the benchmark's scale: 0 to 1, SQuAD 0 to 100."""

    @abc.abstractmethod
    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Write predictions in the benchmark's format, with probabilities and figures, to a folder."""

    def predictions(self, split: str, logits: Logits) -> list[Prediction]:
        """Return what is predicted for each text of a split."""
        raise NotImplementedError

    def tuned(self, dev: Mapping[str, float]) -> "FinetuneDataset":
        """Return the dataset with what is tuned on dev, given the metrics of dev."""
        return self
