"""Labelled examples in memory, and batches of a fixed number of examples packed into rows.

Fine-tuning takes exactly the configured number of examples per step, in as few rows as possible.
The examples of a step are a function of the seed and the step, so the number of rows of every step
is known in advance, and the few row counts to compile for are chosen before training.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data import rows
from bert_jax.data.instances import truncated_lengths
from bert_jax.data.loader import Batch, prefetched
from bert_jax.data.shuffle import shuffled
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.runtime.progress import Progress

NO_EXAMPLE = -1
# Runs of at least LONG_RUN_STEPS use several row counts; their first FIRST_STEPS use the largest,
# while programs for the others compile. Constants, so that a resumed run makes the same choice.
LONG_RUN_STEPS, FIRST_STEPS = 1024, 256
_MAX_ROW_COUNTS = 3
# An additional row count must save at least this fraction of the rows.
_MIN_SAVING = 0.02


@dataclasses.dataclass
class Examples:
    """E examples of `group` consecutive sequences each (1, or the choices of a question).

    Attributes:
        tokens: ids of each sequence, including [CLS] and [SEP]; E * group arrays.
        a_length: number of tokens in segment a of each sequence.
        targets: labels by name, an array [E, ...] each.
        token_targets: token labels by name, an array [n] for each sequence.
        group: number of sequences per example.
    """

    tokens: list[np.ndarray]
    a_length: list[int]
    targets: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    token_targets: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    group: int = 1

    def __len__(self) -> int:
        return len(self.tokens) // self.group

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each example over all its sequences; [E]."""
        sequence_lengths = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))
        return sequence_lengths.reshape(-1, self.group).sum(1)


def pair(
    vocabulary: Vocabulary, a: Sequence[int], b: Sequence[int] | None, max_tokens: int
) -> tuple[np.ndarray, int, int]:
    """Build `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]` of at most `max_tokens` tokens.

    Models whose vocabulary separates texts by two tokens get `<s> a </s></s> b </s>`, where both
    belong to segment a.

    Excess tokens are removed one by one from the end of the longer segment, or of b if both are
    equally long, as in _truncate_seq_pair of Google's run_classifier.py.

    Returns:
        The tokens, the number of tokens in segment a, and the number of tokens removed.
    """
    cls, sep = [vocabulary.cls_id], [vocabulary.sep_id]
    if b is None:
        kept = a[: max_tokens - 2]
        return np.array([*cls, *kept, *sep], np.int32), len(kept) + 2, len(a) - len(kept)
    between = vocabulary.separator_ids
    room = max_tokens - 2 - len(between)
    n_a, n_b = truncated_lengths(len(a), len(b), room)
    tokens = [*cls, *a[:n_a], *between, *b[:n_b], *sep]
    removed = len(a) + len(b) - n_a - n_b
    return np.array(tokens, np.int32), n_a + 1 + len(between), removed


class Shape(NamedTuple):
    """R rows of T tokens and at most S sequences."""

    rows: int
    tokens: int
    sequences: int


class PackedBatches:
    """The examples of each step's batch, and the shapes of the packed batches.

    Args:
        examples: the data set.
        batch_size: number of examples per step.
        steps: number of steps.
        seeds: seeds of the data order; the shapes hold the batches of all of them.
        rows_multiple: R is a multiple of this (devices, gradient accumulation).
        cost_tokens: T beyond which attention, which is quadratic, costs more than the rest of a
            layer. Decides between few long rows and many short ones.
        shuffle: False visits every example once, for evaluation. All examples are then packed
            together, into about `steps` batches of one shape.
        one_a_row: disable packing and put every example in its own row, for comparison.

    Attributes:
        steps: number of steps.
        shapes: shapes in ascending order of rows, with equal T and S.
        shape: the last of them, which holds any batch.
    """

    def __init__(
        self,
        examples: Examples,
        batch_size: int,
        steps: int,
        seeds: Sequence[int] = (0,),
        *,
        rows_multiple: int = 1,
        cost_tokens: int = 4096,
        shuffle: bool = True,
        one_a_row: bool = False,
    ):
        self.examples, self.batch_size, self.steps = examples, batch_size, steps
        self._lengths: list[int] = examples.lengths().tolist()
        self._max_examples = 1 if one_a_row else rows.SLOTS_UNBOUNDED
        longest = max(self._lengths, default=1)
        candidates = [-(-longest // 8) * 8]
        while not one_a_row and candidates[-1] * 2 <= max(512, candidates[0]):
            candidates.append(candidates[-1] * 2)
        row_needs: dict[int, list[int]] = {tokens: [] for tokens in candidates}  # by batch
        slots = dict.fromkeys(candidates, 1)  # maximum examples per row
        self._packed: list[list[int]] | None = None

        def add(members: Sequence[int], tokens: int, batches: int) -> None:
            packed = self._pack(members, tokens)
            row_needs[tokens] += [-(-len(packed) // batches)] * batches
            slots[tokens] = max(slots[tokens], *map(len, packed), 1)

        if shuffle:
            with Progress("planning", len(seeds) * steps, "batches") as progress:
                for seed in seeds:
                    for step in range(steps):
                        members = self.members(step, seed)
                        for tokens in candidates:
                            add(members, tokens, 1)
                        progress.advance()
        elif steps:
            for tokens in candidates:
                add(range(len(examples)), tokens, steps)
        choices = []
        for tokens in candidates:
            needs = -(-np.array(row_needs[tokens] or [1]) // rows_multiple) * rows_multiple
            counts, total = row_counts(needs, _MAX_ROW_COUNTS if steps >= LONG_RUN_STEPS else 1)
            shapes = tuple(Shape(r, tokens, slots[tokens] * examples.group) for r in counts)
            choices.append((total * tokens * (1 + tokens / cost_tokens), shapes))
        self.shapes = min(choices)[1]
        self.shape = self.shapes[-1]
        if not shuffle:
            self._packed = self._pack(range(len(examples)), self.shape.tokens)
            self.steps = -(-len(self._packed) // self.shape.rows)

    def members(self, step: int, seed: int) -> list[int]:
        """Return the indices of the examples of a training step."""
        first = step * self.batch_size
        positions = np.arange(first, first + self.batch_size)
        # `shuffled` adds the epoch to the seed, so consecutive seeds would share their orders, one
        # epoch apart. Multiplying by 2**32 over the golden ratio spreads them.
        order_seed = seed * 0x9E3779B1 % 2**32
        return shuffled(positions, len(self.examples), order_seed).tolist()

    def _pack(self, members: Sequence[int], tokens: int) -> list[list[int]]:
        bins = rows.pack_lengths([self._lengths[i] for i in members], tokens, self._max_examples)
        return [[members[i] for i in row] for row in bins]

    def batch(self, step: int, seed: int) -> Batch:
        """Return the rows of a step.

        They have the targets and token targets by name, `tokens` [R, T], `a_length` and `length`
        [R, S], and `example` [R, S]: the index of each sequence's example, or `NO_EXAMPLE`.
        """
        examples, group = self.examples, self.examples.group
        if self._packed is None:
            packed = self._pack(self.members(step, seed), self.shape.tokens)
        else:
            first = step * self.shape.rows
            packed = self._packed[first : first + self.shape.rows]
        shape = self.shape
        if step >= FIRST_STEPS:
            shape = next(shape for shape in self.shapes if shape.rows >= len(packed))
        batch = self.empty(shape)
        for row, members in enumerate(packed):
            start = slot = 0
            for example in members:
                for sequence in range(example * group, (example + 1) * group):
                    tokens = examples.tokens[sequence]
                    end = start + len(tokens)
                    batch["tokens"][row, start:end] = tokens
                    batch["a_length"][row, slot] = examples.a_length[sequence]
                    batch["length"][row, slot] = len(tokens)
                    batch["example"][row, slot] = example
                    for name, values in examples.targets.items():
                        batch[name][row, slot] = values[example]
                    for name, labels in examples.token_targets.items():
                        batch[name][row, start:end] = labels[sequence]
                    start, slot = end, slot + 1
        return batch

    def empty(self, shape: Shape | None = None) -> Batch:
        """Return a batch of padding, of the largest shape by default."""
        r, t, s = shape or self.shape
        batch = {
            "tokens": np.zeros((r, t), np.int32),
            "a_length": np.zeros((r, s), np.int32),
            "length": np.zeros((r, s), np.int32),
            "example": np.full((r, s), NO_EXAMPLE, np.int32),
        }
        for name, values in self.examples.targets.items():
            batch[name] = np.zeros((r, s, *values.shape[1:]), values.dtype)
        for name in self.examples.token_targets:
            batch[name] = np.full((r, t), NO_EXAMPLE, np.int32)
        return batch

    def batches(
        self, seed: int, first: int, end: int, process: int = 0, processes: int = 1
    ) -> Iterator[Batch]:
        """Iterate over this process's slice of the batches of steps [first, end).

        A thread prepares batches in advance.
        """

        def batch_of(step: int) -> Batch:
            batch = self.batch(step, seed)
            local_rows = len(batch["tokens"]) // processes
            part = slice(process * local_rows, (process + 1) * local_rows)
            return {k: v[part] for k, v in batch.items()}

        return prefetched(batch_of, first, end, threads=1)


def row_counts(needs: np.ndarray, max_counts: int) -> tuple[tuple[int, ...], int]:
    """Choose the row counts that hold a run's batches with the least padding.

    Args:
        needs: number of rows of each batch, [steps].
        max_counts: maximum number of row counts.

    Returns:
        The row counts, ascending, and the total rows when each batch uses the smallest sufficient
        one.
    """
    values, batches = np.unique(needs, return_counts=True)
    chosen, total = values[-1:], int(values[-1] * batches.sum())
    for num_smaller in range(1, min(max_counts, len(values))):
        best = chosen, total
        for smaller in itertools.combinations(values[:-1], num_smaller):
            counts = np.append(smaller, values[-1])
            rows_used = int(counts[np.searchsorted(counts, values)] @ batches)
            if rows_used < best[1]:
                best = counts, rows_used
        if best[1] > (1 - _MIN_SAVING) * total:
            break
        chosen, total = best
    return tuple(chosen.tolist()), total
