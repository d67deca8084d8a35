"""BERT's Adam, AdamW and LAMB; learning-rate schedules; which parameters decay."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bert_jax.config import OptimConfig, Run
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

    Biases and LayerNorm are left out (`exclude_from_weight_decay` in Google's code), and so are the
    few weights of a sum of layers.
    """

    def decays(path, _):
        names = [str(key.key) for key in path]
        return names[-1] not in ("bias", "scale", "weights")

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


def _layer(path: tuple, layers: int) -> int:
    """How far up a parameter lies: 0 for the embeddings, 1 to `layers`, one more for heads."""
    name = "/".join(str(key.key) for key in path)
    found = re.match(r"encoder/layer_(\d+)/", name)
    return int(found.group(1)) + 1 if found else 0 if name.startswith("embeddings/") else layers + 1


def rate_factors(config: Run, params: Params) -> Params:
    """For each parameter what the learning rate is multiplied by: decay by layer, 0 where frozen.

    Layer-wise decay as ELECTRA fine-tunes with (Clark et al., arXiv 2003.10555). Where heads stand on
    features the whole encoder is frozen.
    """
    layers, frozen = config.model.layers, getattr(config, "frozen_layers", 0)

    def factor(path, _):
        layer = _layer(path, layers)
        if frozen and layer <= frozen:
            return 0.0
        if config.model.features and path[0].key in ("embeddings", "encoder"):
            return 0.0
        return config.optim.layer_decay ** (layers + 1 - layer)

    return jax.tree_util.tree_map_with_path(factor, params)


def freeze(config: Run, params: Params) -> Params:
    """The same parameters, of which the frozen ones get no gradient, so that none is computed."""
    return jax.tree.map(
        lambda factor, x: x if factor else jax.lax.stop_gradient(x),
        rate_factors(config, params),
        params,
    )


def make(run: Run) -> optax.GradientTransformation:
    """The whole update: clip by global norm, moments, decay, trust ratio, schedule, layers."""
    config = run.optim
    corrected = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    plain = scale_by_moments(config.beta1, config.beta2, config.epsilon)
    parts = [
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        plain if config.optimizer == "adam" else corrected,
        optax.add_decayed_weights(config.weight_decay, decay_mask),
    ]
    if config.optimizer == "lamb":
        parts.append(optax.masked(optax.scale_by_trust_ratio(), decay_mask))
    parts.append(optax.scale_by_learning_rate(schedule(config, run.steps)))
    if config.layer_decay != 1 or getattr(run, "frozen_layers", 0) or run.model.features:
        parts.append(
            optax.stateless(
                lambda updates, _: jax.tree.map(
                    lambda factor, x: factor * x, rate_factors(run, updates), updates
                )
            )
        )
    return optax.chain(*parts)
