"""Longer context within a run: rows of more tokens and another base of "rope" in a later phase."""

import json
import shutil
from typing import Any

import numpy as np
import pytest

from bert_jax import cli
from bert_jax.config.flags import load
from bert_jax.config.schema import take_rows
from bert_jax.convert.source import open_model
from bert_jax.inference.fill_mask import MaskFiller
from bert_jax.objectives import pretraining
from bert_jax.objectives.warm_start import open_start
from bert_jax.runs import workdir
from bert_jax.training.evaluate import evaluate_workdir
from tests.helpers.runs import arguments, assert_same_run, refused

# ModernBERT's phases: short rows, long rows, and long rows while the learning rate decays.
LENGTHS = ",32=0.5,64=0.25,64=0.25"
TEXT = "The king [MASK] the river."
CHANGES = (
    *("model.layers=2", "model.hidden=32", "model.heads=2", "model.feed_forward=48"),
    *("model.rope_theta=5000", "phases[0].rope_theta=20", "model.local.rope_theta=7"),
    *("optim.schedule=wsd", "optim.decay_fraction=0.25", "steps=12", "log_every_steps=3"),
    *("evaluate_every_steps=3", "checkpoint.every_steps=3", "checkpoint.keep_every_steps=3"),
    f"sample_texts='{TEXT}',",
)


def settings(*changes):
    return arguments(*CHANGES, *changes, size="modern-base", phases=LENGTHS)


@pytest.fixture(scope="module")
def run(rows, tmp_path_factory):
    """A run, and its command without the workdir."""
    long = str(rows(64, 3))
    argv = ["pretrain", *settings(), "--rows", str(rows(32, 3)), "--rows", long, "--rows", long]
    folder = tmp_path_factory.mktemp("context") / "run"
    assert cli.main([*argv, "--workdir", str(folder)]) == 0
    return folder, argv


def test_phases_have_their_own_base(rows):
    config = load(settings())
    take_rows(config, [str(rows(tokens, 3)) for tokens in (32, 64, 64)])
    _, _, _, phases = pretraining.make_phases(config)
    _, abstract = pretraining.abstract_phases(load(settings()), 3)
    given: list[Any]
    for given in (phases, abstract):
        assert [phase.objective.model.config.rope_theta for phase in given] == [20, 5000, 5000]
        assert {phase.objective.model.config.local.rope_theta for phase in given} == {7}


def test_run_continues_with_another_base_and_resumes(run, tmp_path, capsys):
    folder, argv = run
    assert "rope_theta: 20 at T=32, then 5,000 at T=64" in (folder / "log.txt").read_text()
    lines = [x for x in workdir.read_steps(folder / "metrics.jsonl") if x["split"] == "train"]
    rates = {line["step"]: line["learning_rate"] for line in lines}
    assert rates[9] == max(rates.values()) > rates[12]  # the last phase is that of the decay
    for step in (3, 6):  # within a phase, and at its end
        copy = shutil.copytree(folder, tmp_path / str(step))
        for path in (copy / "checkpoints").iterdir():
            if path.name.isdecimal() and int(path.name) > step:
                shutil.rmtree(path)
        assert cli.main([*argv, "--workdir", str(copy)]) == 0
        assert f"resuming at step {step}" in capsys.readouterr().err
        assert_same_run(copy, folder)
        assert (copy / "samples.jsonl").read_text() == (folder / "samples.jsonl").read_text()
    changed = [a.replace("theta=20", "theta=30") for a in argv]
    assert "phases[0].rope_theta: was 20.0" in refused(capsys, *changed, "--workdir", folder)


def test_checkpoints_have_the_base_of_their_phase(run, rows, tmp_path):
    folder, _ = run
    heldout = {
        line["step"]: line["masked_lm_loss"]
        for line in workdir.read_steps(folder / "metrics.jsonl")
        if line["split"] == "heldout"
    }
    samples = {line["step"]: line for line in workdir.read_steps(folder / "samples.jsonl")}
    for step, theta, tokens in ((3, 20, 32), (6, 20, 32), (9, 5000, 64), (12, 5000, 64)):
        model = open_model(str(folder), str(step))
        assert model.config.model.rope_theta == theta
        _, metrics = evaluate_workdir(str(folder), str(rows(tokens, 3)), str(step))
        assert metrics["masked_lm_loss"] == pytest.approx(heldout[step], abs=1e-5)
        (filled,) = MaskFiller(model)(TEXT)
        expected = [x["probability"] for x in samples[step]["masks"][0]]
        np.testing.assert_allclose([x.probability for x in filled], expected, atol=1e-5)
        out = tmp_path / f"export{step}"
        argv = ["export", "--init", folder, "--out", out, "--checkpoint", step]
        assert cli.main([str(argument) for argument in argv]) == 0
        written = json.loads((out / "config.json").read_text())
        assert written["global_rope_theta"] == theta
    # A run that starts from a checkpoint may change the base.
    longer = load(["--config=continued:64"])
    longer.model.rope_theta = 9.0
    changed, start = open_start(longer, str(folder), "6", ["model.rope_theta"])
    assert (changed.model.rope_theta, changed.model.local.rope_theta) == (9, 7)
    assert start.about["notes"] == ["rope_theta: 20 changed to 9"]
    assert open_start(longer, str(folder), "6", ())[0].model.rope_theta == 20


def test_base_of_a_phase_is_checked(rows, capsys, tmp_path):
    argv = ["pretrain", "--workdir", tmp_path / "run", "--rows", rows(32, 3)]
    small = arguments("phases[0].rope_theta=5")
    assert "0 in the last phase: set config.model.rope_theta" in refused(capsys, *argv, *small)
    first = arguments("phases[0].rope_theta=5", phases=",32=0.5,32=0.5")
    error = refused(capsys, *argv, "--rows", rows(32, 3), *first)
    assert "phases[0].rope_theta is 5.0: it must be 0 with config.model.position_kind" in error
