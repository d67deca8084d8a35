"""Models that start from smaller ones: the same function, copies that differ, the loss at step 0."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import cli
from bert_jax.model.bert import Bert, flatten, shapes, unflatten
from bert_jax.objectives.growth import check, grow, layer_map, unit_map
from bert_jax.training.evaluate import evaluate_workdir
from tests.helpers.checkpoints import random_params
from tests.helpers.models import make_batch, make_config
from tests.helpers.runs import arguments, refused

PRE_NORM = {
    "norm.position": "pre", "norm.final": True, "norm.qk": True, "norm.kind": "rms_norm", "bias": False,
    "position_kind": "rope", "local.window": 4, "local.global_every": 2, "gated_feed_forward": True,
    "next_sentence": False, "norm.epsilon": 1e-5,
}  # fmt: skip
ELECTRA = {"embedding_size": 8, "next_sentence": False, "electra.replaced_token": True}


@pytest.mark.parametrize(
    "changes", [{}, PRE_NORM, ELECTRA, {"tied_decoder": False, "pooler": True}]
)
def test_wider_models_compute_the_same(changes):
    rng = np.random.default_rng(0)
    batch = make_batch(rng, [[9, 7], [16]], 16)
    source = make_config("L2-H16-A2", feed_forward=24, **changes)
    model = make_config("L2-H48-A6", feed_forward=40, **changes)
    params = random_params(source)
    check(source, model, "it")
    grown = grow(flatten(params), flatten(shapes(model)), source, model, "stack")
    assert grown.keys() == flatten(shapes(model)).keys()

    def outputs(config, params) -> Any:
        params = jax.tree.map(jnp.asarray, params)
        return Bert(config).apply({"params": params}, batch.tokens, batch.layout, batch.positions)

    ours, theirs = outputs(model, unflatten(grown)), outputs(source, params)
    for name in ("masked_lm", "next_sentence", "replaced_token"):
        if (expected := getattr(theirs, name)) is not None:
            atol = 1e-4 * np.asarray(expected).std()
            np.testing.assert_allclose(getattr(ours, name), expected, rtol=1e-4, atol=atol)

    # Copies have other gradients, so that they do not stay equal.
    def loss(params):
        return jnp.sum(jnp.sin(outputs(model, params).masked_lm))

    grads = flatten(jax.grad(loss)(unflatten(grown)))
    copies = np.asarray(grads["encoder/layer_0/feed_forward/intermediate/kernel"])
    assert np.abs(copies[:, :16] - copies[:, 24:]).max() > 1e-3 * np.abs(copies).max()


def test_maps_of_layers_and_units():
    assert layer_map(2, 5, "stack") == [0, 1, 0, 1, 0]
    # ModernBERT-large from base: the expression of its code.
    assert layer_map(22, 28, "tile") == [round(i * 22 / 28) for i in range(28)]
    assert layer_map(1, 3, "tile") == [0, 0, 0]
    assert unit_map(3, 7, "stack").tolist() == [0, 1, 2, 0, 1, 2, 0]
    # ModernBERT's test of tiling 1, 2, 3 from the middle.
    assert (unit_map(3, 8, "tile") + 1).tolist() == [2, 3, 1, 2, 3, 1, 2, 3]
    assert unit_map(4, 7, "tile").tolist() == [3, 0, 1, 2, 3, 0, 1]


def test_loss_at_step_0_is_below_that_of_random_parameters(rows, tmp_path, capsys):
    common = ["pretrain", "--rows", str(rows()), "--workdir"]
    steps = ("steps=150", "evaluate_every_steps=150")
    small = arguments(*steps, "optim.learning_rate=3e-3", "optim.optimizer=adamw")
    source = str(tmp_path / "small")
    assert cli.main([*common, source, *small]) == 0
    trained = evaluate_workdir(source)[1]["masked_lm_loss"]
    losses = {}
    for name, scheme in (("random", ""), ("wide", "stack"), ("tile", "tile")):
        size = "L1-H64-A4" if name == "wide" else "L3-H64-A4"
        folder = str(tmp_path / name)
        changes = arguments("steps=1", "checkpoint.keep_every_steps=1", size=size)
        start = [f"--config.init_scheme={scheme}", "--init", source] if scheme else []
        assert cli.main([*common, folder, *changes, *start]) == 0
        losses[name] = evaluate_workdir(folder, which="0")[1]["masked_lm_loss"]
    assert losses["wide"] == pytest.approx(trained, abs=1e-4)
    assert losses["tile"] < losses["random"] - 0.3
    for size, message in (
        ("L1-H64-A2", "heads keep their size with config.init_scheme, so it must be 4"),
        ("L1-H16-A1", "32: config.init_scheme enlarges models"),
    ):
        argv = [*common, tmp_path / "no", *arguments("init_scheme=tile", size=size)]
        assert message in refused(capsys, *argv, "--init", source)
    argv = [*common, tmp_path / "no", *arguments("init_scheme=tile")]
    assert "it needs --init" in refused(capsys, *argv)
