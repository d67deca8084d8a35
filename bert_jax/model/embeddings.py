"""The sum of word, position and segment embeddings."""

import functools

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, Key

from bert_jax.config.model import ModelConfig
from bert_jax.data.rows import Layout
from bert_jax.model.dropout import dropout
from bert_jax.model.layers import (
    dense,
    gather_rows,
    hidden_norm,
    normal,
    one_hot_gather,
    padded_vocab_size,
)


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, then LayerNorm and dropout (section 3.2)."""

    config: ModelConfig

    def setup(self):
        c = self.config
        size = c.embedding_width
        self.word = nn.Embed(padded_vocab_size(c), size, embedding_init=normal())
        table = functools.partial(nn.Embed, features=size, embedding_init=normal())
        if c.position_kind == "learned":
            self.position = table(c.positions)
        if c.segments:
            self.segment = table(c.segments)
        if c.norm.embeddings:
            self.norm = hidden_norm(c)
        if size != c.hidden:
            self.project = dense(c, c.hidden)

    def __call__(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        c = self.config
        # Gather words in float32: the gradient is a scatter-add, and GPUs have no fast atomic
        # addition in bfloat16. The two small tables avoid scatters altogether.
        x = gather_rows(jnp.asarray(self.word.embedding), tokens)
        if c.position_kind == "learned":
            positions = self.position.embedding[: tokens.shape[1]]
            x += one_hot_gather(positions, layout.position_ids, c.compute_dtype).astype(x.dtype)
        if c.segments:
            segments = jnp.asarray(self.segment.embedding)
            if c.segments == 1:
                x += segments[0]
            elif c.segments == 2:
                x += jnp.where(layout.token_type_ids[..., None] == 0, *segments)
            else:
                x += one_hot_gather(segments, layout.token_type_ids)
        x = x.astype(c.compute_dtype)
        if c.norm.embeddings and self.norm.is_fused:
            x = self.norm(x, c.dropout, key)
        else:
            x = dropout(self.norm(x) if c.norm.embeddings else x, c.dropout, key)
        return x if c.embedding_width == c.hidden else self.project(x)
