"""Constraints between the fields of a config; those of single fields stand beside them in `config`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from bert_jax.config.fields import flatten, leaves
from bert_jax.config.model import HEADS, LORA_TARGETS, LoraConfig, ModelConfig
from bert_jax.config.schema import (
    Config,
    DistillConfig,
    FinetuneConfig,
    MaskingConfig,
    TrainConfig,
    batch_size_key,
    profiled_steps,
)
from bert_jax.errors import UserError

# The benchmarks of each kind of task; "" for the user's own data.
GLUE = ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli")
_NAMES = {
    "classification": ("", *GLUE),
    "choice": ("", "swag"),
    "tagging": ("",),
    "squad": ("", "squad1", "squad2"),
    "pairs": ("",),
}


def validate(config: TrainConfig) -> None:
    """Check the fields of a config, alone and in combination."""
    flat = flatten(config)

    def require(holds: bool, key: str, requirement: str) -> None:
        if not holds:
            raise UserError(f"config.{key} is {flat[key]!r}: it must be {requirement}")

    for key, value in flat.items():
        if isinstance(value, float):
            require(math.isfinite(value), key, "finite")
        if isinstance(value, int) and key != "seed":  # steps and shapes are counted in int32
            require(abs(value) < 2**31, key, "below 2**31")
    check_fields(config)
    require(config.seed < 2**32, "seed", "below 2**32")

    model = config.model
    require(model.hidden % model.heads == 0, "model.heads", f"a divisor of hidden={model.hidden}")
    if model.position_kind == "rope":
        is_even = model.hidden // model.heads % 2 == 0
        require(
            is_even, "model.heads", "such that hidden / heads is even with position_kind='rope'"
        )
    fixed = HEADS[model.head.kind].labels
    num_labels = max(len(model.head.labels), 1) if fixed is None else len(fixed)
    require(
        len(model.head.labels) == num_labels,
        "model.head.labels",
        f"{num_labels} names for this head",
    )
    if model.mup.base_hidden:
        requirement = "'adam' or 'adamw' with config.model.mup.base_hidden"
        require(config.optim.optimizer in ("adam", "adamw"), "optim.optimizer", requirement)
    axes = dataclasses.astuple(config.mesh)
    if min(axes) < -1 or 0 in axes or axes.count(-1) > 1:
        raise UserError(
            f"config.mesh (data, fsdp, tensor) is {axes}: sizes must be above 0, at most one -1"
        )
    if isinstance(config, Config):
        _validate_pretraining(config, require)
    _validate_distillation(config, require)
    if isinstance(config, FinetuneConfig):
        require(config.task.tokens >= 8, "task.tokens", "8 or more")
        names = _NAMES[config.task.kind]
        require(config.task.name in names, "task.name", "one of " + ", ".join(map(repr, names)))
        if model.head.features:
            reason = (
                f"because config.model.head.features={model.head.features!r} freezes the encoder"
            )
            for name in ("frozen_layers", "reset_layers"):
                require(getattr(config, name) == 0, name, f"0, {reason}")
            require(config.optim.layer_decay == 1, "optim.layer_decay", f"1, {reason}")
        # Once there is a head, the value can be the checkpoint's, which has no effect.
        if not model.head.kind and (model.head.features or model.head.lstm_layers):
            requirement = (
                "'pooler' with config.model.head.features or config.model.head.lstm_layers"
            )
            require(model.head.layer == "pooler", "model.head.layer", requirement)
        _validate_lora(config, require)
        if config.task.kind == "pairs":
            _validate_pairs(config, require)
        # Else the model's size is not known until a checkpoint is read.
        if model.head.kind or model.vocab_size:
            limit = model.positions
            require(config.task.tokens <= limit, "task.tokens", f"8 to {limit}")
            if model.head.features:
                _ = model.feature_layers  # raises if the model has too few layers
            for name, limit in (
                ("frozen_layers", model.layers),
                ("reset_layers", model.layers - config.frozen_layers),
            ):
                requirement = f"at most {limit}, the number of layers"
                if name == "reset_layers" and config.frozen_layers:
                    requirement += " that are not frozen: reinitialized layers must be trained"
                require(getattr(config, name) <= limit, name, requirement)
    profiled_steps(config)


def _validate_lora(config: FinetuneConfig, require: Callable[[bool, str, str], None]) -> None:
    if not config.lora.rank:
        for name, value in dataclasses.asdict(LoraConfig()).items():
            requirement = f"{value!r}, the default, without config.lora.rank"
            require(getattr(config.lora, name) == value, f"lora.{name}", requirement)
        return
    targets = config.lora.targets
    known = bool(targets) and {*targets} <= {*LORA_TARGETS}
    require(known, "lora.targets", f"one or more of {', '.join(map(repr, LORA_TARGETS))}")
    for name, default in (("frozen_layers", 0), ("reset_layers", 0), ("model.head.features", "")):
        value = (
            config.model.head.features if name == "model.head.features" else getattr(config, name)
        )
        requirement = (
            f"{default!r}, because config.lora.rank={config.lora.rank} freezes the encoder"
        )
        require(value == default, name, requirement)


def _validate_pairs(config: FinetuneConfig, require: Callable[[bool, str, str], None]) -> None:
    model, task, embed = config.model, config.task, config.embed
    _require_default_head(model, "with config.task.kind='pairs', which has no head", require)
    require(embed.layers == "last", "embed.layers", "'last' with config.task.kind='pairs'")
    poolings = ("mean",) if model.causal else ("mean", "cls")
    requirement = " or ".join(map(repr, poolings)) + " with config.task.kind='pairs'"
    require(embed.pooling in poolings, "embed.pooling", requirement)
    requirement = "three columns: two texts and their similarity"
    require(len(task.similarity) == 3, "task.similarity", requirement)
    limit = model.hidden if model.vocab_size else 1_000_000  # known once a checkpoint is read
    requirement = f"numbers from 1 to {limit}, the size of the vectors"
    require(all(0 < x <= limit for x in task.dimensions), "task.dimensions", requirement)
    if not task.text_b:
        requirement = "above 0 without config.task.text_b, as dropout makes the pairs"
        require(model.dropout > 0, "model.dropout", requirement)


def _require_default_head(
    model: ModelConfig, reason: str, require: Callable[[bool, str, str], None]
) -> None:
    for name, default in (("lstm_layers", 0), ("features", "")):
        is_default = getattr(model.head, name) == default
        require(is_default, f"model.head.{name}", f"{default!r} {reason}")


def _validate_distillation(config: TrainConfig, require: Callable[[bool, str, str], None]) -> None:
    model, distill, default = config.model, config.distill, DistillConfig()
    if not distill.teacher:
        for name, value in dataclasses.asdict(default).items():
            requirement = f"{value!r}, the default, without a teacher (--teacher SOURCE)"
            require(getattr(distill, name) == value, f"distill.{name}", requirement)
        return
    for name in ("hidden", "relations"):
        requirement = (
            f"0 with config.model.head.features={model.head.features!r}, which trains no encoder"
        )
        require(
            not (model.head.features and getattr(distill, name)), f"distill.{name}", requirement
        )
    require(not model.span_boundary, "model.span_boundary", "false with a teacher")
    require(
        not model.electra.generator_hidden, "model.electra.generator_hidden", "0 with a teacher"
    )
    requirement = "0 with config.model.causal=true"
    require(not (distill.relations and model.causal), "distill.relations", requirement)
    for name in ("relation_layer", "relation_heads"):
        is_used = bool(distill.relations) or getattr(distill, name) == 0
        require(is_used, f"distill.{name}", "0 without config.distill.relations")
    weights = (distill.labels, distill.logits, distill.hidden, distill.relations)
    if not any(weights):
        raise UserError("config.distill: every weight is 0: set at least one of logits, hidden, …")


def check_fields(config: Any, prefix: str = "") -> None:
    """Check each field of a config, or of the part of one at `prefix`, alone."""
    for key, field, value in leaves(config, prefix):
        if "holds" in field.metadata and not field.metadata["holds"](value):
            raise UserError(
                f"config.{key} is {value!r}: it must be {field.metadata['requirement']}"
            )


def _validate_pretraining(config: Config, require: Callable[[bool, str, str], None]) -> None:
    model, masking = config.model, config.masking
    for name, default in dataclasses.asdict(LoraConfig()).items():
        requirement = f"{default!r} in pretraining: adapters are for fine-tuning"
        require(getattr(model.lora, name) == default, f"model.lora.{name}", requirement)
    reason = "in pretraining; it applies to fine-tuning heads only"
    _require_default_head(model, reason, require)
    if model.electra.generator_hidden:
        require(
            model.electra.replaced_token, "model.electra.replaced_token", "true with a generator"
        )
        for name in ("masked_lm", "next_sentence", "span_boundary", "causal"):
            requirement = (
                f"false with config.model.electra.generator_hidden={model.electra.generator_hidden}"
            )
            require(not getattr(model, name), f"model.{name}", requirement)
        requirement = "0 with config.model.electra.generator_hidden"
        require(not model.mup.base_hidden, "model.mup.base_hidden", requirement)
    width = model.electra.generator_hidden or model.hidden
    if (model.masked_lm or model.electra.generator_hidden) and model.embedding_width != width:
        requirement = f"true where the embeddings have another size ({model.embedding_width}) than"
        require(model.transform, "model.transform", f"{requirement} the hidden states ({width})")
    if model.causal:
        requirement = "false with config.model.causal=true, where [CLS] attends only to itself"
        require(not model.next_sentence, "model.next_sentence", requirement)
        requirement = "false with config.model.causal=true, which masks nothing"
        require(not model.span_boundary, "model.span_boundary", requirement)
        for name, value in dataclasses.asdict(MaskingConfig()).items():
            requirement = (
                f"{value!r}, the default, with config.model.causal=true, which masks nothing"
            )
            require(getattr(masking, name) == value, f"masking.{name}", requirement)
    if model.mup.base_hidden:
        requirement = f"0 or hidden={model.hidden} with config.model.mup.base_hidden"
        require(model.embedding_width == model.hidden, "model.embedding_size", requirement)
        is_scaled = model.transform or not (model.masked_lm and model.tied_decoder)
        requirement = "true with config.model.mup.base_hidden and a tied decoder"
        require(is_scaled, "model.transform", requirement)
    if model.span_boundary:
        requirement = f"0 or hidden={model.hidden} with config.model.span_boundary=true"
        require(model.embedding_width == model.hidden, "model.embedding_size", requirement)
    require(config.checkpoint.every_steps > 0, "checkpoint.every_steps", "above 0")
    require(0 < masking.rate < 1, "masking.rate", "in (0, 1)")
    split = (masking.mask_fraction, masking.same_fraction, masking.random_fraction)
    if min(split) < 0 or abs(sum(split) - 1) > 1e-6:
        raise UserError(
            f"config.masking: mask, same and random fractions are {split}: they must sum to 1"
        )
    if not config.phases:
        raise UserError("config.phases is empty: add at least one phase")
    if abs(sum(phase.fraction for phase in config.phases) - 1) > 1e-6:
        raise UserError("config.phases: the fractions must sum to 1")
    for i, phase in enumerate(config.phases):
        key = f"phases[{i}]"
        require(
            phase.tokens <= model.positions,
            f"{key}.tokens",
            f"at most {model.positions}, config.model.positions",
        )
        batch_size = phase.batch_size or config.batch_size
        accumulation = phase.accumulation or config.accumulation
        if batch_size % accumulation:
            raise UserError(
                f"config.{batch_size_key(config, i)} {batch_size} is not divisible by accumulation "
                f"{accumulation} (phase {i})"
            )
    last = len(config.phases) - 1
    requirement = "0 in the last phase: set config.model.rope_theta"
    require(config.phases[last].rope_theta == 0, f"phases[{last}].rope_theta", requirement)
