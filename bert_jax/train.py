"""The training loop, for every task.

A step is a function of the state and of (seed, step), which determine the batch, masking and
dropout. A run that is killed and restarted with the same command resumes from its newest checkpoint
and ends with the same bits as an uninterrupted run.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
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

from bert_jax import checkpoint, cpu, device, distributed, files, guard, optim, sharding, workdir
from bert_jax.checkpoint import Checkpoints
from bert_jax.config import TrainConfig
from bert_jax.data.loader import Batch
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.evaluate import make_evaluate, put
from bert_jax.log import Log
from bert_jax.model import attention
from bert_jax.model.bert import Params
from bert_jax.model.dropout import generator_key
from bert_jax.objectives.base import Stage
from bert_jax.progress import Progress
from bert_jax.tools import profile

# Steps dispatched before the loop waits: enough to keep a device busy, few enough to stop soon.
STEPS_AHEAD = 2


class Interrupted(Exception):
    """Raised after SIGTERM or SIGINT, once the state is saved; the run can be resumed."""


class State(NamedTuple):
    """State carried from step to step; field names are part of the checkpoint format."""

    step: Int[Array, ""]
    params: Params
    optimizer: Any
    # Sums of the metrics since the last log line. They are part of the state so that a restart in
    # the middle of a logging window logs the same values as an uninterrupted run.
    sums: dict[str, Any]
    # config.seed, an argument of the step so that runs with different seeds share a compilation.
    seed: UInt[Array, ""]
    recent: guard.LossHistory


def _parts(state: State) -> tuple[Params, dict[str, Any]]:
    """Split a state into what checkpoints store: the parameters, and the rest without the seed."""
    rest = state._asdict()
    del rest["params"], rest["seed"]
    return state.params, rest


def make_step(config: TrainConfig, stage: Stage):
    """Return the training step.

    The step is a function (state, batch) -> (state, metric sums since the last log, `guard.StepStats`).
    A bad step leaves the state unchanged, and so do later ones until `advance` is called.
    """
    optimizer = optim.make(config)
    task, accumulation = stage.objective, stage.accumulation

    def loss_fn(params, inputs, key, normalizers):
        loss_terms = task.loss_terms(optim.freeze(config, params), inputs, key)
        loss = sum(
            loss_terms[name][0] / jnp.maximum(normalizer, 1)
            for name, normalizer in normalizers.items()
        )
        return loss, {**loss_terms, "_loss": (loss, jnp.float32(0))}

    def step(
        state: State, batch: dict[str, Array]
    ) -> tuple[State, dict[str, Any], guard.StepStats]:
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        input_key, dropout_key = jax.random.split(key)
        dropout_key = generator_key(dropout_key, config.model.dropout_generator)
        with jax.named_scope("inputs"):
            inputs = task.prepare(batch, input_key)
            normalizers = task.normalizers(inputs)
        grad_fn = jax.grad(loss_fn, has_aux=True)
        if accumulation == 1:
            grads, loss_terms = grad_fn(state.params, inputs, dropout_key, normalizers)
        else:
            # Microbatch i takes every accumulation-th row, so each device splits its own rows.
            # Normalizing by the whole batch makes microbatches add up to the batch's gradient.
            microbatches = jax.tree.map(
                lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), inputs
            )

            def accumulate(total, item):
                i, microbatch = item
                key = jax.random.fold_in(dropout_key, i)
                grads_and_terms = grad_fn(state.params, microbatch, key, normalizers)
                return jax.tree.map(jnp.add, total, grads_and_terms), None

            shapes = jax.eval_shape(
                grad_fn,
                state.params,
                jax.tree.map(lambda x: x[0], microbatches),
                dropout_key,
                normalizers,
            )
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            (grads, loss_terms), _ = jax.lax.scan(
                accumulate, zeros, (jnp.arange(accumulation), microbatches)
            )
        loss, _ = loss_terms.pop("_loss")
        with jax.named_scope("optimizer"):
            recent, seen = guard.check_step(
                config.guard,
                guard.reset_at_phase_start(state.recent, state.step == stage.first_step),
                state.step,
                loss,
                grads,
            )
            loss_terms["gradient_norm"] = (seen.loss_and_grad_norm[1], jnp.float32(1))
            updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
            sums = jax.tree.map(jnp.add, _window_sums(config, state), loss_terms)
            new_state = State(state.step + 1, params, optimizer_state, sums, state.seed, recent)
            state = jax.tree.map(functools.partial(jnp.where, recent.halted), state, new_state)
        return state._replace(recent=state.recent._replace(halted=recent.halted)), sums, seen

    return step


def _window_sums(config: TrainConfig, state: State) -> dict[str, Any]:
    """Return the metric sums that the next step adds to: zeros at the start of a logging window."""
    is_first = state.step % config.log_every_steps == 0
    return jax.tree.map(lambda total: jnp.where(is_first, 0, total), state.sums)


def make_skip_step(config: TrainConfig, stage: Stage):
    """Return a function state -> (state, sums) that skips a batch.

    It advances the step counter without updating the parameters.
    """

    def advance(state: State) -> tuple[State, dict[str, Any]]:
        sums = _window_sums(config, state)
        recent = guard.reset_at_phase_start(state.recent, state.step == stage.first_step)._replace(
            halted=jnp.array(False)
        )
        return state._replace(step=state.step + 1, sums=sums, recent=recent), sums

    return advance


def initial_state(
    config: TrainConfig, stage: Stage, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> tuple[Any, State]:
    """Return a jitted function from the seed to the state at step 0, and the state's shapes."""
    task, optimizer = stage.objective, optim.make(config)
    params = jax.eval_shape(task.init, jax.random.key(0))
    loss_terms = jax.eval_shape(
        lambda params, batch, key: task.loss_terms(params, task.prepare(batch, key), None),
        params,
        stage.batch_shape,
        jax.random.key(0),
    )
    loss_terms["gradient_norm"] = (jax.ShapeDtypeStruct((), jnp.float32),) * 2

    def init(seed: UInt[Array, ""]) -> State:
        params = task.init(jax.random.key(seed))
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), loss_terms)
        return State(jnp.int32(0), params, optimizer.init(params), sums, seed, guard.begin())

    shapes = jax.eval_shape(init, jnp.uint32(0))
    shardings = sharding.shardings(mesh, shapes)
    return jax.jit(init, out_shardings=shardings), checkpoint.abstract(shapes, shardings)


def compile_step(config: TrainConfig, stage: Stage, mesh: jax.sharding.Mesh, state: State) -> Any:
    """Compile the training step of a stage; `state` gives shapes and shardings."""
    batch = checkpoint.abstract(stage.batch_shape, sharding.rows(mesh))
    step = jax.jit(
        make_step(config, stage),
        donate_argnums=0,
        out_shardings=(_shardings(state), *2 * (sharding.replicated(mesh),)),
    )
    with jax.set_mesh(mesh), cpu.no_garbage_collection():
        compiled = step.lower(state, batch).compile()
    if memory := compiled.memory_analysis():
        cpu.limit_malloc_retention(memory.temp_size_in_bytes)
    return compiled


def restore(checkpoints: Checkpoints, step: int, shapes: State, seed: int) -> State:
    """Restore the state of a checkpoint with the shapes and shardings of `shapes`."""
    params, rest = checkpoints.restore(step, *_parts(shapes))
    return State(params=params, seed=_placed_seed(seed, shapes), **rest)


def _placed_seed(seed: int, shapes: State) -> UInt[Array, ""]:
    return jax.device_put(np.uint32(seed), shapes.seed.sharding)


def _shardings(state: State) -> State:
    return jax.tree.map(lambda x: x.sharding, state)


class _Programs:
    """The training step of a stage, compiled for each of its row counts.

    The largest row count is compiled at once, the others in a background thread. A step waits for
    its program if necessary, so which program it runs depends on its batch alone.
    """

    def __init__(self, compile_: Callable[[Stage], Any], stage: Stage):
        self._largest = compile_(stage.with_rows(stage.batch_size))
        # One thread: a second compilation would slow down the first and the running steps.
        pool = concurrent.futures.ThreadPoolExecutor(1)
        self._smaller = {
            rows: pool.submit(compile_, stage.with_rows(rows)) for rows in stage.smaller_batch_sizes
        }
        pool.shutdown(wait=False)

    def __call__(self, state: State, batch: dict[str, Any]) -> Any:
        smaller = self._smaller.get(len(batch["tokens"]))
        return (smaller.result() if smaller else self._largest)(state, batch)

    def as_text(self) -> str:
        """Return the HLO text of the program for the most rows, the only one that is profiled."""
        return self._largest.as_text()


class Compiled(NamedTuple):
    """Compiled functions of a stage, which do not depend on the seed.

    Attributes:
        step, advance: the functions of `make_step` and `make_skip_step`; the state is donated.
        fingerprint: function (state, batch) -> checksums of the parameters after the step.
        measure: held-out evaluation, parameters -> metrics.
    """

    step: Callable[..., tuple[State, dict[str, Any], guard.StepStats]]
    advance: Callable[[State], tuple[State, dict[str, Any]]]
    fingerprint: Callable[..., dict[str, Array]]
    measure: Callable[[Params], dict[str, float]]


def compile_stage(
    config: TrainConfig, stage: Stage, mesh: jax.sharding.Mesh, state: State
) -> Compiled:
    """Compile the step of a stage; the other functions compile when they are first called."""
    step, replicated = make_step(config, stage), sharding.replicated(mesh)

    def compile_(stage: Stage) -> Any:
        return compile_step(config, stage, mesh, state)

    return Compiled(
        _Programs(compile_, stage) if stage.smaller_batch_sizes else compile_(stage),
        jax.jit(
            make_skip_step(config, stage),
            donate_argnums=0,
            out_shardings=(_shardings(state), replicated),
        ),
        jax.jit(
            lambda state, batch: guard.bits(step(state, batch)[0].params), out_shardings=replicated
        ),
        make_evaluate(stage, mesh),
    )


def _compile_and_report(
    config: TrainConfig, stage: Stage, mesh: jax.sharding.Mesh, shapes: State, progress: Progress
) -> Compiled:
    """Compile a stage and report how long it took."""
    start_time = time.monotonic()
    compiled = compile_stage(config, stage, mesh, shapes)
    row_counts = " and ".join(map(str, stage.smaller_batch_sizes))
    progress.say(
        f"compiled the step for {stage.batch_size} rows of T={stage.tokens} "
        f"in {time.monotonic() - start_time:.1f} s"
        + (f"; compiling it for {row_counts} rows in the background" if row_counts else "")
    )
    return compiled


def train(
    config: TrainConfig,
    vocabulary: Vocabulary,
    data: list[dict[str, Any]],
    stages: list[Stage],
    folder: str | pathlib.Path,
    force: bool = False,
    start: Params | None = None,
    compiled: dict[int, Any] | None = None,
) -> None:
    """Train `config` in `folder` to the end, resuming from the newest checkpoint if there is one.

    Args:
        config: validated, with the vocabulary size filled in.
        vocabulary: saved with the run.
        data: description of the rows of each stage (see `workdir.claim`).
        stages: stages to train on, in order.
        folder: the workdir.
        force: resume in a workdir that holds a run with another config.
        start: parameters that replace the random ones at step 0; may be a subset of the model's.
        compiled: cache of `compile_stage` results by stage index, which the caller may share
            between runs that differ only in their seeds.

    Raises:
        UserError: an error that the user can fix; no progress is lost.
        Interrupted: SIGTERM or SIGINT was received and the state is saved.
    """
    folder = pathlib.Path(folder)
    compiled = {} if compiled is None else compiled
    mesh = sharding.make_mesh(config.mesh)
    for stage in stages:
        sharding.check_batch(mesh, stage.batch_size, stage.accumulation)
    hardware = (mesh.devices.flat[0].platform, mesh.shape["tensor"])
    attention.check(config, *hardware)
    device.check_deterministic(config, hardware[0])
    init, shapes = initial_state(config, stages[0], mesh)
    best = {"best_by": stages[0].objective.best_by, "highest": stages[0].objective.best_is_highest}

    with contextlib.ExitStack() as stack:

        def claim() -> None:
            stack.enter_context(files.only_process(folder))
            workdir.claim(folder, config, data, best, force)
            vocabulary.save(folder)

        distributed.check_same_on_all_processes(workdir.identity(config, data))
        distributed.first("opening the workdir", claim)
        distributed.first("checking the checkpoints", lambda: checkpoint.move_damaged(folder))
        checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint, **best)
        stack.callback(checkpoints.close)
        step_guard = guard.Guard(config.guard, folder)
        step_guard.roll_back(checkpoints)
        step = max(checkpoints.steps(), default=0)
        distributed.check_same_on_all_processes({"the newest checkpoint in the workdir": step})
        if step >= config.steps or EarlyStopping(config, best, folder, step).is_over:
            print(f"{folder}: training is complete (step {step:,} of {config.steps:,})")
            return

        def state_at(step: int) -> State:
            if step:
                return restore(checkpoints, step, shapes, config.seed)
            state = init(_placed_seed(config.seed, shapes))
            return state._replace(params=_start_from(state.params, start or {}, shapes.params))

        distributed.first(
            "writing starts.jsonl", lambda: workdir.record_start(folder, step, mesh, config)
        )
        progress = stack.enter_context(Progress("train", config.steps, "steps", done=step))
        progress.say(attention.describe(config, *hardware))
        interrupted = stack.enter_context(catch_signals(progress))
        watch = stack.enter_context(distributed.Heartbeat())
        if step:
            progress.say(f"resuming at step {step:,} of {config.steps:,}")
        number = next(i for i, s in enumerate(stages) if step < s.end_step)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            # Compiling the step needs only shapes and takes longer than creating the state.
            if number not in compiled:
                compiling = pool.submit(
                    _compile_and_report, config, stages[number], mesh, shapes, progress
                )
            state = state_at(step)
            if number not in compiled:
                compiled[number] = compiling.result()
        loop = _Loop(
            config=config,
            mesh=mesh,
            stages=stages,
            shapes=shapes,
            folder=folder,
            checkpoints=checkpoints,
            step_guard=step_guard,
            compiled=compiled,
            progress=progress,
            watch=watch,
            step=step,
            state=state,
        )
        while True:
            with Log(folder, loop.step, config, mesh, progress) as log:
                patience = EarlyStopping(config, best, folder, loop.step)
                try:
                    loop.run(log, patience, interrupted)
                    break
                except guard.BadStep as bad_step:
                    rollback_step = loop.handle_bad_step(bad_step, log)
            if rollback_step is not None:
                del loop.state  # device memory may not hold two states
                loop.step, loop.state = rollback_step, state_at(rollback_step)
        if interrupted():  # a signal after the last step must still stop the runs that follow
            raise loop.interrupted()


def _start_from(params: Params, start: Params, shapes: Params) -> Params:
    """Return `params` with the values of `start` in place of the random ones."""
    start = traverse_util.flatten_dict(start, sep="/")
    shapes = traverse_util.flatten_dict(shapes, sep="/")
    params = traverse_util.flatten_dict(params, sep="/")
    placed = {k: jax.device_put(v, shapes[k].sharding) for k, v in start.items()}
    return traverse_util.unflatten_dict({**params, **placed}, sep="/")


class EarlyStopping:
    """Early stopping after `config.patience` evaluations without improvement.

    The decision depends only on the metrics so far, which a restart reads again from the workdir.
    """

    def __init__(self, config: TrainConfig, best: dict[str, Any], folder: pathlib.Path, step: int):
        self._evaluations = getattr(config, "patience", 0)
        self._metric, self._sign = best["best_by"], 1 if best["highest"] else -1
        self._values: list[float] = []
        path = folder / "metrics.jsonl"
        for line in workdir.read_lines(path) if path.exists() else []:
            if line["split"] == "heldout" and line["step"] <= step:
                self.look(line)

    def look(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of an evaluation."""
        if self._metric in metrics:
            self._values.append(self._sign * metrics[self._metric])

    @property
    def is_over(self) -> bool:
        """Whether to stop."""
        since_best = (
            len(self._values) - 1 - self._values.index(max(self._values)) if self._values else 0
        )
        return 0 < self._evaluations <= since_best


@contextlib.contextmanager
def catch_signals(progress: Progress) -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM and SIGINT in the block; yield a function that says whether one was received.

    A second signal exits at once with status 128 + signal number: unwinding would wait for a save.
    """
    received = []
    old_handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    def handle(number, frame):
        if received:
            progress.show_cursor()
            os._exit(128 + number)
        received.append(number)
        progress.say_in_handler(
            "stopping after this step; repeat the signal to stop without saving"
        )

    for number in old_handlers:
        signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


@dataclasses.dataclass
class _Loop:
    """The training loop from `step` and `state` on.

    Attributes:
        step: number of steps dispatched so far.
        state: state after these steps.
        shapes: shapes and shardings of the state.
        compiled: compiled stages by index; owned by the caller.
    """

    config: TrainConfig
    mesh: jax.sharding.Mesh
    stages: list[Stage]
    shapes: State
    folder: pathlib.Path
    checkpoints: Checkpoints
    step_guard: guard.Guard
    compiled: dict[int, Compiled]
    progress: Progress
    watch: distributed.Heartbeat
    step: int
    state: State

    def __post_init__(self) -> None:
        self._stopping = distributed.StopFlag(STEPS_AHEAD)
        self._running: collections.deque[Any] = collections.deque()

    def run(self, log: Log, patience: EarlyStopping, interrupted: Callable[[], bool]) -> None:
        """Train to the end.

        Raises:
            Alarm: a step was bad; the state is the one before it.
            Interrupted: a signal was received and the state is saved.
        """
        self._running.clear()
        while self.step < self.config.steps:
            number = next(i for i, s in enumerate(self.stages) if self.step < s.end_step)
            stage = self.stages[number]
            if number not in self.compiled:
                self.compiled[number] = _compile_and_report(
                    self.config, stage, self.mesh, self.shapes, self.progress
                )
            log.begin(stage, self.step)
            part = sharding.process_row_shard(self.mesh)
            steps = (self.step - stage.first_step, stage.end_step - stage.first_step)
            batches = profile.watched(
                stage.batches(*steps, *part),
                self.config,
                range(self.step, stage.end_step),
                self.folder,
                self.compiled[number].step,
                functools.partial(self._retire, log, 0),
                self.progress.say,
            )
            with contextlib.closing(batches):  # ends a trace when an exception leaves the loop
                for batch in batches:
                    self._dispatch(self.compiled[number], batch, log)
                    if self._after_step(log, patience, interrupted, self.compiled[number]):
                        return

    def _dispatch(self, compiled: Compiled, batch: Batch, log: Log) -> None:
        """Dispatch the next step to the device."""
        seen = None
        if self.step in self.step_guard.skipped:
            self.state, sums = compiled.advance(self.state)
        else:
            device_batch, every = put(batch, self.mesh), self.config.guard.probe_every_steps
            if every and self.step % every == 0:
                self._retire(log, 0)  # check all earlier steps before a probe may raise
                with jax.set_mesh(self.mesh):
                    guard.probe(self.step, lambda: compiled.fingerprint(self.state, device_batch))
            self.state, sums, seen = compiled.step(self.state, device_batch)
        self.step += 1
        self._running.append((self.step, sums, seen))

    def _after_step(
        self,
        log: Log,
        patience: EarlyStopping,
        interrupted: Callable[[], bool],
        compiled: Compiled,
    ) -> bool:
        """Log, evaluate, save and handle signals; return whether to stop early."""
        config, step = self.config, self.step
        self.watch.step = step
        self.progress.advance()
        is_last = step == config.steps
        every = config.evaluate_every_steps
        should_evaluate = is_last or bool(every and step % every == 0)
        should_stop = self._stopping(interrupted())
        should_save = is_last or should_stop or step % config.checkpoint.every_steps == 0
        # Check all dispatched steps before their state is evaluated or saved.
        self._retire(log, 0 if should_evaluate or should_save else STEPS_AHEAD)
        metrics = None
        if should_evaluate:
            metrics = log.heldout(step, lambda: compiled.measure(self.state.params))
            patience.look(metrics)
        if should_save or patience.is_over:
            # Metrics must be on disk before the checkpoint that a restart resumes from.
            log.sync()
            self.checkpoints.save(step, *_parts(self.state), metrics or None)
        if should_stop:
            self.checkpoints.wait()
            raise self.interrupted()
        if patience.is_over:
            self.progress.say(f"stopping early: no improvement in {config.patience} evaluations")
        return patience.is_over

    def interrupted(self) -> Interrupted:
        """Return the exception to raise once the state is saved."""
        return Interrupted(f"saved step {self.step:,} of {self.config.steps:,} in {self.folder}")

    def _retire(self, log: Log, max_running: int) -> None:
        """Wait for the oldest steps until at most `max_running` are left; check and log them."""
        while len(self._running) > max_running:
            step, sums, seen = self._running.popleft()
            if seen is None:
                jax.block_until_ready(sums)
            elif stats := self.step_guard.look(step - 1, seen):  # blocks until the step is done
                self.step_guard.record(step - 1, guard.SPIKE, stats, self._batch(step - 1))
                self.progress.say(f"step {step - 1:,}: {guard.sentence('spike', stats)}")
            if step % self.config.log_every_steps == 0 or step == self.config.steps:
                log.training(step, sums)

    def _batch(self, step: int) -> Batch:
        """Return the global batch of a step."""
        stage = next(s for s in self.stages if step < s.end_step)
        return next(stage.batches(step - stage.first_step, step + 1 - stage.first_step, 0, 1))

    def handle_bad_step(self, bad_step: guard.BadStep, log: Log) -> int | None:
        """Apply the configured policy to a bad step.

        Returns:
            The step to roll back to; None to continue from the current state.

        Raises:
            UserError: the policy is to stop.
        """
        step, config = bad_step.step, self.config.guard
        self.progress.advance(step - self.step)
        # The state is the one before the bad step, except for the flag.
        halted = jax.device_put(np.bool_(False), self.state.recent.halted.sharding)
        self.state = self.state._replace(recent=self.state.recent._replace(halted=halted))
        self.step = step
        incident = self.step_guard.record(step, bad_step.kind, bad_step.stats, self._batch(step))
        self.step_guard.save_state(incident, step, *_parts(self.state))
        message = f"step {step:,}: {guard.sentence(guard.KINDS[bad_step.kind], bad_step.stats)}"
        policy = self.step_guard.policy(bad_step.kind)
        if policy == "skip":
            self.step_guard.skip([step])
            self.progress.say(f"{message}; skipping its batch")
            return None
        if policy == "rollback":
            first = max(step - config.rollback_steps, 0)
            self.step_guard.skip(range(first, step + 1), back_to=first)
            self.step_guard.roll_back(self.checkpoints)
            rollback_step = max(self.checkpoints.steps(), default=0)
            self.progress.advance(rollback_step - step)
            self.progress.say(
                f"{message}; rolling back to step {rollback_step:,} and skipping the batches of "
                f"steps {first:,} to {step:,}"
            )
            return rollback_step
        if step and step not in self.checkpoints.steps():
            log.sync()
            self.checkpoints.save(step, *_parts(self.state))
        self.checkpoints.wait()
        kind = guard.KINDS[bad_step.kind]
        skip = "" if kind == "probe" else f" or skip the batch (--config.guard.{kind}=skip)"
        raise UserError(
            f"{message}; the parameters before this step are saved. Inspect {incident}, run "
            f"`bert-jax replay {self.folder}`, then resume with another config{skip}"
        )
