"""The jitted training step, its state, and their compilation.

A step is a function of the state and the batch. The state holds the seed and the step number, which
determine masking and dropout.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, UInt

from bert_jax.config.schema import TrainConfig
from bert_jax.model.bert import Params
from bert_jax.model.dropout import generator_key
from bert_jax.objectives.base import Objective, Phase
from bert_jax.objectives.distillation import with_teacher
from bert_jax.runs import checkpoint
from bert_jax.runs.checkpoint import Checkpoints
from bert_jax.runtime import device, sharding
from bert_jax.training import guard, optim
from bert_jax.training.evaluate import make_evaluate


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
    # Parameters of the teacher in distillation, which do not change; not part of checkpoints.
    teacher: Params | None = None


def evaluated_params(state: State) -> Params:
    """Return the parameters that are evaluated: their average if the optimizer keeps one.

    They include the teacher, if there is one (`distillation.with_teacher`).
    """
    average = optim.average_of(state.optimizer)
    return with_teacher(state.params if average is None else average, state.teacher)


def with_params(state: State, params: Params) -> State:
    """Return a state with other parameters, where their average starts too."""
    if optim.average_of(state.optimizer) is not None:
        copies = jax.tree.map(jnp.copy, params)
        state = state._replace(optimizer=optim.with_average(state.optimizer, copies))
    return state._replace(params=params)


def checkpoint_parts(state: State) -> tuple[Params, dict[str, Any]]:
    """Split a state into what checkpoints store: the parameters, and the rest without the seed and
    the teacher.

    The average of the parameters, if there is one, is stored as the parameters, and they in its place.
    """
    state = _exchange_average(state)
    rest = state._asdict()
    del rest["params"], rest["seed"], rest["teacher"]
    return state.params, rest


def _exchange_average(state: State) -> State:
    """Exchange the parameters and their average, if the optimizer keeps one."""
    average = optim.average_of(state.optimizer)
    if average is None:
        return state
    optimizer = optim.with_average(state.optimizer, state.params)
    return state._replace(params=average, optimizer=optimizer)


def make_step(config: TrainConfig, phase: Phase):
    """Return the training step.

    The step is a function (state, batch) -> (state, metric sums since the last log, `guard.StepStats`).
    A step that stops the run leaves the state unchanged, and so do later ones until `recent.halted`
    is cleared. A skipped step advances only the counters.
    """
    optimizer = optim.make_optimizer(config)
    objective, accumulation = phase.objective, phase.accumulation

    scales = getattr(objective, "loss_scales", {})

    def loss_fn(params, teacher, inputs, key, normalizers):
        params = with_teacher(optim.stop_frozen_gradients(config, params), teacher)
        loss_terms = objective.loss_terms(params, inputs, key)
        loss = sum(
            scales.get(name, 1) * loss_terms[name][0] / jnp.maximum(normalizer, 1)
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
            inputs = objective.prepare(batch, input_key)
            normalizers = objective.normalizers(inputs)
        grad_fn = jax.grad(loss_fn, has_aux=True)
        if accumulation == 1:
            grads, loss_terms = grad_fn(
                state.params, state.teacher, inputs, dropout_key, normalizers
            )
        else:
            # Microbatch i takes every accumulation-th row, so each device splits its own rows.
            # Normalizing by the whole batch makes microbatches add up to the batch's gradient.
            microbatches = jax.tree.map(
                lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), inputs
            )

            def accumulate(total, item):
                i, microbatch = item
                key = jax.random.fold_in(dropout_key, i)
                grads_and_terms = grad_fn(state.params, state.teacher, microbatch, key, normalizers)
                return jax.tree.map(jnp.add, total, grads_and_terms), None

            shapes = jax.eval_shape(
                grad_fn,
                state.params,
                state.teacher,
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
            recent = guard.reset_at_phase_start(state.recent, state.step == phase.first_step)
            history, stats = guard.check_step(config.guard, recent, state.step, loss, grads)
            loss_terms["gradient_norm"] = (stats.loss_and_grad_norm[1], jnp.float32(1))
            # Sums start at zero in each logging window.
            is_first = state.step % config.log_every_steps == 0
            sums = jax.tree.map(lambda total: jnp.where(is_first, 0, total), state.sums)
            updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
            updated = State(
                state.step + 1,
                optax.apply_updates(state.params, updates),
                optimizer_state,
                jax.tree.map(jnp.add, sums, loss_terms),
                state.seed,
                history,
            )
            skipped = State(
                state.step + 1,
                state.params,
                optim.skip_update(state.optimizer),
                sums,
                state.seed,
                recent._replace(skipped=recent.skipped + 1),
            )
            stopped = state._replace(
                recent=state.recent._replace(halted=jnp.array(True)), teacher=None
            )
            kept = jax.tree.map(functools.partial(jnp.where, stats.stops), stopped, skipped)
            new_state = jax.tree.map(functools.partial(jnp.where, stats.is_bad), kept, updated)
        return new_state._replace(teacher=state.teacher), new_state.sums, stats

    return step


def initial_state(
    config: TrainConfig, phase: Phase, mesh: sharding.Mesh | jax.sharding.AbstractMesh
) -> tuple[Any, State]:
    """Return a jitted function from the seed to the state at step 0, and the state's shapes.

    The shapes include the teacher, the state of the function does not (`place_teacher`).
    """
    objective, optimizer = phase.objective, optim.make_optimizer(config)

    def draw(seed: UInt[Array, ""]) -> Params:
        return objective.init(jax.random.key(seed))

    # With the seed's sharding, so that JAX does not trace it again in `init`.
    seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=sharding.replicated(mesh))
    params = jax.eval_shape(draw, seed)
    teacher = jax.eval_shape(lambda: getattr(objective, "teacher", None))
    loss_terms = jax.eval_shape(
        lambda params, batch, key: objective.loss_terms(
            params, objective.prepare(batch, key), None
        ),
        with_teacher(params, teacher),
        phase.batch_shape,
        jax.random.key(0),
    )
    loss_terms["gradient_norm"] = (jax.ShapeDtypeStruct((), jnp.float32),) * 2

    def begin(params: Params, seed: UInt[Array, ""]) -> State:
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), loss_terms)
        return State(jnp.int32(0), params, optimizer.init(params), sums, seed, guard.init_history())

    def init(seed: UInt[Array, ""]) -> State:
        return begin(draw(seed), seed)

    shapes = jax.eval_shape(begin, params, seed)
    shardings = sharding.shardings(mesh, shapes)
    abstract = checkpoint.abstract(shapes, shardings)
    abstract_teacher = checkpoint.abstract(teacher, sharding.shardings(mesh, teacher))
    return jax.jit(init, out_shardings=shardings), abstract._replace(teacher=abstract_teacher)


def place_teacher(state: State, objective: Objective, shapes: State) -> State:
    """Return a state with the parameters of the objective's teacher, if it has one."""
    teacher = getattr(objective, "teacher", None)
    placed = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), teacher, shapes.teacher)
    return state._replace(teacher=placed)


def compile_step(config: TrainConfig, phase: Phase, mesh: sharding.Mesh, state: State) -> Any:
    """Compile the training step of a phase; `state` gives shapes and shardings."""
    batch = checkpoint.abstract(phase.batch_shape, sharding.row_sharding(mesh))
    step = jax.jit(
        make_step(config, phase),
        donate_argnums=0,
        out_shardings=(
            jax.tree.map(lambda x: x.sharding, state),
            *2 * (sharding.replicated(mesh),),
        ),
    )
    with jax.set_mesh(mesh), device.no_garbage_collection():
        compiled = step.lower(state, batch).compile()
    if memory := compiled.memory_analysis():
        device.limit_malloc_retention(memory.temp_size_in_bytes)
    return compiled


def restore(checkpoints: Checkpoints, step: int, shapes: State, seed: int) -> State:
    """Restore the state of a checkpoint with the shapes and shardings of `shapes`."""
    params, rest = checkpoints.restore(step, *checkpoint_parts(shapes))
    return _exchange_average(State(params=params, seed=place_seed(seed, shapes), **rest))


def place_seed(seed: int, shapes: State) -> UInt[Array, ""]:
    """Return the seed on the devices, as an argument of the initialization and part of the state."""
    return jax.device_put(np.uint32(seed), shapes.seed.sharding)


class _StepPrograms:
    """The training step of a phase, compiled for each of its row counts.

    The largest row count is compiled at once, the others in a background thread. A step waits for
    its program if necessary, so which program it runs depends on its batch alone.
    """

    def __init__(self, compile_: Callable[[Phase], Any], phase: Phase):
        self._largest = compile_(phase.with_rows(phase.batch_size))
        # One thread: a second compilation would slow down the first and the running steps.
        pool = concurrent.futures.ThreadPoolExecutor(1)
        self._smaller = {
            rows: pool.submit(compile_, phase.with_rows(rows)) for rows in phase.smaller_batch_sizes
        }
        pool.shutdown(wait=False)

    def __call__(self, state: State, batch: dict[str, Any]) -> Any:
        smaller = self._smaller.get(len(batch["tokens"]))
        return (smaller.result() if smaller else self._largest)(state, batch)

    def as_text(self) -> str:
        """Return the HLO text of the program for the most rows, the only one that is profiled."""
        return self._largest.as_text()


class Programs(NamedTuple):
    """Compiled functions of a phase, which do not depend on the seed.

    Attributes:
        step: the function of `make_step`; the state is donated.
        evaluate: held-out evaluation, parameters -> metrics.
    """

    step: Callable[..., tuple[State, dict[str, Any], guard.StepStats]]
    evaluate: Callable[[Params], dict[str, float]]


def compile_phase(config: TrainConfig, phase: Phase, mesh: sharding.Mesh, state: State) -> Programs:
    """Compile the step of a phase; the evaluation compiles when it is first called."""

    def compile_(phase: Phase) -> Any:
        return compile_step(config, phase, mesh, state)

    return Programs(
        _StepPrograms(compile_, phase) if phase.smaller_batch_sizes else compile_(phase),
        make_evaluate(phase, mesh),
    )
