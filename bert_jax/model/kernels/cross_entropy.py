"""Cross-entropy over the vocabulary, and accuracy, in one pass over the logits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from bert_jax.model.kernels import triton
from bert_jax.runtime import sharding


def supports(size: int) -> bool:
    """Whether rows of `size` logits are aligned, and fit in the registers of a program."""
    # A mesh with an axis "tensor" shards the vocabulary, of which XLA combines the parts.
    mesh = jax.sharding.get_abstract_mesh()
    return (mesh.empty or mesh.shape["tensor"] == 1) and size % 128 == 0 and size <= 2**15


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def vocab_losses(
    vocab_size: int,
    vocab_logits: Callable[[Any], Float[Array, "B P V"]],
    decoder: Any,
    labels: Int[Array, "B P"],
    weights: Float[Array, "B P"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the weighted sums of the cross-entropy, and of the correctness, which has no gradient.

    The backward pass keeps the gradient of the logits in the dtype of the decoder's input, and multiplies
    only the products with it by the cotangent, in float32. `vocab_logits` is a function of `heads.Decoder`.
    """
    return _forward(vocab_size, vocab_logits, decoder, labels, weights, has_grad=False)[0]


def _forward(vocab_size, vocab_logits, decoder, labels, weights, has_grad=True):
    run = sharding.shard_rows(functools.partial(_run, vocab_size, [decoder.x.dtype] * has_grad))
    loss, is_correct, *grad = run((vocab_logits(decoder), labels, weights), None)
    return (jnp.sum(loss * weights), jnp.sum(is_correct * weights)), (decoder, *grad)


def _backward(vocab_size, vocab_logits, residuals, cotangents):
    decoder, grad = residuals
    run = sharding.shard_rows(_products, has_sums=True)
    of_x, (of_table, of_bias) = run((decoder.x, grad), (decoder.kernel, cotangents[0]))
    of_bias = None if decoder.bias is None else of_bias
    return decoder._replace(x=of_x, kernel=of_table.T, bias=of_bias), None, None


def _products(shard, rows, others):
    # Scale before the sum over devices, which XLA then takes together with that of the words' gradient.
    x, (kernel, scale) = rows[0], others
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    flat_x, grad = (y.reshape(-1, y.shape[-1]) for y in rows)
    of_x = scale * product("nv,dv->nd", grad, kernel.astype(x.dtype))
    sums = product("nv,nd->vd", grad, flat_x), grad.sum(0, dtype=jnp.float32)
    return of_x.astype(x.dtype).reshape(x.shape), tuple(scale * y for y in sums)


vocab_losses.defvjp(_forward, _backward)


def _run(vocab_size, dtypes, shard, rows, others) -> list[Float[Array, "B P ..."]]:
    """Return loss and correctness of predictions, and the gradient of their logits in each dtype."""
    logits, labels, weights = rows
    arrays = logits.reshape(labels.size, -1), labels.ravel(), weights.ravel()
    number = jax.ShapeDtypeStruct((labels.size,), jnp.float32)
    shapes = [number, number, *(jax.ShapeDtypeStruct(arrays[0].shape, d) for d in dtypes)]
    kernel, name = functools.partial(_kernel, vocab_size), "cross_entropy"
    results = triton.call(kernel, name, number.shape, shapes, 16, *arrays)
    return [y.reshape(*labels.shape, *y.shape[1:]) for y in results]


def _kernel(vocab_size, logits, labels, weights, loss, is_correct, *grad):
    row, columns = pl.program_id(0), jnp.arange(pl.next_power_of_2(logits.shape[1]))
    is_token = columns < vocab_size
    value = triton.load(logits, row, columns, mask=is_token)
    value = jnp.where(is_token, value, jnp.finfo(jnp.float32).min)
    highest = jnp.max(value)
    exponentials = jnp.exp(value - highest)
    total = jnp.sum(exponentials)
    label = triton.load(labels, row).astype(jnp.int32)
    of_label = triton.load(logits, row, label, mask=(label >= 0) & (label < vocab_size))
    of_label = jnp.where(label < vocab_size, of_label, jnp.nan)
    triton.store(loss, row, value=highest + jnp.log(total) - of_label)
    triton.store(is_correct, row, value=(of_label >= highest).astype(jnp.float32))
    for each in grad:
        of_logits = exponentials / total - (columns == label).astype(jnp.float32)
        of_logits = jnp.where(is_token, triton.load(weights, row) * of_logits, 0.0)
        triton.store(each, row, columns, value=of_logits, mask=columns < logits.shape[1])
