"""Non-finite values and spikes: policies, incident records, resuming."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import guard, optim, sharding, workdir
from bert_jax import step as step_lib
from bert_jax.checkpoint import Checkpoints
from bert_jax.config import GuardConfig, PhaseConfig
from bert_jax.config_flags import load
from bert_jax.errors import UserError
from bert_jax.log import Log
from bert_jax.objectives import pretraining
from bert_jax.sharding import shard_batch
from tests.helpers.runs import arguments, assert_same_run, final_arrays, train_here

BAD = 17  # the step whose batch is poisoned
SHORT = ("steps=30", "checkpoint.every_steps=10", "evaluate_every_steps=10")


# Compiled training steps, by the config changes that affect compilation.
COMPILED = {}
NOT_COMPILED = (
    "guard.nonfinite",
    "guard.rollback",
    "guard.max_incidents",
    "checkpoint.",
)


def run(folder, rows, *changes, bad=(BAD,), compiled=None):
    """Train for 30 steps in this process; runs with the same step share its program."""
    if compiled is None:
        same = tuple(change for change in changes if not change.startswith(NOT_COMPILED))
        compiled = COMPILED.setdefault(same, {})
    train_here(folder, rows, *SHORT, *changes, bad=bad, compiled=compiled)


def skipped(folder):
    return json.loads((folder / "skipped.json").read_text())["steps"]


def training_steps(folder):
    """Return the steps of the training lines in metrics.jsonl."""
    lines = workdir.read_lines(folder / "metrics.jsonl")
    return [line["step"] for line in lines if line["split"] == "train"]


@pytest.fixture(scope="module")
def skipping(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("guard") / "skip"
    run(folder, rows, "guard.nonfinite=skip", "checkpoint.keep_last=5")
    return folder


def test_stop_keeps_the_weights_before_the_bad_step(tmp_path, rows):
    with pytest.raises(UserError) as error:
        run(tmp_path / "bad", rows)
    message = str(error.value)
    assert "\n" not in message
    assert f"step {BAD}: non-finite value: loss nan" in message
    run(tmp_path / "good", rows, f"checkpoint.every_steps={BAD}", "checkpoint.keep_last=9", bad=())
    shutil.rmtree(tmp_path / "good" / "checkpoints" / "30")
    for a, b in zip(*map(final_arrays, (tmp_path / "bad", tmp_path / "good")), strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    assert training_steps(tmp_path / "bad") == [5, 10, 15]
    # A second start stops at the same step; with another policy it continues from there.
    with pytest.raises(UserError, match=f"step {BAD}: non-finite value"):
        run(tmp_path / "bad", rows)
    run(tmp_path / "bad", rows, "guard.nonfinite=skip")
    assert training_steps(tmp_path / "bad") == [5, 10, 15, 20, 25, 30]


def test_metrics_are_synced_before_each_checkpoint(tmp_path, rows, monkeypatch):
    """Also before the checkpoint saved at a bad step.

    Otherwise a power failure could lose lines that no resumed run would write again.
    """
    happened = []

    def record(owner, name):
        own = getattr(owner, name)

        def call(*arguments, **keywords):
            happened.append(name)
            return own(*arguments, **keywords)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((Log, "training"), (Log, "sync"), (Checkpoints, "save")):
        record(owner, name)
    with pytest.raises(UserError):
        run(tmp_path, rows)
    # The second save stores the incident's state.
    expected = [*["training"] * 2, "sync", "save", "training", "save", "sync", "save"]
    assert happened == expected


def test_incident_record_is_accurate(tmp_path, rows):
    folder = tmp_path / "run"
    with pytest.raises(UserError):
        run(folder, rows, "accumulation=2")
    incident = guard.read_incident(folder)
    assert incident.step == BAD
    assert incident.stats["kind"] == "nonfinite"
    assert set(incident.stats["gradient_norms"]) >= {"embeddings", "layer_0", "masked_lm"}
    assert math.isnan(incident.stats["loss"])
    norms = incident.stats["gradient_norms"].values()
    assert incident.stats["gradient_norm"] == pytest.approx(math.hypot(*norms), rel=1e-5)
    assert (incident.batch["label"] == 7).all()
    assert len(incident.batch["tokens"]) == 8


def test_skip_equals_training_without_the_bad_batch(skipping, rows):
    assert skipped(skipping) == [BAD]
    assert training_steps(skipping) == [5, 10, 15, 20, 25, 30]
    config = load(arguments(*SHORT))
    config.phases = (PhaseConfig(rows=str(rows())),)
    config, _, _, (phase,) = pretraining.make_phases(config)
    mesh = sharding.make_mesh(config.mesh)
    init, shapes = step_lib.initial_state(config, phase, mesh)
    compiled = step_lib.compile_phase(config, phase, mesh, shapes)
    state = init(jnp.uint32(config.seed))
    for step, batch in enumerate(phase.batches(0, 30, 0, 1)):
        if step == BAD:
            optimizer = optim.skip_update(state.optimizer)
            state = state._replace(step=state.step + 1, optimizer=optimizer)
        else:
            state, *_ = compiled.step(state, shard_batch(batch, mesh))
    result = final_arrays(skipping)[1]
    for a, b in zip(result, jax.tree.leaves(jax.device_get(state.params)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_skipping_after_a_bad_step_leaves_the_state_unchanged(rows):
    """Steps are dispatched ahead: one that is skipped may follow a bad one that is not handled yet."""
    config = load(arguments(*SHORT))
    config.phases = (PhaseConfig(rows=str(rows())),)
    config, _, _, (phase,) = pretraining.make_phases(config)
    init, _ = step_lib.initial_state(config, phase, sharding.make_mesh(config.mesh))
    state = init(jnp.uint32(0))
    state = state._replace(recent=state.recent._replace(halted=jnp.array(True)))
    after, _ = jax.jit(step_lib.make_skip_step(config, phase))(state)
    assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y, True), state, after))


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_resuming_before_a_skipped_step_skips_it_again(skipping, tmp_path, rows, nonfinite):
    folder = tmp_path / "run"
    shutil.copytree(skipping, folder)
    for step in (20, 30):
        shutil.rmtree(folder / "checkpoints" / str(step))
    # Skipped batches stay skipped, whatever the current policy is.
    run(folder, rows, f"guard.nonfinite={nonfinite}", "checkpoint.keep_last=5")
    assert_same_run(folder, skipping)


def test_rollback_also_skips_preceding_steps(tmp_path, rows):
    back, known = tmp_path / "back", tmp_path / "known"
    few = ("checkpoint.every_steps=5", "checkpoint.keep_last=1", "checkpoint.keep_best=0")
    run(back, rows, "guard.nonfinite=rollback", "guard.rollback_steps=4", *few)
    assert "rolling back to step 10 and" in (back / "log.txt").read_text()
    assert skipped(back) == [13, 14, 15, 16, 17]
    known.mkdir()
    shutil.copy(back / "skipped.json", known)
    run(known, rows)
    assert_same_run(back, known)
    assert training_steps(back) == [5, 10, 15, 20, 25, 30]


def test_interrupted_rollback_is_completed_on_resume(tmp_path, rows, monkeypatch):
    changes = ("guard.nonfinite=rollback", "guard.rollback_steps=16")
    # The result does not depend on the checkpoints of the run, of which none is 16 steps older.
    run(tmp_path / "whole", rows, *changes, "checkpoint.every_steps=6")
    assert "rolling back to step 0 and" in (tmp_path / "whole" / "log.txt").read_text()
    with monkeypatch.context() as patch:
        # The process is interrupted right after the decision is written.
        patch.setattr(guard.Guard, "skip", interrupted_after(guard.Guard.skip))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "killed", rows, *changes)
    assert (tmp_path / "killed" / "checkpoints" / "10").exists()
    run(tmp_path / "killed", rows, *changes)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def interrupted_after(call):
    """Return a function that calls `call` and then raises KeyboardInterrupt."""

    def wrapped(*arguments, **options):
        call(*arguments, **options)
        raise KeyboardInterrupt

    return wrapped


def test_rollback_to_step_zero(tmp_path, rows):
    run(tmp_path, rows, "guard.nonfinite=rollback", bad=(3,))
    assert skipped(tmp_path) == [0, 1, 2, 3]
    assert training_steps(tmp_path) == [5, 10, 15, 20, 25, 30]
    # The first step is shown when it was trained, not again when it is skipped.
    assert (tmp_path / "log.txt").read_text().count("step 1: ") == 1


def test_metrics_of_part_of_a_window_are_not_shown_as_those_of_a_step(tmp_path, rows):
    changes = ("checkpoint.every_steps=7", "checkpoint.keep_last=9")
    run(tmp_path, rows, *changes, bad=())
    for step in (14, 21, 28, 30):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    run(tmp_path, rows, *changes, bad=())
    log = (tmp_path / "log.txt").read_text()
    assert "resuming at step 7 " in log
    assert "step 1: " in log
    assert "step 8: " not in log


def test_too_many_incidents_end_the_run(tmp_path, rows):
    changes = ("guard.nonfinite=skip", "guard.max_incidents=4")
    with pytest.raises(UserError, match=r"5 bad steps exceed config\.guard\.max_incidents=4"):
        run(tmp_path, rows, *changes, bad=range(12, 20))
    assert guard.incidents(tmp_path) == [12, 13, 14, 15, 16]
    assert (tmp_path / "checkpoints" / "16").exists()
    # Only some incidents store the state, which is as large as a checkpoint.
    assert len(list(tmp_path.glob("incidents/*/state"))) == 3


def test_reported_spikes_are_limited(tmp_path):
    figures = {"loss": 2.0, "gradient_norm": 3.0}
    stats = {**figures, "mean": figures, "deviation": figures}
    config, reads = GuardConfig(spike="report", max_incidents=2), []

    def read_batch():
        reads.append(1)
        return {"tokens": np.ones((1, 4))}

    def report(step_guard, *steps):
        spikes = (guard.BadStep(step, guard.SPIKE, stats) for step in steps)
        return [step_guard.report(spike, read_batch) for spike in spikes]

    (first,) = report(guard.Guard(config, tmp_path), 3)
    assert first == "step 3: spike: loss 2 (mean 2 ± 2), gradient norm 3 (mean 3 ± 3)"
    again, last, *later = report(guard.Guard(config, tmp_path), 3, 5, 6, 7)  # after a restart
    assert again == first
    assert last.endswith("; later spikes are not reported (config.guard.max_incidents=2)")
    assert later == [None, None]
    assert guard.incidents(tmp_path) == [3, 5]
    assert len(reads) == 2


@pytest.mark.slow
def test_spikes_match_the_recorded_metrics(tmp_path, rows, capsys):
    changes = ("steps=180", "log_every_steps=1", "guard.sigmas=0.5", "checkpoint.every_steps=200")
    run(tmp_path / "report", rows, *changes, bad=())
    lines = workdir.read_lines(tmp_path / "report" / "metrics.jsonl")
    figures = np.array([
        [line["loss"], line["gradient_norm"]] for line in lines if line["split"] == "train"
    ])  # fmt: skip

    def spikes(spikes_are_usual):
        usual, results = list(figures[: guard.WINDOW]), []
        for step in range(guard.WINDOW, len(figures)):
            window = np.array(usual)
            if far := (figures[step] > window.mean(0) + 0.5 * window.std(0)).any():
                results.append(step)
            if spikes_are_usual or not far:
                usual[step % guard.WINDOW] = figures[step]
        return results

    expected = spikes(False)
    assert expected != spikes(True)
    assert guard.incidents(tmp_path / "report") == expected
    assert f"step {expected[0]}: spike: loss" in capsys.readouterr().err
    # Reported spikes neither end a run nor count as incidents of other kinds.
    few = (*changes, "guard.max_incidents=2", "guard.nonfinite=skip")
    run(tmp_path / "few", rows, *few, bad=(170,))
    assert guard.incidents(tmp_path / "few") == [*expected[:2], 170]
    assert guard.read_incident(tmp_path / "few").step == 170  # the others have no state
    with pytest.raises(UserError, match=f"step {expected[0]}: spike"):
        run(tmp_path / "stop", rows, *changes, "guard.spike=stop", bad=())
    run(tmp_path / "off", rows, *changes, "guard.spike=off", bad=())
    assert not (tmp_path / "off" / "incidents").exists()
    one, other = (final_arrays(tmp_path / name)[1] for name in ("off", "report"))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_loss_history_is_reset_at_phase_start():
    config, grads = GuardConfig(spike="stop"), {"embeddings": jnp.ones(4)}
    usual = guard.LossHistory(jnp.ones((guard.WINDOW, 2)), jnp.array(False))
    usual = guard.reset_at_phase_start(usual, jnp.array(False))
    loss = jnp.float32(3)
    recent, seen = guard.check_step(config, usual, jnp.int32(200), loss, grads)
    assert int(seen.kind) == guard.SPIKE
    assert bool(recent.halted)
    new = guard.reset_at_phase_start(usual, jnp.array(True))
    recent, seen = guard.check_step(config, new, jnp.int32(200), loss, grads)
    assert int(seen.kind) == guard.FINE
    np.testing.assert_array_equal(recent.figures[200 % guard.WINDOW], [3, 2])
    assert jnp.isnan(recent.figures).sum() == 2 * (guard.WINDOW - 1)
