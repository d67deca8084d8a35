"""Contrastive learning of sentence embeddings: texts of a pair become similar, other texts less so."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from bert_jax.data.examples import NO_EXAMPLE
from bert_jax.model.bert import Params, pool_tokens
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.supervised import Inputs, Supervised, label_losses
from bert_jax.tasks.pairs import Pairs

# Logit of an unused slot: finite, as slots without an anchor have no other.
_MASKED = -1e9


class Contrastive(Supervised):
    """Multiple negatives ranking (Henderson et al., arXiv 1705.00652), also known as InfoNCE.

    An example is an anchor, its positive and any number of hard negatives. Each anchor is classified
    among the positives and negatives of all examples of the global batch, by cosine similarity
    times a scale (sentence-transformers' `MultipleNegativesRankingLoss`). If anchor and positive are
    the same text, which dropout makes different, this is unsupervised SimCSE (arXiv 2104.08821). With
    `dimensions` the loss is summed over truncated vectors (Matryoshka, arXiv 2205.13147, equation 1,
    with weights of 1).
    """

    head = ""
    additive = False
    dataset: Pairs

    def loss_weights(self, inputs: Inputs) -> Float[Array, "B n"]:
        """Return 1 for each anchor, else 0; n is S divided by the number of texts per example."""
        return (inputs.example[:, :: self.dataset.texts_per_example] != NO_EXAMPLE).astype(
            jnp.float32
        )

    def losses(
        self, logits: Float[Array, "B S D"], inputs: Inputs, weights: Float[Array, "B n"]
    ) -> dict[str, WeightedSum]:
        """Return the loss, and how often an anchor is most similar to its positive, by the largest vectors.

        `logits` are the vectors. Evaluated texts have no loss, as it depends on the batch.
        """
        if inputs.label is not None:
            return {}
        sizes = sorted(self.dataset.config.dimensions) or [logits.shape[-1]]
        terms = [self._losses(logits[..., :size], inputs, weights) for size in sizes]
        total = functools.reduce(operator.add, (x["loss"][0] for x in terms))
        return {**terms[-1], "loss": (total, terms[-1]["loss"][1])}

    def _losses(
        self, logits: Float[Array, "B S d"], inputs: Inputs, weights: Float[Array, "B n"]
    ) -> dict[str, WeightedSum]:
        size, dimension = self.dataset.texts_per_example, logits.shape[-1]
        squared_norm = jnp.sum(logits**2, -1, keepdims=True)
        # The gradient of a norm is NaN at 0, the vector of an unused slot.
        unit = logits * jax.lax.rsqrt(jnp.maximum(squared_norm, 1e-24))
        unit = unit.reshape(*weights.shape, size, dimension)
        candidates = unit[:, :, 1:].reshape(-1, dimension)
        # By default, accelerators round the float32 operands of a matrix product.
        precision = jax.lax.Precision.HIGHEST
        cosines = jnp.einsum("bnd,md->bnm", unit[:, :, 0], candidates, precision=precision)
        # The first candidate of each example is its positive.
        labels = jnp.arange(0, len(candidates), size - 1, dtype=jnp.int32).reshape(weights.shape)
        example = inputs.example[:, ::size]
        is_candidate = jnp.repeat(weights.reshape(-1), size - 1) > 0
        # A batch that spans two epochs may hold an example twice, which is no negative of itself.
        is_same = example[..., None] == jnp.repeat(example.reshape(-1), size - 1)
        is_its_own = labels[..., None] == jnp.repeat(labels.reshape(-1), size - 1)
        scores = jnp.where(
            is_candidate & (~is_same | is_its_own), self.dataset.config.scale * cosines, _MASKED
        )
        return label_losses(scores, labels, weights)

    def _logits(
        self, params: Params, inputs: Inputs, key: Key[Array, ""] | None
    ) -> Float[Array, "B S D"]:
        outputs: Any = self.model.apply(
            {"params": params}, inputs.tokens, inputs.layout, key=key, outputs=("hidden",)
        )
        return pool_tokens(outputs.hidden, inputs.layout, self.pooling)

    def unpack(
        self, logits: Float[np.ndarray, "S D"], lengths: Int[np.ndarray, " S"], slot: int
    ) -> Float[np.ndarray, " D"]:
        """Return the vector of a sequence."""
        return logits[slot]
