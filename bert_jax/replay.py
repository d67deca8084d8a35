"""Replay a bad step from its recorded incident (`bert_jax.guard`)."""

import dataclasses
import math
import pathlib
import sys
from typing import Any, NamedTuple

import jax

from bert_jax import guard, sharding, storage, workdir
from bert_jax.benchmarks.load import load_dataset
from bert_jax.checkpoint import Checkpoints
from bert_jax.config import CheckpointConfig, Config, FinetuneConfig, MeshConfig
from bert_jax.errors import UserError
from bert_jax.model import attention
from bert_jax.objectives import finetuning, pretraining
from bert_jax.sharding import shard_batch
from bert_jax.step import compile_phase, initial_state, place_teacher, restore


class ReplayResult(NamedTuple):
    """Result of a replay.

    Attributes:
        incident: the recorded incident.
        stats: statistics of the replayed step, as returned by `guard.describe`.
        same: whether the statistics equal the recorded ones bit for bit, and two computations of
            the step give the same parameters.
    """

    incident: guard.Incident
    stats: dict[str, Any]
    same: bool


@storage.reads("folder")
def replay(folder: str | pathlib.Path, step: int | None = None) -> ReplayResult:
    """Compute the step of an incident again, on as many local devices as divide its rows.

    Args:
        folder: the workdir.
        step: step of the incident; None for the first whose state was saved.

    Raises:
        UserError: there is no such incident, or its state was not saved.
    """
    incident = guard.read_incident(folder, step)
    config, vocabulary = workdir.read_config(folder), workdir.read_vocabulary(folder)
    checkpoints = Checkpoints(incident.state, CheckpointConfig(), read_only=True)
    if incident.step not in checkpoints.steps():
        raise UserError(
            f"{incident.state} does not exist: only the batch of step {incident.step} was saved; "
            "replay another incident with --step"
        )
    mesh = sharding.make_mesh(config.mesh)
    name, platform = config.model.attention, mesh.devices.flat[0].platform
    if (kernel := attention.KERNELS.get(name)) and kernel.platform != platform:
        print(f"attention: xla, since {name} runs on a {kernel.platform} only", file=sys.stderr)
        config.model.attention = "xla"
    if isinstance(config, Config):
        if objective := workdir.read_data(folder)[0].get("objective"):
            raise UserError(
                f"{folder} was trained with the objective {objective}, which the run does not contain: "
                f"replay cannot compute its steps; inspect {incident.state.parent}"
            )
        phase = pretraining.phase_at_step(config, vocabulary, incident.batch, incident.step)
    else:
        assert isinstance(config, FinetuneConfig)
        dataset = load_dataset(config.task, vocabulary, config.model.labels)
        phase = finetuning.make_phase(
            config, dataset, [config.seed], sharding.num_row_shards(mesh), vocabulary
        )[-1]
    # Other seeds of the run may have given its rows another shape than this plan.
    phase = dataclasses.replace(
        phase,
        tokens=incident.batch["tokens"].shape[1],
        batch_size=len(incident.batch["tokens"]),
        batch_shape=jax.eval_shape(lambda batch: batch, incident.batch),
        smaller_batch_sizes=(),
    )
    if phase.batch_size % (sharding.num_row_shards(mesh) * phase.accumulation):
        # Other devices than those of the run: take as many as divide the rows.
        count = math.gcd(phase.batch_size // phase.accumulation, jax.device_count())
        mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:count])
    _, shapes = initial_state(config, phase, mesh)
    state = restore(checkpoints, incident.step, shapes, config.seed)
    state = place_teacher(state, phase.objective, shapes)
    checkpoints.close()
    compiled, batch = compile_phase(config, phase, mesh, shapes), shard_batch(incident.batch, mesh)
    with jax.set_mesh(mesh):
        first, second = (jax.device_get(compiled.fingerprint(state, batch)) for _ in range(2))
    stats = guard.describe(compiled.step(state, batch)[2])
    # Compare as text because NaN is unequal to itself. Incidents of probes record no statistics.
    agree = all(
        repr(incident.stats.get(name, value)) == repr(value) for name, value in stats.items()
    )
    return ReplayResult(incident, stats, first == second and agree)


def describe(result: ReplayResult) -> str:
    """Return a table of the recorded and the replayed statistics."""
    recorded, replayed = result.incident.stats, result.stats
    lines = [
        f"step {result.incident.step:,}, kind {recorded['kind']}",
        f"{'':28}{'recorded':>12}{'replayed':>12}",
    ]
    for name, old, new in (
        *((name, recorded.get(name), replayed[name]) for name in ("loss", "gradient_norm")),
        *(
            (f"  {name}", recorded.get("gradient_norms", {}).get(name), norm)
            for name, norm in replayed["gradient_norms"].items()
        ),
    ):
        old_text = "" if old is None else f"{old:.5g}"
        lines.append(f"{name.replace('_', ' '):28}{old_text:>12}{new:>12.5g}")
    lines.append(
        "identical, bit for bit"
        if result.same
        else "different: other devices, other versions, or a hardware fault"
    )
    return "\n".join(lines)
