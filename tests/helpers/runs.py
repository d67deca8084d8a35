"""Helpers that start small pretraining runs and compare their results."""

import dataclasses
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
from etils import epath

from bert_jax import cli, storage, train
from bert_jax.config.flags import load
from bert_jax.config.schema import take_rows
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.objectives import pretraining
from bert_jax.runs import checkpoint, manifests
from bert_jax.tools import profile
from tests.helpers import processes

CONFIG = pathlib.Path(__file__).parent.parent.parent / "configs" / "pretrain.py"
SMALL = (
    "optim.warmup_steps=5 optim.learning_rate=1e-3 batch_size=8 evaluate_rows=16 "
    "steps=10 model.positions=64 log_every_steps=5 evaluate_every_steps=10 checkpoint.every_steps=10"
).split()

WORDS = (*SPECIAL, *(f"w{i}" for i in range(35)))
VOCABULARY = Vocabulary(WORDS, True)

# Environment of a process with one simulated device: eight are slow on two cores.
ONE_DEVICE = {
    **os.environ,
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "").replace("count=8", "count=1"),
}

# Options of XLA where different programs give the same bits by the emitters of users, but not of conftest.py.
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if "emitters" in os.environ["XLA_FLAGS"] else {}


def arguments(*changes, size="L1-H32-A2", phases=",32"):
    """Return the config flags of a small pretraining run, with overrides of config fields."""
    return [
        f"--config={CONFIG}:{size}{phases}",
        *(f"--config.{change}" for change in [*SMALL, *changes]),
    ]


def python(*arguments):
    """Return the command line of `bert-jax` with these arguments."""
    code = "from bert_jax.cli import console; console()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def command(folder, rows, *changes, options=(), size="L1-H32-A2", phases=",32"):
    """Return the command line of a small pretraining run in `folder`, on these folders of rows."""
    row_options = [part for path in rows for part in ("--rows", path)]
    return python(
        "pretrain",
        *arguments(*changes, size=size, phases=phases),
        *row_options,
        "--workdir",
        folder,
        *options,
    )


def pretrain(folder, rows, *changes, options=(), phases=",32"):
    """Pretrain a small model in a separate process."""
    return processes.run(
        command(folder, rows, *changes, options=options, phases=phases), env=ONE_DEVICE
    )


def poisoned(phase, steps):
    """Return the phase with out-of-range sentence labels, and so a NaN loss, at the given steps."""

    def batches(first, end, process, processes):
        for step, batch in enumerate(phase.batches(first, end, process, processes), first):
            if step + phase.first_step in steps:
                batch = {**batch, "label": np.full_like(batch["label"], 7)}
            yield batch

    return dataclasses.replace(phase, batches=batches)


def small_run(rows, *changes):
    """Return config, vocabulary, data and phases of a small pretraining run on rows of T=32."""
    config = load(arguments(*changes))
    take_rows(config, [str(rows())])
    return pretraining.make_phases(config)


def small_phase(rows, *changes):
    """Return the config and the phase of a small pretraining run on rows of T=32."""
    config, _, _, (phase,) = small_run(rows, *changes)
    return config, phase


def train_here(folder, rows, *changes, bad=(), compiled=None, save_on_signal=False):
    """Pretrain a small model in this process on rows of T=32.

    Args:
        bad: steps that get a NaN loss.
        compiled: cache of compiled training steps by shape, shared by runs of the same step.
    """
    config, vocabulary, data, phases = small_run(rows, *changes)
    phases = [poisoned(phase, set(bad)) for phase in phases]
    train.train(
        config,
        vocabulary,
        data,
        phases,
        folder,
        compiled=compiled,
        summarize_trace=profile.summarize,
        save_on_signal=save_on_signal,
    )


def free_port():
    """Return a TCP port that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_processes(argv, count, **environment):
    """Start one run in several processes.

    `argv` is the command line, or a function from process index to command line. The processes are
    not forked, because Gloo gives all forked children of a process the same identity.
    """
    variables = {
        "BERT_JAX_COORDINATOR": f"127.0.0.1:{free_port()}",
        "BERT_JAX_PROCESSES": str(count),
        **environment,
    }
    return [
        subprocess.Popen(
            argv(i) if callable(argv) else argv,
            env={**ONE_DEVICE, **variables, "BERT_JAX_PROCESS": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]


def wait_for_all(started):
    """Wait for processes to exit; return their exit statuses and standard error outputs."""
    errors = [process.communicate(timeout=240)[1] for process in started]
    return [process.returncode for process in started], errors


def refused(capsys, *argv):
    """Assert that a command, run in this process, fails with a one-line error; return the line."""
    capsys.readouterr()  # discard the progress output of row preparation
    status = cli.main([str(a) for a in argv])
    error = capsys.readouterr().err.strip()
    assert status == cli.EXIT_USER_ERROR, error
    assert "\n" not in error, error
    return error


def _metrics(folder):
    """Return the bytes of a run's metrics.jsonl; the run may be on object storage."""
    if storage.is_remote(folder):
        return storage.read(f"{folder}/metrics.jsonl")
    return (folder / "metrics.jsonl").read_bytes()


def final_arrays(folder):
    """Return the last step of a run and the arrays of its parameters and training state."""
    _, _, params, step = checkpoint.load_model(folder, "latest")
    return step, jax.tree.leaves(jax.device_get(params)), _training_arrays(folder, step)


def _training_arrays(folder, step):
    """Return the arrays of the training state, read with Orbax."""
    import orbax.checkpoint as ocp

    run = epath.Path(folder) if storage.is_remote(folder) else pathlib.Path(folder).absolute()
    committed = manifests.committed(pathlib.Path(storage.local(folder)) / "checkpoints")
    path = run / "checkpoints" / committed[step].name / checkpoint.TRAINING
    return jax.tree.leaves(ocp.StandardCheckpointer().restore(path))


def assert_same_run(folder, reference):
    """Assert that two runs have the same metrics, parameters and optimizer state, bit for bit."""
    assert _metrics(folder) == _metrics(reference)
    (step, params, rest), (step_r, params_r, rest_r) = final_arrays(folder), final_arrays(reference)
    assert step == step_r
    assert len(params) == len(params_r)
    assert len(rest) == len(rest_r) > len(params)
    for a, b in zip(params + rest, params_r + rest_r, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
