"""Initial parameters of a model from those of a smaller one, which has been trained.

Hidden states, heads and feed-forward layers get copies of the smaller model's units, and further layers are
copies of its layers. Heads keep their size.

- "stack": what reads copies of a unit is divided among them, so wider layers compute the same (FPI of
  bert2BERT, Chen et al., arXiv 2110.07143), exactly if the hidden size is a multiple, as norms need
  equal numbers of copies. The parts are unequal, or copies would get the same gradients and stay
  equal without dropout (LEMON, Wang et al., arXiv 2310.07999). Further layers repeat the whole stack (StackBERT,
  Gong et al., ICML 2019).
- "tile": as ModernBERT-large from base (Warner et al., arXiv 2412.13663; `init_model_from_pretrained`
  of its code): the smaller matrices stand in the middle and are repeated on all sides, undivided, and each
  further layer is a copy of a neighbor. Copies differ only by dropout.
"""

import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from bert_jax.config.model import ModelConfig
from bert_jax.errors import UserError

SIZES = ("layers", "hidden", "heads", "feed_forward")
# Parameters that read a layer, and those that scale what a tied decoder, the embeddings, reads.
_READERS = re.compile(r"/(kernel|decoder)$")
_TIED_INPUT = re.compile(r"(^|/)masked_lm/norm/(scale|bias)$")


def check(source: ModelConfig, model: ModelConfig, where: str) -> None:
    """Refuse a model that is smaller than the source, called `where`, or has heads of another size."""
    for name in SIZES:
        new, old = getattr(model, name), getattr(source, name)
        if new < old:
            raise UserError(
                f"config.model.{name} is {new}, {where}'s is {old}: config.init_scheme enlarges models"
            )
    if model.hidden * source.heads != source.hidden * model.heads:
        raise UserError(
            f"config.model.heads is {model.heads}: heads keep their size with config.init_scheme, so it must be "
            f"{model.hidden * source.heads / source.hidden:g} with hidden={model.hidden}"
        )


def grow(
    params: Mapping[str, np.ndarray],
    shapes: Mapping[str, Any],
    source: ModelConfig,
    model: ModelConfig,
    scheme: str,
) -> dict[str, np.ndarray]:
    """Return the parameters of `model` that follow from those of `source`, by path.

    Args:
        params: parameters of `source`. Those that `model` lacks are returned unchanged.
        shapes: shapes of the parameters of `model`. The span-boundary head is not grown.
        source, model: the smaller and the larger model, accepted by `check`.
        scheme: "stack" or "tile"; see above.
    """
    layers = layer_map(source.layers, model.layers, scheme)
    grown = {path: value for path, value in params.items() if path not in shapes}
    for path, shape in shapes.items():
        origin = re.sub(r"(?<=encoder/layer_)\d+", lambda match: str(layers[int(match[0])]), path)
        if origin in params and not path.startswith("span_boundary/"):
            is_read = bool(model.tied_decoder and _TIED_INPUT.search(path))
            grown[path] = _widened(path, params[origin], shape.shape, scheme, is_read)
    return grown


def layer_map(old: int, new: int, scheme: str) -> list[int]:
    """Return the layer of the smaller model that each layer of the larger one copies."""
    if scheme == "stack":
        return [i % old for i in range(new)]
    return [min(round(i * old / new), old - 1) for i in range(new)]


def unit_map(old: int, new: int, scheme: str) -> Int64[np.ndarray, " new"]:
    """Return the unit of the smaller model that each unit of the larger one copies."""
    first = (new - old) // 2 if scheme == "tile" else 0
    return (np.arange(new) - first) % old


def _widened(
    path: str, value: Float[np.ndarray, "..."], shape: tuple[int, ...], scheme: str, is_read: bool
) -> Float[np.ndarray, "..."]:
    """Return a parameter with more units on some axes; `is_read`: its units are read by the decoder."""
    input_axes = 2 if path.endswith("attention/output/kernel") else 1
    for axis, (old, new) in enumerate(zip(value.shape, shape, strict=True)):
        if new == old:
            continue
        units = unit_map(old, new, scheme)
        value = np.moveaxis(np.take(value, units, axis), axis, 0)
        if scheme == "stack" and (is_read or (_READERS.search(path) and axis < input_axes)):
            random = np.random.default_rng(zlib.crc32(path.encode()))
            parts = random.uniform(0.5, 1.5, value.shape)
            totals = np.zeros((old, *value.shape[1:]))
            np.add.at(totals, units, parts)
            value = value * (parts / totals[units])
        value = np.moveaxis(value, 0, axis)
    return np.ascontiguousarray(value, np.float32)
