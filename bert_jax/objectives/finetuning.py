"""Fine-tuning on any `FinetuneDataset`: the model, its initial parameters, and the phase to train."""

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.config import schema as config_lib
from bert_jax.config.checks import validate
from bert_jax.config.schema import ElectraConfig, EmbedConfig, FinetuneConfig, ModelConfig
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.huggingface import shorten
from bert_jax.convert.source import open_model
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.examples import FIRST_STEPS, Examples, PackedBatches
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model import attention
from bert_jax.model.bert import Params, flatten, unflatten
from bert_jax.objectives.base import Phase
from bert_jax.objectives.classification import SequenceClassification
from bert_jax.objectives.contrastive import Contrastive
from bert_jax.objectives.distillation import open_teacher
from bert_jax.objectives.multiple_choice import MultipleChoice
from bert_jax.objectives.span import Span
from bert_jax.objectives.supervised import Supervised
from bert_jax.objectives.token_classification import TokenClassification
from bert_jax.objectives.warm_start import inherit, is_changed, params_digest
from bert_jax.runtime import sharding
from bert_jax.tasks.base import FinetuneDataset
from bert_jax.tasks.load import load_dataset

# Value of `init` for random weights instead of a checkpoint.
SCRATCH = "none"
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


class FinetuningRun(NamedTuple):
    """What fine-tuning trains on, for all of its seeds.

    Attributes:
        config: the config with all settings that follow from the checkpoint and the data.
        vocabulary: the model's vocabulary.
        dataset: the data.
        data: description of the data and the initial parameters, for the workdir.
        phase: function from a seed to the phase to train.
        params: initial parameters, of the encoder and perhaps the pooler; empty for random ones.
    """

    config: FinetuneConfig
    vocabulary: Vocabulary
    dataset: FinetuneDataset
    data: list[dict[str, Any]]
    phase: Callable[[int], Phase]
    params: Params


def prepare_run(
    config: FinetuneConfig,
    init: str,
    seeds: int = 1,
    vocab: str = "",
    which: str = "best",
    keys: Collection[str] = (),
) -> FinetuningRun:
    """Open the checkpoint, read the data, print what they are, and plan the batches.

    Args:
        config: validated config.
        init: a checkpoint, as in `open_model`, or `SCRATCH`.
        seeds: number of seeds, from `config.seed` on.
        vocab: folder of the vocabulary, for `SCRATCH`.
        which: which checkpoint to start from if `init` is a run.
        keys: keys of the config that the user has set one by one. Settings of the checkpoint replace
            others that are at their defaults.
    """
    if jax.process_count() > 1:
        raise UserError(
            "fine-tuning runs in one process, on all devices of one machine: start it once, without "
            "BERT_JAX_COORDINATOR"
        )
    start, params, source_embed = None, None, EmbedConfig()
    if init == SCRATCH:
        if not vocab:
            raise UserError("--init none needs a vocabulary: add --vocab DIR")
        if config.reset_layers:
            raise UserError(
                "config.reset_layers must be 0 with --init none, which initializes all layers"
            )
        if config.lora.rank:
            raise UserError(
                f"config.lora.rank is {config.lora.rank}: it must be 0 with --init none, as adapters "
                "leave the random encoder frozen"
            )
        vocabulary = vocabularies.load(vocab)
        vocabularies.check_segments(vocabulary, config.model.segments)
    else:
        if vocab:
            raise UserError(
                f"--vocab {vocab} is only for --init none: {init} has its own vocabulary; remove it"
            )
        source_config, vocabulary, params, _ = open_model(init, which)
        start, params = source_config.model, jax.device_get(params)
        source_embed = source_config.embed
    if start is None:
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, vocab_size=len(vocabulary))
        )
    dataset = load_dataset(config.task, vocabulary)
    if config.task.kind == "classification":  # a task of GLUE has its own
        config.task = dataclasses.replace(config.task, objective=dataset.objective)
    config.model = model_config(config, start, dataset, keys)
    if config.task.kind == "pairs":
        config.embed = embed_config(config, source_embed, keys)
    mesh = sharding.make_mesh(config.mesh)
    all_seeds = range(config.seed, config.seed + seeds)
    config, data, plan, phase = make_phase(
        config, dataset, all_seeds, sharding.num_row_shards(mesh), vocabulary
    )
    init_params, new = {}, ["everything"]
    if start is not None and params is not None:
        init_params, new = restored(config, start, params)
    data[0]["start"] = params_digest(init_params)
    _print_run(dataset, config, phase, init, new)

    def phase_of(seed: int) -> Phase:
        return dataclasses.replace(
            phase,
            batches=functools.partial(plan.batches, seed),
            row_indices=functools.partial(plan.members, seed=seed),
        )

    return FinetuningRun(config, vocabulary, dataset, data, phase_of, init_params)


def _print_run(
    dataset: FinetuneDataset, config: FinetuneConfig, phase, init: str, new: Sequence[str]
) -> None:
    counts = ", ".join(f"{len(e):,} {name}" for name, e in dataset.splits.items())
    outputs = f"; {len(dataset.labels)} outputs: {shorten(dataset.labels)}"
    print(f"{counts} examples{outputs if dataset.labels else ''}")
    for line in dataset.report:
        print(f"  {line}")
    row_counts = " or ".join(map(str, [*phase.smaller_batch_sizes, phase.batch_size]))
    print(
        f"{config.steps:,} steps of {config.batch_size} examples in {row_counts} rows of "
        f"T={phase.tokens}; from {init}, new: {', '.join(new) or 'nothing'}",
        flush=True,
    )


def make_objective(
    model: ModelConfig,
    dataset: FinetuneDataset,
    split: str,
    plan: PackedBatches,
    embed: EmbedConfig | None = None,
) -> Supervised:
    """Return the objective of a dataset for evaluation on `split`; `plan` is of the training set."""
    return OBJECTIVES[dataset.head](model, dataset, split, plan, embed)


def embed_config(
    config: FinetuneConfig, start: EmbedConfig, keys: Collection[str] = ()
) -> EmbedConfig:
    """Return how a sentence encoder pools: settings at their defaults are the checkpoint's.

    Longer texts are truncated as in training unless the checkpoint has a maximum of its own. Its prompt
    and dimensions are not inherited: training has neither.

    Args:
        config: the config.
        start: settings of the checkpoint.
        keys: keys of the config that the user has set one by one, which count even at their defaults.
    """
    default = EmbedConfig()
    inherited = {
        field.name: getattr(start, field.name)
        for field in dataclasses.fields(EmbedConfig)
        if field.name not in ("prompt", "include_prompt", "truncate_dim")
        and getattr(config.embed, field.name) == getattr(default, field.name)
        and f"embed.{field.name}" not in keys
    }
    embed = dataclasses.replace(config.embed, **inherited)
    return dataclasses.replace(embed, tokens=embed.tokens or config.task.tokens)


def model_config(
    config: FinetuneConfig,
    start: ModelConfig | None,
    dataset: FinetuneDataset,
    keys: Collection[str] = (),
) -> ModelConfig:
    """Return the model to fine-tune: the checkpoint's or config's encoder with the dataset's head.

    Args:
        config: the config.
        start: the checkpoint's model; None for random weights.
        dataset: the data.
        keys: as in `embed_config`.
    """
    changed, default = is_changed(config.model), ModelConfig().pooler_activation

    def is_set(name: str) -> bool:
        return changed(name) or f"model.{name}" in keys

    has_new_pooler = start is not None and not start.has_pooler
    # Settings of the head are the config's if it sets them, else the checkpoint's.
    head_fields = ["head.layer", "head.pooling", *["pooler_activation"] * has_new_pooler]
    model = inherit(
        config.model,
        start or config.model,
        is_set=is_set,
        free=[name for name in head_fields if is_set(name)],
        advice="train with --init none",
    )
    model = dataclasses.replace(
        model,
        masked_lm=False,
        next_sentence=False,
        span_boundary=False,
        electra=ElectraConfig(),
        pooler=False,
        head=dataclasses.replace(
            model.head, kind=dataset.head, labels=tuple(dataset.labels), problem_type=""
        ),
        lora=config.lora,
    )
    is_default = model.pooler_activation == default and not is_set("pooler_activation")
    if model.has_pooler and has_new_pooler and is_default:
        # Pretraining had no use for the setting; an export needs the family's.
        fixed = FAMILIES[model.family].fixed
        model.pooler_activation = fixed.get("pooler_activation", default)
    return model


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
    new = [f"encoder/layer_{i}" for i in range(model.layers) if i not in kept]
    if model.head.kind:
        new.append("classifier")
    if model.has_pooler and not start.has_pooler:
        new.append("pooler")
    if model.has_head_transform and not start.has_head_transform:
        if start.masked_lm and start.transform and start.embedding_width == model.hidden:
            # As in transformers, where both layers have the same name.
            params = params | {"head": {k: params["masked_lm"][k] for k in ("transform", "norm")}}
        else:
            new.append("head")
    if model.head.features.startswith("weighted-"):
        new.append("features")
    if model.head.lstm_layers:
        new.append("lstm")
    if model.lora.rank:
        new.append("adapters")
    kept_parts = ["embeddings/", "encoder/"]
    kept_parts += ["pooler/"] * model.has_pooler + ["head/"] * model.has_head_transform
    selected = {
        path: value
        for path, value in flatten(params).items()
        if path.startswith(tuple(kept_parts))
        and not path.startswith(tuple(f"{name}/" for name in new))
    }
    return unflatten(selected), new


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
