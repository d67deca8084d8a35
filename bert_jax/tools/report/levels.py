"""Losses of n-gram models, to draw into the loss curves of language models."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.loader import RowDataset
from bert_jax.errors import UserError

MAX_TOKENS = 4_000_000
_DISCOUNT = 0.75


class NgramLosses(NamedTuple):
    """Losses of count models on held-out text, in nats per token.

    Attributes:
        unigram: loss of the token frequencies.
        bigram: loss of a bigram model, which knows the left neighbor only.
        tokens: number of training tokens that were counted.
    """

    unigram: float
    bigram: float
    tokens: int


def read(folder: str, digest: str) -> NgramLosses | None:
    """Return the levels of a folder of rows; None if it does not have the rows of `digest`.

    Rows on object storage have levels only if the cache of this machine has a copy of them.
    """
    try:
        train, heldout = (RowDataset(folder, split) for split in ("train", "heldout"))
        has_rows = train.manifest.digest == digest and len(heldout)
        if not (has_rows and train.is_local and heldout.is_local):
            return None
        count = max(MAX_TOKENS // train.manifest.tokens, 1)
        tokens = [
            rows.read(range(min(len(rows), count)))["tokens"].astype(np.int64)
            for rows in (train, heldout)
        ]
        vocabulary = vocabularies.load(folder)
    except UserError:
        return None
    special = [vocabulary.pad_id, vocabulary.cls_id, vocabulary.sep_id]
    return count_models(tokens[0], tokens[1], np.array(special), len(vocabulary))


def count_models(
    train: Int[np.ndarray, "N T"],
    heldout: Int[np.ndarray, "M U"],
    special: Int[np.ndarray, " s"],
    vocab_size: int,
) -> NgramLosses:
    """Return the held-out losses of unigram and bigram models with absolute discounting.

    Both interpolate with the next lower order, the unigram model with the uniform distribution
    (Ney, Essen and Kneser 1994).

    Args:
        train: rows to count.
        heldout: rows to evaluate.
        special: ids that are not predicted. [CLS] is the left neighbor of first tokens.
        vocab_size: V.
    """
    left, right = _pairs(train, special)
    counts = np.bincount(right, minlength=vocab_size)
    total, types = counts.sum(), np.count_nonzero(counts)
    uniform = _DISCOUNT * types / total / vocab_size
    unigram = np.maximum(counts - _DISCOUNT, 0) / total + uniform

    pairs, pair_counts = np.unique(left * vocab_size + right, return_counts=True)
    left_counts = np.bincount(left, minlength=vocab_size)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)

    left, right = _pairs(heldout, special)
    index = np.minimum(np.searchsorted(pairs, left * vocab_size + right), len(pairs) - 1)
    seen = np.where(pairs[index] == left * vocab_size + right, pair_counts[index], 0)
    # A left neighbor that was never seen leaves the unigram model.
    context = np.maximum(left_counts[left], 1)
    backoff = np.where(left_counts[left] > 0, _DISCOUNT * followers[left] / context, 1.0)
    bigram = np.maximum(seen - _DISCOUNT, 0) / context + backoff * unigram[right]
    return NgramLosses(
        float(-np.log(unigram[right]).mean()), float(-np.log(bigram).mean()), int(total)
    )


def _pairs(
    tokens: Int[np.ndarray, "N T"], special: Int[np.ndarray, " s"]
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Return the left neighbor and the token, for all tokens but special ones.

    Sequences start with [CLS], which is special, so no pair spans two sequences.
    """
    left, right = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
    keep = ~np.isin(right, special)
    return left[keep], right[keep]
