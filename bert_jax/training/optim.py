"""Optimizers, learning-rate schedules, weight-decay masks, and averages of the parameters."""

import functools
import operator
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from optax import contrib

from bert_jax.config.schema import OptimConfig, TrainConfig
from bert_jax.model import mup
from bert_jax.model.bert import Params, flatten, unflatten


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Return the learning-rate schedule: linear warm-up from 0, then decay counted from step 0.

    With 10k of 1M steps of warm-up, linear decay thus starts at 0.99 of the peak, as in Google's code
    (google-research/bert, `optimization.create_optimizer`). "linear_from_warmup" decays from the end
    of warm-up (transformers, `get_linear_schedule_with_warmup`), and "wsd" from a fraction before the
    last step (Hu et al., arXiv 2404.06395).
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    end = config.end_fraction * peak
    if config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, steps, config.end_fraction)
    elif config.schedule == "linear_from_warmup":
        decay = optax.linear_schedule(peak, end, max(steps - warmup, 1), transition_begin=warmup)
    elif config.schedule == "wsd":
        decay_steps = max(round(config.decay_fraction * steps), 1)
        decay = optax.linear_schedule(peak, end, decay_steps, transition_begin=steps - decay_steps)
    elif config.schedule == "inverse_sqrt":

        def decay(step):
            return peak * jnp.sqrt(max(warmup, 1) / jnp.maximum(step, max(warmup, 1)))

    elif config.schedule == "constant":
        decay = optax.constant_schedule(peak)
    else:
        power = 1.0 if config.schedule == "linear" else config.power
        decay = optax.polynomial_schedule(peak, end, power, steps)
    if warmup == 0:
        return decay

    def rate(step):
        return jnp.where(step < warmup, peak * step / warmup, decay(step))

    return rate


def decay_mask(params: Params) -> Params:
    """Return a mask of the parameters that weight decay (and LAMB's trust ratio) applies to.

    It excludes biases and LayerNorm (`exclude_from_weight_decay` in Google's code), and the weights
    of `heads.ScalarMix`.
    """

    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale", "weights"), params
    )


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


# Length of the updates of "muon" relative to those of AdamW, so that learning rates carry over (Liu
# et al., arXiv 2502.16982).
_MUON_RMS = 0.2


def _muon_dimensions(path: Any, x: Any) -> contrib.MuonDimensionNumbers | None:
    """Return how a parameter is a matrix; None if it is not one of the encoder's kernels."""
    names = [str(key.key) for key in path]
    if "encoder" not in names[:2] or names[-1] != "kernel":
        return None
    if x.ndim == 2:
        return contrib.MuonDimensionNumbers(0, 1)
    # Attention: the axes of heads are one axis of the matrix.
    is_output = names[-2] == "output"
    return contrib.MuonDimensionNumbers(*(((0, 1), 2) if is_output else (0, (1, 2))))


def scale_by_muon_and_adam(config: OptimConfig) -> optax.GradientTransformation:
    """Return Muon's directions for the encoder's matrices, and Adam's for all other parameters.

    The momentum of a matrix is orthogonalized by five Newton-Schulz iterations (Jordan et al. 2024).
    Optax corrects its bias, which Jordan's code does not: it matters in the first steps only.
    """

    def label(path, x):
        return "muon" if _muon_dimensions(path, x) else "adam"

    def scaled(path, update):
        """Scale orthogonal matrices, whose elements have a root mean square of 1/sqrt(longer side)."""
        dimensions = _muon_dimensions(path, update)
        assert dimensions
        fan_in = np.prod(np.take(update.shape, dimensions.reduction_axis))
        return _MUON_RMS * float(max(fan_in, update.size / fan_in)) ** 0.5 * update

    tree_map = jax.tree_util.tree_map_with_path
    dimensions = functools.partial(tree_map, _muon_dimensions)
    muon = optax.chain(
        contrib.scale_by_muon(beta=config.muon_momentum, weight_dimension_numbers=dimensions),
        optax.stateless(lambda updates, _: tree_map(scaled, updates)),
    )
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    return optax.partition({"muon": muon, "adam": adam}, functools.partial(tree_map, label))


class AverageState(NamedTuple):
    """An exponential moving average of the parameters."""

    average: Params


def average_parameters(decay: float) -> optax.GradientTransformation:
    """Return a transformation that keeps an average of the parameters, and changes no update.

    It comes last in a chain, where the updates are those of the parameters.
    """

    def update(updates, state, params=None):
        average = jax.tree.map(
            # In this form the average of a constant, such as a frozen parameter, is exact.
            lambda average, x, update: average + (1 - decay) * (x + update - average),
            state.average,
            params,
            updates,
        )
        return updates, AverageState(average)

    def init(params):
        return AverageState(jax.tree.map(jnp.copy, params))

    return optax.GradientTransformation(init, update)


def average_of(state: Any) -> Params | None:
    """Return the average in an optimizer's state, or None if it keeps none."""
    return state[-1].average if isinstance(state[-1], AverageState) else None


def with_average(state: Any, average: Params) -> Any:
    """Return the state of an optimizer that keeps an average with another one."""
    return (*state[:-1], AverageState(average))


def skip_update(state: Any) -> Any:
    """Return an optimizer's state after a skipped step: only the schedule advances."""

    def is_schedule(x):
        return isinstance(x, optax.ScaleByScheduleState)

    return jax.tree.map(
        lambda x: x._replace(count=x.count + 1) if is_schedule(x) else x, state, is_leaf=is_schedule
    )


def learning_rate_multipliers(config: TrainConfig, params: Params) -> Params:
    """Return the learning-rate multiplier of each parameter; 0 if it is frozen.

    Layer-wise decay is that of ELECTRA's code (google-research/electra, `optimization.py`), in which
    the last layer is two steps of decay below the heads, and the scale by width muP
    (`model.mup`). With `config.model.head.features` or adapters (`config.model.lora`) the whole encoder
    is frozen, except for the adapters.
    """
    layers, frozen = config.model.layers, getattr(config, "frozen_layers", 0)

    def factor(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        layer = re.match(r"encoder/layer_(\d+)/", name)
        # 0 for embeddings, 1 to `layers`, and `layers` + 2 for heads.
        depth = int(layer.group(1)) + 1 if layer else (layers + 2) * (path[0].key != "embeddings")
        if frozen and depth <= frozen:
            return 0.0
        is_adapter = path[-1].key in ("lora_a", "lora_b")
        is_frozen = config.model.head.features or (config.model.lora.rank and not is_adapter)
        if is_frozen and path[0].key in ("embeddings", "encoder"):
            return 0.0
        scale = mup.scales(config.model, name)[1]
        return scale * config.optim.layer_decay ** (layers + 2 - depth)

    return jax.tree_util.tree_map_with_path(factor, params)


def stop_frozen_gradients(config: TrainConfig, params: Params) -> Params:
    """Stop gradients of frozen parameters, so that they are not computed."""
    return jax.tree.map(
        lambda factor, x: x if factor else jax.lax.stop_gradient(x),
        learning_rate_multipliers(config, params),
        params,
    )


def _direction(config: OptimConfig) -> optax.GradientTransformation:
    """Return the transformation of gradients to the direction of the update."""
    if config.optimizer == "adam":
        return scale_by_adam_without_bias_correction(config.beta1, config.beta2, config.epsilon)
    if config.optimizer == "muon":
        return scale_by_muon_and_adam(config)
    if config.optimizer == "adafactor":
        return optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_param_block_rms(),
        )
    return optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)


def make_optimizer(run: TrainConfig) -> optax.GradientTransformation:
    """Return the optimizer: clipping, moments, weight decay, trust ratio, schedule, layer decay."""
    config = run.optim
    transforms = [
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        _direction(config),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
    ]
    if config.optimizer == "lamb":
        transforms.append(optax.masked(optax.scale_by_trust_ratio(), decay_mask))
    transforms.append(optax.scale_by_learning_rate(schedule(config, run.steps)))
    frozen = getattr(run, "frozen_layers", 0) or run.model.head.features
    if config.layer_decay != 1 or frozen or run.model.mup.base_hidden:

        def scaled(updates, _):
            return jax.tree.map(operator.mul, learning_rate_multipliers(run, updates), updates)

        transforms.append(optax.stateless(scaled))
    if frozen or run.model.lora.rank:
        transforms = [trainable_only(run, optax.chain(*transforms))]
    if config.average_decay:
        transforms.append(average_parameters(config.average_decay))
    return optax.chain(*transforms)


def trainable_only(
    config: TrainConfig, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return an optimizer of the trained parameters only: frozen ones have no state."""

    def trained(tree: Params) -> Params:
        multipliers = flatten(learning_rate_multipliers(config, tree))
        return unflatten({path: x for path, x in flatten(tree).items() if multipliers[path]})

    def update(grads, state, params=None):
        updates, state = optimizer.update(
            trained(grads), state, None if params is None else trained(params)
        )
        frozen = jax.tree.map(jnp.zeros_like, grads)
        return unflatten({**flatten(frozen), **flatten(updates)}), state

    return optax.GradientTransformation(lambda params: optimizer.init(trained(params)), update)


def global_norm(tree: Any) -> Float[Array, ""]:
    """Return the L2 norm over all leaves."""
    return optax.tree.norm(tree)
