"""What to predict: masked tokens (Devlin et al., section 3.1), or the next ones (section 5.1, "LTR").

The corruption happens on the device, fresh at every step. Of each sequence's n tokens,
round(rate * n) are chosen, at least 1 and at most a cap, never [CLS] or [SEP]. Of the chosen, 80%
become [MASK], 10% stay and 10% become a random token.
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


class Masked(NamedTuple):
    """Rows as the model sees them and what to predict. P is `Masker.predictions`."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B P"]
    labels: Int[Array, "B P"]
    # 1 where there is a prediction, 0 where a row has fewer than P.
    weights: Float[Array, "B P"]


def most_predictions(config: MaskingConfig, tokens: int) -> int:
    """The cap a sequence: as configured, or the original recipe's for its two lengths."""
    recipe = {128: 20, 512: 76}  # google-research/bert, README, "max_predictions_per_seq"
    if config.most_predictions:
        return config.most_predictions
    if config.rate == 0.15 and tokens in recipe:
        return recipe[tokens]
    return math.ceil(config.rate * tokens)


@dataclasses.dataclass(frozen=True)
class NextTokens:
    """In the place of a `Masker`: leaves rows as they are and asks each token for the one after it.

    Asked is whatever has a next token in its own sequence: [CLS] for the first word, and the last
    word for [SEP]; never padding.

    Attributes:
        tokens, sequences: T, S.
    """

    tokens: int
    sequences: int

    @property
    def predictions(self) -> int:
        """P: all but the row's last."""
        return self.tokens - 1

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        length: Int[Array, "B S"],
        a_length: Int[Array, "B S"],
        layout: Layout,
        key: Key[Array, ""],
    ) -> Masked:
        """A function of the rows alone."""
        sequence, following = layout.sequence[:, :-1], layout.sequence[:, 1:]
        asked = (sequence == following) & (sequence < self.sequences)
        positions = jnp.broadcast_to(jnp.arange(self.predictions), sequence.shape)
        return Masked(tokens, positions, tokens[:, 1:], asked.astype(jnp.float32))


@dataclasses.dataclass(frozen=True, eq=False)
class Masker:
    """Corrupts rows of T tokens and at most S sequences.

    Attributes:
        config: rates and fractions.
        tokens, sequences: T, S.
        vocab_size: random tokens are drawn from all of the vocabulary, as the original does.
        mask_id: of [MASK].
        continuation: [V] whether a token continues a word (`##…`); read for whole words only.
    """

    config: MaskingConfig
    tokens: int
    sequences: int
    vocab_size: int
    mask_id: int
    continuation: np.ndarray

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """[T + 1] predictions for a sequence of n tokens.

        Computed on the host: 0.15 * n in float32 rounds some halves to the other side.
        """
        cap = most_predictions(self.config, self.tokens)
        wanted = [round(self.config.rate * n) for n in range(self.tokens + 1)]
        return np.array(
            [min(max(1, k), cap, max(n - 2, 0)) for n, k in enumerate(wanted)], np.int32
        )

    @functools.cached_property
    def predictions(self) -> int:
        """P: the most predictions that S sequences sharing T tokens can ask for."""
        most = self.counts  # most[n]: of sequences of n tokens in all, one sequence more each round
        for _ in range(self.sequences - 1):
            more = [(most[: n + 1] + self.counts[n::-1]).max() for n in range(self.tokens + 1)]
            if np.array_equal(more, most):
                break
            most = np.array(more)
        return int(most.max())

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        length: Int[Array, "B S"],
        a_length: Int[Array, "B S"],
        layout: Layout,
        key: Key[Array, ""],
    ) -> Masked:
        """Masks every row; a function of `key` and the rows alone."""
        choose_key, kind_key, random_key = jax.random.split(key, 3)
        chosen = self._choose(tokens, length, a_length, layout, choose_key)

        # The chosen positions in order, then padding: an earlier position scores higher.
        score, positions = jax.lax.top_k(
            jnp.where(chosen, self.tokens - jnp.arange(self.tokens), 0), self.predictions
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
        return Masked(jnp.where(chosen, corrupted, tokens), positions, labels, weights)

    def _choose(self, tokens, length, a_length, layout: Layout, key) -> Bool[Array, "B T"]:
        own = layout.sequence[:, :, None] == jnp.arange(self.sequences)  # [B, T, S]

        def per_token(per_sequence):  # [B, S] -> [B, T]
            return jnp.sum(own * per_sequence[:, None, :], axis=2)

        n, a = per_token(length), per_token(a_length)
        special = (layout.position == 0) | (layout.position == a - 1) | (layout.position == n - 1)
        candidate = (layout.sequence < self.sequences) & ~special
        wanted = per_token(jnp.asarray(self.counts)[length])
        same_sequence = layout.sequence[:, :, None] == layout.sequence[:, None, :]

        # A unit (word piece or whole word) is known by where it starts; its pieces share one draw.
        start = jnp.broadcast_to(jnp.arange(self.tokens), tokens.shape)
        if self.config.whole_word:
            continues = jnp.asarray(self.continuation)[tokens]
            # A piece that a segment's edge cut off from its word starts a unit of its own.
            after_candidate = jnp.pad(candidate, ((0, 0), (1, 0)))[:, :-1]
            start = jnp.where(continues & candidate & after_candidate, 0, start)
            start = jax.lax.cummax(start, axis=1)
        draw = jnp.take_along_axis(jax.random.uniform(key, tokens.shape), start, 1)

        # before[b, t, u]: in t's sequence, u's unit comes no later than t's in the order of the
        # draws; equal draws are told apart by place.
        earlier = draw[:, None, :] < draw[:, :, None]
        tied = (draw[:, None, :] == draw[:, :, None]) & (start[:, None, :] <= start[:, :, None])
        before = (earlier | tied) & same_sequence & candidate[:, None, :]
        if not self.config.whole_word:
            return candidate & (jnp.sum(before, axis=2) <= wanted)

        # The original walks through the words once and skips any that no longer fits. Each round
        # here takes the words up to the first such, after dropping those that never will fit.
        size = jnp.sum((start[:, :, None] == start[:, None, :]) & candidate[:, None, :], axis=2)

        def take(state):
            chosen, left = state
            room = wanted - jnp.sum(same_sequence & chosen[:, None, :], axis=2)
            left &= size <= room
            new = left & (jnp.sum(before & left[:, None, :], axis=2) <= room)
            return chosen | new, left & ~new

        start_state = (jnp.zeros_like(candidate), candidate)
        return jax.lax.while_loop(lambda state: jnp.any(state[1]), take, start_state)[0]
