"""Held-out evaluation: metrics over a fixed set of rows, masked alike in every evaluation of a phase."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config.schema import Config, DistillConfig, MeshConfig
from bert_jax.data.loader import HELDOUT_SEED, Batch
from bert_jax.errors import UserError
from bert_jax.model.bert import Params
from bert_jax.objectives import pretraining
from bert_jax.objectives.base import Phase
from bert_jax.objectives.same_vocabulary import check_vocabulary
from bert_jax.runs import checkpoint
from bert_jax.runtime import distributed, sharding

_TOKENS_AT_A_TIME = 32_768  # of one device in `evaluate_workdir`


def make_evaluate(
    phase: Phase, mesh: sharding.Mesh, rows_at_a_time: int = 0
) -> Callable[[Params], dict[str, float]]:
    """Return a function that maps parameters to held-out metrics.

    It compiles once. Masks depend on the index of the row alone, so evaluations differ only in their
    parameters, whatever the size of the batch. On a single device, at most `rows_at_a_time` rows of a
    batch are computed together (0: all). Metrics of a mixture are means over its folders, weighted by their
    shares, and the objective's `best_metric` is also returned for each: as "masked_lm_loss/NAME".
    """
    objective = phase.objective

    @functools.partial(jax.jit, compiler_options=sharding.compiler_options(mesh))
    def measure(params, batch, number):
        def measure_part(inputs):
            return objective.loss_terms(params, inputs, None), objective.predict(params, inputs)

        def prepare_row(row, index):
            key = jax.random.fold_in(jax.random.key(HELDOUT_SEED), index)
            inputs = objective.make_inputs({name: value[None] for name, value in row.items()}, key)
            return jax.tree.map(lambda x: x[0], inputs)

        rows = len(jax.tree.leaves(batch)[0])
        inputs = jax.vmap(prepare_row)(batch, number * rows + jnp.arange(rows))
        if not 0 < rows_at_a_time < rows:
            return measure_part(inputs)
        parts = next(n for n in range(2, rows + 1) if rows % n == 0 and rows // n <= rows_at_a_time)
        inputs = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), inputs)
        loss_terms, outputs = jax.lax.map(measure_part, inputs)
        outputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)
        return jax.tree.map(lambda x: x.sum(0), loss_terms), outputs

    def evaluate_rows(params: Params, heldout: Callable) -> dict[str, float]:
        total = None

        def batches_and_outputs() -> Iterator[tuple[Batch, dict[str, np.ndarray]]]:
            nonlocal total
            for i, batch in enumerate(heldout(*sharding.process_row_shard(mesh))):
                with jax.set_mesh(mesh):
                    loss_terms, outputs = measure(params, sharding.shard_batch(batch, mesh), i)
                total = loss_terms if total is None else jax.tree.map(jnp.add, total, loss_terms)
                if outputs:
                    yield distributed.to_hosts(batch), distributed.to_hosts(outputs)

        results = batches_and_outputs()
        first = list(itertools.islice(results, 1))
        if not total:
            return {}
        scores = objective.score(itertools.chain(first, results))
        collections.deque(results, 0)  # `total` is of all batches, whatever `score` reads
        return {**means(total), **scores}

    def evaluate(params: Params) -> dict[str, float]:
        if not phase.sources:
            return evaluate_rows(params, phase.heldout)
        results = {name: evaluate_rows(params, x.heldout) for name, x in phase.sources.items()}
        results = {name: metrics for name, metrics in results.items() if metrics}
        total, best = sum(phase.sources[name].share for name in results), objective.best_metric.name
        mixed: collections.Counter[str] = collections.Counter()
        for name, metrics in results.items():
            weight = phase.sources[name].share / total
            mixed.update({key: weight * value for key, value in metrics.items()})
        return {**mixed, **{f"{best}/{name}": x[best] for name, x in results.items()}}

    return evaluate


def means(loss_terms: dict) -> dict[str, float]:
    """Convert (sum, weight) pairs to means as Python floats; 0 where the weight is 0."""
    loss_terms = jax.device_get(loss_terms)
    return {name: float(s) / float(w) if w else 0.0 for name, (s, w) in loss_terms.items()}


def evaluate_workdir(
    folder: str, rows: str | None = None, which: str = "best", every_row: bool = False
) -> tuple[int, dict[str, float]]:
    """Evaluate a checkpoint of a pretraining run; return its step and its held-out metrics.

    `rows` is a folder of rows with the same vocabulary (None: those of the run's last phase). With
    `every_row`, all held-out rows are used instead of the run's subset.
    """
    config, vocabulary, params, step = checkpoint.load_model(folder, which)
    assert isinstance(config, Config)
    phase_config = dataclasses.replace(config.phases[-1], fraction=1.0)
    if not (rows or phase_config.folders):
        raise UserError(f"{folder} was trained on no rows: add --rows DIR")
    if rows:
        check_vocabulary(rows, rows, vocabulary, str(folder))
        phase_config = dataclasses.replace(phase_config, rows=rows, mixture=(), tokens=0)
    num_rows = 0 if every_row else config.evaluate_rows  # 0 means all
    config = dataclasses.replace(
        config, phases=(phase_config,), evaluate_rows=num_rows, distill=DistillConfig()
    )
    _, _, _, (phase,) = pretraining.make_phases(config)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    # The batch of a run on many devices may exceed the memory of one.
    rows_at_a_time = max(_TOKENS_AT_A_TIME // phase.tokens, 1)
    if metrics := make_evaluate(phase, mesh, rows_at_a_time)(params):
        return step, phase.objective.summarize(metrics)
    raise UserError(
        f"{', '.join(phase_config.folders)} has no held-out rows: prepare them with --heldout-fraction, or pass --rows"
    )
