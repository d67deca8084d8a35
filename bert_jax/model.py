"""BERT in Flax Linen: embeddings, encoder, pooler, heads. No loss, no data.

Shapes, here and everywhere: B rows, T tokens a row, S sequences a row, P predictions a row,
N heads, K head size, D hidden, F feed-forward, L layers, V vocabulary (as padded), C classes.

Parameter paths (`encoder/layer_3/attention/query/kernel`) are public: weight-decay masks, sharding
and conversion match on them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Key

from bert_jax.attention import attention, probabilities
from bert_jax.config import POOLED_HEADS, ModelConfig
from bert_jax.data.rows import Layout, layout
from bert_jax.dropout import dropout

Params = dict[str, Any]

# What the outputs of dense layers are called where memory is to be saved.
_DENSE = "dense"
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(_DENSE),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def _in_float32(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Compute an elementwise function of bfloat16 in float32 and round its result once.

    The derivative is recomputed from the bfloat16 input: automatic differentiation would keep
    float32 intermediates, twice the bytes.
    """

    @jax.custom_vjp
    def rounded(x):
        return function(x.astype(jnp.float32)).astype(x.dtype)

    def forward(x):
        return rounded(x), x

    def backward(x, cotangent):
        _, vjp = jax.vjp(function, x.astype(jnp.float32))
        return (vjp(cotangent.astype(jnp.float32))[0].astype(x.dtype),)

    rounded.defvjp(forward, backward)
    return lambda x: function(x) if x.dtype == jnp.float32 else rounded(x)


def _gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    # Written with erf, which compiles to less on CPU than `jax.nn.gelu`'s erfc.
    return 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))


# In bfloat16 `1 + erf(x)` and `1 + tanh(x)` cancel for negative x, which costs a digit.
ACTIVATIONS = {
    "gelu": _in_float32(_gelu),
    "gelu_tanh": _in_float32(functools.partial(jax.nn.gelu, approximate=True)),
    "relu": jax.nn.relu,
}


def select(table: Float[Array, "... n D"], index: Int[Array, "... m"]) -> Float[Array, "... m D"]:
    """Select rows of a small table by a product with a one-hot matrix; exact in every dtype.

    Its gradient is a product too. That of an index is a scatter-add, which GPUs do one element at a
    time where many indices are equal, and in no fixed order.
    """
    # By default accelerators round float32 operands of a product.
    precision = jax.lax.Precision.HIGHEST if table.dtype == jnp.float32 else None
    with jax.named_scope("select"):
        one_hot = jax.nn.one_hot(index, table.shape[-2], dtype=table.dtype)
        return jnp.einsum("...mn,...nd->...md", one_hot, table, precision=precision)


def padded_vocab(config: ModelConfig) -> int:
    """Rows of the embedding table: the vocabulary, up to a multiple of `vocab_multiple`."""
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


@dataclasses.dataclass
class _InitConfig(ModelConfig):
    """A model's config while its parameters are made.

    Attributes:
        draw: (key, shape, dtype) to an array, in place of the truncated normal distribution.
    """

    draw: Callable | None = None


def _initializer(config: ModelConfig) -> Callable:
    draw = config.draw if isinstance(config, _InitConfig) else None
    return draw or nn.initializers.truncated_normal(config.initializer_stddev)


def _vocab_initializer(config: ModelConfig, axis: int) -> Callable:
    """As `_initializer`, with the padding of the vocabulary axis zero and without effect on the rest."""

    def initialize(key, shape, dtype):
        missing = padded_vocab(config) - config.vocab_size
        real = tuple(n - missing * (i == axis) for i, n in enumerate(shape))
        padding = [(0, missing * (i == axis)) for i in range(len(shape))]
        return jnp.pad(_initializer(config)(key, real, dtype), padding)

    return initialize


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, kernel: Array, dimensions: Any) -> Array:
    """`jax.lax.dot_general` of a dense layer: the last axes of x by the first ones of the kernel."""
    return jax.lax.dot_general(x, kernel, dimensions)


def _product_forward(x, kernel, dimensions):
    return _product(x, kernel, dimensions), (x, kernel)


def _product_backward(dimensions, saved, gradient):
    (x, kernel), inputs = saved, len(dimensions[0][0])
    batch, outputs = range(x.ndim - inputs), kernel.ndim - inputs

    def plain(x, gradient):
        return jax.lax.dot_general(x, gradient, ((batch, batch), ((), ())))

    def narrow(x, gradient):
        # A CPU's products want their first matrix transposed here: the narrower one, by a copy. By
        # itself XLA would turn this round, transpose what is wide, and find no fast product for it.
        turned = jax.lax.optimization_barrier(plain(gradient, x))
        return jnp.moveaxis(turned, range(outputs), range(-outputs, 0))

    wide = math.prod(kernel.shape[:inputs]) > math.prod(kernel.shape[inputs:])
    fast = narrow if wide else plain
    axes = (range(len(batch), gradient.ndim), range(inputs, kernel.ndim))
    return (
        jax.lax.dot_general(gradient, kernel, (axes, ((), ()))),
        jax.lax.platform_dependent(x, gradient, cpu=fast, default=plain),
    )


_product.defvjp(_product_forward, _product_backward)


def _dense(
    config: ModelConfig, features: Any, name: str | None = None, axis: Any = -1
) -> nn.Module:
    return nn.DenseGeneral(
        features,
        axis,
        dtype=config.dtype,
        kernel_init=_initializer(config),
        dot_general_cls=lambda: (
            lambda x, kernel, dimensions, precision: checkpoint_name(
                _product(x, kernel, dimensions), _DENSE
            )
        ),
        name=name,
    )


def _norm(config: ModelConfig, name: str | None = None) -> nn.Module:
    # The fast variance E[x²] - E[x]² cancels in float32 and costs parity with the references.
    return nn.LayerNorm(
        config.layer_norm_epsilon, dtype=config.dtype, use_fast_variance=False, name=name
    )


def _fold(key: Key[Array, ""] | None, data: Any) -> Key[Array, ""] | None:
    return None if key is None else jax.random.fold_in(key, data)


class Embeddings(nn.Module):
    """Word, position and segment embeddings, summed, normalized, dropped out (section 3.2)."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.word = nn.Embed(padded_vocab(c), c.hidden, embedding_init=_vocab_initializer(c, 0))
        table = functools.partial(nn.Embed, features=c.hidden, embedding_init=_initializer(c))
        self.position = table(c.positions)
        if c.segments:
            self.segment = table(c.segments)
        self.norm = _norm(c)

    def __call__(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        c = self.config
        # Words are gathered in float32: the gradient is one scatter-add, and GPUs have no fast
        # atomic addition in bfloat16. The two small tables need none.
        x = self.word(tokens)
        positions = jnp.asarray(self.position.embedding[: tokens.shape[1]], c.dtype)
        x += select(positions, layout.position).astype(x.dtype)
        if c.segments:
            segments = jnp.asarray(self.segment.embedding)
            if c.segments == 2:
                x += jnp.where(layout.segment[..., None] == 0, *segments)
            else:
                x += select(segments, layout.segment)
        return dropout(self.norm(x.astype(c.dtype)), c.dropout, key)


class Attention(nn.Module):
    """Multi-head self-attention with its output projection, residual and LayerNorm."""

    config: ModelConfig

    def setup(self):
        c = self.config
        heads = (c.heads, c.hidden // c.heads)
        self.query, self.key, self.value = (_dense(c, heads) for _ in range(3))
        self.output = _dense(c, c.hidden, axis=(-2, -1))
        self.norm = _norm(c)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        sequence: Int[Array, "B T"],
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        c = self.config
        q, k, v = self.query(x), self.key(x), self.value(x)
        # Shapes of parameters are all that is wanted of the one token that a model begins with.
        how = "xla" if self.is_initializing() else c.attention
        settings = (sequence, c.attention_dropout, _fold(key, 0), how)
        with jax.named_scope("attend"):
            y = attention(q, k, v, *settings, causal=c.causal)
        return self.norm(x + dropout(self.output(y), c.dropout, _fold(key, 1)))

    def probabilities(
        self, x: Float[Array, "B T D"], sequence: Int[Array, "B T"]
    ) -> Float[Array, "B N T T"]:
        """`attention.probabilities` of hidden states, whatever `config.attention` trains with."""
        return probabilities(self.query(x), self.key(x), sequence, self.config.causal)


class FeedForward(nn.Module):
    """The position-wise network with its residual and LayerNorm."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        c = self.config
        y = ACTIVATIONS[c.activation](_dense(c, c.feed_forward, "intermediate")(x))
        y = _dense(c, c.hidden, "output")(y)
        return _norm(c, "norm")(x + dropout(y, c.dropout, key))


class Layer(nn.Module):
    """One Transformer layer, normalized after each residual as in BERT."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        sequence: Int[Array, "B T"],
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        x = Attention(self.config, name="attention")(x, sequence, _fold(key, 0))
        return FeedForward(self.config, name="feed_forward")(x, _fold(key, 1))


class Encoder(nn.Module):
    """The stack of layers, unrolled or scanned, with or without recomputation."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        sequence: Int[Array, "B T"],
        key: Key[Array, ""] | None,
        every: bool = False,
    ) -> list[Float[Array, "B T D"]]:
        """What comes out of the last layer alone, or of `every` layer from the first on."""
        c = self.config
        if self.is_initializing():
            states = []
            for i in range(c.layers):
                x = Layer(c, name=f"layer_{i}")(x, sequence, None)
                states.append(x)
        else:
            states = self._run(x, sequence, key, every)
        if c.final_norm:
            states[-1] = _norm(c, "norm")(states[-1])
        return states

    def _run(self, x, sequence, key, every):
        # The parameters always lie layer by layer, and from here on a layer is a function of them.
        # So a checkpoint, LAMB's norms and the dropout bits are the same however the stack is run.
        c = self.config
        layers = [self.variables["params"][f"layer_{i}"] for i in range(c.layers)]

        def layer(x, params, i):
            return Layer(c, parent=None).apply({"params": params}, x, sequence, _fold(key, i))

        if c.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[c.remat])
        if c.layer_loop == "unrolled":
            layer = jax.jit(layer)  # so that JAX traces one of them only; XLA sees them all
            states = []
            for i, params in enumerate(layers):
                x = layer(x, params, i)
                states.append(x)
            return states if every else [x]

        def scanned(x, item):
            x = layer(x, *item)
            return x, x if every else None

        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        x, states = jax.lax.scan(scanned, x, (stacked, jnp.arange(c.layers)))
        return list(states) if every else [x]

    def probabilities(
        self, states: list[Float[Array, "B T D"]], sequence: Int[Array, "B T"]
    ) -> Float[Array, "L B N T T"]:
        """How every layer's heads attend, from what goes into each layer."""
        attention, params = Attention(self.config, parent=None), self.variables["params"]
        return jnp.stack(
            [
                attention.apply(
                    {"params": params[f"layer_{i}"]["attention"]},
                    x,
                    sequence,
                    method="probabilities",
                )
                for i, x in enumerate(states)
            ]
        )


@jax.custom_vjp
def _vocab_product(x: Float[Array, "B P D"], kernel: Float[Array, "D V"]) -> Float[Array, "B P V"]:
    """Scores over the vocabulary in float32, which a softmax over so many needs.

    The backward pass rounds their cotangent to the dtype of x: products of float32 are several
    times slower on accelerators, and the other operands have no more digits.
    """
    return jnp.einsum("bpd,dv->bpv", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


def _vocab_product_forward(x, kernel):
    return _vocab_product(x, kernel), (x, kernel)


def _vocab_product_backward(saved, cotangent):
    x, kernel = saved
    cotangent = cotangent.astype(x.dtype)
    # One contracted axis instead of two: XLA's CPU backend lacks that product in bfloat16.
    flat_x, flat_cotangent = (y.reshape(-1, y.shape[-1]) for y in (x, cotangent))
    return (
        jnp.einsum("bpv,dv->bpd", cotangent, kernel.astype(x.dtype)),
        jnp.einsum("nd,nv->dv", flat_x, flat_cotangent, preferred_element_type=kernel.dtype),
    )


_vocab_product.defvjp(_vocab_product_forward, _vocab_product_backward)


class MaskedLM(nn.Module):
    """Scores over the vocabulary for gathered hidden states (section 3.1, task 1)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B P D"], table: Float[Array, "V D"]
    ) -> Float[Array, "B P V"]:
        c, vocab = self.config, padded_vocab(self.config)
        if c.transform:
            x = ACTIVATIONS[c.activation](_dense(c, c.hidden, "transform")(x))
            x = _norm(c, "norm")(x)
        if c.tied_decoder:
            kernel = table.T
        else:
            kernel = self.param("decoder", _vocab_initializer(c, 1), (c.hidden, vocab), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (vocab,), jnp.float32)
        logits = _vocab_product(x, kernel) + bias
        if vocab == c.vocab_size:
            return logits
        return jnp.where(jnp.arange(vocab) < c.vocab_size, logits, jnp.finfo(jnp.float32).min)


class Mixture(nn.Module):
    """A sum of layers with learned weights, at first their mean (Peters et al., ELMo, equation 1)."""

    @nn.compact
    def __call__(self, states: list[Float[Array, "B T D"]]) -> Float[Array, "B T D"]:
        weights = self.param("weights", nn.initializers.zeros, (len(states),), jnp.float32)
        scale = self.param("scale", nn.initializers.ones, (), jnp.float32)
        weights = scale * jax.nn.softmax(weights)
        return sum(weight * state for weight, state in zip(weights, states, strict=True))


class Lstm(nn.Module):
    """An LSTM in one direction, `hidden` wide, that begins anew where told to.

    Gates are in PyTorch's order: input, forget, cell, output. The forget gate's bias begins at 1, so
    that a cell keeps most of itself (Jozefowicz et al. 2015), and kernels uniform within one over the
    root of how many come in.
    """

    config: ModelConfig
    reverse: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T n"], begins: Bool[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        c, d = self.config, self.config.hidden
        uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

        def forget(key, shape, dtype):
            return jnp.zeros(shape, dtype).at[d : 2 * d].set(1)

        # What comes from below is one product for all tokens; only the rest waits for its turn.
        enters = nn.Dense(4 * d, dtype=c.dtype, kernel_init=uniform, bias_init=forget, name="input")
        below = enters(x).astype(jnp.float32).swapaxes(0, 1)
        recurrent = self.param("recurrent", uniform, (d, 4 * d), jnp.float32).astype(c.dtype)

        def step(state, item):
            # The state is float32: it is added to once a token.
            below, begins = item
            hidden, cell = (jnp.where(begins[:, None], 0, part) for part in state)
            gates = below + jnp.einsum(
                "bd,dg->bg", hidden.astype(c.dtype), recurrent, preferred_element_type=jnp.float32
            )
            enter, keep, new, leave = jnp.split(gates, 4, axis=1)
            cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(leave) * jnp.tanh(cell)
            return (hidden, cell), hidden

        zeros = jnp.zeros((len(x), d), jnp.float32)
        _, hidden = jax.lax.scan(step, (zeros, zeros), (below, begins.T), reverse=self.reverse)
        return hidden.swapaxes(0, 1).astype(x.dtype)


class BiLstmLayer(nn.Module):
    """Both directions, one after the other in the last axis, each sequence by itself."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T n"], sequence: Int[Array, "B T"]
    ) -> Float[Array, "B T m"]:
        edge = sequence[:, 1:] != sequence[:, :-1]
        first = jnp.pad(edge, ((0, 0), (1, 0)), constant_values=True)
        last = jnp.pad(edge, ((0, 0), (0, 1)), constant_values=True)
        forward = Lstm(self.config, reverse=False, name="forward")(x, first)
        backward = Lstm(self.config, reverse=True, name="backward")(x, last)
        return jnp.concatenate([forward, backward], -1)


class BiLstm(nn.Module):
    """The stack between the encoder and a fine-tuned head (sections 5.1 and 5.3)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T n"], sequence: Int[Array, "B T"]
    ) -> Float[Array, "B T m"]:
        for i in range(self.config.lstm_layers):
            x = BiLstmLayer(self.config, name=f"layer_{i}")(x, sequence)
        return x


class Bert(nn.Module):
    """The encoder with its pooler and whichever heads the config names."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.embeddings = Embeddings(c)
        self.encoder = Encoder(c)
        if c.masked_lm:
            self.masked_lm = MaskedLM(c)
        if c.has_pooler:
            self.pooler = _dense(c, c.hidden)
        if c.next_sentence:
            self.next_sentence = _dense(c, 2)
        if c.features.startswith("weighted-"):
            self.features = Mixture()
        if c.lstm_layers:
            self.lstm = BiLstm(c)
        if c.head:
            self.classifier = _dense(c, len(c.labels))

    def encode(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None = None
    ) -> Float[Array, "B T D"]:
        """The last layer's hidden states. A `key` switches dropout on."""
        x = self.embeddings(tokens, layout, _fold(key, 0))
        return self.encoder(x, layout.sequence, _fold(key, 1))[-1]

    def hidden_states(
        self, tokens: Int[Array, "B T"], layout: Layout
    ) -> list[Float[Array, "B T D"]]:
        """L + 1 of them: the embeddings, then what comes out of every layer. Without dropout."""
        x = self.embeddings(tokens, layout, None)
        return [x, *self.encoder(x, layout.sequence, None, every=True)]

    def attention_probabilities(
        self, tokens: Int[Array, "B T"], layout: Layout
    ) -> Float[Array, "L B N T T"]:
        """How much each token (fourth axis) attends to each (fifth), in float32, without dropout."""
        states = self.hidden_states(tokens, layout)
        return self.encoder.probabilities(states[:-1], layout.sequence)

    def frozen_features(self, tokens: Int[Array, "B T"], layout: Layout) -> Float[Array, "B T n"]:
        """The hidden states that `config.features` names (section 5.3), n is D or 4 D.

        Without dropout, and no gradient goes below them.
        """
        states = jax.lax.stop_gradient(self.hidden_states(tokens, layout))
        states = [states[i] for i in self.config.feature_layers]
        if self.config.features.startswith("weighted-"):
            return self.features(states)
        return jnp.concatenate(states, -1)

    def pool(self, hidden: Float[Array, "B T D"], cls: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """dense + tanh on every sequence's [CLS], or whichever token `cls` says."""
        return jnp.tanh(self.pooler(select(hidden, cls)))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        layout: Layout,
        positions: Int[Array, "B P"],
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B P V"] | None, Float[Array, "B S 2"] | None]:
        """The pretraining heads' logits: masked LM at `positions`, next sentence at every [CLS].

        Those of a head that the model does not have are None (`BertForPreTraining`).
        """
        hidden = self.encode(tokens, layout, key)
        words = sentences = None
        if self.config.masked_lm:
            words = self.masked_lm(select(hidden, positions), self.embeddings.word.embedding)
        if self.config.next_sentence:
            # Two columns; float32 costs nothing.
            sentences = self.next_sentence(self.pool(hidden, layout.cls)).astype(jnp.float32)
        return words, sentences

    def classify(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None = None
    ) -> Float[Array, "B n C"]:
        """The fine-tuned head's logits (section 4): n is S, pooled [CLS]s, or T, tokens.

        Which of the two follows from `config.head`; see there. The pooler's dense + tanh belongs to
        the encoder's last layer: of an LSTM or of features the token's vector is taken as it is.
        """
        c = self.config
        if c.features:
            hidden = self.frozen_features(tokens, layout)
        else:
            hidden = self.encode(tokens, layout, _fold(key, 0))
        if c.lstm_layers:
            hidden = self.lstm(hidden, layout.sequence)
        if c.head in POOLED_HEADS:
            place = last_tokens(layout) if c.causal else layout.cls
            on_encoder = not (c.features or c.lstm_layers)
            hidden = self.pool(hidden, place) if on_encoder else select(hidden, place)
        hidden = dropout(hidden, c.dropout, _fold(key, 1))
        return self.classifier(hidden).astype(jnp.float32)

    def touch(self, tokens: Int[Array, "B T"], layout: Layout, positions: Int[Array, "B P"]):
        """Use every parameter once, so that `init` makes it."""
        c = self.config
        states = self.hidden_states(tokens, layout)
        hidden = states[-1]
        if c.masked_lm:
            self.masked_lm(select(hidden, positions), self.embeddings.word.embedding)
        if c.has_pooler:
            pooled = self.pool(hidden, layout.cls)
            if c.next_sentence:
                self.next_sentence(pooled)
        if c.features:
            states = [states[i] for i in c.feature_layers]
            weighted = c.features.startswith("weighted-")
            hidden = self.features(states) if weighted else jnp.concatenate(states, -1)
        if c.lstm_layers:
            hidden = self.lstm(hidden, layout.sequence)
        if c.head:
            self.classifier(hidden)


def init_params(config: ModelConfig, key: Key[Array, ""]) -> Params:
    """Random parameters of the whole model: the same bits as `Bert(config).init` draws.

    Kernels of one shape are drawn together. A generator for each of them, and for each key, takes XLA
    longer to compile than the training step.
    """
    one = jnp.ones((1, 1), jnp.int32)
    inputs = (one, layout(one, one, 1), one - 1)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)}

    def init(key: Key[Array, ""], draw: Callable) -> Params:
        return Bert(_InitConfig(**fields, draw=draw)).init(key, *inputs, method=Bert.touch)[
            "params"
        ]

    kinds: list[tuple[tuple[int, ...], Any]] = []

    def keys(key: Key[Array, ""]) -> list[Key[Array, ""]]:
        drawn_with = []

        def record(own_key, shape, dtype):
            drawn_with.append(own_key)
            kinds.append((shape, dtype))
            return jnp.full(shape, jax.random.key_data(own_key)[0], dtype)

        init(key, record)
        return drawn_with

    # Flax folds a hash of the parameter's path into the key.
    traced = jax.make_jaxpr(keys)(key).jaxpr
    made_by = {variable: equation for equation in traced.eqns for variable in equation.outvars}
    hashes = [made_by[variable].invars[1].val for variable in traced.outvars]
    groups: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(i)
    drawn: dict[int, Array] = {}
    for (shape, dtype), members in groups.items():

        def draw(path_hash, shape=shape, dtype=dtype):
            return _initializer(config)(jax.random.fold_in(key, path_hash), shape, dtype)

        path_hashes = np.array([hashes[i] for i in members], np.uint32)
        drawn.update(zip(members, jax.vmap(draw)(path_hashes), strict=True))
    in_order = iter(range(len(kinds)))
    return init(key, lambda *_: drawn[next(in_order)])


def shapes(config: ModelConfig) -> Params:
    """Shapes of the whole model's parameters, as a tree of `jax.ShapeDtypeStruct`."""
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def last_tokens(layout: Layout) -> Int[Array, "B S"]:
    """Where each sequence ends; for an unused slot, some valid token."""
    slots = jnp.arange(layout.cls.shape[1])
    through = jnp.sum(layout.sequence[:, None, :] <= slots[:, None], axis=2)
    return jnp.maximum(through - 1, 0)


def parameter_count(params: Params, config: ModelConfig) -> int:
    """Scalars in `params`, the padding of the vocabulary not counted."""
    total = sum(x.size for x in jax.tree.leaves(params))
    tables = 1 if config.tied_decoder or not config.masked_lm else 2
    per_word = config.hidden * tables + config.masked_lm  # the decoder's bias
    return total - (padded_vocab(config) - config.vocab_size) * per_word


def flops_per_row(config: ModelConfig, tokens: int, sequences: int, predictions: int) -> float:
    """Floating-point operations of a training step on one row: three times the matrix products forward.

    Counts 2 a multiply-add. Attention counts all T² pairs, as dense implementations compute them, of
    a causal model too. Layers below `config.features` are counted once, those above not at all.
    Fine-tuned heads are left out, LSTMs are not.
    """
    d, f = config.hidden, config.feed_forward
    layer = tokens * (8 * d * d + 4 * d * f + 4 * tokens * d)
    head = predictions * 2 * d * (config.vocab_size + d * config.transform)
    pooler = sequences * 2 * d * (d + 2) if config.next_sentence else 0
    encoder, width = 3.0 * config.layers * layer, d
    if config.features:
        encoder = max(config.feature_layers) * layer
        width = 4 * d if config.features == "last4" else d
    lstm = 0
    for _ in range(config.lstm_layers):
        lstm += tokens * 16 * d * (width + d)  # two directions of four gates
        width = 2 * d
    return encoder + 3.0 * (head + pooler + lstm)
