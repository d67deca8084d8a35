"""Norms with dropout and sum before, or dropout after, in a kernel forward and one backward."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Key

from bert_jax.model.kernels import triton
from bert_jax.runtime import sharding

# Programs of the backward kernel; each takes a part of the rows.
_PARTS = 512


class Settings(NamedTuple):
    """What kernels are compiled for.

    Attributes:
        epsilon: added to the variance.
        is_centered: whether to subtract the mean, as LayerNorm does.
        rate: rate of dropout.
        has_product: whether a product is added before the norm; dropout is then on the product.
        has_product_bias: whether it has a bias.
        returns_sum: whether what the norm is applied to is a result too.
    """

    epsilon: float
    is_centered: bool
    rate: float
    has_product: bool
    has_product_bias: bool
    returns_sum: bool


def normalize(
    x: Float[Array, "B T D"],
    scale: Float[Array | np.ndarray, " D"],
    bias: Float[Array | np.ndarray, " D"] | None,
    epsilon: float,
    is_centered: bool,
    rate: float = 0.0,
    key: Key[Array, ""] | None = None,
    product: Float[Array, "B T D"] | None = None,
    product_bias: Float[Array | np.ndarray, " D"] | None = None,
    returns_sum: bool = False,
) -> Any:
    """Return norm(x + dropout(product + product_bias)), or dropout(norm(x)) if there is no product.

    This computes in float32 and rounds the result. The backward pass keeps the sum in the dtype of x, and
    recomputes its mean and variance.

    Args:
        x: hidden states.
        scale, bias: parameters of the norm.
        epsilon, is_centered: attributes of `layers.Norm`.
        rate, key: dropout rate, and key of the generator "hash"; None disables dropout.
        product, product_bias: result of a dense layer without its bias, and the bias.
        returns_sum: whether to return (norm, sum), or (norm, x) if there is no product, for a residual
            connection. The kernel of the backward pass adds the gradients of both.
    """
    rate = 0.0 if key is None else rate
    has_product, has_product_bias = product is not None, product_bias is not None
    settings = Settings(epsilon, is_centered, rate, has_product, has_product_bias, returns_sum)
    key = key if rate else None
    results: Any = _normalize(settings, x, product, product_bias, scale, bias, key)
    return results if returns_sum else results[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(settings, x, product, product_bias, scale, bias, key):
    return _forward(settings, x, product, product_bias, scale, bias, key)[0]


def _forward(settings, x, product, product_bias, scale, bias, key):
    run = sharding.shard_rows(functools.partial(_run_forward, settings))
    output, total = run((x, product), (product_bias, scale, bias, key))
    total = total if settings.has_product else x
    return (output, total if settings.returns_sum else None), (total, scale, bias, key)


def _backward(settings, residuals, cotangents):
    total, scale, bias, key = residuals
    run = sharding.shard_rows(functools.partial(_run_backward, settings), has_sums=True)
    (of_x, of_product), (of_scale, of_bias, *of_product_bias) = run(
        (total, *cotangents), (scale, key)
    )
    if settings.has_product and of_product is None:
        of_product = of_x
    return (
        of_x,
        of_product,
        of_product_bias[0] if settings.has_product_bias else None,
        of_scale,
        None if bias is None else of_bias,
        None,
    )


_normalize.defvjp(_forward, _backward)


def _run_forward(settings, shard, rows, others) -> tuple[Any, Any]:
    """Return the norm, and the sum below it if there is one, of a device's rows."""
    (x, product), (product_bias, scale, bias, key) = rows, others
    width = x.shape[-1]
    result = jax.ShapeDtypeStruct((x.size // width, width), x.dtype)
    output, total = triton.call(
        functools.partial(_forward_kernel, settings),
        "norm_forward",
        result.shape[:1],
        (result, result if settings.has_product else None),
        4,
        triton.seed(key, shard, x.size),
        *(None if y is None else y.reshape(result.shape) for y in (x, product)),
        product_bias,
        scale,
        bias,
    )
    return output.reshape(x.shape), None if total is None else total.reshape(x.shape)


def _forward_kernel(settings, seed, x, product, product_bias, scale, bias, output, total):
    row = _Row(pl.program_id(0), x.shape)
    value = row.load(x)
    if product is not None:
        added = row.load(product)
        if product_bias is not None:
            added += row.load(product_bias)
        value += row.drop(added, settings.rate, seed)
        row.store(total, value)
    normal, _ = row.normalize(value, settings)
    result = normal * row.load(scale)
    if bias is not None:
        result += row.load(bias)
    if product is None:
        result = row.drop(result, settings.rate, seed)
    row.store(output, result)


def _run_backward(settings, shard, rows, others) -> tuple[tuple[Any, Any], Float[Array, "n D"]]:
    """Return the gradients of a device's rows.

    Those of x and of the product [B T D], the last None if both are equal; and those of the scale, of the
    bias and perhaps of the product's bias.
    """
    (total, *cotangents), (scale, key) = rows, others
    width = total.shape[-1]
    flat = jax.ShapeDtypeStruct((total.size // width, width), total.dtype)
    parts = min(_PARTS, flat.shape[0])
    grads, sums = triton.call(
        functools.partial(_backward_kernel, settings),
        "norm_backward",
        (parts,),
        (
            (flat, flat if settings.has_product and settings.rate else None),
            jax.ShapeDtypeStruct((2 + settings.has_product_bias, parts, width), jnp.float32),
        ),
        8,
        triton.seed(key, shard, total.size),
        *(None if y is None else y.reshape(flat.shape) for y in (total, *cotangents)),
        scale,
    )
    return jax.tree.map(lambda x: x.reshape(total.shape), grads), sums.sum(1)


def _backward_kernel(settings, seed, total, cotangent, of_total, scale, grads, sums):
    part, (of_x, of_product), (rows, width) = pl.program_id(0), grads, total.shape
    count = pl.cdiv(rows, sums.shape[1])

    def add_row(i, parameters):
        row = _Row(part * count + i, total.shape)
        normal, factor = row.normalize(row.load(total), settings)
        grad = row.load(cotangent)
        if not settings.has_product:
            grad = row.drop(grad, settings.rate, seed)
        scaled = grad * row.load(scale)
        projected = scaled - normal * row.mean(scaled * normal)
        if settings.is_centered:
            projected -= row.mean(scaled)
        below = factor * projected
        if of_total is not None:
            below += row.load(of_total)
        row.store(of_x, below)
        if settings.has_product:
            below = row.drop(below, settings.rate, seed)
        if of_product is not None:
            row.store(of_product, below)
        added = [grad * normal, grad]
        if settings.has_product_bias:
            added.append(jnp.where(row.mask, below, 0.0))
        return tuple(map(jnp.add, parameters, added))

    zeros = jnp.zeros(pl.next_power_of_2(width), jnp.float32)
    row = _Row(part, (sums.shape[1], width))
    parameters = jax.lax.fori_loop(0, count, add_row, (zeros,) * sums.shape[0])
    for i, gradient in enumerate(parameters):
        triton.store(sums, i, part, row.columns, value=gradient, mask=row.mask)


class _Row:
    """A row of arrays [R D], whose columns are filled up to a power of two, as Triton needs.

    Attributes:
        columns: their indices.
        mask: which of them the arrays have; none, if the row is not below R.
    """

    def __init__(self, number: Int[Array, ""], shape: tuple[int, ...]):
        self._number, self._width = number, shape[1]
        self.columns = jnp.arange(pl.next_power_of_2(self._width))
        self.mask = (self.columns < self._width) & (number < shape[0])

    def load(self, ref: Any) -> Float[Array, " C"]:
        """Read the row, or an array [D]."""
        index = (self._number, self.columns) if len(ref.shape) == 2 else (self.columns,)
        return triton.load(ref, *index, mask=self.mask)

    def store(self, ref: Any, value: Float[Array, " C"]) -> None:
        """Write the row."""
        triton.store(ref, self._number, self.columns, value=value, mask=self.mask)

    def drop(self, value: Float[Array, " C"], rate: float, seed: Any) -> Float[Array, " C"]:
        """Apply dropout."""
        if not rate:
            return value
        return triton.drop(value, rate, seed, self._number * self._width + self.columns)

    def mean(self, value: Float[Array, " C"]) -> Float[Array, ""]:
        """Return the mean; `value` is 0 in columns that the arrays do not have."""
        return jnp.sum(value) / self._width

    def normalize(
        self, value: Float[Array, " C"], settings: Settings
    ) -> tuple[Float[Array, " C"], Float[Array, ""]]:
        """Return the row with mean 0 and variance 1, and the factor between both."""
        if settings.is_centered:
            value = jnp.where(self.mask, value - self.mean(value), 0.0)
        factor = jax.lax.rsqrt(self.mean(value**2) + settings.epsilon)
        return value * factor, factor
