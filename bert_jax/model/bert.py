"""BERT in Flax Linen: embeddings, encoder, pooler and heads, without losses or data.

Shapes, throughout the package: B rows, T tokens per row, S sequences per row, P predictions per
row, N heads, K head size, D hidden, F feed-forward, L layers, V vocabulary (padded), C classes.

Parameter paths (`encoder/layer_3/attention/query/kernel`) are public: weight-decay masks, sharding
and checkpoint conversion match on them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util
from jaxtyping import Array, Bool, Float, Int, Key

from bert_jax.config import HEADS, ModelConfig
from bert_jax.data.rows import Layout, layout
from bert_jax.model import width
from bert_jax.model.attention import attention, probabilities
from bert_jax.model.dropout import dropout
from bert_jax.model.heads import MaskedLM, ScalarMix, SpanBoundary
from bert_jax.model.layers import (
    ACTIVATIONS,
    DENSE,
    InitConfig,
    dense,
    fold_in,
    initializer,
    norm_layer,
    one_hot_gather,
    padded_vocab_size,
    vocab_initializer,
)
from bert_jax.model.lstm import BiLSTM

Params = dict[str, Any]

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(DENSE),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, then LayerNorm and dropout (section 3.2)."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.word = nn.Embed(padded_vocab_size(c), c.hidden, embedding_init=vocab_initializer(c, 0))
        table = functools.partial(nn.Embed, features=c.hidden, embedding_init=initializer(c))
        self.position = table(c.positions)
        if c.segments:
            self.segment = table(c.segments)
        self.norm = norm_layer(c)

    def __call__(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        c = self.config
        # Gather words in float32: the gradient is a scatter-add, and GPUs have no fast atomic
        # addition in bfloat16. The two small tables avoid scatters altogether.
        x = self.word(tokens)
        positions = jnp.asarray(self.position.embedding[: tokens.shape[1]], c.dtype)
        x += one_hot_gather(positions, layout.position_ids).astype(x.dtype)
        if c.segments:
            segments = jnp.asarray(self.segment.embedding)
            if c.segments == 2:
                x += jnp.where(layout.token_type_ids[..., None] == 0, *segments)
            else:
                x += one_hot_gather(segments, layout.token_type_ids)
        return dropout(self.norm(x.astype(c.dtype)), c.dropout, key)


class Attention(nn.Module):
    """Multi-head self-attention with output projection, residual connection and LayerNorm."""

    config: ModelConfig

    def setup(self):
        c = self.config
        heads = (c.heads, c.hidden // c.heads)
        self.query, self.key, self.value = (
            dense(c, heads, target=name) for name in ("query", "key", "value")
        )
        self.output = dense(c, c.hidden, axis=(-2, -1), target="output")
        self.norm = norm_layer(c)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"],
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        c = self.config
        q, k, v = self.query(x), self.key(x), self.value(x)
        # Initialization traces one token, where only the shapes of parameters matter.
        implementation = "xla" if self.is_initializing() else c.attention
        settings = (segment_ids, c.attention_dropout, fold_in(key, 0), implementation)
        with jax.named_scope("attend"):
            y = attention(q, k, v, *settings, causal=c.causal)
        return self.norm(x + dropout(self.output(y), c.dropout, fold_in(key, 1)))

    def query_key_value(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T N K"], ...]:
        """Return the queries, keys and values."""
        return self.query(x), self.key(x), self.value(x)

    def probabilities(
        self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B N T T"]:
        """Return the attention probabilities, independently of `config.attention`."""
        return probabilities(self.query(x), self.key(x), segment_ids, self.config.causal)


class FeedForward(nn.Module):
    """Position-wise feed-forward network with residual connection and LayerNorm."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        c = self.config
        y = ACTIVATIONS[c.activation](
            dense(c, c.feed_forward, "intermediate", target="intermediate")(x)
        )
        y = dense(c, c.hidden, "output", target="output")(y)
        return norm_layer(c, "norm")(x + dropout(y, c.dropout, key))


class Layer(nn.Module):
    """Transformer layer with LayerNorm after each residual connection (post-norm)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"],
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        x = Attention(self.config, name="attention")(x, segment_ids, fold_in(key, 0))
        return FeedForward(self.config, name="feed_forward")(x, fold_in(key, 1))


class Encoder(nn.Module):
    """Stack of Transformer layers, unrolled or scanned, with optional rematerialization."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"],
        key: Key[Array, ""] | None,
        all_layers: bool = False,
    ) -> list[Float[Array, "B T D"]]:
        """Return the output of the last layer, or of all layers if `all_layers` is true."""
        c = self.config
        if self.is_initializing():
            states = []
            for i in range(c.layers):
                x = Layer(c, name=f"layer_{i}")(x, segment_ids, None)
                states.append(x)
        else:
            states = self._run(x, segment_ids, key, all_layers)
        if c.final_norm:
            states[-1] = norm_layer(c, "norm")(states[-1])
        return states

    def _run(self, x, segment_ids, key, all_layers):
        # Parameters are stored per layer and passed to a pure function, so checkpoints, LAMB's
        # norms and dropout bits do not depend on `layer_loop`.
        c = self.config
        layers = [self.variables["params"][f"layer_{i}"] for i in range(c.layers)]

        def layer(x, params, i) -> Any:
            layer_key = fold_in(key, i)
            rngs = None if key is None or not c.lora.dropout else {"lora": fold_in(layer_key, 2)}
            return Layer(c, parent=None).apply(
                {"params": params}, x, segment_ids, layer_key, rngs=rngs
            )

        if c.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[c.remat])
        if c.layer_loop == "unrolled":
            layer = jax.jit(layer)  # JAX traces the layer once; XLA still sees every copy
            states = []
            for i, params in enumerate(layers):
                x = layer(x, params, i)
                states.append(x)
            return states if all_layers else [x]

        def scanned(x, item):
            x = layer(x, *item)
            return x, x if all_layers else None

        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        x, states = jax.lax.scan(scanned, x, (stacked, jnp.arange(c.layers)))
        return [x] if states is None else list(states)

    def query_key_value(
        self, x: Float[Array, "B T D"], i: int
    ) -> tuple[Float[Array, "B T N K"], ...]:
        """Return the queries, keys and values of layer i (from 0), given its input."""
        params = self.variables["params"][f"layer_{i}"]["attention"]
        attention = Attention(self.config, parent=None)
        found: Any = attention.apply({"params": params}, x, method="query_key_value")
        return found

    def probabilities(
        self, states: list[Float[Array, "B T D"]], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "L B N T T"]:
        """Return the attention probabilities of every layer, given each layer's input."""
        attention, params = Attention(self.config, parent=None), self.variables["params"]
        maps: list[Any] = [
            attention.apply(
                {"params": params[f"layer_{i}"]["attention"]},
                x,
                segment_ids,
                method="probabilities",
            )
            for i, x in enumerate(states)
        ]
        return jnp.stack(maps)


class Bert(nn.Module):
    """BERT encoder with pooler and the heads that the config selects."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.embeddings = Embeddings(c)
        self.encoder = Encoder(c)
        if c.masked_lm:
            self.masked_lm = MaskedLM(c)
        if c.has_pooler:
            self.pooler = dense(c, c.hidden)
        if c.next_sentence:
            self.next_sentence = dense(c, 2)
        if c.span_boundary:
            self.span_boundary = SpanBoundary(c)
        if c.teacher_hidden:
            self.teacher_projection = dense(c, c.teacher_hidden)
        if c.features.startswith("weighted-"):
            self.features = ScalarMix()
        if c.lstm_layers:
            self.lstm = BiLSTM(c)
        if c.head:
            self.classifier = dense(c, len(c.labels))

    def encode(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None = None
    ) -> Float[Array, "B T D"]:
        """Return the last layer's hidden states; dropout is applied if `key` is given."""
        x = self.embeddings(tokens, layout, fold_in(key, 0))
        return self.encoder(x, layout.segment_ids, fold_in(key, 1))[-1]

    def hidden_states(
        self, tokens: Int[Array, "B T"], layout: Layout
    ) -> list[Float[Array, "B T D"]]:
        """Return L + 1 hidden states, the embeddings and each layer's output, without dropout."""
        x = self.embeddings(tokens, layout, None)
        return [x, *self.encoder(x, layout.segment_ids, None, all_layers=True)]

    def attention_probabilities(
        self, tokens: Int[Array, "B T"], layout: Layout
    ) -> Float[Array, "L B N T T"]:
        """Return attention from each token (axis 4) to each (axis 5), float32, without dropout."""
        states = self.hidden_states(tokens, layout)
        return self.encoder.probabilities(states[:-1], layout.segment_ids)

    def frozen_features(self, tokens: Int[Array, "B T"], layout: Layout) -> Float[Array, "B T n"]:
        """Return the features that `config.features` selects (section 5.3); n is D or 4 D.

        They are computed without dropout, and gradients do not flow into the encoder.
        """
        states = jax.lax.stop_gradient(self.hidden_states(tokens, layout))
        states = [states[i] for i in self.config.feature_layers]
        if self.config.features.startswith("weighted-"):
            return self.features(states)
        return jnp.concatenate(states, -1)

    def pool(self, hidden: Float[Array, "B T D"], cls: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Apply dense + tanh to every sequence's [CLS], or to the tokens at indices `cls`."""
        return jnp.tanh(self.pooler(one_hot_gather(hidden, cls)))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        layout: Layout,
        positions: Int[Array, "B P"],
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B P V"] | None, Float[Array, "B S 2"] | None]:
        """Return the pretraining logits: masked LM at `positions`, next sentence at every [CLS].

        A head that the model lacks returns None. The counterpart of `BertForPreTraining`.
        """
        return self._heads(self.encode(tokens, layout, key), layout, positions)

    def with_span_boundary(
        self,
        tokens: Int[Array, "B T"],
        layout: Layout,
        positions: Int[Array, "B P"],
        left: Int[Array, "B P"],
        right: Int[Array, "B P"],
        offset: Int[Array, "B P"],
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B P V"] | None, Float[Array, "B S 2"] | None, Float[Array, "B P V"]]:
        """Return the pretraining logits and those of the span-boundary head.

        Args:
            tokens, layout, positions, key: as for a call.
            left, right: positions of the tokens beside the span of each prediction.
            offset: position in its span.
        """
        hidden = self.encode(tokens, layout, key)
        beside = (one_hot_gather(hidden, left), one_hot_gather(hidden, right))
        span_logits = self.span_boundary(*beside, offset, self.embeddings.word.embedding)
        return *self._heads(hidden, layout, positions), span_logits

    def for_distillation(
        self,
        tokens: Int[Array, "B T"],
        layout: Layout,
        positions: Int[Array, "B P"],
        key: Key[Array, ""] | None = None,
        relation_layer: int = 0,
    ) -> tuple[Any, list[Float[Array, "B T n"]], tuple[Float[Array, "B T N K"], ...]]:
        """Return what a student and its teacher are compared by.

        Args:
            tokens, layout, positions, key: as for a call.
            relation_layer: 1 to L, a layer whose queries, keys and values are returned; 0 for none.

        Returns:
            The pretraining logits, as of a call; L + 1 hidden states, after the projection to the
            teacher's size if the model has it; the queries, keys and values of the layer.
        """
        x = self.embeddings(tokens, layout, fold_in(key, 0))
        states = [x, *self.encoder(x, layout.segment_ids, fold_in(key, 1), all_layers=True)]
        logits = self._heads(states[-1], layout, positions)
        relations = ()
        if relation_layer:
            below = states[relation_layer - 1]
            relations = self.encoder.query_key_value(below, relation_layer - 1)
        if self.config.teacher_hidden:
            states = [self.teacher_projection(x) for x in states]
        return logits, states, relations

    def _heads(self, hidden, layout, positions):
        masked_lm_logits = next_sentence_logits = None
        if self.config.masked_lm:
            masked_lm_logits = self.masked_lm(
                one_hot_gather(hidden, positions), self.embeddings.word.embedding
            )
        if self.config.next_sentence:
            next_sentence_logits = self.next_sentence(self.pool(hidden, layout.cls)).astype(
                jnp.float32
            )
        return masked_lm_logits, next_sentence_logits

    def classify(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None = None
    ) -> Float[Array, "B n C"]:
        """Return the fine-tuned head's logits (section 4).

        `config.head` decides whether n is S, with one prediction per sequence, or T, with one per
        token. The pooler applies to the encoder's last layer only; outputs of an LSTM or of
        `frozen_features` go to the classifier without it.
        """
        c = self.config
        if c.features:
            hidden = self.frozen_features(tokens, layout)
        else:
            hidden = self.encode(tokens, layout, fold_in(key, 0))
        if c.lstm_layers:
            hidden = self.lstm(hidden, layout.segment_ids)
        if HEADS[c.head].pooled:
            indices = last_tokens(layout) if c.causal else layout.cls
            use_pooler = not (c.features or c.lstm_layers)
            hidden = self.pool(hidden, indices) if use_pooler else one_hot_gather(hidden, indices)
        hidden = dropout(hidden, c.dropout, fold_in(key, 1))
        return self.classifier(hidden).astype(jnp.float32)

    def touch(self, tokens: Int[Array, "B T"], layout: Layout, positions: Int[Array, "B P"]):
        """Use every parameter once, so that `init` creates it."""
        c = self.config
        states = self.hidden_states(tokens, layout)
        hidden = states[-1]
        if c.masked_lm:
            self.masked_lm(one_hot_gather(hidden, positions), self.embeddings.word.embedding)
        if c.teacher_hidden:
            self.teacher_projection(hidden)
        if c.span_boundary:
            self.span_boundary(hidden, hidden, positions, self.embeddings.word.embedding)
        if c.has_pooler:
            pooled = self.pool(hidden, layout.cls)
            if c.next_sentence:
                self.next_sentence(pooled)
        if c.features:
            states = [states[i] for i in c.feature_layers]
            is_weighted = c.features.startswith("weighted-")
            hidden = self.features(states) if is_weighted else jnp.concatenate(states, -1)
        if c.lstm_layers:
            hidden = self.lstm(hidden, layout.segment_ids)
        if c.head:
            self.classifier(hidden)


def init_params(config: ModelConfig, key: Key[Array, ""]) -> Params:
    """Return random parameters of the whole model, bit for bit those of `Bert(config).init`.

    With `config.base_hidden` they are scaled by `width.scales`.

    Kernels of one shape are drawn together: XLA compiles a separate generator per parameter for
    longer than the training step.
    """
    ones = jnp.ones((1, 1), jnp.int32)
    inputs = (ones, layout(ones, ones, 1), ones - 1)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)}

    def init(key: Key[Array, ""], draw: Callable) -> Params:
        model = Bert(InitConfig(**fields, draw=draw))
        return dict(model.init(key, *inputs, method=Bert.touch)["params"])

    shapes_and_dtypes: list[tuple[tuple[int, ...], Any]] = []

    def param_keys(key: Key[Array, ""]) -> list[Key[Array, ""]]:
        keys = []

        def record(param_key, shape, dtype):
            keys.append(param_key)
            shapes_and_dtypes.append((shape, dtype))
            return jnp.full(shape, jax.random.key_data(param_key)[0], dtype)

        init(key, record)
        return keys

    # Flax folds a hash of the parameter's path into the key.
    jaxpr = jax.make_jaxpr(param_keys)(key).jaxpr
    eqn_of = {variable: eqn for eqn in jaxpr.eqns for variable in eqn.outvars}
    hashes = [eqn_of[variable].invars[1].val for variable in jaxpr.outvars]
    groups: dict[Any, list[int]] = {}
    for i, shape_and_dtype in enumerate(shapes_and_dtypes):
        groups.setdefault(shape_and_dtype, []).append(i)
    values: dict[int, Array] = {}
    for (shape, dtype), indices in groups.items():

        def draw(path_hash, shape=shape, dtype=dtype):
            return initializer(config)(jax.random.fold_in(key, path_hash), shape, dtype)

        path_hashes = np.array([hashes[i] for i in indices], np.uint32)
        values.update(zip(indices, jax.vmap(draw)(path_hashes), strict=True))
    counter = iter(range(len(shapes_and_dtypes)))
    params = init(key, lambda *_: values[next(counter)])
    if not config.base_hidden:
        return params
    return unflatten({k: width.scales(config, k)[0] * x for k, x in flatten(params).items()})


def shapes(config: ModelConfig) -> Params:
    """Return the parameters' shapes as a tree of `jax.ShapeDtypeStruct`."""
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def flatten(params: Params) -> dict[str, Any]:
    """Return the leaves of a tree of parameters by path, such as "embeddings/word/embedding"."""
    return traverse_util.flatten_dict(params, sep="/")  # pyright: ignore[reportReturnType]


def unflatten(leaves: Mapping[str, Any]) -> Params:
    """Return the tree with the given leaves by path; the inverse of `flatten`."""
    return traverse_util.unflatten_dict(leaves, sep="/")


def sum_tokens(
    hidden: Float[Array, "B T D"], layout: Layout, included: Bool[Array, "B T"] | None = None
) -> Float[Array, "B S D"]:
    """Return the sum of each sequence's tokens, or of those `included`, in float32."""
    slots = jnp.arange(layout.cls.shape[1])
    mask = layout.segment_ids[:, None, :] == slots[None, :, None]
    if included is not None:
        mask &= included[:, None, :]
    # By default, accelerators round the float32 operands of a matrix product.
    precision, hidden = jax.lax.Precision.HIGHEST, hidden.astype(jnp.float32)
    return jnp.einsum("bst,btd->bsd", mask.astype(jnp.float32), hidden, precision=precision)


def pool_tokens(
    hidden: Float[Array, "B T D"], layout: Layout, pooling: str
) -> Float[Array, "B S D"]:
    """Return a vector of each sequence in float32: its [CLS] ("cls") or the mean of its tokens.

    An unused slot gets any finite vector.
    """
    if pooling == "cls":
        return one_hot_gather(hidden.astype(jnp.float32), layout.cls)
    ones = jnp.ones((*hidden.shape[:2], 1), jnp.float32)
    return sum_tokens(hidden, layout) / jnp.maximum(sum_tokens(ones, layout), 1)


def last_tokens(layout: Layout) -> Int[Array, "B S"]:
    """Return the index of each sequence's last token; an unused slot gets a valid index."""
    slots = jnp.arange(layout.cls.shape[1])
    ends = jnp.sum(layout.segment_ids[:, None, :] <= slots[:, None], axis=2)
    return jnp.maximum(ends - 1, 0)
