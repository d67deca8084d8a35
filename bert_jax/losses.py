"""Losses and metrics as (sum, weight) pairs.

Sums add up over microbatches, devices and evaluation batches; the mean is taken once, at the end,
over everything. A mean of means would weigh sequences by the company they keep.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Pair = tuple[Float[Array, ""], Float[Array, ""]]


def label_logits(logits: Float[Array, "... C"], labels: Int[Array, "..."]) -> Float[Array, "..."]:
    """Return the labels' logits; NaN for a label that is not below C, which `guard` reports.

    Written as a sum with a single nonzero term: its gradient is a comparison, which fuses with the
    softmax's, where the gradient of an index is a scatter.
    """
    here = labels[..., None] == jnp.arange(logits.shape[-1])
    return jnp.where(labels < logits.shape[-1], jnp.sum(logits, -1, where=here), jnp.nan)


def cross_entropy(
    logits: Float[Array, "... C"], labels: Int[Array, "..."], weights: Float[Array, "..."]
) -> Pair:
    """Negative log-likelihood of the labels in nats, summed with weights; and the weights' sum."""
    with jax.named_scope("loss"):
        loss = jax.nn.logsumexp(logits, axis=-1) - label_logits(logits, labels)
        return jnp.sum(loss * weights), jnp.sum(weights)


def accuracy(
    logits: Float[Array, "... C"], labels: Int[Array, "..."], weights: Float[Array, "..."]
) -> Pair:
    """How many of the labels score highest, with weights; and the weights' sum."""
    with jax.named_scope("loss"):
        # Comparing against the maximum is one reduction; argmax on CPU is many times slower.
        best = label_logits(logits, labels) >= jnp.max(logits, -1)
        return jnp.sum(best * weights), jnp.sum(weights)
