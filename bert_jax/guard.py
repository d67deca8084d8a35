"""Detect bad steps before they update the parameters, record them and apply the policy.

The training step checks its loss and gradient norm. If they are not finite, or far above those of
previous steps, it leaves the state unchanged, and so does every step already dispatched. The loop
then stops, skips the batch or rolls back (`GuardConfig`). Decisions are files of the workdir, so a
run that is killed and restarted makes the same ones:

skipped.json               the steps whose batches are skipped, and the step to roll back to
incidents/step_N/          statistics of step N, its batch and the state before it
    incident.json, batch.npz, state/
"""

import contextlib
import functools
import json
import pathlib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bert_jax import distributed, files, optim, storage
from bert_jax.checkpoint import Checkpoints
from bert_jax.config import CheckpointConfig, GuardConfig
from bert_jax.data.loader import Batch
from bert_jax.errors import UserError
from bert_jax.model.bert import Params

# Number of previous steps that loss and gradient norm are compared with.
WINDOW = 128
FINE, NOT_FINITE, SPIKE = range(3)
KINDS = ("fine", "nonfinite", "spike")
# Lower bound of a standard deviation, as a fraction of the mean: once a model has converged,
# rounding errors must not count as spikes.
_MIN_DEVIATION = 1e-3
# Maximum number of incidents that store the state, which is as large as a checkpoint.
_MAX_STATES = 3

SKIPPED, INCIDENTS = "skipped.json", "incidents"
_INCIDENT, _BATCH, _STATE = "incident.json", "batch.npz", "state"


class LossHistory(NamedTuple):
    """Loss history, part of the training state; field names are part of the checkpoint format.

    Attributes:
        figures: loss and gradient norm of the last `WINDOW` steps of this phase, as a ring buffer
            that is initially NaN.
        halted: whether there was a bad step that the loop has not handled yet.
    """

    figures: Float[Array, "W 2"]
    halted: Bool[Array, ""]


class StepStats(NamedTuple):
    """Statistics of a step.

    Attributes:
        kind: one of `FINE`, `NOT_FINITE`, `SPIKE`.
        loss_and_grad_norm: loss and global gradient norm.
        mean, deviation: mean and standard deviation of both over the last `WINDOW` steps; NaN while
            there are fewer.
        norms: gradient norm by layer.
    """

    kind: Int[Array, ""]
    loss_and_grad_norm: Float[Array, "2"]
    mean: Float[Array, "2"]
    deviation: Float[Array, "2"]
    norms: dict[str, Float[Array, ""]]


def begin() -> LossHistory:
    """Return the empty history before the first step."""
    return LossHistory(jnp.full((WINDOW, 2), jnp.nan), jnp.array(False))


def reset_at_phase_start(recent: LossHistory, begins: Bool[Array, ""]) -> LossHistory:
    """Clear the history where a phase begins, since losses of phases are not comparable."""
    return recent._replace(figures=jnp.where(begins, jnp.nan, recent.figures))


def check_step(
    config: GuardConfig,
    recent: LossHistory,
    step: Int[Array, ""],
    loss: Float[Array, ""],
    grads: Params,
) -> tuple[LossHistory, StepStats]:
    """Compare the loss and gradient norm of a step with the steps before it.

    Args:
        config: thresholds and policies.
        recent: history of this phase (see `reset_at_phase_start`).
        step: step number.
        loss: loss of the step.
        grads: gradients before clipping.

    Returns:
        The updated history, halted if the step must not change the state, and the statistics.
    """
    # The global norm is the norm of the layers' norms, so the gradients are reduced only once.
    by_layer = {name: optim.global_norm(part) for name, part in _layers(grads).items()}
    figures = jnp.stack([loss, optim.global_norm(by_layer)]).astype(jnp.float32)
    # Until the window is full the mean is NaN, and comparisons with NaN are false.
    mean, deviation = recent.figures.mean(0), recent.figures.std(0)
    is_far = figures > mean + config.sigmas * jnp.maximum(deviation, _MIN_DEVIATION * jnp.abs(mean))
    is_spike = jnp.any(is_far) if config.spike != "off" else False
    is_finite = jnp.isfinite(figures).all()
    kind = jnp.where(is_finite, jnp.where(is_spike, SPIKE, FINE), NOT_FINITE).astype(jnp.int32)
    is_bad = ~is_finite | (is_spike if config.spike != "report" else False)
    # Spikes stay out of the history even if they are only reported.
    entry = jnp.where(kind == FINE, figures, recent.figures[step % WINDOW])
    history = jax.lax.dynamic_update_index_in_dim(recent.figures, entry, step % WINDOW, 0)
    return (
        LossHistory(history, recent.halted | is_bad),
        StepStats(kind, figures, mean, deviation, by_layer),
    )


def _layers(tree: Params) -> dict[str, Any]:
    """Return the parts of a parameter tree by name: embeddings, each layer, each head."""
    return {
        name: part
        for top, value in tree.items()
        for name, part in (value.items() if top == "encoder" else [(top, value)])
    }


class BadStep(NamedTuple):
    """A bad step, which left the state unchanged unless it is only reported.

    Attributes:
        step: step number.
        kind: `NOT_FINITE` or `SPIKE`.
        stats: statistics as plain Python values, for incident.json.
    """

    step: int
    kind: int
    stats: dict[str, Any]

    def __str__(self) -> str:
        return f"step {self.step:,}: {summarize(KINDS[self.kind], self.stats)}"


def read_stats(step: int, stats: StepStats) -> BadStep | None:
    """Wait for a step and return it if it was bad."""
    kind = int(stats.kind)
    return None if kind == FINE else BadStep(step, kind, describe(stats))


class Guard:
    """Policies and records of bad steps in a workdir.

    Args:
        config: the policies.
        folder: the workdir.

    Attributes:
        skipped: steps whose batches are skipped.
    """

    def __init__(self, config: GuardConfig, folder: pathlib.Path):
        self._config, self._folder = config, folder
        path = folder / SKIPPED
        match _read_json(path) if path.exists() else {"steps": [], "back_to": None}:
            case {"steps": [*steps], "back_to": None | int() as back_to} if all(
                isinstance(step, int) for step in steps
            ):
                self.skipped, self._back_to = set(steps), back_to
            case _:
                raise UserError(
                    f"{path} is damaged: it does not hold the skipped steps; restore it"
                )
        self._spikes = set(incidents(folder, KINDS[SPIKE]))

    def policy(self, kind: int) -> str:
        """Return the configured policy for a kind of bad step."""
        return {NOT_FINITE: self._config.nonfinite, SPIKE: self._config.spike}[kind]

    def record(self, bad_step: BadStep, read_batch: Callable[[], Batch]) -> pathlib.Path:
        """Write an incident and return its folder; an incident of an earlier start is kept.

        Args:
            bad_step: the bad step.
            read_batch: function that returns its global batch; called only if the incident is written.
        """
        step, kind, stats = bad_step
        incident = self._folder / INCIDENTS / f"step_{step}"

        def write() -> None:
            if not incident.exists():
                with files.new_folder(incident) as folder:
                    batch: dict[str, Any] = read_batch()
                    np.savez_compressed(folder / _BATCH, **batch)
                    files.write_json(
                        folder / _INCIDENT, {"step": step, "kind": KINDS[kind], **stats}
                    )

        distributed.first("recording an incident", write)
        return incident

    def limit_error(self, bad_step: BadStep) -> UserError | None:
        """Return the error of a run with more than `GuardConfig.max_incidents` of the step's kind."""
        count = str(len(incidents(self._folder, KINDS[bad_step.kind])))
        count = int(distributed.gather("counting incidents", count)[0])
        if count <= self._config.max_incidents:
            return None
        return UserError(
            f"{count} bad steps exceed config.guard.max_incidents={self._config.max_incidents}, the last "
            f"being {bad_step}; inspect {self._folder / INCIDENTS}"
        )

    def report(self, bad_step: BadStep, read_batch: Callable[[], Batch]) -> str | None:
        """Record a spike that is only reported, and return a line about it.

        After the first `GuardConfig.max_incidents` spikes of a run, nothing is recorded and None is
        returned.
        """
        max_incidents = self._config.max_incidents
        if len(self._spikes) >= max_incidents:
            return None
        self.record(bad_step, read_batch)
        self._spikes.add(bad_step.step)
        if len(self._spikes) < max_incidents:
            return str(bad_step)
        return f"{bad_step}; later spikes are not reported (config.guard.max_incidents={max_incidents})"

    def save_state(self, incident: pathlib.Path, step: int, params: Params, training: Any) -> None:
        """Save the state before an incident's step, unless enough other incidents store theirs."""
        others = _with_state(incident.parent) - {incident.name}
        # All processes save or none does, so process 0 decides.
        counts = distributed.gather("counting the states of incidents", str(len(others)))
        if int(counts[0]) < _MAX_STATES:
            checkpoints = Checkpoints(incident / _STATE, CheckpointConfig(keep_best=0))
            if step not in checkpoints.steps():
                checkpoints.save(step, params, training)
            checkpoints.close()

    def skip(self, steps: Iterable[int], back_to: int | None = None) -> None:
        """Skip the batches of `steps`, now and after every restart.

        Args:
            steps: step numbers.
            back_to: step to roll back to; `roll_back` deletes the checkpoints after it.
        """
        self.skipped.update(steps)
        self._back_to = back_to
        skipped = {"steps": sorted(self.skipped), "back_to": back_to}
        path = self._folder / SKIPPED
        distributed.first("writing skipped.json", lambda: files.write_json(path, skipped))

    def roll_back_before(self, step: int, checkpoints: Checkpoints) -> int:
        """Skip the batches of a bad step and of `rollback_steps` before it, and roll back to them.

        Returns:
            The first skipped step.
        """
        first = max(step - self._config.rollback_steps, 0)
        self.skip(range(first, step + 1), back_to=first)
        self.roll_back(checkpoints)
        return first

    def roll_back(self, checkpoints: Checkpoints) -> None:
        """Delete the checkpoints that a rollback discards, including one cut short by a kill.

        A run that began with another policy may have none that is old enough. Its oldest is kept, as
        without it the run would begin again.
        """
        if self._back_to is not None:
            oldest = min(checkpoints.steps(), default=0)
            checkpoints.delete_after(max(self._back_to, oldest))
            self.skip([])


def describe(stats: StepStats) -> dict[str, Any]:
    """Convert the statistics of a step to plain Python values."""
    stats = jax.device_get(stats)
    pair = functools.partial(zip, ("loss", "gradient_norm"), strict=True)
    return {
        **{name: float(value) for name, value in pair(stats.loss_and_grad_norm)},
        "mean": {name: float(value) for name, value in pair(stats.mean)},
        "deviation": {name: float(value) for name, value in pair(stats.deviation)},
        "gradient_norms": {name: float(value) for name, value in sorted(stats.norms.items())},
    }


def summarize(kind: str, stats: dict[str, Any]) -> str:
    """Return a short description of an incident."""
    figures = ", ".join(
        f"{name.replace('_', ' ')} {stats[name]:.4g} (mean {stats['mean'][name]:.4g} ± "
        f"{stats['deviation'][name]:.2g})"
        if np.isfinite(stats["mean"][name])
        else f"{name.replace('_', ' ')} {stats[name]:.4g}"
        for name in ("loss", "gradient_norm")
    )
    return f"{'non-finite value' if kind == 'nonfinite' else 'spike'}: {figures}"


def stop_error(bad_step: BadStep, incident: pathlib.Path) -> UserError:
    """Return the error that ends a run at a bad step, whose state is saved."""
    return UserError(
        f"{bad_step}; the parameters before this step are saved. Inspect {incident}, then resume with "
        f"another config or skip the batch (--config.guard.{KINDS[bad_step.kind]}=skip)"
    )


def incidents(folder: str | pathlib.Path, kind: str | None = None) -> list[int]:
    """Return the steps of a workdir's incidents, optionally of one kind."""
    paths = (pathlib.Path(folder) / INCIDENTS).glob(f"step_*/{_INCIDENT}")
    return sorted(
        int(path.parent.name.removeprefix("step_"))
        for path in paths
        if kind is None or _read_json(path)["kind"] == kind
    )


def _with_state(folder: pathlib.Path) -> set[str]:
    """Return the names of the incidents that store a state, which local copies leave out."""
    if url := storage.remote(folder):
        names = storage.listing(url)
        return {name.split("/")[0] for name in names if f"/{_STATE}/" in name}
    return {path.parent.name for path in folder.glob(f"*/{_STATE}")}


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    with _read_errors(path):
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        return content


@contextlib.contextmanager
def _read_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        with files.one_line_errors(f"cannot read {path}"):
            yield
    except (ValueError, RecursionError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged ({error})") from None


class Incident(NamedTuple):
    """An incident as written by `Guard.record` and `Guard.save_state`.

    Attributes:
        step: step number.
        stats: contents of incident.json.
        batch: global batch of the step.
        state: folder of the state before the step; may be missing.
    """

    step: int
    stats: dict[str, Any]
    batch: Batch
    state: pathlib.Path


def read_incident(folder: str | pathlib.Path, step: int | None = None) -> Incident:
    """Read the incident at `step` of a workdir; by default the first whose state was saved, if any.

    Raises:
        UserError: there is no such incident.
    """
    steps = incidents(folder)
    if not steps:
        raise UserError(f"{folder} has no incidents: the run had no bad steps")
    if step is None:
        saved = _with_state(pathlib.Path(folder) / INCIDENTS)
        step = next((step for step in steps if f"step_{step}" in saved), steps[0])
    if step not in steps:
        raise UserError(
            f"{folder} has no incident at step {step}; choose one of {', '.join(map(str, steps))}"
        )
    path = pathlib.Path(folder) / INCIDENTS / f"step_{step}"
    record = _read_json(path / _INCIDENT)
    with _read_errors(path), np.load(path / _BATCH) as arrays:
        batch = dict(arrays)
    return Incident(step, record, batch, path / _STATE)
