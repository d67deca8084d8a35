"""The jitted training step, and its compilation.

A step is a function of the state and the batch. The state holds the seed and the step number, which
determine masking and dropout.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from bert_jax.config.schema import TrainConfig
from bert_jax.model.bert import Params
from bert_jax.model.dropout import generator_key
from bert_jax.objectives.base import Phase
from bert_jax.objectives.distillation import with_teacher
from bert_jax.runs import checkpoint
from bert_jax.runtime import device, sharding
from bert_jax.training import guard, optim
from bert_jax.training.evaluate import make_evaluate
from bert_jax.training.state import State


def make_step(config: TrainConfig, phase: Phase):
    """Return the training step.

    The step is a function (state, batch) -> (state, metric sums since the last log, `guard.StepStats`).
    A step that stops the run leaves the state unchanged, and so do later ones until `recent.halted`
    is cleared. A skipped step advances only the counters.
    """
    optimizer = optim.make_optimizer(config)
    objective, accumulation = phase.objective, phase.accumulation

    def loss_fn(params, teacher, inputs, key, normalizers):
        params = with_teacher(optim.stop_frozen_gradients(config, params), teacher)
        loss_terms = objective.loss_terms(params, inputs, key)
        loss = sum(
            objective.loss_scales.get(name, 1) * loss_terms[name][0] / jnp.maximum(normalizer, 1)
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
            inputs = objective.make_inputs(batch, input_key)
            normalizers = objective.normalizers(inputs)
        grad_fn = jax.grad(loss_fn, has_aux=True)

        def gradients(inputs, key):
            return grad_fn(state.params, state.teacher, inputs, key, normalizers)

        if accumulation == 1:
            grads, loss_terms = gradients(inputs, dropout_key)
        else:
            # Microbatch i takes every accumulation-th row, so each device splits its own rows.
            # Normalizing by the whole batch makes microbatches add up to the batch's gradient.
            microbatches = jax.tree.map(
                lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), inputs
            )

            def accumulate(total, item):
                i, microbatch = item
                key = jax.random.fold_in(dropout_key, i)
                grads_and_terms = gradients(microbatch, key)
                return jax.tree.map(jnp.add, total, grads_and_terms), None

            first = jax.tree.map(lambda x: x[0], microbatches)
            shapes = jax.eval_shape(gradients, first, dropout_key)
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
            skipped = state._replace(
                step=state.step + 1,
                optimizer=optim.skip_update(state.optimizer),
                sums=sums,
                recent=recent._replace(skipped=recent.skipped + 1),
                teacher=None,
            )
            stopped = state._replace(
                recent=state.recent._replace(halted=jnp.array(True)), teacher=None
            )
            kept = jax.tree.map(functools.partial(jnp.where, stats.stops), stopped, skipped)
            new_state = jax.tree.map(functools.partial(jnp.where, stats.is_bad), kept, updated)
        return new_state._replace(teacher=state.teacher), new_state.sums, stats

    return step


def compile_step(
    config: TrainConfig,
    phase: Phase,
    mesh: sharding.Mesh,
    state: State,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compile the training step of a phase.

    `state` gives shapes and shardings; `options` are those of XLA, besides those of the platform.
    """
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
        compiled = step.lower(state, batch).compile(
            {**sharding.compiler_options(mesh), **(options or {})}
        )
    if memory := compiled.memory_analysis():
        device.limit_malloc_retention(memory.temp_size_in_bytes)
    return compiled


class Programs(NamedTuple):
    """Compiled functions of a phase, which do not depend on the seed."""

    step: Callable[..., tuple[State, dict[str, Any], guard.StepStats]]  # donates the state
    largest: Any  # the compiled step for the most rows, the only one that is profiled
    evaluate: Callable[[Params], dict[str, float]]  # parameters -> held-out metrics


def compile_phase(config: TrainConfig, phase: Phase, mesh: sharding.Mesh, state: State) -> Programs:
    """Compile the step of a phase; the evaluation compiles when it is first called.

    The largest row count is compiled at once, others in a background thread. A step waits for its program
    if necessary, so which program it runs depends on its batch alone.
    """

    def compile_(rows: int) -> Any:
        return compile_step(config, phase.with_rows(rows), mesh, state)

    largest = compile_(phase.batch_size)
    # One thread: a second compilation would slow down the first and the running steps.
    pool = concurrent.futures.ThreadPoolExecutor(1)
    smaller = {rows: pool.submit(compile_, rows) for rows in phase.smaller_batch_sizes}
    pool.shutdown(wait=False)

    def step(state: State, batch: dict[str, Any]) -> Any:
        program = smaller.get(len(batch["tokens"]))
        return (program.result() if program else largest)(state, batch)

    return Programs(step if smaller else largest, largest, make_evaluate(phase, mesh))
