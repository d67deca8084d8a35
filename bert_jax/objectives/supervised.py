"""Fine-tuning objectives: a labeled `FinetuneDataset` on packed rows, with a loss for each head.

A new head is a subclass of `Supervised` in a file of its own and a line in `finetuning.OBJECTIVES`.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import DistillConfig, EmbedConfig
from bert_jax.data import rows
from bert_jax.data.examples import NO_EXAMPLE, PackedBatches
from bert_jax.data.loader import Batch
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert, Params, init_params
from bert_jax.model.flops import flops_per_row
from bert_jax.objectives import losses
from bert_jax.objectives.base import Metric, Objective
from bert_jax.objectives.distillation import (
    LOGITS,
    StateLosses,
    Teacher,
    check,
    logit_loss,
    loss_scales,
)
from bert_jax.objectives.losses import WeightedSum
from bert_jax.tasks.base import FinetuneDataset, Logits


class Inputs(NamedTuple):
    """A batch as the losses take it; rows are the first axis of every leaf.

    Attributes:
        example: [B, S], index of the example that a sequence belongs to, or `NO_EXAMPLE`.
        label: targets, [B, S, …] per sequence or [B, T] per token; None without labels.
    """

    tokens: Int[Array, "B T"]
    layout: rows.Layout
    example: Int[Array, "B S"]
    label: Any


class Supervised(Objective):
    """A fine-tuning objective: cross-entropy of one label per example or token, or a subclass's loss.

    Attributes:
        head: the value of `config.model.head.kind`, a key of `config.HEADS`.
        pooling: how an objective without a head pools the vectors of texts.
    """

    head: ClassVar[str]

    def __init__(
        self,
        model: ModelConfig,
        dataset: FinetuneDataset,
        split: str,
        plan: PackedBatches,
        embed: EmbedConfig | None = None,
    ):
        """Initialize for evaluation on `split`; `plan` is of the training examples."""
        self.model, self.dataset, self._split = Bert(model), dataset, split
        self.best_metric = Metric(dataset.best_by)
        self.group = dataset.splits[split].group
        self.pooling = (embed or EmbedConfig()).pooling
        shape = plan.shape
        self._row_shape = (shape.tokens, shape.sequences)
        self.flops_per_row = flops_per_row(model, *self._row_shape, 0)

    def distill(self, config: DistillConfig, teacher: Teacher) -> None:
        """Add losses against a teacher, fine-tuned on the same task.

        The prediction loss is the KL divergence of the distributions of each labeled example or token,
        or the squared difference in regression.
        """
        kind = self.dataset.objective
        if self.head not in ("sequence", "token") or kind in ("classes", "relevance"):
            raise UserError(
                f"config.distill.teacher is {config.teacher!r}: this task cannot be distilled, only "
                "classification, regression and tagging"
            )
        if (
            teacher.model.head.kind != self.head
            or teacher.model.head.labels != self.model.config.head.labels
        ):
            raise UserError(
                f"the teacher {config.teacher} is not fine-tuned on this task: its labels are "
                f"{', '.join(teacher.model.head.labels) or 'none'}"
            )
        longest = max(
            len(ids) for examples in self.dataset.splits.values() for ids in examples.tokens
        )
        check(config, self.model.config, teacher.model, longest)
        tokens, sequences = self._row_shape
        self._states = StateLosses(config, self.model.config, teacher.model, tokens)
        self._temperature = config.temperature
        self._teacher_model, self.teacher = Bert(teacher.model), teacher.params
        self.loss_scales = loss_scales(config, "loss")
        self.flops_per_row += flops_per_row(teacher.model, tokens, sequences, 0) / 3
        self.flops_per_row += self._states.flops_per_row

    def loss_weights(self, inputs: Inputs) -> Float[Array, "B n"]:
        """Return 1 for each labeled example (at its first sequence) or labeled token, else 0."""
        raise NotImplementedError

    def losses(
        self, logits: Float[Array, "B n C"], inputs: Inputs, weights: Float[Array, "B n"]
    ) -> dict[str, WeightedSum]:
        """Return the loss, and metrics that are means, as (sum, weight)."""
        return label_losses(logits, inputs.label, weights)

    def unpack(self, logits: np.ndarray, lengths: Int[np.ndarray, " S"], slot: int) -> Any:
        """Return the logits of the example whose first sequence is in a slot of a row.

        Here those of its tokens, [n, C]; heads on whole sequences override it.

        Args:
            logits: the row's, [S, C] or [T, C].
            lengths: length of each of the row's sequences.
            slot: index of the example's first sequence.
        """
        start = lengths[:slot].sum()
        return logits[start : start + lengths[slot]]

    def init(self, key: Key[Array, ""]) -> Params:
        """Return random parameters of the encoder and the head."""
        params = init_params(self.model.config, key)
        return params | self._states.init(key) if self.teacher else params

    def make_inputs(self, batch: dict[str, Array], key: Key[Array, ""]) -> Inputs:
        """Convert rows to inputs on the device."""
        layout = rows.layout(batch["length"], batch["a_length"], batch["tokens"].shape[1])
        return Inputs(batch["tokens"], layout, batch["example"], batch.get("label"))

    def normalizers(self, inputs: Inputs) -> dict[str, Float[Array, ""]]:
        """Return the normalizer of the loss for a whole batch, before it is split into parts."""
        total = jnp.sum(self.loss_weights(inputs))
        if not self.teacher:
            return {"loss": total}
        states = dict.fromkeys(self._states.names, jnp.sum(rows.is_real(inputs.layout)))
        return {"loss": total, LOGITS: total, **states}

    def loss_terms(
        self, params: Params, inputs: Inputs, key: Key[Array, ""] | None
    ) -> dict[str, WeightedSum]:
        """Return the loss, metrics and the fraction of non-padding tokens as (sum, weight)."""
        if self.teacher:
            logits, loss_terms = self._compare(params, inputs, key)
        else:
            logits, loss_terms = self._logits(params, inputs, key), {}
        loss_terms |= self.losses(logits, inputs, self.loss_weights(inputs))
        real = rows.is_real(inputs.layout)
        loss_terms["real_fraction"] = (jnp.sum(real.astype(jnp.float32)), jnp.float32(real.size))
        return loss_terms

    def _compare(
        self, params: Params, inputs: Inputs, key: Key[Array, ""] | None
    ) -> tuple[Any, dict[str, WeightedSum]]:
        """Return the logits, and the losses against the teacher."""
        args, weights = (inputs.tokens, inputs.layout), self.loss_weights(inputs)
        names = ("head", *self._states.outputs)
        student: Any = self.model.apply({"params": params}, *args, key=key, outputs=names)
        teacher: Any = self._teacher_model.apply(
            {"params": params["teacher"]}, *args, outputs=names
        )
        logits, teacher_logits = student.head, teacher.head
        terms = self._states(params, student, teacher, inputs.layout)
        if self.dataset.objective == "number":
            error = (logits[..., 0] - teacher_logits[..., 0]) ** 2
            terms[LOGITS] = (jnp.sum(error * weights), jnp.sum(weights))
        else:
            terms[LOGITS] = logit_loss(logits, teacher_logits, weights, self._temperature)
        return logits, terms

    def predict(self, params: Params, inputs: Inputs) -> dict[str, Array]:
        """Return the logits."""
        return {"logits": self._logits(params, inputs, None)}

    def _logits(self, params: Params, inputs: Inputs, key: Key[Array, ""] | None) -> Any:
        outputs: Any = self.model.apply(
            {"params": params}, inputs.tokens, inputs.layout, key=key, outputs=("head",)
        )
        return outputs.head

    def score(
        self, batches_and_outputs: Iterable[tuple[Batch, dict[str, np.ndarray]]]
    ) -> dict[str, float]:
        """Return the official metrics of the evaluated split."""
        return self.dataset.score(self._split, self.logits(self._split, batches_and_outputs))

    def logits(
        self, split: str, batches_and_outputs: Iterable[tuple[Batch, dict[str, np.ndarray]]]
    ) -> Logits:
        """Unpack the logits of a split's examples, in the order of the examples."""
        logits: list[Any] = [None] * len(self.dataset.splits[split])
        for batch, outputs in batches_and_outputs:
            for row, slot in np.argwhere(batch["example"] != NO_EXAMPLE).tolist():
                if slot % self.group == 0:
                    example_logits = self.unpack(outputs["logits"][row], batch["length"][row], slot)
                    # A view would keep the whole batch in memory.
                    logits[batch["example"][row, slot]] = example_logits.copy()
        return logits

    def progress_text(self, summary: dict[str, float]) -> str:
        """Return the loss and the selection metric, or accuracy while training."""
        shown = [name for name in (self.best_metric.name, "accuracy") if name in summary][:1]
        shown = [name for name in ("loss", *shown) if name in summary]
        return " ".join(f"{name} {summary[name]:.4g}" for name in shown)


def label_losses(
    logits: Float[Array, "B n C"], label: Int[Array, "B n"], weights: Float[Array, "B n"]
) -> dict[str, WeightedSum]:
    """Return cross-entropy and accuracy; unknown labels, which have weight 0, may be negative."""
    label = jnp.maximum(label, 0)
    return {
        "loss": losses.cross_entropy(logits, label, weights),
        "accuracy": losses.accuracy(logits, label, weights),
    }
