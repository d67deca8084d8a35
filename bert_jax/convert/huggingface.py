"""Our parameters by Hugging Face's names and shapes, and back (`BertForPreTraining`, `BertForMaskedLM`).

The one table below is read in both directions, so what goes out comes back bit for bit.
"""

from collections.abc import Mapping

import numpy as np
from flax import traverse_util

from bert_jax.config import ModelConfig
from bert_jax.model import Params, padded_vocab

# Our path → their name. {i} is the layer. Dense kernels are transposed and LayerNorm's scale is
# their weight, by the rules in `_theirs`.
_EMBEDDINGS = {
    "embeddings/word/embedding": "bert.embeddings.word_embeddings.weight",
    "embeddings/position/embedding": "bert.embeddings.position_embeddings.weight",
    "embeddings/segment/embedding": "bert.embeddings.token_type_embeddings.weight",
    "embeddings/norm": "bert.embeddings.LayerNorm",
}
_LAYER = {
    "encoder/layer_{i}/attention/query": "bert.encoder.layer.{i}.attention.self.query",
    "encoder/layer_{i}/attention/key": "bert.encoder.layer.{i}.attention.self.key",
    "encoder/layer_{i}/attention/value": "bert.encoder.layer.{i}.attention.self.value",
    "encoder/layer_{i}/attention/output": "bert.encoder.layer.{i}.attention.output.dense",
    "encoder/layer_{i}/attention/norm": "bert.encoder.layer.{i}.attention.output.LayerNorm",
    "encoder/layer_{i}/feed_forward/intermediate": "bert.encoder.layer.{i}.intermediate.dense",
    "encoder/layer_{i}/feed_forward/output": "bert.encoder.layer.{i}.output.dense",
    "encoder/layer_{i}/feed_forward/norm": "bert.encoder.layer.{i}.output.LayerNorm",
}
_HEADS = {
    "pooler": "bert.pooler.dense",
    "masked_lm/transform": "cls.predictions.transform.dense",
    "masked_lm/norm": "cls.predictions.transform.LayerNorm",
    "masked_lm/decoder": "cls.predictions.decoder.weight",
    "masked_lm/bias": "cls.predictions.bias",
    "next_sentence": "cls.seq_relationship",
}


def _names(config: ModelConfig) -> dict[str, str]:
    layers = {
        ours.format(i=i): theirs.format(i=i)
        for i in range(config.layers)
        for ours, theirs in _LAYER.items()
    }
    names = {**_EMBEDDINGS, **layers, **_HEADS}
    if not config.tied_decoder:
        names["masked_lm/bias"] = "cls.predictions.decoder.bias"
    return names


def _their_name(path: str, names: Mapping[str, str]) -> str:
    if path in names:
        return names[path]
    module, _, leaf = path.rpartition("/")
    return f"{names[module]}.{'bias' if leaf == 'bias' else 'weight'}"


def to_huggingface(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """Our parameters under Hugging Face's names, without the padding of the vocabulary.

    Kernels [in, out] (attention: [D, N, K] and [N, K, D]) become weights [out, in].
    """
    names, tensors = _names(config), {}
    for path, value in traverse_util.flatten_dict(params, sep="/").items():
        value = np.asarray(value)
        if path.endswith("output/kernel") and value.ndim == 3:
            value = value.reshape(-1, value.shape[-1])
        elif value.ndim == 3:
            value = value.reshape(value.shape[0], -1)
        elif value.ndim == 2 and path.endswith("/bias"):
            value = value.reshape(-1)
        if path.endswith("/kernel") or path == "masked_lm/decoder":
            value = value.T
        if path in ("embeddings/word/embedding", "masked_lm/decoder", "masked_lm/bias"):
            value = value[: config.vocab_size]
        tensors[_their_name(path, names)] = np.ascontiguousarray(value)
    if not config.tied_decoder:
        # Their untied decoder has a bias of its own and leaves this one, still a parameter, unread.
        tensors["cls.predictions.bias"] = tensors["cls.predictions.decoder.bias"]
    return tensors


def from_huggingface(
    tensors: Mapping[str, np.ndarray], like: Params, config: ModelConfig
) -> Params:
    """The inverse: parameters shaped as `like` (a tree of arrays or shapes) from their tensors.

    Raises:
        KeyError: a tensor is missing.
        ValueError: a tensor has the wrong number of elements.
    """
    names, params = _names(config), {}
    for path, leaf in traverse_util.flatten_dict(like, sep="/").items():
        value = np.asarray(tensors[_their_name(path, names)])
        if path.endswith("/kernel") or path == "masked_lm/decoder":
            value = value.T
        vocab_axis = {"embeddings/word/embedding": 0, "masked_lm/decoder": 1, "masked_lm/bias": 0}
        if path in vocab_axis:
            missing = padded_vocab(config) - config.vocab_size
            axis = vocab_axis[path]
            value = np.pad(value, [(0, missing * (i == axis)) for i in range(value.ndim)])
        params[path] = value.reshape(leaf.shape).astype(leaf.dtype)
    return traverse_util.unflatten_dict(params, sep="/")
