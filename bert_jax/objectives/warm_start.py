"""What a run starts from: the model of a checkpoint, and those of its parameters that fit.

A run has the checkpoint's architecture, vocabulary and positions, and takes from its config how it
trains. Of the checkpoint's parameters it takes those that its own model has.
"""

import copy
import dataclasses
import hashlib
import shlex
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from bert_jax.config.checks import validate
from bert_jax.config.schema import Config, LoraConfig, ModelConfig, with_fields
from bert_jax.config.schema import flatten as flatten_config
from bert_jax.data import rows
from bert_jax.errors import UserError
from bert_jax.model.bert import Params, flatten, shapes, unflatten
from bert_jax.model.layers import change_vocabulary

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
    decides which heads there are, may extend the positions, and sets how the model is computed.

    Args:
        config: validated config of the run.
        init: a source of `open_model`.
        which: checkpoint of a run.
        keys: keys of the config that the user has set one by one; None for those of the model that
            are not the default.

    Returns:
        The config with the source's architecture and vocabulary size, and the parameters.
    """
    from bert_jax.convert.source import open_model  # reads checkpoints, which few runs do

    source_config, vocabulary, loaded, step = open_model(init, which)
    source, requested = source_config.model, config.model
    is_set = is_changed(requested) if keys is None else lambda name: f"model.{name}" in keys
    free = {*_PRETRAINING_FIELDS}
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
    model = inherit(
        dataclasses.replace(requested, positions=source.positions),
        source,
        is_set=is_set,
        free=free,
        where=init,
        advice="train without --init",
    )
    model.positions = positions
    config = dataclasses.replace(copy.deepcopy(config), model=model)
    validate(config)
    for i, phase in enumerate(config.phases):
        if phase.rows:
            check_vocabulary(f"phase {i}: {phase.rows}", phase.rows, vocabulary, init)

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
    index = np.linspace(0, count - 1, positions)
    below = index.astype(int)
    weight = (index - below)[:, None].astype(table.dtype)
    return table[below] * (1 - weight) + table[np.minimum(below + 1, count - 1)] * weight


def _size(model: ModelConfig) -> str:
    return f"L{model.layers}-H{model.hidden}-A{model.heads}"


def _modules(paths: Iterable[str], others: Iterable[str] = ()) -> list[str]:
    """Return the modules of parameters: top-level ones, unless they also have some of `others`."""
    divided = {path.partition("/")[0] for path in others}
    tops = ((path.partition("/")[0], path.rpartition("/")[0]) for path in paths)
    return sorted({module if top in divided else top for top, module in tops})


def check_vocabulary(where: str, folder: str, vocabulary: Any, init: str) -> None:
    """Refuse rows that were prepared with another vocabulary, or with other settings of it.

    Args:
        where: what an error begins with.
        folder: folder of the rows.
        vocabulary: vocabulary of the model.
        init: the model.
    """
    manifest = rows.read_manifest(folder)
    settings = vocabulary.settings
    prepared = {name: manifest.settings.get(name) for name in settings}
    if manifest.vocab_sha256 != vocabulary.sha256:
        problem = "another vocabulary than that"
    elif effective_settings(prepared) != effective_settings(settings):
        problem = "other settings of the vocabulary than those"
    else:
        return
    raise UserError(
        f"{where} was prepared with {problem} of {init}: prepare the text again, and pass the "
        f"new --rows: {_prepare_command(manifest, folder, init)}"
    )


def effective_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with `strip_accents` resolved, which None leaves to `lowercase`."""
    if settings.get("strip_accents", "") is None:
        return {**settings, "strip_accents": settings["lowercase"]}
    return settings


# Settings of rows that are arguments of `bert-jax prepare`, with its defaults.
_PREPARE = {
    "tokens": 128,
    "sequences": 1,
    "pairs": "nsp",
    "passes": 1,
    "seed": 0,
    "heldout_fraction": 0.01,
    "short_fraction": 0.1,
    "language": "en",
}


def _prepare_command(manifest: rows.Manifest, folder: str, init: str) -> str:
    """Return the command that prepares rows again, with the vocabulary of a source."""
    name = init.rstrip("/").rpartition("/")[2]
    settings = manifest.settings
    options = [
        part
        for key, default in _PREPARE.items()
        if settings.get(key, default) != default
        for part in (f"--{key.replace('_', '-')}", str(settings[key]))
    ]
    out = f"{folder.rstrip('/')}-{name}"
    sources = settings.get("sources", [])
    return shlex.join(["bert-jax", "prepare", "--vocab", init, "--out", out, *options, *sources])
