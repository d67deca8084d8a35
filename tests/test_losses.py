"""Losses against PyTorch and hand-computed values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bert_jax.config.schema import Config, PhaseConfig
from bert_jax.config.sizes import model_size
from bert_jax.data.rows import RowFormat
from bert_jax.objectives import pretraining
from bert_jax.objectives.losses import accuracy, cross_entropy


def test_cross_entropy_matches_pytorch():
    rng = np.random.default_rng(0)
    logits = 5 * rng.standard_normal((24, 11)).astype(np.float32)
    labels, weights = rng.integers(0, 11, 24), rng.random(24) * rng.integers(0, 2, 24)
    each = torch.nn.functional.cross_entropy(
        torch.tensor(logits), torch.tensor(labels), reduction="none"
    ).numpy()
    total, weight = cross_entropy(*map(jnp.asarray, (logits, labels, np.float32(weights))))
    assert float(total) == pytest.approx((each * weights).sum(), rel=1e-6)
    assert float(weight) == pytest.approx(weights.sum(), rel=1e-6)


def test_accuracy_by_hand():
    logits = jnp.array([[1.0, 2.0, 0.0], [3.0, 2.0, 1.0], [0.0, 0.0, 1.0], [5.0, 0.0, 0.0]])
    hits, weight = accuracy(logits, jnp.array([1, 1, 2, 0]), jnp.array([1.0, 1.0, 0.5, 0.0]))
    assert (float(hits), float(weight)) == (1.5, 2.5)


@pytest.mark.parametrize("causal", [False, True])
def test_z_loss_is_added_to_the_pretraining_loss(causal):
    model = model_size("L1-H8-A2")
    model.vocab_size, model.z_loss = 32, 0.5
    model.causal, model.next_sentence = causal, not causal
    config = Config(model=model, phases=(PhaseConfig(tokens=16),), batch_size=2)
    _, (phase,) = pretraining.abstract_phases(config, 1)
    row_format = RowFormat(16, 1, 32)
    batch = row_format.decode(row_format.encode(row_format.seal(row_format.empty(2))))
    batch = {**batch, "length": batch["length"] + 12, "a_length": batch["a_length"] + 12}
    batch["tokens"] = np.arange(32).reshape(2, 16)
    objective, key = phase.objective, jax.random.key(0)

    @jax.jit
    def run(batch):
        params, inputs = objective.init(key), objective.make_inputs(batch, key)
        masked = inputs.masked
        outputs = objective.model.apply(
            {"params": params}, masked.tokens, inputs.layout, masked.positions
        )
        square = jnp.log(jnp.exp(outputs.masked_lm).sum(-1)) ** 2
        terms = objective.loss_terms(params, inputs, None)["z_loss"]
        expected = 0.5 * (square * masked.weights).sum(), objective.normalizers(inputs)["z_loss"]
        return terms, expected

    (total, weight), (expected, normalizer) = run(batch)
    assert float(total) == pytest.approx(float(expected), rel=1e-5)
    assert float(weight) == float(normalizer) > 0
    summary = objective.summarize(
        {objective.best_metric.name: 2.0, "z_loss": 0.25}
        | dict.fromkeys([f"{objective.metric_prefix}_accuracy"], 0.0)
    )
    assert summary["loss"] == 2.25


def test_out_of_range_label_gives_nan():
    logits, labels = jnp.zeros((2, 3)), jnp.array([2, 3])
    (first, _), (second, _) = (
        cross_entropy(logits[i], labels[i], jnp.float32(1)) for i in range(2)
    )
    assert float(first) == pytest.approx(np.log(3))
    assert np.isnan(second)
