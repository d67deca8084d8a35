"""Attention within the sequences of packed rows, with dropout, in a kernel forward and one backward."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, Key

from bert_jax.model.kernels import triton
from bert_jax.runtime import sharding


class Settings(NamedTuple):
    """What kernels are compiled for.

    Attributes:
        rate: rate of dropout.
        causal: a token attends only to itself and earlier tokens.
        reach: a token attends only to tokens at most this far away; 0 for no limit.
        tokens: T, without padding.
        heads: N on all devices.
    """

    rate: float
    causal: bool
    reach: int
    tokens: int
    heads: int


def attend(
    qkv: Float[Array, "B T N 3 K"],
    bias: Float[Array, "N 3 K"] | None,
    segment_ids: Int[Array, "B T"],
    rate: float,
    key: Key[Array, ""] | None,
    causal: bool,
    reach: int,
) -> Float[Array, "B T N K"]:
    """Compute attention as `attention.attention` does, for K a power of two of at least 16.

    Scores, softmax and sums are in float32. The backward pass recomputes the scores and adds in a fixed
    order, without atomics.

    Args:
        qkv: queries, keys and values.
        bias: what was added to them, to return its gradient, a sum over all tokens; or None.
        segment_ids, rate, key, causal, reach: as for `attention.attention`, with a key of "hash".
    """
    tokens, heads = qkv.shape[1], qkv.shape[2]
    rate = 0.0 if key is None else rate
    settings = Settings(rate, causal, reach, tokens, heads)
    padding = max(16, pl.next_power_of_2(tokens)) - tokens if tokens <= 128 else -tokens % 128
    qkv = jnp.pad(qkv, [(0, 0), (0, padding), (0, 0), (0, 0), (0, 0)])
    # The padding is a separate sequence.
    segment_ids = jnp.pad(segment_ids, [(0, 0), (0, padding)], constant_values=-1)
    output: Any = _attend(settings, qkv, bias, segment_ids, key if rate else None)
    return output[:, :tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings, qkv, bias, segment_ids, key):
    return _forward(settings, qkv, bias, segment_ids, key)[0]


def _forward(settings, qkv, bias, segment_ids, key):
    run = sharding.shard_heads(functools.partial(_run_forward, settings))
    output, normalizer = run(qkv, segment_ids, key)
    return output, (qkv, output, normalizer, bias, segment_ids, key)


def _backward(settings, residuals, cotangent):
    *arrays, bias, segment_ids, key = residuals
    run = sharding.shard_heads(functools.partial(_run_backward, settings))
    gradient, sums = run([*arrays, cotangent], segment_ids, key)
    return gradient, None if bias is None else sums.sum((0, 1)), None, None


_attend.defvjp(_forward, _backward)


def _run_forward(settings, shards, qkv, segment_ids, key) -> tuple[Any, Any]:
    """Return a device's output [B T N K] and the logarithm of the softmax's denominator [B 1 N T]."""
    rows, tokens, heads, _, size = qkv.shape
    block = min(tokens, 128)
    return triton.call(
        functools.partial(_forward_kernel, settings, block),
        "packed_attention_forward",
        (rows, heads, tokens // block),
        (
            jax.ShapeDtypeStruct((rows, tokens, heads, size), qkv.dtype),
            jax.ShapeDtypeStruct((rows, 1, heads, tokens), jnp.float32),
        ),
        8,
        _seed(settings, shards, qkv, key),
        segment_ids,
        qkv,
    )


def _forward_kernel(settings, block, seed, segments, qkv, output, normalizer):
    head, tokens = _Head(settings, seed, segments, qkv), qkv.shape[1]
    i = pl.program_id(2) * block + jnp.arange(block)
    scaled, lowest = head.queries(i), jnp.finfo(jnp.float32).min

    def add_block(number, carry):
        total, highest, denominator = carry
        j = number * block + jnp.arange(block)
        scores = triton.dot(scaled, head.read(1, j).T)
        scores = jnp.where(head.mask(i, j), scores, lowest)
        new = jnp.maximum(highest, jnp.max(scores, 1))
        # While no block had a token to attend to, these are 1, and `factor` is 0 in the first that has.
        exponentials, factor = jnp.exp(scores - new[:, None]), jnp.exp(highest - new)
        weights = head.drop(exponentials, i, j).astype(qkv.dtype)
        total = total * factor[:, None] + triton.dot(weights, head.read(2, j))
        return total, new, denominator * factor + jnp.sum(exponentials, 1)

    zeros = jnp.zeros(block, jnp.float32)
    carry = jnp.zeros((block, qkv.shape[-1]), jnp.float32), zeros + lowest, zeros
    total, highest, denominator = jax.lax.fori_loop(0, tokens // block, add_block, carry)
    triton.store(output, *head.at(i), value=total / denominator[:, None])
    triton.store(normalizer, head.row, 0, head.number, i, value=highest + jnp.log(denominator))


def _run_backward(settings, shards, arrays, segment_ids, key) -> tuple[Any, Any]:
    """Return a device's gradient of qkv, and its sums over blocks of tokens [B n N 3 K] in float32."""
    qkv = arrays[0]
    rows, tokens, heads, _, size = qkv.shape
    block = tokens if tokens <= 128 else 64
    return triton.call(
        functools.partial(_backward_kernel, settings, block),
        "packed_attention_backward",
        (rows, heads, tokens // block),
        (
            jax.ShapeDtypeStruct(qkv.shape, qkv.dtype),
            jax.ShapeDtypeStruct((rows, tokens // block, heads, 3, size), jnp.float32),
        ),
        8 if block == tokens else 4,
        _seed(settings, shards, qkv, key),
        segment_ids,
        *arrays,
    )


def _backward_kernel(
    settings, block, seed, segments, qkv, output, normalizer, cotangent, gradient, sums
):
    """Compute the gradients of a block of tokens, as keys and values and as queries."""
    head, tokens, dtype = _Head(settings, seed, segments, qkv), qkv.shape[1], qkv.dtype
    i = pl.program_id(2) * block + jnp.arange(block)

    def load_queries(i):
        """Return queries, cotangents, and what is subtracted from scores and from their gradients."""
        of_output = triton.read(cotangent, *head.at(i))
        product = triton.load(output, *head.at(i)) * of_output.astype(jnp.float32)
        logarithm = triton.load(normalizer, head.row, 0, head.number, i)
        return head.queries(i), of_output, logarithm[:, None], jnp.sum(product, 1)[:, None]

    def weights_and_gradient(queries, i, keys, values, j):
        """Return the softmax after dropout, and the gradient of the scores."""
        scaled, of_output, logarithm, of_denominator = queries
        exponentials = jnp.exp(triton.dot(scaled, keys.T) - logarithm)
        softmax = jnp.where(head.mask(i, j), exponentials, 0.0)
        of_softmax = head.drop(triton.dot(of_output, values.T), i, j)
        of_scores = softmax * (of_softmax - of_denominator)
        return head.drop(softmax, i, j).astype(dtype), of_scores.astype(dtype)

    queries, keys, values = load_queries(i), head.read(1, i), head.read(2, i)

    def add_as_keys(number, carry):
        of_keys, of_values = carry
        j = number * block + jnp.arange(block)
        others = load_queries(j)
        weights, of_scores = weights_and_gradient(others, j, keys, values, i)
        of_keys += triton.dot(of_scores.T, others[0])
        return of_keys, of_values + triton.dot(weights.T, others[1])

    def add_as_queries(number, of_queries):
        j = number * block + jnp.arange(block)
        others = head.read(1, j)
        _, of_scores = weights_and_gradient(queries, i, others, head.read(2, j), j)
        return of_queries + triton.dot(of_scores, others)

    if block == tokens:
        weights, of_scores = weights_and_gradient(queries, i, keys, values, i)
        of_queries = triton.dot(of_scores, keys)
        of_keys = triton.dot(of_scores.T, queries[0])
        of_values = triton.dot(weights.T, queries[1])
    else:
        zeros = jnp.zeros((block, qkv.shape[-1]), jnp.float32)
        of_keys, of_values = jax.lax.fori_loop(0, tokens // block, add_as_keys, (zeros, zeros))
        of_queries = jax.lax.fori_loop(0, tokens // block, add_as_queries, zeros)
    for part, value in enumerate((of_queries * head.scale, of_keys, of_values)):
        triton.store(gradient, *head.at(i, part), value=value)
        at = (head.row, pl.program_id(2), head.number, part, head.features[0])
        triton.store(sums, *at, value=jnp.sum(value, 0))


def _seed(settings, shards, qkv, key):
    rows, _, heads, *_ = qkv.shape
    first_head = shards[0] * rows * settings.heads + shards[1] * heads
    return triton.seed(key, first_head, settings.tokens**2)


class _Head:
    """A head of a row, which a kernel computes attention in.

    Attributes:
        row, number: index of the row and of the head on this device.
        features: indices of its features [1 K].
        scale: factor of the scores.
    """

    def __init__(self, settings: Settings, seed: Any, segments: Any, qkv: Any):
        self.row, self.number = pl.program_id(0), pl.program_id(1)
        self.features, self.scale = jnp.arange(qkv.shape[-1])[None], qkv.shape[-1] ** -0.5
        self._settings, self._seed, self._segments, self._qkv = settings, seed, segments, qkv

    def at(self, tokens: Int[Array, " t"], *part: int) -> tuple[Any, ...]:
        """Return the index of tokens [t K] in arrays [B T N K], or of a part in arrays [B T N 3 K]."""
        return self.row, tokens[:, None], self.number, *part, self.features

    def read(self, part: int, tokens: Int[Array, " t"]) -> Float[Array, "t K"]:
        """Read queries, keys or values (parts 0 to 2) of tokens."""
        return triton.read(self._qkv, *self.at(tokens, part))

    def queries(self, tokens: Int[Array, " t"]) -> Float[Array, "t K"]:
        """Read queries of tokens, scaled."""
        return self.read(0, tokens) * jnp.asarray(self.scale, self._qkv.dtype)

    def mask(self, i: Int[Array, " t"], j: Int[Array, " u"]) -> Bool[Array, "t u"]:
        """Return whether tokens i attend to tokens j."""
        of_queries, of_keys = (triton.read(self._segments, self.row, k) for k in (i, j))
        mask, distance = of_queries[:, None] == of_keys[None], i[:, None] - j[None]
        if self._settings.causal:
            mask &= distance >= 0
        return mask & (jnp.abs(distance) <= self._settings.reach) if self._settings.reach else mask

    def drop(
        self, value: Float[Array, "t u"], i: Int[Array, " t"], j: Int[Array, " u"]
    ) -> Float[Array, "t u"]:
        """Apply dropout to what is between tokens i and j."""
        rate, tokens, heads = (getattr(self._settings, k) for k in ("rate", "tokens", "heads"))
        if not rate:
            return value
        query = (self.row * heads + self.number) * tokens + i
        return triton.drop(value, rate, self._seed, query[:, None] * tokens + j[None])
