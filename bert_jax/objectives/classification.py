"""Classification and regression of sequences on the pooled [CLS] (Devlin et al., section 4.1)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax.data.examples import NO_EXAMPLE
from bert_jax.objectives.losses import WeightedSum, binary_cross_entropy
from bert_jax.objectives.supervised import Inputs, Supervised, label_losses


class SequenceClassification(Supervised):
    """One label per example ("class"), any number ("classes"), a number ("number") or a "relevance"."""

    head = "sequence"

    def loss_weights(self, inputs: Inputs) -> Float[Array, "B S"]:
        """Return 1 for each labeled example, else 0."""
        mask = inputs.example != NO_EXAMPLE
        if self.dataset.objective == "class":
            mask &= inputs.label != NO_EXAMPLE
        else:  # NaN if unknown
            has_label = ~jnp.isnan(inputs.label)
            mask &= has_label if has_label.ndim == 2 else has_label.all(-1)
        return mask.astype(jnp.float32)

    def losses(
        self, logits: Float[Array, "B S C"], inputs: Inputs, weights: Float[Array, "B S"]
    ) -> dict[str, WeightedSum]:
        """Return cross-entropy and accuracy, mean binary cross-entropy, or squared error."""
        if self.dataset.objective == "class":
            return label_losses(logits, inputs.label, weights)
        label = jnp.nan_to_num(inputs.label)
        if self.dataset.objective == "number":
            loss = (logits[..., 0] - label) ** 2
        else:
            label = label[..., None] if self.dataset.objective == "relevance" else label
            loss = binary_cross_entropy(logits, label).mean(-1)
        return {"loss": (jnp.sum(loss * weights), jnp.sum(weights))}

    def unpack(
        self, logits: Float[np.ndarray, "S C"], lengths: Int[np.ndarray, " S"], slot: int
    ) -> Float[np.ndarray, " C"]:
        """Return the logits of a sequence."""
        return logits[slot]
