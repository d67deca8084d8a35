"""Heads on the encoder: masked LM, span boundaries, hidden layers, mixes of layers, pooling."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from bert_jax.config.model import ModelConfig
from bert_jax.data.rows import Layout
from bert_jax.model.layers import (
    ACTIVATIONS,
    dense,
    norm_layer,
    normal,
    one_hot_gather,
    padded_vocab_size,
)

# Tokens of a span that the span-boundary head predicts (`max_pair_targets` in SpanBERT's code).
SPAN_POSITIONS = 20


class Decoder(NamedTuple):
    """What logits over the vocabulary are computed from: the decoder's input and its parameters."""

    x: Float[Array, "B P D"]
    kernel: Float[Array, "D V"]
    bias: Float[Array, " V"] | None


def vocab_logits(decoder: Decoder) -> Float[Array, "B P V"]:
    """Return logits over the vocabulary in float32; those of its padding mean nothing."""
    logits = _vocab_logits(decoder.x, decoder.kernel)
    return logits if decoder.bias is None else logits + decoder.bias


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


def _transform(config: ModelConfig, x: Float[Array, "B n D"], size: int) -> Float[Array, "B n E"]:
    """Apply dense + activation + norm, as submodules of the module that calls it."""
    x = ACTIVATIONS[config.activation](dense(config, size, "transform")(x))
    return norm_layer(config, "norm")(x)


class HeadTransform(nn.Module):
    """Hidden layer below a fine-tuning head (`ModernBertPredictionHead` in transformers)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B n D"]) -> Float[Array, "B n D"]:
        return _transform(self.config, x, self.config.hidden)


class MaskedLM(nn.Module):
    """Masked-LM head: vocabulary logits for gathered hidden states (section 3.1, task 1), and decoder."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B P D"], table: Float[Array, "V E"]
    ) -> tuple[Float[Array, "B P V"], Decoder]:
        c, vocab = self.config, padded_vocab_size(self.config)
        if c.transform:
            x = _transform(c, x, c.embedding_width)
        kernel: Any = table.T
        if not c.tied_decoder:
            kernel = self.param("decoder", normal(), (c.embedding_width, vocab), jnp.float32)
        bias = None
        if c.decoder_bias:
            bias = self.param("bias", nn.initializers.zeros, (vocab,), jnp.float32)
        decoder = Decoder(x, kernel, bias)
        return _without_padding(vocab_logits(decoder), c), decoder


def _without_padding(logits: Float[Array, "B P V"], config: ModelConfig) -> Float[Array, "B P V"]:
    """Return logits with the lowest value for the padding of the vocabulary."""
    vocab = logits.shape[-1]
    if vocab == config.vocab_size:
        return logits
    return jnp.where(jnp.arange(vocab) < config.vocab_size, logits, jnp.finfo(jnp.float32).min)


class SpanBoundary(nn.Module):
    """Head of SpanBERT's span-boundary objective (arXiv 1907.10529, section 3.2).

    Two dense layers with GELU and LayerNorm on the concatenation of the hidden states beside a span
    and an embedding of the position in it, which has D units here (200 in SpanBERT's code). The
    decoder is the embedding table, with a bias of its own.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        left: Float[Array, "B P D"],
        right: Float[Array, "B P D"],
        offset: Int[Array, "B P"],
        table: Float[Array, "V D"],
    ) -> Float[Array, "B P V"]:
        """Return logits of the tokens at `offset` in spans between `left` and `right`."""
        c = self.config
        position = nn.Embed(
            SPAN_POSITIONS, c.hidden, embedding_init=normal(), name="position"
        ).embedding
        x = jnp.concatenate(
            [left, right, one_hot_gather(position, offset, c.compute_dtype)], axis=-1
        )
        for name in ("first", "second"):
            x = ACTIVATIONS["gelu"](dense(c, c.hidden, name)(x))
            x = norm_layer(c, f"{name}_norm")(x)
        bias = self.param("bias", nn.initializers.zeros, (padded_vocab_size(c),), jnp.float32)
        return _without_padding(vocab_logits(Decoder(x, table.T, bias)), c)


class ReplacedToken(nn.Module):
    """ELECTRA's discriminator head: dense, activation, and a logit per token (section 3.1)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        c = self.config
        x = ACTIVATIONS[c.activation](dense(c, c.hidden, "transform")(x))
        return dense(c, 1, "output", is_output=True)(x)[..., 0]


class ScalarMix(nn.Module):
    """Learned weighted sum of layers, initially their mean (Peters et al., ELMo, equation 1)."""

    @nn.compact
    def __call__(self, states: list[Float[Array, "B T D"]]) -> Float[Array, "B T D"]:
        weights = self.param("weights", nn.initializers.zeros, (len(states),), jnp.float32)
        scale = self.param("scale", nn.initializers.ones, (), jnp.float32)
        weights = scale * jax.nn.softmax(weights)
        return functools.reduce(jnp.add, map(operator.mul, weights, states))


def sum_tokens(
    hidden: Float[Array, "B T D"], layout: Layout, included: Bool[Array, "B T"] | None = None
) -> Float[Array, "B S D"]:
    """Return the sum of each sequence's tokens, or of those `included`, in float32."""
    slots = jnp.arange(layout.cls.shape[1])
    mask = layout.segment_ids[:, None, :] == slots[None, :, None]
    if included is not None:
        mask &= included[:, None, :]
    # By default, accelerators round the float32 operands of a matrix product.
    precision, hidden = jax.lax.Precision.HIGHEST, hidden.astype(jnp.float32)
    return jnp.einsum("bst,btd->bsd", mask.astype(jnp.float32), hidden, precision=precision)


def pool_tokens(
    hidden: Float[Array, "B T D"], layout: Layout, pooling: str
) -> Float[Array, "B S D"]:
    """Return a vector of each sequence in float32: its [CLS] ("cls") or the mean of its tokens.

    An unused slot gets any finite vector.
    """
    if pooling == "cls":
        return one_hot_gather(hidden.astype(jnp.float32), layout.cls)
    ones = jnp.ones((*hidden.shape[:2], 1), jnp.float32)
    return sum_tokens(hidden, layout) / jnp.maximum(sum_tokens(ones, layout), 1)


def last_tokens(layout: Layout) -> Int[Array, "B S"]:
    """Return the index of each sequence's last token; an unused slot gets a valid index."""
    slots = jnp.arange(layout.cls.shape[1])
    ends = jnp.sum(layout.segment_ids[:, None, :] <= slots[:, None], axis=2)
    return jnp.maximum(ends - 1, 0)
