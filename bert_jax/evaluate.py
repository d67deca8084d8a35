"""Held-out evaluation: means over a fixed choice of rows, with the same masks every time."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bert_jax import checkpoint, sharding
from bert_jax.config import MeshConfig
from bert_jax.data.loader import HELDOUT_SEED, Batch
from bert_jax.model import Params
from bert_jax.tasks import pretraining
from bert_jax.tasks.stage import Stage


def put(batch: Batch, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """This process's rows as a part of the global batch on the mesh."""
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
        return task.pairs(params, task.inputs(batch, key), None)

    def evaluate(params: Params) -> dict[str, float]:
        total = None
        for i, batch in enumerate(stage.heldout(jax.process_index(), jax.process_count())):
            key = jax.random.fold_in(jax.random.key(HELDOUT_SEED), i)
            pairs = measure(params, put(batch, mesh), key)
            total = pairs if total is None else jax.tree.map(jnp.add, total, pairs)
        return means(total) if total else {}

    return evaluate


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
