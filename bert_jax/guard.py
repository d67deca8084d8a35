"""When numbers go wrong: noticed inside the step, before a weight changes, and written down.

The step judges its loss and its gradients' norm. Where they are not finite, or far above those of
the steps before, it leaves the state as it was and so does every step that is already on its way;
the loop then stops, leaves the batch out, or goes back (`GuardConfig`). Decisions are files of the
workdir, so a run that is killed and started again makes the same ones:

skipped.json               the steps whose batches were left out, and whether the run is to go back
incidents/step_N/          what was seen at step N, the batch, and the state before it, for `replay`
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
import optax
from jaxtyping import Array, Bool, Float, Int, UInt32

from bert_jax import distributed, files
from bert_jax.checkpoint import Checkpoints
from bert_jax.config import CheckpointConfig, GuardConfig
from bert_jax.data.loader import Batch
from bert_jax.errors import UserError
from bert_jax.model import Params

# Loss and gradient norm are compared with those of so many steps before.
WINDOW = 128
FINE, NOT_FINITE, SPIKE, UNEQUAL = range(4)
KINDS = ("fine", "nonfinite", "spike", "probe")
# A standard deviation is taken as at least this part of the mean: figures that hardly ever differ,
# as when a model has learned all there is, are not far apart by any rounding error.
_LEAST_DEVIATION = 1e-3
# Incidents that keep the state beside the batch: it is as large as a checkpoint.
_STATES_KEPT = 3

SKIPPED, INCIDENTS = "skipped.json", "incidents"
_INCIDENT, _BATCH, _STATE = "incident.json", "batch.npz", "state"


class Recent(NamedTuple):
    """What the state carries from step to step.

    Attributes:
        figures: loss and gradient norm of the last `WINDOW` steps of this phase; NaN where there
            were none.
        halted: whether a step was left out and the loop is yet to hear of it.
    """

    figures: Float[Array, "W 2"]
    halted: Bool[Array, ""]


class Seen(NamedTuple):
    """What a step says of its numbers.

    Attributes:
        kind: one of `FINE`, `NOT_FINITE`, `SPIKE`.
        figures: the loss and the gradient's norm.
        mean, deviation: of both over the steps before; NaN while those are fewer than `WINDOW`.
        norms: of the gradient, by layer.
    """

    kind: Int[Array, ""]
    figures: Float[Array, "2"]
    mean: Float[Array, "2"]
    deviation: Float[Array, "2"]
    norms: dict[str, Float[Array, ""]]


def begin() -> Recent:
    """Before the first step."""
    return Recent(jnp.full((WINDOW, 2), jnp.nan), jnp.array(False))


def of_phase(recent: Recent, begins: Bool[Array, ""]) -> Recent:
    """Without figures where a phase begins: those of the one before are others."""
    return recent._replace(figures=jnp.where(begins, jnp.nan, recent.figures))


def judge(
    config: GuardConfig, recent: Recent, step: Int[Array, ""], loss: Float[Array, ""], grads: Params
) -> tuple[Recent, Seen]:
    """Compares a step with those before it.

    Args:
        config: what is far.
        recent: the state's, `of_phase`.
        step: its number.
        loss: what the gradients are of.
        grads: before they are clipped.

    Returns:
        The next state's, halted if this step must change nothing; what is said of it.
    """
    # The norm of all is that of the layers' norms: a large model is traced once for both.
    by_layer = {name: optax.tree.norm(part) for name, part in _layers(grads).items()}
    figures = jnp.stack([loss, optax.tree.norm(by_layer)]).astype(jnp.float32)
    # NaN until the window is full, and nothing is above NaN.
    mean, deviation = recent.figures.mean(0), recent.figures.std(0)
    far = figures > mean + config.sigmas * jnp.maximum(deviation, _LEAST_DEVIATION * jnp.abs(mean))
    spike = jnp.any(far) if config.spike != "off" else False
    finite = jnp.isfinite(figures).all()
    kind = jnp.where(finite, jnp.where(spike, SPIKE, FINE), NOT_FINITE).astype(jnp.int32)
    halts = ~finite | (spike if config.spike != "report" else False)
    # A spike that is only reported is none of the usual figures either.
    own = jnp.where(kind == FINE, figures, recent.figures[step % WINDOW])
    kept = jax.lax.dynamic_update_index_in_dim(recent.figures, own, step % WINDOW, 0)
    return (
        Recent(kept, recent.halted | halts),
        Seen(kind, figures, mean, deviation, by_layer),
    )


def _layers(tree: Params) -> dict[str, Any]:
    """The parts of a model by name: embeddings, each layer, each head."""
    return {
        name: part
        for top, value in tree.items()
        for name, part in (value.items() if top == "encoder" else [(top, value)])
    }


def bits(tree: Any) -> dict[str, UInt32[Array, ""]]:
    """A checksum of every part of a model's parameters, equal where all bits are."""

    def of(x: Array) -> UInt32[Array, ""]:
        flat = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32).reshape(-1)
        # Each in its place times an odd number of its own: two that are exchanged are noticed.
        return jnp.sum(flat * (2 * jnp.arange(flat.size, dtype=jnp.uint32) + 1))

    return {name: sum(map(of, jax.tree.leaves(part))) for name, part in _layers(tree).items()}


class Alarm(Exception):
    """A step was left out: the state stands before it."""

    def __init__(self, step: int, kind: int, said: dict[str, Any]):
        super().__init__(f"step {step}: {KINDS[kind]}")
        self.step, self.kind, self.said = step, kind, said


class Guard:
    """What is done about alarms in one workdir.

    Args:
        config: the policies.
        folder: the workdir.

    Attributes:
        skipped: the steps whose batches are left out.
    """

    def __init__(self, config: GuardConfig, folder: pathlib.Path):
        self._config, self._folder = config, folder
        path = folder / SKIPPED
        told = _told(path) if path.exists() else {"steps": [], "back_to": None}
        self.skipped, self._back_to = set(told["steps"]), told["back_to"]

    def look(self, step: int, seen: Seen) -> dict[str, Any]:
        """What to say of a finished step, {} if it was fine.

        Raises:
            Alarm: it was left out.
        """
        kind = int(seen.kind)
        if kind == FINE:
            return {}
        said = describe(seen)
        if kind == NOT_FINITE or self._config.spike != "report":
            raise Alarm(step, kind, said)
        return said

    def policy(self, kind: int) -> str:
        """What the config says to an alarm."""
        return {NOT_FINITE: self._config.nonfinite, SPIKE: self._config.spike}.get(kind, "stop")

    def record(self, step: int, kind: int, said: dict[str, Any], batch: Batch) -> pathlib.Path:
        """Writes what was seen at a step; one that is there already, of a start before, stays.

        Of each kind `GuardConfig.most_incidents` are written; what is only reported goes on after
        that, unwritten.

        Raises:
            UserError: it is one more of its kind than that, and more than a report.
        """
        place = self._folder / INCIDENTS / f"step_{step}"
        most, reports = self._config.most_incidents, self.policy(kind) == "report"

        def write() -> None:
            count = len(incidents(self._folder, KINDS[kind]))
            if not place.exists() and not (reports and count >= most):
                with files.new_folder(place) as beside:
                    np.savez_compressed(beside / _BATCH, **batch)
                    files.write_json(
                        beside / _INCIDENT, {"step": step, "kind": KINDS[kind], **said}
                    )
                count += 1
            if count > most and not reports:
                raise UserError(
                    f"{count} steps went wrong like this, more than config.guard.most_incidents="
                    f"{most}, the last of them step {step:,} ({sentence(KINDS[kind], said)}): look "
                    f"at {place.parent}"
                )

        distributed.first("what went wrong", write)
        return place

    def keep_state(self, place: pathlib.Path, step: int, params: Params, training: Any) -> None:
        """The state before an incident's step, unless there are some of other steps already."""
        others = [path for path in place.parent.glob(f"*/{_STATE}") if path.parent != place]
        if len(others) < _STATES_KEPT:
            kept = Checkpoints(place / _STATE, CheckpointConfig(keep_best=0))
            if step not in kept.steps():
                kept.save(step, params, training)
            kept.close()

    def skip(self, steps: Iterable[int], back_to: int | None = None) -> None:
        """Leaves the batches of some steps out, from now on and in every later start.

        Args:
            steps: their numbers.
            back_to: no checkpoint after this step is to be gone on from (`go_back`).
        """
        self.skipped.update(steps)
        self._back_to = back_to
        told = {"steps": sorted(self.skipped), "back_to": back_to}
        path = self._folder / SKIPPED
        distributed.first("the steps left out", lambda: files.write_json(path, told))

    def go_back(self, checkpoints: Checkpoints) -> None:
        """Deletes the checkpoints that `skip` said are not to be gone on from, also after a kill."""
        if self._back_to is not None:
            checkpoints.forget_after(self._back_to)
            self.skip([])


def describe(seen: Seen) -> dict[str, Any]:
    """Plain values."""
    seen = jax.device_get(seen)
    pair = functools.partial(zip, ("loss", "gradient_norm"), strict=True)
    return {
        **{name: float(value) for name, value in pair(seen.figures)},
        "mean": {name: float(value) for name, value in pair(seen.mean)},
        "deviation": {name: float(value) for name, value in pair(seen.deviation)},
        "gradient_norms": {name: float(value) for name, value in sorted(seen.norms.items())},
    }


def sentence(kind: str, said: dict[str, Any]) -> str:
    """A few words on an incident."""
    if kind == "probe":
        return f"computed twice, the step differs in {', '.join(said['differ'])}"
    figures = ", ".join(
        f"{name.replace('_', ' ')} {said[name]:.4g} (usually {said['mean'][name]:.4g} ± "
        f"{said['deviation'][name]:.2g})"
        if np.isfinite(said["mean"][name])
        else f"{name.replace('_', ' ')} {said[name]:.4g}"
        for name in ("loss", "gradient_norm")
    )
    return f"{'not finite' if kind == 'nonfinite' else 'a spike'}: {figures}"


def probe(step: int, fingerprint: Callable[[], dict[str, Any]]) -> None:
    """Computes a step twice.

    Raises:
        Alarm: the results differ, which only faulty hardware or a race in a kernel explains.
    """
    one, two = (jax.device_get(fingerprint()) for _ in range(2))
    differ = sorted(name for name in one if one[name] != two[name])
    if differ:
        raise Alarm(step, UNEQUAL, {"differ": differ})


def incidents(folder: str | pathlib.Path, kind: str | None = None) -> list[int]:
    """The steps at which something went wrong in a workdir, in any way or in that one."""
    found = (pathlib.Path(folder) / INCIDENTS).glob(f"step_*/{_INCIDENT}")
    return sorted(
        int(path.parent.name.removeprefix("step_"))
        for path in found
        if kind is None or _told(path)["kind"] == kind
    )


def _told(path: pathlib.Path) -> dict[str, Any]:
    with _readable(path):
        return json.loads(path.read_text())


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    try:
        with files.one_line_errors(f"cannot read {path}"):
            yield
    except (ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged ({error})") from None


class Incident(NamedTuple):
    """What `Guard.record` and `Guard.keep_state` wrote.

    Attributes:
        step: of the run.
        told: incident.json.
        batch: the whole batch of the step.
        state: the folder of the state before it; it may be missing.
    """

    step: int
    told: dict[str, Any]
    batch: Batch
    state: pathlib.Path


def read_incident(folder: str | pathlib.Path, step: int | None = None) -> Incident:
    """Of a workdir, the first or that of a step.

    Raises:
        UserError: there is none.
    """
    found = incidents(folder)
    if not found:
        raise UserError(f"{folder} has no incidents: nothing went wrong in that run")
    step = found[0] if step is None else step
    if step not in found:
        raise UserError(f"{folder} has no incident at step {step}: {', '.join(map(str, found))}")
    place = pathlib.Path(folder) / INCIDENTS / f"step_{step}"
    told = _told(place / _INCIDENT)
    with _readable(place), np.load(place / _BATCH) as arrays:
        batch = dict(arrays)
    return Incident(step, told, batch, place / _STATE)
