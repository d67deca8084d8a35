"""Optimizers against their formulas, learning-rate schedules, weight-decay masks and muP."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import traverse_util

from bert_jax.config.fields import with_fields
from bert_jax.config.model import HeadConfig, LoraConfig
from bert_jax.config.schema import Config, OptimConfig
from bert_jax.config.sizes import model_size
from bert_jax.model.bert import flatten, init_params, shapes
from bert_jax.training import optim

RATE, STEPS = 0.01, 8


def make_config(**changes):
    return OptimConfig(**{"learning_rate": RATE, "warmup_steps": 2, "weight_decay": 0.1, **changes})


def rate_at(step):
    return RATE * step / 2 if step < 2 else RATE * (1 - step / STEPS)


def params_and_gradients(seed=0):
    """Return parameters and successive gradients, whose global norms fall from above 1 to below."""
    rng = np.random.default_rng(seed)
    shapes = {"dense": {"kernel": (4, 3), "bias": (3,)}, "norm": {"scale": (3,), "bias": (3,)}}

    def draw(size):
        return jax.tree.map(
            lambda shape: (size * rng.standard_normal(shape)).astype(np.float32),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    return draw(1.0), [draw(size) for size in (3.0, 1.0, 0.5, 0.1, 0.05)]


def train(config, params, gradients):
    optimizer = optim.make_optimizer(Config(optim=config, steps=STEPS))
    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for grads in gradients:
        params, state = step(params, state, grads)
    return params


def by_formula(params, gradients, direction, clip=1.0):
    """Subtract the rate times `direction(path, w, m, v, step)` at each step, in float64."""

    def flat(tree):
        return {
            path: np.asarray(x, np.float64) for path, x in traverse_util.flatten_dict(tree).items()
        }

    params = flat(params)
    m = {path: np.zeros_like(w) for path, w in params.items()}
    v = {path: np.zeros_like(w) for path, w in params.items()}
    for step, grads in enumerate(map(flat, gradients)):
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        scale = min(1.0, clip / norm) if clip else 1.0
        for path, g in grads.items():
            m[path] = 0.9 * m[path] + 0.1 * scale * g
            v[path] = 0.999 * v[path] + 0.001 * (scale * g) ** 2
            update = direction(path, params[path], m[path], v[path], step)
            params[path] = params[path] - rate_at(step) * update
    return traverse_util.unflatten_dict(params)


def assert_close(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def decay(path, w):
    return 0.1 * w if path[-1] == "kernel" else 0.0


def corrected(m, v, step):
    return (m / (1 - 0.9 ** (step + 1))) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-6)


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_bert_adam(clip):
    """`AdamWeightDecayOptimizer`: no bias correction, decoupled decay of kernels only."""
    params, gradients = params_and_gradients()
    expected = by_formula(
        params,
        gradients,
        lambda path, w, m, v, step: m / (np.sqrt(v) + 1e-6) + decay(path, w),
        clip,
    )
    assert_close(train(make_config(clip_norm=clip), params, gradients), expected)


def test_adamw_matches_pytorch():
    params, gradients = params_and_gradients(1)
    leaves = {
        path: torch.nn.Parameter(torch.tensor(x))
        for path, x in traverse_util.flatten_dict(params).items()
    }
    groups = [
        {"params": [w], "weight_decay": 0.1 if path[-1] == "kernel" else 0.0}
        for path, w in leaves.items()
    ]
    reference = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-6)
    for step, grads in enumerate(gradients):
        for group in reference.param_groups:
            group["lr"] = rate_at(step)
        for path, g in traverse_util.flatten_dict(grads).items():
            leaves[path].grad = torch.tensor(g)
        reference.step()
    expected = traverse_util.unflatten_dict({p: w.detach().numpy() for p, w in leaves.items()})
    assert_close(train(make_config(optimizer="adamw", clip_norm=0.0), params, gradients), expected)


def test_lamb():
    """You et al., algorithm 2: a layer's update has the norm of its weights, times the rate."""
    params, gradients = params_and_gradients(2)
    params["dense"]["zero"] = {"kernel": np.zeros((2, 2), np.float32)}
    for grads in gradients:
        grads["dense"]["zero"] = {"kernel": np.full((2, 2), 0.01, np.float32)}

    def direction(path, w, m, v, step):
        update = corrected(m, v, step) + decay(path, w)
        length = np.linalg.norm(w)
        if path[-1] != "kernel" or length == 0:
            return update
        return update * length / np.linalg.norm(update)

    expected = by_formula(params, gradients, direction)
    assert_close(train(make_config(optimizer="lamb"), params, gradients), expected)


LSTM = {"head.kind": "token", "head.lstm_layers": 2, "head.features": "weighted-all"}


@pytest.mark.parametrize(
    ("changes", "matrices", "others"),
    [
        ({}, "kernel embedding", "bias scale"),
        ({"tied_decoder": False, "norm.final": True}, "kernel embedding decoder", "bias scale"),
        (LSTM, "kernel embedding recurrent", "bias scale weights"),
    ],
)
def test_only_matrices_decay(changes, matrices, others):
    config = with_fields(
        model_size("L1-H8-A2"), {"vocab_size": 10, "head.labels": ("a",), **changes}
    )
    kinds = {True: set(), False: set()}
    for path, decays in flatten(optim.decay_mask(shapes(config))).items():
        kinds[decays].add(path.rpartition("/")[2])
    assert kinds == {True: {*matrices.split()}, False: {*others.split()}}


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        ("linear", lambda left: left),
        ("polynomial", lambda left: left**0.5),
        ("cosine", lambda left: 0.5 * (1 + np.cos(np.pi * (1 - left)))),
    ],
)
@pytest.mark.parametrize("end", [0.0, 0.1])
def test_schedules(schedule, shape, end):
    config = OptimConfig(
        learning_rate=2.0, warmup_steps=10, schedule=schedule, power=0.5, end_fraction=end
    )
    rate = optim.schedule(config, 100)
    np.testing.assert_allclose(rate(np.array([0, 1, 9])), [0, 0.2, 1.8], rtol=1e-6)
    steps = np.array([10, 50, 99, 100])
    expected = 2 * (end + (1 - end) * shape(1 - steps / 100))
    np.testing.assert_allclose(rate(steps), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "warmup", "steps"),
    [
        *(("linear_from_warmup", 0, 50), ("linear_from_warmup", 12, 125)),
        *(("linear_from_warmup", 10, 10), ("inverse_sqrt", 10, 100), ("constant", 4, 10)),
        *(("wsd", 0, 40), ("wsd", 10, 100)),
    ],
)
def test_schedules_match_transformers(name, warmup, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    their_name = {
        "linear_from_warmup": "linear",
        "inverse_sqrt": "inverse_sqrt",
        "constant": "constant_with_warmup",
        "wsd": "warmup_stable_decay",
    }[name]
    changes, options = {}, {}
    if name == "wsd":
        changes = {"decay_fraction": 0.2, "end_fraction": 0.1}
        options = {"num_decay_steps": steps // 5, "min_lr_ratio": 0.1, "decay_type": "linear"}
    theirs = transformers.get_scheduler(their_name, optimizer, warmup, steps, options)
    config = OptimConfig(learning_rate=2.0, warmup_steps=warmup, schedule=name, **changes)
    ours = optim.schedule(config, steps)(np.arange(steps))
    for step in range(steps):
        if name != "wsd" or step >= warmup:  # its warmup in transformers is from the minimum rate
            assert ours[step] == pytest.approx(theirs.get_last_lr()[0], rel=1e-5, abs=1e-6)
        optimizer.step()
        theirs.step()


def orthogonalized(matrix, steps=5):
    """Run Newton-Schulz iterations as in Jordan's `zeropower_via_newtonschulz5`, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_muon():
    """Encoder matrices are updated by orthogonalized momentum, all other parameters by AdamW."""
    rng = np.random.default_rng(3)
    sizes = {
        ("encoder", "layer_0", "attention", "query", "kernel"): (6, 2, 3),
        ("encoder", "layer_0", "attention", "output", "kernel"): (2, 3, 6),
        ("encoder", "layer_0", "feed_forward", "intermediate", "kernel"): (6, 12),
        ("encoder", "layer_0", "feed_forward", "intermediate", "bias"): (12,),
        ("embeddings", "word", "embedding"): (9, 6),
        ("pooler", "kernel"): (6, 6),
    }

    def draw():
        leaves = {
            path: rng.standard_normal(size).astype(np.float32) for path, size in sizes.items()
        }
        return traverse_util.unflatten_dict(leaves)

    params, gradients = draw(), [draw() for _ in range(3)]
    momenta = {}

    def direction(path, w, m, v, step):
        decay = 0.0 if path[-1] == "bias" else 0.1 * w
        if path[0] != "encoder" or path[-1] == "bias":
            return corrected(m, v, step) + decay
        grad = np.asarray(traverse_util.flatten_dict(gradients[step])[path], np.float64)
        # optax bias-corrects both the momentum and the Nesterov look-ahead.
        momentum = momenta[path] = 0.95 * momenta.get(path, 0) + 0.05 * grad
        ahead = 0.95 * momentum / (1 - 0.95 ** (step + 2)) + 0.05 * grad / (1 - 0.95 ** (step + 1))
        rows = w.shape[0] * (w.shape[1] if path[3] == "output" else 1)
        matrix = ahead.reshape(rows, -1)
        scale = 0.2 * np.sqrt(max(matrix.shape))
        return (scale * orthogonalized(matrix)).reshape(w.shape) + decay

    expected = by_formula(params, gradients, direction, clip=0)
    assert_close(train(make_config(optimizer="muon", clip_norm=0.0), params, gradients), expected)


def test_adafactor_matches_pytorch():
    rng = np.random.default_rng(4)
    params = {"kernel": rng.standard_normal((128, 130)).astype(np.float32)}
    gradients = [{"kernel": rng.standard_normal((128, 130)).astype(np.float32)} for _ in range(3)]
    weights = torch.nn.Parameter(torch.tensor(params["kernel"]))
    reference = torch.optim.Adafactor([weights], lr=RATE, weight_decay=0.0)
    for step, grads in enumerate(gradients):
        reference.param_groups[0]["lr"] = rate_at(step)
        weights.grad = torch.tensor(grads["kernel"])
        reference.step()
    config = make_config(optimizer="adafactor", clip_norm=0.0, weight_decay=0.0)
    result = train(config, params, gradients)["kernel"]
    np.testing.assert_allclose(result, weights.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_exponential_moving_average_of_parameters():
    params, gradients = params_and_gradients(5)
    config = Config(optim=make_config(average_decay=0.75), steps=STEPS)
    optimizer = optim.make_optimizer(config)
    params = average = jax.tree.map(jnp.asarray, params)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for grads in gradients:
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        average = jax.tree.map(lambda a, x: 0.75 * a + 0.25 * x, average, params)
    assert_close(optim.average_of(state), average)
    assert_close(params, train(make_config(), *params_and_gradients(5)))


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "lamb", "muon", "adafactor"])
def test_skipped_update_advances_only_the_schedule(optimizer, lora):
    """The next update has the next learning rate, and else is the one that was skipped."""
    rng = np.random.default_rng(6)
    layer = {"kernel": (4, 3), "bias": (3,), "lora_a": (4, 2), "lora_b": (2, 3)}
    shapes = {"encoder": {"layer_0": {"dense": layer}}, "classifier": {"kernel": (3, 2)}}

    def draw(shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    params, *gradients = (
        jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple)) for _ in range(3)
    )
    config = Config(
        optim=make_config(optimizer=optimizer, average_decay=0.75, layer_decay=0.9), steps=STEPS
    )
    config.model.lora = LoraConfig(rank=lora)
    transform = optim.make_optimizer(config)
    update = jax.jit(transform.update)
    _, state = update(gradients[0], transform.init(params), params)
    skipped = optim.skip_update(optim.skip_update(state))
    updates, later = (update(gradients[1], s, params)[0] for s in (state, skipped))
    assert_close(later, jax.tree.map(lambda x: x * rate_at(3) / rate_at(1), updates))
    assert all(x.any() for x in jax.tree.leaves(updates["classifier"]))


@pytest.mark.parametrize("tied", [True, False])
def test_mup_scales_by_width(tied):
    """Table 8 of arXiv 2203.03466: matrices scale with fan-in; vectors and input weights do not."""
    config = model_size("L1-H32-A2")
    config.vocab_size, config.tied_decoder = 50, tied
    config.head, config.span_boundary = HeadConfig("sequence", ("a", "b")), True
    plain = flatten(init_params(config, jax.random.key(0)))
    config.mup.base_hidden = 8
    scaled = flatten(init_params(config, jax.random.key(0)))
    rates = flatten(optim.learning_rate_multipliers(Config(model=config), shapes(config)))
    hidden, output = (0.5, 0.25), (0.25, 0.25)  # factors of (initial values, learning rates)
    expected = dict.fromkeys(plain, (1.0, 1.0))
    for path in plain:
        if path.endswith("/kernel"):
            expected[path] = output if path.startswith(("next_", "classifier")) else hidden
    for leaf in ("scale", "bias"):  # its decoder is always tied
        expected[f"span_boundary/second_norm/{leaf}"] = output
    if tied:
        expected["masked_lm/norm/scale"] = expected["masked_lm/norm/bias"] = output
    else:
        expected["masked_lm/decoder"] = output
    for path, (value, rate) in expected.items():
        np.testing.assert_allclose(scaled[path], value * plain[path], rtol=1e-6, err_msg=path)
        assert rates[path] == rate, path
    if tied:
        config.mup.base_hidden = 32
        same = flatten(init_params(config, jax.random.key(0)))
        jax.tree.map(np.testing.assert_array_equal, same, plain)
