"""Dropout and its random bit generators."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Float, Key, UInt32


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Mix 32 bits with a bijection in which each input bit flips each output bit half of the time.

    This is Chris Wellons' `lowbias32`.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def bits_at(
    key: UInt32[Array, "2"] | tuple[UInt32[Array, ""], UInt32[Array, ""]],
    count: UInt32[Array, "..."],
) -> UInt32[Array, "..."]:
    """Return the bits at counters `count`, in two rounds that each use half of the key."""
    return _mix(_mix(count ^ key[0]) + key[1])


def _hash_bits(key: UInt32[Array, "2"], bit_width: int, shape: tuple[int, ...]) -> Array:
    if bit_width != 32:
        raise NotImplementedError("the hash generator supports only 32-bit output")
    # Flat index of every element, from one iota per axis: sharding needs no communication.
    count = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        count += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return bits_at(key, count)


def _hash_fold_in(key: UInt32[Array, "2"], data: Any) -> UInt32[Array, "2"]:
    # An extra round, so that the stream of a folded key is not a shifted copy of another.
    base = _mix(jnp.asarray(data, jnp.uint32) + jnp.uint32(0x9E3779B9))
    return jnp.stack([bits_at(key, base), bits_at(key[::-1], base + 1)])


def _hash_split(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> Array:
    count = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    return jax.vmap(_hash_fold_in, (None, 0))(key, count).reshape(*shape, 2)


_HASH = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: _hash_fold_in(jnp.zeros(2, jnp.uint32), seed.astype(jnp.uint32)),
    split=_hash_split,
    random_bits=_hash_bits,
    fold_in=_hash_fold_in,
    name="bert_jax_hash",
    tag="hash",
)

GENERATORS = {"threefry": "threefry2x32", "rbg": "rbg", "hash": _HASH}


def generator_key(key: Key[Array, ""], generator: str) -> Key[Array, ""]:
    """Convert a threefry key to a key of one of `GENERATORS`."""
    data = jax.random.key_data(key)
    if generator == "rbg":  # its keys are twice as long
        data = jnp.concatenate([data, data])
    return jax.random.wrap_key_data(data, impl=GENERATORS[generator])


def dropout(x: Float[Array, "..."], rate: float, key: Key[Array, ""] | None) -> Float[Array, "..."]:
    """Zero each element with probability `rate` and scale the others by 1 / (1 - rate).

    Args:
        x: input of any shape.
        rate: dropout probability in [0, 1).
        key: key of any generator; None disables dropout.
    """
    if key is None or rate == 0:
        return x
    with jax.named_scope("dropout"):
        # Compare raw bits instead of converting them to floats; the rate is exact to 2**-32.
        keep = jax.random.bits(key, x.shape, jnp.uint32) >= jnp.uint32(round(rate * 2**32))
        # Scale in float32: 0.9 is 0.8984 in bfloat16, which would scale everything by 1.0017.
        scaled = x.astype(jnp.promote_types(x.dtype, jnp.float32)) / (1 - rate)
        return jnp.where(keep, scaled, 0).astype(x.dtype)
