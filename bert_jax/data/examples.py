"""Labelled sequences in memory, and batches of a fixed number of them packed into rows.

Fine-tuning sees exactly the configured number of examples a step, in as few rows as they fit. Which
examples a step takes is a function of the seed and the step, so the rows that every step needs are
known before the run starts, and the few row counts that programs are compiled for are chosen then.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data import rows
from bert_jax.data.loader import Batch
from bert_jax.data.shuffle import shuffled
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.progress import Progress

NO_EXAMPLE = -1
# A run of at least LONG_RUN_STEPS has several row counts; its first FIRST_STEPS all use the largest,
# while the programs for the others compile. Constants, so that a restart chooses the same.
LONG_RUN_STEPS, FIRST_STEPS = 1024, 256
_MAX_ROW_COUNTS = 3
# A further row count must save this fraction of the rows.
_MIN_SAVING = 0.02


@dataclasses.dataclass
class Examples:
    """E examples, each of `group` sequences one after the other (1, or the choices of a question).

    Attributes:
        tokens: ids of each sequence, [CLS] and [SEP] included; E * group arrays.
        a_length: of each sequence, how many tokens belong to segment a.
        targets: what is to be learned, by name: an array [E, ...] for examples.
        token_targets: likewise for tokens: an array [n] for each sequence.
        group: sequences an example.
    """

    tokens: list[np.ndarray]
    a_length: list[int]
    targets: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    token_targets: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    group: int = 1

    def __len__(self) -> int:
        return len(self.tokens) // self.group

    def lengths(self) -> np.ndarray:
        """Tokens of each example, over its sequences; [E]."""
        each = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))
        return each.reshape(-1, self.group).sum(1)


def pair(
    vocabulary: Vocabulary, a: Sequence[int], b: Sequence[int] | None, most: int
) -> tuple[np.ndarray, int, int]:
    """`[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]` of at most `most` tokens.

    Where they are too many, the longer segment loses its last one until they fit (Google's
    run_classifier.py, _truncate_seq_pair; of two equal ones it is b).

    Returns:
        Tokens, how many of them belong to segment a, and how many were cut off.
    """
    cls, sep = [vocabulary.cls_id], [vocabulary.sep_id]
    if b is None:
        kept = a[: most - 2]
        return np.array([*cls, *kept, *sep], np.int32), len(kept) + 2, len(a) - len(kept)
    room = most - 3
    n_a, n_b = len(a), len(b)
    over = max(n_a + n_b - room, 0)
    # As taking one from the longer, one at a time: first the difference, then by turns.
    from_longer = min(over, abs(n_a - n_b))
    rest = over - from_longer
    cut_a = (from_longer if n_a > n_b else 0) + rest // 2
    cut_b = (from_longer if n_b >= n_a else 0) + rest - rest // 2
    tokens = [*cls, *a[: n_a - cut_a], *sep, *b[: n_b - cut_b], *sep]
    return np.array(tokens, np.int32), n_a - cut_a + 2, over


class Shape(NamedTuple):
    """R rows of T tokens for at most S sequences."""

    rows: int
    tokens: int
    sequences: int


class Plan:
    """Which examples make up the batch of each step, and the shapes that hold the batches.

    Args:
        examples: to choose from.
        batch_size: examples a step.
        steps: how many.
        seeds: of the order; the shapes hold the batches of every one of them.
        rows_multiple: R is a multiple of this (devices, accumulation).
        cost_tokens: T beyond which attention, which is quadratic, weighs more than the rest of a
            layer; it decides between few long rows and many short ones.
        shuffle: or every example once, for evaluation: as no step needs particular ones, all are
            packed together, into about `steps` batches of one shape.
        one_a_row: no packing, every sequence in a row of its own; for comparison.

    Attributes:
        steps: how many.
        shapes: from the fewest rows to the most; T and S are the same.
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
        needs: dict[int, list[int]] = {tokens: [] for tokens in candidates}  # rows, by batch
        slots = dict.fromkeys(candidates, 1)  # most examples a row
        self._packed: list[list[int]] | None = None

        def add(members: Sequence[int], tokens: int, batches: int) -> None:
            packed = self._pack(members, tokens)
            needs[tokens] += [-(-len(packed) // batches)] * batches
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
            need = -(-np.array(needs[tokens] or [1]) // rows_multiple) * rows_multiple
            counts, total = row_counts(need, _MAX_ROW_COUNTS if steps >= LONG_RUN_STEPS else 1)
            shapes = tuple(Shape(r, tokens, slots[tokens] * examples.group) for r in counts)
            choices.append((total * tokens * (1 + tokens / cost_tokens), shapes))
        self.shapes = min(choices)[1]
        self.shape = self.shapes[-1]
        if not shuffle:
            self._packed = self._pack(range(len(examples)), self.shape.tokens)
            self.steps = -(-len(self._packed) // self.shape.rows)

    def members(self, step: int, seed: int) -> list[int]:
        """The examples of a training step."""
        first = step * self.batch_size
        places = np.arange(first, first + self.batch_size)
        # `shuffled` counts its epochs on from the seed: neighboring seeds would take one another's
        # orders, an epoch apart. A large odd number (2**32 over the golden ratio) lays them apart.
        apart = seed * 0x9E3779B1 % 2**32
        return shuffled(places, len(self.examples), apart).tolist()

    def _pack(self, members: Sequence[int], tokens: int) -> list[list[int]]:
        bins = rows.pack_lengths([self._lengths[i] for i in members], tokens, self._max_examples)
        return [[members[i] for i in row] for row in bins]

    def batch(self, step: int, seed: int) -> Batch:
        """The rows of a step: the targets, and

        tokens: [R, T]. a_length, length: [R, S]. example: [R, S], which one a sequence belongs to,
        or `NO_EXAMPLE`.
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
                    for name, each in examples.token_targets.items():
                        batch[name][row, start:end] = each[sequence]
                    start, slot = end, slot + 1
        return batch

    def empty(self, shape: Shape | None = None) -> Batch:
        """A batch of padding, of the largest shape by default."""
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
        """This process's part of the rows of steps [first, end), made ahead in a thread."""
        import grain

        source = _Steps(self, seed, end, process, processes)
        dataset = grain.MapDataset.source(source)[first:]
        return iter(
            dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
        )


class _Steps:
    """What Grain reads ahead from."""

    def __init__(self, plan: Plan, seed: int, steps: int, process: int, processes: int):
        self._plan, self._seed, self._steps = plan, seed, steps
        self._process, self._processes = process, processes

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Batch:
        batch = self._plan.batch(step, self._seed)
        local = len(batch["tokens"]) // self._processes
        part = slice(self._process * local, (self._process + 1) * local)
        return {k: v[part] for k, v in batch.items()}


def row_counts(needs: np.ndarray, most: int) -> tuple[tuple[int, ...], int]:
    """Choose the row counts that hold a run's batches with the least padding.

    Args:
        needs: rows of each batch, [steps].
        most: how many row counts there may be.

    Returns:
        The row counts, ascending, and the rows of all batches, each in the smallest that holds it.
    """
    values, batches = np.unique(needs, return_counts=True)
    chosen, total = values[-1:], int(values[-1] * batches.sum())
    for fewer in range(1, min(most, len(values))):
        best = chosen, total
        for some in itertools.combinations(values[:-1], fewer):
            counts = np.append(some, values[-1])
            rows_used = int(counts[np.searchsorted(counts, values)] @ batches)
            if rows_used < best[1]:
                best = counts, rows_used
        if best[1] > (1 - _MIN_SAVING) * total:
            break
        chosen, total = best
    return tuple(chosen.tolist()), total
