"""Losses against PyTorch and by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.objectives.losses import accuracy, cross_entropy


def make(seed=0, shape=(4, 6), classes=11):
    rng = np.random.default_rng(seed)
    logits = 5 * rng.standard_normal((*shape, classes))
    labels, weights = rng.integers(0, classes, shape), rng.random(shape) * rng.integers(0, 2, shape)
    return jnp.asarray(logits, jnp.float32), jnp.asarray(labels), jnp.asarray(weights, jnp.float32)


def test_cross_entropy_is_pytorchs():
    import torch

    logits, labels, weights = make()
    each = torch.nn.functional.cross_entropy(
        torch.tensor(np.array(logits)).reshape(-1, 11),
        torch.tensor(np.array(labels, np.int64)).reshape(-1),
        reduction="none",
    ).numpy()
    total, weight = cross_entropy(logits, labels, weights)
    assert float(total) == pytest.approx((each * np.array(weights).ravel()).sum(), rel=1e-6)
    assert float(weight) == pytest.approx(float(np.array(weights).sum()), rel=1e-6)


def test_cross_entropy_by_hand():
    logits = jnp.log(jnp.array([[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]]))
    total, weight = cross_entropy(logits, jnp.array([0, 1, 1]), jnp.array([1.0, 2.0, 0.0]))
    assert float(total) == pytest.approx(math.log(4) + 2 * math.log(2), rel=1e-6)
    assert float(weight) == 3


def test_cross_entropy_of_extreme_logits_is_finite():
    logits = jnp.array([[1e4, 0.0], [jnp.finfo(jnp.float32).min, 0.0]])
    total, _ = cross_entropy(logits, jnp.array([1, 1]), jnp.ones(2))
    assert float(total) == pytest.approx(1e4)


def test_accuracy_by_hand():
    logits = jnp.array([[1.0, 2.0, 0.0], [3.0, 2.0, 1.0], [0.0, 0.0, 1.0], [5.0, 0.0, 0.0]])
    hits, weight = accuracy(logits, jnp.array([1, 1, 2, 0]), jnp.array([1.0, 1.0, 0.5, 0.0]))
    assert (float(hits), float(weight)) == (1.5, 2.5)


def test_accuracy_is_argmax():
    logits, labels, weights = make(1, (50, 20), 3)
    hits, _ = accuracy(logits, labels, weights)
    wanted = ((np.argmax(logits, -1) == labels) * weights).sum()
    assert float(hits) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("metric", [cross_entropy, accuracy])
def test_pairs_add_up_over_parts(metric):
    batch = make(2)
    whole = metric(*batch)
    parts = [metric(*(x[i : i + 1] for x in batch)) for i in range(4)]
    for i in range(2):
        assert float(sum(part[i] for part in parts)) == pytest.approx(float(whole[i]), rel=1e-6)


def test_a_label_beyond_the_classes_is_not_a_number():
    logits, labels = jnp.zeros((2, 3)), jnp.array([2, 3])
    (first, _), (second, _) = (
        cross_entropy(logits[i], labels[i], jnp.float32(1)) for i in range(2)
    )
    assert float(first) == pytest.approx(np.log(3))
    assert np.isnan(second)
