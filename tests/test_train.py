"""Training loop: exact resumption, device layouts, outputs of a run, and rejected configs."""

import contextlib
import dataclasses
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
from unittest import mock

import jax
import numpy as np
import pytest

from bert_jax import cli
from bert_jax.config.flags import load
from bert_jax.config.schema import Config, MeshConfig, OptimConfig, PhaseConfig
from bert_jax.data import wordpiece
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.objectives import pretraining
from bert_jax.objectives.base import Phase
from bert_jax.runs import checkpoint, workdir
from bert_jax.runtime import device, sharding
from bert_jax.runtime.progress import Progress
from bert_jax.training import evaluate, log, optim
from bert_jax.training import step as step_lib
from tests.helpers import processes
from tests.helpers.runs import (
    ONE_DEVICE,
    VOCABULARY,
    arguments,
    assert_same_run,
    command,
    pretrain,
    refused,
)

PHASES = (
    "steps=160",
    "phases[0].fraction=0.75",
    "phases[1].fraction=0.25",
    "phases[1].batch_size=4",
)


@pytest.mark.slow
def test_killed_run_resumes_bitwise_identical(tmp_path, rows):
    both, options = [rows(32, 3), rows(64, 4)], {"phases": ",32,64"}
    changes = (*PHASES, "checkpoint.every_steps=7", "accumulation=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = pretrain(whole, both, *changes, **options)
    assert done.returncode == 0, done.stderr
    rng, kills = random.Random(0), 0
    for lines in (8, 24):
        process = processes.Process(command(broken, both, *changes, **options), env=ONE_DEVICE)
        # Kill at a random moment, once the run has got further than last time.
        path = broken / "metrics.jsonl"
        while process.poll() is None:
            if path.exists() and len(path.read_bytes().splitlines()) >= lines:
                time.sleep(rng.uniform(0, 0.05))
                process.send_signal(signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
                break
            time.sleep(0.005)
    last = pretrain(broken, both, *changes, **options)
    assert last.returncode == 0, last.stderr
    assert kills == 2
    starts = workdir.read_lines(broken / "starts.jsonl")
    assert len(starts) == 3
    assert starts[-1]["step"] > 0
    assert_same_run(broken, whole)


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_resumes(tmp_path, rows):
    changes = ("steps=150", "checkpoint.every_steps=1000")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert pretrain(whole, [rows()], *changes).returncode == 0
    process = processes.Process(command(stopped, [rows()], *changes), env=ONE_DEVICE)
    path = stopped / "metrics.jsonl"
    while not path.exists() or len(path.read_bytes().splitlines()) < 3:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    process.terminate()
    _, result = process.communicate(timeout=120)
    assert process.returncode == cli.EXIT_INTERRUPTED, result
    step = int(re.search(r"saved step (\d+)", result)[1])
    assert 0 < step < 150
    again = pretrain(stopped, [rows()], *changes)
    assert again.returncode == 0, again.stderr
    assert f"resuming at step {step} of 150" in again.stderr
    assert_same_run(stopped, whole)


# Writes a line longer than a pipe's buffer, which blocks until the test reads it.
WRITING = """
from bert_jax.runtime.progress import Progress
from bert_jax.runtime.signals import catch_signals
with Progress("train", 1, "steps") as progress, catch_signals(progress) as interrupted:
    progress.say("x" * 1_000_000)
    print(interrupted())
"""


def test_sigterm_during_a_blocked_write_is_handled():
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ONE_DEVICE, "PYTHONUNBUFFERED": ""},
    )
    assert process.stderr.read(1) == b"x"
    process.terminate()
    out, result = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, b"True\n"), result[-1000:]
    assert b"stopping after this step" in result


@pytest.mark.slow
def test_second_signal_exits_at_once_and_keeps_checkpoints(tmp_path, rows):
    changes = ("steps=150", "checkpoint.every_steps=40")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert pretrain(whole, [rows()], *changes).returncode == 0
    slow = command(stopped, [rows()], *changes)
    # From the second save on, a save takes longer than the test waits.
    slow[2] = (
        "import time; from bert_jax import checkpoint; seal, saves = checkpoint.seal, []; "
        "checkpoint.seal = lambda *a: (saves.append(time.sleep(600 * len(saves))), seal(*a)); "
    ) + slow[2]
    process = processes.Process(slow, env=ONE_DEVICE)
    while not (stopped / "checkpoints" / "40").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    while "repeat the signal to stop without saving" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 128 + signal.SIGINT
    again = pretrain(stopped, [rows()], *changes)
    assert again.returncode == 0, again.stderr
    assert "resuming at step 40 of 150" in again.stderr
    assert_same_run(stopped, whole)


def run_steps(config, phase, devices, steps):
    mesh = sharding.make_mesh(config.mesh, devices)
    init, shapes = step_lib.initial_state(config, phase, mesh)
    step = step_lib.compile_step(config, phase, mesh, shapes)
    state, seen = init(jax.numpy.uint32(config.seed)), []
    for batch in phase.batches(0, steps, 0, 1):
        state, sums, _ = step(state, sharding.shard_batch(batch, mesh))
        seen.append(evaluate.means(sums))
    return jax.device_get(state.params), seen


LAYOUTS = [
    (8, MeshConfig()),
    (8, MeshConfig(data=1, fsdp=8)),
    (8, MeshConfig(data=4, tensor=2)),
    (8, MeshConfig(data=2, fsdp=2, tensor=2)),
]


@pytest.fixture(scope="module")
def prepared(rows):
    """Return a config and its phase, with the usual dropout and masking."""
    config = load([*arguments("steps=20", "log_every_steps=1")])
    config.phases = (PhaseConfig(rows=str(rows())),)
    config, _, _, (phase,) = pretraining.make_phases(config)
    return config, phase


@pytest.fixture(scope="module")
def on_one_device(prepared):
    return run_steps(*prepared, jax.devices()[:1], 20)


@pytest.mark.parametrize(("count", "mesh"), LAYOUTS)
def test_results_are_independent_of_the_device_layout(prepared, on_one_device, count, mesh):
    config, phase = prepared
    one, expected = on_one_device
    config = dataclasses.replace(config, mesh=mesh)
    many, result = run_steps(config, phase, jax.devices()[:count], 20)
    for a, b in zip(result, expected, strict=True):
        # The fraction of tokens that are not padding is exact.
        assert a["real_fraction"] == b["real_fraction"]
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), many, one)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_other_optimizers_match_on_a_mesh_and_restore(prepared, tmp_path, optimizer):
    """A mesh gives the same parameters; a checkpoint holds their average and restores bitwise."""
    config, phase = prepared
    changed = dataclasses.replace(config.optim, optimizer=optimizer, average_decay=0.5)
    config = dataclasses.replace(config, optim=changed)
    one, _ = run_steps(config, phase, jax.devices()[:1], 3)
    config = dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    many, _ = run_steps(config, phase, jax.devices(), 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), many, one)

    mesh = sharding.make_mesh(config.mesh)
    init, shapes = step_lib.initial_state(config, phase, mesh)
    state = init(jax.numpy.uint32(0))
    state = state._replace(params=jax.tree.map(lambda x: x + 1, state.params))
    checkpoints = checkpoint.Checkpoints(tmp_path / "checkpoints", config.checkpoint)
    checkpoints.save(1, *step_lib.checkpoint_parts(state))
    restored = step_lib.restore(checkpoints, 1, shapes, 0)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    loaded = checkpoints.restore(1, *step_lib.checkpoint_parts(shapes))[0]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a + 1, b), loaded, state.params)
    checkpoints.close()


@pytest.mark.slow
def test_checkpoint_restores_across_device_layouts(prepared, tmp_path):
    config, phase = prepared
    shapes = []
    for count, mesh in LAYOUTS:
        mesh = sharding.make_mesh(mesh, jax.devices()[:count])
        init, abstract = step_lib.initial_state(config, phase, mesh)
        shapes.append((init, abstract))
    for i, (init, _) in enumerate(shapes):
        state = init(jax.numpy.uint32(i))
        folder = checkpoint.Checkpoints(tmp_path / str(i), config.checkpoint)
        folder.save(1, state.params, {"optimizer": state.optimizer})
        for _, there in shapes:
            result = folder.restore(1, there.params, {"optimizer": there.optimizer})
            placed = jax.tree.map(lambda x: x.sharding, result)
            expected = (there.params, {"optimizer": there.optimizer})
            assert placed == jax.tree.map(lambda x: x.sharding, expected)
            jax.tree.map(
                np.testing.assert_array_equal,
                result,
                (state.params, {"optimizer": state.optimizer}),
            )
        folder.close()


def test_batches_and_masks_are_bitwise_equal_on_any_mesh(rows):
    config = load(arguments())
    config.phases = (PhaseConfig(rows=str(rows())),)
    config, _, _, (phase,) = pretraining.make_phases(config)
    batch = next(phase.batches(3, 4, 0, 1))
    halves = [next(phase.batches(3, 4, process, 2)) for process in range(2)]
    for name, value in batch.items():
        np.testing.assert_array_equal(value, np.concatenate([half[name] for half in halves]))
    inputs = jax.jit(phase.objective.prepare)
    key = jax.random.fold_in(jax.random.key(0), 3)
    meshes = [sharding.make_mesh(MeshConfig(), jax.devices()[:n]) for n in (1, 2, 8)]
    one, *more = [jax.device_get(inputs(sharding.shard_batch(batch, mesh), key)) for mesh in meshes]
    for other in more:
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_accumulation_equals_the_whole_batch(rows):
    changes = ("model.dropout=0", "model.attention_dropout=0", "steps=10", "log_every_steps=1")
    results = []
    for parts in (1, 4):
        config = load(arguments(*changes, f"accumulation={parts}"))
        config.phases = (PhaseConfig(rows=str(rows())),)
        config, _, _, (phase,) = pretraining.make_phases(config)
        results.append(run_steps(config, phase, jax.devices()[:1], 5))
    (params, seen), (params_4, seen_4) = results
    for a, b in zip(seen, seen_4, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), params, params_4)


def test_end_to_end_run_learns_and_writes_its_outputs(tmp_path, rows, capsys):
    folder, text = tmp_path / "run", "The king [MASK] the [MASK]."
    done = pretrain(
        folder,
        [rows()],
        f"sample_texts=A [MASK].|{text}",
        "steps=300",
        "evaluate_every_steps=100",
        "checkpoint.every_steps=100",
        "optim.learning_rate=5e-3",
        "optim.average_decay=0.99",
        "checkpoint.keep_last=1",
    )
    assert done.returncode == 0, done.stderr
    lines = workdir.read_lines(folder / "metrics.jsonl")
    train = [line for line in lines if line["split"] == "train"]
    heldout = [line for line in lines if line["split"] == "heldout"]
    assert [line["step"] for line in train] == list(range(5, 301, 5))
    assert [line["step"] for line in heldout] == [100, 200, 300]
    assert heldout[-1]["masked_lm_loss"] < 0.6 * train[0]["masked_lm_loss"]
    assert heldout[-1]["masked_lm_perplexity"] == pytest.approx(
        np.exp(heldout[-1]["masked_lm_loss"])
    )
    assert 0.5 < train[0]["real_fraction"] <= 1
    assert train[0]["learning_rate"] == pytest.approx(5e-3 * 4 / 5)
    start = workdir.read_lines(folder / "starts.jsonl")[0]
    assert {"command", "commit", "versions", "devices", "step"} <= set(start)
    assert workdir.read_config(folder).model.vocab_size == 150
    assert list((folder / "tensorboard").iterdir())
    best = min(heldout, key=lambda line: line["masked_lm_loss"])["step"]
    kept = {int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit()}
    assert kept == {best, 300}
    capsys.readouterr()

    samples = workdir.read_lines(folder / "samples.jsonl")
    assert [(line["step"], line["text"]) for line in samples[::2]] == [(step, "A [MASK].") for step in (100, 200, 300)]  # fmt: skip
    fill = ["fill-mask", "--workdir", str(folder), "--checkpoint", "latest", "--json", text]
    assert cli.main(fill) == 0
    answer = json.loads(capsys.readouterr().out)
    for mask, sampled in zip(answer["masks"], samples[-1]["masks"], strict=True):
        assert [c["token"] for c in mask] == [c["token"] for c in sampled]
        output = [c["probability"] for c in sampled]
        assert [c["probability"] for c in mask] == pytest.approx(output, rel=1e-4)
    assert [len(mask) for mask in answer["masks"]] == [5, 5]
    # The corpus grammar allows few words at either mask.
    assert answer["masks"][0][0]["probability"] > 0.05
    assert cli.main(["evaluate", "--workdir", str(folder), "--checkpoint", "latest", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["masked_lm_loss"] == pytest.approx(heldout[-1]["masked_lm_loss"], rel=1e-5)
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "curve.png")]) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    finished = pretrain(
        folder,
        [rows()],
        "steps=300",
        "evaluate_every_steps=100",
        "checkpoint.every_steps=100",
        "optim.learning_rate=5e-3",
        "optim.average_decay=0.99",
        "checkpoint.keep_last=1",
    )
    assert finished.returncode == 0
    assert len(workdir.read_lines(folder / "metrics.jsonl")) == len(lines)

    output = json.loads((folder / "config.json").read_text())
    output["config"]["model"]["attention"] = "splash"
    (folder / "config.json").write_text(json.dumps(output))
    assert checkpoint.load_model(folder)[0].model.attention == "xla", "trained on a TPU, used here"


def test_logging_runs_nothing_on_the_device(tmp_path, monkeypatch):
    """Any computation on the device would queue behind the training steps in flight."""
    rates = OptimConfig(learning_rate=1e-3, warmup_steps=4)
    config = Config(steps=8, log_every_steps=3, optim=rates)
    asked = []

    def schedule(*about):
        rate = optim.schedule(*about)
        return lambda step: asked.append(step) or rate(step)

    monkeypatch.setattr(log, "optim", types.SimpleNamespace(schedule=schedule))
    task = types.SimpleNamespace(summarize=dict, describe=lambda summary: "", flops_per_row=1)
    phase = mock.Mock(spec=Phase, objective=task, batch_size=2, tokens=8)
    with (
        Progress("train", 8, "steps") as progress,
        log.Log(tmp_path, 0, config, sharding.make_mesh(MeshConfig()), progress) as written,
    ):
        written.begin(phase, 0)
        before = len(asked)
        for step in (3, 6, 8):
            written.training(step, {"real_fraction": (np.float32(6), np.float32(8))})
    assert len(asked) == before
    lines = workdir.read_lines(tmp_path / "metrics.jsonl")
    results = [line["learning_rate"] for line in lines]
    # Rates of each line's last step (2, 5 and 7): warmup, then decay counted from step 0.
    expected = [5e-4, 3.75e-4, 1.25e-4]
    assert results == pytest.approx(expected, rel=1e-6)


def test_causal_model_learns_evaluates_and_exports(tmp_path, rows, capsys):
    folder, changes = tmp_path / "run", ("model.causal=true", "model.next_sentence=false")
    changes += ("steps=60", "evaluate_every_steps=30", "checkpoint.every_steps=30")
    argv = ["pretrain", *arguments(*changes, "optim.learning_rate=5e-3"), "--rows", str(rows())]
    capsys.readouterr()  # what preparing the rows printed
    assert cli.main([*argv, "--workdir", str(folder), "--json"]) == 0
    printed = capsys.readouterr()
    assert "held-out next token " in printed.err
    assert "held-out next token " in (folder / "log.txt").read_text()
    lines = workdir.read_lines(folder / "metrics.jsonl")
    *result, end = [json.loads(line) for line in printed.out.splitlines()]
    assert [line for line in result if line["split"] != "speed"] == lines
    assert end["split"] == "end"
    assert (end["best_step"], end["best"]) == (60, lines[-1]["loss"])
    assert end["checkpoint"] == str(folder / "checkpoints" / "60")
    # A finished run only tells its result again.
    assert cli.main([*argv, "--workdir", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**end, "seconds": 0.0}
    assert not [name for line in lines for name in line if "masked" in name]
    first, *_, last = lines
    assert last["split"] == "heldout"
    assert last["next_token_loss"] == last["loss"] < 0.8 * first["next_token_loss"]
    assert last["next_token_perplexity"] == pytest.approx(np.exp(last["loss"]))
    assert 0.1 < last["next_token_accuracy"] < 1
    best = {"best_by": "next_token_loss", "highest": False, "since": 0}
    assert workdir.read_best_by(folder) == best
    evaluate_again = ["evaluate", "--workdir", str(folder), "--checkpoint", "latest", "--json"]
    assert cli.main(evaluate_again) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["next_token_loss"] == pytest.approx(last["next_token_loss"], rel=1e-5)
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "curve.png")]) == 0
    actual = refused(capsys, "fill-mask", "--workdir", folder, "The king [MASK].")
    assert "reads from left to right (config.model.causal)" in actual
    assert cli.main(["export", "--workdir", str(folder), "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| next_token_loss |" in card
    assert "`BertLMHeadModel`" in card


def test_flops_count_next_token_predictions(rows):
    """A causal model predicts at every position of a row but the last: P = T - 1."""
    counts = []
    for changes in ((), ("model.causal=true",)):
        config = load(arguments("model.next_sentence=false", *changes))
        config.phases = (PhaseConfig(rows=str(rows())),)
        config, _, _, (phase,) = pretraining.make_phases(config)
        counts.append((phase.objective.masker.predictions, phase.objective.flops_per_row))
    (masked, flops), (following, more) = counts
    assert following == 31
    assert more - flops == 3 * (31 - masked) * 2 * 32 * (150 + 32)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["optim.lerning_rate=1"], "did you mean config.optim.learning_rate"),
        (["model.heads=5"], "config.model.heads is 5"),
        (["batch_size=ten"], "batch_size=ten"),
        (["model.vocab_size=77"], "a vocabulary of 150, but config.model.vocab_size is 77"),
        (["model.positions=16", "phases[0].tokens=0"], "T=32, but config.model.positions is 16"),
        (["phases[0].tokens=64"], "T=32, but config.phases[0].tokens is 64"),
        (["mesh.data=3"], "does not fit 8 devices"),
        (["mesh.data=8", "batch_size=12"], "not divisible by 8"),
        (["model.attention=splash"], "'splash' runs on a tpu only, this is a cpu: set it to 'xla'"),
        (["model.attention=flash"], "config.model.attention is 'flash': it must be one of 'auto'"),
    ],
)
def test_invalid_config_is_rejected_before_the_run_starts(
    tmp_path, rows, capsys, changes, expected
):
    chosen = arguments(*changes)
    result = refused(capsys, "pretrain", *chosen, "--rows", rows(), "--workdir", tmp_path / "w")
    assert expected in result
    assert not (tmp_path / "w").exists()


def test_missing_accelerator_is_a_one_line_error(tmp_path, rows):
    done = pretrain(tmp_path / "w", [rows()], "platform=gpu")
    assert done.returncode == cli.EXIT_USER_ERROR
    assert "config.platform is 'gpu', but JAX finds no such device" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "w").exists()


def test_damaged_shard_error_names_the_shard(tmp_path, rows, capsys):
    import shutil

    for damage, expected in (
        (lambda data: data[:-100], "truncated or altered"),
        (lambda data: data[:999] + bytes([data[999] ^ 1]) + data[1000:], "fails its checksum"),
    ):
        folder = tmp_path / expected.split()[0]
        shutil.copytree(rows(), folder)
        shard = sorted(folder.glob("train-*"))[0]
        shard.write_bytes(damage(shard.read_bytes()))
        run = ("pretrain", *arguments(), "--rows", folder, "--workdir", tmp_path / "w")
        result = refused(capsys, *run)
        assert expected in result
        assert shard.name in result
    assert not (tmp_path / "w").exists()


def test_rows_with_different_vocabularies_are_rejected(tmp_path, rows, corpus, capsys):
    from bert_jax.data import prepare, wordpiece

    wordpiece.train([str(corpus)], str(tmp_path / "v"), size=140)
    other = tmp_path / "rows"
    prepare.prepare([str(corpus)], str(tmp_path / "v"), str(other), tokens=64, workers=1)
    capsys.readouterr()
    result = refused(
        capsys,
        "pretrain",
        *arguments(phases=",32,64"),
        "--rows",
        rows(),
        "--rows",
        other,
        "--workdir",
        tmp_path / "w",
    )
    assert "vocabulary" in result


def test_workdir_rejects_a_changed_config(tmp_path, rows, capsys):
    folder = tmp_path / "run"
    assert pretrain(folder, [rows()], "steps=10").returncode == 0
    run = ("pretrain", "--rows", rows(), "--workdir", folder)
    before = (folder / "metrics.jsonl").read_bytes()
    result = refused(capsys, *run, *arguments("steps=20", "seed=1"))
    assert "steps: was 10, is now 20" in result
    assert "seed: was 0, is now 1" in result
    assert (folder / "metrics.jsonl").read_bytes() == before
    forced = pretrain(folder, [rows()], "steps=20", options=["--resume=force"])
    assert forced.returncode == 0, forced.stderr
    assert workdir.read_lines(folder / "metrics.jsonl")[-1]["step"] == 20


def test_workdir_in_use_is_rejected(tmp_path, rows):
    from bert_jax.storage import files

    folder = tmp_path / "run"
    with files.lock_folder(folder):
        done = pretrain(folder, [rows()], "steps=10")
    assert done.returncode == cli.EXIT_USER_ERROR
    assert f"in use by another process (pid {os.getpid()}" in done.stderr.splitlines()[-1]


def test_missing_run_is_rejected(tmp_path, capsys):
    assert "holds no run" in refused(capsys, "evaluate", "--workdir", tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"model_type": "bert"}')
    message = refused(capsys, "evaluate", "--workdir", tmp_path / "hf")
    assert "hf holds no run: its config.json is not of this project; import" in message
    assert "no checkpoint: it has no config.json" in refused(
        capsys, "fill-mask", "--init", tmp_path
    )
    assert "holds no run" in refused(capsys, "report", tmp_path)


def test_resumed_run_must_have_the_same_settings_and_teacher(tmp_path):
    config, data = Config(phases=(PhaseConfig(),)), [{"digest": "a", "teacher": "t"}]
    workdir.write_or_check_config(tmp_path, config, data, {}, False, VOCABULARY)
    faster = dataclasses.replace(config.model, attention="cudnn")
    free = dataclasses.replace(config, model=faster, mesh=MeshConfig(fsdp=2))
    workdir.write_or_check_config(tmp_path, free, data, {}, False, VOCABULARY)
    no_dropout = dataclasses.replace(config.model, attention_dropout=0.0)
    for changed, rows, problem in (
        (
            dataclasses.replace(config, model=no_dropout),
            data,
            r"model\.attention_dropout: was 0\.1",
        ),
        (config, [{"digest": "a", "teacher": "u"}], "its teacher had other parameters"),
    ):
        with pytest.raises(UserError, match=problem):
            workdir.write_or_check_config(tmp_path, changed, rows, {}, False, VOCABULARY)


def test_phases_on_the_same_rows_continue_their_epoch(rows):
    half = [PhaseConfig(rows=str(rows()), fraction=0.5, batch_size=size) for size in (1, 2)]
    config = Config(phases=tuple(half), steps=8, batch_size=2, model=dataclasses.replace(
        Config().model, positions=64))  # fmt: skip
    _, _, data, phases = pretraining.make_phases(config)
    read = [
        row.tobytes()
        for phase in phases
        for batch in phase.batches(0, 4, 0, 1)
        for row in batch["tokens"]
    ]
    assert len(read) == 12 < data[0]["train"]["rows"]
    assert len(set(read)) == 12


def test_config_round_trips_through_a_workdir(tmp_path):
    config = Config(phases=(PhaseConfig(fraction=0.5), PhaseConfig(fraction=0.5)))
    workdir.write_or_check_config(
        tmp_path, config, [{"digest": "a"}, {"digest": "b"}], {}, False, VOCABULARY
    )
    assert workdir.read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("digests", "fractions", "since"),
    [
        ("a", (1.0,), 0),
        ("ab", (0.25, 0.75), 26),
        ("aab", (0.25, 0.25, 0.5), 51),
        ("abb", (0.25, 0.25, 0.5), 26),  # such as a larger batch on the same rows
        ("aba", (0.25, 0.25, 0.5), 51),
        ("aa", (0.25, 0.75), 0),
    ],
)
def test_only_metrics_on_the_last_rows_rank_checkpoints(tmp_path, digests, fractions, since):
    """The step at which a phase ends is evaluated on that phase's rows."""
    phases = tuple(PhaseConfig(fraction=fraction) for fraction in fractions)
    config, data = Config(phases=phases, steps=100), [{"digest": digest} for digest in digests]
    best = {"best_by": "masked_lm_loss", "highest": False}
    workdir.write_or_check_config(tmp_path, config, data, best, False, VOCABULARY)
    assert workdir.read_best_by(tmp_path) == best | {"since": since}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("vocab.txt", "[unused0]", "[unused_"), ("vocab.json", "true", "false")],
)
def test_changed_vocabulary_is_detected(tmp_path, name, old, new):
    vocabulary = Vocabulary((*wordpiece.SPECIAL, "[unused0]", "cat"), True)
    config = Config(phases=(PhaseConfig(),))
    data = [{"digest": "a"}]
    workdir.write_or_check_config(tmp_path, config, data, {}, False, vocabulary)
    assert workdir.read_vocabulary(tmp_path) == vocabulary
    path = tmp_path / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match="is not the vocabulary that the model was trained with"):
        workdir.read_vocabulary(tmp_path)


def test_garbage_collection_is_restored_after_compilation():
    """It stays disabled if it was disabled before."""
    assert gc.isenabled()
    with contextlib.suppress(ZeroDivisionError), device.no_garbage_collection():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with device.no_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_commit_is_dirty_only_after_relevant_changes(tmp_path, monkeypatch):
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    package, results, page = (tmp_path / name for name in ("package", "results.jsonl", "README.md"))
    package.mkdir()
    code = package / "code.py"
    assert workdir.commit(package) is None  # not a checkout
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert workdir.commit(package) is None  # no commits yet
    code.write_text("1")
    results.write_text("1")
    page.write_text("1")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "first"], check=True)
    short = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    results.write_text("2")
    page.write_text("2")
    (tmp_path / "new").write_text("not git's")
    assert workdir.commit(package) == short
    installed = tmp_path / "env" / "site-packages"  # in a checkout, but not a part of it
    installed.mkdir(parents=True)
    assert workdir.commit(installed) is None
    (tmp_path / "settings.py").write_text("2")
    subprocess.run([*git, "add", "settings.py"], check=True)
    assert workdir.commit(package) == f"{short}-dirty"
    subprocess.run([*git, "reset", "--quiet"], check=True)
    assert workdir.commit(package) == short
    code.write_text("2")
    assert workdir.commit(package) == f"{short}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert workdir.commit(package) is None  # git is not installed
    (tmp_path / "git").write_text("")
    assert workdir.commit(package) is None  # git is not executable
