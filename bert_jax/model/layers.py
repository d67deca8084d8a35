"""Building blocks of the model: dense layers, norms, activations, initializers."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from bert_jax.config.model import LoraConfig, ModelConfig
from bert_jax.model.dropout import dropout
from bert_jax.runtime import device, sharding

# Checkpoint name of the dense layers' outputs, for `jax.checkpoint` policies.
DENSE = "dense"


def _in_float32(
    function: Callable[[Array], Array], is_epilogue: bool = False
) -> Callable[[Array], Array]:
    """Wrap an elementwise function to compute in float32 and round its result once.

    The backward pass recomputes the derivative from the bfloat16 input. Automatic differentiation
    would store float32 intermediates, which take twice the memory. If `is_epilogue`, the forward pass on
    NVIDIA's GPUs is as XLA must find it to have a matrix product compute it; see `feed_forward_activation`.
    """

    def in_float32(x):
        return function(x.astype(jnp.float32)).astype(x.dtype)

    @jax.custom_vjp
    def rounded(x):
        if not is_epilogue:
            return in_float32(x)
        return jax.lax.platform_dependent(x, cuda=function, default=in_float32)

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


_gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
# In bfloat16, `1 + erf(x)` and `1 + tanh(x)` lose a digit to cancellation for negative x.
ACTIVATIONS = {
    "gelu": _in_float32(_gelu),
    "gelu_tanh": _in_float32(_gelu_tanh),
    "relu": jax.nn.relu,
    "silu": _in_float32(jax.nn.silu),
}
_GELU_EPILOGUE = _in_float32(_gelu_tanh, is_epilogue=True)


def feed_forward_activation(config: ModelConfig) -> Callable[[Array], Array]:
    """Return the activation after the first dense layer of the feed-forward network.

    With `config.kernels="pallas"` cuBLASLt computes "gelu_tanh" in the product, from its sum in float32.
    XLA has it do so for a GELU in the product's dtype, right after product and bias. Adapters, and the
    rounding by which JAX marks what "dots" saves, are in between.
    """
    has_adapter = config.lora.rank and "intermediate" in config.lora.targets
    is_epilogue = config.kernels == "pallas" and config.remat != "dots" and not has_adapter
    if is_epilogue and config.activation == "gelu_tanh":
        return _GELU_EPILOGUE
    return ACTIVATIONS[config.activation]


def one_hot_gather(
    table: Float[Array | np.ndarray, "... n D"], index: Int[Array, "... m"], dtype: Any = None
) -> Float[Array, "... m D"]:
    """Gather rows of a small table by multiplying with a one-hot matrix; exact in every dtype.

    The gradient is a matrix product too. The gradient of indexing is a scatter-add, which GPUs
    serialize where many indices are equal, in a nondeterministic order. Of a table with two axes, a
    parameter, the gradient is accumulated in the table's dtype, whatever that of the rows.
    """
    with jax.named_scope("select"):
        one_hot = jax.nn.one_hot(index, table.shape[-2], dtype=dtype or table.dtype)
        if table.ndim == 2 and one_hot.dtype != jnp.float32:
            return _affine(1, one_hot, table, None)
        # By default, accelerators round the float32 operands of a matrix product.
        precision = jax.lax.Precision.HIGHEST if one_hot.dtype == jnp.float32 else None
        return jnp.einsum("...mn,...nd->...md", one_hot, table, precision=precision)


def gather_rows(table: Float[Array, "V D"], index: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Gather rows of a large table.

    The gradient is a scatter-add, whose order of additions is not fixed on a GPU. With deterministic
    kernels XLA expands it into a sort of all B·T·D numbers. There, this function sorts only the indices
    and adds the rows of equal ones in blocks, as matrix products.
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


_BLOCK = 128  # rows that one product sums


def _sum_rows(
    index: Int[Array, "B T"], rows: Float[Array, "B T D"], size: int
) -> Float[Array, "V D"]:
    """Return for each of the indices below `size` the sum of its rows, in a fixed order of additions."""
    index, rows = index.ravel(), rows.reshape(-1, rows.shape[-1])
    order, padding = jnp.argsort(index), -len(index) % _BLOCK
    index = jnp.pad(index[order], (0, padding), constant_values=size)
    blocks = jnp.pad(rows[order], ((0, padding), (0, 0)))
    ids, blocks = index.reshape(-1, _BLOCK), blocks.reshape(-1, _BLOCK, rows.shape[-1])
    # Each row becomes the sum of those before it with its index: first in its block …
    is_same = jnp.tril(ids[:, :, None] == ids[:, None, :]).astype(rows.dtype)
    blocks = jnp.einsum("bij,bjd->bid", is_same, blocks, precision=jax.lax.Precision.HIGHEST)
    # … then of the blocks before, whose last rows are added in a tree.
    ends, end_ids, distance = blocks[:, -1], ids[:, -1], 1
    while distance < len(ends):
        before = jnp.pad(ends[:-distance], ((distance, 0), (0, 0)))
        before_ids = jnp.pad(end_ids[:-distance], (distance, 0), constant_values=-1)
        ends += jnp.where((end_ids == before_ids)[:, None], before, 0)
        distance *= 2
    before = jnp.pad(ends[:-1], ((1, 0), (0, 0)))
    before_ids = jnp.pad(end_ids[:-1], (1, 0), constant_values=-1)
    blocks += jnp.where((ids == before_ids[:, None])[..., None], before[:, None], 0)
    is_last = (index != jnp.append(index[1:], -1)) & (index < size)
    target = jnp.where(is_last, index, size + jnp.arange(len(index)))  # others are out of bounds
    zeros = jnp.zeros((size, rows.shape[1]), rows.dtype)
    sums = blocks.reshape(-1, rows.shape[1])
    return zeros.at[target].set(sums, mode="drop", unique_indices=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _affine(
    num_axes: int,
    x: Float[Array, "..."],
    kernel: Float[Array | np.ndarray, "..."],
    bias: Float[Array | np.ndarray, "..."] | None,
) -> Float[Array, "..."]:
    """Contract the last axes of x with the first axes of the kernel, and add the bias, in x's dtype.

    The gradients of kernel and bias are sums over all tokens, so they are accumulated and returned in
    the parameters' dtype.
    """
    axes = tuple(range(x.ndim - num_axes, x.ndim)), tuple(range(num_axes))
    y = jax.lax.dot_general(x, kernel.astype(x.dtype), (axes, ((), ())))
    return y if bias is None else y + bias.astype(x.dtype)


def _affine_forward(num_axes, x, kernel, bias):
    return _affine(num_axes, x, kernel, bias), (x, kernel, bias)


def _affine_backward(num_axes, residuals, grad):
    x, kernel, bias = residuals
    num_outputs = kernel.ndim - num_axes
    batch = x.shape[: x.ndim - num_axes]
    # XLA's CPU backend contracts only one axis of bfloat16 arrays.
    flat_x, flat_grad = (y.reshape(-1, *y.shape[len(batch) :]) for y in (x, grad))
    product = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((0,), (0,)), ((), ())),
        preferred_element_type=kernel.dtype,
    )

    def transposed_product(x, grad):
        # XLA's CPU backend copies the first operand to transpose it, so put the narrower one first.
        # Without the barrier XLA swaps the operands back and finds no fast matrix product.
        transposed = jax.lax.optimization_barrier(product(grad, x))
        return jnp.moveaxis(transposed, range(num_outputs), range(-num_outputs, 0))

    is_wide = math.prod(kernel.shape[:num_axes]) > math.prod(kernel.shape[num_axes:])
    cpu_product = transposed_product if is_wide else product
    axes = tuple(range(len(batch), grad.ndim)), tuple(range(num_axes, kernel.ndim))
    return (
        jax.lax.dot_general(grad, kernel.astype(grad.dtype), (axes, ((), ()))),
        jax.lax.platform_dependent(flat_x, flat_grad, cpu=cpu_product, default=product),
        None if bias is None else flat_grad.sum(0, dtype=bias.dtype),
    )


_affine.defvjp(_affine_forward, _affine_backward)


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


class Normal(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter that `draw_params` draws from a normal distribution, cut off at two deviations.

    Modules create parameters as zeros. Drawing those of one shape together takes XLA a fraction of
    the time to compile that a generator per parameter does.

    Attributes:
        value: zeros.
        num_axes: number of leading axes, which are the rows of a matrix.
    """

    value: Any
    num_axes: int = struct.field(pytree_node=False, default=1)

    def unbox(self) -> Any:
        """Return the value."""
        return self.value

    def replace_boxed(self, val: Any) -> "Normal":
        """Return a box with another value."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: Any) -> Any:
        """Return the box unchanged, as `remove_axis` does; no transformation adds axes here."""
        return self

    def remove_axis(self, index: int, params: Any) -> Any:
        return self


def normal(num_axes: int = 1) -> Callable[..., Normal]:
    """Return the initializer of kernels and tables, whose values `draw_params` draws (section A.2)."""
    return lambda key, shape, dtype=jnp.float32: Normal(jnp.zeros(shape, dtype), num_axes)


class Dense(nn.Module):
    """Dense layer, with a low-rank adapter if `lora` is given.

    The adapter adds 0 at initialization. Its parameters are `lora_a` with the kernel's input axes and
    the rank, and `lora_b` with the rank and the kernel's output axes. Its dropout applies if `apply`
    gets a key called "lora".

    Attributes:
        features: sizes of the output axes.
        dtype: dtype of the output.
        num_axes: number of input axes to contract, the last ones.
        use_bias: whether to add a bias.
        kernel_init: initializer of the kernel; None for `normal`.
        bias_init: initializer of the bias.
        lora: the adapter.
    """

    features: tuple[int, ...]
    dtype: str
    num_axes: int = 1
    use_bias: bool = True
    kernel_init: Callable | None = None
    bias_init: Callable = nn.initializers.zeros
    lora: LoraConfig | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "..."], add_bias: bool = True) -> Any:
        """Return the result; if `add_bias` is false, the result without the bias, and the bias."""
        width = x.shape[x.ndim - self.num_axes :]
        init = self.kernel_init or normal(self.num_axes)
        x = x.astype(self.dtype)
        kernel = self.param("kernel", init, (*width, *self.features), jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, self.features, jnp.float32)
        added = bias if add_bias else None
        y = checkpoint_name(_affine(self.num_axes, x, kernel, added), DENSE)
        if self.lora is None:
            return y if add_bias else (y, bias)
        rank, b_shape = self.lora.rank, (self.lora.rank, *self.features)
        a = self.param("lora_a", init, (*width, rank), jnp.float32)
        b = self.param("lora_b", nn.initializers.zeros, b_shape, jnp.float32)
        x = dropout(x, self.lora.dropout, self.make_rng("lora") if self.has_rng("lora") else None)
        update: Any = _affine(1, _affine(self.num_axes, x, a, None), b, None)
        y += update * (self.lora.alpha / rank)
        return y if add_bias else (y, bias)


def stacked_heads(
    x: Float[Array, "B T D"], layers: Sequence[Dense], has_bias_gradient: bool
) -> tuple[Float[Array, "B T N n K"], Float[Array, "N n K"] | None]:
    """Return the results of n initialized dense layers without adapters, by one product, and their biases.

    Each has N x K features. If `has_bias_gradient` is false, the gradient of the biases is left to who gets
    them.
    """
    dtype, params = layers[0].dtype, [layer.variables["params"] for layer in layers]
    kernel = jnp.stack([p["kernel"] for p in params], 2)
    bias = jnp.stack([p["bias"] for p in params], 1) if layers[0].use_bias else None
    added = bias if bias is None or has_bias_gradient else jax.lax.stop_gradient(bias)
    # A bias of one axis is added in the product of cuBLASLt.
    added = None if added is None else added.reshape(-1)
    product = _affine(1, x.astype(dtype), kernel.reshape(len(kernel), -1), added)
    return checkpoint_name(product, DENSE).reshape(*x.shape[:2], *kernel.shape[1:]), bias


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
    features: int | tuple[int, ...],
    name: str | None = None,
    num_axes: int = 1,
    target: str = "",
    is_output: bool = False,
) -> Dense:
    """Return a dense layer whose output is saved by the "dots" rematerialization policy.

    It has a bias if `config.bias` or `is_output` is true, and an adapter if `target` is one of
    `config.lora.targets`. An output layer computes its few logits in float32, as many of them would
    be equal in bfloat16.
    """
    return Dense(
        features if isinstance(features, tuple) else (features,),
        dtype="float32" if is_output else config.compute_dtype,
        num_axes=num_axes,
        use_bias=config.bias or is_output,
        lora=config.lora if config.lora.rank and target in config.lora.targets else None,
        name=name,
    )


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis, computed in float32.

    Attributes:
        epsilon: added to the variance.
        is_centered: whether to subtract the mean, as LayerNorm does.
        use_bias: whether to add a bias.
        is_fused: whether to use the kernels of `kernels.norm`.
    """

    epsilon: float
    is_centered: bool
    use_bias: bool
    is_fused: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "... D"],
        rate: float = 0.0,
        key: Key[Array, ""] | None = None,
        product: Float[Array, "... D"] | None = None,
        product_bias: Float[Array | np.ndarray, " D"] | None = None,
        returns_sum: bool = False,
    ) -> Any:
        """Return norm(x), or (norm(x), x) if `returns_sum`.

        If `is_fused`, this is `kernels.norm.normalize` with the other arguments, else they must be None.
        """
        shape = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, shape, jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        if self.is_fused:
            from bert_jax.model.kernels import norm  # imports Pallas' compiler

            settings = self.epsilon, self.is_centered, rate, key
            return norm.normalize(x, scale, bias, *settings, product, product_bias, returns_sum)
        assert product is None
        assert key is None
        y = _normalize(self.epsilon, self.is_centered, x, scale, bias)
        return (y, x) if returns_sum else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalize(
    epsilon: float,
    is_centered: bool,
    x: Float[Array, "... D"],
    scale: Float[Array | np.ndarray, " D"],
    bias: Float[Array | np.ndarray, " D"] | None,
) -> Float[Array, "... D"]:
    """Normalize the last axis; see `Norm`.

    The backward pass keeps x in its own dtype. Automatic differentiation would keep float32 arrays.
    """
    return _normalize_forward(epsilon, is_centered, x, scale, bias)[0]


def _normalize_forward(epsilon, is_centered, x, scale, bias):
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True) if is_centered else jnp.float32(0)
    if x.dtype == jnp.float32:
        variance = jnp.mean((y - mean) ** 2, -1, keepdims=True)
    else:
        # Both means in one pass. This loses digits only where the mean is so many deviations away from
        # zero that bfloat16 has lost more of them: its rounding has about the least variance given here.
        variance = jnp.maximum(jnp.mean(y**2, -1, keepdims=True) - mean**2, 1e-6 * mean**2)
    factor = jax.lax.rsqrt(variance + epsilon)
    y = (y - mean) * (factor * scale)
    y = y if bias is None else y + bias
    return y.astype(x.dtype), (x, mean, factor, scale, bias)


def _normalize_backward(epsilon, is_centered, residuals, cotangent):
    x, mean, factor, scale, bias = residuals
    normal = (x.astype(jnp.float32) - mean) * factor
    cotangent = cotangent.astype(jnp.float32)
    grad = cotangent * scale
    projected = grad - normal * jnp.mean(grad * normal, -1, keepdims=True)
    if is_centered:
        projected -= grad.mean(-1, keepdims=True)
    axes = tuple(range(x.ndim - 1))
    # With the barrier XLA writes this gradient once, and fuses what uses it into one kernel. Without it
    # every user repeats the normalization, which moves more memory on GPUs.
    grad_x = jax.lax.platform_dependent(
        (factor * projected).astype(x.dtype),
        cuda=jax.lax.optimization_barrier,
        default=lambda grad: grad,
    )
    return (
        grad_x,
        jnp.sum(cotangent * normal, axes),
        None if bias is None else jnp.sum(cotangent, axes),
    )


_normalize.defvjp(_normalize_forward, _normalize_backward)


def norm_layer(config: ModelConfig, name: str | None = None, is_fused: bool = False) -> Norm:
    """Return the norm that `config.norm.kind` selects, over the last axis."""
    kind = config.norm.kind
    return Norm(config.norm.epsilon, kind != "rms_norm", kind == "layer_norm", is_fused, name=name)


def hidden_norm(config: ModelConfig, name: str | None = None) -> Norm:
    """Return a norm of the hidden states of all tokens, which `config.kernels` may fuse."""
    return norm_layer(config, name, config.kernels == "pallas")


def fold_in(key: Key[Array, ""] | None, data: Any) -> Key[Array, ""] | None:
    """Fold data into a key; None, which disables dropout, stays None."""
    return None if key is None else jax.random.fold_in(key, data)
