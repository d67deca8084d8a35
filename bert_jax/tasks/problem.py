"""What is asked of a kind of fine-tuning: its examples, its head, its official score, its files."""

import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from bert_jax.data.examples import Examples

# Of an example's head: [C] for "sequence" and "choice", for "token" [n, C] and "span" [n, 2] with n
# the tokens of its sequence.
Logits = Sequence[np.ndarray]


@runtime_checkable
class Problem(Protocol):
    """A task with its data read and tokenized.

    Attributes:
        head: one of `config.HEADS`.
        labels: names of the head's outputs, in order.
        objective: "class" (cross-entropy), "number" (squared error) or "classes" (a logistic loss
            for each) for the heads "sequence" and "choice"; "token" and "span" have one each.
        best_by: the metric of `score` that decides which checkpoint is best; higher is better.
        splits: by name. "train" and what is evaluated ("dev", "dev_mismatched", "test", …).
            `Examples.targets["label"]` is int32 [E] for "class" (NO_EXAMPLE where unknown), float32
            [E] for "number", [E, C] for "classes"; int32 [E, 2], the answer's first and last token
            within its sequence, for "span"; `token_targets["label"]` int32 [n] for "token".
        report: what was cut, dropped or odd when reading, a line each.
    """

    head: str
    labels: tuple[str, ...]
    objective: str
    best_by: str
    splits: dict[str, Examples]
    report: list[str]

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """The official metrics, in the benchmark's scale of 0 to 1 (SQuAD's: 0 to 100)."""

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Predictions in the benchmark's own format, with probabilities beside, and pictures."""
