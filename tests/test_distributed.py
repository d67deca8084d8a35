"""Multi-process runs: parity, kills, changed process counts, and missing processes."""

import contextlib
import dataclasses
import functools
import os
import re
import signal
import sys
import threading
import time
from unittest import mock

import jax
import numpy as np
import pytest

from bert_jax import cli
from bert_jax.config.schema import Config, MeshConfig, PhaseConfig
from bert_jax.config.sizes import model_size
from bert_jax.errors import Unavailable, UserError
from bert_jax.objectives import pretraining
from bert_jax.runs import checkpoint, workdir
from bert_jax.runtime import distributed, sharding
from bert_jax.training.state import initial_state
from tests.helpers import processes
from tests.helpers.runs import (
    ONE_DEVICE,
    command,
    free_port,
    start_processes,
    train_here,
    wait_for_all,
)

STEPS = (
    *("steps=100", "checkpoint.every_steps=10", "checkpoint.keep_last=99"),
    *("evaluate_every_steps=100", "log_every_steps=5"),
)


def wait_for(condition, started):
    """Wait until a condition of running processes holds."""
    while not condition():
        assert all(process.poll() is None for process in started), wait_for_all(started)
        time.sleep(0.01)


def saved(folder):
    if not (folder / "checkpoints").exists():
        return []
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())


@pytest.mark.nightly
def test_run_outlives_kills_signals_damage_and_changed_process_counts(tmp_path, rows):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv = command(parts, [rows()], *STEPS)
    started = start_processes(argv, 2, BERT_JAX_LOST_SECONDS="12")
    wait_for(lambda: len(saved(parts)) == 3, started)  # step 30
    started[1].kill()
    (status, _), (output, _) = wait_for_all(started)
    assert status == cli.EXIT_INTERRUPTED, output
    assert "process 1 of 2 has been silent for" in output

    # Four processes in two slices; the axis "data" has four parts.
    *_, intact, damaged = saved(parts)
    manifest = parts / "checkpoints" / str(damaged) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[1:])
    started = start_processes(argv, 4, MEGASCALE_NUM_SLICES="2")
    moved = parts / "damaged" / str(damaged)
    wait_for(lambda: moved.exists() and saved(parts)[-1] > intact, started)
    started[1].send_signal(signal.SIGTERM)
    status, output = wait_for_all(started)
    assert status == [cli.EXIT_INTERRUPTED] * 4, output
    assert f"moved to {moved}; resuming from step {intact}" in output[0]
    assert f"resuming at step {intact} of 100" in output[0]
    assert "4 devices in 2 slices" in output[0]
    assert not re.search("compiled|damaged", "".join(output[1:]))  # only process 0 logs
    steps = {int(re.search(r"saved step (\d+)", text)[1]) for text in output}
    assert steps == {saved(parts)[-1]}

    train_here(parts, rows, *STEPS)
    train_here(whole, rows, *STEPS)
    starts = workdir.read_lines(parts / "starts.jsonl")
    assert [(start["processes"], start["step"]) for start in starts] == [
        (2, 0), (4, intact), (1, *steps)
    ]  # fmt: skip
    lines = (workdir.read_lines(folder / "metrics.jsonl") for folder in (whole, parts))
    for a, b in zip(*lines, strict=True):
        assert a["step"] == b["step"]
        assert a["real_fraction"] == b["real_fraction"]  # same rows, so counts are exact
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    params, there = (checkpoint.load_model(folder, "latest")[2] for folder in (whole, parts))
    for a, b in zip(*map(jax.tree.leaves, (params, there)), strict=True):
        # Processes sum in another order, and Adam's denominator is near 0 at first.
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_nonfinite_loss_stops_all_processes_at_same_step(tmp_path, rows):
    folder = tmp_path / "w"
    changes = ("optim.learning_rate=1e30", "optim.clip_norm=0", "optim.warmup_steps=0", "steps=60")
    status, output = wait_for_all(start_processes(command(folder, [rows()], *changes), 2))
    assert status == [cli.EXIT_USER_ERROR] * 2, output
    line = workdir.read_lines(folder / "metrics.jsonl")[-1]
    assert line["split"] == "stopped"
    assert len(line["rows"]) == 8  # the global batch, not one process's part
    assert saved(folder) == [line["step"] - 1]
    for text in output:
        assert f"step {line['step']}: non-finite value" in text
        assert "Traceback" not in text


def test_stuck_step_stops_all_processes(tmp_path):
    """Two processes send heartbeats but make no progress. Both exit and report all steps."""
    code = (
        "import sys, time\n"
        "from bert_jax.runtime import distributed\n"
        "distributed.start()\n"
        "with distributed.Heartbeat() as watch:\n"
        "    watch.step = int(sys.argv[1])\n"
        "    time.sleep(200)\n"
    )
    started = start_processes(
        lambda i: [sys.executable, "-c", code, str(7 - i)],
        2,
        BERT_JAX_LOST_SECONDS="6",
        BERT_JAX_STUCK_SECONDS="3",
    )
    status, output = wait_for_all(started)
    assert status == [cli.EXIT_INTERRUPTED] * 2, output
    for text in output:
        assert "(processes by step: 0 at 7, 1 at 6)" in text


@pytest.mark.parametrize("silent", [0, 7])
def test_each_process_reads_few_heartbeats_and_all_end_after_a_loss(silent, monkeypatch):
    """Twenty threads stand for processes. Only process 0 reads the heartbeats of all."""
    count, lost_seconds, values, num_read, messages = 20, 1.2, {}, [], {}

    def this():
        return int(threading.current_thread().name)

    def read(folder):
        pairs = [(key, values[key]) for key in sorted(values) if key.startswith(folder)]
        num_read.append((this(), len(pairs)))
        return pairs

    def end(message, status):
        messages[this()] = message, status
        sys.exit()

    store = mock.Mock(key_value_dir_get=read)
    store.key_value_set = lambda key, value, allow_overwrite: values.update({key: value})
    monkeypatch.setenv("BERT_JAX_LOST_SECONDS", str(lost_seconds))
    monkeypatch.setattr(distributed, "_client", lambda: store)
    monkeypatch.setattr(distributed, "_exit", end)
    monkeypatch.setattr(jax, "process_index", this)
    monkeypatch.setattr(jax, "process_count", lambda: count)

    def run(watch):
        with contextlib.suppress(SystemExit):
            watch._run()

    watches = [distributed.Heartbeat() for _ in range(count)]
    threads = [
        threading.Thread(target=run, args=(watch,), name=str(i), daemon=True)
        for i, watch in enumerate(watches)
    ]
    for thread in threads:
        thread.start()
    time.sleep(lost_seconds / 2)
    assert not messages
    watches[silent]._done.set()
    began = time.monotonic()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - began < 2.5 * lost_seconds
    assert sorted(messages) == [i for i in range(count) if i != silent]
    for message, status in messages.values():
        assert message.startswith(f"process {silent} of {count} has been silent for")
        assert status == cli.EXIT_INTERRUPTED
    assert max(number for process, number in num_read if process) <= 2
    assert max(number for process, number in num_read) < count


def test_processes_with_different_settings_are_rejected(tmp_path, rows):
    def argv(i):
        return [*command(tmp_path / f"w{i}", [rows()]), *["--init", "none"][: 2 * i]]

    status, output = wait_for_all(start_processes(argv, 2))
    assert status == [cli.EXIT_USER_ERROR] * 2, output
    for text in output:
        assert f"--workdir: '{tmp_path}/w0' and '{tmp_path}/w1'" in text
        assert "--init: None and 'none'" in text
    assert not list(tmp_path.glob("w*"))


@pytest.mark.parametrize("process", [0, 1])
def test_missing_process_times_out_at_startup(process):
    code = "from bert_jax.runtime import distributed; distributed.start()"
    environment = {
        "BERT_JAX_COORDINATOR": f"127.0.0.1:{free_port()}",
        "BERT_JAX_PROCESSES": "2",
        "BERT_JAX_PROCESS": str(process),
        "BERT_JAX_JOIN_SECONDS": "1",
    }
    argv = [sys.executable, "-c", code]
    done = processes.run(argv, env={**ONE_DEVICE, **environment}, timeout=60)
    assert done.returncode == cli.EXIT_USER_ERROR
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("bert-jax")]
    assert f"process {process} of 2" in line
    assert environment["BERT_JAX_COORDINATOR"] in line


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PROCESS": "0"}, "BERT_JAX_COORDINATOR"),
        ({"COORDINATOR": "a:1", "PROCESSES": "2", "PROCESS": "2"}, "PROCESS=2: .*from 0 to"),
        ({"COORDINATOR": "a", "PROCESSES": "2", "PROCESS": "1"}, "HOST:PORT"),
        ({"DISTRIBUTED": "yes"}, "BERT_JAX_DISTRIBUTED"),
    ],
)
def test_incomplete_environment_is_rejected(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(f"BERT_JAX_{name}", value)
    before = jax.config.jax_enable_preemption_service
    try:
        with pytest.raises(UserError, match=expected):
            distributed.start()
    finally:
        jax.config.update("jax_enable_preemption_service", before)


def test_default_is_a_single_process():
    assert not [name for name in os.environ if name.startswith("BERT_JAX_P")]
    distributed.start()
    assert distributed.gather("x", "text") == ["text"]
    assert distributed.StopFlag(2)(True)
    assert not distributed.StopFlag(2)(False)
    distributed.check_same_on_all_processes({"a": 1})

    def refuse(error):
        raise error

    for error in (UserError("no"), Unavailable("no: answer")):  # the second ends with status 75
        with pytest.raises(UserError, match=f"^{error}$") as caught:
            distributed.run_on_process_0("x", functools.partial(refuse, error))
        assert type(caught.value) is type(error)


def device(number, process, platform="cpu", **attributes):
    there = mock.Mock(spec=["id", "process_index", "platform", *attributes])
    there.id, there.process_index, there.platform = number, process, platform
    there.configure_mock(**attributes)
    return there


def test_each_process_loads_one_contiguous_row_shard(monkeypatch):
    # As in some TPU slices, a process's devices are not numbered consecutively.
    devices = [device(i, (i // 2) % 4) for i in range(16)]
    for axes, parts in (((16, 1, 1), 4), ((2, 8, 1), 4), ((4, 1, 4), 4), ((2, 1, 8), 2)):
        mesh = sharding.make_mesh(MeshConfig(*axes), devices)
        results = []
        for process in range(4):
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            results.append(sharding.process_row_shard(mesh))
        assert {of for _, of in results} == {parts}
        assert sorted({part for part, _ in results}) == list(range(parts))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    odd = [device(i, min(i // 3, 3)) for i in range(12)]
    mesh = sharding.make_mesh(MeshConfig(6, 1, 2), odd)
    with pytest.raises(UserError, match="4 processes"):
        sharding.process_row_shard(mesh)


def test_fsdp_and_tensor_axes_stay_within_a_slice(monkeypatch):
    """This holds for any numbering of the devices."""
    tpus = [device(i, i // 2 % 4, "tpu", slice_index=i % 2) for i in range(16)]
    virtual = [device(i, i // 2 % 4) for i in range(16)]
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    assert [sharding.slice_of(d) for d in virtual[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
    for devices in (tpus, virtual):
        for axes in ((-1, 1, 1), (2, 8, 1), (4, 2, 2)):
            mesh = sharding.make_mesh(MeshConfig(*axes), devices)
            slices = [sharding.slice_of(d) for d in mesh.devices.flat]
            assert slices == [0] * 8 + [1] * 8
        with pytest.raises(UserError, match=r"2 slices of 8: .*\[1, 2, 4, 8\]"):
            sharding.make_mesh(MeshConfig(1, 16, 1), devices)
    monkeypatch.delenv("MEGASCALE_NUM_SLICES")
    assert {sharding.slice_of(d) for d in virtual} == {0}
    assert {sharding.slice_of(d) for d in tpus} == {0, 1}


@pytest.mark.parametrize(("vocab_size", "tensor"), [(30_522, 4), (30_720, 8)])
def test_mesh_that_does_not_divide_a_parameter_is_rejected(vocab_size, tensor):
    """Base's vocabulary is not divisible by 4, and 12 heads are not by 8."""
    model = dataclasses.replace(model_size("L1-H48-A12"), vocab_size=vocab_size)
    config = Config(model=model, phases=(PhaseConfig(tokens=32),))
    (phase,) = pretraining.abstract_phases(config, 1)[1]
    mesh = jax.sharding.AbstractMesh((1, 1, tensor), sharding.AXES)
    with pytest.raises(UserError, match=r"config.mesh does not divide params/\S+ of shape"):
        initial_state(config, phase, mesh)


def test_run_identity_covers_config_data_and_versions():
    result = workdir.identity(Config(), [{"digest": "d", "start": "s"}])
    assert (result["data of phase 0"], result["--init of phase 0"]) == ("d", "s")
    assert {"jax", "config.optim.learning_rate", "commit"} <= set(result)
