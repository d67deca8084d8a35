"""What kernels for GPUs share, and all that depends on Pallas' route through Triton.

JAX calls that route deprecated in favour of Mosaic GPU. On CPUs the kernels run in Pallas' interpreter.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pl_triton
from jaxtyping import Array, Float, Int, Key, UInt32

from bert_jax.model.dropout import bits_at


def call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    outputs: Any,
    warps: int,
    *arrays: Any,
) -> Any:
    """Run a kernel, a function of references to the inputs and then to the outputs.

    Args:
        kernel: the function.
        name: its name in a profile.
        grid: how often it runs, by axis (`pl.program_id`).
        outputs: tree of `jax.ShapeDtypeStruct`.
        warps: number of warps of 32 threads that each run has.
        arrays: inputs. Inputs and outputs that are None have the reference None.
    """
    run = functools.partial(pl.pallas_call, kernel, out_shape=outputs, grid=grid, name=name)
    compiled = run(compiler_params=pl_triton.CompilerParams(num_warps=warps, num_stages=1))
    return jax.lax.platform_dependent(
        *arrays, cpu=run(interpret=True), cuda=compiled, rocm=compiled
    )


def dot(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """Multiply tiles, whose sizes are powers of two of at least 16, adding in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return pl_triton.dot(a, b, precision=precision).astype(jnp.float32)


def read(ref: Any, *index: Any, mask: Any = None) -> Array:
    """Read elements in the dtype of the array; those outside the mask are 0."""
    return pl_triton.load(ref.at[index], mask=mask, other=None if mask is None else 0)


def load(ref: Any, *index: Any, mask: Any = None) -> Float[Array, "..."]:
    """Read elements in float32; those outside the mask are 0."""
    return read(ref, *index, mask=mask).astype(jnp.float32)


def store(ref: Any, *index: Any, value: Float[Array, "..."], mask: Any = None) -> None:
    """Write elements in the dtype of the array, where the mask is true."""
    pl_triton.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def seed(
    key: Key[Array, ""] | None, shard: Int[Array, ""] | int, size: int
) -> UInt32[Array, "3"] | None:
    """Return what `drop` needs of a key of the generator "hash".

    Args:
        key: the key; None without dropout.
        shard: the number of this device's part of an array.
        size: the size of a part.
    """
    if key is None:
        return None
    first = jnp.uint32(shard) * jnp.uint32(size % 2**32)
    return jnp.append(jax.random.key_data(key), first)


def drop(
    value: Float[Array, "..."], rate: float, seed: Any, count: Int[Array, "..."]
) -> Float[Array, "..."]:
    """Apply dropout to elements number `count` of this device, with the bits that `dropout` draws."""
    bits = bits_at((seed[0], seed[1]), count.astype(jnp.uint32) + seed[2])
    return jnp.where(bits >= jnp.uint32(round(rate * 2**32)), value / (1 - rate), 0.0)
