"""Fine-tuning on any `Problem`: the heads' objectives, and the stage that the loop runs."""

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
from bert_jax import losses
from bert_jax.config import FinetuneConfig, ModelConfig
from bert_jax.data import rows
from bert_jax.data.examples import FIRST_STEPS, NO_EXAMPLE, Examples, Plan
from bert_jax.data.loader import Batch
from bert_jax.errors import UserError
from bert_jax.losses import Pair
from bert_jax.model import Bert, Params, flops_per_row, init_params
from bert_jax.tasks.problem import Logits, Problem
from bert_jax.tasks.stage import Stage

# Evaluation takes so many times the examples of a training step at once.
_EVALUATION_FACTOR = 2


class Inputs(NamedTuple):
    """A batch as the objectives take it; every leaf has the rows on its first axis.

    Attributes:
        example: [B, S], which one a sequence belongs to, or `NO_EXAMPLE`.
        label: the targets, [B, S, …] or of tokens [B, T].
    """

    tokens: Int[Array, "B T"]
    layout: rows.Layout
    example: Int[Array, "B S"]
    label: Array


class Finetuning:
    """The `Task` of a problem on packed rows."""

    best_is_highest = True

    def __init__(self, model: ModelConfig, problem: Problem, split: str, plan: Plan):
        """`split` is evaluated; `plan` is of the training examples."""
        self.model, self.problem, self._split = Bert(model), problem, split
        self.best_by = problem.best_by
        self._group = plan.examples.group
        shape = plan.shape
        self.flops_per_row = flops_per_row(model, shape.tokens, shape.sequences, 0)

    def init(self, key: Key[Array, ""]) -> Params:
        """Random parameters of the encoder and the head."""
        return init_params(self.model.config, key)

    def inputs(self, batch: dict[str, Array], key: Key[Array, ""]) -> Inputs:
        """Rows to inputs, on the device."""
        layout = rows.layout(batch["length"], batch["a_length"], batch["tokens"].shape[1])
        return Inputs(batch["tokens"], layout, batch["example"], batch["label"])

    def weights(self, inputs: Inputs) -> dict[str, Float[Array, ""]]:
        """What the objective is divided by, for a whole batch before it is split into parts."""
        return {"loss": jnp.sum(self._known(inputs))}

    def _known(self, inputs: Inputs) -> Float[Array, "B n"]:
        """1 for what counts: each example's (first) sequence, or each labelled token."""
        if self.problem.head == "token":
            real = inputs.layout.sequence < inputs.example.shape[1]
            return (real & (inputs.label != NO_EXAMPLE)).astype(jnp.float32)
        known = inputs.example != NO_EXAMPLE
        if self.problem.head == "choice":
            known = known[:, :: self._group]
            return (known & (inputs.label[:, :: self._group] != NO_EXAMPLE)).astype(jnp.float32)
        if self.problem.head == "span":
            known &= inputs.label[..., 0] != NO_EXAMPLE
        elif self.problem.head == "sequence":
            if self.problem.objective == "class":
                known &= inputs.label != NO_EXAMPLE
            else:  # not a number where it is unknown
                given = ~jnp.isnan(inputs.label)
                known &= given if given.ndim == 2 else given.all(-1)
        return known.astype(jnp.float32)

    def pairs(self, params: Params, inputs: Inputs, key: Key[Array, ""] | None) -> dict[str, Pair]:
        """The objective and the fraction of real tokens as (sum, weight)."""
        logits = self.model.apply(
            {"params": params}, inputs.tokens, inputs.layout, key, method=Bert.classify
        )
        found = self._losses(logits, inputs)
        real = inputs.layout.sequence < inputs.example.shape[1]
        found["real_fraction"] = (jnp.sum(real.astype(jnp.float32)), jnp.float32(real.size))
        return found

    def _losses(self, logits: Float[Array, "B n C"], inputs: Inputs) -> dict[str, Pair]:
        weights, label = self._known(inputs), inputs.label
        head, objective = self.problem.head, self.problem.objective
        if head == "span":
            return {"loss": _span_loss(logits, inputs, weights)}
        if head == "choice":
            logits = logits[..., 0].reshape(len(logits), -1, self._group)
            label = label[:, :: self._group]
        elif objective == "number":
            squares = (logits[..., 0] - jnp.nan_to_num(label)) ** 2
            return {"loss": (jnp.sum(squares * weights), jnp.sum(weights))}
        elif objective == "classes":
            label = jnp.nan_to_num(label)
            each = jnp.maximum(logits, 0) - logits * label + jnp.log1p(jnp.exp(-jnp.abs(logits)))
            return {"loss": (jnp.sum(each.mean(-1) * weights), jnp.sum(weights))}
        label = jnp.maximum(label, 0)
        return {
            "loss": losses.cross_entropy(logits, label, weights),
            "accuracy": losses.accuracy(logits, label, weights),
        }

    def outputs(self, params: Params, inputs: Inputs) -> dict[str, Array]:
        """The logits."""
        return {
            "logits": self.model.apply(
                {"params": params}, inputs.tokens, inputs.layout, method=Bert.classify
            )
        }

    def score(self, found: list[tuple[Batch, dict[str, np.ndarray]]]) -> dict[str, float]:
        """The problem's own metrics."""
        return self.problem.score(self._split, self.logits(self._split, found))

    def logits(self, split: str, found: list[tuple[Batch, dict[str, np.ndarray]]]) -> Logits:
        """Logits of a split's examples in order, from rows in any."""
        examples, head = self.problem.splits[split], self.problem.head
        logits: list[Any] = [None] * len(examples)
        for batch, outputs in found:
            for row, slot in zip(*np.nonzero(batch["example"] != NO_EXAMPLE), strict=True):
                example, place = batch["example"][row, slot], outputs["logits"][row]
                if head in ("token", "span"):
                    start = batch["length"][row, :slot].sum()
                    logits[example] = place[start : start + batch["length"][row, slot]]
                elif head == "sequence":
                    logits[example] = place[slot]
                elif slot % self._group == 0:
                    logits[example] = place[slot : slot + self._group, 0]
        return logits

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """As they are."""
        return means

    def describe(self, summary: dict[str, float]) -> str:
        """Loss and the problem's best metric, or accuracy while training."""
        shown = [name for name in (self.best_by, "accuracy") if name in summary][:1]
        return " ".join(f"{name} {summary[name]:.4g}" for name in ["loss", *shown])


def _span_loss(logits: Float[Array, "B T 2"], inputs: Inputs, weights: Float[Array, "B S"]) -> Pair:
    """Cross-entropy of start and end over each sequence's own tokens, their mean (section 4.2)."""
    slots = inputs.example.shape[1]
    own = inputs.layout.sequence[:, None, :] == jnp.arange(slots)[None, :, None]
    start = inputs.layout.cls
    total = jnp.float32(0)
    for i in range(2):
        scores = jnp.where(own, logits[:, None, :, i], jnp.finfo(jnp.float32).min)  # [B, S, T]
        place = jnp.minimum(start + inputs.label[..., i], scores.shape[-1] - 1)
        chosen = losses.label_logits(scores, place)
        loss = jnp.where(weights > 0, jax.nn.logsumexp(scores, -1) - chosen, 0)
        total += jnp.sum(loss * weights) / 2
    return total, jnp.sum(weights)


# What is the run's own and not the model's: taken from the config also where there is a checkpoint,
# for one that was pretrained without dropout could never be given any, and what stands between
# encoder and head starts anew with the head.
_FREE = (
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
    config: FinetuneConfig, start: ModelConfig | None, problem: Problem
) -> ModelConfig:
    """The model to fine-tune: a checkpoint's encoder, or the config's, with the problem's head.

    Raises:
        UserError: the config asks for another encoder than the checkpoint has.
    """
    asked, default = config.model, ModelConfig()
    model = copy.deepcopy(asked if start is None else start)
    for field in dataclasses.fields(ModelConfig):
        value = getattr(asked, field.name)
        if field.name in _FREE:
            setattr(model, field.name, value)
        elif value not in (getattr(default, field.name), getattr(model, field.name)):
            raise UserError(
                f"config.model.{field.name} is {value!r}, the checkpoint's is "
                f"{getattr(start, field.name)!r}: leave it out, or train with --init none"
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
    """Of a checkpoint's parameters those to begin with: encoder and pooler, not what heads have.

    Args:
        config: with the model to fine-tune.
        start, params: the checkpoint's.

    Returns:
        A part of the parameters, and the modules of the model that start anew.
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
    taken = {
        path: value
        for path, value in traverse_util.flatten_dict(params, sep="/").items()
        if path.startswith(
            ("embeddings/", "encoder/", "pooler/" if model.has_pooler else "encoder/")
        )
        and not path.startswith(tuple(f"{name}/" for name in new))
    }
    return traverse_util.unflatten_dict(taken, sep="/"), new


def stage(
    config: FinetuneConfig, problem: Problem, seeds: Sequence[int], rows_multiple: int
) -> tuple[FinetuneConfig, list[dict[str, Any]], Plan, Stage]:
    """The single stage of a fine-tuning run.

    Args:
        config: with the model to fine-tune.
        problem: the data.
        seeds: all that will be run, so that they share their programs; the stage is of the first.
        rows_multiple: how many devices share a batch.

    Returns:
        The config with what follows from the data filled in; what the data are (`workdir.claim`);
        the plan of the steps' batches; the stage.

    Raises:
        UserError: no training or held-out examples, or too few; a profile of steps that run several
            programs.
    """
    config = copy.deepcopy(config)
    examples = problem.splits.get("train")
    if not examples:
        raise UserError("there are no training examples: name them, config.task.data or .train")
    split = evaluated_split(problem)
    an_epoch = max(len(examples) // config.batch_size, 1)
    # As run_classifier.py counts.
    config.steps = config.steps or int(len(examples) / config.batch_size * config.epochs)
    if not config.steps:
        raise UserError(
            f"config.batch_size is {config.batch_size}, there are only {len(examples)} examples for "
            f"{config.epochs:g} epochs: not one step; lower it, or raise config.epochs"
        )
    config.optim.warmup_steps = int(config.steps * config.warmup_fraction)
    config.evaluate_every_steps = config.evaluate_every_steps or an_epoch
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
            f"config.profile_steps is {config.profile_steps!r}: from step {FIRST_STEPS} on, batches of "
            f"this run have {len(plan.shapes)} row counts, each a program of its own; profile steps "
            "before that"
        )
    task = Finetuning(config.model, problem, split, plan)
    held_out = evaluation_plan(config, problem.splits[split], rows_multiple)
    only = Stage(
        task=task,
        tokens=plan.shape.tokens,
        batch_size=plan.shape.rows,
        accumulation=config.accumulation,
        batch_shape={k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in plan.empty().items()},
        first_step=0,
        end_step=config.steps,
        batches=functools.partial(plan.batches, seeds[0]),
        heldout=functools.partial(held_out.batches, 0, 0, held_out.steps),
        smaller_batches=tuple(shape.rows for shape in plan.shapes[:-1]),
    )
    counts = {name: len(examples) for name, examples in problem.splits.items()}
    return config, [{"digest": digest(problem), "examples": counts}], plan, only


def _cost_tokens(model: ModelConfig) -> int:
    """T at which a layer's attention costs as much as its other matrix products (`flops_per_row`)."""
    return (8 * model.hidden + 4 * model.feed_forward) // 4


def evaluated_split(problem: Problem) -> str:
    """The split whose score decides: the first that is for it.

    Raises:
        UserError: there is none.
    """
    for name in problem.splits:
        if name.startswith("dev"):
            return name
    raise UserError("there is nothing to evaluate on: name a dev set, config.task.data or .dev")


def evaluation_plan(config: FinetuneConfig, examples: Examples, rows_multiple: int) -> Plan:
    """Plan the batches that hold every example of a split once."""
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


def weights_digest(params: Params) -> str:
    """Of the parameters that a run begins with; "" where all are random."""
    sums, flat = hashlib.sha256(), traverse_util.flatten_dict(params, sep="/")
    for path in sorted(flat):
        sums.update(path.encode())
        sums.update(np.asarray(flat[path]).tobytes())
    return sums.hexdigest() if flat else ""


def digest(problem: Problem) -> str:
    """Of what is trained and evaluated on."""
    sums = hashlib.sha256()
    for name, examples in problem.splits.items():
        sums.update(f"{name} {len(examples)} {problem.head} {problem.labels}".encode())
        for tokens in examples.tokens:
            sums.update(tokens.tobytes())
        for target in examples.targets.values():
            sums.update(np.ascontiguousarray(target).tobytes())
        for each in examples.token_targets.values():
            for target in each:
                sums.update(target.tobytes())
    return sums.hexdigest()
