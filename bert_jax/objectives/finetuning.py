"""Fine-tuning on any `FinetuneDataset`: losses of the heads, and the stage that the training loop runs."""

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Array, Float, Int, Key

from bert_jax import config as config_lib
from bert_jax.benchmarks.base import FinetuneDataset, Logits
from bert_jax.config import FinetuneConfig, ModelConfig
from bert_jax.data import rows
from bert_jax.data.examples import FIRST_STEPS, NO_EXAMPLE, Examples, Plan
from bert_jax.data.loader import Batch
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert, Params, init_params
from bert_jax.model.flops import flops_per_row
from bert_jax.objectives import losses
from bert_jax.objectives.base import Stage
from bert_jax.objectives.losses import WeightedSum

# Evaluation batches hold this many times the examples of a training batch.
_EVALUATION_FACTOR = 2


class Inputs(NamedTuple):
    """A batch as the losses take it; rows are the first axis of every leaf.

    Attributes:
        example: [B, S], index of the example that a sequence belongs to, or `NO_EXAMPLE`.
        label: targets, [B, S, …] per sequence or [B, T] per token.
    """

    tokens: Int[Array, "B T"]
    layout: rows.Layout
    example: Int[Array, "B S"]
    label: Array


class Finetuning:
    """The `Objective` of a fine-tuning problem on packed rows."""

    best_is_highest = True

    def __init__(self, model: ModelConfig, problem: FinetuneDataset, split: str, plan: Plan):
        """Initialize for evaluation on `split`; `plan` is of the training examples."""
        self.model, self.problem, self._split = Bert(model), problem, split
        self.best_by = problem.best_by
        self._group = plan.examples.group
        shape = plan.shape
        self.flops_per_row = flops_per_row(model, shape.tokens, shape.sequences, 0)

    def init(self, key: Key[Array, ""]) -> Params:
        """Return random parameters of the encoder and the head."""
        return init_params(self.model.config, key)

    def prepare(self, batch: dict[str, Array], key: Key[Array, ""]) -> Inputs:
        """Convert rows to inputs on the device."""
        layout = rows.layout(batch["length"], batch["a_length"], batch["tokens"].shape[1])
        return Inputs(batch["tokens"], layout, batch["example"], batch["label"])

    def normalizers(self, inputs: Inputs) -> dict[str, Float[Array, ""]]:
        """Return the normalizer of the loss for a whole batch, before it is split into parts."""
        return {"loss": jnp.sum(self._loss_weights(inputs))}

    def _loss_weights(self, inputs: Inputs) -> Float[Array, "B n"]:
        """Return 1 for each labeled example (at its first sequence) or labeled token, else 0."""
        if self.problem.head == "token":
            real = inputs.layout.segment_ids < inputs.example.shape[1]
            return (real & (inputs.label != NO_EXAMPLE)).astype(jnp.float32)
        mask = inputs.example != NO_EXAMPLE
        if self.problem.head == "choice":
            mask = mask[:, :: self._group]
            return (mask & (inputs.label[:, :: self._group] != NO_EXAMPLE)).astype(jnp.float32)
        if self.problem.head == "span":
            mask &= inputs.label[..., 0] != NO_EXAMPLE
        elif self.problem.head == "sequence":
            if self.problem.objective == "class":
                mask &= inputs.label != NO_EXAMPLE
            else:  # NaN if unknown
                has_label = ~jnp.isnan(inputs.label)
                mask &= has_label if has_label.ndim == 2 else has_label.all(-1)
        return mask.astype(jnp.float32)

    def loss_terms(
        self, params: Params, inputs: Inputs, key: Key[Array, ""] | None
    ) -> dict[str, WeightedSum]:
        """Return the loss, metrics and the fraction of non-padding tokens as (sum, weight)."""
        logits = self.model.apply(
            {"params": params}, inputs.tokens, inputs.layout, key, method=Bert.classify
        )
        loss_terms = self._losses(logits, inputs)
        real = inputs.layout.segment_ids < inputs.example.shape[1]
        loss_terms["real_fraction"] = (jnp.sum(real.astype(jnp.float32)), jnp.float32(real.size))
        return loss_terms

    def _losses(self, logits: Float[Array, "B n C"], inputs: Inputs) -> dict[str, WeightedSum]:
        weights, label = self._loss_weights(inputs), inputs.label
        head, objective = self.problem.head, self.problem.objective
        if head == "span":
            return {"loss": _span_loss(logits, inputs, weights)}
        if head == "choice":
            logits = logits[..., 0].reshape(len(logits), -1, self._group)
            label = label[:, :: self._group]
        elif objective == "number":
            squared_errors = (logits[..., 0] - jnp.nan_to_num(label)) ** 2
            return {"loss": (jnp.sum(squared_errors * weights), jnp.sum(weights))}
        elif objective == "classes":
            label = jnp.nan_to_num(label)
            bce = jnp.maximum(logits, 0) - logits * label + jnp.log1p(jnp.exp(-jnp.abs(logits)))
            return {"loss": (jnp.sum(bce.mean(-1) * weights), jnp.sum(weights))}
        label = jnp.maximum(label, 0)
        return {
            "loss": losses.cross_entropy(logits, label, weights),
            "accuracy": losses.accuracy(logits, label, weights),
        }

    def predict(self, params: Params, inputs: Inputs) -> dict[str, Array]:
        """Return the logits."""
        return {
            "logits": self.model.apply(
                {"params": params}, inputs.tokens, inputs.layout, method=Bert.classify
            )
        }

    def score(
        self, batches_and_outputs: list[tuple[Batch, dict[str, np.ndarray]]]
    ) -> dict[str, float]:
        """Return the official metrics of the evaluated split."""
        return self.problem.score(self._split, self.logits(self._split, batches_and_outputs))

    def logits(
        self, split: str, batches_and_outputs: list[tuple[Batch, dict[str, np.ndarray]]]
    ) -> Logits:
        """Unpack the logits of a split's examples, in the order of the examples."""
        examples, head = self.problem.splits[split], self.problem.head
        logits: list[Any] = [None] * len(examples)
        for batch, outputs in batches_and_outputs:
            for row, slot in zip(*np.nonzero(batch["example"] != NO_EXAMPLE), strict=True):
                example, row_logits = batch["example"][row, slot], outputs["logits"][row]
                if head in ("token", "span"):
                    start = batch["length"][row, :slot].sum()
                    logits[example] = row_logits[start : start + batch["length"][row, slot]]
                elif head == "sequence":
                    logits[example] = row_logits[slot]
                elif slot % self._group == 0:
                    logits[example] = row_logits[slot : slot + self._group, 0]
        return logits

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Return the means unchanged."""
        return means

    def describe(self, summary: dict[str, float]) -> str:
        """Return the loss and the selection metric, or accuracy while training."""
        shown = [name for name in (self.best_by, "accuracy") if name in summary][:1]
        return " ".join(f"{name} {summary[name]:.4g}" for name in ["loss", *shown])


def _span_loss(
    logits: Float[Array, "B T 2"], inputs: Inputs, weights: Float[Array, "B S"]
) -> WeightedSum:
    """Mean of the start and end cross-entropies over each sequence's tokens (section 4.2)."""
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
    return total, jnp.sum(weights)


# Model fields that belong to the run rather than the checkpoint. They are always taken from the
# config: dropout must be possible on a model pretrained without it, and the modules between encoder
# and head are reinitialized with the head.
_RUN_FIELDS = (
    "lstm_layers",
    "features",
    "dropout",
    "attention_dropout",
    "dropout_generator",
    "attention",
    "dtype",
    "layer_loop",
    "remat",
)


def model_config(
    config: FinetuneConfig, start: ModelConfig | None, problem: FinetuneDataset
) -> ModelConfig:
    """Return the model to fine-tune: the checkpoint's or config's encoder with the problem's head.

    Raises:
        UserError: the config asks for an encoder that differs from the checkpoint's.
    """
    requested, default = config.model, ModelConfig()
    model = copy.deepcopy(requested if start is None else start)
    for field in dataclasses.fields(ModelConfig):
        value = getattr(requested, field.name)
        if field.name in _RUN_FIELDS:
            setattr(model, field.name, value)
        elif value not in (getattr(default, field.name), getattr(model, field.name)):
            raise UserError(
                f"config.model.{field.name} is {value!r}, the checkpoint's is "
                f"{getattr(start, field.name)!r}: remove the setting, or train with --init none"
            )
    return dataclasses.replace(
        model,
        masked_lm=False,
        next_sentence=False,
        pooler=False,
        head=problem.head,
        labels=tuple(problem.labels),
    )


def restored(
    config: FinetuneConfig, start: ModelConfig, params: Params
) -> tuple[Params, list[str]]:
    """Select the checkpoint parameters to start from: encoder and pooler, without heads.

    Args:
        config: with the model to fine-tune.
        start: the checkpoint's model.
        params: the checkpoint's parameters.

    Returns:
        A subset of the parameters, and the names of the modules that are initialized randomly.
    """
    model = config.model
    kept = range(model.layers - config.reset_layers)
    new = [f"encoder/layer_{i}" for i in range(model.layers) if i not in kept] + ["classifier"]
    if model.has_pooler and not start.has_pooler:
        new.append("pooler")
    if model.features.startswith("weighted-"):
        new.append("features")
    if model.lstm_layers:
        new.append("lstm")
    selected = {
        path: value
        for path, value in traverse_util.flatten_dict(params, sep="/").items()
        if path.startswith(
            ("embeddings/", "encoder/", "pooler/" if model.has_pooler else "encoder/")
        )
        and not path.startswith(tuple(f"{name}/" for name in new))
    }
    return traverse_util.unflatten_dict(selected, sep="/"), new


def stage(
    config: FinetuneConfig, problem: FinetuneDataset, seeds: Sequence[int], rows_multiple: int
) -> tuple[FinetuneConfig, list[dict[str, Any]], Plan, Stage]:
    """Return the single stage of a fine-tuning run.

    Args:
        config: with the model to fine-tune.
        problem: the data.
        seeds: all seeds that will be run, so that they share compiled programs; the stage is that
            of the first.
        rows_multiple: number of devices that share a batch.

    Returns:
        The config, completed with what follows from the data; a description of the data for
        `workdir.claim`; the plan of the training batches; the stage.

    Raises:
        UserError: there are no or too few training or held-out examples, or the profiled steps run
            several programs.
    """
    config = copy.deepcopy(config)
    examples = problem.splits.get("train")
    if not examples:
        raise UserError("there are no training examples: set config.task.data or config.task.train")
    split = evaluated_split(problem)
    steps_per_epoch = max(len(examples) // config.batch_size, 1)
    # Rounded as in run_classifier.py.
    config.steps = config.steps or int(len(examples) / config.batch_size * config.epochs)
    if not config.steps:
        raise UserError(
            f"config.batch_size is {config.batch_size}, but there are only {len(examples)} examples "
            f"for {config.epochs:g} epochs: not one step; lower it, or raise config.epochs"
        )
    config.optim.warmup_steps = int(config.steps * config.warmup_fraction)
    config.evaluate_every_steps = config.evaluate_every_steps or steps_per_epoch
    config.checkpoint.every_steps = config.checkpoint.every_steps or config.evaluate_every_steps
    config_lib.validate(config)
    multiple = rows_multiple * config.accumulation
    plan = Plan(
        examples,
        config.batch_size,
        config.steps,
        seeds,
        rows_multiple=multiple,
        cost_tokens=_cost_tokens(config.model),
        one_a_row=config.one_a_row,
    )
    if len(plan.shapes) > 1 and config_lib.profiled_steps(config).stop > FIRST_STEPS:
        raise UserError(
            f"config.profile_steps is {config.profile_steps!r}: from step {FIRST_STEPS} on, batches "
            f"have {len(plan.shapes)} row counts, each with its own program; profile earlier steps"
        )
    task = Finetuning(config.model, problem, split, plan)
    held_out = evaluation_plan(config, problem.splits[split], rows_multiple)
    finetuning_stage = Stage(
        objective=task,
        tokens=plan.shape.tokens,
        batch_size=plan.shape.rows,
        accumulation=config.accumulation,
        batch_shape={k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in plan.empty().items()},
        first_step=0,
        end_step=config.steps,
        batches=functools.partial(plan.batches, seeds[0]),
        heldout=functools.partial(held_out.batches, 0, 0, held_out.steps),
        smaller_batch_sizes=tuple(shape.rows for shape in plan.shapes[:-1]),
    )
    counts = {name: len(examples) for name, examples in problem.splits.items()}
    return config, [{"digest": digest(problem), "examples": counts}], plan, finetuning_stage


def _cost_tokens(model: ModelConfig) -> int:
    """Return T at which a layer's attention costs as much as its other matmuls."""
    return (8 * model.hidden + 4 * model.feed_forward) // 4


def evaluated_split(problem: FinetuneDataset) -> str:
    """Return the split that selects the best checkpoint: the first dev split.

    Raises:
        UserError: there is none.
    """
    for name in problem.splits:
        if name.startswith("dev"):
            return name
    raise UserError("there is nothing to evaluate on: set config.task.data or config.task.dev")


def evaluation_plan(config: FinetuneConfig, examples: Examples, rows_multiple: int) -> Plan:
    """Plan batches that contain every example of a split once."""
    size = config.batch_size * _EVALUATION_FACTOR
    return Plan(
        examples,
        size,
        -(-len(examples) // size),
        rows_multiple=rows_multiple,
        cost_tokens=_cost_tokens(config.model),
        shuffle=False,
        one_a_row=config.one_a_row,
    )


def params_digest(params: Params) -> str:
    """Return a digest of a run's initial parameters; "" if all are random."""
    sha256, flat = hashlib.sha256(), traverse_util.flatten_dict(params, sep="/")
    for path in sorted(flat):
        sha256.update(path.encode())
        sha256.update(np.asarray(flat[path]).tobytes())
    return sha256.hexdigest() if flat else ""


def digest(problem: FinetuneDataset) -> str:
    """Return a digest of the training and evaluation data."""
    sha256 = hashlib.sha256()
    for name, examples in problem.splits.items():
        sha256.update(f"{name} {len(examples)} {problem.head} {problem.labels}".encode())
        for tokens in examples.tokens:
            sha256.update(tokens.tobytes())
        for target in examples.targets.values():
            sha256.update(np.ascontiguousarray(target).tobytes())
        for sequences in examples.token_targets.values():
            for target in sequences:
                sha256.update(target.tobytes())
    return sha256.hexdigest()
