"""Held-out evaluation: means over a fixed choice of rows, with the same masks every time."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from bert_jax import checkpoint, sharding
from bert_jax.config import MeshConfig
from bert_jax.data.loader import HELDOUT_SEED, Batch
from bert_jax.model import Params
from bert_jax.tasks import pretraining
from bert_jax.tasks.stage import Stage, Task


def put(batch: Batch, mesh: jax.sharding.Mesh) -> Batch | dict[str, jax.Array]:
    """This process's rows as a part of the global batch on the mesh.

    For one device they are all of it, and stay as they are: a compiled program takes them to its
    device by itself, in a tenth of the time.
    """
    if mesh.size == 1:
        return batch
    where = sharding.rows(mesh)
    return {k: jax.make_array_from_process_local_data(where, v) for k, v in batch.items()}


def evaluator(stage: Stage, mesh: jax.sharding.Mesh) -> Callable[[Params], dict[str, float]]:
    """A function from parameters to the held-out means of everything the task measures.

    Compiled once. The masks depend on the batch's number alone, so two evaluations differ by their
    parameters only.
    """
    task = stage.task

    @jax.jit
    def measure(params, batch, key):
        inputs = task.inputs(batch, key)
        return task.pairs(params, inputs, None), task.outputs(params, inputs)

    def evaluate(params: Params) -> dict[str, float]:
        total, found = None, []
        for i, batch in enumerate(stage.heldout(*sharding.row_part(mesh))):
            key = jax.random.fold_in(jax.random.key(HELDOUT_SEED), i)
            with jax.set_mesh(mesh):
                pairs, outputs = measure(params, put(batch, mesh), key)
            total = pairs if total is None else jax.tree.map(jnp.add, total, pairs)
            if outputs:
                found.append((_everywhere(batch), _everywhere(outputs)))
        return {**means(total), **task.score(found)} if total else {}

    return evaluate


def outputs(
    task: Task, params: Params, batches: Iterable[Batch], mesh: jax.sharding.Mesh
) -> Iterator[tuple[Batch, dict[str, np.ndarray]]]:
    """The task's outputs for each batch, with the batch, both on the host."""
    run = jax.jit(
        lambda params, batch: task.outputs(params, task.inputs(batch, jax.random.key(HELDOUT_SEED)))
    )
    params = jax.device_put(params, sharding.replicated(mesh))
    for batch in batches:
        yield _everywhere(batch), _everywhere(run(params, put(batch, mesh)))


def _everywhere(tree: Any) -> Any:
    """Arrays of all processes' rows, on every host."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def means(pairs: dict) -> dict[str, float]:
    """(sum, weight) pairs, on the device or not, to plain means; 0 where nothing was weighed."""
    pairs = jax.device_get(pairs)
    return {name: float(s) / float(w) if w else 0.0 for name, (s, w) in pairs.items()}


def evaluate_workdir(
    folder: str, rows: str | None = None, which: str = "best", every_row: bool = False
) -> tuple[int, dict[str, float]]:
    """Measures a checkpoint of a run again.

    Args:
        folder: the workdir.
        rows: a folder of rows of the same vocabulary; None for those of the run's last phase.
        which: as `checkpoint.load_model` takes it.
        every_row: all held-out rows instead of the run's choice.

    Returns:
        The step and its held-out means.
    """
    config, _, params, step = checkpoint.load_model(folder, which)
    phase = dataclasses.replace(config.phases[-1], fraction=1.0)
    if rows:
        phase = dataclasses.replace(phase, rows=rows, tokens=0)
    most = 0 if every_row else config.evaluate_rows
    config = dataclasses.replace(config, phases=(phase,), evaluate_rows=most)
    _, _, _, (stage,) = pretraining.stages(config)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    return step, stage.task.summarize(evaluator(stage, mesh)(params))
