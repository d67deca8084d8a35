"""BERT in Flax Linen: embeddings, encoder, pooler and heads, without losses or data.

Shapes, throughout the package: B rows, T tokens per row, S sequences per row, P predictions per
row, N heads, K head size, D hidden, E embedding size (D in BERT), F feed-forward, L layers,
V vocabulary (padded), C classes.

Parameter paths (`encoder/layer_3/attention/query/kernel`) are public: weight-decay masks, sharding
and checkpoint conversion match on them.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util
from jaxtyping import Array, Bool, Float, Int, Key

from bert_jax.config.schema import HEADS, ModelConfig
from bert_jax.data.rows import Layout, layout
from bert_jax.model import mup
from bert_jax.model.attention import attention, probabilities
from bert_jax.model.dropout import dropout
from bert_jax.model.heads import (
    HeadTransform,
    MaskedLM,
    ReplacedToken,
    ScalarMix,
    SpanBoundary,
)
from bert_jax.model.layers import (
    ACTIVATIONS,
    DENSE,
    InitConfig,
    dense,
    fold_in,
    gather_rows,
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


class AttentionContext(NamedTuple):
    """What attention needs to know of the tokens besides their hidden states.

    Attributes:
        segment_ids: index of each token's sequence in its row.
        rotations: `rotation` for layers with global and with local attention; None without RoPE.
    """

    segment_ids: Int[Array, "B T"]
    rotations: tuple["Rotation", "Rotation"] | None


class Rotation(NamedTuple):
    """Cosine and sine of the angles by which RoPE rotates the tokens' queries and keys."""

    cos: Float[Array, "B T K/2"]
    sin: Float[Array, "B T K/2"]


def rotation(position_ids: Int[Array, "B T"], head_size: int, theta: float) -> Rotation:
    """Return RoPE's rotation of each position, in float32 (Su et al., arXiv 2104.09864)."""
    frequencies = 1 / theta ** (np.arange(0, head_size, 2, dtype=np.float32) / head_size)
    angles = position_ids[..., None].astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "B T N K"], by: Rotation) -> Float[Array, "B T N K"]:
    """Rotate the pairs (i, i + K/2) of every head's features, as in GPT-NeoX and transformers."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.astype(x.dtype)


def attention_context(config: ModelConfig, layout: Layout) -> AttentionContext:
    """Return what the attention of all layers needs to know of packed rows."""
    if config.position_kind != "rope":
        return AttentionContext(layout.segment_ids, None)
    head_size, theta = config.hidden // config.heads, config.rope_theta
    global_rotation, local_rotation = (
        rotation(layout.position_ids, head_size, base)
        for base in (theta, config.local_rope_theta or theta)
    )
    return AttentionContext(layout.segment_ids, (global_rotation, local_rotation))


class LayerKind(NamedTuple):
    """How a layer differs from others of the model.

    Attributes:
        is_local: whether attention is local.
        has_attention_norm: whether attention has a norm; see `config.norm_position`.
    """

    is_local: bool
    has_attention_norm: bool


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """Return the kind of every layer."""
    is_normed = config.norm_position == "pre" and config.embedding_norm
    return [LayerKind(config.is_local(i), not (is_normed and i == 0)) for i in range(config.layers)]


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, then LayerNorm and dropout (section 3.2)."""

    config: ModelConfig

    def setup(self):
        c = self.config
        size = c.embedding_width
        self.word = nn.Embed(padded_vocab_size(c), size, embedding_init=vocab_initializer(c, 0))
        table = functools.partial(nn.Embed, features=size, embedding_init=initializer(c))
        if c.position_kind == "learned":
            self.position = table(c.positions)
        if c.segments:
            self.segment = table(c.segments)
        if c.embedding_norm:
            self.norm = norm_layer(c)
        if size != c.hidden:
            self.project = dense(c, c.hidden)

    def __call__(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        x = self.sum(tokens, layout, key)
        return x if self.config.embedding_width == self.config.hidden else self.project(x)

    def sum(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None
    ) -> Float[Array, "B T E"]:
        """Return the embeddings before they are projected to the hidden size."""
        c = self.config
        # Gather words in float32: the gradient is a scatter-add, and GPUs have no fast atomic
        # addition in bfloat16. The two small tables avoid scatters altogether.
        x = gather_rows(jnp.asarray(self.word.embedding), tokens)
        if c.position_kind == "learned":
            positions = self.position.embedding[: tokens.shape[1]]
            x += one_hot_gather(positions, layout.position_ids, c.dtype).astype(x.dtype)
        if c.segments:
            segments = jnp.asarray(self.segment.embedding)
            if c.segments == 1:
                x += segments[0]
            elif c.segments == 2:
                x += jnp.where(layout.token_type_ids[..., None] == 0, *segments)
            else:
                x += one_hot_gather(segments, layout.token_type_ids)
        x = x.astype(c.dtype)
        return dropout(self.norm(x) if c.embedding_norm else x, c.dropout, key)


class Attention(nn.Module):
    """Multi-head self-attention with output projection, residual connection and norm."""

    config: ModelConfig
    kind: LayerKind

    def setup(self):
        c = self.config
        heads = (c.heads, c.hidden // c.heads)
        self.query, self.key, self.value = (
            dense(c, heads, target=name) for name in ("query", "key", "value")
        )
        self.output = dense(c, c.hidden, num_axes=2, target="output")
        if self.kind.has_attention_norm:
            self.norm = norm_layer(c)
        if c.qk_norm:
            self.query_norm, self.key_norm = norm_layer(c), norm_layer(c)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: AttentionContext,
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        c = self.config
        y = self._input(x)
        q, k = self._queries_and_keys(y, context)
        v = self.value(y)
        # Initialization traces one token, where only the shapes of parameters matter.
        implementation = "xla" if self.is_initializing() else c.attention
        settings = (context.segment_ids, c.attention_dropout, fold_in(key, 0), implementation)
        with jax.named_scope("attend"):
            y = attention(q, k, v, *settings, **self._pattern)
        y = x + dropout(self.output(y), c.dropout, fold_in(key, 1))
        return y if c.norm_position == "pre" else self.norm(y)

    def query_key_value(
        self, x: Float[Array, "B T D"], context: AttentionContext
    ) -> tuple[Float[Array, "B T N K"], ...]:
        """Return the queries, keys and values, as attention takes them."""
        y = self._input(x)
        return *self._queries_and_keys(y, context), self.value(y)

    def probabilities(
        self, x: Float[Array, "B T D"], context: AttentionContext
    ) -> Float[Array, "B N T T"]:
        """Return the attention probabilities, independently of `config.attention`."""
        q, k = self._queries_and_keys(self._input(x), context)
        return probabilities(q, k, context.segment_ids, **self._pattern)

    def _input(self, x):
        is_normed = self.config.norm_position == "pre" and self.kind.has_attention_norm
        return self.norm(x) if is_normed else x

    def _queries_and_keys(self, x, context):
        q, k = self.query(x), self.key(x)
        if self.config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if context.rotations is not None:
            by = context.rotations[self.kind.is_local]
            q, k = rotate(q, by), rotate(k, by)
        return q, k

    @property
    def _pattern(self) -> dict[str, Any]:
        c = self.config
        reach = c.local_window // 2 if self.kind.is_local else 0
        return {"causal": c.causal, "reach": reach, "alibi": c.position_kind == "alibi"}


class FeedForward(nn.Module):
    """Position-wise feed-forward network with residual connection and norm."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        c, norm = self.config, norm_layer(self.config, "norm")
        pre = c.norm_position == "pre"
        y = norm(x) if pre else x
        wide = ACTIVATIONS[c.activation](
            dense(c, c.feed_forward, "intermediate", target="intermediate")(y)
        )
        if c.gated_feed_forward:
            wide *= dense(c, c.feed_forward, "gate")(y)
        y = x + dropout(dense(c, c.hidden, "output", target="output")(wide), c.dropout, key)
        return y if pre else norm(y)


class Layer(nn.Module):
    """Transformer layer: attention, then the feed-forward network."""

    config: ModelConfig
    kind: LayerKind

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: AttentionContext,
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        x = Attention(self.config, self.kind, name="attention")(x, context, fold_in(key, 0))
        return FeedForward(self.config, name="feed_forward")(x, fold_in(key, 1))


class Encoder(nn.Module):
    """Stack of Transformer layers, unrolled or scanned, with optional rematerialization."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        layout: Layout,
        key: Key[Array, ""] | None,
        all_layers: bool = False,
    ) -> list[Float[Array, "B T D"]]:
        """Return the output of the last layer, or of all layers if `all_layers` is true."""
        c, context = self.config, attention_context(self.config, layout)
        if self.is_initializing():
            states = []
            for i, kind in enumerate(layer_kinds(c)):
                x = Layer(c, kind, name=f"layer_{i}")(x, context, None)
                states.append(x)
        else:
            states = self._run(x, context, key, all_layers)
        if c.final_norm:
            states[-1] = norm_layer(c, "norm")(states[-1])
        return states

    def _run(self, x, context, key, all_layers):
        # Parameters are stored per layer and passed to a pure function, so checkpoints, LAMB's
        # norms and dropout bits do not depend on `layer_loop`.
        c, kinds = self.config, layer_kinds(self.config)
        layers = [self.variables["params"][f"layer_{i}"] for i in range(c.layers)]

        def layer_function(kind) -> Any:
            def layer(x, params, i):
                layer_key = fold_in(key, i)
                has_rng = key is not None and c.lora.dropout
                rngs: Any = {"lora": fold_in(layer_key, 2)} if has_rng else None
                module = Layer(c, kind, parent=None)
                return module.apply({"params": params}, x, context, layer_key, rngs=rngs)

            if c.remat != "none":
                layer = jax.checkpoint(layer, policy=REMAT_POLICIES[c.remat])
            # JAX traces each kind of layer once; XLA still sees every copy.
            return jax.jit(layer) if c.layer_loop == "unrolled" else layer

        functions = {kind: layer_function(kind) for kind in dict.fromkeys(kinds)}
        run = [functions[kind] for kind in kinds]
        states = []

        def unrolled(x, indices):
            for i in indices:
                x = run[i](x, layers[i], i)
                states.append(x)
            return x

        # A scan repeats groups of `period` layers, whose kinds are static. The first layer is not in
        # them if it lacks a norm, and the last ones are not if they do not fill a group.
        period = c.global_every if c.local_window else 1
        first = int(not kinds[0].has_attention_norm)
        groups = (c.layers - first) // period if c.layer_loop == "scanned" else 0
        if groups == 0:
            x = unrolled(x, range(c.layers))
            return states if all_layers else [x]
        end = first + groups * period

        def scanned(x, items):
            outputs = []
            for offset, item in enumerate(items):
                x = run[first + offset](x, *item)
                outputs.append(x)
            return x, outputs if all_layers else None

        items = []
        for start in range(first, first + period):
            indices = range(start, end, period)
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[i] for i in indices))
            items.append((stacked, jnp.arange(c.layers)[start:end:period]))
        x = unrolled(x, range(first))
        carry_and_outputs: Any = jax.lax.scan(scanned, x, items)
        x, outputs = carry_and_outputs
        if all_layers:
            states += [state for group in zip(*map(list, outputs), strict=True) for state in group]
        x = unrolled(x, range(end, c.layers))
        return states if all_layers else [x]

    def query_key_value(
        self, x: Float[Array, "B T D"], layout: Layout, i: int
    ) -> tuple[Float[Array, "B T N K"], ...]:
        """Return the queries, keys and values of layer i (from 0), given its input."""
        params = self.variables["params"][f"layer_{i}"]["attention"]
        attention = Attention(self.config, layer_kinds(self.config)[i], parent=None)
        context = attention_context(self.config, layout)
        projections: Any = attention.apply({"params": params}, x, context, method="query_key_value")
        return projections

    def probabilities(
        self, states: list[Float[Array, "B T D"]], layout: Layout
    ) -> Float[Array, "L B N T T"]:
        """Return the attention probabilities of every layer, given each layer's input."""
        c, params = self.config, self.variables["params"]
        context = attention_context(c, layout)
        maps: list[Any] = [
            Attention(c, kind, parent=None).apply(
                {"params": params[f"layer_{i}"]["attention"]}, x, context, method="probabilities"
            )
            for i, (kind, x) in enumerate(zip(layer_kinds(c), states, strict=True))
        ]
        return jnp.stack(maps)


class Generator(nn.Module):
    """ELECTRA's generator, without its embeddings: projection, encoder and masked-LM head."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T E"],
        layout: Layout,
        positions: Int[Array, "B P"],
        table: Float[Array, "V E"],
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B P V"]:
        c = self.config
        if c.embedding_width != c.hidden:
            x = dense(c, c.hidden, "project")(x)
        hidden = Encoder(c, name="encoder")(x, layout, key)[-1]
        return MaskedLM(c, name="masked_lm")(one_hot_gather(hidden, positions), table)


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
            self.next_sentence = dense(c, 2, is_output=True)
        if c.span_boundary:
            self.span_boundary = SpanBoundary(c)
        if c.teacher_hidden:
            self.teacher_projection = dense(c, c.teacher_hidden)
        if c.replaced_token:
            self.replaced_token = ReplacedToken(c)
        if c.generator_hidden:
            self.generator = Generator(c.generator())
        if c.features.startswith("weighted-"):
            self.features = ScalarMix()
        if c.lstm_layers:
            self.lstm = BiLSTM(c)
        if c.has_head_transform:
            self.head = HeadTransform(c)
        if c.head:
            self.classifier = dense(c, len(c.labels), is_output=True)

    def encode(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None = None
    ) -> Float[Array, "B T D"]:
        """Return the last layer's hidden states; dropout is applied if `key` is given."""
        x = self.embeddings(tokens, layout, fold_in(key, 0))
        return self.encoder(x, layout, fold_in(key, 1))[-1]

    def hidden_states(
        self, tokens: Int[Array, "B T"], layout: Layout
    ) -> list[Float[Array, "B T D"]]:
        """Return L + 1 hidden states, the embeddings and each layer's output, without dropout."""
        x = self.embeddings(tokens, layout, None)
        return [x, *self.encoder(x, layout, None, all_layers=True)]

    def attention_probabilities(
        self, tokens: Int[Array, "B T"], layout: Layout
    ) -> Float[Array, "L B N T T"]:
        """Return attention from each token (axis 4) to each (axis 5), float32, without dropout."""
        states = self.hidden_states(tokens, layout)
        return self.encoder.probabilities(states[:-1], layout)

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
        """Apply dense + activation to every sequence's [CLS], or to the tokens at indices `cls`."""
        return self._pool(one_hot_gather(hidden, cls))

    def _pool(self, hidden: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        activation = self.config.pooler_activation
        function = jnp.tanh if activation == "tanh" else ACTIVATIONS[activation]
        return function(self.pooler(hidden))

    def replaced_token_logits(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None = None
    ) -> Float[Array, "B T"]:
        """Return the logit of each token that it was replaced (`ElectraForPreTraining`)."""
        return self.replaced_token(self.encode(tokens, layout, key))

    def generator_logits(
        self,
        tokens: Int[Array, "B T"],
        layout: Layout,
        positions: Int[Array, "B P"],
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B P V"]:
        """Return the masked-LM logits of the generator."""
        x = self.embeddings.sum(tokens, layout, fold_in(key, 0))
        table = self.embeddings.word.embedding
        return self.generator(x, layout, positions, table, fold_in(key, 1))

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
        positions: Int[Array, "B P"] | None,
        key: Key[Array, ""] | None = None,
        relation_layer: int = 0,
    ) -> tuple[Any, list[Float[Array, "B T n"]], tuple[Float[Array, "B T N K"], ...]]:
        """Return what a student and its teacher are compared by.

        Args:
            tokens, layout, key: as for a call.
            positions: of the masked-LM logits; None for a fine-tuned model.
            relation_layer: 1 to L, a layer whose queries, keys and values are returned; 0 for none.

        Returns:
            The pretraining logits, as of a call, or those of `classify`; L + 1 hidden states, after the
            projection to the teacher's size if the model has it; the queries, keys and values of the layer.
        """
        encoder_key = fold_in(key, 0) if positions is None else key
        x = self.embeddings(tokens, layout, fold_in(encoder_key, 0))
        states = [x, *self.encoder(x, layout, fold_in(encoder_key, 1), all_layers=True)]
        if positions is None:
            features = self.config.features
            hidden = self.frozen_features(tokens, layout) if features else states[-1]
            logits = self._classify(hidden, layout, key)
        else:
            logits = self._heads(states[-1], layout, positions)
        relations = ()
        if relation_layer:
            below = states[relation_layer - 1]
            relations = self.encoder.query_key_value(below, layout, relation_layer - 1)
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
            next_sentence_logits = self.next_sentence(self.pool(hidden, layout.cls))
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
        return self._classify(hidden, layout, key)

    def _classify(self, hidden, layout, key):
        c = self.config
        if c.lstm_layers:
            hidden = self.lstm(hidden, layout.segment_ids)
        if HEADS[c.head].pooled:
            if c.head_pooling == "mean":
                hidden = pool_tokens(hidden, layout, "mean").astype(hidden.dtype)
            else:
                hidden = one_hot_gather(hidden, last_tokens(layout) if c.causal else layout.cls)
            if c.head_layer == "pooler" and not (c.features or c.lstm_layers):
                hidden = self._pool(hidden)
        if c.has_head_transform:
            hidden = self.head(hidden)
        hidden = dropout(hidden, c.dropout, fold_in(key, 1))
        return self.classifier(hidden)

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
        if c.replaced_token:
            self.replaced_token(hidden)
        if c.generator_hidden:
            self.generator_logits(tokens, layout, positions)
        if c.features:
            states = [states[i] for i in c.feature_layers]
            is_weighted = c.features.startswith("weighted-")
            hidden = self.features(states) if is_weighted else jnp.concatenate(states, -1)
        if c.lstm_layers:
            hidden = self.lstm(hidden, layout.segment_ids)
        if c.has_head_transform:
            self.head(hidden)
        if c.head:
            self.classifier(hidden)


# Jitted `_draw_params` by model config; configs are mutable, hence the copy and the key.
_INITIALIZERS: dict[str, Callable[[Key[Array, ""]], Params]] = {}


def init_params(config: ModelConfig, key: Key[Array, ""]) -> Params:
    """Return random parameters of the whole model, bit for bit those of `Bert(config).init`.

    With `config.base_hidden` they are scaled by `mup.scales`.
    """
    # JAX reuses the trace of a jitted function: a run first needs the shapes, then the values.
    name = repr(config)
    if name not in _INITIALIZERS:
        _INITIALIZERS[name] = jax.jit(
            functools.partial(_draw_params, copy.deepcopy(config)), inline=True
        )
    return _INITIALIZERS[name](key)


def _draw_params(config: ModelConfig, key: Key[Array, ""]) -> Params:
    """Draw the parameters.

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
    return unflatten({k: mup.scales(config, k)[0] * x for k, x in flatten(params).items()})


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
