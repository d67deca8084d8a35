"""Losses and metrics as (sum, weight) pairs.

Sums are accumulated over microbatches, devices and evaluation batches, and divided once at the end.
Averaging per-batch means would over-weight sequences from small batches.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

WeightedSum = tuple[Float[Array, ""], Float[Array, ""]]


def label_logits(logits: Float[Array, "... C"], labels: Int[Array, "..."]) -> Float[Array, "..."]:
    """Return the logits of the labels; NaN for a label of C or more, which `guard` reports.

    This is a sum with one nonzero term: its gradient is a comparison that fuses with the softmax,
    whereas the gradient of indexing is a scatter.
    """
    is_label = labels[..., None] == jnp.arange(logits.shape[-1])
    return jnp.where(labels < logits.shape[-1], jnp.sum(logits, -1, where=is_label), jnp.nan)


def cross_entropy(
    logits: Float[Array, "... C"], labels: Int[Array, "..."], weights: Float[Array, "..."]
) -> WeightedSum:
    """Return the weighted sum of the cross-entropy in nats, and the sum of the weights."""
    with jax.named_scope("loss"):
        loss = jax.nn.logsumexp(logits, axis=-1) - label_logits(logits, labels)
        return jnp.sum(loss * weights), jnp.sum(weights)


def binary_cross_entropy(
    logits: Float[Array, "..."], labels: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return the cross-entropy of a logit and a label of 0 or 1, in nats."""
    return jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def z_loss(logits: Float[Array, "... C"], weights: Float[Array, "..."]) -> WeightedSum:
    """Return the weighted sum of the squared logarithm of the softmax's denominator."""
    with jax.named_scope("loss"):
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2 * weights), jnp.sum(weights)


def accuracy(
    logits: Float[Array, "... C"], labels: Int[Array, "..."], weights: Float[Array, "..."]
) -> WeightedSum:
    """Return the weighted number of labels with the highest logit, and the sum of the weights."""
    with jax.named_scope("loss"):
        # Comparing with the maximum takes one reduction; argmax is many times slower on CPU.
        is_correct = label_logits(logits, labels) >= jnp.max(logits, -1)
        return jnp.sum(is_correct * weights), jnp.sum(weights)
