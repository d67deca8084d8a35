"""The order in which rows are read: an endless run of epochs, each a permutation of its own.

A permutation is a cipher: any place is known without those before it, and nothing is kept. It is
Grain's `index_shuffle`, which takes microseconds an index, for a block of places at once.
"""

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int64, UInt32

_BLOCK = 2**14  # places
_ROUNDS = 4
_FEWEST_BITS = 16


def shuffled(
    places: Sequence[int] | Int[np.ndarray, " n"], length: int, seed: int
) -> Int64[np.ndarray, " n"]:
    """Which rows, of `length`, stand at `places`, counted from the start of the first epoch.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), section 3: a value that
    the cipher leads out of the rows is enciphered again until it is one of them.
    """
    if length == 1:  # every place is an epoch of its own
        return np.zeros(len(places), np.int64)
    blocks, within = np.divmod(np.asarray(places, np.int64), min(length, _BLOCK))
    found = np.empty_like(within)
    for block in np.unique(blocks).tolist():
        here = blocks == block
        find = _epoch if length < _BLOCK else _block
        found[here] = find(block, length, seed)[within[here]]
    return found


@functools.lru_cache(16)
def _block(number: int, length: int, seed: int) -> Int64[np.ndarray, " block"]:
    """Of many rows: those at so many places, which may be of two epochs."""
    epochs, rows = np.divmod(np.arange(number * _BLOCK, (number + 1) * _BLOCK), length)
    seeds, which = np.unique(epochs + seed % 2**32, return_inverse=True)
    keys = _round_keys(seeds.astype(np.uint32))
    # Even, and with room for the last row (Grain's have none for 2^16, 2^18, ...).
    word = (max((length - 1).bit_length(), _FEWEST_BITS) + 1) // 2
    walking = np.arange(len(rows))
    while len(walking):
        rows[walking] = found = _encipher(rows[walking], keys[:, which[walking]], word)
        walking = walking[found >= length]
    return rows


@functools.lru_cache(16)
def _epoch(number: int, length: int, seed: int) -> Int64[np.ndarray, " length"]:
    """Of few rows: all, whose walks are long, for most of the cipher's values are no rows."""
    keys = _round_keys(np.array([(seed + number) % 2**32], np.uint32))
    values = np.arange(2**_FEWEST_BITS)
    enciphered = _encipher(values, keys, _FEWEST_BITS // 2)
    # Where a walk from each value ends: rows stay where they are, and each pass doubles the steps.
    ends = np.where(values < length, values, enciphered)
    for _ in range(_FEWEST_BITS):
        ends = ends[ends]
    return ends[enciphered[:length]]


def _encipher(
    values: Int64[np.ndarray, " n"], keys: UInt32[np.ndarray, "rounds n_or_1"], word: int
) -> Int64[np.ndarray, " n"]:
    """Rounds of Simon on two words of `word` bits (Beaulieu et al., eprint 2013/404, section 3)."""
    mask = np.uint32(2**word - 1)
    left = (values >> word).astype(np.uint32)
    right = values.astype(np.uint32) & mask

    def rotated(x: UInt32[np.ndarray, " n"], by: int) -> UInt32[np.ndarray, " n"]:
        return (x << np.uint32(by)) | (x >> np.uint32(word - by))

    for key in keys:
        mixed = (rotated(right, 1) & rotated(right, 8)) ^ rotated(right, 2)
        left, right = right, (left ^ mixed ^ key) & mask
    return (left.astype(np.int64) << word) | right


def _round_keys(seeds: UInt32[np.ndarray, " n"]) -> UInt32[np.ndarray, "rounds n"]:
    """What C++'s std::seed_seq makes of each seed (ISO C++17, 29.6.7.1).

    All of it modulo 2^32, as NumPy's arithmetic of uint32 is.
    """
    state = np.full((_ROUNDS, len(seeds)), 0x8B8B8B8B, np.uint32)
    # What a seed that is one number long adds in each step of the first pass.
    added = np.zeros_like(state) + np.arange(_ROUNDS, dtype=np.uint32)[:, None]
    added[0] += np.uint32(1)
    added[1] += seeds
    for k in range(2 * _ROUNDS):
        here, near, far, last = ((k + i) % _ROUNDS for i in (0, 1, 2, -1))
        if k < _ROUNDS:
            mixed = _stirred(state[here] ^ state[near] ^ state[last]) * np.uint32(1664525)
            state[near] += mixed
            mixed += added[here]
            state[far] += mixed
        else:
            mixed = _stirred(state[here] + state[near] + state[last]) * np.uint32(1566083941)
            state[near] ^= mixed
            mixed -= np.uint32(here)
            state[far] ^= mixed
        state[here] = mixed
    return state


def _stirred(x: UInt32[np.ndarray, " n"]) -> UInt32[np.ndarray, " n"]:
    return x ^ (x >> np.uint32(27))
