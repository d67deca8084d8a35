"""Own kernels for GPUs, in Pallas' interpreter, against the same computation by XLA."""

import dataclasses
import itertools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config.fields import with_fields
from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import Config, MeshConfig, PhaseConfig
from bert_jax.config.sizes import model_size
from bert_jax.data import rows as rows_lib
from bert_jax.errors import UserError
from bert_jax.model import attention as attention_lib
from bert_jax.model import heads, kernels, layers
from bert_jax.model.bert import Bert, Outputs, init_params
from bert_jax.model.dropout import dropout, generator_key
from bert_jax.model.kernels import attention, cross_entropy, norm
from bert_jax.objectives import masked_lm, pretraining
from bert_jax.runtime import sharding
from bert_jax.training import state as state_lib
from bert_jax.training import step as step_lib

EPSILON = 1e-12
KEY = generator_key(jax.random.key(7), "hash")


def norm_inputs(rows, tokens, width, dtype, is_sum, has_bias, is_centered):
    """Return x, scale, bias, product and its bias, and the cotangents of the norm and the sum."""
    rng = np.random.default_rng(rows + 10 * tokens + 100 * width)
    x, product, *cotangents = (rng.normal(size=(rows, tokens, width)) for _ in range(4))
    vectors = [jnp.array(0.1 * rng.normal(size=width), jnp.float32) for _ in range(3)]
    product_bias = vectors[2] if is_sum and has_bias else None
    bias = vectors[1] if has_bias and is_centered else None
    x, product, *cotangents = (jnp.array(y, dtype) for y in (x, product, *cotangents))
    return (x, 1 + vectors[0], bias, product if is_sum else None, product_bias), cotangents


def by_xla(rate, is_centered):
    def run(x, scale, bias, product, product_bias):
        if product is None:
            return dropout(layers._normalize(EPSILON, is_centered, x, scale, bias), rate, KEY), x
        if product_bias is not None:
            product += product_bias.astype(x.dtype)
        x += dropout(product, rate, KEY)
        return layers._normalize(EPSILON, is_centered, x, scale, bias), x

    return run


def by_kernels(rate, is_centered, returns_sum=True):
    def run(x, scale, bias, *product):
        settings = EPSILON, is_centered, rate, KEY
        results = norm.normalize(x, scale, bias, *settings, *product, returns_sum)
        return results if returns_sum else (results,)

    return run


def with_gradients(function, arguments, cotangents):
    """Return the results that have a cotangent and the gradients of the arguments, in float64."""

    @jax.jit
    def run(arguments, cotangents):
        results, vjp = jax.vjp(lambda *x: function(*x)[: len(cotangents)], *arguments)
        return results, vjp(tuple(cotangents))

    return [np.asarray(y, np.float64) for y in jax.tree.leaves(run(arguments, cotangents))]


def assert_close(actual, expected, tolerance=1e-6):
    for ours, theirs in zip(actual, expected, strict=True):
        scale = max(np.abs(theirs).max(), 1e-2)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)


@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 9),
    width=st.integers(2, 70),
    rate=st.sampled_from([0.0, 0.1, 0.5]),
    is_sum=st.booleans(),
    has_bias=st.booleans(),
    is_centered=st.booleans(),
    returns_sum=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_norms_match_xla_in_float32(
    rows, tokens, width, rate, is_sum, has_bias, is_centered, returns_sum
):
    arguments, cotangents = norm_inputs(
        rows, tokens, width, jnp.float32, is_sum, has_bias, is_centered
    )
    inputs = arguments, cotangents[: 1 + returns_sum]
    expected = with_gradients(by_xla(rate, is_centered), *inputs)
    actual = with_gradients(by_kernels(rate, is_centered, returns_sum), *inputs)
    # Of few columns, variances may be tiny, which magnifies rounding in both.
    tolerance = 1e-6 if width > 16 else 1e-4
    assert_close(actual, expected, tolerance)


def test_norms_add_rows_beyond_those_of_one_program(monkeypatch):
    monkeypatch.setattr(norm, "_PARTS", 4)
    inputs = norm_inputs(3, 5, 48, jnp.float32, True, True, True)
    expected = with_gradients(by_xla(0.1, True), *inputs)
    assert_close(with_gradients(by_kernels(0.1, True), *inputs), expected)


def test_bfloat16_norms_are_no_less_exact_than_by_xla():
    inputs = norm_inputs(4, 16, 96, jnp.bfloat16, True, True, True)
    assert_no_less_exact(by_xla(0.1, True), by_kernels(0.1, True), *inputs)


def assert_no_less_exact(reference, function, arguments, cotangent):
    """Compare what bfloat16 gives, and its gradients, with the reference in float32."""
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (arguments, cotangent))
    exact = with_gradients(reference, *exact)
    by_reference = with_gradients(reference, arguments, cotangent)
    actual = with_gradients(function, arguments, cotangent)
    for ours, theirs, value in zip(actual, by_reference, exact, strict=True):
        # Where XLA leaves out a rounding, about that of one number.
        rounding = 2**-9 * np.std(value)
        assert np.std(ours - value) <= max(np.std(theirs - value), rounding)


def attention_inputs(rows, tokens, heads, size, dtype=jnp.float32):
    """Return queries, keys and values and their bias, the cotangent of the result, and segment ids."""
    rng = np.random.default_rng(tokens + 1000 * heads)
    qkv, cotangent = (rng.normal(size=(rows, tokens, heads, *n, size)) for n in ((3,), ()))
    bias = jnp.array(0.1 * rng.normal(size=(heads, 3, size)), jnp.float32)
    segment_ids = jnp.array(np.sort(rng.integers(0, 4, (rows, tokens))), jnp.int32)
    return (jnp.array(qkv, dtype), bias), [jnp.array(cotangent, dtype)], segment_ids


def attend(implementation, segment_ids, rate, causal=False, reach=0):
    def run(qkv, bias):
        if implementation == "xla":
            query, key, value = jnp.moveaxis(qkv + bias.astype(qkv.dtype), 3, 0)
            arguments = query, key, value, segment_ids, rate, KEY, "xla"
            return (attention_lib.attention(*arguments, causal=causal, reach=reach),)
        qkv += jax.lax.stop_gradient(bias).astype(qkv.dtype)
        return (attention.attend(qkv, bias, segment_ids, rate, KEY, causal, reach),)

    return run


def decoder_inputs(rows, vocab, dtype, has_bias):
    """Return the config, the decoder's input, kernel and bias, and labels and weights."""
    config = ModelConfig(vocab_size=vocab, vocab_multiple=128, dtype=dtype)
    rng, size = np.random.default_rng(rows + 10 * vocab), layers.padded_vocab_size(config)
    x, kernel, bias = (rng.normal(size=shape) for shape in ((rows, 5, 48), (48, size), size))
    kernel = jnp.array(kernel, dtype).astype(jnp.float32)
    decoder = jnp.array(x, dtype), kernel, jnp.array(bias, jnp.float32) if has_bias else None
    labels = jnp.array(rng.integers(0, vocab, (rows, 5)))
    return config, decoder, labels, jnp.array(rng.random((rows, 5)) < 0.7, jnp.float32)


def token_losses(kernels, config, labels, weights):
    """Return a function from a decoder to loss and accuracy."""
    config = dataclasses.replace(config, kernels=kernels)

    def run(*decoder):
        decoder = heads.Decoder(*decoder)
        logits = heads._without_padding(heads.vocab_logits(decoder), config)
        outputs = Outputs(decoder.x, masked_lm=logits, decoder=decoder)
        (loss, _), (correct, _) = masked_lm._token_terms(config, outputs, labels, weights)
        return loss, correct

    return run


@given(
    rows=st.integers(1, 2),
    tokens=st.sampled_from([1, 16, 50, 128, 150, 256]),
    heads=st.integers(1, 3),
    size=st.sampled_from([16, 32]),
    rate=st.sampled_from([0.0, 0.1, 0.5]),
    causal=st.booleans(),
    reach=st.sampled_from([0, 1, 20]),
)
@settings(max_examples=8, deadline=None)
def test_attention_matches_xla_in_float32(rows, tokens, heads, size, rate, causal, reach):
    *inputs, segment_ids = attention_inputs(rows, tokens, heads, size)
    expected = with_gradients(attend("xla", segment_ids, rate, causal, reach), *inputs)
    actual = with_gradients(attend("packed", segment_ids, rate, causal, reach), *inputs)
    assert_close(actual, expected)


@pytest.mark.parametrize("tokens", [128, 256])
def test_bfloat16_attention_is_no_less_exact_than_by_xla(tokens):
    arguments, cotangent, segment_ids = attention_inputs(2, tokens, 2, 32, jnp.bfloat16)
    assert_no_less_exact(
        *(attend(x, segment_ids, 0.1) for x in ("xla", "packed")), arguments, cotangent
    )


@pytest.mark.parametrize("changes", [{}, {"position_kind": "rope"}])
def test_gradients_of_queries_keys_and_values_match_xla(changes):
    """The bias' gradient comes from the kernel, or with rotations from the product."""
    config = with_fields(model_size("L1-H32-A2"), {"vocab_size": 50, **changes})
    params = init_params(config, jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), params)
    tokens, layout = jnp.arange(32).reshape(2, 16), rows_lib.layout(*jnp.full((2, 2, 1), 16), 16)

    def loss(params, attention):
        model = Bert(dataclasses.replace(config, attention=attention))
        return jnp.sum(model.apply({"params": params}, tokens, layout, outputs=()).hidden ** 3)

    by_xla, by_kernel = (
        jax.jit(jax.grad(loss), static_argnums=1)(params, name) for name in ("xla", "packed")
    )
    ours, theirs = (jax.flatten_util.ravel_pytree(x["encoder"])[0] for x in (by_kernel, by_xla))
    assert_close([ours], [theirs], 1e-5)  # those of the keys' biases are nearly 0


COTANGENT = (jnp.float32(0.3), jnp.float32(0))


@given(rows=st.integers(1, 3), vocab=st.integers(2, 400), has_bias=st.booleans())
@settings(max_examples=5, deadline=None)
def test_cross_entropy_matches_xla_in_float32(rows, vocab, has_bias):
    config, decoder, *others = decoder_inputs(rows, vocab, "float32", has_bias)
    expected, actual = (
        with_gradients(token_losses(name, config, *others), decoder, COTANGENT)
        for name in ("xla", "pallas")
    )
    assert_close(actual, expected)
    evaluated = jax.jit(token_losses("pallas", config, *others))(*decoder)  # without gradients
    assert_close(evaluated, expected[:2])


def test_cross_entropy_on_a_mesh():
    config, decoder, *others = decoder_inputs(4, 200, "float32", True)
    expected = with_gradients(token_losses("xla", config, *others), decoder, COTANGENT)
    for sizes in ((1, 2, 1), (2, 1, 2)):
        devices = jax.devices()[: int(np.prod(sizes))]
        with jax.set_mesh(sharding.make_mesh(MeshConfig(*sizes), devices)):
            actual = with_gradients(token_losses("pallas", config, *others), decoder, COTANGENT)
            assert cross_entropy.supports(256) == (sizes[2] == 1)
        assert_close(actual, expected)


def test_bfloat16_cross_entropy_is_no_less_exact_than_by_xla():
    config, decoder, *others = decoder_inputs(40, 300, "bfloat16", True)
    functions = (token_losses(name, config, *others) for name in ("xla", "pallas"))
    assert_no_less_exact(*functions, decoder, COTANGENT)


def test_a_label_outside_the_vocabulary_gives_nan():
    config, decoder, labels, _ = decoder_inputs(2, 200, "float32", True)
    for label in (0, 199, 200):
        run = token_losses("pallas", config, labels.at[1, 2].set(label), jnp.ones((2, 5)))
        assert np.isnan(run(*decoder)[0]) == (label == 200)


def losses(rows, sizes, steps, **changes):
    """Return loss and gradient norm of each training step on a mesh, and the held-out loss."""
    config = Config(
        model=with_fields(model_size("L2-H32-A2"), changes),
        phases=(PhaseConfig(rows=str(rows())),),
        batch_size=8,
        steps=steps,
        evaluate_rows=8,
    )
    config.optim.warmup = 2
    config, _, _, (phase,) = pretraining.make_phases(config)
    mesh = sharding.make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])
    init, shapes = state_lib.initial_state(config, phase, mesh)
    programs = step_lib.compile_phase(config, phase, mesh, shapes)
    state, results = init(jnp.uint32(0)), []
    for batch in itertools.islice(phase.batches(0, steps, 0, 1), steps):
        state, _, stats = programs.step(state, sharding.shard_batch(batch, mesh))
        results.append(stats.loss_and_grad_norm)
    return np.array(results), programs.evaluate(state.params)["masked_lm_loss"]


WIDER = {
    "embedding_size": 16,
    "norm.position": "pre",
    "lora.rank": 2,
    "lora.targets": ("query", "output"),
    "remat": "full",
}
MODERN = {
    "position_kind": "rope",
    "local.window": 8,
    "norm.qk": True,
    "norm.position": "pre",
    "norm.kind": "rms_norm",
    "norm.final": True,
    "bias": False,
    "layer_loop": "scanned",
    "remat": "dots",
}


@pytest.mark.parametrize(
    ("changes", "sizes", "steps"),
    [({"vocab_multiple": 128}, (2, 1, 1), 20), (WIDER, (2, 2, 2), 3), (MODERN, (1, 1, 1), 3)],
)
def test_training_with_kernels_follows_that_by_xla(rows, changes, sizes, steps):
    """On a mesh too, where each device draws the bits of its own rows."""
    expected, heldout = losses(rows, (1, 1, 1), steps, kernels="xla", **changes)
    own = {"kernels": "pallas", "attention": "packed"}
    actual, own_heldout = losses(rows, sizes, steps, **own, **changes)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    np.testing.assert_allclose(own_heldout, heldout, rtol=1e-5)


def test_kernels_refuse_what_they_do_not_support():
    config = Config()
    config.model.kernels = "pallas"
    kernels.check(config, "gpu")
    with pytest.raises(UserError, match=r"kernels.*cpu"):
        kernels.check(config, "cpu")
    config.model.dropout_generator = "rbg"
    with pytest.raises(UserError, match="dropout_generator"):
        kernels.check(config, "gpu")
    config.model.dropout = 0.0
    kernels.check(config, "gpu")
