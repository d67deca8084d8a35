"""Held-out evaluation: every row is used once, and has its own mask."""

import types

import jax
import numpy as np
import pytest

from bert_jax.config.flags import load
from bert_jax.config.schema import MeshConfig, PhaseConfig
from bert_jax.data import loader
from bert_jax.data.shuffle import shuffled
from bert_jax.errors import UserError
from bert_jax.objectives import pretraining
from bert_jax.runtime import sharding
from bert_jax.training import evaluate
from tests.helpers.runs import arguments, small_phase

ROWS, BATCH = 19, 8


def heldout(rows):
    """Return the phase of a small pretraining run, and its held-out batches."""
    _, phase = small_phase(rows, f"batch_size={BATCH}", f"evaluate_rows={ROWS}")
    return phase, list(phase.heldout(0, 1))


def test_metrics_are_means_over_all_rows(rows):
    """19 rows are evaluated in batches of 8, the last of which is partly empty."""
    phase, batches = heldout(rows)
    params = phase.objective.init(jax.random.key(0))
    params["next_sentence"] = {
        "kernel": np.zeros_like(params["next_sentence"]["kernel"]),
        "bias": np.array([0.7, -1.1], np.float32),
    }
    result = evaluate.make_evaluate(phase, sharding.make_mesh(MeshConfig()))(params)
    labels = np.concatenate([batch["label"][batch["length"] > 0] for batch in batches])
    assert len(batches) == 3
    assert sum((batch["length"] > 0).any(1).sum() for batch in batches) == ROWS
    losses = np.log(np.exp([0.7, -1.1]).sum()) - np.array([0.7, -1.1])
    np.testing.assert_allclose(result["next_sentence_loss"], losses[labels].mean(), rtol=1e-6)
    np.testing.assert_allclose(result["next_sentence_accuracy"], (labels == 0).mean(), rtol=1e-6)
    whole = np.concatenate([b["label"][b["length"] > 0] for b in batches[:2]])
    assert abs((whole == 0).mean() - (labels == 0).mean()) > 1e-3  # the last batch changes the mean


def test_batches_in_parts_have_the_metrics_of_whole_batches(rows):
    phase, _ = heldout(rows)
    params = phase.objective.init(jax.random.key(0))
    mesh = sharding.make_mesh(MeshConfig())
    whole, parts = (evaluate.make_evaluate(phase, mesh, n)(params) for n in (0, 3))
    # Batches of 8 rows are computed 2 at a time; the sums are in another order.
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("trained_on", "evaluated_on", "says"),
    [("small", "small", "another vocabulary"), ("", "", "--rows"), ("empty", "", "--heldout-")],
)
def test_unusable_rows_are_refused(monkeypatch, rows, trained_on, evaluated_on, says):
    """Rows of another vocabulary, no rows, and rows without a held-out split."""
    config, vocabulary = load(arguments()), types.SimpleNamespace(sha256="", settings={})
    paths = {"small": str(rows()), "empty": "empty", "": ""}
    config.phases = (PhaseConfig(rows=paths[trained_on]),)
    monkeypatch.setattr(evaluate.checkpoint, "load_model", lambda *_: (config, vocabulary, {}, 3))
    if trained_on == "empty":
        phase = types.SimpleNamespace(objective=None, tokens=8)
        monkeypatch.setattr(pretraining, "make_phases", lambda config: (config, None, [], [phase]))
        monkeypatch.setattr(evaluate, "make_evaluate", lambda *_: lambda params: {})
    with pytest.raises(UserError, match=says):
        evaluate.evaluate_workdir("run", paths[evaluated_on])


def test_means_with_weights_below_one():
    terms = {"half": (np.float32(0.25), np.float32(0.5)), "none": (np.float32(0), np.float32(0))}
    assert evaluate.means(terms) == {"half": 0.5, "none": 0.0}


def test_batches_sample_the_whole_split(rows):
    opened = loader.RowDataset(rows(), "train")

    def order(batches):
        """Return the rows of the batches as indices into the split."""
        every = [tokens.tobytes() for tokens in opened.read(range(len(opened)))["tokens"]]
        return [every.index(tokens.tobytes()) for batch in batches for tokens in batch["tokens"]]

    trained = order(loader.batches(opened, 4, seed=3, first_step=2, end_step=4))
    assert trained == shuffled(range(8, 16), len(opened), 3).tolist()
    assert trained != order(loader.batches(opened, 4, seed=4, first_step=2, end_step=4))
    sample = order(loader.heldout_batches(opened, 4, 8))
    assert sample == shuffled(range(8), len(opened), loader.HELDOUT_SEED).tolist()
    assert sorted(sample) != list(range(8))


def test_masks_depend_on_the_row_alone(rows, monkeypatch):
    """Batches of 8, computed whole or in two accumulated parts, have the same metrics."""
    phase, _ = heldout(rows)
    keys, make_inputs = [], phase.objective.make_inputs

    def recorded(batch, key):
        jax.debug.callback(lambda data: keys.append(tuple(data.tolist())), jax.random.key_data(key))
        return make_inputs(batch, key)

    monkeypatch.setattr(phase.objective, "make_inputs", recorded)
    params = phase.objective.init(jax.random.key(0))
    _, halves = small_phase(rows, f"batch_size={BATCH}", f"evaluate_rows={ROWS}", "accumulation=2")
    mesh = sharding.make_mesh(MeshConfig())
    whole, parts = (evaluate.make_evaluate(p, mesh)(params) for p in (phase, halves))
    jax.effects_barrier()
    assert len(set(keys)) == len(keys) == 24
    del whole["real_fraction"], parts["real_fraction"]  # also of the rows that fill the last batch
    assert parts == pytest.approx(whole, rel=1e-5)
