"""BERT's instance algorithm: sequences from documents, half of the pairs with a random segment b.

Follows `create_instances_from_document` in create_pretraining_data.py of Google's repository,
except that masking is done during training. Also RoBERTa's sequences of whole sentences (Liu et al. 2019,
arXiv 1907.11692, section 4.2).
"""

import bisect
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from bert_jax.data.rows import Example

IS_NEXT, IS_RANDOM = 0, 1
# Values of `pairs` whose sequences are whole sentences, without random choices.
WHOLE_SENTENCES = ("full-sentences", "doc-sentences")
_TRIES = 100  # maximum number of draws of a different document


class Instances:
    """Generator of BERT's pretraining sequences from documents.

    Args:
        documents: tokenized documents, with the interface of `prepare_worker._Documents`.
        vocabulary: vocabulary with the special ids.
        tokens: T, maximum length of a sequence.
        pairs: "nsp", "none" or one of `WHOLE_SENTENCES`.
        short_fraction: fraction of documents with shorter sequences.
    """

    def __init__(
        self, documents: Any, vocabulary: Any, tokens: int, pairs: str, short_fraction: float
    ):
        self._documents = documents
        self._cls, self._sep = vocabulary.cls_id, vocabulary.sep_id
        self._pairs, self._short_fraction = pairs == "nsp", short_fraction
        self._kind = pairs
        self._room = tokens - (3 if self._pairs else 2)

    def of_all(self, first: int, end: int, rng: random.Random) -> Iterator[Example]:
        """Yield the sequences of documents [first, end)."""
        if self._kind in WHOLE_SENTENCES:
            yield from self._whole_sentences(first, end)
            return
        for number in range(first, end):
            yield from self.of(number, rng)

    def _whole_sentences(self, first: int, end: int) -> Iterator[Example]:
        """Yield sequences of as many consecutive sentences as fit.

        With "full-sentences" they go on with the next document after a [SEP], with "doc-sentences"
        they end with a document.
        """
        separator = np.array([self._sep])
        parts: list[np.ndarray] = []
        size = 0
        for number in range(first, end):
            is_first = True
            for sentence in self._sentences(number):
                needed = len(sentence) + is_first
                if parts and (
                    size + needed > self._room or (is_first and self._kind == "doc-sentences")
                ):
                    yield self._sequence(np.concatenate(parts))
                    parts, size = [], 0
                if parts and is_first:
                    parts.append(separator.astype(sentence.dtype))
                    size += 1
                parts.append(sentence)
                size += len(sentence)
                is_first = False
        if parts:
            yield self._sequence(np.concatenate(parts))

    def _sentences(self, number: int) -> Iterator[np.ndarray]:
        """Yield the sentences of a document; one longer than a sequence in parts."""
        entry = self._documents.entry(number)
        bounds = self._documents.sentences(entry, 0, entry[3])
        tokens = self._documents.tokens(entry, bounds[0], bounds[-1])
        for start, end in itertools.pairwise(bound - bounds[0] for bound in bounds):
            for part in range(start, end, self._room):
                yield tokens[part : min(part + self._room, end)]

    def of(self, number: int, rng: random.Random) -> Iterator[Example]:
        """Yield the sequences of one document, with "nsp" or "none"."""
        entry = self._documents.entry(number)
        bounds = self._documents.sentences(entry, 0, entry[3])
        begin = bounds[0]
        tokens = self._documents.tokens(entry, begin, bounds[-1])
        bounds = [bound - begin for bound in bounds]
        # A fraction of documents has shorter sequences, to match those of fine-tuning.
        target = self._room
        if rng.random() < self._short_fraction:
            target = rng.randint(2, self._room)
        last = len(bounds) - 1
        start = 0
        while start < last:
            # Take sentences until they reach the target length.
            end = min(bisect.bisect_left(bounds, bounds[start] + target, start + 1), last)
            if not self._pairs:
                a = tokens[bounds[start] : bounds[end]]
                yield self._sequence(_trim(a, min(len(a), self._room), rng))
                start = end
                continue
            middle = start + 1 + _draw(rng, end - start - 1)
            a = tokens[bounds[start] : bounds[middle]]
            if end - start == 1 or rng.random() < 0.5:
                b = self._random_segment(number, entry[0], target - len(a), rng)
                yield self._pair(a, b, IS_RANDOM, rng)
                start = middle  # reuse the sentences that were not used as b
            else:
                b = tokens[bounds[middle] : bounds[end]]
                yield self._pair(a, b, IS_NEXT, rng)
                start = end

    def _random_segment(
        self, number: int, text_hash: int, target: int, rng: random.Random
    ) -> np.ndarray:
        """Return random consecutive sentences of another document, until they reach `target`."""
        documents = self._documents
        assert len(documents) > 1
        for _ in range(_TRIES):
            other = _draw(rng, len(documents) - 1)
            entry = documents.entry(other + (other >= number))
            if entry[0] != text_hash:  # not a copy of this document
                break
        first = _draw(rng, entry[3])
        # Every sentence has at least one token.
        bounds = documents.sentences(entry, first, min(entry[3], first + max(target, 1)))
        end = min(bisect.bisect_left(bounds, bounds[0] + target, 1), len(bounds) - 1)
        return documents.tokens(entry, bounds[0], bounds[end])

    def _sequence(self, a: np.ndarray) -> Example:
        tokens = np.empty(len(a) + 2, a.dtype)
        tokens[0] = self._cls
        tokens[1:-1] = a
        tokens[-1] = self._sep
        return Example(tokens, len(tokens))

    def _pair(self, a: np.ndarray, b: np.ndarray, label: int, rng: random.Random) -> Example:
        kept = truncated_lengths(len(a), len(b), self._room)
        a, b = _trim(a, kept[0], rng), _trim(b, kept[1], rng)
        a_length = len(a) + 2
        tokens = np.empty(a_length + len(b) + 1, a.dtype)
        tokens[0] = self._cls
        tokens[1 : a_length - 1] = a
        tokens[a_length - 1] = tokens[-1] = self._sep
        tokens[a_length:-1] = b
        return Example(tokens, a_length, label)


def _draw(rng: random.Random, choices: int) -> int:
    """Draw from 0 to choices - 1; `randrange` takes five times as long."""
    return int(rng.random() * choices)


def truncated_lengths(a: int, b: int, room: int) -> tuple[int, int]:
    """Return two lengths after removing tokens from the longer one until both fit into `room`.

    Equal lengths lose a token of the second (truncate_seq_pair in create_pretraining_data.py).
    """
    excess = a + b - room
    if excess <= 0:
        return a, b
    if a - excess >= b:
        return a - excess, b
    if b - excess >= a - 1:
        return a, b - excess
    return (room + 1) // 2, room // 2


def _trim(tokens: np.ndarray, length: int, rng: random.Random) -> np.ndarray:
    """Remove tokens, each from the front or the back with equal probability."""
    excess = len(tokens) - length
    front = rng.getrandbits(excess).bit_count() if excess else 0
    return tokens[front : front + length]
