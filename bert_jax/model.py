"""BERT in Flax Linen: embeddings, encoder, pooler and heads, without losses or data.

Shapes, throughout the package: B rows, T tokens per row, S sequences per row, P predictions per
row, N heads, K head size, D hidden, F feed-forward, L layers, V vocabulary (padded), C classes.

Parameter paths (`encoder/layer_3/attention/query/kernel`) are public: weight-decay masks, sharding
and checkpoint conversion match on them.
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

# Checkpoint name of the dense layers' outputs, for `jax.checkpoint` policies.
_DENSE = "dense"
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(_DENSE),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def _in_float32(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Wrap an elementwise function to compute in float32 and round its result once.

    The backward pass recomputes the derivative from the bfloat16 input. Automatic differentiation
    would store float32 intermediates, which take twice the memory.
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
    # erf compiles to less code on CPU than the erfc of `jax.nn.gelu`.
    return 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))


# In bfloat16, `1 + erf(x)` and `1 + tanh(x)` lose a digit to cancellation for negative x.
ACTIVATIONS = {
    "gelu": _in_float32(_gelu),
    "gelu_tanh": _in_float32(functools.partial(jax.nn.gelu, approximate=True)),
    "relu": jax.nn.relu,
}


def select(table: Float[Array, "... n D"], index: Int[Array, "... m"]) -> Float[Array, "... m D"]:
    """Gather rows of a small table by multiplying with a one-hot matrix; exact in every dtype.

    The gradient is a matrix product too. The gradient of indexing is a scatter-add, which GPUs
    serialize where many indices are equal, in a nondeterministic order.
    """
    # By default, accelerators round the float32 operands of a matrix product.
    precision = jax.lax.Precision.HIGHEST if table.dtype == jnp.float32 else None
    with jax.named_scope("select"):
        one_hot = jax.nn.one_hot(index, table.shape[-2], dtype=table.dtype)
        return jnp.einsum("...mn,...nd->...md", one_hot, table, precision=precision)


def padded_vocab_size(config: ModelConfig) -> int:
    """Return the vocabulary size rounded up to a multiple of `vocab_multiple`."""
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


@dataclasses.dataclass
class _InitConfig(ModelConfig):
    """A model config with a custom initializer, used by `init_params`.

    Attributes:
        draw: function (key, shape, dtype) -> array that replaces the truncated normal initializer.
    """

    draw: Callable | None = None


def _initializer(config: ModelConfig) -> Callable:
    draw = config.draw if isinstance(config, _InitConfig) else None
    return draw or nn.initializers.truncated_normal(config.initializer_stddev)


def _vocab_initializer(config: ModelConfig, axis: int) -> Callable:
    """Return `_initializer` with zeros in the padding of the vocabulary axis.

    The other values do not depend on the amount of padding.
    """

    def initialize(key, shape, dtype):
        excess = padded_vocab_size(config) - config.vocab_size
        unpadded_shape = tuple(n - excess * (i == axis) for i, n in enumerate(shape))
        padding = [(0, excess * (i == axis)) for i in range(len(shape))]
        return jnp.pad(_initializer(config)(key, unpadded_shape, dtype), padding)

    return initialize


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dense_product(x: Array, kernel: Array, dimensions: Any) -> Array:
    """Contract the last axes of x with the first axes of the kernel, as a dense layer does."""
    return jax.lax.dot_general(x, kernel, dimensions)


def _dense_product_forward(x, kernel, dimensions):
    return _dense_product(x, kernel, dimensions), (x, kernel)


def _dense_product_backward(dimensions, residuals, grad):
    (x, kernel), num_inputs = residuals, len(dimensions[0][0])
    batch_axes, num_outputs = range(x.ndim - num_inputs), kernel.ndim - num_inputs

    def kernel_grad(x, grad):
        return jax.lax.dot_general(x, grad, ((batch_axes, batch_axes), ((), ())))

    def transposed_kernel_grad(x, grad):
        # XLA's CPU backend copies the first operand to transpose it, so put the narrower one first.
        # Without the barrier XLA swaps the operands back and finds no fast matrix product.
        transposed = jax.lax.optimization_barrier(kernel_grad(grad, x))
        return jnp.moveaxis(transposed, range(num_outputs), range(-num_outputs, 0))

    is_wide = math.prod(kernel.shape[:num_inputs]) > math.prod(kernel.shape[num_inputs:])
    cpu_kernel_grad = transposed_kernel_grad if is_wide else kernel_grad
    axes = (range(len(batch_axes), grad.ndim), range(num_inputs, kernel.ndim))
    return (
        jax.lax.dot_general(grad, kernel, (axes, ((), ()))),
        jax.lax.platform_dependent(x, grad, cpu=cpu_kernel_grad, default=kernel_grad),
    )


_dense_product.defvjp(_dense_product_forward, _dense_product_backward)


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
                _dense_product(x, kernel, dimensions), _DENSE
            )
        ),
        name=name,
    )


def _norm(config: ModelConfig, name: str | None = None) -> nn.Module:
    # The fast variance E[x²] - E[x]² suffers from cancellation in float32 and would break parity
    # with the reference implementations.
    return nn.LayerNorm(
        config.layer_norm_epsilon, dtype=config.dtype, use_fast_variance=False, name=name
    )


def _fold(key: Key[Array, ""] | None, data: Any) -> Key[Array, ""] | None:
    return None if key is None else jax.random.fold_in(key, data)


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, then LayerNorm and dropout (section 3.2)."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.word = nn.Embed(
            padded_vocab_size(c), c.hidden, embedding_init=_vocab_initializer(c, 0)
        )
        table = functools.partial(nn.Embed, features=c.hidden, embedding_init=_initializer(c))
        self.position = table(c.positions)
        if c.segments:
            self.segment = table(c.segments)
        self.norm = _norm(c)

    def __call__(
        self, tokens: Int[Array, "B T"], layout: Layout, key: Key[Array, ""] | None
    ) -> Float[Array, "B T D"]:
        c = self.config
        # Gather words in float32: the gradient is a scatter-add, and GPUs have no fast atomic
        # addition in bfloat16. The two small tables avoid scatters altogether.
        x = self.word(tokens)
        positions = jnp.asarray(self.position.embedding[: tokens.shape[1]], c.dtype)
        x += select(positions, layout.position_ids).astype(x.dtype)
        if c.segments:
            segments = jnp.asarray(self.segment.embedding)
            if c.segments == 2:
                x += jnp.where(layout.token_type_ids[..., None] == 0, *segments)
            else:
                x += select(segments, layout.token_type_ids)
        return dropout(self.norm(x.astype(c.dtype)), c.dropout, key)


class Attention(nn.Module):
    """Multi-head self-attention with output projection, residual connection and LayerNorm."""

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
        segment_ids: Int[Array, "B T"],
        key: Key[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        c = self.config
        q, k, v = self.query(x), self.key(x), self.value(x)
        # Initialization traces one token, where only the shapes of parameters matter.
        implementation = "xla" if self.is_initializing() else c.attention
        settings = (segment_ids, c.attention_dropout, _fold(key, 0), implementation)
        with jax.named_scope("attend"):
            y = attention(q, k, v, *settings, causal=c.causal)
        return self.norm(x + dropout(self.output(y), c.dropout, _fold(key, 1)))

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
        y = ACTIVATIONS[c.activation](_dense(c, c.feed_forward, "intermediate")(x))
        y = _dense(c, c.hidden, "output")(y)
        return _norm(c, "norm")(x + dropout(y, c.dropout, key))


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
        x = Attention(self.config, name="attention")(x, segment_ids, _fold(key, 0))
        return FeedForward(self.config, name="feed_forward")(x, _fold(key, 1))


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
            states[-1] = _norm(c, "norm")(states[-1])
        return states

    def _run(self, x, segment_ids, key, all_layers):
        # Parameters are stored per layer and passed to a pure function, so checkpoints, LAMB's
        # norms and dropout bits do not depend on `layer_loop`.
        c = self.config
        layers = [self.variables["params"][f"layer_{i}"] for i in range(c.layers)]

        def layer(x, params, i):
            return Layer(c, parent=None).apply({"params": params}, x, segment_ids, _fold(key, i))

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
        return list(states) if all_layers else [x]

    def probabilities(
        self, states: list[Float[Array, "B T D"]], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "L B N T T"]:
        """Return the attention probabilities of every layer, given each layer's input."""
        attention, params = Attention(self.config, parent=None), self.variables["params"]
        return jnp.stack(
            [
                attention.apply(
                    {"params": params[f"layer_{i}"]["attention"]},
                    x,
                    segment_ids,
                    method="probabilities",
                )
                for i, x in enumerate(states)
            ]
        )


@jax.custom_vjp
def _vocab_logits(x: Float[Array, "B P D"], kernel: Float[Array, "D V"]) -> Float[Array, "B P V"]:
    """Return logits over the vocabulary in float32, as a softmax over so many entries needs.

    The backward pass rounds the cotangent to the dtype of x: float32 matrix products are several
    times slower on accelerators, and the other operands have no more precision.
    """
    return jnp.einsum("bpd,dv->bpv", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


def _vocab_logits_forward(x, kernel):
    return _vocab_logits(x, kernel), (x, kernel)


def _vocab_logits_backward(residuals, cotangent):
    x, kernel = residuals
    cotangent = cotangent.astype(x.dtype)
    # Flatten to one contracted axis: XLA's CPU backend cannot contract two in bfloat16.
    flat_x, flat_cotangent = (y.reshape(-1, y.shape[-1]) for y in (x, cotangent))
    return (
        jnp.einsum("bpv,dv->bpd", cotangent, kernel.astype(x.dtype)),
        jnp.einsum("nd,nv->dv", flat_x, flat_cotangent, preferred_element_type=kernel.dtype),
    )


_vocab_logits.defvjp(_vocab_logits_forward, _vocab_logits_backward)


class MaskedLM(nn.Module):
    """Masked-LM head: vocabulary logits for gathered hidden states (section 3.1, task 1)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B P D"], table: Float[Array, "V D"]
    ) -> Float[Array, "B P V"]:
        c, vocab = self.config, padded_vocab_size(self.config)
        if c.transform:
            x = ACTIVATIONS[c.activation](_dense(c, c.hidden, "transform")(x))
            x = _norm(c, "norm")(x)
        if c.tied_decoder:
            kernel = table.T
        else:
            kernel = self.param("decoder", _vocab_initializer(c, 1), (c.hidden, vocab), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (vocab,), jnp.float32)
        logits = _vocab_logits(x, kernel) + bias
        if vocab == c.vocab_size:
            return logits
        return jnp.where(jnp.arange(vocab) < c.vocab_size, logits, jnp.finfo(jnp.float32).min)


class Mixture(nn.Module):
    """Learned weighted sum of layers, initially their mean (Peters et al., ELMo, equation 1)."""

    @nn.compact
    def __call__(self, states: list[Float[Array, "B T D"]]) -> Float[Array, "B T D"]:
        weights = self.param("weights", nn.initializers.zeros, (len(states),), jnp.float32)
        scale = self.param("scale", nn.initializers.ones, (), jnp.float32)
        weights = scale * jax.nn.softmax(weights)
        return sum(weight * state for weight, state in zip(weights, states, strict=True))


class Lstm(nn.Module):
    """Unidirectional LSTM of size `hidden` that resets its state where `begins` is true.

    Gates are in PyTorch's order: input, forget, cell, output. The forget gate's bias is initialized
    to 1 (Jozefowicz et al. 2015) and kernels to U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
    """

    config: ModelConfig
    reverse: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T n"], begins: Bool[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        c, d = self.config, self.config.hidden
        uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

        def forget_bias(key, shape, dtype):
            return jnp.zeros(shape, dtype).at[d : 2 * d].set(1)

        # Project the inputs of all tokens at once; only the recurrent product is sequential.
        project = nn.Dense(
            4 * d, dtype=c.dtype, kernel_init=uniform, bias_init=forget_bias, name="input"
        )
        projected = project(x).astype(jnp.float32).swapaxes(0, 1)
        recurrent = self.param("recurrent", uniform, (d, 4 * d), jnp.float32).astype(c.dtype)

        def step(state, item):
            # Keep the state in float32: every token adds to it.
            projected, begins = item
            hidden, cell = (jnp.where(begins[:, None], 0, part) for part in state)
            gates = projected + jnp.einsum(
                "bd,dg->bg", hidden.astype(c.dtype), recurrent, preferred_element_type=jnp.float32
            )
            input_gate, forget_gate, candidate, output_gate = jnp.split(gates, 4, axis=1)
            cell = jax.nn.sigmoid(forget_gate) * cell + jax.nn.sigmoid(input_gate) * jnp.tanh(
                candidate
            )
            hidden = jax.nn.sigmoid(output_gate) * jnp.tanh(cell)
            return (hidden, cell), hidden

        zeros = jnp.zeros((len(x), d), jnp.float32)
        _, hidden = jax.lax.scan(step, (zeros, zeros), (projected, begins.T), reverse=self.reverse)
        return hidden.swapaxes(0, 1).astype(x.dtype)


class BiLstmLayer(nn.Module):
    """Bidirectional LSTM layer: forward and backward outputs concatenated, per sequence."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T n"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T m"]:
        boundary = segment_ids[:, 1:] != segment_ids[:, :-1]
        is_first = jnp.pad(boundary, ((0, 0), (1, 0)), constant_values=True)
        is_last = jnp.pad(boundary, ((0, 0), (0, 1)), constant_values=True)
        forward = Lstm(self.config, reverse=False, name="forward")(x, is_first)
        backward = Lstm(self.config, reverse=True, name="backward")(x, is_last)
        return jnp.concatenate([forward, backward], -1)


class BiLstm(nn.Module):
    """Stack of bidirectional LSTM layers between encoder and head (sections 5.1 and 5.3)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T n"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T m"]:
        for i in range(self.config.lstm_layers):
            x = BiLstmLayer(self.config, name=f"layer_{i}")(x, segment_ids)
        return x


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
        """Return the last layer's hidden states; dropout is applied if `key` is given."""
        x = self.embeddings(tokens, layout, _fold(key, 0))
        return self.encoder(x, layout.segment_ids, _fold(key, 1))[-1]

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
        return jnp.tanh(self.pooler(select(hidden, cls)))

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
        hidden = self.encode(tokens, layout, key)
        masked_lm_logits = next_sentence_logits = None
        if self.config.masked_lm:
            masked_lm_logits = self.masked_lm(
                select(hidden, positions), self.embeddings.word.embedding
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
            hidden = self.encode(tokens, layout, _fold(key, 0))
        if c.lstm_layers:
            hidden = self.lstm(hidden, layout.segment_ids)
        if c.head in POOLED_HEADS:
            indices = last_tokens(layout) if c.causal else layout.cls
            use_pooler = not (c.features or c.lstm_layers)
            hidden = self.pool(hidden, indices) if use_pooler else select(hidden, indices)
        hidden = dropout(hidden, c.dropout, _fold(key, 1))
        return self.classifier(hidden).astype(jnp.float32)

    def touch(self, tokens: Int[Array, "B T"], layout: Layout, positions: Int[Array, "B P"]):
        """Use every parameter once, so that `init` creates it."""
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
            is_weighted = c.features.startswith("weighted-")
            hidden = self.features(states) if is_weighted else jnp.concatenate(states, -1)
        if c.lstm_layers:
            hidden = self.lstm(hidden, layout.segment_ids)
        if c.head:
            self.classifier(hidden)


def init_params(config: ModelConfig, key: Key[Array, ""]) -> Params:
    """Return random parameters of the whole model, bit for bit those of `Bert(config).init`.

    Kernels of one shape are drawn together: XLA compiles a separate generator per parameter for
    longer than the training step.
    """
    ones = jnp.ones((1, 1), jnp.int32)
    inputs = (ones, layout(ones, ones, 1), ones - 1)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)}

    def init(key: Key[Array, ""], draw: Callable) -> Params:
        return Bert(_InitConfig(**fields, draw=draw)).init(key, *inputs, method=Bert.touch)[
            "params"
        ]

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
            return _initializer(config)(jax.random.fold_in(key, path_hash), shape, dtype)

        path_hashes = np.array([hashes[i] for i in indices], np.uint32)
        values.update(zip(indices, jax.vmap(draw)(path_hashes), strict=True))
    counter = iter(range(len(shapes_and_dtypes)))
    return init(key, lambda *_: values[next(counter)])


def shapes(config: ModelConfig) -> Params:
    """Return the parameters' shapes as a tree of `jax.ShapeDtypeStruct`."""
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def last_tokens(layout: Layout) -> Int[Array, "B S"]:
    """Return the index of each sequence's last token; an unused slot gets a valid index."""
    slots = jnp.arange(layout.cls.shape[1])
    ends = jnp.sum(layout.segment_ids[:, None, :] <= slots[:, None], axis=2)
    return jnp.maximum(ends - 1, 0)


def parameter_count(params: Params, config: ModelConfig) -> int:
    """Return the number of scalars in `params`, without the padding of the vocabulary."""
    total = sum(x.size for x in jax.tree.leaves(params))
    num_tables = 1 if config.tied_decoder or not config.masked_lm else 2
    per_entry = config.hidden * num_tables + config.masked_lm  # the decoder's bias
    return total - (padded_vocab_size(config) - config.vocab_size) * per_entry


def flops_per_row(config: ModelConfig, tokens: int, sequences: int, predictions: int) -> float:
    """Return the FLOPs of a training step per row: three times the forward matrix products.

    A multiply-add counts as 2. Attention counts all T² pairs, as dense implementations compute
    them, for causal models too. Frozen layers that `config.features` uses are counted once, layers
    above them not at all. LSTMs are included, fine-tuned heads are not.
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
