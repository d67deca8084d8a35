"""Extractive question answering: first and last token of the answer (Devlin et al., section 4.2)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.data.examples import NO_EXAMPLE
from bert_jax.objectives import losses
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.supervised import Inputs, Supervised


class Span(Supervised):
    """Select the first and the last token of a span among the tokens of its sequence."""

    head = "span"

    def loss_weights(self, inputs: Inputs) -> Float[Array, "B S"]:
        """Return 1 for each sequence with an answer, else 0."""
        mask = (inputs.example != NO_EXAMPLE) & (inputs.label[..., 0] != NO_EXAMPLE)
        return mask.astype(jnp.float32)

    def losses(
        self, logits: Float[Array, "B T 2"], inputs: Inputs, weights: Float[Array, "B S"]
    ) -> dict[str, WeightedSum]:
        """Return the mean of the cross-entropies of start and end over each sequence's tokens."""
        slots = inputs.example.shape[1]
        in_sequence = inputs.layout.segment_ids[:, None, :] == jnp.arange(slots)[None, :, None]
        start = inputs.layout.cls
        total = jnp.float32(0)
        for i in range(2):
            scores = jnp.where(  # [B, S, T]
                in_sequence, logits[:, None, :, i], jnp.finfo(jnp.float32).min
            )
            position = jnp.minimum(start + inputs.label[..., i], scores.shape[-1] - 1)
            label_scores = losses.label_logits(scores, position)
            loss = jnp.where(weights > 0, jax.nn.logsumexp(scores, -1) - label_scores, 0)
            total += jnp.sum(loss * weights) / 2
        return {"loss": (total, jnp.sum(weights))}
