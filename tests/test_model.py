"""BERT's encoder and heads: parity with PyTorch, remat, vocabulary padding, dropout, sizes."""

import dataclasses
import re
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import print_saved_residuals

from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import Config, OptimConfig
from bert_jax.config.sizes import model_size
from bert_jax.convert.huggingface import to_huggingface
from bert_jax.data import rows
from bert_jax.model.bert import Bert, flatten, init_params
from bert_jax.model.flops import parameter_count
from bert_jax.model.layers import norm_layer, padded_vocab_size
from bert_jax.model.lstm import BiLSTM
from bert_jax.training import optim
from tests.helpers.models import (
    assert_trees_close,
    flat,
    gradient,
    loss_of,
    make_batch,
    make_config,
    random_params,
    shapes,
    torch_bert,
    torch_inputs,
)
from tests.helpers.runs import EMITTERS


@pytest.fixture(scope="module")
def reference():
    """A packed batch, parameters, and the default model's loss and gradients."""
    config, rng = make_config(), np.random.default_rng(1)
    batch = make_batch(rng, [[20, 17, 11], [30, 9], [25]], 48)
    params = random_params(config, rng)
    (loss, _), grads = gradient(config)(params, batch)
    return batch, params, loss, grads


@pytest.mark.parametrize(
    ("size", "changes", "activation", "lengths"),
    [
        ("L2-H64-A4", {}, "gelu", [[40], [23], [9]]),
        (
            "L3-H48-A2",
            {
                "activation": "gelu_tanh",
                "feed_forward": 100,
                "tied_decoder": False,
                "vocab_multiple": 64,
                # Large enough that a misplaced epsilon changes the result.
                "norm.epsilon": 0.3,
            },
            "gelu_pytorch_tanh",
            [[40], [7]],
        ),
    ],
    ids=["gelu", "untied-padded-vocab"],
)
def test_outputs_and_gradients_match_hugging_face(size, changes, activation, lengths):
    rng = np.random.default_rng(2)
    config = make_config(size, **changes)
    params, batch = random_params(config, rng), make_batch(rng, lengths, 40)
    tensors = to_huggingface(params, config)
    model = torch_bert("BertForPreTraining", config, tensors, hidden_act=activation)

    output = model(**torch_inputs(batch))
    output.loss.backward()
    (loss, (words, following)), grads = gradient(config)(params, batch)

    theirs = output.prediction_logits.detach().numpy()
    theirs = np.take_along_axis(theirs, np.array(batch.positions)[:, :, None], 1)
    np.testing.assert_allclose(words[..., : config.vocab_size], theirs, rtol=0, atol=1e-5)
    theirs = output.seq_relationship_logits.detach().numpy()
    np.testing.assert_allclose(following[:, 0], theirs, rtol=0, atol=1e-5)
    assert abs(float(loss) - output.loss.item()) <= 1e-5

    ours = to_huggingface(grads, config)
    for name, parameter in model.named_parameters():
        if name == "cls.predictions.bias" and not config.tied_decoder:
            continue  # Hugging Face's untied model does not use it
        theirs = parameter.grad.numpy()
        np.testing.assert_allclose(ours[name], theirs, rtol=0, atol=1e-5, err_msg=name)
        # A key bias shifts all scores of a softmax equally, so its gradient is zero.
        if not name.endswith("key.bias"):
            assert np.linalg.norm(ours[name] - theirs) <= 1e-4 * np.linalg.norm(theirs), name
            assert np.abs(theirs).max() > 1e-4, name


def test_packed_lstm_matches_pytorch_per_sequence():
    """Compare outputs and the gradients of weights and inputs."""
    rng, width, d, layers = np.random.default_rng(13), 5, 6, 2
    config = make_config(hidden=d, heads=1, **{"head.lstm_layers": layers})
    length, tokens = np.array([[4, 7, 1], [12, 0, 0]]), 14
    sequence = jnp.asarray(rows.layout(length, length, tokens).segment_ids)
    x, cotangent = (rng.standard_normal((2, tokens, n), np.float32) for n in (width, 2 * d))
    cotangent *= np.array(sequence < 3)[:, :, None]
    start = jax.eval_shape(BiLSTM(config).init, jax.random.key(0), x, sequence)["params"]
    params = jax.tree.map(lambda leaf: 0.5 * rng.standard_normal(leaf.shape, np.float32), start)

    theirs = torch.nn.LSTM(width, d, layers, bidirectional=True, batch_first=True)
    for i in range(layers):
        for direction, end in (("forward", ""), ("backward", "_reverse")):
            ours = params[f"layer_{i}"][direction]
            for name, value in {
                "weight_ih": ours["input"]["kernel"].T, "bias_ih": ours["input"]["bias"],
                "weight_hh": ours["recurrent"].T, "bias_hh": np.zeros(4 * d),
            }.items():  # fmt: skip
                getattr(theirs, f"{name}_l{i}{end}").data = torch.tensor(value, dtype=torch.float32)

    value, backward = jax.vjp(
        lambda p, x: BiLSTM(config).apply({"params": p}, x, sequence), params, jnp.asarray(x)
    )
    grads, x_grad = backward(jnp.asarray(cotangent))
    for row in range(2):
        begin = 0
        for n in length[row][length[row] > 0]:
            here = slice(begin, begin + n)
            own = torch.tensor(x[None, row, here], requires_grad=True)
            out, _ = theirs(own)
            np.testing.assert_allclose(value[row, here], out[0].detach(), rtol=0, atol=1e-5)
            out.backward(torch.tensor(cotangent[None, row, here]))
            np.testing.assert_allclose(x_grad[row, here], own.grad[0], rtol=0, atol=1e-5)
            begin += n
    for i in range(layers):
        for direction, end in (("forward", ""), ("backward", "_reverse")):
            ours = grads[f"layer_{i}"][direction]
            for name, result in {
                "weight_ih": ours["input"]["kernel"].T, "bias_ih": ours["input"]["bias"],
                "weight_hh": ours["recurrent"].T,
            }.items():  # fmt: skip
                expected = getattr(theirs, f"{name}_l{i}{end}").grad
                np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5)


def test_lstm_initial_values():
    config = make_config(hidden=64, heads=1, **{"head.lstm_layers": 2})
    x = jnp.zeros((1, 3, 100))
    params = flat(BiLSTM(config).init(jax.random.key(0), x, jnp.zeros((1, 3), jnp.int32))["params"])
    assert len(params) == 2 * 2 * 3
    for path, value in params.items():
        if path.endswith("bias"):
            np.testing.assert_array_equal(value, np.repeat([0, 1, 0, 0], 64))
        else:
            # Uniform in ±1/sqrt(fan_in).
            most = len(value) ** -0.5
            assert 0.95 * most < np.abs(value).max() <= most, path
            assert abs(value.std() / most - 3**-0.5) < 0.05, path
    kernels = [np.array(x).ravel()[:64] for path, x in params.items() if not path.endswith("bias")]
    assert len({x.tobytes() for x in kernels}) == len(kernels)


def test_layer_loop_and_remat_do_not_change_results(reference):
    """Dropout is on and must draw the same masks in every variant."""
    batch, params, quiet_loss, _ = reference
    key, results = jax.random.key(7), {}
    unrolled, scanned = "unrolled", "scanned"
    ways = [(unrolled, "none"), (unrolled, "dots"), (scanned, "full")]
    for layer_loop, remat in ways:
        config = make_config(dropout=0.1, attention_dropout=0.1, layer_loop=layer_loop, remat=remat)
        (loss, _), grads = gradient(config)(params, batch, key)
        results[layer_loop, remat] = loss, grads
    loss, grads = results.pop((unrolled, "none"))
    assert abs(loss - quiet_loss) > 1e-3
    for other_loss, other_grads in results.values():
        assert abs(loss - other_loss) <= 1e-6
        assert_trees_close(other_grads, grads, 1e-6)


def test_remat_saves_fewer_residuals(capsys):
    batch = make_batch(np.random.default_rng(8), [[16]], 16)

    def kept(remat):
        config = make_config(remat=remat)
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes(config))
        print_saved_residuals(lambda p: loss_of(config)(p, batch)[0], params)
        lines = capsys.readouterr().out.splitlines()
        return sum("from the argument" not in line for line in lines)

    assert kept("full") < kept("dots") < kept("none")


@pytest.mark.parametrize(("tied", "optimizer"), [(True, "lamb"), (False, "adam")])
def test_vocabulary_padding_does_not_change_results(tied, optimizer):
    rng = np.random.default_rng(9)
    config = make_config("L1-H32-A2", tied_decoder=tied)
    padded = dataclasses.replace(config, vocab_multiple=64)
    assert (padded_vocab_size(config), padded_vocab_size(padded)) == (101, 128)
    params, batch = random_params(config, rng), make_batch(rng, [[16, 9], [24]], 24)

    def pad(leaf, like):
        return np.pad(leaf, [(0, m - n) for n, m in zip(leaf.shape, like.shape, strict=True)])

    def real(tree):
        """Return the leaves without the padding, which must be zero."""

        def cut(x, like):
            x, inside = np.array(x), tuple(map(slice, like.shape))
            value = x[inside].copy()
            x[inside] = 0
            assert not x.any()
            return value

        return jax.tree.map(cut, tree, params)

    wide = jax.tree.map(pad, params, shapes(padded))
    (loss, _), grads = gradient(config)(params, batch)
    (wide_loss, (words, _)), wide_grads = gradient(padded)(wide, batch)
    assert abs(loss - wide_loss) <= 1e-6
    assert_trees_close(real(wide_grads), grads, 1e-6)
    assert np.argmax(words, -1).max() < 101
    assert parameter_count(wide, padded) == parameter_count(params, config)

    transform = optim.make_optimizer(
        Config(optim=OptimConfig(optimizer=optimizer, warmup_steps=0), steps=10)
    )

    @jax.jit
    def step(params, grads, state):
        updates, state = transform.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    # Updating only the parameters with a vocabulary axis halves the compile time.
    params, wide, grads, wide_grads = (
        {name: tree[name] for name in ("embeddings", "masked_lm")}
        for tree in (params, wide, grads, wide_grads)
    )
    state, wide_state = transform.init(params), transform.init(wide)
    for _ in range(3):
        params, state = step(params, grads, state)
        wide, wide_state = step(wide, wide_grads, wide_state)
    assert_trees_close(real(wide), params, 1e-6)


def test_bfloat16_compute_with_float32_parameters(reference):
    batch, params, loss, grads = reference
    config = make_config(dtype="bfloat16")
    (low_loss, (words, following)), low_grads = gradient(config)(params, batch)
    assert words.dtype == following.dtype == low_loss.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(shapes(config))} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(low_grads)} == {jnp.dtype("float32")}
    # bfloat16 has 8 bits of precision: a relative error of 2**-8 = 0.004 per operation.
    assert 1e-6 < abs(low_loss - loss) < 0.02 * loss
    for path, expected in flat(grads).items():
        if not path.endswith("key/bias"):
            error = np.linalg.norm(flat(low_grads)[path] - expected)
            assert error < 0.1 * np.linalg.norm(expected), path
    program = jax.make_jaxpr(
        lambda tokens: (
            Bert(config).apply({"params": params}, tokens, batch.layout, outputs=()).hidden
        )
    )(batch.tokens)
    assert program.out_avals[0].dtype == jnp.bfloat16
    # One product for the positions and eight in the function that all layers call.
    products = re.findall(r":(\w+)\[[\d,]*\] = dot_general", str(program))
    assert products == ["bf16"] * 9
    assert len(re.findall(r"name=layer\b", str(program))) == config.layers


def test_initial_values():
    config = make_config(vocab_size=1000, vocab_multiple=128, tied_decoder=False)
    params = init_params(config, jax.random.key(0))
    for path, value in flat(params).items():
        value = np.array(value)
        kind = path.rpartition("/")[2]
        if kind == "bias":
            assert not value.any(), path
        elif kind == "scale":
            assert (value == 1).all(), path
        else:
            if path.endswith("word/embedding"):
                assert not value[1000:].any()
                value = value[:1000]
            if path == "masked_lm/decoder":
                assert not value[:, 1000:].any()
                value = value[:, :1000]
            # Truncation at two standard deviations scales a normal's deviation by 0.8796.
            assert np.abs(value).max() <= 0.04, path
            assert abs(value.std() - 0.01759) < 0.01759 * 4 / value.size**0.5, path
            assert abs(value.mean()) < 0.01759 * 5 / value.size**0.5, path
    kernels = [np.array(x).ravel()[:64] for p, x in flat(params).items() if p.endswith("kernel")]
    assert len({x.tobytes() for x in kernels}) == len(kernels)


def test_layer_norm_is_accurate_far_from_zero():
    """Computing E[x²] - E[x]² in float32 would lose all digits of the variance."""
    x = 3000 + np.random.default_rng(0).standard_normal((4, 64))
    norm = norm_layer(ModelConfig())
    assert norm.epsilon == 1e-12  # as in BERT
    params = {"scale": jnp.ones(64), "bias": jnp.zeros(64)}
    result = norm.apply({"params": params}, jnp.asarray(x, jnp.float32))
    exact = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    np.testing.assert_allclose(result, exact, atol=1e-2)  # x is rounded to 2e-4


@pytest.mark.parametrize("mean", [0, 4, 64])
def test_layer_norm_in_bfloat16_is_as_accurate_as_pytorch(mean):
    rng = np.random.default_rng(0)
    x, cotangent = (
        torch.tensor(array, dtype=torch.bfloat16)
        for array in (mean + rng.standard_normal((200, 768)), rng.standard_normal((200, 768)))
    )

    def with_torch(dtype):
        leaf = x.to(dtype).requires_grad_()
        y = torch.nn.functional.layer_norm(leaf, (768,), eps=1e-12)
        return y, *torch.autograd.grad(y, leaf, cotangent.to(dtype))

    params = {"params": {"scale": jnp.ones(768), "bias": jnp.zeros(768)}}
    ours, cotangent_array = (jnp.array(t.float().numpy(), jnp.bfloat16) for t in (x, cotangent))
    y, vjp = jax.vjp(lambda x: norm_layer(ModelConfig()).apply(params, x), ours)
    results = zip((y, *vjp(cotangent_array)), with_torch(torch.bfloat16), strict=True)
    for (result, theirs), exact in zip(results, with_torch(torch.float64), strict=True):
        exact = exact.detach().numpy()
        error, their_error = (
            np.sqrt(np.mean((np.asarray(array, np.float64) - exact) ** 2))
            for array in (result, theirs.detach().double().numpy())
        )
        assert error <= 1.01 * their_error


@pytest.mark.parametrize(
    "changes",
    [
        {"tied_decoder": False, "segments": 0, "vocab_multiple": 64, "span_boundary": True},
        {
            "norm.position": "pre", "norm.kind": "rms_norm", "position_kind": "rope", "bias": False,
            "gated_feed_forward": True, "norm.qk": True, "head.kind": "token", "head.labels": ("a",),
            "head.lstm_layers": 2, "head.features": "weighted-all", "norm.final": True,
        },
    ],
)  # fmt: skip
def test_initial_parameters_depend_on_their_path_alone(changes):
    """A kernel is drawn as a matrix, from the key folded with the checksum of its path."""
    config, key = make_config(**changes), jax.random.key(7)
    usual_jit = partial(jax.jit, compiler_options=EMITTERS)
    params = flatten(usual_jit(partial(init_params, config))(key))
    path = "encoder/layer_1/attention/value/kernel"
    drawn = jax.random.truncated_normal(
        jax.random.fold_in(key, zlib.crc32(path.encode())), -2, 2, (config.hidden, config.hidden)
    )
    np.testing.assert_allclose(
        params[path].reshape(drawn.shape), config.initializer_stddev * drawn, atol=1e-8
    )
    other = dataclasses.replace(config, vocab_multiple=128, layers=config.layers + 1, pooler=True)
    others = flatten(usual_jit(partial(init_params, other))(key))
    for path, value in params.items():
        # Without the padding of the vocabulary, and of the weights of more layers the first ones.
        parts = (np.atleast_1d(x)[: config.vocab_size] for x in (value, others[path]))
        ours, theirs = (x[tuple(map(slice, value.shape))] for x in parts)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("name", "parameters"), [("base", 110_106_428), ("large", 336_226_108)])
def test_parameter_counts(name, parameters):
    config = dataclasses.replace(model_size(name), vocab_size=30_522, vocab_multiple=128)
    assert parameter_count(shapes(config), config) == parameters


def test_only_the_outputs_asked_for_are_computed():
    config, rng = make_config(vocab_size=5_000), np.random.default_rng(0)
    batch, bert = make_batch(rng, [[8, 8]], 16), Bert(config)

    def flops(*outputs):
        def run(params):
            return bert.apply({"params": params}, batch.tokens, batch.layout, outputs=outputs)

        return jax.jit(run).lower(shapes(config)).cost_analysis()["flops"]

    vocabulary = 2 * 16 * config.hidden * config.vocab_size
    assert flops("masked_lm") - flops() > vocabulary > flops("states", "pooled")
    outputs = bert.apply({"params": init_params(config, jax.random.key(0))}, *batch[:2], outputs=())
    assert [x is None for x in outputs] == [False, *[True] * 7]
