"""Non-finite values and spikes: stopping, skipping, their record, and resuming."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config.schema import GuardConfig
from bert_jax.data.loader import RowDataset
from bert_jax.errors import UserError
from bert_jax.runs.checkpoint import Checkpoints
from bert_jax.runtime import sharding
from bert_jax.runtime.sharding import shard_batch
from bert_jax.training import guard, optim
from bert_jax.training import state as state_lib
from bert_jax.training import step as step_lib
from bert_jax.training.log import Log
from tests.helpers.runs import EMITTERS, assert_same_run, final_arrays, small_phase, train_here

BAD = 17  # the number of steps before the one whose batch is poisoned
SHORT = ("steps=30", "checkpoint.every_steps=10", "evaluate_every_steps=10")
SKIP = ("guard.nonfinite=skip", "checkpoint.keep_last=5")


# Compiled training steps, by the config changes that affect compilation.
COMPILED = {}


def run(folder, rows, *changes, bad=(BAD,)):
    """Train for 30 steps in this process; runs with the same step share its program."""
    same = tuple(change for change in changes if not change.startswith("checkpoint."))
    compiled = COMPILED.setdefault(same, {})
    train_here(folder, rows, *SHORT, *changes, bad=bad, compiled=compiled)


def lines(folder, split):
    """Return the lines of a split in metrics.jsonl, which must be strict JSON."""
    text = (folder / "metrics.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=pytest.fail) for line in text]
    return [line for line in parsed if line["split"] == split]


def steps(folder, split):
    return [line["step"] for line in lines(folder, split)]


def resume_at(step, source, folder):
    """Copy a run without its checkpoints after a step."""
    shutil.copytree(source, folder)
    for path in (folder / "checkpoints").iterdir():
        if path.name.isdigit() and int(path.name) > step:
            shutil.rmtree(path)


@pytest.fixture(scope="module", autouse=True)
def usual_emitters():
    options = sharding.compiler_options
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sharding, "compiler_options", lambda mesh: options(mesh) | EMITTERS)
        yield


@pytest.fixture(scope="module")
def skipping(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("guard") / "skip"
    run(folder, rows, *SKIP)
    return folder


def test_stopped_run_keeps_the_state_and_resumes_as_if_it_had_skipped(tmp_path, rows, skipping):
    bad, good = tmp_path / "bad", tmp_path / "good"
    with pytest.raises(UserError, match=rf"step {BAD + 1}: .*config\.guard\.nonfinite=skip"):
        run(bad, rows)
    run(good, rows, f"checkpoint.every_steps={BAD}", "checkpoint.keep_last=9", bad=())
    shutil.rmtree(good / "checkpoints" / "30")
    for a, b in zip(*map(final_arrays, (bad, good)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    assert steps(bad, "train") == [5, 10, 15]
    # A second start stops at the same step; with another policy it continues from there.
    with pytest.raises(UserError, match=f"step {BAD + 1}: "):
        run(bad, rows)
    assert steps(bad, "stopped") == [BAD + 1]
    run(bad, rows, *SKIP)
    assert_same_run(bad, skipping)


def test_metrics_are_synced_before_each_checkpoint(tmp_path, rows, monkeypatch):
    """A power failure could otherwise lose lines that no resumed run would write again."""
    happened = []
    for owner, name in ((Log, "training"), (Log, "bad_step"), (Log, "sync"), (Checkpoints, "save")):
        own = getattr(owner, name)

        def call(*arguments, name=name, own=own, **keywords):
            happened.append(name)
            return own(*arguments, **keywords)

        monkeypatch.setattr(owner, name, call)
    with pytest.raises(UserError):
        run(tmp_path, rows)
    expected = [*["training"] * 2, "sync", "save", "training", "sync", "save", "bad_step"]
    assert happened == expected


def test_bad_steps_are_recorded_with_their_rows(tmp_path, rows):
    with pytest.raises(UserError):
        run(tmp_path, rows, "accumulation=2")
    (line,) = lines(tmp_path, "stopped")
    assert line["step"] == BAD + 1
    assert line["loss"] is None
    norms = line["gradient_norms"]
    assert list(norms) == ["embeddings", "layer_0", "masked_lm", "next_sentence", "pooler"]
    assert line["gradient_norm"] == pytest.approx(math.hypot(*norms.values()), rel=1e-5)
    # The rows are those of the batch.
    _, phase = small_phase(rows, *SHORT)
    batch = next(phase.batches(BAD, BAD + 1, 0, 1))
    read = RowDataset(rows(), "train").read(np.array(line["rows"]))
    for name, value in read.items():
        np.testing.assert_array_equal(value, batch[name])


def test_skip_equals_training_without_the_bad_batch(skipping, rows):
    assert steps(skipping, "skipped") == [BAD + 1]
    assert steps(skipping, "train") == [5, 10, 15, 20, 25, 30]
    config, phase = small_phase(rows, *SHORT)
    mesh = sharding.make_mesh(config.mesh)
    init, shapes = state_lib.initial_state(config, phase, mesh)
    compiled = step_lib.compile_phase(config, phase, mesh, shapes)
    state = init(jnp.uint32(config.seed))
    for step, batch in enumerate(phase.batches(0, 30, 0, 1)):
        if step == BAD:
            optimizer = optim.skip_update(state.optimizer)
            state = state._replace(step=state.step + 1, optimizer=optimizer)
        else:
            state, *_ = compiled.step(state, shard_batch(batch, mesh))
    expected = state._replace(recent=state.recent._replace(skipped=1), seed=None)
    _, params, rest = final_arrays(skipping)
    for a, b in zip(
        params + rest, jax.tree.leaves(state_lib.checkpoint_parts(expected)), strict=True
    ):
        np.testing.assert_array_equal(a, jax.device_get(b))


def test_resuming_before_a_skipped_step_is_bitwise_identical(skipping, tmp_path, rows):
    resume_at(10, skipping, tmp_path / "run")
    run(tmp_path / "run", rows, *SKIP)
    assert_same_run(tmp_path / "run", skipping)


def test_steps_after_a_stop_leave_the_state_unchanged(rows):
    """Steps are dispatched ahead of the one whose result the loop has read."""
    config, phase = small_phase(rows, *SHORT, "guard.nonfinite=skip")
    init, _ = state_lib.initial_state(config, phase, sharding.make_mesh(config.mesh))
    state = init(jnp.uint32(0))
    state = state._replace(recent=state.recent._replace(halted=jnp.array(True)))
    step, batch = jax.jit(step_lib.make_step(config, phase)), next(phase.batches(0, 1, 0, 1))
    for label in (batch["label"], np.full_like(batch["label"], 7)):
        after, *_ = step(state, {**batch, "label": label})
        assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y, True), state, after))


def test_run_stops_at_the_limit_of_skipped_steps(tmp_path, rows):
    """The count is part of the state, so it does not begin again when a run resumes."""
    changes = ("guard.nonfinite=skip", "checkpoint.keep_last=9")
    few, bad = (*changes, "guard.max_skipped=2"), (13, BAD, 24)
    with pytest.raises(UserError, match=r"step 25: .*max_skipped=2"):
        run(tmp_path / "few", rows, *few, bad=bad)
    resume_at(20, tmp_path / "few", tmp_path / "again")
    with pytest.raises(UserError, match=r"step 25: .*max_skipped=2"):
        run(tmp_path / "again", rows, *few, bad=bad)
    assert_same_run(tmp_path / "few", tmp_path / "again")
    run(tmp_path / "again", rows, *changes, bad=bad)
    assert steps(tmp_path / "again", "skipped") == [14, 18, 25]
    assert "step 25: non-finite value" in (tmp_path / "again" / "log.txt").read_text()


def test_spikes_match_the_recorded_metrics(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(guard, "WINDOW", 16)
    changes = ("steps=40", "log_every_steps=1", "guard.sigmas=0.5", "checkpoint.every_steps=50")
    run(tmp_path / "skip", rows, *changes, "guard.spike=skip", bad=())
    recorded = sorted(
        lines(tmp_path / "skip", "train") + lines(tmp_path / "skip", "skipped"),
        key=lambda line: line["step"],
    )
    figures = np.array([[line["loss"], line["gradient_norm"]] for line in recorded])
    window, expected = figures[:16].copy(), []
    for i in range(16, 40):
        if (figures[i] > window.mean(0) + 0.5 * window.std(0)).any():
            expected.append(i + 1)
        else:  # spikes stay out of the history
            window[i % 16] = figures[i]
    assert 1 < len(expected) < 24
    assert steps(tmp_path / "skip", "skipped") == expected
    with pytest.raises(UserError, match=f"step {expected[0]}: spike"):
        run(tmp_path / "stop", rows, *changes, "guard.spike=stop", bad=())
    run(tmp_path / "stop", rows, *changes, "guard.spike=skip", bad=())
    assert_same_run(tmp_path / "stop", tmp_path / "skip")


def test_loss_history_is_reset_at_phase_start():
    config, grads = GuardConfig(spike="stop"), {"embeddings": jnp.ones(4)}
    usual = guard.init_history()._replace(figures=jnp.ones((guard.WINDOW, 2)))
    usual = guard.reset_at_phase_start(usual, jnp.array(False))
    loss = jnp.float32(3)
    _, stats = guard.check_step(config, usual, jnp.int32(200), loss, grads)
    assert stats.stops
    new = guard.reset_at_phase_start(usual, jnp.array(True))
    recent, stats = guard.check_step(config, new, jnp.int32(200), loss, grads)
    assert not stats.is_bad
    np.testing.assert_array_equal(recent.figures[200 % guard.WINDOW], [3, 2])
    assert jnp.isnan(recent.figures).sum() == 2 * (guard.WINDOW - 1)


@pytest.mark.parametrize(("loss", "is_spike"), [(3.0001, False), (2.0, False), (3.02, True)])
def test_rounding_errors_of_a_constant_loss_are_no_spike(loss, is_spike):
    """A spike is 5 standard deviations above the mean, at least 5 thousandths of it."""
    history = guard.init_history()._replace(figures=jnp.full((guard.WINDOW, 2), 3.0))
    config, grads = GuardConfig(spike="stop", sigmas=5.0), {"embeddings": jnp.ones(9)}
    _, stats = guard.check_step(config, history, jnp.int32(200), jnp.float32(loss), grads)
    assert bool(stats.is_bad) == is_spike


@pytest.mark.parametrize(
    ("norms", "layer"),
    [
        ({"layer_10": math.nan, "layer_2": math.inf, "masked_lm": math.nan}, "layer_2"),
        ({"masked_lm": math.nan, "pooler": 1.0}, "masked_lm"),
        ({"layer_0": 2.0, "pooler": 9.0}, "pooler"),
    ],
)
def test_first_bad_layer_is_named(norms, layer):
    norms = {"embeddings": 1.0, **norms}
    norm = math.hypot(*norms.values())
    stats = guard.StepStats(True, True, np.array([1.0, norm]), norms)
    bad_step = guard.read_stats(3, stats)
    assert bad_step.kind == ("spike" if math.isfinite(norm) else "nonfinite")
    assert str(bad_step).endswith(f"gradient in {layer}")
