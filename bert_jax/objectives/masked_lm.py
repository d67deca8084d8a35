"""Masked LM and next-sentence prediction (Devlin et al., section 3.1)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import MaskingConfig
from bert_jax.data import rows
from bert_jax.model.bert import Bert, Outputs, Params, init_params
from bert_jax.model.flops import flops_per_row
from bert_jax.model.heads import SPAN_POSITIONS, SpanBoundary, vocab_logits
from bert_jax.model.layers import one_hot_gather
from bert_jax.objectives import losses
from bert_jax.objectives.base import Metric, Objective
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import MaskedBatch, Masker, spans


class Inputs(NamedTuple):
    """A batch as the losses take it; rows are the first axis of every leaf."""

    masked: MaskedBatch
    layout: rows.Layout
    labels: Int[Array, "B S"]
    label_weights: Float[Array, "B S"]


class MaskedLM(Objective):
    """Masked LM on rows of one format, with next-sentence prediction and SpanBERT's span-boundary
    objective if the model has these heads.
    """

    # Prefix of the names of the token loss and its metrics, and what the progress bar calls it.
    metric_prefix, display_name = "masked_lm", "mlm"

    def __init__(
        self,
        model: ModelConfig,
        masking: MaskingConfig,
        row_format: rows.RowFormat,
        mask_id: int,
        continuation: np.ndarray,
    ):
        """`mask_id` and `continuation` ([V], `##…` pieces) come from the vocabulary."""
        self.model = Bert(model)
        self.best_metric = Metric(f"{self.metric_prefix}_loss", higher_is_better=False)
        self.masker = self.make_masker(masking, row_format, mask_id, continuation)
        self._tokens = row_format.tokens
        self.flops_per_row = flops_per_row(
            model, row_format.tokens, row_format.sequences, self.masker.predictions
        )

    def make_masker(
        self,
        masking: MaskingConfig,
        row_format: rows.RowFormat,
        mask_id: int,
        continuation: np.ndarray,
    ) -> Any:
        """Return what corrupts the tokens of rows and selects the targets."""
        vocab_size = self.model.config.vocab_size
        tokens, sequences = row_format.tokens, row_format.sequences
        return Masker(masking, tokens, sequences, vocab_size, mask_id, continuation)

    def init(self, key: Key[Array, ""]) -> Params:
        """Return random parameters, independent of the format of the rows."""
        return init_params(self.model.config, key)

    def make_inputs(self, batch: dict[str, Array], key: Key[Array, ""]) -> Inputs:
        """Convert rows to inputs on the device, masked as a function of the key."""
        batch = {name: value.astype(jnp.int32) for name, value in batch.items()}
        length, a_length = batch["length"], batch["a_length"]
        layout = rows.layout(length, a_length, self._tokens)
        # Training batches have the number of predictions if config.masking.final_rate changes it.
        changes = {name: batch[name] for name in batch if name == "num_predictions"}
        masked = self.masker(batch["tokens"], length, a_length, layout, key, **changes)
        has_label = batch["label"] != rows.NO_LABEL
        return Inputs(masked, layout, jnp.maximum(batch["label"], 0), has_label.astype(jnp.float32))

    def normalizers(self, inputs: Inputs) -> dict[str, Float[Array, ""]]:
        """Return the normalizer of each loss for a whole batch, before it is split into parts."""
        normalizers = {self.best_metric.name: jnp.sum(inputs.masked.weights)}
        if self.model.config.z_loss:
            normalizers["z_loss"] = normalizers[self.best_metric.name]
        if self.model.config.next_sentence:
            normalizers["next_sentence_loss"] = jnp.sum(inputs.label_weights)
        if self.model.config.span_boundary:
            normalizers["span_boundary_loss"] = jnp.sum(_span_weights(inputs.masked))
        return normalizers

    def loss_terms(
        self, params: Params, inputs: Inputs, key: Key[Array, ""] | None
    ) -> dict[str, WeightedSum]:
        """Return losses and metrics as (sum, weight); dropout is on if `key` is given."""
        masked = inputs.masked
        args = (masked.tokens, inputs.layout, masked.positions, key)
        outputs: Any = self.model.apply(
            {"params": params}, *args, outputs=("masked_lm", "decoder", "next_sentence")
        )
        terms = self.logit_terms(inputs, outputs)
        if self.model.config.span_boundary:
            terms |= self._span_terms(params, outputs.hidden, masked)
        return terms

    def _span_terms(
        self, params: Params, hidden: Float[Array, "B T D"], masked: MaskedBatch
    ) -> dict[str, WeightedSum]:
        left, right, offset = spans(masked)
        logits: Any = SpanBoundary(self.model.config).apply(
            {"params": params["span_boundary"]}, one_hot_gather(hidden, left),
            one_hot_gather(hidden, right), offset, params["embeddings"]["word"]["embedding"],
        )  # fmt: skip
        args = (logits, masked.labels, _span_weights(masked))
        return {
            "span_boundary_loss": losses.cross_entropy(*args),
            "span_boundary_accuracy": losses.accuracy(*args),
        }

    def logit_terms(self, inputs: Inputs, outputs: Outputs) -> dict[str, WeightedSum]:
        """Return losses and metrics of the heads' logits as (sum, weight)."""
        masked, config = inputs.masked, self.model.config
        loss, accuracy = _token_terms(config, outputs, masked.labels, masked.weights)
        loss_terms = {self.best_metric.name: loss, f"{self.metric_prefix}_accuracy": accuracy}
        if config.z_loss:
            assert outputs.masked_lm is not None
            total, weight = losses.z_loss(outputs.masked_lm, masked.weights)
            loss_terms["z_loss"] = (config.z_loss * total, weight)
        if outputs.next_sentence is not None:
            nsp_args = (outputs.next_sentence, inputs.labels, inputs.label_weights)
            loss_terms["next_sentence_loss"] = losses.cross_entropy(*nsp_args)
            loss_terms["next_sentence_accuracy"] = losses.accuracy(*nsp_args)
        real = rows.is_real(inputs.layout)
        loss_terms["real_fraction"] = (jnp.sum(real.astype(jnp.float32)), jnp.float32(real.size))
        return loss_terms

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Add the sum of the losses, and the perplexity: exp of the token loss."""
        names = (self.best_metric.name, "next_sentence_loss", "span_boundary_loss", "z_loss")
        losses_present = [means[name] for name in names if name in means]
        perplexity = float(np.exp(min(means[self.best_metric.name], 700.0)))
        return {
            "loss": sum(losses_present),
            **means,
            f"{self.metric_prefix}_perplexity": perplexity,
        }

    def progress_text(self, summary: dict[str, float]) -> str:
        """Return token loss and accuracy, and next-sentence accuracy if it is trained."""
        loss, accuracy = summary[self.best_metric.name], summary[f"{self.metric_prefix}_accuracy"]
        text = f"{self.display_name} {loss:.3f} acc {accuracy:.1%}"
        if "next_sentence_accuracy" in summary:
            text += f" nsp {summary['next_sentence_accuracy']:.1%}"
        return text


def _token_terms(
    config: ModelConfig,
    outputs: Outputs,
    labels: Int[Array, "B P"],
    weights: Float[Array, "B P"],
) -> tuple[WeightedSum, WeightedSum]:
    """Return cross-entropy and accuracy of the predicted tokens.

    Given `outputs.decoder`, `config.kernels` may fuse them, and the backward pass keeps no logits.
    """
    if outputs.decoder is not None and config.kernels == "pallas" and not config.z_loss:
        from bert_jax.model.kernels import cross_entropy  # imports Pallas' compiler

        if cross_entropy.supports(outputs.decoder.kernel.shape[1]):
            measure: Any = cross_entropy.vocab_losses
            arguments = config.vocab_size, vocab_logits, outputs.decoder, labels, weights
            with jax.named_scope("loss"):
                loss, correct = measure(*arguments)
            return (loss, jnp.sum(weights)), (correct, jnp.sum(weights))
    assert outputs.masked_lm is not None
    args = outputs.masked_lm, labels, weights
    return losses.cross_entropy(*args), losses.accuracy(*args)


def _span_weights(masked: MaskedBatch) -> Float[Array, "B P"]:
    """Return the weights of the predictions that the span-boundary head makes."""
    return masked.weights * (spans(masked).offset < SPAN_POSITIONS)
