"""Attention over packed rows: one function, whatever computes it.

Shapes: B rows, T tokens a row, N heads, K head size.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from bert_jax.dropout import dropout


def attention(
    query: Float[Array, "B T N K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    sequence: Int[Array, "B T"],
    dropout_rate: float,
    dropout_key: Key[Array, ""] | None,
) -> Float[Array, "B T N K"]:
    """Scaled dot-product attention in which a token sees its own sequence only.

    Padding forms a sequence of its own, so nothing real sees it and no row of the softmax is empty.

    Args:
        query, key, value: projections of the hidden states.
        sequence: which sequence of its row a token belongs to (`rows.Layout.sequence`).
        dropout_rate: of the attention probabilities (Vaswani et al., section 5.4, as BERT uses it).
        dropout_key: None switches dropout off.
    """
    # Heads before tokens, the small operand scaled, and the sum divided by after the product with
    # the values: a CPU takes half the time of the same in textbook order.
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    scores = jnp.einsum("bntk,bnuk->bntu", query * query.shape[-1] ** -0.5, key)
    same = sequence[:, None, :, None] == sequence[:, None, None, :]
    # The softmax is in float32: its sum over hundreds of tokens loses too much in bfloat16.
    scores = jnp.where(same, scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    largest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    exponentials = jnp.exp(scores - largest)
    total = exponentials.sum(-1, keepdims=True)
    kept = dropout(exponentials.astype(value.dtype), dropout_rate, dropout_key)
    found = jnp.einsum("bntu,bnuk->bntk", kept, value) / total.astype(value.dtype)
    return found.swapaxes(1, 2)
