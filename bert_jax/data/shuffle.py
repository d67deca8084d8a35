"""Shuffled data order: an endless sequence of epochs, each a different permutation.

A permutation is a Feistel network, so any position can be computed on its own, without stored state.
"""

import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int64, UInt64


def shuffled(
    positions: Sequence[int] | Int[np.ndarray, " n"], length: int, seed: int
) -> Int64[np.ndarray, " n"]:
    """Return the row indices at `positions` of the shuffled order of `length` rows.

    Positions are counted from the start of the first epoch.
    """
    epochs, rows = np.divmod(np.asarray(positions, np.int64), length)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        rows[in_epoch] = _permute(rows[in_epoch], length, _round_keys(seed, epoch))
    return rows


def _permute(
    indices: Int64[np.ndarray, " n"], length: int, keys: UInt64[np.ndarray, "rounds 2"]
) -> Int64[np.ndarray, " n"]:
    """Permute indices as numbers of two digits: in each round, add a hash of one to the other.

    Results beyond the last index are permuted again (cycle walking: Black and Rogaway, Ciphers with
    Arbitrary Finite Domains, 2002).
    """
    base = math.isqrt(length - 1) + 1
    low_base, high_base = np.uint64(base), np.uint64(-(-length // base))
    permuted = indices.astype(np.uint64)
    walking = np.arange(len(permuted))
    while len(walking):
        high, low = np.divmod(permuted[walking], low_base)
        for low_key, high_key in keys:
            low = (low + _mix(high ^ low_key) % low_base) % low_base
            high = (high + _mix(low ^ high_key) % high_base) % high_base
        permuted[walking] = high * low_base + low
        walking = walking[permuted[walking] >= length]
    return permuted.astype(np.int64)


@functools.lru_cache(256)
def _round_keys(seed: int, epoch: int) -> UInt64[np.ndarray, "rounds 2"]:
    """Return keys that differ between all pairs of seed and epoch."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode()).digest()
    return np.frombuffer(digest, "<u8").reshape(-1, 2).astype(np.uint64)


def _mix(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Hash numbers with the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
