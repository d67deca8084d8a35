"""ELECTRA: replaced-token detection (Clark et al. 2020, arXiv 2003.10555, section 3).

A small generator, trained as a masked LM, replaces the masked tokens by samples of its predictions. The
discriminator, which is the final model, predicts for each token whether it was replaced. Both share the
embeddings and are trained together; no gradient flows through the samples.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from bert_jax.config.model import ModelConfig
from bert_jax.data import rows
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert, Params, split_generator
from bert_jax.model.layers import fold_in
from bert_jax.objectives import masked_lm
from bert_jax.objectives.losses import WeightedSum, binary_cross_entropy
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.masking import MaskedBatch

LOSS = "replaced_token_loss"
# Tokens per block of the vocabulary in `sample`: near the square root of its size.
_BLOCK = 256


class Inputs(NamedTuple):
    """A batch as the losses take it; rows are the first axis of every leaf."""

    masked_lm: masked_lm.Inputs
    # Uniform in [0, 1), to sample the tokens.
    draws: Float[Array, "B P"]


class ReplacedTokens(MaskedLM):
    """Masked LM of the generator, and replaced-token detection of the discriminator.

    The generator's loss selects the best checkpoint: that of the discriminator first rises, while the
    generator learns to replace tokens by plausible ones.

    Attributes:
        loss_scales: weights of the losses that do not have weight 1.
    """

    display_name = "gen"

    def __init__(self, *args: Any):
        """The arguments are those of `MaskedLM`."""
        model: ModelConfig = args[0]
        size = model.hidden // model.heads
        if model.electra.generator_hidden % size:
            raise UserError(
                f"config.model.electra.generator_hidden is {model.electra.generator_hidden}: it must be a multiple of "
                f"{size}, the size of an attention head"
            )
        super().__init__(*args)
        self.loss_scales = {LOSS: self.model.config.electra.loss_weight}

    def make_inputs(self, batch: dict[str, Array], key: Key[Array, ""]) -> Inputs:  # pyright: ignore
        """Convert rows to inputs on the device, masked as a function of the key."""
        mask_key, draw_key = jax.random.split(key)
        inputs = super().make_inputs(batch, mask_key)
        return Inputs(inputs, jax.random.uniform(draw_key, inputs.masked.positions.shape))

    def normalizers(self, inputs: Inputs) -> dict[str, Float[Array, ""]]:  # pyright: ignore
        """Return the normalizer of each loss for a whole batch, before it is split into parts."""
        is_real = rows.is_real(inputs.masked_lm.layout)
        return super().normalizers(inputs.masked_lm) | {LOSS: jnp.sum(is_real.astype(jnp.float32))}

    def loss_terms(  # pyright: ignore
        self, params: Params, inputs: Inputs, key: Key[Array, ""] | None
    ) -> dict[str, WeightedSum]:
        """Return losses and metrics as (sum, weight); dropout is on if `key` is given."""
        masked, layout = inputs.masked_lm.masked, inputs.masked_lm.layout
        generator, generator_params = split_generator(self.model.config, params)
        outputs: Any = Bert(generator).apply(
            {"params": generator_params}, masked.tokens, layout, masked.positions, fold_in(key, 0),
            outputs=("masked_lm", "decoder"),
        )  # fmt: skip
        terms = self.logit_terms(inputs.masked_lm, outputs)
        with jax.named_scope("replace"):
            logits = jax.lax.stop_gradient(outputs.masked_lm)
            sampled = sample(logits, inputs.draws, self.model.config.vocab_size)
            tokens, is_replaced = replace(masked, sampled)
        outputs = self.model.apply(
            {"params": params}, tokens, layout, key=fold_in(key, 1), outputs=("replaced_token",)
        )
        is_real = rows.is_real(layout)
        return terms | detection_terms(outputs.replaced_token, is_replaced, is_real)

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Add the weighted sum of the losses, and the generator's perplexity."""
        summary = super().summarize(means)
        return {**summary, "loss": summary["loss"] + self.loss_scales[LOSS] * means[LOSS]}

    def progress_text(self, summary: dict[str, float]) -> str:
        """Return the generator's loss and accuracy, and the discriminator's loss and recall."""
        loss, recall = summary[LOSS], summary["replaced_token_recall"]
        return f"{super().progress_text(summary)} disc {loss:.4f} recall {recall:.1%}"


def sample(
    logits: Float[Array, "B P V"], draws: Float[Array, "B P"], vocab_size: int
) -> Int[Array, "B P"]:
    """Sample tokens by the inverse of the cumulative distribution.

    Sums over blocks of the vocabulary select a block, and sums in the block a token: cumulative sums
    over the whole vocabulary would read and write the logits several times more.

    Args:
        logits: the lowest float32 for the padding of the vocabulary.
        draws: uniform in [0, 1).
        vocab_size: size of the vocabulary without padding.
    """
    width = min(_BLOCK, logits.shape[-1])
    weights = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
    padding = [(0, 0), (0, 0), (0, -weights.shape[-1] % width)]
    blocks = jnp.pad(weights, padding).reshape(*draws.shape, -1, width)
    cumulative = jnp.cumsum(jnp.sum(blocks, -1), -1)
    threshold = draws * cumulative[..., -1]
    indices = jnp.arange(cumulative.shape[-1])
    # Rounded sums may leave a threshold above the last of them.
    block = jnp.minimum(jnp.sum(cumulative <= threshold[..., None], -1), indices[-1])
    threshold -= jnp.sum(jnp.where(indices == block[..., None] - 1, cumulative, 0), -1)
    # A masked sum: TPUs gather blocks one after the other.
    inside = jnp.sum(jnp.where((indices == block[..., None])[..., None], blocks, 0), -2)
    offset = jnp.sum(jnp.cumsum(inside, -1) <= threshold[..., None], -1)
    return jnp.minimum(block * width + jnp.minimum(offset, width - 1), vocab_size - 1)


def replace(
    masked: MaskedBatch, sampled: Int[Array, "B P"]
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Return the tokens with samples at the masked positions, and whether they differ from the text."""
    # Comparisons instead of a scatter, which is slow on accelerators.
    positions = jnp.arange(masked.tokens.shape[1])
    at = (masked.positions[..., None] == positions) & (masked.weights[..., None] > 0)

    def spread(values: Int[Array, "B P"]) -> Int[Array, "B T"]:
        return jnp.sum(jnp.where(at, values[..., None], 0), axis=1)

    tokens = jnp.where(at.any(axis=1), spread(sampled), masked.tokens)
    return tokens, spread((sampled != masked.labels).astype(jnp.int32)) > 0


def detection_terms(
    logits: Float[Array, "B T"], is_replaced: Bool[Array, "B T"], is_real: Bool[Array, "B T"]
) -> dict[str, WeightedSum]:
    """Return the discriminator's loss over all real tokens, and metrics (a positive logit detects)."""
    real, replaced, detected = (
        x.astype(jnp.float32) for x in (is_real, is_replaced, (logits > 0) & is_real)
    )
    total, count = jnp.sum(real), jnp.sum(replaced)
    hits = jnp.sum(replaced * detected)
    return {
        LOSS: (jnp.sum(binary_cross_entropy(logits, replaced) * real), total),
        "replaced_token_accuracy": (jnp.sum((replaced == detected) * real), total),
        "replaced_token_precision": (hits, jnp.sum(detected)),
        "replaced_token_recall": (hits, count),
        "replaced_fraction": (count, total),
    }
