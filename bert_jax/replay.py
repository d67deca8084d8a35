"""A step that went wrong, computed again from what was written down (`bert_jax.guard`)."""

import pathlib
from typing import Any, NamedTuple

import jax

from bert_jax import guard, sharding, workdir
from bert_jax.checkpoint import Checkpoints
from bert_jax.config import CheckpointConfig, Config
from bert_jax.data import wordpiece
from bert_jax.errors import UserError
from bert_jax.evaluate import put
from bert_jax.finetune import problem_of
from bert_jax.tasks import finetuning, pretraining
from bert_jax.train import compile_stage, initial_state, restore


class Replayed(NamedTuple):
    """What came of it.

    Attributes:
        incident: what was written down.
        said: of the step computed now, as `guard.describe` says it.
        same: every figure is that of the run, bit for bit, and of two computations now all
            weights are the same.
    """

    incident: guard.Incident
    said: dict[str, Any]
    same: bool


def replay(folder: str | pathlib.Path, step: int | None = None) -> Replayed:
    """Computes an incident's step again, on the devices that are here.

    Args:
        folder: the workdir.
        step: which incident; None for the first.

    Raises:
        UserError: no such incident, or one that was only reported, without the state.
    """
    incident = guard.read_incident(folder, step)
    config, vocabulary = workdir.read_config(folder), wordpiece.load(folder)
    if not incident.state.exists():
        raise UserError(
            f"{incident.state} is not there: of step {incident.step} only the batch was kept"
        )
    mesh = sharding.make_mesh(config.mesh)
    if isinstance(config, Config):
        stage = pretraining.stage_of(config, vocabulary, incident.batch, incident.step)
    else:
        problem = problem_of(config.task, vocabulary, config.model.labels)
        stage = finetuning.stage(config, problem, [config.seed], sharding.row_shards(mesh))[-1]
    _, shapes = initial_state(config, stage, mesh)
    kept = Checkpoints(incident.state, CheckpointConfig(), read_only=True)
    state = restore(kept, incident.step, shapes, config.seed)
    kept.close()
    stage = stage.with_rows(len(incident.batch["tokens"]))
    compiled, batch = compile_stage(config, stage, mesh, shapes), put(incident.batch, mesh)
    with jax.set_mesh(mesh):
        one, two = (jax.device_get(compiled.fingerprint(state, batch)) for _ in range(2))
    said = guard.describe(compiled.step(state, batch)[2])
    # As text, for NaN is no number's equal. A probe's incident has no figures.
    agree = all(repr(incident.told.get(name, value)) == repr(value) for name, value in said.items())
    return Replayed(incident, said, one == two and agree)


def describe(found: Replayed) -> str:
    """For people: what was recorded beside what came out now."""
    told, said = found.incident.told, found.said
    lines = [f"step {found.incident.step:,} of {told['kind']}", f"{'':28}{'then':>12}{'now':>12}"]
    for name, before, now in (
        *((name, told.get(name), said[name]) for name in ("loss", "gradient_norm")),
        *(
            (f"  {name}", told.get("gradient_norms", {}).get(name), norm)
            for name, norm in said["gradient_norms"].items()
        ),
    ):
        then = "" if before is None else f"{before:.5g}"
        lines.append(f"{name.replace('_', ' '):28}{then:>12}{now:>12.5g}")
    lines.append(
        "the same, bit for bit"
        if found.same
        else "not the same: other devices or versions, or a fault"
    )
    return "\n".join(lines)
