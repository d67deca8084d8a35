"""Shuffled data order, compared with Grain's index_shuffle, which computes single indices."""

import numpy as np
import pytest
from grain.experimental import index_shuffle
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data.shuffle import shuffled


def theirs(place, length, seed):
    epoch, index = divmod(place, length)
    return index_shuffle(index, length - 1, (seed + epoch) % 2**32, 4)


def omits_last_row(number):
    """Return whether Grain's cipher omits the last of `number` + 1 rows."""
    return number >= 2**16 and number == 2 ** (number.bit_length() - 1) and number.bit_length() % 2


SEEDS = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 2**32 - 1, 2**70, -1]))


@settings(deadline=None, max_examples=50)  # Grain's cycle walking is slow for few rows
@given(
    st.one_of(st.integers(1, 2**17), st.integers(2**14, 2**40)).filter(
        lambda n: not omits_last_row(n - 1)
    ),
    SEEDS,
    st.lists(st.floats(0, 4), min_size=1, max_size=8),
)
def test_order_matches_grain(length, seed, where):
    """In any epoch and for positions in any order; the seed of an epoch wraps around."""
    places = [int(x * length) for x in where]
    result = shuffled(np.array(places), length, seed)
    assert result.dtype == np.int64
    assert result.tolist() == [theirs(place, length, seed) for place in places]


@pytest.mark.parametrize("length", [1, 2, 2**14 - 1, 2**14, 2**14 + 1, 2**16, 2**16 + 1])
def test_every_epoch_is_a_different_permutation(length):
    """Also for 2^16 + 1 rows, of which Grain omits one."""
    first, second = shuffled(np.arange(2 * length), length, 5).reshape(2, length)
    for epoch in (first, second):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(length))
    assert length < 3 or (first != second).any()
    np.testing.assert_array_equal(second, shuffled(np.arange(length), length, 6))


def test_order_is_stable_across_versions():
    """A run started with an older version resumes with the rows that it would have read."""
    assert shuffled(np.arange(6), 100_000, 0).tolist() == [97360, 2206, 27692, 68523, 19055, 13262]
    assert shuffled(np.arange(6), 10, 0).tolist() == [0, 4, 6, 7, 8, 3]
