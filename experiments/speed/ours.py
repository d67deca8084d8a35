"""Contenders of this project, on the CPU with JAX's default threads."""

import atexit
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import data
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax import storage, train
from bert_jax.config import flags
from bert_jax.config.schema import (
    CheckpointConfig,
    Config,
    FinetuneConfig,
    ModelConfig,
    MupConfig,
    OptimConfig,
)
from bert_jax.convert.source import open_model
from bert_jax.data import rows, wordpiece
from bert_jax.data.examples import FIRST_STEPS, LONG_RUN_STEPS
from bert_jax.data.loader import Batch, RowDataset, batches
from bert_jax.data.prepare import prepare as prepare_rows
from bert_jax.inference.embed import Embedder
from bert_jax.model import layers
from bert_jax.model.bert import Bert, init_params
from bert_jax.objectives import finetuning, losses, pretraining
from bert_jax.objectives.base import Metric, Phase
from bert_jax.runs import checkpoint
from bert_jax.runs.checkpoint import Checkpoints
from bert_jax.runtime import device, sharding
from bert_jax.runtime.sharding import shard_batch
from bert_jax.tasks.load import load_dataset
from bert_jax.tools import preflight
from bert_jax.training import optim
from bert_jax.training import state as state_lib
from bert_jax.training import step as step_lib

Turn = Callable[[], dict[str, Any]]


def _start(keeps_memory: bool = True, fast_products: bool = True) -> None:
    if not keeps_memory:
        device.retain_freed_memory = lambda: None
    if not fast_products:
        device.use_eigen_matmul = lambda: None
    device.start("cpu")


def _phase(size: str, tokens: int, sequences: int, batch: int) -> tuple[Config, Phase]:
    """Return the config and the phase of a size, without rows."""
    config, phases = pretraining.abstract_phases(data.pretraining(size, tokens, batch), sequences)
    return config, phases[0]


def endless(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield the items of `make` repeatedly."""
    while True:
        yield from make()


def _padded(batch: Batch) -> int:
    return batch["tokens"].size


def pretrain(
    size: str,
    tokens: int,
    sequences: int,
    batch: int,
    steps: int,
    change: Sequence[str] = (),
    keeps_memory: bool = True,
    fast_products: bool = True,
    saves: bool = False,
    erfc: bool = False,
) -> Turn:
    """Run training steps of `bert-jax pretrain`, from shards to the state.

    Args:
        size: model size in configs/pretrain.py.
        tokens, sequences: T, S.
        batch: rows per step.
        steps: steps per turn.
        change: config overrides, KEY=VALUE.
        keeps_memory: whether glibc retains freed memory.
        fast_products: compute matrix products with Eigen instead of YNNPACK, JAX's default.
        saves: save the state at the start of a turn, and wait for the save at its end.
        erfc: compute GELU by the complementary error function, as jax.nn does.
    """
    _start(keeps_memory, fast_products)
    if erfc:
        layers.ACTIVATIONS["gelu"] = functools.partial(jax.nn.gelu, approximate=False)
    config = data.pretraining(size, tokens, batch, change)
    config.phases[0].rows = str(data.rows(tokens, sequences))
    config, _, _, (phase,) = pretraining.make_phases(config)
    mesh = sharding.make_mesh(config.mesh)
    init, shapes = state_lib.initial_state(config, phase, mesh)
    step, state = step_lib.compile_step(config, phase, mesh, shapes), init(jnp.uint32(0))
    stream, numbers = (
        phase.batches(0, config.steps, *sharding.process_row_shard(mesh)),
        itertools.count(),
    )
    checkpoints = Checkpoints(data.scratch(), config.checkpoint) if saves else None

    def turn():
        nonlocal state
        real = padded = 0
        if checkpoints:
            checkpoints.save(next(numbers), *state_lib.checkpoint_parts(state))
        for arrays in itertools.islice(stream, steps):
            real, padded = real + int(arrays["length"].sum()), padded + _padded(arrays)
            state, *_ = step(state, shard_batch(arrays, mesh))
        jax.block_until_ready(state)
        if checkpoints:
            checkpoints.wait()
        return {"steps": steps, "real_tokens": real, "padded_tokens": padded}

    return turn


def load_finetuning(name: str) -> tuple[FinetuneConfig, Any]:
    """Return the config of a data set, and the data set."""
    file, settings = data.finetuning(name)
    arguments = [f"--config={data.ROOT / file}", *(f"--config.{each}" for each in settings)]
    config = flags.load(arguments, FinetuneConfig)
    source, vocabulary, _, _ = open_model(str(data.recipes.minilm()))
    dataset = load_dataset(config.task, vocabulary)
    config.model = finetuning.model_config(config, source.model, dataset)
    return config, dataset


def finetune(name: str, steps: int, one_a_row: bool) -> Turn:
    """Run training steps of `bert-jax finetune` for a model of all-MiniLM-L6-v2's size.

    They are steps of a long run after its `FIRST_STEPS`, which all have as many rows as the largest batch.

    Args:
        name: name of a data set, as in `data.finetuning`.
        steps: steps per turn.
        one_a_row: put one example in a row, padded to the longest of the data set.
    """
    _start()
    config, dataset = load_finetuning(name)
    config.one_a_row, config.steps = one_a_row, LONG_RUN_STEPS
    mesh = sharding.make_mesh(config.mesh)
    config, _, plan, phase = finetuning.make_phase(
        config, dataset, [0], sharding.num_row_shards(mesh)
    )
    init, shapes = state_lib.initial_state(config, phase, mesh)
    step = step_lib.compile_phase(config, phase, mesh, shapes).step
    state = init(jnp.uint32(0))
    for shape in plan.shapes:  # wait for compilation in the background
        state, *_ = step(state, shard_batch(plan.empty(shape), mesh))
    stream = endless(lambda: plan.batches(0, FIRST_STEPS, config.steps))

    def turn():
        nonlocal state
        real = padded = 0
        for arrays in itertools.islice(stream, steps):
            real, padded = real + int(arrays["length"].sum()), padded + _padded(arrays)
            state, *_ = step(state, shard_batch(arrays, mesh))
        jax.block_until_ready(state)
        return {
            "steps": steps,
            "examples": steps * config.batch_size,
            "real_tokens": real,
            "padded_tokens": padded,
        }

    return turn


def embed(texts: int) -> Turn:
    """Embed texts with all-MiniLM-L6-v2, up to 256 tokens of each in batches of 1,024."""
    _start()
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


def prepare(pairs: str, tokens: int = 128, sequences: int = 4) -> Turn:
    """Prepare rows from text, as `bert-jax prepare` does."""
    source, vocabulary = data.articles(), data.vocabulary()

    def turn():
        with data.temporary() as out:
            manifest = prepare_rows(
                [str(source)], vocabulary, out, tokens=tokens, sequences=sequences, pairs=pairs
            )
        splits = (manifest.train, manifest.heldout)
        return {
            "text_bytes": source.stat().st_size,
            "real_tokens": sum(split.real_tokens for split in splits),
            "padded_tokens": tokens * sum(split.rows for split in splits),
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
    _start()
    config, phase = _phase(size, 128, 4, 8)
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
        if damage := checkpoint.find_damage(checkpoints.folder / "1"):
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


class _EmptyObjective:
    """An objective with almost no work, to measure the overhead of the loop."""

    best_metric, flops_per_row = Metric("loss", higher_is_better=False), 0.0

    def init(self, key):
        return {"weight": jnp.zeros(1)}

    def make_inputs(self, batch, key):
        return batch

    def normalizers(self, inputs):
        return {"loss": jnp.float32(1)}

    def loss_terms(self, params, inputs, key):
        one = jnp.float32(1)
        return {"loss": (params["weight"].sum(), one), "real_fraction": (one, one)}

    def predict(self, params, inputs):
        return {}

    def score(self, batches_and_outputs):
        return {}

    def summarize(self, means):
        return means

    def progress_text(self, summary):
        return ""


def host(steps: int) -> Turn:
    """Run the training loop with steps that compute nothing: batches, metrics, guard, progress."""
    _start()
    config = data.pretraining("tiny", 128, 8, [f"steps={steps}", f"checkpoint.every_steps={steps}"])
    vocabulary = wordpiece.load(data.vocabulary())
    batch = {"tokens": np.zeros((8, 128), np.uint16)}
    phase = Phase(
        objective=_EmptyObjective(),
        tokens=128,
        batch_size=8,
        accumulation=1,
        batch_shape={k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch.items()},
        first_step=0,
        end_step=steps,
        batches=lambda first, end, *_: itertools.repeat(batch, end - first),
        row_indices=lambda _: [],
        heldout=lambda *_: iter(()),
    )
    sources, compiled = [{"digest": ""}], {}

    def turn():
        with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(sys.stderr):
            train.train(config, vocabulary, sources, [phase], temporary, compiled=compiled)
            lines = (pathlib.Path(temporary) / "speed.jsonl").read_text().splitlines()
        return {"steps": steps, "seconds": sum(json.loads(line)["seconds"] for line in lines)}

    return turn


# --- Object storage -------------------------------------------------------------------------------


def _storage(scheme: str) -> str:
    """Return a folder or the URL of a local server ("gs" or "s3"); sets the variables it needs."""
    folder = data.scratch()
    if not scheme:
        return str(folder)
    sys.path.insert(0, str(data.ROOT))
    from tests.helpers.objects import serve

    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    server = stack.enter_context(serve(scheme, str(folder)))
    os.environ.update(server.environment)
    os.environ["BERT_JAX_STORAGE_CACHE"] = str(data.scratch())
    return server.url


def _stored_rows(root: str) -> str:
    """Copy rows of T=64 to a folder or a server, and return where they are."""
    local = data.rows(64, 2)
    if "://" not in root:
        return str(local)
    paths = [path for path in local.iterdir() if path.is_file() and path.name != "lock"]
    storage.upload(paths, [f"{root}/rows/{path.name}" for path in paths])
    return f"{root}/rows"


def storage_read(scheme: str, cached: bool, steps: int) -> Turn:
    """Read random batches of rows from a local disk or a local server of object storage.

    Args:
        scheme: "", "gs" or "s3".
        cached: wait until the rows have been copied, instead of reading each by a request.
        steps: batches per turn.
    """
    os.environ["BERT_JAX_STORAGE_CACHE_GB"] = str(int(cached))
    train_rows, numbers = RowDataset(_stored_rows(_storage(scheme)), "train"), itertools.count()
    while cached and not train_rows.is_local:
        time.sleep(0.05)

    def turn():
        order = np.random.default_rng(next(numbers)).permutation(len(train_rows))[: 256 * steps]
        for start in range(0, len(order), 256):
            train_rows.read(order[start : start + 256])
        return {"rows": len(order)}

    return turn


def storage_save(scheme: str, steps: int) -> Turn:
    """Pretrain a tiny model that saves every 100 steps to a local disk or a local server."""
    root, numbers, every = _storage(scheme), itertools.count(), min(steps, 10)
    rows_folder = _stored_rows(root)

    def turn():
        out = f"{root}/run{next(numbers)}"
        changes = (
            f"steps={steps} batch_size=16 checkpoint.every_steps=100 log_every_steps={every} "
            f"optim.warmup_steps=1 evaluate_every_steps={steps} evaluate_rows=16"
        )
        command = [
            *(
                sys.executable,
                "-m",
                "bert_jax",
                "pretrain",
                "--rows",
                rows_folder,
                "--workdir",
                out,
            ),
            *("--config", "configs/pretrain.py:L2-H64-A1,64"),
            *(f"--config.{change}" for change in changes.split()),
        ]
        subprocess.run(command, check=True, cwd=data.ROOT, stdout=sys.stderr)
        lines = pathlib.Path(storage.local(f"{out}/speed.jsonl")).read_text().splitlines()
        logged = list(map(json.loads, lines[2:] or lines))  # without steps that compile
        return {"steps": every * len(logged), "seconds": sum(line["seconds"] for line in logged)}

    return turn


# --- muP ------------------------------------------------------------------------------------------


def mup(hidden: int, base: int) -> Turn:
    """Measure how activations change in five AdamW steps on random tokens, with a new seed each turn.

    Args:
        hidden: hidden size of a model of two layers.
        base: `base_hidden` of muP; 0 for the standard parametrization.
    """
    _start()
    model = ModelConfig(
        layers=2, hidden=hidden, heads=hidden // 32, feed_forward=4 * hidden, vocab_size=1_000,
        positions=32, dropout=0.0, attention_dropout=0.0, next_sentence=False, mup=MupConfig(base),
    )  # fmt: skip
    settings = OptimConfig(optimizer="adamw", learning_rate=5e-3, warmup_steps=0, clip_norm=0.0)
    optimizer = optim.make_optimizer(Config(model=model, optim=settings, steps=1_000))
    whole = jnp.full((16, 1), 32)
    layout, positions = rows.layout(whole, whole, 32), jnp.tile(jnp.arange(32), (16, 1))
    bert, seeds = Bert(model), itertools.count()

    @jax.jit
    def step(params, state, tokens, labels):
        def loss(params):
            logits = bert.apply({"params": params}, tokens, layout, positions).masked_lm
            return losses.cross_entropy(logits, labels, jnp.ones(labels.shape))[0] / labels.size

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def activations(params, tokens):
        outputs = bert.apply({"params": params}, tokens, layout, positions)
        return *outputs.states, outputs.masked_lm

    def turn():
        seed = next(seeds)
        rng = np.random.default_rng(seed)
        tokens, labels = (jnp.asarray(rng.integers(0, 1_000, (16, 32))) for _ in range(2))
        params = init_params(model, jax.random.key(seed))
        state, first, changes = optimizer.init(params), activations(params, tokens), []
        for _ in range(5):
            params, state = step(params, state, tokens, labels)
            pairs = zip(activations(params, tokens), first, strict=True)
            changes.append([float(jnp.sqrt(jnp.mean((a - b) ** 2))) for a, b in pairs])
        return {"changes": changes}

    return turn


# --- TPUs -----------------------------------------------------------------------------------------


def tpu(model: str, tokens: int, topology: str) -> Turn:
    """Compile the paper's training step for a slice of TPUs by `bert-jax preflight`, without a TPU.

    In bfloat16 with scanned layers, one sequence in a row and data parallelism; above 256 chips several share
    a row. A step that does not fit is compiled again with the change that preflight suggests.
    """
    device.start("cpu", cache=False)
    on_slice, change = preflight.parse_topology(topology), ""
    changes = [
        f"model.vocab_size={pretraining.DEFAULT_VOCAB_SIZE}",
        f"mesh.tensor={max(on_slice.chips // 256, 1)}",
        *("model.vocab_multiple=128", "model.dtype=bfloat16", "model.layer_loop=scanned"),
    ]
    while True:
        more = change.replace("--config.", "").split()
        config = data.pretraining(model, tokens, 256, [*changes, *more])
        try:
            report = preflight.preflight(config, on_slice)
        except preflight.NotCompiled as error:
            report = {"fits": False, "why": str(error)}
            break
        suggestion = report["phases"][0]["would_fit"]
        if report["fits"] or change or not suggestion:
            break
        change = suggestion["arguments"]
    return lambda: {"change": change, "report": report}
