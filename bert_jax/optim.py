"""BERT's Adam, AdamW and LAMB; learning-rate schedules; which parameters decay."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bert_jax.config import OptimConfig
from bert_jax.model import Params


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """The learning rate at a step: linear warm-up from 0, then decay that counts from step 0.

    So at step 10k of 1M with 10k of warm-up the linear rate is 0.99 of the peak, not all of it
    (google-research/bert, `optimization.create_optimizer`).
    """
    peak, end = config.learning_rate, config.end_fraction * config.learning_rate
    if config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, steps, config.end_fraction)
    else:
        power = 1.0 if config.schedule == "linear" else config.power
        decay = optax.polynomial_schedule(peak, end, power, steps)
    if config.warmup_steps == 0:
        return decay

    def rate(step):
        return jnp.where(step < config.warmup_steps, peak * step / config.warmup_steps, decay(step))

    return rate


def decay_mask(params: Params) -> Params:
    """True for the parameters that weight decay (and LAMB's trust ratio) applies to.

    Biases and LayerNorm are left out (`exclude_from_weight_decay` in Google's code).
    """

    def decays(path, _):
        names = [str(key.key) for key in path]
        return names[-1] not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(decays, params)


class MomentsState(NamedTuple):
    """Moving averages of the gradients and of their squares, shaped as the parameters."""

    first: Params
    second: Params


def scale_by_moments(beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam without bias correction, as BERT was trained with (`AdamWeightDecayOptimizer`)."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return MomentsState(zeros, jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None):
        del params
        first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.first, grads)
        second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.second, grads)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), first, second)
        return updates, MomentsState(first, second)

    return optax.GradientTransformation(init, update)


def make(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """The whole update: clip by global norm, moments, decay, trust ratio, schedule."""
    corrected = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    plain = scale_by_moments(config.beta1, config.beta2, config.epsilon)
    parts = [
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        plain if config.optimizer == "adam" else corrected,
        optax.add_decayed_weights(config.weight_decay, decay_mask),
    ]
    if config.optimizer == "lamb":
        parts.append(optax.masked(optax.scale_by_trust_ratio(), decay_mask))
    parts.append(optax.scale_by_learning_rate(schedule(config, steps)))
    return optax.chain(*parts)
