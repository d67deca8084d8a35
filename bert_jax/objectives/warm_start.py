"""What a run starts from: the model of a checkpoint, and those of its parameters that fit.

A run has the checkpoint's architecture, vocabulary and positions, and takes from its config how it
trains. Of the checkpoint's parameters it takes those that its own model has: `open_start` for
pretraining, `open_init`, `with_head` and `select_params` for fine-tuning, `open_teacher` for a teacher.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from bert_jax.config.checks import validate
from bert_jax.config.fields import flatten as flatten_config
from bert_jax.config.fields import with_fields
from bert_jax.config.model import ElectraConfig, LoraConfig, ModelConfig
from bert_jax.config.schema import Config, EmbedConfig, FinetuneConfig, TrainConfig
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.source import OpenModel, open_model
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model.bert import Params, flatten, shapes, unflatten
from bert_jax.model.layers import change_vocabulary
from bert_jax.objectives import growth
from bert_jax.objectives.same_vocabulary import check_vocabulary, effective_settings
from bert_jax.tasks.base import FinetuneDataset

# Model fields that belong to the run rather than the checkpoint. They are always taken from the
# config: dropout must be possible on a model pretrained without it, and the modules between encoder
# and head are reinitialized with the head.
_RUN_FIELDS = (
    "head.lstm_layers",
    "head.features",
    "dropout",
    "attention_dropout",
    "dropout_generator",
    "attention",
    "kernels",
    "dtype",
    "layer_loop",
    "remat",
    *(f"lora.{field.name}" for field in dataclasses.fields(LoraConfig)),
)
# Further fields that pretraining takes from its config.
_PRETRAINING_FIELDS = (
    "vocab_multiple",
    "masked_lm",
    "next_sentence",
    "span_boundary",
    "electra.replaced_token",
    "electra.generator_hidden",
    "electra.loss_weight",
    "z_loss",
    "pooler",
    "head.kind",
    "head.labels",
    "head.problem_type",
)
# Fields of a masked-LM head, which come with it.
_MASKED_LM_FIELDS = ("transform", "tied_decoder", "decoder_bias")
_POSITIONS = "embeddings/position/embedding"
# Value of `init` for random weights instead of a checkpoint.
SCRATCH = "none"


class Start(NamedTuple):
    """Parameters that a pretraining run starts from.

    Attributes:
        params: a subset of the model's parameters, as NumPy arrays.
        about: what the run records of them: `source`, `step`, `loaded`, `new` and `left_out` (names
            of modules), and `notes` (one line each).
    """

    params: Params
    about: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return what is added to the description of the rows for `workdir.write_or_check_config`."""
        return {"start": params_digest(self.params), "init": self.about}


def inherit(
    requested: ModelConfig,
    source: ModelConfig,
    *,
    is_set: Callable[[str], bool],
    free: Collection[str] = (),
    where: str = "the checkpoint",
    advice: str,
) -> ModelConfig:
    """Return the model of a checkpoint with the fields of a run.

    Args:
        requested: model of the run's config.
        source: model of the checkpoint.
        is_set: whether the user has set a field of `requested`.
        free: further fields to take from the run.
        where: name of the checkpoint in errors.
        advice: what to do instead of removing a setting, for errors.
    """
    existing, taken = flatten_config(source), {}
    for name, value in flatten_config(requested).items():
        if name in _RUN_FIELDS or name in free:
            taken[name] = value
        elif value != existing[name] and is_set(name):
            raise UserError(
                f"config.model.{name} is {value!r}, {where}'s is {existing[name]!r}: remove the "
                f"setting, or {advice}"
            )
    return with_fields(source, taken)


def is_changed(requested: ModelConfig) -> Callable[[str], bool]:
    """Return a function from the name of a field to whether its value is not the default."""
    values, default = flatten_config(requested), flatten_config(ModelConfig())
    return lambda name: values[name] != default[name]


def params_digest(params: Params) -> str:
    """Return a digest of a run's initial parameters; "" if all are random."""
    sha256, flat = hashlib.sha256(), flatten(params)
    for path in sorted(flat):
        sha256.update(path.encode())
        sha256.update(np.asarray(flat[path]).tobytes())
    return sha256.hexdigest() if flat else ""


def open_start(
    config: Config, init: str, which: str = "best", keys: Collection[str] | None = None
) -> tuple[Config, Start]:
    """Load the model that a pretraining run continues from.

    Encoder and heads start from its parameters, with a fresh optimizer and schedule. The run's config
    decides which heads there are and how the model is computed. It may extend the positions, enlarge the
    model (`growth`) and change the base of "rope".

    Args:
        config: validated config of the run.
        init: a source of `open_model`.
        which: checkpoint of a run.
        keys: keys of the config that the user has set one by one; None for those of the model that
            are not the default.

    Returns:
        The config with the source's architecture and vocabulary size, and the parameters.
    """
    source_config, vocabulary, loaded, step = open_model(init, which)
    source, requested = source_config.model, config.model
    is_set = is_changed(requested) if keys is None else lambda name: f"model.{name}" in keys
    free = {*_PRETRAINING_FIELDS, *(growth.SIZES if config.init_scheme else ())}
    if not source.masked_lm:
        free.update(_MASKED_LM_FIELDS)
    positions, notes = source.positions, []
    if is_set("positions"):
        positions = requested.positions
        if positions < source.positions:
            raise UserError(
                f"config.model.positions is {positions}, {init}'s is {source.positions}: positions can "
                "be extended, not removed; remove the setting"
            )
    if is_set("rope_theta") and requested.rope_theta != source.rope_theta:
        free.add("rope_theta")
        notes.append(f"rope_theta: {source.rope_theta:,.0f} changed to {requested.rope_theta:,.0f}")
    model = inherit(
        dataclasses.replace(requested, positions=source.positions),
        source,
        is_set=is_set,
        free=free,
        where=init,
        advice="train without --init",
    )
    model.positions = positions
    growth.check(source, model, init)
    config = dataclasses.replace(copy.deepcopy(config), model=model)
    validate(config)
    for i, phase in enumerate(config.phases):
        for folder in phase.folders:
            check_vocabulary(f"phase {i}: {folder}", folder, vocabulary, init)

    params = {
        path: change_vocabulary(path, value, source, model)
        for path, value in flatten(jax.device_get(loaded)).items()
    }
    if positions > source.positions and _POSITIONS in params:
        how = config.new_positions
        params[_POSITIONS] = extend_positions(params[_POSITIONS], positions, how)
        notes.append(f"positions: {source.positions:,} extended to {positions:,}, {how}")
    if (ignored := _size(requested)) not in (_size(ModelConfig()), _size(model)):
        notes.append(f"architecture: {_size(model)} of {init}, not the config's {ignored}")
    needed = flatten(shapes(model))
    if config.init_scheme:
        params = growth.grow(params, needed, source, model, config.init_scheme)
        sizes = (f"{_size(x)} with feed_forward={x.feed_forward}" for x in (source, model))
        notes.append(f"enlarged by {config.init_scheme}: {' to '.join(sizes)}")
    kept = {path: value for path, value in params.items() if path in needed}
    for path, value in kept.items():
        if value.shape != needed[path].shape:
            raise UserError(
                f"{init}: {path} has shape {list(value.shape)}, the model to train "
                f"{list(needed[path].shape)}"
            )
    about = {
        "source": init,
        "step": step,
        "loaded": _modules(kept),
        "new": _modules(needed.keys() - kept.keys(), kept),
        "left_out": _modules(params.keys() - kept.keys(), kept),
        "notes": notes,
    }
    return config, Start(unflatten(kept), about)


def describe_start(about: dict[str, Any]) -> list[str]:
    """Return lines about the parameters that a run starts from, given `Start.about`."""
    step = f" (step {about['step']:,})" if about["step"] else ""
    parts = [f"init: {', '.join(about['loaded'])} from {about['source']}{step}"]
    for key, text in (("new", "randomly initialized"), ("left_out", "left out")):
        if about[key]:
            parts.append(f"{text}: {', '.join(about[key])}")
    return ["; ".join(parts), *about["notes"]]


def extend_positions(
    table: Float[np.ndarray, "n D"], positions: int, how: str
) -> Float[np.ndarray, "m D"]:
    """Return position embeddings for more positions.

    Args:
        table: embeddings of n positions.
        positions: m, their new number.
        how: "copied" repeats the table, so that the first n are unchanged and local relations hold at
            all but n's multiples (Beltagy et al., arXiv 2004.05150, section 5); "interpolated" stretches
            it linearly, so that the last position stays the last.
    """
    count = len(table)
    if how == "copied":
        return table[np.arange(positions) % count]
    at = np.linspace(0, count - 1, positions)
    columns = [np.interp(at, np.arange(count), column) for column in table.T]
    return np.stack(columns, 1).astype(table.dtype)


def _size(model: ModelConfig) -> str:
    return f"L{model.layers}-H{model.hidden}-A{model.heads}"


def _modules(paths: Iterable[str], others: Iterable[str] = ()) -> list[str]:
    """Return the modules of parameters: top-level ones, unless they also have some of `others`."""
    divided = {path.partition("/")[0] for path in others}
    tops = ((path.partition("/")[0], path.rpartition("/")[0]) for path in paths)
    return sorted({module if top in divided else top for top, module in tops})


# --- Distillation ---


class Teacher(NamedTuple):
    """A frozen model: its config and parameters on the host."""

    model: ModelConfig
    params: Params


def open_teacher(config: TrainConfig, vocabulary: Vocabulary | None) -> Teacher:
    """Open the teacher of a run.

    Args:
        config: validated, with `distill.teacher`.
        vocabulary: the student's; None to check its size only.
    """
    source = config.distill.teacher
    teacher, teacher_vocabulary, params, _ = open_model(source, "best")
    if vocabulary is None:
        is_same = len(teacher_vocabulary) == config.model.vocab_size
    else:
        # Not the other files of a tokenizer, which differ between versions of transformers.
        theirs, ours = (
            (v.sha256, effective_settings(v.settings)) for v in (teacher_vocabulary, vocabulary)
        )
        is_same = theirs == ours
    if not is_same:
        raise UserError(
            f"the teacher {source} has another vocabulary than the student: prepare rows with its "
            "vocab.txt, or choose another teacher"
        )
    model = dataclasses.replace(
        teacher.model,
        dtype=config.model.dtype,
        layer_loop=config.model.layer_loop,
        attention="xla",
        kernels="xla",
        remat="none",
    )
    return Teacher(model, jax.device_get(params))


# --- Fine-tuning ---


def open_init(
    config: FinetuneConfig, init: str, which: str = "best", vocab: str = ""
) -> tuple[FinetuneConfig, OpenModel]:
    """Open the model that a fine-tuning run starts from.

    Args:
        config: validated config of the run.
        init: a source of `open_model`, or `SCRATCH`.
        which: which checkpoint to start from if `init` is a run.
        vocab: folder of the vocabulary, for `SCRATCH`.

    Returns:
        The config, with the vocabulary's size; the model, with parameters on the host, and without
        any for `SCRATCH`.
    """
    if init != SCRATCH:
        if vocab:
            raise UserError(
                f"--vocab {vocab} is only for --init none: {init} has its own vocabulary; remove it"
            )
        start = open_model(init, which)
        return config, start._replace(params=jax.device_get(start.params))
    if not vocab:
        raise UserError("--init none needs a vocabulary: add --vocab DIR")
    for key, value in (("reset_layers", config.reset_layers), ("lora.rank", config.lora.rank)):
        if value:
            raise UserError(
                f"config.{key} is {value}: it must be 0 with --init none, which trains a random encoder"
            )
    vocabulary = vocabularies.load(vocab)
    vocabularies.check_segments(vocabulary, config.model.segments)
    model = dataclasses.replace(config.model, vocab_size=len(vocabulary))
    config = dataclasses.replace(config, model=model)
    return config, OpenModel(config, vocabulary, {}, 0)


def with_head(
    config: FinetuneConfig, start: OpenModel, dataset: FinetuneDataset, keys: Collection[str] = ()
) -> FinetuneConfig:
    """Return the config of a run from `start` on a dataset, with all that follows from these.

    Args:
        config, start: what `open_init` returns.
        dataset: the data.
        keys: keys of the config that the user has set one by one. Settings of the checkpoint replace
            others that are at their defaults.
    """
    model = model_config(config, start.config.model if start.params else None, dataset, keys)
    config = dataclasses.replace(config, model=model)
    if config.task.kind == "classification":  # a task of GLUE has its own
        config.task = dataclasses.replace(config.task, objective=dataset.objective)
    if config.task.kind == "pairs":
        config.embed = embed_config(config, start.config.embed, keys)
    return config


def embed_config(
    config: FinetuneConfig, start: EmbedConfig, keys: Collection[str] = ()
) -> EmbedConfig:
    """Return how a sentence encoder pools: settings at their defaults are the checkpoint's.

    Longer texts are truncated as in training unless the checkpoint has a maximum of its own. Its prompt
    and dimensions are not inherited: training has neither. `keys` are those of `with_head`, which count
    even at their defaults.
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
        keys: as in `with_head`.
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


def select_params(
    config: FinetuneConfig, start: ModelConfig, params: Params
) -> tuple[Params, list[str]]:
    """Select the checkpoint parameters to start from: encoder and pooler, without heads.

    Args:
        config: with the model to fine-tune.
        start: the checkpoint's model.
        params: the checkpoint's parameters; empty for a random model.

    Returns:
        A subset of the parameters, and the names of the modules that are initialized randomly.
    """
    if not params:
        return {}, ["everything"]
    model = config.model
    new_transform = model.has_head_transform and not start.has_head_transform
    if (
        new_transform
        and start.masked_lm
        and start.transform
        and start.embedding_width == model.hidden
    ):
        # As in transformers, where both layers have the same name.
        params = params | {"head": {k: params["masked_lm"][k] for k in ("transform", "norm")}}
        new_transform = False
    parts = {
        "classifier": model.head.kind,
        "pooler": model.has_pooler and not start.has_pooler,
        "head": new_transform,
        "features": model.head.features.startswith("weighted-"),
        "lstm": model.head.lstm_layers,
        "adapters": model.lora.rank,
    }
    new = [f"encoder/layer_{i}" for i in range(model.layers - config.reset_layers, model.layers)]
    new += [name for name, is_new in parts.items() if is_new]
    kept_parts = ["embeddings/", "encoder/"]
    kept_parts += ["pooler/"] * model.has_pooler + ["head/"] * model.has_head_transform
    selected = {
        path: value
        for path, value in flatten(params).items()
        if path.startswith(tuple(kept_parts))
        and not path.startswith(tuple(f"{name}/" for name in new))
    }
    return unflatten(selected), new
