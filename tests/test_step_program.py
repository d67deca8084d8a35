"""The program of the training step: scatters, element types, rounding in bfloat16.

These tests inspect jaxprs and the text of compiled programs, to catch changes on a CPU that would
matter only on an accelerator.
"""

import dataclasses
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from scipy import special

from bert_jax.config.fields import with_fields
from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import Config, MeshConfig, PhaseConfig
from bert_jax.config.sizes import model_size
from bert_jax.data.rows import layout
from bert_jax.model import attention as attention_lib
from bert_jax.model import bert, embeddings, encoder
from bert_jax.model.attention import attention
from bert_jax.model.dropout import dropout
from bert_jax.model.layers import ACTIVATIONS, feed_forward_activation, gather_rows
from bert_jax.objectives import pretraining
from bert_jax.runtime import sharding
from bert_jax.runtime.topology import parse_topology
from bert_jax.tools.preflight.compiler import abstract_devices
from bert_jax.training import state as state_lib
from bert_jax.training import step as step_lib

VOCAB = 640


def small_phase(size="L2-H32-A2", accumulation=0, log_every_steps=100, **changes):
    """Return the config and the abstract phase of a small model, with every kind of embedding."""
    model = with_fields(model_size(size), {"vocab_size": VOCAB, **changes})
    phases = (PhaseConfig(tokens=24, accumulation=accumulation),)
    config = Config(
        model=model, phases=phases, batch_size=4, steps=10, log_every_steps=log_every_steps
    )
    config, (phase,) = pretraining.abstract_phases(config, sequences=3)
    return config, phase


def initial_state(config, phase):
    """Return a function from seeds to states on one device, and their shapes."""
    return state_lib.initial_state(config, phase, sharding.make_mesh(MeshConfig()))


def pretraining_step(dtype="float32", **changes):
    """Return the jitted step of a small model and its arguments."""
    config, phase = small_phase(dtype=dtype, **changes)
    _, state = initial_state(config, phase)
    return jax.jit(step_lib.make_step(config, phase)), state, phase.batch_shape


def ones(phase):
    return {name: jnp.ones(s.shape, s.dtype) for name, s in phase.batch_shape.items()}


def equations(jaxpr):
    """Yield every equation of a jaxpr, including those of called functions."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda x: isinstance(x, core.ClosedJaxpr | core.Jaxpr)
        ):
            if isinstance(value, core.ClosedJaxpr):
                yield from equations(value.jaxpr)
            elif isinstance(value, core.Jaxpr):
                yield from equations(value)


@pytest.mark.parametrize(("dtype", "segments"), [("float32", 2), ("bfloat16", 3)])
def test_only_word_embedding_gradients_are_scattered(dtype, segments):
    """On a GPU, a scatter-add of many tokens to few rows takes longer than the rest of the step."""
    step, state, batch = pretraining_step(dtype, segments=segments)
    added = [
        equation.outvars[0].aval.str_short()
        for equation in equations(step.trace(state, batch).jaxpr.jaxpr)
        if equation.primitive.name.startswith("scatter")
    ]
    assert added == [f"float32[{VOCAB},32]"]


@pytest.fixture
def deterministic(monkeypatch):
    flags = os.environ["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_gpu_deterministic_ops=true")


@pytest.mark.usefixtures("deterministic")
def test_deterministic_kernels_need_no_order_of_scattered_additions():
    """XLA makes a scatter deterministic by sorting all its numbers, unless its indices are unique."""
    step, state, batch = pretraining_step("bfloat16")
    program = list(equations(step.trace(state, batch).jaxpr.jaxpr))
    scattered = [each for each in program if each.primitive.name.startswith("scatter")]
    assert [each.outvars[0].aval.str_short() for each in scattered] == [f"float32[{VOCAB},32]"]
    assert scattered[0].primitive.name == "scatter"
    assert scattered[0].params["unique_indices"]
    sorted_numbers = [each.invars[0].aval.size for each in program if each.primitive.name == "sort"]
    assert max(sorted_numbers) <= 4 * 24  # one for each token of the batch


@pytest.mark.parametrize(
    ("mesh", "tokens"),
    # Many tokens fill several blocks with one index.
    [(None, 1), (None, 13), (None, 300), (MeshConfig(data=2, fsdp=2, tensor=2), 8)],
)
@pytest.mark.usefixtures("deterministic")
def test_gradient_of_gathered_rows(mesh, tokens):
    rng = np.random.default_rng(0)
    table, cotangent = rng.normal(size=(7, 5)), rng.normal(size=(4, tokens, 5))
    index = rng.integers(0, 6, (4, tokens))  # the last row is not used
    expected = np.zeros_like(table)
    np.add.at(expected, index, cotangent)

    @jax.jit
    def gradient(table, index, cotangent):
        rows, backward = jax.vjp(lambda table: gather_rows(table, index), table)
        return rows, *backward(cotangent)

    arrays = (table.astype(np.float32), index, cotangent.astype(np.float32))
    if mesh:
        devices = sharding.make_mesh(mesh)
        rows = sharding.row_sharding(devices)
        arrays = jax.device_put(arrays, (sharding.replicated(devices), rows, rows))
        with jax.set_mesh(devices):
            gathered, got = gradient(*arrays)
    else:
        gathered, got = gradient(*arrays)
    np.testing.assert_array_equal(gathered, arrays[0][index])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_logits_and_softmax_are_float32_with_bfloat16_inputs():
    step, state, batch = pretraining_step("bfloat16")
    program = list(equations(step.trace(state, batch).jaxpr.jaxpr))
    exponentials = [e for e in program if e.primitive.name == "exp"]
    assert len(exponentials) >= 4  # attention's and the two heads', forward and backward
    assert {e.outvars[0].aval.dtype.name for e in exponentials} == {"float32"}
    assert {e.outvars[0].aval.dtype.name for e in program if e.primitive.name == "erf"} == {
        "float32"
    }
    # Three products have a vocabulary axis: the logits and the two gradients.
    products = [
        ([v.aval.dtype.name for v in e.invars], e.outvars[0].aval)
        for e in program
        if e.primitive.name == "dot_general"
        and any(VOCAB in v.aval.shape for v in (*e.invars, *e.outvars))
    ]
    assert len(products) == 3
    assert all(inputs == ["bfloat16", "bfloat16"] for inputs, _ in products)
    by_width = {result.shape[-1]: result.dtype.name for _, result in products if result.ndim == 3}
    assert by_width == {VOCAB: "float32", 32: "bfloat16"}  # logits; the gradient of hidden states
    assert [r.dtype.name for _, r in products if r.ndim == 2] == ["float32"]  # embedding gradient


def test_gradients_of_parameters_are_accumulated_in_float32():
    changes = {"norm.position": "pre", "gated_feed_forward": True, "positions": 24}
    step, state, batch = pretraining_step("bfloat16", **changes)
    shapes = {x.shape for x in jax.tree.leaves(state.params)}
    for e in equations(step.trace(state, batch).jaxpr.jaxpr):
        before, after = e.invars[0].aval if e.invars else None, e.outvars[0].aval
        if e.primitive.name == "reduce_sum":
            assert after.dtype != jnp.bfloat16, e
        elif e.primitive.name == "convert_element_type" and before.dtype == jnp.bfloat16:
            assert after.shape not in shapes, e


@pytest.mark.tpu
def test_gradients_are_added_in_float32_by_the_program_for_tpus():
    devices = abstract_devices(parse_topology("v5e:2x2"))
    mesh = sharding.make_mesh(MeshConfig(), list(devices))
    config, phase = small_phase(dtype="bfloat16")
    _, state = state_lib.initial_state(config, phase, mesh)
    text = step_lib.compile_step(config, phase, mesh, state).as_text()
    results = re.findall(r"= (\(?\w+)\[.* (reduce|all-reduce|reduce-scatter)\(", text)
    assert {kind for _, kind in results} >= {"reduce", "all-reduce"}
    assert not [kind for dtype, kind in results if "bf16" in dtype]


@pytest.mark.parametrize(
    ("name", "changes", "size"),
    [
        ("head", {"head.kind": "span", "head.labels": ("start", "end"), "next_sentence": False}, 2),
        ("next_sentence", {}, 2),
        ("replaced_token", {"electra.replaced_token": True, "next_sentence": False}, 1),
    ],
)
def test_logits_of_small_heads_are_computed_in_float32(name, changes, size):
    model = dataclasses.replace(model_size("L1-H32-A2"), vocab_size=VOCAB, dtype="bfloat16")
    model = bert.Bert(with_fields(model, {"masked_lm": False, **changes}))
    ones = jnp.ones((2, 8), jnp.int32)
    inputs = (ones, layout(ones[:, :1], ones[:, :1], 8))
    program = jax.make_jaxpr(
        lambda params: getattr(model.apply({"params": params}, *inputs, outputs=(name,)), name)
    )(bert.shapes(model.config))
    products = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
    *others, logits = (product.outvars[0].aval for product in products)
    assert (logits.dtype.name, logits.shape[-1]) == ("float32", size)
    assert "bfloat16" in {aval.dtype.name for aval in others}


def test_metrics_are_sums_over_a_logging_window():
    config, phase = small_phase("L1-H32-A2", log_every_steps=2)
    init, _ = initial_state(config, phase)
    batch = ones(phase)
    step, state, weights = jax.jit(step_lib.make_step(config, phase)), init(jnp.uint32(0)), []
    for _ in range(5):
        state, sums, _ = step(state, batch)
        weights.append(float(sums["real_fraction"][1]))
    assert weights == [4 * 24 * count for count in (1, 2, 1, 2, 1)]


@pytest.mark.parametrize("layer_loop", ["unrolled", "scanned"])
def test_every_dropout_uses_a_different_key(monkeypatch, layer_loop):
    """Not within a layer, nor across layers, parts of a batch, steps or seeds."""
    config, phase = small_phase(
        accumulation=2, dropout=0.1, attention_dropout=0.1, layer_loop=layer_loop
    )
    _, shapes = initial_state(config, phase)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    batch = ones(phase)
    keys = []

    def recorded(x, rate, key):
        assert rate == 0.1
        jax.debug.callback(lambda data: keys.append(tuple(data.tolist())), jax.random.key_data(key))
        return dropout(x, rate, key)

    for module in (embeddings, encoder, attention_lib):
        monkeypatch.setattr(module, "dropout", recorded)
    step = step_lib.make_step(config, phase)

    @jax.jit
    def run(seed, number):
        # The results are not used, so that the compiler removes the gradients and the update.
        step(state._replace(seed=seed, step=number), batch)

    for seed in (0, 1):
        for number in range(2):
            run(jnp.uint32(seed), jnp.int32(number))
    jax.effects_barrier()
    # 2 seeds, 2 steps and 2 parts, each with dropout on the embeddings and, in each of 2 layers, on
    # attention, its output, and the feed-forward layer.
    assert len(set(keys)) == 2 * 2 * 2 * (1 + 2 * 3)


def test_attention_divides_by_a_float32_sum():
    x = jnp.ones((1, 8, 1, 4), jnp.bfloat16)
    program = jax.make_jaxpr(
        lambda x: attention(x, x, x, jnp.zeros((1, 8), jnp.int32), 0.0, None, "xla")
    )(x)
    divided = [e for e in equations(program.jaxpr) if e.primitive.name == "div"]
    assert [v.aval.dtype.name for e in divided for v in e.invars] == ["float32"] * 2


def test_dropout_scales_bfloat16_exactly():
    """The scale is 1 / 0.9, not 1 / bfloat16(0.9), which is 0.2% larger."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.bfloat16)

    def kept(x):
        return dropout(x, 0.1, jax.random.key(0))

    y, vjp = jax.vjp(kept, x)
    (dx,) = vjp(x)
    scaled = np.asarray((np.asarray(x, np.float64) / 0.9).astype(x.dtype))
    mask = np.asarray(y) != 0
    assert 0.85 < mask.mean() < 0.95
    np.testing.assert_array_equal(np.asarray(y), np.where(mask, scaled, 0))
    np.testing.assert_array_equal(np.asarray(dx), np.where(mask, scaled, 0))


def exact_gelu(x):
    return x * special.ndtr(x)


def exact_gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("activation", "exact", "least"),
    [
        (ACTIVATIONS["gelu"], exact_gelu, -3.5),
        (ACTIVATIONS["gelu_tanh"], exact_gelu_tanh, -3.0),
        (
            feed_forward_activation(ModelConfig(activation="gelu_tanh", kernels="pallas")),
            exact_gelu_tanh,
            -3.0,
        ),
    ],
)
def test_activations_are_rounded_once_in_bfloat16(activation, exact, least):
    x = jnp.linspace(least, 6, 4001).astype(jnp.bfloat16)
    x = x[x != 0]
    wide = np.asarray(x, np.float64)
    y, vjp = jax.vjp(activation, x)
    assert y.dtype == jnp.bfloat16
    # Half a unit in the last place of 8 bits, plus cancellation in float32.
    np.testing.assert_allclose(np.asarray(y, np.float64), exact(wide), rtol=1.1 * 2**-8)
    slope = (exact(wide + 1e-6) - exact(wide - 1e-6)) / 2e-6
    result = np.asarray(vjp(jnp.ones_like(x))[0], np.float64)
    np.testing.assert_allclose(result, slope, rtol=1.1 * 2**-8, atol=2e-5)
