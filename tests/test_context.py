"""Longer context within a run: rows of more tokens and another base of "rope" in a later phase."""

import json
import shutil

import numpy as np
import pytest

from bert_jax import cli
from bert_jax.config.flags import load
from bert_jax.convert.source import open_model
from bert_jax.inference.fill_mask import MaskFiller
from bert_jax.objectives.warm_start import open_start
from bert_jax.runs import workdir
from bert_jax.training.evaluate import evaluate_workdir
from tests.helpers.runs import arguments, assert_same_run, refused

TEXT = "The king [MASK] the river."
# ModernBERT's phases: short rows, long rows, and long rows while the learning rate decays.
SETTINGS = arguments(
    *("model.layers=2", "model.hidden=32", "model.heads=2", "model.feed_forward=48"),
    *("model.rope_theta=5000", "phases[0].rope_theta=20", "model.local.rope_theta=7"),
    *("optim.schedule=wsd", "optim.decay_fraction=0.25", "steps=12", "log_every_steps=3"),
    *("evaluate_every_steps=3", "checkpoint.every_steps=3", "checkpoint.keep_every_steps=3"),
    f"sample_texts='{TEXT}',",
    size="modern-base",
    phases=",32=0.5,64=0.25,64=0.25",
)


@pytest.fixture(scope="module")
def run(rows, tmp_path_factory):
    """A run, and its command without the workdir."""
    long = str(rows(64, 3))
    argv = ["pretrain", *SETTINGS, "--rows", str(rows(32, 3)), "--rows", long, "--rows", long]
    folder = tmp_path_factory.mktemp("context") / "run"
    assert cli.main([*argv, "--workdir", str(folder)]) == 0
    return folder, argv


def test_run_continues_with_another_base_and_resumes(run, tmp_path, capsys):
    folder, argv = run
    assert "rope_theta: 20 at T=32, then 5,000 at T=64" in (folder / "log.txt").read_text()
    lines = [x for x in workdir.read_steps(folder / "metrics.jsonl") if x["split"] == "train"]
    rates = {line["step"]: line["learning_rate"] for line in lines}
    assert rates[9] == max(rates.values()) > rates[12]  # the last phase is that of the decay
    copy = shutil.copytree(folder, tmp_path / "copy")
    for step in (6, 9, 12):
        shutil.rmtree(copy / "checkpoints" / str(step))
    assert cli.main([*argv, "--workdir", str(copy)]) == 0
    assert "resuming at step 3" in capsys.readouterr().err
    assert_same_run(copy, folder)
    assert (copy / "samples.jsonl").read_text() == (folder / "samples.jsonl").read_text()
    for setting, message in (
        ("phases[0].rope_theta=30", "phases[0].rope_theta: was 20.0"),
        ("phases[2].rope_theta=5", "0 in the last phase: set config.model.rope_theta"),
        ("model.position_kind=learned", "it must be 0 with config.model.position_kind"),
    ):
        changed = [*argv, f"--config.{setting}", "--workdir", folder]
        assert message in refused(capsys, *changed)


def test_checkpoints_have_the_base_of_their_phase(run, rows, tmp_path):
    folder, _ = run
    lines = workdir.read_steps(folder / "metrics.jsonl")
    heldout = {x["step"]: x["masked_lm_loss"] for x in lines if x["split"] == "heldout"}
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
    longer = load(["--config=continued:64"])
    longer.model.rope_theta = 9.0
    changed, start = open_start(longer, str(folder), "6", ["model.rope_theta"])
    assert changed.model.rope_theta == 9
    assert start.about["notes"] == ["rope_theta: 20 changed to 9"]
