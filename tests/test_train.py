"""Training loop: exact resumption, device layouts, outputs of a run, and rejected configs."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import cli
from bert_jax import train as train_lib
from bert_jax.config.schema import Config, MeshConfig, PhaseConfig
from bert_jax.data import prepare, wordpiece
from bert_jax.data.loader import RowDataset
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.objectives import pretraining
from bert_jax.runs import checkpoint, workdir
from bert_jax.runtime import sharding
from bert_jax.runtime.signals import Interrupted
from bert_jax.tools.report import levels
from bert_jax.training import evaluate, optim
from bert_jax.training import state as state_lib
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
    small_phase,
    train_here,
)

PHASES = ("phases[0].fraction=0.75", "phases[1].fraction=0.25", "phases[1].batch_size=4")


@pytest.mark.slow
@pytest.mark.newest
def test_killed_run_resumes_bitwise_identical(tmp_path, rows):
    """A kill leaves the files that a stopped process has written; the process itself goes on."""
    both, options = [rows(32, 3), rows(64, 4)], {"phases": ",32,64"}
    changes = ("steps=80", *PHASES, "checkpoint.every_steps=7", "accumulation=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = processes.Process(command(whole, both, *changes, **options), env=ONE_DEVICE)
    path = whole / "metrics.jsonl"
    while not path.exists() or len(path.read_bytes().splitlines()) < 8:  # of 24
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    process.stop()
    shutil.copytree(whole, broken)
    process.send_signal(signal.SIGCONT)
    _, error = process.communicate()
    assert process.returncode == 0, error
    last = pretrain(broken, both, *changes, **options)
    assert last.returncode == 0, last.stderr
    first, second = workdir.read_lines(broken / "starts.jsonl")
    assert first["step"] == 0 < second["step"]
    assert_same_run(broken, whole)


def test_sigterm_saves_and_the_same_command_resumes(tmp_path, rows, monkeypatch):
    changes, compiled = ("steps=30", "checkpoint.every_steps=1000"), {}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train_here(whole, rows, *changes, compiled=compiled)
    batches, shard_batch = [], train_lib.shard_batch

    def signal_at_step_12(batch, mesh):
        batches.append(batch)
        if len(batches) == 12:
            signal.raise_signal(signal.SIGTERM)
        return shard_batch(batch, mesh)

    with monkeypatch.context() as patched:
        patched.setattr(train_lib, "shard_batch", signal_at_step_12)
        with pytest.raises(Interrupted, match="saved step 12 of 30"):
            train_here(stopped, rows, *changes, compiled=compiled, save_on_signal=True)
    train_here(stopped, rows, *changes, compiled=compiled)
    assert_same_run(stopped, whole)
    text = (stopped / "log.txt").read_text()
    assert "resuming at step 12 of 30" in text
    # Metrics of the rest of a window are not shown as those of a step.
    assert "step 1: " in text
    assert "step 13: " not in text


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
    folder = tmp_path / "run"
    slow = command(folder, [rows()], "steps=150", "checkpoint.every_steps=40")
    # From the second save on, a save takes longer than the test waits.
    slow[2] = (
        "import time; from bert_jax.runs import manifests; seal, saves = manifests.seal, []; "
        "manifests.seal = lambda *a: (saves.append(time.sleep(600 * len(saves))), seal(*a)); "
    ) + slow[2]
    process = processes.Process(slow, env=ONE_DEVICE)
    while not (folder / "checkpoints" / "40").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    while "repeat the signal" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 128 + signal.SIGINT
    checkpoint.move_damaged(folder)  # as a run that resumes
    assert checkpoint.load_model(folder, "latest")[3] == 40


def run_steps(config, phase, devices, steps):
    mesh = sharding.make_mesh(config.mesh, devices)
    init, shapes = state_lib.initial_state(config, phase, mesh)
    step = step_lib.compile_step(config, phase, mesh, shapes)
    state, seen = init(jax.numpy.uint32(config.seed)), []
    for batch in phase.batches(0, steps, 0, 1):
        state, sums, _ = step(state, sharding.shard_batch(batch, mesh))
        seen.append(evaluate.means(sums))
    return jax.device_get(state.params), seen


LAYOUTS = [MeshConfig(), MeshConfig(data=1, fsdp=8), MeshConfig(data=2, fsdp=2, tensor=2)]


@pytest.fixture(scope="module")
def prepared(rows):
    """Return a config and its phase, with the usual dropout and masking."""
    return small_phase(rows, "steps=20", "log_every_steps=1")


@pytest.fixture(scope="module")
def on_one_device(prepared):
    return run_steps(*prepared, jax.devices()[:1], 8)


@pytest.mark.parametrize("mesh", [pytest.param(LAYOUTS[1], marks=pytest.mark.nightly), LAYOUTS[2]])
def test_results_are_independent_of_the_device_layout(prepared, on_one_device, mesh):
    config, phase = prepared
    one, expected = on_one_device
    many, result = run_steps(dataclasses.replace(config, mesh=mesh), phase, jax.devices(), 8)
    for a, b in zip(result, expected, strict=True):
        # The fraction of tokens that are not padding is exact.
        assert a["real_fraction"] == b["real_fraction"]
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), many, one)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_other_optimizers_match_on_a_mesh_and_restore(prepared, tmp_path, monkeypatch, optimizer):
    """A mesh gives the same parameters; a checkpoint holds their average and restores bitwise.

    The loss needs no model, whose step on a mesh other tests compare.
    """
    config, phase = prepared

    def loss_terms(params, inputs, key):
        losses = [jnp.sin(x + i).sum() for i, x in enumerate(jax.tree.leaves(params))]
        return {"loss": (sum(losses), jnp.float32(1))}

    monkeypatch.setattr(phase.objective, "make_inputs", lambda batch, key: batch)
    monkeypatch.setattr(phase.objective, "loss_terms", loss_terms)
    monkeypatch.setattr(phase.objective, "normalizers", lambda inputs: {"loss": 1.0})
    changed = dataclasses.replace(config.optim, optimizer=optimizer, average_decay=0.5)
    one = dataclasses.replace(config, optim=changed)
    many = dataclasses.replace(one, mesh=MeshConfig(data=1, fsdp=2, tensor=2))
    four = jax.devices()[:4]
    results = run_steps(one, phase, four[:1], 3), run_steps(many, phase, four, 3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), *(r[0] for r in results)
    )
    init, shapes = state_lib.initial_state(many, phase, sharding.make_mesh(many.mesh, four))
    state = init(jax.numpy.uint32(0))
    state = state._replace(params=jax.tree.map(lambda x: x + 1, state.params))
    checkpoints = checkpoint.Checkpoints(tmp_path / "checkpoints", config.checkpoint)
    checkpoints.save(1, *state_lib.checkpoint_parts(state))
    restored = state_lib.restore(checkpoints, 1, shapes, 0)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    loaded = checkpoints.restore(1, *state_lib.checkpoint_parts(shapes))[0]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a + 1, b), loaded, state.params)
    checkpoints.close()


@pytest.mark.slow
def test_checkpoint_restores_across_device_layouts(prepared, tmp_path):
    config, phase = prepared
    meshes = [sharding.make_mesh(mesh, jax.devices()) for mesh in LAYOUTS]
    meshes.append(sharding.make_mesh(MeshConfig(), jax.devices()[:1]))
    states = [state_lib.initial_state(config, phase, mesh) for mesh in meshes]
    for i, (init, _) in enumerate(states):
        state = init(jax.numpy.uint32(i))
        folder = checkpoint.Checkpoints(tmp_path / str(i), config.checkpoint)
        folder.save(1, state.params, {"optimizer": state.optimizer})
        there = states[i - 1][1]
        result = folder.restore(1, there.params, {"optimizer": there.optimizer})
        expected = (there.params, {"optimizer": there.optimizer})
        placed = jax.tree.map(lambda x: x.sharding, result)
        assert placed == jax.tree.map(lambda x: x.sharding, expected)
        saved = (state.params, {"optimizer": state.optimizer})
        jax.tree.map(np.testing.assert_array_equal, result, saved)
        folder.close()


@pytest.mark.parametrize("changes", [(), ("masking.whole_word=true", "masking.span=4")])
def test_batches_and_masks_are_bitwise_equal_on_any_mesh(rows, changes):
    _, phase = small_phase(rows, *changes)
    batch = next(phase.batches(3, 4, 0, 1))
    halves = [next(phase.batches(3, 4, process, 2)) for process in range(2)]
    for name, value in batch.items():
        np.testing.assert_array_equal(value, np.concatenate([half[name] for half in halves]))
    inputs = jax.jit(phase.objective.make_inputs)
    key = jax.random.fold_in(jax.random.key(0), 3)
    meshes = [sharding.make_mesh(MeshConfig(), jax.devices()[:n]) for n in (1, 2, 8)]
    one, *more = [jax.device_get(inputs(sharding.shard_batch(batch, mesh), key)) for mesh in meshes]
    for other in more:
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_accumulation_equals_the_whole_batch(rows):
    changes = ("model.dropout=0", "model.attention_dropout=0", "steps=10", "log_every_steps=1")
    results = []
    for parts in (1, 4):
        run = small_phase(rows, *changes, f"accumulation={parts}")
        results.append(run_steps(*run, jax.devices()[:1], 5))
    (params, seen), (params_4, seen_4) = results
    for a, b in zip(seen, seen_4, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), params, params_4)


TEXT = "The king [MASK] the [MASK]."
END_TO_END = (
    *("steps=302", "evaluate_every_steps=100", "checkpoint.every_steps=100"),
    *("optim.learning_rate=5e-3", "optim.average_decay=0.99", "checkpoint.keep_last=1"),
)


@pytest.fixture(scope="module")
def finished(rows, tmp_path_factory):
    """The workdir of a run of the command line, which no test changes."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    done = pretrain(folder, [rows()], f"sample_texts={('A [MASK].', TEXT)}", *END_TO_END)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.newest
def test_end_to_end_run_learns_and_writes_its_outputs(finished, rows):
    lines = workdir.read_lines(finished / "metrics.jsonl")
    train = [line for line in lines if line["split"] == "train"]
    heldout = [line for line in lines if line["split"] == "heldout"]
    assert [line["step"] for line in train] == [*range(5, 301, 5), 302]
    assert [line["step"] for line in heldout] == [100, 200, 300, 302]
    last = heldout[-1]
    losses = levels.read(str(rows()), RowDataset(rows(), "train").manifest.digest)
    assert losses
    assert last["masked_lm_loss"] < losses.unigram
    assert last["masked_lm_perplexity"] == pytest.approx(np.exp(last["masked_lm_loss"]))
    assert 0.5 < train[0]["real_fraction"] <= 1
    config = workdir.read_config(finished)
    last_steps = np.array([line["step"] - 1 for line in train])
    rates = optim.schedule(config.optim, config.steps)(last_steps)
    np.testing.assert_allclose([line["learning_rate"] for line in train], rates, rtol=1e-6)
    assert config.model.vocab_size == 150
    start = workdir.read_lines(finished / "starts.jsonl")[0]
    assert {"command", "commit", "versions", "devices", "step"} <= set(start)
    assert list((finished / "tensorboard").iterdir())
    best = min(heldout, key=lambda line: line["masked_lm_loss"])["step"]
    kept = {int(p.name) for p in (finished / "checkpoints").iterdir() if p.name.isdigit()}
    assert kept == {best, 302}
    # A finished run changes nothing.
    argv = ["pretrain", *arguments(*END_TO_END), "--rows", rows(), "--workdir", finished]
    assert cli.main([str(argument) for argument in argv]) == 0
    assert workdir.read_lines(finished / "metrics.jsonl") == lines


def test_finished_run_fills_masks_is_evaluated_and_reported(finished, tmp_path, capsys):
    def run(verb, *options):
        capsys.readouterr()
        assert cli.main([verb, *map(str, options)]) == 0
        return capsys.readouterr().out

    newest = ("--workdir", finished, "--checkpoint", "latest", "--json")
    samples = workdir.read_lines(finished / "samples.jsonl")
    sampled = [(line["step"], line["text"]) for line in samples[::2]]
    assert sampled == [(step, "A [MASK].") for step in (100, 200, 300, 302)]
    masks = json.loads(run("fill-mask", *newest, TEXT))["masks"]
    for ours, theirs in zip(masks, samples[-1]["masks"], strict=True):
        assert [c["token"] for c in ours] == [c["token"] for c in theirs]
        expected = [c["probability"] for c in theirs]
        assert [c["probability"] for c in ours] == pytest.approx(expected, rel=1e-4)
    assert [len(mask) for mask in masks] == [5, 5]
    assert masks[0][0]["probability"] > 0.05  # the grammar allows few words at either mask
    last = workdir.read_lines(finished / "metrics.jsonl")[-1]
    again = json.loads(run("evaluate", *newest))
    assert again["masked_lm_loss"] == pytest.approx(last["masked_lm_loss"], rel=1e-5)
    run("report", finished, "--out", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_heldout_means_are_of_all_batches_even_if_the_score_reads_one(rows, monkeypatch):
    _, phase = small_phase(rows)

    def loss_terms(params, x, key):
        assert not jax.sharding.get_abstract_mesh().empty  # kernels are sharded over it
        return {"loss": (x.sum(), jnp.float32(x.size))}

    fake = {
        "make_inputs": lambda batch, key: batch["x"],
        "loss_terms": loss_terms,
        "predict": lambda params, x: {"x": x},
        "score": lambda pairs: {"first": float(next(iter(pairs))[1]["x"][0])},
    }
    for name, method in fake.items():
        monkeypatch.setattr(phase.objective, name, method)
    batches = [{"x": np.full(2, value, np.float32)} for value in (1, 2, 6)]
    phase = dataclasses.replace(phase, heldout=lambda *_: iter(batches))
    measure = evaluate.make_evaluate(phase, sharding.make_mesh(MeshConfig()))
    assert measure({}) == {"loss": 3, "first": 1}


def test_workdir_rejects_a_changed_config(finished, tmp_path, rows, capsys):
    folder = shutil.copytree(finished, tmp_path / "run")
    before = (folder / "metrics.jsonl").read_bytes()
    run = ("pretrain", "--rows", rows(), "--workdir", folder)
    changed = arguments(*END_TO_END, "steps=310", "seed=1")
    result = refused(capsys, *run, *changed)
    assert "steps: was 302, is now 310" in result
    assert "seed: was 0, is now 1" in result
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert cli.main([*map(str, run), *changed, "--resume=force"]) == 0
    assert workdir.read_lines(folder / "metrics.jsonl")[-1]["step"] == 310

    output = json.loads((folder / "config.json").read_text())
    output["config"]["model"]["attention"] = "splash"
    (folder / "config.json").write_text(json.dumps(output))
    assert checkpoint.load_model(folder)[0].model.attention == "xla", "trained on a TPU, used here"


def test_causal_model_learns_and_exports(tmp_path, rows, capsys):
    folder, changes = tmp_path / "run", ("model.causal=true", "model.next_sentence=false")
    changes += ("steps=40", "evaluate_every_steps=20", "checkpoint.every_steps=20")
    argv = ["pretrain", *arguments(*changes, "optim.learning_rate=5e-3"), "--rows", str(rows())]
    argv += ["--workdir", str(folder), "--json"]
    capsys.readouterr()  # what preparing the rows printed
    assert cli.main(argv) == 0
    *result, end = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    lines = workdir.read_lines(folder / "metrics.jsonl")
    assert [line for line in result if line["split"] != "speed"] == lines
    first, *_, last = lines
    assert (end["split"], end["best_step"], end["best"]) == ("end", 40, last["loss"])
    assert end["checkpoint"] == str(folder / "checkpoints" / "40")
    # A finished run only tells its result again.
    assert cli.main(argv) == 0
    assert json.loads(capsys.readouterr().out) == {**end, "seconds": 0.0}
    assert last["next_token_loss"] == last["loss"] < 0.9 * first["next_token_loss"]
    assert last["next_token_perplexity"] == pytest.approx(np.exp(last["loss"]))
    assert 0.1 < last["next_token_accuracy"] < 1
    assert "causal" in refused(capsys, "fill-mask", "--workdir", folder, "The king [MASK].")
    assert cli.main(["export", "--workdir", str(folder), "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    for part in ("Step 40 of 40", "| next_token_loss |", "text.txt", "`BertLMHeadModel`", "jax "):
        assert part in card, part
    assert '"learning_rate": 0.005' in card


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["model.vocab_size=77"], "config.model.vocab_size"),
        (["model.positions=16", "phases[0].tokens=0"], "config.model.positions"),
        (["phases[0].tokens=64"], "config.phases[0].tokens"),
        (["model.attention=splash"], "'splash' runs on a tpu"),
    ],
)
def test_invalid_config_is_rejected_before_the_run_starts(
    tmp_path, rows, capsys, changes, expected
):
    chosen = arguments(*changes)
    result = refused(capsys, "pretrain", *chosen, "--rows", rows(), "--workdir", tmp_path / "w")
    assert expected in result
    assert not (tmp_path / "w").exists()


def test_rows_of_two_vocabularies_are_rejected(tmp_path, rows, corpus, capsys):
    run = ("pretrain", *arguments(phases=",32,64"), "--workdir", tmp_path / "w", "--rows")
    wordpiece.train([str(corpus)], str(tmp_path / "v"), size=140)
    other = tmp_path / "rows"
    prepare.prepare([str(corpus)], str(tmp_path / "v"), str(other), tokens=64, workers=1)
    assert "vocabulary" in refused(capsys, *run, rows(), "--rows", other)
    assert not (tmp_path / "w").exists()


def test_resumed_run_must_have_the_same_settings_and_teacher(tmp_path):
    config, data = Config(phases=(PhaseConfig(),)), [{"digest": "a", "teacher": "t"}]
    workdir.write_or_check_config(tmp_path, config, data, {}, False, VOCABULARY)
    faster = dataclasses.replace(config.model, attention="cudnn")
    free = dataclasses.replace(config, model=faster, mesh=MeshConfig(fsdp=2))
    workdir.write_or_check_config(tmp_path, free, data, {}, False, VOCABULARY)
    no_dropout = dataclasses.replace(config.model, attention_dropout=0.0)
    other = dataclasses.replace(config, model=no_dropout)
    for changed, rows, problem in (
        (other, data, r"model\.attention_dropout: was 0\.1"),
        (config, [{"digest": "a", "teacher": "u"}], "teacher"),
        (config, [{**data[0], "start": "s"}], "--init"),
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


@pytest.mark.parametrize(
    ("digests", "fractions", "since"),
    [
        ("abb", (0.25, 0.25, 0.5), 26),  # such as a larger batch on the same rows
        ("aba", (0.25, 0.25, 0.5), 51),
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
    vocabulary = Vocabulary((*SPECIAL, "[unused0]", "cat"), True)
    config, data = Config(phases=(PhaseConfig(),)), [{"digest": "a"}]
    workdir.write_or_check_config(tmp_path, config, data, {}, False, vocabulary)
    assert workdir.read_vocabulary(tmp_path) == vocabulary
    path = tmp_path / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match="is not the vocabulary"):
        workdir.read_vocabulary(tmp_path)


def test_commit_is_dirty_only_after_relevant_changes(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package, results = tmp_path / "package", tmp_path / "results.jsonl"
    package.mkdir()
    (package / "code.py").write_text("1")
    results.write_text("1")
    assert workdir.commit(package) is None  # not a checkout
    git("init", "--quiet")
    assert workdir.commit(package) is None  # no commits yet
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    short = git("rev-parse", "--short", "HEAD")
    results.write_text("2")
    (tmp_path / "settings.py").write_text("not git's")
    assert workdir.commit(package) == short
    installed = tmp_path / "env" / "site-packages"  # in a checkout, but not a part of it
    installed.mkdir(parents=True)
    assert workdir.commit(installed) is None
    (package / "code.py").write_text("2")
    assert workdir.commit(package) == f"{short}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert workdir.commit(package) is None  # git is not installed
