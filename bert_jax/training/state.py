"""The state of training: at step 0, in checkpoints, and what is evaluated of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from bert_jax.config.schema import TrainConfig
from bert_jax.model.bert import Params, flatten, unflatten
from bert_jax.objectives.base import Objective, Phase
from bert_jax.objectives.distillation import with_teacher
from bert_jax.runs import checkpoint
from bert_jax.runs.checkpoint import Checkpoints
from bert_jax.runtime import sharding
from bert_jax.training import guard, optim


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


def with_params(state: State, start: Params, shapes: Params) -> State:
    """Return a state with the parameters of `start` in place of random ones; averages start there too.

    `start` may be a subset; `shapes` are the shapes and shardings of all parameters.
    """
    shardings = flatten(shapes)
    placed = {k: jax.device_put(v, shardings[k].sharding) for k, v in flatten(start).items()}
    params = unflatten({**flatten(state.params), **placed})
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
    teacher = jax.eval_shape(lambda: objective.teacher)
    loss_terms = jax.eval_shape(
        lambda params, batch, key: objective.loss_terms(
            params, objective.make_inputs(batch, key), None
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
    placed = jax.tree.map(
        lambda x, y: jax.device_put(x, y.sharding), objective.teacher, shapes.teacher
    )
    return state._replace(teacher=placed)


def restore(checkpoints: Checkpoints, step: int, shapes: State, seed: int) -> State:
    """Restore the state of a checkpoint with the shapes and shardings of `shapes`."""
    params, rest = checkpoints.restore(step, *checkpoint_parts(shapes))
    return _exchange_average(State(params=params, seed=place_seed(seed, shapes), **rest))


def place_seed(seed: int, shapes: State) -> UInt[Array, ""]:
    """Return the seed on the devices, as an argument of the initialization and part of the state."""
    return jax.device_put(np.uint32(seed), shapes.seed.sharding)
