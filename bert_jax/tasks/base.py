"""The interface of fine-tuning data: examples, labels, official metrics and prediction files."""

import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from bert_jax.data.examples import Examples

# Per example: [C] for "sequence" and "choice", [n, C] for "token" and [n, 2] for "span", where n is
# the number of tokens of its sequence.
Logits = Sequence[np.ndarray]


@runtime_checkable
class FinetuneDataset(Protocol):
    """A fine-tuning dataset, read and tokenized, with its metrics.

    The classes take these arguments (`Pairs` has no `new`):
        config: the task; `train`, `dev` and `test` name single files.
        vocabulary: the model's vocabulary.
        training: whether to read the training data, which an evaluation does not need.
        labels: labels of a fine-tuned model, with which only training data must be labeled.
        new: a file to read as the only split, "new"; its labels are optional.

    Attributes:
        head: one of `config.HEADS`.
        labels: names of the head's outputs, in order.
        objective: loss of the heads "sequence" and "choice": "class" (cross-entropy), "number"
            (squared error) or "classes" (binary cross-entropy per label). The heads "token" and
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
    labels: tuple[str, ...]
    objective: str
    best_by: str
    splits: dict[str, Examples]
    report: list[str]

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """Return the official metrics in the benchmark's scale: 0 to 1, SQuAD 0 to 100."""
        ...

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Write predictions in the benchmark's format, with probabilities and figures, to a folder."""
