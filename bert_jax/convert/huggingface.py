"""Convert tensors and config.json to and from Hugging Face's format.

One table of names (`families`) serves both directions, so an export imports again bit for bit.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from bert_jax.config.fields import flatten as flatten_config
from bert_jax.config.fields import with_fields
from bert_jax.config.model import HEADS, ModelConfig
from bert_jax.convert.families import FAMILIES, Family, Settings, Tensors
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError, shorten
from bert_jax.model.bert import Params, flatten, shapes, unflatten
from bert_jax.model.layers import VOCABULARY_AXES, padded_vocab_size

# hidden_act → activation. Export writes the first key of an activation.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Part of a model → field of `ModelConfig` that adds it.
_PARTS = {
    "masked_lm": "masked_lm",
    "next_sentence": "next_sentence",
    "replaced_token": "electra.replaced_token",
}
# Fields that must have their defaults in a family that names no other value and no setting.
_OPTIONS = (
    "position_kind",
    "local.window",
    "gated_feed_forward",
    "bias",
    "norm.qk",
    "norm.kind",
    "norm.position",
    "norm.embeddings",
    "norm.final",
    "decoder_bias",
    "head.layer",
    "head.pooling",
)


# --- Tensors --------------------------------------------------------------------------------------


def _hf_name(path: str, names: Mapping[str, str]) -> str:
    if path in names:
        return names[path]
    module, _, leaf = path.rpartition("/")
    return f"{names[module]}.{'bias' if leaf == 'bias' else 'weight'}"


def _hf_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the canonical shape: attention heads merged, and kernels [in, out] as [out, in]."""
    if path.endswith("attention/output/kernel"):
        shape = (shape[0] * shape[1], shape[2])
    elif re.search(r"attention/(query|key|value)/", path):
        shape = (*shape[:-2], shape[-2] * shape[-1])
    return shape[::-1] if _is_transposed(path) else shape


def _is_transposed(path: str) -> bool:
    return path.endswith("/kernel") or path == "masked_lm/decoder"


def _vocabulary_padding(path: str, config: ModelConfig) -> int:
    """Return the rows of vocabulary padding on the first axis of the canonical tensor."""
    return padded_vocab_size(config) - config.vocab_size if path in VOCABULARY_AXES else 0


def to_huggingface(params: Params, config: ModelConfig) -> Tensors:
    """Return parameters by canonical names and shapes, without the vocabulary's padding."""
    family = FAMILIES[config.family]
    names, tensors = family.names_of(config), {}
    for path, value in flatten(params).items():
        value, shape = np.asarray(value), _hf_shape(path, value.shape)
        value = value.reshape(shape[::-1]).T if _is_transposed(path) else value.reshape(shape)
        value = value[: len(value) - _vocabulary_padding(path, config)]
        tensors[_hf_name(path, names)] = np.ascontiguousarray(value)
    if config.masked_lm and config.decoder_bias and not config.tied_decoder:
        # An untied decoder has its own bias; transformers keeps this parameter but does not use it.
        tensors[family.names["masked_lm/bias"]] = tensors[family.decoder_bias]
    return tensors


def from_huggingface(
    tensors: Mapping[str, np.ndarray],
    config: ModelConfig,
    display_names: Mapping[str, str] | None = None,
) -> Params:
    """Convert tensors to float32 parameters; the inverse of `to_huggingface`.

    Args:
        tensors: arrays by canonical name; those that the model does not have are ignored.
        display_names: names to use in errors instead of the canonical ones.
    """
    names, params = FAMILIES[config.family].names_of(config), {}
    display_names = display_names or {}
    missing, misshapen, non_finite = [], [], []
    for path, leaf in flatten(shapes(config)).items():
        name, padding = _hf_name(path, names), _vocabulary_padding(path, config)
        if name not in tensors:
            missing.append(name)
            continue
        value = np.asarray(tensors[name])
        name = display_names.get(name, name)
        first, *rest = _hf_shape(path, leaf.shape)
        if value.shape != (first - padding, *rest):
            misshapen.append(f"{name} is {list(value.shape)}, not {[first - padding, *rest]}")
            continue
        with np.errstate(over="ignore"):  # reported below
            value = value.astype(np.float32)
        if not np.isfinite(value).all():
            non_finite.append(name)
        value = np.pad(value, [(0, padding), *[(0, 0) for _ in rest]])
        value = value.T if _is_transposed(path) else value
        params[path] = np.ascontiguousarray(value).reshape(leaf.shape)
    problems = {
        "missing": missing,
        "wrong shape": misshapen,
        "NaN or infinite values": non_finite,
    }
    reasons = [f"{what}: {shorten(names)}" for what, names in problems.items() if names]
    if reasons:
        raise UserError(f"the weights do not match config.json; {'; '.join(reasons)}")
    return unflatten(params)


def remove_tied_duplicates(tensors: Tensors, config: ModelConfig) -> list[str]:
    """Remove duplicate tensors of a masked-LM head, in place, and return their canonical names."""
    family, tied = FAMILIES[config.family], config.tied_decoder
    bias, other_bias = family.names["masked_lm/bias"], family.decoder_bias
    bias, other_bias = (bias, other_bias) if tied else (other_bias, bias)
    if other_bias in tensors:
        tensors.setdefault(bias, tensors[other_bias])
    decoder = family.names["masked_lm/decoder"]
    duplicates = {decoder: family.words, other_bias: bias} if tied else {}
    for name, original in duplicates.items():
        if name in tensors and not np.array_equal(tensors[name], tensors[original]):
            raise UserError(
                f"config.json ties the decoder to the embeddings, but {name} differs from {original}; "
                'add "tie_word_embeddings": false to keep both'
            )
    return [
        name
        for name in ({decoder, other_bias} if tied else {other_bias})
        if name != bias and tensors.pop(name, None) is not None
    ]


def unexpected(tensors: Collection[str], config: ModelConfig) -> list[str]:
    """Return the canonical names of tensors that the model does not have."""
    names = FAMILIES[config.family].names_of(config)
    paths = flatten(shapes(config))
    return sorted(set(tensors) - {_hf_name(path, names) for path in paths})


def canonical(tensors: Mapping[str, Any], family: Family) -> dict[str, str]:
    """Map the canonical names of tensors to their names in `tensors`.

    Handles `module.` and other prefixes, encoders saved by themselves, and LayerNorm's old names
    `gamma` and `beta`. Skips buffers, which are not weights.
    """
    prefix = f"{family.encoder}."
    ending = family.words.removeprefix(prefix)
    inside = [n.removeprefix(prefix) for n in family.names.values() if n.startswith(prefix)]
    modules = "|".join({name.split(".")[0] for name in inside})
    encoders = [n.removesuffix(ending) for n in tensors if re.search(rf"(^|\.){ending}$", n)]
    if len(encoders) != 1:
        candidates = shorten([f"{encoder}{ending}" for encoder in encoders]) or f"no {ending}"
        raise UserError(f"expected the weights of one {family.title}; found {candidates}")
    encoder = encoders[0]
    outside = encoder.removesuffix(prefix)
    names = {}
    for name in tensors:
        if name.endswith((".position_ids", ".token_type_ids")) or name == "position_ids":
            continue
        if re.match(rf"({modules})\.", name.removeprefix(encoder)):
            new = prefix + name.removeprefix(encoder)
        else:
            new = name.removeprefix(outside)
        new = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", new)
        new = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", new)
        if new in names:
            raise UserError(f"{names[new]} and {name} both map to {new}")
        names[new] = name
    return names


# --- config.json ----------------------------------------------------------------------------------


def family_of(settings: Mapping[str, Any]) -> str:
    """Return the key in `FAMILIES` of a config.json (or Google's bert_config.json)."""
    kind, classes = settings.get("model_type", "bert"), settings.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise UserError(f"config.json: architectures is {classes!r}; expected a list of names")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"model_type is {kind!r} ({', '.join(classes) or 'no architectures'}), which is not "
            f"supported; supported: {', '.join(FAMILIES)}"
        )
    return kind


def model_config(
    settings: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    allow_missing: Collection[str] = (),
) -> ModelConfig:
    """Return the config of the model that a config.json and its tensors describe.

    Args:
        settings: the parsed config.json (or Google's bert_config.json).
        tensors: arrays by canonical name, which determine the parts of the model.
        allow_missing: parts of the class named in config.json that may be missing.
    """
    kind = family_of(settings)
    family = FAMILIES[kind]
    refused = {
        "position_embedding_type": ("absolute", None),
        "add_cross_attention": (False, None),
        "pruned_heads": ({}, None),
    }
    for name, allowed in refused.items():
        if settings.get(name) not in allowed:
            raise UserError(f"config.json: {name} is {settings[name]!r}, which is not supported")
    activation = settings.get(family.activation, "gelu")
    supported = family.activations or tuple(_ACTIVATIONS)
    if not isinstance(activation, str) or activation not in supported:
        raise UserError(
            f"config.json: {family.activation} is {activation!r}; supported: {', '.join(supported)}"
        )
    if settings.get("is_decoder") and not family.causal_class:
        raise UserError(
            f"config.json: is_decoder is True, which is not supported for {family.title}"
        )
    default = flatten_config(with_fields(ModelConfig(), family.defaults))
    values: dict[str, Any] = {"family": kind, "activation": _ACTIVATIONS[activation]}
    values |= family.fixed
    for ours, theirs in family.settings.items():
        value = settings.get(theirs, default[ours])
        expected = type(default[ours])
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not expected or (expected is int and not 0 < value < 1 << 31):
            raise UserError(f"config.json: {theirs} is {value!r}; expected {expected.__name__}")
        values[ours] = value
    start, _, _ = next(n for n in family.names.values() if "{i}" in n).partition("{i}")
    pattern = re.compile(re.escape(start) + r"(\d+)\.")
    layers = {match.group(1) for match in map(pattern.match, tensors) if match}
    keys = family.settings
    if len(layers) != values["layers"]:
        raise UserError(
            f"config.json: {keys['layers']} is {values['layers']}, but the weights have "
            f"{len(layers)} layers"
        )
    if values["hidden"] % values["heads"]:
        raise UserError(
            f"config.json: {keys['hidden']} {values['hidden']} is not a multiple of "
            f"{keys['heads']} {values['heads']}"
        )
    parts, head = _parts(family, settings, tensors, allow_missing)
    if values.get("causal"):
        if "next_sentence" in parts or HEADS[head].pooled:
            raise UserError(
                "config.json: is_decoder is True and a head reads [CLS], which attends to itself only; "
                "causal models here pool the last token"
            )
        # Poolers of causal models here read the last token, not the first. Its tensors are reported
        # as unexpected.
        parts = [part for part in parts if part != "pooler"]
    values |= {field: part in parts for part, field in _PARTS.items()}
    if "head" in parts:
        labels = _labels(family, settings, tensors, head)
        values |= {"head.kind": head, "head.labels": labels}
        if head == "sequence":
            values["head.problem_type"] = settings.get("problem_type") or ""
    config = with_fields(ModelConfig(), values)
    config.pooler = "pooler" in parts and not config.has_pooler
    return config


def _parts(family: Family, settings, tensors, allow_missing) -> tuple[list[str], str]:
    classes = family.all_classes()
    known = [c for c in settings.get("architectures") or [] if c in classes]
    declared, head = classes[known[0]] if known else ((), "")
    # Google's checkpoints do not name the class; the layer's name may identify the head.
    layers = {name: family.names_of_head(name)["classifier"] for name in family.heads}
    heads = [name for name, layer in layers.items() if f"{layer}.weight" in tensors]
    head = heads[0] if len(heads) == 1 else head
    starts = family.parts_with(head)
    present = [part for part, start in starts.items() if any(n.startswith(start) for n in tensors)]
    # The file of a tied decoder without a bias has no tensor of the decoder.
    if "masked_lm" in declared and settings.get("decoder_bias") is False:
        present = list(dict.fromkeys([*present, "masked_lm"]))
    missing = [part for part in declared if part not in present]
    if known[:1] == [f"{family.class_prefix}Model"]:
        # Its config.json does not record whether it was built with add_pooling_layer=False.
        missing = []
    refused = [part for part in missing if part not in allow_missing]
    if refused:
        names = [f"{starts.get(part, (part,))[0]}*" for part in refused]
        options = " ".join(f"--allow-missing {part}" for part in refused)
        raise UserError(
            f"{known[0]} without {', '.join(names)}: {' and '.join(refused)} missing; "
            f"to leave it out, use `bert-jax import {options}`"
        )
    head = head if "head" in present else ""
    needs_pooler = "next_sentence" in present or (HEADS[head].pooled and family.has_pooler)
    if needs_pooler and "pooler" not in present:
        raise UserError(f"missing: {starts['pooler'][0]}weight, which the heads need")
    return present, head


def _labels(family: Family, settings, tensors, head: str) -> tuple[str, ...]:
    fixed = HEADS[head].labels
    if fixed is not None:
        return fixed
    layer = f"{family.names_of_head(head)['classifier']}.weight"
    count = len(tensors[layer]) if layer in tensors else 1
    names = settings.get("id2label")
    names = names if isinstance(names, dict) else {}
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


def huggingface_config(config: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the config.json of a model."""
    family = FAMILIES[config.family]
    if config.causal and config.has_pooler:
        raise UserError(
            f"config.model.causal is True: causal models pool the last token, transformers' "
            f"{family.title} the first"
        )
    is_used: dict[str, bool] = {
        **dict.fromkeys(("head.layer", "head.pooling"), bool(config.head.kind)),
        "decoder_bias": config.masked_lm,
        "pooler_activation": config.has_pooler,
    }
    values, default = flatten_config(config), flatten_config(ModelConfig())
    hidden_act = next(k for k, v in _ACTIVATIONS.items() if v == config.activation)
    impossible = {
        "head.lstm_layers": config.head.lstm_layers,
        "head.features": config.head.features,
        "transform": config.masked_lm and not config.transform,
        "segments": "segments" in family.settings and not config.segments,
        "causal": config.causal and not family.causal_class,
        **{
            key: values[key] != family.fixed.get(key, default[key])
            for key in (*_OPTIONS, *family.fixed)
            if key not in family.settings and is_used.get(key, True)
        },
        "activation": hidden_act not in (family.activations or (hidden_act,)),
        "embedding_size": "embedding_size" not in family.settings
        and config.embedding_width != config.hidden,
        **{
            _PARTS.get(part, part): True
            for part in sorted(parts_of(config))
            if part not in family.parts_with(config.head.kind)
        },
    }
    for key in (key for key, is_so in impossible.items() if is_so):
        raise UserError(
            f"config.model.{key} is {values.get(key, True)!r}, which transformers' {family.title} "
            "does not support"
        )
    settings: Settings = {
        "architectures": [architecture(config)],
        "model_type": config.family,
        family.activation: hidden_act,
        **{theirs: values[ours] for ours, theirs in family.settings.items()},
        "pad_token_id": vocabulary.pad_id,
        **{theirs: getattr(vocabulary, ours) for theirs, ours in family.token_ids.items()},
        "position_embedding_type": "absolute",
        "dtype": "float32",
    }
    if "embedding_size" in family.settings:
        settings[family.settings["embedding_size"]] = config.embedding_width
    if config.head.problem_type:
        settings["problem_type"] = config.head.problem_type
    if HEADS[config.head.kind].labels is None:
        settings["id2label"] = {str(i): label for i, label in enumerate(config.head.labels)}
        settings["label2id"] = {label: i for i, label in enumerate(config.head.labels)}
    return settings


def architecture(config: ModelConfig) -> str:
    """Return the transformers class with most of the model's parts and, if possible, no others."""
    family = FAMILIES[config.family]
    if config.causal and config.masked_lm and not config.head.kind:
        return f"{family.class_prefix}{family.causal_class}"
    ours = {*parts_of(config)}

    def fits(item):
        parts, head = item[1]
        shared = ours & {*parts}
        # Of two classes with as many parts, take the one with more heads.
        return (
            head == config.head.kind,
            -len({*parts} - ours),
            len(shared),
            len(shared - {"pooler"}),
        )

    return max(family.all_classes().items(), key=fits)[0]


def parts_of(config: ModelConfig) -> list[str]:
    """Return the optional parts of a model, keys of `Family.parts_with`."""
    values = flatten_config(config)
    parts = {"pooler": config.has_pooler, **{part: values[key] for part, key in _PARTS.items()}}
    parts["head"] = bool(config.head.kind)
    return [part for part, is_present in parts.items() if is_present]
