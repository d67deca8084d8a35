"""BERT in Flax Linen: a call of the model and its outputs, and its parameters.

Shapes, throughout the package: B rows, T tokens per row, S sequences per row, P predictions per
row, N heads, K head size, D hidden, E embedding size (D in BERT), F feed-forward, L layers,
V vocabulary (padded), C classes.

Parameter paths (`encoder/layer_3/attention/query/kernel`) are public: weight-decay masks, sharding
and checkpoint conversion match on them.
"""

import copy
import dataclasses
import functools
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util
from jaxtyping import Array, Float, Int, Key

from bert_jax.config.model import HEADS, ModelConfig
from bert_jax.data.rows import Layout, layout
from bert_jax.model import mup
from bert_jax.model.dropout import dropout
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import (
    Decoder,
    HeadTransform,
    MaskedLM,
    ReplacedToken,
    ScalarMix,
    SpanBoundary,
    last_tokens,
    pool_tokens,
)
from bert_jax.model.layers import (
    ACTIVATIONS,
    VOCABULARY_AXES,
    Normal,
    dense,
    fold_in,
    one_hot_gather,
    padded_vocab_size,
)
from bert_jax.model.lstm import BiLSTM

Params = dict[str, Any]


class Outputs(NamedTuple):
    """What a call of `Bert` returns; None for what was not asked for and for heads that it lacks.

    Attributes:
        hidden: hidden states of the last layer.
        states: L + 1 hidden states, the embeddings and each layer's output.
        pooled: output of the pooler for the [CLS] of each sequence, in causal models its last token.
        masked_lm: logits over the vocabulary.
        next_sentence: logits of "is next" and "is random".
        replaced_token: logit of each token that it was replaced (`ElectraForPreTraining`).
        head: logits of the fine-tuned head (section 4); n is S with one prediction per sequence, or T
            with one per token.
        decoder: what the logits over the vocabulary are computed from; only if asked for by name.
    """

    hidden: Float[Array, "B T D"]
    states: list[Float[Array, "B T D"]] | None = None
    pooled: Float[Array, "B S D"] | None = None
    masked_lm: Float[Array, "B P V"] | None = None
    next_sentence: Float[Array, "B S 2"] | None = None
    replaced_token: Float[Array, "B T"] | None = None
    head: Float[Array, "B n C"] | None = None
    decoder: Decoder | None = None


class Bert(nn.Module):
    """BERT encoder with pooler and the heads that the config selects."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        layout: Layout,
        positions: Int[Array, "B P"] | None = None,
        key: Key[Array, ""] | None = None,
        outputs: Collection[str] = Outputs._fields[:-1],
    ) -> Outputs:
        """Run the encoder and the heads that are asked for.

        Args:
            tokens: token ids.
            layout: layout of the rows.
            positions: tokens of each row whose masked-LM logits are returned; None for all.
            key: key of dropout; None for none. The encoder below a head on `config.head.features` is frozen
                and has none.
            outputs: fields of `Outputs` to compute, static; `hidden` always is.
        """
        c = self.config
        encoder_key = None if c.head.features else key
        embeddings = Embeddings(c, name="embeddings")
        encoder = Encoder(c, name="encoder")
        x = embeddings(tokens, layout, fold_in(encoder_key, 0))
        all_layers = bool(c.head.features) or "states" in outputs
        states = [x, *encoder(x, layout, fold_in(encoder_key, 1), all_layers)]
        hidden = states[-1]
        result = {"hidden": hidden, "states": states if "states" in outputs else None}
        if c.masked_lm and "masked_lm" in outputs:
            selected = hidden if positions is None else one_hot_gather(hidden, positions)
            table = embeddings.word.embedding
            result["masked_lm"], decoder = MaskedLM(c, name="masked_lm")(selected, table)
            result["decoder"] = decoder if "decoder" in outputs else None
        if c.electra.replaced_token and "replaced_token" in outputs:
            result["replaced_token"] = ReplacedToken(c, name="replaced_token")(hidden)
        pooler = dense(c, c.hidden, "pooler") if c.has_pooler else None
        if pooler and {"pooled", "next_sentence"} & {*outputs}:
            result["pooled"] = self._pool(pooler, one_hot_gather(hidden, first_tokens(c, layout)))
            if c.next_sentence:
                logits = dense(c, 2, "next_sentence", is_output=True)(result["pooled"])
                result["next_sentence"] = logits
        if c.head.kind and "head" in outputs:
            result["head"] = self._classify(states, layout, pooler, fold_in(key, 2))
        return Outputs(**result)

    def _pool(self, pooler: nn.Module, selected: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        activation = self.config.pooler_activation
        return (jnp.tanh if activation == "tanh" else ACTIVATIONS[activation])(pooler(selected))

    def _classify(self, states, layout, pooler, key) -> Float[Array, "B n C"]:
        """Return the fine-tuned head's logits.

        The pooler applies to the encoder's last layer only; outputs of an LSTM and features of a frozen
        encoder (section 5.3) go to the classifier without it.
        """
        c, hidden = self.config, states[-1]
        if c.head.features:
            selected = [jax.lax.stop_gradient(states[i]) for i in c.feature_layers]
            is_weighted = c.head.features.startswith("weighted-")
            hidden = (
                ScalarMix(name="features")(selected)
                if is_weighted
                else jnp.concatenate(selected, axis=-1)
            )
        if c.head.lstm_layers:
            hidden = BiLSTM(c, name="lstm")(hidden, layout.segment_ids)
        if HEADS[c.head.kind].pooled:
            if c.head.pooling == "mean":
                hidden = pool_tokens(hidden, layout, "mean").astype(hidden.dtype)
            else:
                hidden = one_hot_gather(hidden, first_tokens(c, layout))
            if c.head.layer == "pooler" and c.head.reads_encoder:
                hidden = self._pool(pooler, hidden)
        if c.has_head_transform:
            hidden = HeadTransform(c, name="head")(hidden)
        hidden = dropout(hidden, c.dropout, key)
        return dense(c, len(c.head.labels), "classifier", is_output=True)(hidden)


def first_tokens(config: ModelConfig, layout: Layout) -> Int[Array, "B S"]:
    """Return the index of each sequence's [CLS], or in causal models of its last token."""
    return last_tokens(layout) if config.causal else layout.cls


# Jitted initializations by model config; configs are mutable, hence the copy and the key.
_INITIALIZERS: dict[str, Callable[[Key[Array, ""]], Params]] = {}


def init_params(config: ModelConfig, key: Key[Array, ""]) -> Params:
    """Return random parameters of the whole model, with those that only pretraining uses.

    Each depends on the key and its path alone. With `config.mup.base_hidden` they are scaled by
    `mup.scales`.
    """
    # JAX reuses the trace of a jitted function: a run first needs the shapes, then the values.
    name = repr(config)
    if name not in _INITIALIZERS:
        init = functools.partial(_init_params, copy.deepcopy(config))
        _INITIALIZERS[name] = jax.jit(init, inline=True)
    return _INITIALIZERS[name](key)


def _init_params(config: ModelConfig, key: Key[Array, ""]) -> Params:
    ones = jnp.ones((1, 1), jnp.int32)

    def init(config: ModelConfig) -> Params:
        bert = Bert(dataclasses.replace(config, kernels="xla"))
        return dict(bert.init(key, ones, layout(ones, ones, 1))["params"])

    params = init(config)
    if config.span_boundary:
        hidden = jnp.zeros((1, 1, config.hidden), config.compute_dtype)
        table = jnp.zeros((padded_vocab_size(config), config.hidden))
        boundary = SpanBoundary(config).init(key, hidden, hidden, ones, table)
        params["span_boundary"] = boundary["params"]
    if config.electra.generator_hidden:
        generator = init(config.generator())
        embeddings = generator.pop("embeddings")
        params["generator"] = generator | {k: embeddings[k] for k in embeddings if k == "project"}
    return draw_params(config, params, key)


def draw_params(config: ModelConfig, params: Params, key: Key[Array, ""]) -> Params:
    """Draw the parameters that are `Normal`: those of one shape together, keyed by their paths."""
    flat = flatten(params)
    groups: dict[Any, list[str]] = {}
    for path, x in flat.items():
        if isinstance(x, Normal):
            shape = list(x.value.shape)
            if path in VOCABULARY_AXES:  # values do not depend on the amount of padding
                shape[VOCABULARY_AXES[path]] = config.vocab_size
            matrix = int(np.prod(shape[: x.num_axes])), int(np.prod(shape[x.num_axes :]))
            groups.setdefault((matrix, x.value.dtype), []).append(path)
    initializer = nn.initializers.truncated_normal(config.initializer_stddev)
    for (shape, dtype), paths in groups.items():

        def draw(path_hash, shape=shape, dtype=dtype):
            return initializer(jax.random.fold_in(key, path_hash), shape, dtype)

        hashes = np.array([zlib.crc32(path.encode()) for path in paths], np.uint32)
        for path, matrix in zip(paths, jax.vmap(draw)(hashes), strict=True):
            value = flat[path].value
            if path in VOCABULARY_AXES:
                padding = [(0, n - m) for n, m in zip(value.shape, matrix.shape, strict=True)]
                flat[path] = jnp.pad(matrix, padding)
            else:
                flat[path] = matrix.reshape(value.shape)
    if config.mup.base_hidden:
        flat = {path: mup.scales(config, path)[0] * x for path, x in flat.items()}
    return unflatten(flat)


def split_generator(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Return ELECTRA's generator as a masked LM of its own, given the model that contains it."""
    parts = dict(params["generator"])
    embeddings = {name: x for name, x in params["embeddings"].items() if name != "project"}
    if "project" in parts:
        embeddings["project"] = parts.pop("project")
    return config.generator(), {"embeddings": embeddings, **parts}


def shapes(config: ModelConfig) -> Params:
    """Return the parameters' shapes as a tree of `jax.ShapeDtypeStruct`."""
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def flatten(params: Params) -> dict[str, Any]:
    """Return the leaves of a tree of parameters by path, such as "embeddings/word/embedding"."""
    return traverse_util.flatten_dict(params, sep="/")  # pyright: ignore[reportReturnType]


def unflatten(leaves: Mapping[str, Any]) -> Params:
    """Return the tree with the given leaves by path; the inverse of `flatten`."""
    return traverse_util.unflatten_dict(leaves, sep="/")
