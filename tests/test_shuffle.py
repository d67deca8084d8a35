"""Shuffled data order: permutations, different for each seed and epoch."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bert_jax.data.shuffle import shuffled


@pytest.mark.parametrize("length", [1, 2, 3, 10, 2**14 - 1, 2**16, 2**16 + 1])
def test_epochs_are_different_permutations(length):
    epochs = shuffled(np.arange(3 * length), length, 5).reshape(3, length)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(length))
    assert length < 10 or len(np.unique(epochs, axis=0)) == 3


def test_seeds_share_no_order():
    orders = [
        tuple(shuffled(np.arange(e * 100, e * 100 + 100), 100, s))
        for s in range(9)
        for e in range(9)
    ]
    assert len(set(orders)) == 81
    assert np.mean(np.equal(orders[0], orders[1:])) == pytest.approx(1 / 100, abs=0.005)


def test_orders_of_few_rows_are_equally_likely():
    counts = collections.Counter(tuple(shuffled(range(4), 4, seed)) for seed in range(4_800))
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 0.01


def test_neighbors_are_independent():
    """Where a row goes says nothing about where the next one goes."""
    length = 10_000
    order = shuffled(np.arange(length), length, 0)
    for distance in (1, 2, 100, 101):
        assert abs(np.corrcoef(order[:-distance], order[distance:])[0, 1]) < 0.03


@given(st.integers(1, 2**40), st.integers(0, 2**34), st.integers(1, 200), st.integers(-1, 2**70))
def test_positions_are_computed_independently(length, first, count, seed):
    """Across epochs, for single positions or many at once."""
    together = shuffled(np.arange(first, first + count), length, seed)
    assert together.dtype == np.int64
    assert 0 <= together.min() <= together.max() < length
    for i in {0, count // 2, count - 1}:
        assert shuffled([first + i], length, seed)[0] == together[i]


def test_order_is_stable_across_versions():
    """A run started with an older version resumes with the rows that it would have read."""
    assert shuffled(np.arange(6), 100_000, 0).tolist() == [83774, 6854, 56322, 66525, 87535, 26252]
    assert shuffled(np.arange(6), 10, 0).tolist() == [9, 3, 5, 6, 2, 0]
