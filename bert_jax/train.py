"""The loop, for every task.

A step is a function of the state and of (seed, step): batch, masks and dropout follow from those
two. So a run that is killed and started again with the same command goes on from its newest
checkpoint and ends as if nothing had happened, bit for bit.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import os
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

from bert_jax import (
    attention,
    checkpoint,
    device,
    distributed,
    files,
    guard,
    optim,
    profile,
    sharding,
    workdir,
)
from bert_jax.checkpoint import Checkpoints
from bert_jax.config import Run
from bert_jax.data.loader import Batch
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.dropout import generator_key
from bert_jax.errors import UserError
from bert_jax.evaluate import evaluator, put
from bert_jax.log import Log
from bert_jax.model import Params
from bert_jax.progress import Progress
from bert_jax.tasks.stage import Stage

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
    recent: guard.Recent


def _parts(state: State) -> tuple[Params, dict[str, Any]]:
    """A state as checkpoints keep it: the parameters, and the rest but for the seed."""
    rest = state._asdict()
    del rest["params"], rest["seed"]
    return state.params, rest


def make_step(config: Run, stage: Stage):
    """The training step: (state, rows) to (state, sums of the metrics since the last log, `Seen`).

    A step whose numbers are wrong changes nothing, nor does any after it until `advance`.
    """
    optimizer = optim.make(config)
    task, accumulation = stage.task, stage.accumulation

    def objective(params, inputs, key, weights):
        pairs = task.pairs(optim.freeze(config, params), inputs, key)
        loss = sum(pairs[name][0] / jnp.maximum(weight, 1) for name, weight in weights.items())
        return loss, {**pairs, "_loss": (loss, jnp.float32(0))}

    def step(state: State, batch: dict[str, Array]) -> tuple[State, dict[str, Any], guard.Seen]:
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        input_key, dropout_key = jax.random.split(key)
        dropout_key = generator_key(dropout_key, config.model.dropout_generator)
        with jax.named_scope("inputs"):
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
        loss, _ = pairs.pop("_loss")
        with jax.named_scope("optimizer"):
            recent, seen = guard.judge(
                config.guard,
                guard.of_phase(state.recent, state.step == stage.first_step),
                state.step,
                loss,
                grads,
            )
            pairs["gradient_norm"] = (seen.figures[1], jnp.float32(1))
            updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
            sums = jax.tree.map(jnp.add, _of_window(config, state), pairs)
            after = State(state.step + 1, params, optimizer_state, sums, state.seed, recent)
            state = jax.tree.map(functools.partial(jnp.where, recent.halted), state, after)
        return state._replace(recent=state.recent._replace(halted=recent.halted)), sums, seen

    return step


def _of_window(config: Run, state: State) -> dict[str, Any]:
    """The sums that the state's step adds to."""
    first = state.step % config.log_every_steps == 0
    return jax.tree.map(lambda total: jnp.where(first, 0, total), state.sums)


def make_advance(config: Run, stage: Stage):
    """What takes the place of a step whose batch is left out: (state) to (state, sums)."""

    def advance(state: State) -> tuple[State, dict[str, Any]]:
        sums = _of_window(config, state)
        recent = guard.of_phase(state.recent, state.step == stage.first_step)._replace(
            halted=jnp.array(False)
        )
        return state._replace(step=state.step + 1, sums=sums, recent=recent), sums

    return advance


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
        return State(jnp.int32(0), params, optimizer.init(params), sums, seed, guard.begin())

    shapes = jax.eval_shape(init, jnp.uint32(0))
    shardings = sharding.shardings(mesh, shapes)
    return jax.jit(init, out_shardings=shardings), checkpoint.abstract(shapes, shardings)


def compile_step(config: Run, stage: Stage, mesh: jax.sharding.Mesh, state: State) -> Any:
    """The training step of a stage, compiled; `state` gives shapes and shardings."""
    batch = checkpoint.abstract(stage.batch_shape, sharding.rows(mesh))
    step = jax.jit(
        make_step(config, stage),
        donate_argnums=0,
        out_shardings=(_shardings(state), *2 * (sharding.replicated(mesh),)),
    )
    with jax.set_mesh(mesh), _no_garbage_collection():
        compiled = step.lower(state, batch).compile()
    if told := compiled.memory_analysis():
        device.limit_malloc_retention(told.temp_size_in_bytes)
    return compiled


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # Tracing makes millions of objects and keeps them: to look among them for garbage, over and
    # over, takes a tenth of the time of a compilation that the cache on disk answers.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def restore(checkpoints: Checkpoints, step: int, shapes: State, seed: int) -> State:
    """The state of a checkpoint, shaped and sharded as `shapes`."""
    params, rest = checkpoints.restore(step, *_parts(shapes))
    return State(params=params, seed=_placed_seed(seed, shapes), **rest)


def _placed_seed(seed: int, shapes: State) -> UInt[Array, ""]:
    return jax.device_put(np.uint32(seed), shapes.seed.sharding)


def _shardings(state: State) -> State:
    return jax.tree.map(lambda x: x.sharding, state)


class _Programs:
    """A stage's step, as a program for each of its row counts.

    The one for the most rows is compiled at once, the others in a thread. A step that needs one of
    those before it is ready waits: which program a step runs is a function of its batch alone.
    """

    def __init__(self, compile_: Callable[[Stage], Any], stage: Stage):
        self._largest = compile_(stage.with_rows(stage.batch_size))
        # One thread: a second compilation would slow down the first, and the steps under way.
        pool = concurrent.futures.ThreadPoolExecutor(1)
        self._smaller = {
            rows: pool.submit(compile_, stage.with_rows(rows)) for rows in stage.smaller_batches
        }
        pool.shutdown(wait=False)

    def __call__(self, state: State, batch: dict[str, Any]) -> Any:
        smaller = self._smaller.get(len(batch["tokens"]))
        return (smaller.result() if smaller else self._largest)(state, batch)

    def as_text(self) -> str:
        """Of the program for the most rows, the only one in steps that may be profiled."""
        return self._largest.as_text()


class Compiled(NamedTuple):
    """What a stage runs; it does not depend on the seed.

    Attributes:
        step, advance: as `make_step` and `make_advance` make them; the state is donated.
        fingerprint: (state, batch) to checksums of the parameters after the step.
        measure: the held-out evaluation.
    """

    step: Callable[..., tuple[State, dict[str, Any], guard.Seen]]
    advance: Callable[[State], tuple[State, dict[str, Any]]]
    fingerprint: Callable[..., dict[str, Array]]
    measure: Callable[[Params], dict[str, float]]


def compile_stage(config: Run, stage: Stage, mesh: jax.sharding.Mesh, state: State) -> Compiled:
    """The step, and what is compiled when it is first called."""
    step, everywhere = make_step(config, stage), sharding.replicated(mesh)

    def compile_(stage: Stage) -> Any:
        return compile_step(config, stage, mesh, state)

    return Compiled(
        _Programs(compile_, stage) if stage.smaller_batches else compile_(stage),
        jax.jit(
            make_advance(config, stage),
            donate_argnums=0,
            out_shardings=(_shardings(state), everywhere),
        ),
        jax.jit(
            lambda state, batch: guard.bits(step(state, batch)[0].params), out_shardings=everywhere
        ),
        evaluator(stage, mesh),
    )


def _compile_aloud(
    config: Run, stage: Stage, mesh: jax.sharding.Mesh, shapes: State, progress: Progress
) -> Compiled:
    """Compile a stage and report how long it took."""
    begun = time.monotonic()
    compiled = compile_stage(config, stage, mesh, shapes)
    fewer = " and ".join(map(str, stage.smaller_batches))
    progress.say(
        f"compiled the step for {stage.batch_size} rows of T={stage.tokens} "
        f"in {time.monotonic() - begun:.1f} s"
        + (f"; compiling it for {fewer} rows in the background" if fewer else "")
    )
    return compiled


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
    where = (mesh.devices.flat[0].platform, mesh.shape["tensor"])
    attention.check(config, *where)
    device.check_deterministic(config, where[0])
    init, shapes = initial_state(config, stages[0], mesh)
    best = {"best_by": stages[0].task.best_by, "highest": stages[0].task.best_is_highest}

    with contextlib.ExitStack() as stack:

        def claim() -> None:
            stack.enter_context(files.only_process(folder))
            workdir.claim(folder, config, data, best, force)
            vocabulary.save(folder)

        distributed.require_same(workdir.identity(config, data))
        distributed.first("the workdir", claim)
        distributed.first("the checkpoints", lambda: checkpoint.set_aside_damaged(folder))
        checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint, **best)
        stack.callback(checkpoints.close)
        keeper = guard.Guard(config.guard, folder)
        keeper.go_back(checkpoints)
        step = max(checkpoints.steps(), default=0)
        distributed.require_same({"the newest checkpoint in the workdir": step})
        if step >= config.steps or Patience(config, best, folder, step).is_over:
            print(f"{folder} is finished: it stands at step {step:,} of {config.steps:,}")
            return

        def state_at(step: int) -> State:
            if step:
                return restore(checkpoints, step, shapes, config.seed)
            state = init(_placed_seed(config.seed, shapes))
            return state._replace(params=_start_from(state.params, start or {}, shapes.params))

        distributed.first("starts.jsonl", lambda: workdir.record_start(folder, step, mesh, config))
        progress = stack.enter_context(Progress("train", config.steps, "steps", done=step))
        progress.say(attention.describe(config, *where))
        interrupted = stack.enter_context(interrupts(progress))
        watch = stack.enter_context(distributed.Watch())
        if step:
            progress.say(f"resuming at step {step:,} of {config.steps:,}")
        number = next(i for i, s in enumerate(stages) if step < s.end_step)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            # Shapes are enough to compile the step, which takes longer than to make the state.
            if number not in compiled:
                making = pool.submit(_compile_aloud, config, stages[number], mesh, shapes, progress)
            state = state_at(step)
            if number not in compiled:
                compiled[number] = making.result()
        loop = _Loop(
            config=config,
            mesh=mesh,
            stages=stages,
            shapes=shapes,
            folder=folder,
            checkpoints=checkpoints,
            keeper=keeper,
            compiled=compiled,
            progress=progress,
            watch=watch,
            step=step,
            state=state,
        )
        while True:
            with Log(folder, loop.step, config, mesh, progress) as log:
                patience = Patience(config, best, folder, loop.step)
                try:
                    loop.run(log, patience, interrupted)
                    break
                except guard.Alarm as alarm:
                    to = loop.answer(alarm, log)
            if to is not None:
                del loop.state  # two of them may not fit the device
                loop.step, loop.state = to, state_at(to)
        if interrupted():  # since the last step, and more may come after this run
            raise loop.interrupted()


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

    The second one ends the process at once, with 128 and its number: unwinding would wait for a save.
    """
    caught = []
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    def handle(number, frame):
        if caught:
            progress.show_cursor()
            os._exit(128 + number)
        caught.append(number)
        progress.say_in_handler("stopping after this step; once more to stop without saving")

    for number in before:
        signal.signal(number, handle)
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass
class _Loop:
    """The steps of a run, from wherever `step` and `state` stand.

    Attributes:
        step: how many are dispatched.
        state: after them, but for those that are left out.
        shapes: the state's, with shardings.
        compiled: by stage, kept by the caller.
    """

    config: Run
    mesh: jax.sharding.Mesh
    stages: list[Stage]
    shapes: State
    folder: pathlib.Path
    checkpoints: Checkpoints
    keeper: guard.Guard
    compiled: dict[int, Compiled]
    progress: Progress
    watch: distributed.Watch
    step: int
    state: State

    def __post_init__(self) -> None:
        self._stopping = distributed.Stopping(STEPS_AHEAD)
        self._running: collections.deque[Any] = collections.deque()

    def run(self, log: Log, patience: Patience, interrupted: Callable[[], bool]) -> None:
        """Goes on to the end.

        Raises:
            Alarm: a step was left out.
            Interrupted: a signal came and the state is saved.
        """
        self._running.clear()
        while self.step < self.config.steps:
            number = next(i for i, s in enumerate(self.stages) if self.step < s.end_step)
            stage = self.stages[number]
            if number not in self.compiled:
                self.compiled[number] = _compile_aloud(
                    self.config, stage, self.mesh, self.shapes, self.progress
                )
            log.begin(stage, self.step)
            part = sharding.row_part(self.mesh)
            wanted = (self.step - stage.first_step, stage.end_step - stage.first_step)
            batches = profile.watched(
                stage.batches(*wanted, *part),
                self.config,
                range(self.step, stage.end_step),
                self.folder,
                self.compiled[number].step,
                functools.partial(self._retire, log, 0),
                self.progress.say,
            )
            with contextlib.closing(batches):  # else a loop that is left would go on being traced
                for batch in batches:
                    self._dispatch(self.compiled[number], batch, log)
                    if self._look_around(log, patience, interrupted, self.compiled[number]):
                        return

    def _dispatch(self, compiled: Compiled, batch: Batch, log: Log) -> None:
        """Sends the next step to the device."""
        seen = None
        if self.step in self.keeper.skipped:
            self.state, sums = compiled.advance(self.state)
        else:
            rows, every = put(batch, self.mesh), self.config.guard.probe_every_steps
            if every and self.step % every == 0:
                self._retire(log, 0)  # an alarm must find all steps before it looked at
                with jax.set_mesh(self.mesh):
                    guard.probe(self.step, lambda: compiled.fingerprint(self.state, rows))
            self.state, sums, seen = compiled.step(self.state, rows)
        self.step += 1
        self._running.append((self.step, sums, seen))

    def _look_around(
        self,
        log: Log,
        patience: Patience,
        interrupted: Callable[[], bool],
        compiled: Compiled,
    ) -> bool:
        """After a step: metrics, evaluation, saving, signals; whether the run is over."""
        config, step = self.config, self.step
        self.watch.step = step
        self.progress.advance()
        at_end = step == config.steps
        every = config.evaluate_every_steps
        evaluates = at_end or bool(every and step % every == 0)
        stop = self._stopping(interrupted())
        saves = at_end or stop or step % config.checkpoint.every_steps == 0
        # What is evaluated or saved must have been looked at.
        self._retire(log, 0 if evaluates or saves else STEPS_AHEAD)
        evaluated = None
        if evaluates:
            evaluated = log.heldout(step, lambda: compiled.measure(self.state.params))
            patience.look(evaluated)
        if saves or patience.is_over:
            # The metrics up to here must survive whatever the checkpoint survives.
            log.sync()
            self.checkpoints.save(step, *_parts(self.state), evaluated or None)
        if stop:
            self.checkpoints.wait()
            raise self.interrupted()
        if patience.is_over:
            self.progress.say(f"no better for {config.patience} evaluations: stopping")
        return patience.is_over

    def interrupted(self) -> Interrupted:
        """To be raised where the state is saved."""
        return Interrupted(f"saved step {self.step:,} of {self.config.steps:,} in {self.folder}")

    def _retire(self, log: Log, most: int) -> None:
        """Waits for the oldest steps until at most so many run, and looks at what they say."""
        while len(self._running) > most:
            step, sums, seen = self._running.popleft()
            if seen is None:
                jax.block_until_ready(sums)
            elif said := self.keeper.look(step - 1, seen):  # which waits too
                self.keeper.record(step - 1, guard.SPIKE, said, self._batch(step - 1))
                self.progress.say(f"step {step - 1:,}: {guard.sentence('spike', said)}")
            if step % self.config.log_every_steps == 0 or step == self.config.steps:
                log.training(step, sums)

    def _batch(self, step: int) -> Batch:
        """All rows of a step."""
        stage = next(s for s in self.stages if step < s.end_step)
        return next(stage.batches(step - stage.first_step, step + 1 - stage.first_step, 0, 1))

    def answer(self, alarm: guard.Alarm, log: Log) -> int | None:
        """Does what the config says to an alarm.

        Returns:
            The step to go back to; None to go on here.

        Raises:
            UserError: to stop.
        """
        step, config = alarm.step, self.config.guard
        self.progress.advance(step - self.step)
        # As it stood before that step.
        halted = jax.device_put(np.bool_(False), self.state.recent.halted.sharding)
        self.state = self.state._replace(recent=self.state.recent._replace(halted=halted))
        self.step = step
        place = self.keeper.record(step, alarm.kind, alarm.said, self._batch(step))
        self.keeper.keep_state(place, step, *_parts(self.state))
        what = f"step {step:,}: {guard.sentence(guard.KINDS[alarm.kind], alarm.said)}"
        policy = self.keeper.policy(alarm.kind)
        if policy == "skip":
            self.keeper.skip([step])
            self.progress.say(f"{what}; its batch is left out")
            return None
        if policy == "rollback":
            first = max(step - config.rollback_steps, 0)
            self.keeper.skip(range(first, step + 1), back_to=first)
            self.keeper.go_back(self.checkpoints)
            to = max(self.checkpoints.steps(), default=0)
            self.progress.advance(to - step)
            self.progress.say(
                f"{what}; back to step {to:,}, and the batches from step {first:,} on are left out"
            )
            return to
        if step and step not in self.checkpoints.steps():
            log.sync()
            self.checkpoints.save(step, *_parts(self.state))
        self.checkpoints.wait()
        raise UserError(
            f"{what}; the weights are those before it. Look at {place}, try `bert-jax replay "
            f"{self.folder}`, and go on with another config or without this batch "
            f"(--config.guard.{guard.KINDS[alarm.kind]}=skip)"
        )
