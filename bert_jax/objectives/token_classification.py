"""Token classification: a label for every token, as in NER (Devlin et al., section 5.3)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.data.examples import NO_EXAMPLE
from bert_jax.data.rows import is_real
from bert_jax.objectives.supervised import Inputs, Supervised


class TokenClassification(Supervised):
    """Label the tokens of a sequence; those without a label have no loss."""

    head = "token"

    def loss_weights(self, inputs: Inputs) -> Float[Array, "B T"]:
        """Return 1 for each labeled token, else 0."""
        return (is_real(inputs.layout) & (inputs.label != NO_EXAMPLE)).astype(jnp.float32)
