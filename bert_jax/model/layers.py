"""Building blocks of the model: dense layers, norms, activations, initializers."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from bert_jax.config.schema import LoraConfig, ModelConfig
from bert_jax.model.dropout import dropout
from bert_jax.runtime import device, sharding

# Checkpoint name of the dense layers' outputs, for `jax.checkpoint` policies.
DENSE = "dense"


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
    "silu": _in_float32(jax.nn.silu),
}


def one_hot_gather(
    table: Float[Array, "... n D"], index: Int[Array, "... m"]
) -> Float[Array, "... m D"]:
    """Gather rows of a small table by multiplying with a one-hot matrix; exact in every dtype.

    The gradient is a matrix product too. The gradient of indexing is a scatter-add, which GPUs
    serialize where many indices are equal, in a nondeterministic order.
    """
    # By default, accelerators round the float32 operands of a matrix product.
    precision = jax.lax.Precision.HIGHEST if table.dtype == jnp.float32 else None
    with jax.named_scope("select"):
        one_hot = jax.nn.one_hot(index, table.shape[-2], dtype=table.dtype)
        return jnp.einsum("...mn,...nd->...md", one_hot, table, precision=precision)


def gather_rows(table: Float[Array, "V D"], index: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Gather rows of a large table.

    The gradient is a scatter-add, whose order of additions is not fixed on a GPU. With deterministic
    kernels XLA expands it into a sort of all B·T·D numbers. There, this function sorts only the indices
    and adds the rows of equal ones in a tree of log2(B·T) levels.
    """
    take = _take_in_order if device.has_deterministic_kernels() else _take
    return take(table, index)


def _take(table: Float[Array, "V D"], index: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    return jnp.take(table, index, axis=0)


def _take_backward(
    saved: tuple[Float[Array, "V 0"], Int[Array, "B T"]], cotangent: Float[Array, "B T D"]
) -> tuple[Float[Array, "V D"], None]:
    empty, index = saved
    add = functools.partial(_sum_rows, size=len(empty))
    return sharding.sum_over_rows(add)(index, cotangent), None


_take_in_order = jax.custom_vjp(_take)
_take_in_order.defvjp(
    lambda table, index: (_take(table, index), (table[:, :0], index)), _take_backward
)


def _sum_rows(
    index: Int[Array, "B T"], rows: Float[Array, "B T D"], size: int
) -> Float[Array, "V D"]:
    """Return for each of the indices below `size` the sum of its rows, in a fixed order of additions."""
    index, rows = index.ravel(), rows.reshape(-1, rows.shape[-1])
    order = jnp.argsort(index)
    index, rows = index[order], rows[order]
    distance = 1
    while distance < len(index):  # then each row is the sum of those before it with its index
        earlier = jnp.pad(rows[:-distance], ((distance, 0), (0, 0)))
        is_same = index == jnp.pad(index[:-distance], (distance, 0), constant_values=-1)
        rows += jnp.where(is_same[:, None], earlier, 0)
        distance *= 2
    is_last = index != jnp.append(index[1:], -1)
    target = jnp.where(is_last, index, size + jnp.arange(len(index)))  # others are out of bounds
    zeros = jnp.zeros((size, rows.shape[1]), rows.dtype)
    return zeros.at[target].set(rows, mode="drop", unique_indices=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot_general(x: Array, kernel: Array, dimensions: Any) -> Array:
    """Contract the last axes of x with the first axes of the kernel, as a dense layer does.

    On other platforms than CPU, value and gradients are those of `jax.lax.dot_general`.
    """
    return jax.lax.dot_general(x, kernel, dimensions)


def _dot_general_forward(x, kernel, dimensions):
    return dot_general(x, kernel, dimensions), (x, kernel)


def _dot_general_backward(dimensions, residuals, grad):
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


dot_general.defvjp(_dot_general_forward, _dot_general_backward)


def padded_vocab_size(config: ModelConfig) -> int:
    """Return the vocabulary size rounded up to a multiple of `vocab_multiple`."""
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


# The axis of a parameter, by its path, that has an entry for each token of the vocabulary.
VOCABULARY_AXES = {
    "embeddings/word/embedding": 0,
    "masked_lm/bias": 0,
    "masked_lm/decoder": 1,
    "generator/masked_lm/bias": 0,
    "generator/masked_lm/decoder": 1,
    "span_boundary/bias": 0,
}


def change_vocabulary(
    path: str,
    value: Float[np.ndarray, "..."],
    old: ModelConfig,
    new: ModelConfig,
    change: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Float[np.ndarray, "..."]:
    """Return a parameter of a model with another vocabulary, or with another padding of it.

    Args:
        path: path of the parameter; those without an axis for the vocabulary are unchanged.
        value: its value.
        old, new: the models before and after.
        change: function of the entries on the first axis, without padding; None for the identity.
    """
    axis = VOCABULARY_AXES.get(path)
    if axis is None:
        return value
    entries = np.moveaxis(value, axis, 0)[: old.vocab_size]
    entries = change(entries) if change else entries
    padding = [(0, padded_vocab_size(new) - len(entries)), *[(0, 0)] * (entries.ndim - 1)]
    return np.ascontiguousarray(np.moveaxis(np.pad(entries, padding), 0, axis))


@dataclasses.dataclass
class InitConfig(ModelConfig):
    """A model config with a custom initializer, used by `init_params`.

    Attributes:
        draw: function (key, shape, dtype) -> array that replaces the truncated normal initializer.
    """

    draw: Callable | None = None


def initializer(config: ModelConfig) -> Callable:
    """Return the initializer of kernels and tables: a truncated normal (section A.2)."""
    draw = config.draw if isinstance(config, InitConfig) else None
    return draw or nn.initializers.truncated_normal(config.initializer_stddev)


def vocab_initializer(config: ModelConfig, axis: int) -> Callable:
    """Return `initializer` with zeros in the padding of the vocabulary axis.

    The other values do not depend on the amount of padding.
    """

    def initialize(key, shape, dtype):
        excess = padded_vocab_size(config) - config.vocab_size
        unpadded_shape = tuple(n - excess * (i == axis) for i, n in enumerate(shape))
        padding = [(0, excess * (i == axis)) for i in range(len(shape))]
        return jnp.pad(initializer(config)(key, unpadded_shape, dtype), padding)

    return initialize


class LoraDense(nn.Module):
    """A dense layer with a low-rank adapter (`config.LoraConfig`), which adds 0 at initialization.

    Its parameters are those of the layer, `lora_a` with the kernel's input axes and the rank, and
    `lora_b` with the rank and the kernel's output axes. Dropout applies if `apply` gets a key called
    "lora".
    """

    config: ModelConfig
    layer: nn.Module

    def setup(self):
        nn.share_scope(self, self.layer)

    @nn.compact
    def __call__(self, inputs: Float[Array, "..."]) -> Float[Array, "..."]:
        c, lora, layer = self.config, self.config.lora, self.layer
        assert isinstance(layer, nn.DenseGeneral)
        out = layer(inputs)  # first, as keys of initializers depend on the order of parameters
        axes = (layer.axis,) if isinstance(layer.axis, int) else tuple(layer.axis)
        width = tuple(inputs.shape[axis] for axis in axes)
        features = layer.features if isinstance(layer.features, tuple) else (layer.features,)

        def draw(key, shape, dtype=jnp.float32):
            flat = (math.prod(width), lora.rank)  # kernels are drawn with two axes too
            return initializer(c)(key, flat, dtype).reshape(shape)

        a = self.param("lora_a", draw, (*width, lora.rank))
        b = self.param("lora_b", nn.initializers.zeros, (lora.rank, *features))
        key = self.make_rng("lora") if self.has_rng("lora") else None
        x = dropout(inputs, lora.dropout, key)
        x, a, b = (jnp.asarray(value, c.dtype) for value in (x, a, b))
        last = tuple(range(x.ndim - len(axes), x.ndim))
        low: Any = dot_general(x, a, ((last, tuple(range(len(axes)))), ((), ())))
        update: Any = dot_general(low, b, (((low.ndim - 1,), (0,)), ((), ())))
        return out + update * (lora.alpha / lora.rank)


def merge_lora(params: Mapping[str, Any], lora: LoraConfig) -> dict[str, Any]:
    """Return parameters without adapters, which are added to the kernels: W + alpha / rank * A B."""
    merged = {
        name: merge_lora(value, lora) if isinstance(value, Mapping) else value
        for name, value in params.items()
        if name not in ("lora_a", "lora_b")
    }
    if "lora_a" in params:
        precision = jax.lax.Precision.HIGHEST
        product = jnp.tensordot(params["lora_a"], params["lora_b"], 1, precision=precision)
        merged["kernel"] = params["kernel"] + product * (lora.alpha / lora.rank)
    return merged


def dense(
    config: ModelConfig,
    features: Any,
    name: str | None = None,
    axis: Any = -1,
    target: str = "",
    is_output: bool = False,
) -> nn.Module:
    """Return a dense layer whose output is saved by the "dots" rematerialization policy.

    It has a bias if `config.bias` or `is_output` is true, and an adapter if `target` is one of
    `config.lora.targets`. An output layer computes its few logits in float32, as many of them would
    be equal in bfloat16.
    """
    has_adapter = config.lora.rank > 0 and target in config.lora.targets
    # The layer in a `LoraDense` gets its parent and name there.
    naming: dict[str, Any] = {"parent": None} if has_adapter else {"name": name}
    layer = nn.DenseGeneral(
        features,
        axis,
        use_bias=config.bias or is_output,
        dtype="float32" if is_output else config.dtype,
        kernel_init=initializer(config),
        dot_general_cls=lambda: (
            lambda x, kernel, dimensions, precision: checkpoint_name(
                dot_general(x, kernel, dimensions), DENSE
            )
        ),
        **naming,
    )
    return LoraDense(config, layer, name=name) if has_adapter else layer


def norm_layer(config: ModelConfig, name: str | None = None) -> nn.Module:
    """Return the norm that `config.norm` selects, over the last axis."""
    if config.norm == "rms_norm":
        return nn.RMSNorm(config.layer_norm_epsilon, dtype=config.dtype, name=name)
    # The fast variance E[x²] - E[x]² suffers from cancellation in float32 and would break parity
    # with the reference implementations.
    return nn.LayerNorm(
        config.layer_norm_epsilon,
        dtype=config.dtype,
        use_bias=config.norm == "layer_norm",
        use_fast_variance=False,
        name=name,
    )


def fold_in(key: Key[Array, ""] | None, data: Any) -> Key[Array, ""] | None:
    """Fold data into a key; None, which disables dropout, stays None."""
    return None if key is None else jax.random.fold_in(key, data)
