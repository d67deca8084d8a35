"""Optimizers (BERT's Adam, AdamW, LAMB), learning-rate schedules and weight-decay masks."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from bert_jax.config import OptimConfig, TrainConfig
from bert_jax.model.bert import Params


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Return the learning-rate schedule: linear warm-up from 0, then decay counted from step 0.

    With 10k of 1M steps of warm-up, linear decay thus starts at 0.99 of the peak, as in Google's code
    (google-research/bert, `optimization.create_optimizer`). Only "linear_from_warmup" decays from
    the end of warm-up (transformers, `get_linear_schedule_with_warmup`).
    """
    peak, end = config.learning_rate, config.end_fraction * config.learning_rate
    if config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, steps, config.end_fraction)
    elif config.schedule == "linear_from_warmup":
        warmup = config.warmup_steps
        decay = optax.linear_schedule(peak, end, max(steps - warmup, 1), transition_begin=warmup)
    else:
        power = 1.0 if config.schedule == "linear" else config.power
        decay = optax.polynomial_schedule(peak, end, power, steps)
    if config.warmup_steps == 0:
        return decay

    def rate(step):
        return jnp.where(step < config.warmup_steps, peak * step / config.warmup_steps, decay(step))

    return rate


def decay_mask(params: Params) -> Params:
    """Return a mask of the parameters that weight decay (and LAMB's trust ratio) applies to.

    It excludes biases and LayerNorm (`exclude_from_weight_decay` in Google's code), and the weights
    of `heads.ScalarMix`.
    """

    def decays(path, _):
        names = [str(key.key) for key in path]
        return names[-1] not in ("bias", "scale", "weights")

    return jax.tree_util.tree_map_with_path(decays, params)


class MomentsState(NamedTuple):
    """Moving averages of gradients and squared gradients, with the parameters' shapes."""

    first: Params
    second: Params


def scale_by_adam_without_bias_correction(
    beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformation:
    """Return Adam without bias correction, as in BERT's `AdamWeightDecayOptimizer`."""

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


def _depth(path: tuple, layers: int) -> int:
    """Return a parameter's depth: 0 for embeddings, 1 to `layers`, and `layers` + 1 for heads."""
    name = "/".join(str(key.key) for key in path)
    match = re.match(r"encoder/layer_(\d+)/", name)
    return int(match.group(1)) + 1 if match else 0 if name.startswith("embeddings/") else layers + 1


def learning_rate_multipliers(config: TrainConfig, params: Params) -> Params:
    """Return the learning-rate multiplier of each parameter; 0 if it is frozen.

    Layer-wise decay follows ELECTRA (Clark et al., arXiv 2003.10555). With `config.model.features`
    the whole encoder is frozen.
    """
    layers, frozen = config.model.layers, getattr(config, "frozen_layers", 0)

    def factor(path, _):
        depth = _depth(path, layers)
        if frozen and depth <= frozen:
            return 0.0
        if config.model.features and path[0].key in ("embeddings", "encoder"):
            return 0.0
        return config.optim.layer_decay ** (layers + 1 - depth)

    return jax.tree_util.tree_map_with_path(factor, params)


def stop_frozen_gradients(config: TrainConfig, params: Params) -> Params:
    """Stop gradients of frozen parameters, so that they are not computed."""
    return jax.tree.map(
        lambda factor, x: x if factor else jax.lax.stop_gradient(x),
        learning_rate_multipliers(config, params),
        params,
    )


def make_optimizer(run: TrainConfig) -> optax.GradientTransformation:
    """Return the optimizer: clipping, moments, weight decay, trust ratio, schedule, layer decay."""
    config = run.optim
    corrected = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    uncorrected = scale_by_adam_without_bias_correction(config.beta1, config.beta2, config.epsilon)
    transforms = [
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        uncorrected if config.optimizer == "adam" else corrected,
        optax.add_decayed_weights(config.weight_decay, decay_mask),
    ]
    if config.optimizer == "lamb":
        transforms.append(optax.masked(optax.scale_by_trust_ratio(), decay_mask))
    transforms.append(optax.scale_by_learning_rate(schedule(config, run.steps)))
    if config.layer_decay != 1 or getattr(run, "frozen_layers", 0) or run.model.features:
        transforms.append(
            optax.stateless(
                lambda updates, _: jax.tree.map(
                    lambda factor, x: factor * x, learning_rate_multipliers(run, updates), updates
                )
            )
        )
    return optax.chain(*transforms)


def global_norm(tree: Any) -> Float[Array, ""]:
    """Return the L2 norm over all leaves."""
    return optax.tree.norm(tree)
