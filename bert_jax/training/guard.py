"""Detect bad steps before they update the parameters, and stop the run or skip their batches.

The training step checks its loss and gradient norm: they must be finite and not far above those of
previous steps (`GuardConfig`). The step itself decides what follows, from its state alone, so a run
that is killed and restarted makes the same decisions. A skipped step advances only the step counter
and the learning-rate schedule. A step that stops the run leaves the state unchanged, and so does
every step already dispatched; the loop saves the state and ends the run.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bert_jax.config.schema import GuardConfig
from bert_jax.errors import UserError
from bert_jax.model.bert import Params
from bert_jax.training import optim

# Number of previous steps that loss and gradient norm are compared with.
WINDOW = 128
# Lower bound of a standard deviation, as a fraction of the mean: once a model has converged,
# rounding errors must not count as spikes.
_MIN_DEVIATION = 1e-3


class LossHistory(NamedTuple):
    """Loss history, part of the training state; field names are part of the checkpoint format."""

    # Loss and gradient norm of the last `WINDOW` steps of this phase: a ring buffer, initially NaN.
    figures: Float[Array, "W 2"]
    halted: Bool[Array, ""]  # whether a step has stopped the run
    skipped: Int[Array, ""]  # number of skipped steps of the run


class StepStats(NamedTuple):
    """Statistics of a step."""

    # Whether it must not update the parameters: it is skipped or stops the run.
    is_bad: Bool[Array, ""]
    stops: Bool[Array, ""]  # whether it, or a step before it, stops the run
    loss_and_grad_norm: Float[Array, "2"]
    norms: dict[str, Float[Array, ""]]  # gradient norm by layer


def init_history() -> LossHistory:
    """Return the empty history before the first step."""
    return LossHistory(jnp.full((WINDOW, 2), jnp.nan), jnp.array(False), jnp.int32(0))


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
    """Compare the loss and gradient norm of a step with those before it in `recent`.

    `grads` are the gradients before clipping, and `recent` is the history of this phase (see
    `reset_at_phase_start`). Return the history with this step, for an update, and the statistics.
    """
    # The global norm is the norm of the layers' norms, so the gradients are reduced only once.
    by_layer = {name: optim.global_norm(part) for name, part in _layers(grads).items()}
    figures = jnp.stack([loss, optim.global_norm(by_layer)]).astype(jnp.float32)
    # Until the window is full the mean is NaN, and comparisons with NaN are false.
    mean, deviation = recent.figures.mean(0), recent.figures.std(0)
    is_far = figures > mean + config.sigmas * jnp.maximum(deviation, _MIN_DEVIATION * jnp.abs(mean))
    is_spike = jnp.any(is_far) & (config.spike != "off")
    is_finite = jnp.isfinite(figures).all()
    may_skip = jnp.where(is_finite, config.spike == "skip", config.nonfinite == "skip")
    may_skip &= recent.skipped < config.max_skipped
    is_bad = recent.halted | ~is_finite | is_spike
    stops = recent.halted | (is_bad & ~may_skip)
    history = jax.lax.dynamic_update_index_in_dim(recent.figures, figures, step % WINDOW, 0)
    return recent._replace(figures=history), StepStats(is_bad, stops, figures, by_layer)


def _layers(tree: Params) -> dict[str, Any]:
    """Return the parts of a parameter tree by name: embeddings, each layer, each head."""
    return {
        name: part
        for top, value in tree.items()
        for name, part in (value.items() if top == "encoder" else [(top, value)])
    }


class BadStep(NamedTuple):
    """A step that was skipped or stopped the run."""

    step: int  # counted from 1 as in metrics.jsonl
    stops: bool
    loss: float
    gradient_norm: float
    gradient_norms: dict[str, float]  # by layer, from the embeddings to the heads

    @property
    def kind(self) -> str:
        """The setting of `GuardConfig` that applies: "nonfinite" or "spike"."""
        is_finite = math.isfinite(self.loss) and math.isfinite(self.gradient_norm)
        return "spike" if is_finite else "nonfinite"

    @property
    def layer(self) -> str:
        """The first layer whose gradient is not finite, or else the one with the largest norm."""
        norms = self.gradient_norms
        bad = (name for name, norm in norms.items() if not math.isfinite(norm))
        return next(bad, max(norms, key=norms.__getitem__))

    def __str__(self) -> str:
        what = "spike" if self.kind == "spike" else "non-finite value"
        is_finite = math.isfinite(self.gradient_norms[self.layer])
        where = f"{'largest' if is_finite else 'first non-finite'} gradient in {self.layer}"
        figures = f"loss {self.loss:.4g}, gradient norm {self.gradient_norm:.4g}"
        return f"step {self.step:,}: {what}: {figures}, {where}"


def read_stats(step: int, stats: StepStats) -> BadStep | None:
    """Wait for a step, counted from 1, and return it if it did not update the parameters."""
    if not stats.is_bad:
        return None
    _, stops, (loss, norm), by_layer = jax.device_get(stats)
    norms = {name: float(by_layer[name]) for name in sorted(by_layer, key=_depth)}
    return BadStep(step, bool(stops), float(loss), float(norm), norms)


def _depth(name: str) -> tuple[float, str]:
    """Return the sort key of a part of the parameters: embeddings, layers, heads."""
    kind, _, number = name.partition("_")
    depth = float(number) if kind == "layer" and number.isdigit() else math.inf
    return -1.0 if name == "embeddings" else depth, name


def stop_error(config: GuardConfig, bad_step: BadStep) -> UserError:
    """Return the error that ends a run at a bad step."""
    if getattr(config, bad_step.kind) == "skip":
        setting = f"more than --config.guard.max_skipped={config.max_skipped} to skip it too"
    else:
        setting = f"--config.guard.{bad_step.kind}=skip to skip its batch"
    return UserError(f"{bad_step}; the state before it is kept: resume with {setting}")
