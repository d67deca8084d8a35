"""Mask tokens for masked language modelling (Devlin et al., section 3.1); next-token targets.

Masking runs on the device and is different in every step. Of a sequence's n tokens, round(rate * n)
are selected, at least 1 and at most a maximum, never [CLS] or [SEP]. By default 80% of these become
[MASK], 10% are kept and 10% become a random token.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from bert_jax.config import MaskingConfig
from bert_jax.data.rows import Layout


class MaskedBatch(NamedTuple):
    """Input tokens and prediction targets; P is `Masker.predictions`."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B P"]
    labels: Int[Array, "B P"]
    # 1 for a prediction, 0 for padding of a row with fewer than P.
    weights: Float[Array, "B P"]


def max_predictions_per_sequence(config: MaskingConfig, tokens: int) -> int:
    """Return the maximum number of predictions per sequence, by default that of Google's recipe."""
    recipe = {128: 20, 512: 76}  # google-research/bert, README, "max_predictions_per_seq"
    if config.max_predictions_per_sequence:
        return config.max_predictions_per_sequence
    if config.rate == 0.15 and tokens in recipe:
        return recipe[tokens]
    return math.ceil(config.rate * tokens)


@dataclasses.dataclass(frozen=True)
class NextTokenTargets:
    """Next-token prediction targets (section 5.1, "LTR"), with the interface of `Masker`.

    Every token with a successor in its own sequence predicts it: [CLS] predicts the first word and
    the last word predicts [SEP]. Padding predicts nothing.

    Attributes:
        tokens, sequences: T, S.
    """

    tokens: int
    sequences: int

    @property
    def predictions(self) -> int:
        """P = T - 1."""
        return self.tokens - 1

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        length: Int[Array, "B S"],
        a_length: Int[Array, "B S"],
        layout: Layout,
        key: Key[Array, ""],
    ) -> MaskedBatch:
        """Return unchanged tokens and their next-token targets; `key` is unused."""
        segment_ids, next_segment_ids = layout.segment_ids[:, :-1], layout.segment_ids[:, 1:]
        has_target = (segment_ids == next_segment_ids) & (segment_ids < self.sequences)
        positions = jnp.broadcast_to(jnp.arange(self.predictions), segment_ids.shape)
        return MaskedBatch(tokens, positions, tokens[:, 1:], has_target.astype(jnp.float32))


@dataclasses.dataclass(frozen=True, eq=False)
class Masker:
    """Masking of rows with T tokens and at most S sequences.

    Attributes:
        config: rates and fractions.
        tokens, sequences: T, S.
        vocab_size: random tokens are drawn from the whole vocabulary, as in Google's code.
        mask_id: token id of [MASK].
        continuation: [V] whether a token continues a word (`##…`); used for whole-word masking.
    """

    config: MaskingConfig
    tokens: int
    sequences: int
    vocab_size: int
    mask_id: int
    continuation: np.ndarray

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """[T + 1] number of predictions for a sequence of n tokens.

        Computed on the host in float64: in float32, 0.15 * n rounds some halves the other way.
        """
        maximum = max_predictions_per_sequence(self.config, self.tokens)
        targets = [round(self.config.rate * n) for n in range(self.tokens + 1)]
        return np.array(
            [min(max(1, k), maximum, max(n - 2, 0)) for n, k in enumerate(targets)], np.int32
        )

    @functools.cached_property
    def predictions(self) -> int:
        """P, the maximum number of predictions of S sequences with T tokens in total."""
        # max_counts[n]: maximum for n tokens in total; each iteration adds one more sequence.
        max_counts = self.counts
        for _ in range(self.sequences - 1):
            updated = [
                (max_counts[: n + 1] + self.counts[n::-1]).max() for n in range(self.tokens + 1)
            ]
            if np.array_equal(updated, max_counts):
                break
            max_counts = np.array(updated)
        return int(max_counts.max())

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        length: Int[Array, "B S"],
        a_length: Int[Array, "B S"],
        layout: Layout,
        key: Key[Array, ""],
    ) -> MaskedBatch:
        """Mask every row, as a function of `key` and the rows alone."""
        select_key, kind_key, random_key = jax.random.split(key, 3)
        selected = self._select(tokens, length, a_length, layout, select_key)

        # Earlier positions score higher: top_k returns selected positions in order, then padding.
        score, positions = jax.lax.top_k(
            jnp.where(selected, self.tokens - jnp.arange(self.tokens), 0), self.predictions
        )
        weights = (score > 0).astype(jnp.float32)
        labels = jnp.take_along_axis(tokens, positions, 1)

        kind = jax.random.uniform(kind_key, tokens.shape)
        replacement = jax.random.randint(random_key, tokens.shape, 0, self.vocab_size, tokens.dtype)
        config = self.config
        corrupted = jnp.where(
            kind < config.mask_fraction + config.same_fraction, tokens, replacement
        )
        corrupted = jnp.where(kind < config.mask_fraction, self.mask_id, corrupted)
        return MaskedBatch(jnp.where(selected, corrupted, tokens), positions, labels, weights)

    def _select(self, tokens, length, a_length, layout: Layout, key) -> Bool[Array, "B T"]:
        membership = layout.segment_ids[:, :, None] == jnp.arange(self.sequences)  # [B, T, S]

        def per_token(per_sequence):  # [B, S] -> [B, T]
            return jnp.sum(membership * per_sequence[:, None, :], axis=2)

        n, a = per_token(length), per_token(a_length)
        special = (
            (layout.position_ids == 0)
            | (layout.position_ids == a - 1)
            | (layout.position_ids == n - 1)
        )
        candidate = (layout.segment_ids < self.sequences) & ~special
        num_predictions = per_token(jnp.asarray(self.counts)[length])
        same_sequence = layout.segment_ids[:, :, None] == layout.segment_ids[:, None, :]

        # A unit (word piece or whole word) is identified by its start; its pieces share one draw.
        start = jnp.broadcast_to(jnp.arange(self.tokens), tokens.shape)
        if self.config.whole_word:
            continues = jnp.asarray(self.continuation)[tokens]
            # A piece that truncation separated from its word starts a new unit.
            after_candidate = jnp.pad(candidate, ((0, 0), (1, 0)))[:, :-1]
            start = jnp.where(continues & candidate & after_candidate, 0, start)
            start = jax.lax.cummax(start, axis=1)
        draw = jnp.take_along_axis(jax.random.uniform(key, tokens.shape), start, 1)

        # before[b, t, u]: u is in t's sequence, and its unit comes no later than t's in the order
        # of the draws, with ties broken by position.
        earlier = draw[:, None, :] < draw[:, :, None]
        tied = (draw[:, None, :] == draw[:, :, None]) & (start[:, None, :] <= start[:, :, None])
        before = (earlier | tied) & same_sequence & candidate[:, None, :]
        if not self.config.whole_word:
            return candidate & (jnp.sum(before, axis=2) <= num_predictions)

        # Google's code goes through the words once and skips those that no longer fit. Here, each
        # iteration drops words that cannot fit anymore and takes all words up to the next misfit.
        size = jnp.sum((start[:, :, None] == start[:, None, :]) & candidate[:, None, :], axis=2)

        def take(state):
            selected, remaining = state
            room = num_predictions - jnp.sum(same_sequence & selected[:, None, :], axis=2)
            remaining &= size <= room
            new = remaining & (jnp.sum(before & remaining[:, None, :], axis=2) <= room)
            return selected | new, remaining & ~new

        initial = (jnp.zeros_like(candidate), candidate)
        return jax.lax.while_loop(lambda state: jnp.any(state[1]), take, initial)[0]
