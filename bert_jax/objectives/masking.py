"""Mask tokens for masked language modelling (Devlin et al., section 3.1); next-token targets.

Masking runs on the device and is different in every step. Of a sequence's n tokens, round(rate * n)
are selected, at least 1 and at most a maximum, never [CLS] or [SEP]. By default 80% of these become
[MASK], 10% are kept and 10% become a random token. With `MaskingConfig.span`, tokens are selected in
spans, and one of the three replacements is drawn per span (SpanBERT: Joshi et al. 2019, arXiv
1907.10529, section 3.1).
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from bert_jax.config.schema import MaskingConfig
from bert_jax.data.rows import Layout, is_real


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
    rate = max(config.rate, config.final_rate)
    if rate == 0.15 and tokens in recipe:
        return recipe[tokens]
    return math.ceil(rate * tokens)


def prediction_counts(
    config: MaskingConfig, tokens: int, rate: float
) -> Int[np.ndarray, " {tokens+1}"]:
    """Return the number of predictions for a sequence of n of at most `tokens` tokens.

    Computed on the host in float64: in float32, 0.15 * n rounds some halves the other way.
    """
    maximum = max_predictions_per_sequence(config, tokens)
    targets = [round(rate * n) for n in range(tokens + 1)]
    return np.array(
        [min(max(1, k), maximum, max(n - 2, 0)) for n, k in enumerate(targets)], np.int32
    )


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
        """[T + 1] number of predictions for n tokens, at the final rate if the rate changes."""
        return prediction_counts(
            self.config, self.tokens, self.config.final_rate or self.config.rate
        )

    @functools.cached_property
    def predictions(self) -> int:
        """P, the maximum number of predictions of S sequences with T tokens in total."""
        # max_counts[n]: maximum for n tokens in total; each iteration adds one more sequence.
        rate = max(self.config.rate, self.config.final_rate)
        counts = prediction_counts(self.config, self.tokens, rate)
        max_counts = counts
        for _ in range(self.sequences - 1):
            updated = [(max_counts[: n + 1] + counts[n::-1]).max() for n in range(self.tokens + 1)]
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
        num_predictions: Int[Array, "B S"] | None = None,
    ) -> MaskedBatch:
        """Mask every row, as a function of the arguments alone.

        Args:
            tokens, length, a_length, layout: the rows.
            key: random key.
            num_predictions: number of predictions of each sequence; None for `counts` of its length.
        """
        if num_predictions is None:
            num_predictions = jnp.asarray(self.counts)[length]
        select_key, kind_key, random_key = jax.random.split(key, 3)
        selected = self._select(tokens, length, a_length, layout, num_predictions, select_key)

        # Earlier positions score higher: top_k returns selected positions in order, then padding.
        score, positions = jax.lax.top_k(
            jnp.where(selected, self.tokens - jnp.arange(self.tokens), 0), self.predictions
        )
        weights = (score > 0).astype(jnp.float32)
        labels = jnp.take_along_axis(tokens, positions, 1)

        kind = jax.random.uniform(kind_key, tokens.shape)
        if self.config.span:  # one draw for every run of selected tokens
            kind = jnp.take_along_axis(kind, _run_starts(selected), 1)
        replacement = jax.random.randint(random_key, tokens.shape, 0, self.vocab_size, tokens.dtype)
        config = self.config
        corrupted = jnp.where(
            kind < config.mask_fraction + config.same_fraction, tokens, replacement
        )
        corrupted = jnp.where(kind < config.mask_fraction, self.mask_id, corrupted)
        return MaskedBatch(jnp.where(selected, corrupted, tokens), positions, labels, weights)

    def _select(
        self, tokens, length, a_length, layout: Layout, num_predictions, key
    ) -> Bool[Array, "B T"]:
        membership = layout.segment_ids[:, :, None] == jnp.arange(self.sequences)  # [B, T, S]

        def per_token(per_sequence):  # [B, S] -> [B, T]
            return jnp.sum(membership * per_sequence[:, None, :], axis=2)

        n, a = per_token(length), per_token(a_length)
        special = (
            (layout.position_ids == 0)
            | (layout.position_ids == a - 1)
            | (layout.position_ids == n - 1)
        )
        # Sequences across documents ("full-sentences") have a [SEP] in between. Every sequence ends in
        # [SEP], so the id of [SEP] is read from the last token of the first sequence.
        separator = jnp.take_along_axis(tokens, jnp.maximum(length[:, :1] - 1, 0), 1)
        special |= tokens == separator
        candidate = is_real(layout) & ~special
        num_predictions = per_token(num_predictions)
        same_sequence = layout.segment_ids[:, :, None] == layout.segment_ids[:, None, :]

        # A unit (word piece or whole word) is identified by its start; its pieces share one draw.
        start = jnp.broadcast_to(jnp.arange(self.tokens), tokens.shape)
        if self.config.whole_word:
            continues = jnp.asarray(self.continuation)[tokens]
            # A piece that truncation separated from its word starts a new unit.
            after_candidate = jnp.pad(candidate, ((0, 0), (1, 0)))[:, :-1]
            start = jnp.where(continues & candidate & after_candidate, 0, start)
            start = jax.lax.cummax(start, axis=1)
        if self.config.span:
            return self._select_spans(candidate, start, num_predictions, same_sequence, key)
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

    def _select_spans(
        self,
        candidate: Bool[Array, "B T"],
        start: Int[Array, "B T"],
        num_predictions: Int[Array, "B T"],
        same_sequence: Bool[Array, "B T T"],
        key: Key[Array, ""],
    ) -> Bool[Array, "B T"]:
        """Select the tokens of random spans.

        SpanBERT's code draws a start among the tokens that are not masked yet, and a length, masks the
        span up to the next special token, and goes on until the sequence has its number of predictions
        (the last span may be cut). Here the starts of all units (words or word pieces) are put in
        random order at once, and those that an earlier span covers are skipped.

        Args:
            candidate: tokens that can be selected.
            start: start of each token's unit.
            num_predictions: number of tokens to select in each token's sequence.
            same_sequence: whether two tokens are in the same sequence.
            key: random key.
        """
        order_key, length_key = jax.random.split(key)
        position = jnp.arange(self.tokens)
        is_start = candidate & (start == position)
        draw = jax.random.uniform(order_key, candidate.shape)
        is_earlier = (draw[:, None, :] < draw[:, :, None]) | (
            (draw[:, None, :] == draw[:, :, None]) & (position[None, :] < position[:, None])
        )
        rank = jnp.sum(is_earlier, axis=2)  # unique in a row
        length = span_lengths(length_key, candidate.shape, self.config)

        # covers[b, t, u]: the span from u would include t. No special token is between them.
        unit = jnp.cumsum(is_start, axis=1)
        between = jnp.cumsum(~candidate, axis=1)
        distance = unit[:, :, None] - unit[:, None, :]
        covers = candidate[:, :, None] & is_start[:, None, :]
        covers &= between[:, :, None] == between[:, None, :]
        covers &= (distance >= 0) & (distance < length[:, None, :])
        precedes = covers & is_earlier

        # Each iteration accepts the starts that no earlier span can cover anymore.
        def decide(state):
            accepted, undecided = state
            is_covered = jnp.any(precedes & accepted[:, None, :], axis=2)
            may_be_covered = jnp.any(precedes & undecided[:, None, :], axis=2)
            accepted |= undecided & ~is_covered & ~may_be_covered
            return accepted, undecided & ~is_covered & may_be_covered

        initial = (jnp.zeros_like(candidate), is_start)
        accepted, _ = jax.lax.while_loop(lambda state: jnp.any(state[1]), decide, initial)

        # Tokens in the order in which the spans cover them, those of a span from left to right.
        span = jnp.min(
            jnp.where(covers & accepted[:, None, :], rank[:, None, :], self.tokens), axis=2
        )
        before = (span[:, None, :] < span[:, :, None]) | (
            (span[:, None, :] == span[:, :, None]) & (position[None, :] <= position[:, None])
        )
        before &= same_sequence & candidate[:, None, :]
        return candidate & (jnp.sum(before, axis=2) <= num_predictions)


def span_lengths(
    key: Key[Array, ""], shape: tuple[int, ...], config: MaskingConfig
) -> Int[Array, "..."]:
    """Draw lengths of spans: geometric with p = `span_p`, given that they are at most `span`."""
    cumulative = 1 - (1 - config.span_p) ** np.arange(1, config.span)
    cumulative = cumulative / (1 - (1 - config.span_p) ** config.span)
    draw = jax.random.uniform(key, (*shape, 1))
    return 1 + jnp.sum(draw >= jnp.asarray(cumulative, jnp.float32), axis=-1)


def _run_starts(selected: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the position of the first token of each token's run of selected tokens."""
    is_start = selected & ~jnp.pad(selected, ((0, 0), (1, 0)))[:, :-1]
    return jax.lax.cummax(jnp.where(is_start, jnp.arange(selected.shape[1]), 0), axis=1)


class Spans(NamedTuple):
    """Where each prediction is in its span, a run of predicted tokens; for padding undefined.

    Attributes:
        left, right: positions of the tokens before and after the span.
        offset: distance from the first token of the span.
    """

    left: Int[Array, "B P"]
    right: Int[Array, "B P"]
    offset: Int[Array, "B P"]


def spans(masked: MaskedBatch) -> Spans:
    """Return the spans of the predictions, which are sorted by position.

    [CLS] and [SEP] are never selected, so no span crosses a sequence and both neighbors exist.
    """
    positions, is_prediction = masked.positions, masked.weights > 0
    follows = (positions[:, 1:] == positions[:, :-1] + 1) & is_prediction[:, 1:]
    is_first = jnp.pad(~follows, ((0, 0), (1, 0)), constant_values=True)
    is_last = jnp.pad(~follows, ((0, 0), (0, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(is_first & is_prediction, positions, 0), axis=1)
    end = jnp.iinfo(positions.dtype).max
    last = jax.lax.cummin(jnp.where(is_last & is_prediction, positions, end), axis=1, reverse=True)
    return Spans(first - 1, last + 1, positions - first)
