"""Contenders of this project, on the CPU with JAX's default threads."""

import dataclasses
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import data
import jax
import jax.numpy as jnp

from bert_jax.config import flags
from bert_jax.config.schema import CheckpointConfig, Config, FinetuneConfig
from bert_jax.convert.source import open_model
from bert_jax.data.examples import FIRST_STEPS, LONG_RUN_STEPS
from bert_jax.data.loader import Batch, RowDataset, batches
from bert_jax.data.prepare import prepare as prepare_rows
from bert_jax.inference.embed import Embedder
from bert_jax.objectives import finetuning, pretraining, warm_start
from bert_jax.objectives.base import Phase
from bert_jax.runs import manifests
from bert_jax.runs.checkpoint import Checkpoints
from bert_jax.runtime import device, sharding
from bert_jax.runtime.sharding import shard_batch
from bert_jax.tasks.load import load_dataset
from bert_jax.training import state as state_lib
from bert_jax.training import step as step_lib

Turn = Callable[[], dict[str, Any]]


class Training:
    """The training step of a phase, compiled, with its state."""

    def __init__(self, config: Config | FinetuneConfig, phase: Phase):
        self.mesh = sharding.make_mesh(config.mesh)
        init, self.shapes = state_lib.initial_state(config, phase, self.mesh)
        self.compiled = step_lib.compile_phase(config, phase, self.mesh, self.shapes).step
        self.state = init(jnp.uint32(0))

    def step(self, batch: Batch) -> Any:
        """Dispatch a step, and return what the guard sees of it."""
        self.state, _, seen = self.compiled(self.state, shard_batch(batch, self.mesh))
        return seen

    def steps(self, batches: Iterable[Batch]) -> dict[str, int]:
        """Run a step for each batch, and return their numbers of steps and tokens."""
        counts = data.run_steps(self.step, batches)
        jax.block_until_ready(self.state)
        return counts


def pretrain(size: str, tokens: int, sequences: int, batch: int, steps: int) -> Turn:
    """Run training steps of `bert-jax pretrain`, from shards to the state.

    Args:
        size: model size in configs/pretrain.py.
        tokens, sequences: T, S.
        batch: rows per step.
        steps: steps per turn.
    """
    device.start("cpu")
    config = data.pretraining(size, tokens, batch)
    config.phases[0].rows = str(data.rows(tokens, sequences))
    config, _, _, (phase,) = pretraining.make_phases(config)
    training = Training(config, phase)
    stream = phase.batches(0, config.steps, *sharding.process_row_shard(training.mesh))
    return lambda: training.steps(itertools.islice(stream, steps))


def load_finetuning(name: str) -> tuple[FinetuneConfig, Any]:
    """Return the config of a data set, and the data set."""
    file, settings = data.finetuning(name)
    arguments = [f"--config={data.ROOT / file}", *(f"--config.{each}" for each in settings)]
    config = flags.load(arguments, FinetuneConfig)
    source, vocabulary, _, _ = open_model(str(data.recipes.minilm()))
    dataset = load_dataset(config.task, vocabulary)
    config.model = warm_start.model_config(config, source.model, dataset)
    return config, dataset


def finetune(name: str, steps: int, one_a_row: bool) -> Turn:
    """Run training steps of `bert-jax finetune` for a model of all-MiniLM-L6-v2's size.

    They are steps of a long run after its `FIRST_STEPS`, which all have as many rows as the largest batch.

    Args:
        name: name of a data set, as in `data.finetuning`.
        steps: steps per turn.
        one_a_row: put one example in a row, padded to the longest of the data set.
    """
    device.start("cpu")
    config, dataset = load_finetuning(name)
    config.one_a_row, config.steps = one_a_row, LONG_RUN_STEPS
    shards = sharding.num_row_shards(sharding.make_mesh(config.mesh))
    config, _, plan, phase = finetuning.make_phase(config, dataset, [0], shards)
    training = Training(config, phase)
    for shape in plan.shapes:  # wait for compilation in the background
        training.step(plan.empty(shape))
    epochs = (plan.batches(0, FIRST_STEPS, config.steps) for _ in itertools.count())
    stream = itertools.chain.from_iterable(epochs)

    def turn():
        counts = training.steps(itertools.islice(stream, steps))
        return {**counts, "examples": steps * config.batch_size}

    return turn


def embed(texts: int) -> Turn:
    """Embed texts with all-MiniLM-L6-v2, up to 256 tokens of each in batches of 1,024."""
    device.start("cpu")
    config, vocabulary, params, _ = open_model(str(data.recipes.minilm()))
    config.embed.tokens = 256
    embedder = Embedder(config, vocabulary, params, batch_tokens=1024)
    sample = data.texts(texts)

    def turn():
        before, counts = dataclasses.replace(embedder.counts), embedder.counts
        for _ in embedder(sample):
            pass
        real, padded = counts.tokens - before.tokens, counts.row_tokens - before.row_tokens
        return {"texts": len(sample), "real_tokens": real, "padded_tokens": padded}

    return turn


def prepare(pairs: str) -> Turn:
    """Prepare rows from text, as `bert-jax prepare` does."""
    source, vocabulary = data.articles(), data.vocabulary()

    def turn():
        with data.temporary() as out:
            manifest = prepare_rows(
                [str(source)], vocabulary, out, tokens=128, sequences=4, pairs=pairs
            )
        splits = (manifest.train, manifest.heldout)
        return {
            "text_bytes": source.stat().st_size,
            "real_tokens": sum(split.real_tokens for split in splits),
            "padded_tokens": 128 * sum(split.rows for split in splits),
        }

    return turn


def loader(tokens: int, sequences: int, batch: int, steps: int) -> Turn:
    """Read shuffled batches from shards, as in training; masking runs on the device."""
    train_rows = RowDataset(data.rows(tokens, sequences), "train")
    stream = batches(train_rows, batch, 0, 0, 10**9)

    def turn():
        lengths = [int(arrays["length"].sum()) for arrays in itertools.islice(stream, steps)]
        return {"rows": steps * batch, "real_tokens": sum(lengths)}

    return turn


def _saved(size: str) -> tuple[Checkpoints, Any, Any, int]:
    """Return checkpoints in a temporary folder, a state, its shapes and its size in bytes."""
    device.start("cpu")
    config, (phase,) = pretraining.abstract_phases(data.pretraining(size, 128, 8), 4)
    init, shapes = state_lib.initial_state(config, phase, sharding.make_mesh(config.mesh))
    state = init(jnp.uint32(0))
    # The initial moments are zeros, which compress to almost nothing.
    noise = jax.jit(lambda x: x + jax.random.normal(jax.random.key(1), x.shape, x.dtype))
    filled = jax.tree.map(lambda x: noise(x) if x.ndim else x, state.optimizer)
    state = jax.block_until_ready(state._replace(optimizer=filled))
    checkpoints = Checkpoints(data.scratch(), CheckpointConfig(keep_last=1, keep_best=0))
    return checkpoints, state, shapes, sum(x.nbytes for x in jax.tree.leaves(state))


def save(size: str) -> Turn:
    """Save a state to a sealed and durable checkpoint."""
    checkpoints, state, _, size_bytes = _saved(size)
    number = itertools.count()

    def turn():
        checkpoints.save(next(number), *state_lib.checkpoint_parts(state))
        checkpoints.wait()
        return {"bytes": size_bytes}

    return turn


def restore(size: str) -> Turn:
    """Restore a state from a checkpoint, verifying its checksums, as a resumed run does."""
    checkpoints, state, shapes, size_bytes = _saved(size)
    checkpoints.save(1, *state_lib.checkpoint_parts(state))
    checkpoints.wait()
    del state

    def turn():
        if damage := manifests.find_damage(checkpoints.folder / "1"):
            raise RuntimeError(damage)
        jax.block_until_ready(state_lib.restore(checkpoints, 1, shapes, 0))
        return {"bytes": size_bytes}

    return turn


def start(size: str, tokens: int, sequences: int, batch: int, cached: bool) -> Turn:
    """Run `bert-jax pretrain` until the metrics of its first step.

    Args:
        size, tokens, sequences, batch: as in `pretrain`.
        cached: reuse the compiled programs of an earlier run.
    """
    folder = data.rows(tokens, sequences)

    def turn():
        with data.temporary() as temporary:
            out = pathlib.Path(temporary) / "run"
            command = [
                *(sys.executable, "-m", "bert_jax", "pretrain", "--rows", folder, "--workdir", out),
                *(f"--config={data.ROOT}/configs/pretrain.py:{size},{tokens}", "--config.platform=cpu"),
                *(f"--config.batch_size={batch}", "--config.log_every_steps=1"),
            ]  # fmt: skip
            cache = {} if cached else {"BERT_JAX_CACHE": f"{temporary}/cache"}
            metrics, begun = out / "metrics.jsonl", time.perf_counter()
            process = subprocess.Popen(
                list(map(str, command)),
                env={**os.environ, **cache},
                cwd=data.ROOT,
                stdout=sys.stderr,
            )
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise RuntimeError(f"bert-jax pretrain ended with {process.returncode}")
                time.sleep(0.01)
            seconds = time.perf_counter() - begun
            process.send_signal(signal.SIGKILL)
            process.wait()
        return {"seconds": seconds}

    return turn


def command(arguments: list[str]) -> Turn:
    """Run a Python process to its end."""

    def turn():
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=data.ROOT)
        return {}

    return turn
