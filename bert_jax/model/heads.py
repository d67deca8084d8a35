"""Heads on top of the encoder: masked LM, and the mix of layers for feature extraction."""

import functools
import operator

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from bert_jax.config import ModelConfig
from bert_jax.model.layers import (
    ACTIVATIONS,
    dense,
    norm_layer,
    padded_vocab_size,
    vocab_initializer,
)


@jax.custom_vjp
def _vocab_logits(x: Float[Array, "B P D"], kernel: Float[Array, "D V"]) -> Float[Array, "B P V"]:
    """Return logits over the vocabulary in float32, as a softmax over so many entries needs.

    The backward pass rounds the cotangent to the dtype of x: float32 matrix products are several
    times slower on accelerators, and the other operands have no more precision.
    """
    return jnp.einsum("bpd,dv->bpv", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


def _vocab_logits_forward(x, kernel):
    return _vocab_logits(x, kernel), (x, kernel)


def _vocab_logits_backward(residuals, cotangent):
    x, kernel = residuals
    cotangent = cotangent.astype(x.dtype)
    # Flatten to one contracted axis: XLA's CPU backend cannot contract two in bfloat16.
    flat_x, flat_cotangent = (y.reshape(-1, y.shape[-1]) for y in (x, cotangent))
    return (
        jnp.einsum("bpv,dv->bpd", cotangent, kernel.astype(x.dtype)),
        jnp.einsum("nd,nv->dv", flat_x, flat_cotangent, preferred_element_type=kernel.dtype),
    )


_vocab_logits.defvjp(_vocab_logits_forward, _vocab_logits_backward)


class MaskedLM(nn.Module):
    """Masked-LM head: vocabulary logits for gathered hidden states (section 3.1, task 1)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B P D"], table: Float[Array, "V D"]
    ) -> Float[Array, "B P V"]:
        c, vocab = self.config, padded_vocab_size(self.config)
        if c.transform:
            x = ACTIVATIONS[c.activation](dense(c, c.hidden, "transform")(x))
            x = norm_layer(c, "norm")(x)
        if c.tied_decoder:
            kernel = table.T
        else:
            kernel = self.param("decoder", vocab_initializer(c, 1), (c.hidden, vocab), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (vocab,), jnp.float32)
        logits = _vocab_logits(x, kernel) + bias
        if vocab == c.vocab_size:
            return logits
        return jnp.where(jnp.arange(vocab) < c.vocab_size, logits, jnp.finfo(jnp.float32).min)


class ScalarMix(nn.Module):
    """Learned weighted sum of layers, initially their mean (Peters et al., ELMo, equation 1)."""

    @nn.compact
    def __call__(self, states: list[Float[Array, "B T D"]]) -> Float[Array, "B T D"]:
        weights = self.param("weights", nn.initializers.zeros, (len(states),), jnp.float32)
        scale = self.param("scale", nn.initializers.ones, (), jnp.float32)
        weights = scale * jax.nn.softmax(weights)
        return functools.reduce(jnp.add, map(operator.mul, weights, states))
