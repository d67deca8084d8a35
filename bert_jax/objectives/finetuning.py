"""The phase of a fine-tuning run on any `FinetuneDataset`: its objective and its batches."""

import copy
import functools
import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bert_jax.config import schema as config_lib
from bert_jax.config.checks import validate
from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import EmbedConfig, FinetuneConfig
from bert_jax.data.examples import FIRST_STEPS, Examples, PackedBatches
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError, counted, shorten
from bert_jax.model import attention
from bert_jax.objectives.base import Phase
from bert_jax.objectives.classification import SequenceClassification
from bert_jax.objectives.contrastive import Contrastive
from bert_jax.objectives.multiple_choice import MultipleChoice
from bert_jax.objectives.span import Span
from bert_jax.objectives.supervised import Supervised
from bert_jax.objectives.token_classification import TokenClassification
from bert_jax.objectives.warm_start import open_teacher, params_digest
from bert_jax.tasks.base import FinetuneDataset

# Evaluation batches hold this many times the examples of a training batch.
_EVALUATION_FACTOR = 2

# Objectives by head.
OBJECTIVES: dict[str, type[Supervised]] = {
    objective.head: objective
    for objective in (
        SequenceClassification,
        MultipleChoice,
        TokenClassification,
        Span,
        Contrastive,
    )
}


def make_objective(
    model: ModelConfig,
    dataset: FinetuneDataset,
    split: str,
    plan: PackedBatches,
    embed: EmbedConfig | None = None,
) -> Supervised:
    """Return the objective of a dataset for evaluation on `split`; `plan` is of the training set."""
    return OBJECTIVES[dataset.head](model, dataset, split, plan, embed)


def make_phase(
    config: FinetuneConfig,
    dataset: FinetuneDataset,
    seeds: Sequence[int],
    rows_multiple: int,
    vocabulary: Vocabulary | None = None,
) -> tuple[FinetuneConfig, list[dict[str, Any]], PackedBatches, Phase]:
    """Return the single phase of a fine-tuning run.

    Args:
        config: with the model to fine-tune.
        dataset: the data.
        seeds: all seeds that will be run, so that they share compiled programs; the phase is that
            of the first.
        rows_multiple: number of devices that share a batch.
        vocabulary: the model's, which a teacher must have too; None compares their sizes only.

    Returns:
        The config, completed with what follows from the data; a description of the data for
        `workdir.write_or_check_config`; the plan of the training batches; the phase.
    """
    config = copy.deepcopy(config)
    teacher = open_teacher(config, vocabulary) if config.distill.teacher else None
    examples = dataset.splits.get("train")
    if not examples:
        raise UserError("there are no training examples: set config.task.data or config.task.train")
    split = evaluated_split(dataset)
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
    validate(config)
    multiple = rows_multiple * config.accumulation
    plan = PackedBatches(
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
    config.model.attention = attention.resolve(config, plan.shape.tokens)
    objective = make_objective(config.model, dataset, split, plan, config.embed)
    if teacher:
        objective.distill(config.distill, teacher)
    held_out = evaluation_plan(config, dataset.splits[split], rows_multiple)
    phase = Phase(
        objective=objective,
        tokens=plan.shape.tokens,
        batch_size=plan.shape.rows,
        accumulation=config.accumulation,
        batch_shape={k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in plan.empty().items()},
        first_step=0,
        end_step=config.steps,
        batches=functools.partial(plan.batches, seeds[0]),
        row_indices=functools.partial(plan.members, seed=seeds[0]),
        heldout=functools.partial(held_out.batches, 0, 0, held_out.steps),
        smaller_batch_sizes=tuple(shape.rows for shape in plan.shapes[:-1]),
    )
    counts = {name: len(examples) for name, examples in dataset.splits.items()}
    digests = {name: digest(dataset, [name]) for name in dataset.splits}
    data: dict[str, Any] = {"digest": digest(dataset), "splits": digests, "examples": counts}
    if not config.model.head.kind:  # elsewhere, settings of `embed` do not affect training
        data["objective"] = f"contrastive, {config.embed.pooling} pooling"
    if teacher:
        data["teacher"] = params_digest(teacher.params)
    return config, [data], plan, phase


def run_lines(
    config: FinetuneConfig, dataset: FinetuneDataset, phase: Phase, init: str, new: Sequence[str]
) -> Iterator[str]:
    """Yield lines about a run's data, its batches, and the modules that are initialized randomly."""
    counts = ", ".join(f"{len(e):,} {name}" for name, e in dataset.splits.items())
    outputs = f"; {counted(len(dataset.labels), 'output')}: {shorten(dataset.labels)}"
    yield f"examples: {counts}{outputs if dataset.labels else ''}"
    yield from (f"  {line}" for line in dataset.report)
    row_counts = " or ".join(map(str, [*phase.smaller_batch_sizes, phase.batch_size]))
    yield (
        f"{counted(config.steps, 'step')} of {counted(config.batch_size, 'example')} in {row_counts} rows of "
        f"T={phase.tokens}; from {init}, new: {', '.join(new) or 'nothing'}"
    )


def _cost_tokens(model: ModelConfig) -> int:
    """Return T at which a layer's attention costs as much as its other matmuls."""
    wide = model.feed_forward * (1.5 if model.gated_feed_forward else 1)
    return int(8 * model.hidden + 4 * wide) // 4


def evaluated_split(dataset: FinetuneDataset) -> str:
    """Return the split that selects the best checkpoint: the first dev split."""
    for name in dataset.splits:
        if name.startswith("dev"):
            return name
    raise UserError("there is nothing to evaluate on: set config.task.data or config.task.dev")


def evaluation_plan(
    config: FinetuneConfig, examples: Examples, rows_multiple: int
) -> PackedBatches:
    """Plan batches that contain every example of a split once."""
    size = config.batch_size * _EVALUATION_FACTOR
    return PackedBatches(
        examples,
        size,
        -(-len(examples) // size),
        rows_multiple=rows_multiple,
        cost_tokens=_cost_tokens(config.model),
        shuffle=False,
        one_a_row=config.one_a_row,
    )


def digest(dataset: FinetuneDataset, splits: Collection[str] = ()) -> str:
    """Return a digest of the training and evaluation data, or of some splits."""
    sha256 = hashlib.sha256()
    for name in splits or dataset.splits:
        examples = dataset.splits[name]
        sha256.update(f"{name} {len(examples)} {dataset.head} {dataset.labels}".encode())
        for tokens in examples.tokens:
            sha256.update(tokens.tobytes())
        for target in examples.targets.values():
            sha256.update(np.ascontiguousarray(target).tobytes())
        for sequences in examples.token_targets.values():
            for target in sequences:
                sha256.update(target.tobytes())
    return sha256.hexdigest()
