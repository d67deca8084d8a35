"""Random bits of dropout: rate, independence, and invariance to the number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.config.schema import MeshConfig
from bert_jax.model.dropout import GENERATORS, dropout, generator_key
from bert_jax.runtime import sharding

N = 1 << 18


def key(generator, seed=0):
    return generator_key(jax.random.key(seed), generator)


def words(k, n=N):
    return np.asarray(jax.random.bits(k, (n,), jnp.uint32))


def correlation(*streams):
    """Return the correlations of masks of rate 0.1, whose standard deviation is 1 / sqrt(N)."""
    return np.corrcoef([stream < 2**32 // 10 for stream in streams])


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_and_scale(generator, rate):
    x = dropout(jnp.ones((512, 512)), rate, key(generator))
    kept, variance = np.asarray(x) != 0, rate * (1 - rate)
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(variance / kept.size)
    np.testing.assert_allclose(np.asarray(x)[kept], 1 / (1 - rate), rtol=1e-6)
    # Every row and column has this rate: there are no stripes.
    for axis in (0, 1):
        assert np.abs(kept.mean(axis) - (1 - rate)).max() < 6 * np.sqrt(variance / 512)


def test_every_bit_of_hash_is_fair_and_neighbours_are_independent():
    result = words(key("hash"))
    bits = (result[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < 6 * 0.5 / np.sqrt(N)
    for distance in (1, 2, 3, 64, 128, 768, 1024):
        assert abs(correlation(result[distance:], result[:-distance])[0, 1]) < 6 / np.sqrt(N)


@pytest.mark.parametrize("generator", GENERATORS)
def test_steps_and_layers_are_independent(generator):
    base = jax.random.key(0)
    streams = [words(generator_key(jax.random.fold_in(base, i), generator)) for i in range(8)]
    streams += [words(jax.random.fold_in(key(generator), 100 + i)) for i in range(8)]
    streams += [words(k) for k in jax.random.split(key(generator, 1), 4)]
    correlations = correlation(*streams) - np.eye(len(streams))
    assert np.abs(correlations).max() < 6 / np.sqrt(N)
    for i, a in enumerate(streams):
        for b in streams[:i]:
            # Neither stream is a shifted copy of the other.
            assert len(np.intersect1d(a[:4096], b[:4096])) < 8


def test_hash_keys_avalanche():
    base = np.array([0, 12345], np.uint32)
    wrap = lambda data: jax.random.wrap_key_data(jnp.asarray(data), impl=GENERATORS["hash"])  # noqa: E731
    result = words(wrap(base), 4096)
    for half in range(2):
        for bit in range(32):
            other = base.copy()
            other[half] ^= np.uint32(1 << bit)
            flipped = np.bitwise_count(result ^ words(wrap(other), 4096)).mean()
            assert abs(flipped - 16) < 0.5, (half, bit, flipped)


def test_hash_is_independent_of_device_count():
    k = key("hash")

    def masked(devices):
        mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:devices])
        x = jax.device_put(jnp.ones((16, 8, 64)), NamedSharding(mesh, PartitionSpec("data")))
        return np.asarray(jax.jit(lambda x: dropout(x, 0.3, k))(x))

    one = masked(1)
    assert 0 < (one == 0).sum() < one.size
    for devices in (2, 8):
        np.testing.assert_array_equal(masked(devices), one)
