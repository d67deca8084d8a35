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
    scores = jnp.einsum("btnk,bunk->bntu", query, key) / jnp.sqrt(query.shape[-1]).astype(
        query.dtype
    )
    same = sequence[:, None, :, None] == sequence[:, None, None, :]
    # The softmax is in float32: its sum over hundreds of tokens loses too much in bfloat16.
    scores = jnp.where(same, scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores).astype(query.dtype)
    probabilities = dropout(probabilities, dropout_rate, dropout_key)
    return jnp.einsum("bntu,bunk->btnk", probabilities, value)
