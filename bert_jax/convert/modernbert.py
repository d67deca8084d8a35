"""ModernBERT in transformers (modeling_modernbert.py): fused tensors and config.json.

`from_hf` splits tensors that transformers fuses, queries with keys and values and the two halves of
the feed-forward layer, and reduces the versions of config.json to the first one's keys, with which
all versions of transformers load an export.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.errors import UserError

Settings = dict[str, Any]
Tensors = dict[str, np.ndarray]

# Fused module → names of its parts, from the first output on.
_FUSED = {
    "attn.Wqkv": ("attn.query", "attn.key", "attn.value"),
    "mlp.Wi": ("mlp.intermediate", "mlp.gate"),
}
# Keys of config.json that must be equal, with their default; export writes all of them.
_SAME = {
    ("attention_bias", "mlp_bias", "classifier_bias"): False,
    ("hidden_activation", "classifier_activation"): "gelu",
}
_NORMS = {True: "layer_norm", False: "layer_norm_no_bias"}


def from_hf(settings: Settings, tensors: Tensors) -> tuple[Settings, Tensors]:
    """Split fused tensors, and return settings with one key for each field of `ModelConfig`."""
    settings = {**settings, "norm": _NORMS[bool(settings.get("norm_bias", False))]}
    if settings.get("local_rope_theta", 0) is None:
        settings["local_rope_theta"] = 0.0  # that of global layers
    for keys, default in _SAME.items():
        values = {key: settings.get(key, default) for key in keys}
        if len({*map(str, values.values())}) > 1:
            raise UserError(
                "config.json: "
                + ", ".join(f"{key} is {value!r}" for key, value in values.items())
                + "; they must be equal"
            )
    kinds = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
    rope = settings.get("rope_parameters") or {}
    for kind, key in kinds.items():
        values = rope.get(kind) or {}
        if values.get("rope_type", "default") != "default":
            raise UserError(
                f"config.json: rope_type is {values['rope_type']!r}, which is not supported"
            )
        if "rope_theta" in values:
            settings[key] = values["rope_theta"]
    if settings.get("layer_types"):
        settings["global_attn_every_n_layers"] = _period(
            settings["layer_types"], settings.get("global_attn_every_n_layers", 3)
        )
    return settings, _split(tensors)


def _period(kinds: Sequence[str], likely: int) -> int:
    """Return the n of which every n-th layer has global attention, beginning with the first."""
    for period in (likely, *range(1, len(kinds) + 1)):
        expected = [
            "sliding_attention" if i % period else "full_attention" for i in range(len(kinds))
        ]
        if expected == list(kinds):
            return period
    raise UserError("config.json: layer_types must have full_attention in every n-th layer")


def _split(tensors: Tensors) -> Tensors:
    """Split fused tensors."""
    result: Tensors = {}
    for name, value in tensors.items():
        fused = next((fused for fused in _FUSED if f".{fused}." in name), None)
        if fused is None:
            result[name] = value
            continue
        parts = _FUSED[fused]
        if len(value) % len(parts):
            raise UserError(f"{name} has {len(value)} rows, not a multiple of {len(parts)}")
        for part, piece in zip(parts, np.split(value, len(parts)), strict=True):
            result[name.replace(fused, part)] = piece
    return result


def to_hf(settings: Settings, tensors: Tensors) -> tuple[Settings, Tensors]:
    """Invert `from_hf`."""
    settings = dict(settings)
    del settings["position_embedding_type"]
    norm = settings.pop("norm")
    if norm not in _NORMS.values():
        raise UserError(
            f"config.model.norm.kind is {norm!r}, which transformers' ModernBERT does not support"
        )
    settings["norm_bias"] = norm == _NORMS[True]
    for first, *others in _SAME:
        settings |= dict.fromkeys(others, settings[first])
    settings |= dict.fromkeys(("embedding_dropout", "classifier_dropout"), settings["mlp_dropout"])
    settings["local_rope_theta"] = settings["local_rope_theta"] or settings["global_rope_theta"]
    if not settings["local_attention"]:  # all layers are global
        settings |= {"local_attention": 128, "global_attn_every_n_layers": 1}
    return settings, _join(tensors)


def _join(tensors: Tensors) -> Tensors:
    """Invert `_split`."""
    tensors = dict(tensors)
    for fused, (first, *others) in _FUSED.items():
        for name in [name for name in tensors if f".{first}." in name]:
            values = [tensors.pop(name.replace(first, part)) for part in (first, *others)]
            tensors[name.replace(first, fused)] = np.concatenate(values)
    return tensors
