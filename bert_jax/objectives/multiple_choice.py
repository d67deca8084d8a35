"""Multiple choice: a score for each of an example's sequences (Devlin et al., section 4.4)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax.data.examples import NO_EXAMPLE
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.supervised import Inputs, Supervised, label_losses


class MultipleChoice(Supervised):
    """Select one of the sequences of an example, which are adjacent in a row."""

    head = "choice"

    def loss_weights(self, inputs: Inputs) -> Float[Array, "B n"]:
        """Return 1 for each labeled example, else 0; n is S divided by the number of choices."""
        first = slice(None, None, self.group)
        mask = inputs.example[:, first] != NO_EXAMPLE
        return (mask & (inputs.label[:, first] != NO_EXAMPLE)).astype(jnp.float32)

    def losses(
        self, logits: Float[Array, "B S 1"], inputs: Inputs, weights: Float[Array, "B n"]
    ) -> dict[str, WeightedSum]:
        """Return cross-entropy over the choices, and accuracy."""
        scores = logits[..., 0].reshape(len(logits), -1, self.group)
        return label_losses(scores, inputs.label[:, :: self.group], weights)

    def unpack(
        self, logits: Float[np.ndarray, "S 1"], lengths: Int[np.ndarray, " S"], slot: int
    ) -> Float[np.ndarray, " n"]:
        """Return the scores of an example's choices."""
        return logits[slot : slot + self.group, 0]
