"""The loop, for every task.

A step is a function of the state and of (seed, step): batch, masks and dropout follow from those
two. So a run that is killed and started again with the same command goes on from its newest
checkpoint and ends as if nothing had happened, bit for bit.
"""

import collections
import contextlib
import functools
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jaxtyping import Array, Int, UInt

from bert_jax import attention, checkpoint, distributed, files, optim, sharding, workdir
from bert_jax.checkpoint import Checkpoints
from bert_jax.config import Run
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.dropout import generator_key
from bert_jax.evaluate import evaluator, put
from bert_jax.log import Log
from bert_jax.model import Params
from bert_jax.progress import Progress
from bert_jax.tasks.stage import Stage, Task

# Steps dispatched before the loop waits: enough to keep a device busy, few enough to stop quickly.
STEPS_AHEAD = 2


class Interrupted(Exception):
    """SIGTERM or SIGINT: the run has saved its state and can be started again."""


class State(NamedTuple):
    """All that a run carries from step to step."""

    step: Int[Array, ""]
    params: Params
    optimizer: Any
    # Sums of the metrics since the last log, part of the state so that a restart in the middle of
    # a window logs what the uninterrupted run does.
    sums: dict[str, Any]
    # config.seed; here so that runs of several seeds share a compilation.
    seed: UInt[Array, ""]


def make_step(config: Run, task: Task, accumulation: int):
    """The training step: (state, rows) to (state, sums of the metrics since the last log)."""
    optimizer = optim.make(config)

    def objective(params, inputs, key, weights):
        pairs = task.pairs(optim.freeze(config, params), inputs, key)
        loss = sum(pairs[name][0] / jnp.maximum(weight, 1) for name, weight in weights.items())
        return loss, pairs

    def step(state: State, batch: dict[str, Array]) -> tuple[State, dict[str, Any]]:
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        input_key, dropout_key = jax.random.split(key)
        dropout_key = generator_key(dropout_key, config.model.dropout_generator)
        inputs = task.inputs(batch, input_key)
        weights = task.weights(inputs)
        gradient = jax.grad(objective, has_aux=True)
        if accumulation == 1:
            grads, pairs = gradient(state.params, inputs, dropout_key, weights)
        else:
            # Part i takes every accumulation-th row, so each device splits its own rows. Dividing
            # by the whole batch's weights makes the parts add up to the whole batch's gradient.
            parts = jax.tree.map(
                lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), inputs
            )

            def add_part(total, item):
                i, part = item
                part_key = jax.random.fold_in(dropout_key, i)
                found = gradient(state.params, part, part_key, weights)
                return jax.tree.map(jnp.add, total, found), None

            shapes = jax.eval_shape(
                gradient, state.params, jax.tree.map(lambda x: x[0], parts), dropout_key, weights
            )
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            (grads, pairs), _ = jax.lax.scan(add_part, zeros, (jnp.arange(accumulation), parts))
        pairs["gradient_norm"] = (optax.global_norm(grads), jnp.float32(1))
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        first_of_window = state.step % config.log_every_steps == 0
        sums = jax.tree.map(
            lambda total, new: jnp.where(first_of_window, 0, total) + new, state.sums, pairs
        )
        return State(state.step + 1, params, optimizer_state, sums, state.seed), sums

    return step


def initial_state(
    config: Run, stage: Stage, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> tuple[Any, State]:
    """A jitted function from the seed to the state at step 0, and the state's shapes on the mesh."""
    task, optimizer = stage.task, optim.make(config)
    params = jax.eval_shape(task.init, jax.random.key(0))
    pairs = jax.eval_shape(
        lambda params, batch, key: task.pairs(params, task.inputs(batch, key), None),
        params,
        stage.batch_shape,
        jax.random.key(0),
    )
    pairs["gradient_norm"] = (jax.ShapeDtypeStruct((), jnp.float32),) * 2

    def init(seed: UInt[Array, ""]) -> State:
        params = task.init(jax.random.key(seed))
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), pairs)
        return State(jnp.int32(0), params, optimizer.init(params), sums, seed)

    shapes = jax.eval_shape(init, jnp.uint32(0))
    shardings = sharding.shardings(mesh, shapes)
    return jax.jit(init, out_shardings=shardings), checkpoint.abstract(shapes, shardings)


def compile_step(config: Run, stage: Stage, mesh: jax.sharding.Mesh, state: State) -> Any:
    """The training step of a stage, compiled; `state` gives shapes and shardings."""
    batch = checkpoint.abstract(stage.batch_shape, sharding.rows(mesh))
    step = jax.jit(
        make_step(config, stage.task, stage.accumulation),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), sharding.replicated(mesh)),
    )
    with jax.set_mesh(mesh):
        return step.lower(state, batch).compile()


def compile_stage(
    config: Run, stage: Stage, mesh: jax.sharding.Mesh, state: State
) -> tuple[Any, Callable[[Params], dict[str, float]]]:
    """The training step of a stage and its held-out evaluation; they do not depend on the seed."""
    return compile_step(config, stage, mesh, state), evaluator(stage, mesh)


def train(
    config: Run,
    vocabulary: Vocabulary,
    data: list[dict[str, Any]],
    stages: list[Stage],
    folder: str | pathlib.Path,
    force: bool = False,
    start: Params | None = None,
    compiled: dict[int, Any] | None = None,
) -> None:
    """Runs `config` in `folder` from wherever it stands there to the end.

    Args:
        config: validated, with the vocabulary's size filled in.
        vocabulary: kept with the run.
        data: for each stage what its rows are (`workdir.claim`).
        stages: what to train on, in order.
        folder: the workdir.
        force: go on in a workdir that holds a run with another config.
        start: parameters that take the place of random ones at step 0, a part of the model's.
        compiled: kept by the caller between runs that differ by their seeds only: what
            `compile_stage` made, by stage.

    Raises:
        UserError: something a person can mend; nothing is lost.
        Interrupted: SIGTERM or SIGINT came and the state is saved.
    """
    folder = pathlib.Path(folder)
    compiled = {} if compiled is None else compiled
    mesh = sharding.make_mesh(config.mesh)
    for stage in stages:
        sharding.check_batch(mesh, stage.batch_size, stage.accumulation)
    attention.check(config.model, mesh.devices.flat[0].platform, mesh.shape["tensor"])
    init, shapes = initial_state(config, stages[0], mesh)
    best = {"best_by": stages[0].task.best_by, "highest": stages[0].task.best_is_highest}

    with contextlib.ExitStack() as stack:

        def claim() -> None:
            stack.enter_context(files.only_process(folder))
            workdir.claim(folder, config, data, best, force)
            vocabulary.save(folder)

        distributed.require_same(workdir.identity(config, data))
        distributed.first("the workdir", claim)
        checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint, **best)
        stack.callback(checkpoints.close)
        step = max(checkpoints.steps(), default=0)
        distributed.require_same({"the newest checkpoint in the workdir": step})
        if step >= config.steps or Patience(config, best, folder, step).is_over:
            print(f"{folder} is finished: it stands at step {step:,} of {config.steps:,}")
            return
        seed = jax.device_put(np.uint32(config.seed), shapes.seed.sharding)
        if step:
            training = {"step": shapes.step, "optimizer": shapes.optimizer, "sums": shapes.sums}
            params, training = checkpoints.restore(step, shapes.params, training)
            state = State(params=params, seed=seed, **training)
        else:
            state = init(seed)
            state = state._replace(params=_start_from(state.params, start or {}, shapes.params))
        distributed.first("starts.jsonl", lambda: workdir.record_start(folder, step, mesh))
        progress = stack.enter_context(Progress("train", config.steps, "steps", done=step))
        log = stack.enter_context(Log(folder, step, config, mesh, progress))
        patience = Patience(config, best, folder, step)
        interrupted = stack.enter_context(interrupts(progress))
        stopping = distributed.Stopping(STEPS_AHEAD)
        watch = stack.enter_context(distributed.Watch())
        if step:
            progress.say(f"resuming at step {step:,} of {config.steps:,}")

        first = 0
        for number, stage in enumerate(stages):
            if step < stage.end_step:
                if number not in compiled:
                    begun = time.monotonic()
                    compiled[number] = compile_stage(config, stage, mesh, shapes)
                    seconds = time.monotonic() - begun
                    progress.say(
                        f"compiled the step for {stage.batch_size} rows of T={stage.tokens} "
                        f"in {seconds:.1f} s"
                    )
                train_step, measure = compiled[number]
                log.begin(stage, step)
                batches = stage.batches(
                    step - first, stage.end_step - first, *sharding.row_part(mesh)
                )
                running: collections.deque[Any] = collections.deque()
                for batch in batches:
                    state, sums = train_step(state, put(batch, mesh))
                    step += 1
                    watch.step = step
                    progress.advance()
                    running.append(sums)
                    if len(running) > STEPS_AHEAD:
                        jax.block_until_ready(running.popleft())
                    log.poll()
                    at_end = step == config.steps
                    if step % config.log_every_steps == 0 or at_end:
                        log.training(step, sums)
                    evaluated = None
                    every = config.evaluate_every_steps
                    if at_end or (every and step % every == 0):
                        jax.block_until_ready(sums)
                        evaluated = log.heldout(step, functools.partial(measure, state.params))
                        patience.look(evaluated)
                    at_end = at_end or patience.is_over
                    stop = stopping(interrupted())
                    if at_end or stop or step % config.checkpoint.every_steps == 0:
                        # The metrics up to here must survive whatever the checkpoint survives.
                        log.sync()
                        training = {
                            "step": state.step,
                            "optimizer": state.optimizer,
                            "sums": state.sums,
                        }
                        checkpoints.save(step, state.params, training, evaluated or None)
                    if stop:
                        checkpoints.wait()
                        raise Interrupted(f"saved step {step:,} of {config.steps:,} in {folder}")
                    if patience.is_over:
                        progress.say(f"no better for {config.patience} evaluations: stopping")
                        return
            first = stage.end_step


def _start_from(params: Params, start: Params, shapes: Params) -> Params:
    """Random parameters with those of `start` in their places."""
    given = traverse_util.flatten_dict(start, sep="/")
    where = traverse_util.flatten_dict(shapes, sep="/")
    params = traverse_util.flatten_dict(params, sep="/")
    placed = {k: jax.device_put(v, where[k].sharding) for k, v in given.items()}
    return traverse_util.unflatten_dict({**params, **placed}, sep="/")


class Patience:
    """Whether a run has gone on for `config.patience` evaluations without a better one.

    A function of the metrics so far, read again on a restart, so a restart changes nothing.
    """

    def __init__(self, config: Run, best: dict[str, Any], folder: pathlib.Path, step: int):
        self._evaluations = getattr(config, "patience", 0)
        self._metric, self._sign = best["best_by"], 1 if best["highest"] else -1
        self._found: list[float] = []
        path = folder / "metrics.jsonl"
        for line in workdir.read_lines(path) if path.exists() else []:
            if line["split"] == "heldout" and line["step"] <= step:
                self.look(line)

    def look(self, metrics: dict[str, Any]) -> None:
        """Takes an evaluation into account."""
        if self._metric in metrics:
            self._found.append(self._sign * metrics[self._metric])

    @property
    def is_over(self) -> bool:
        """Whether it is time to stop."""
        since = len(self._found) - 1 - self._found.index(max(self._found)) if self._found else 0
        return 0 < self._evaluations <= since


@contextlib.contextmanager
def interrupts(progress: Progress) -> Iterator[Callable[[], bool]]:
    """Inside, the first SIGTERM or SIGINT only sets what the yielded function returns.

    The second one acts as usual, at once.
    """
    caught = []
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    def restore():
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number, frame):
        caught.append(number)
        restore()
        progress.say("stopping after this step; once more to stop without saving")

    for number in before:
        signal.signal(number, handle)
    try:
        yield lambda: bool(caught)
    finally:
        restore()
