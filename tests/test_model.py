"""The model: parity with PyTorch, packing, remat, vocabulary padding, dropout, sizes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import PartitionSpec

from bert_jax.config.schema import Config, ModelConfig, OptimConfig
from bert_jax.config.sizes import model_size
from bert_jax.convert.huggingface import from_huggingface, to_huggingface
from bert_jax.data import rows
from bert_jax.model.attention import attention
from bert_jax.model.bert import Bert, Embeddings, init_params, last_tokens
from bert_jax.model.dropout import dropout
from bert_jax.model.flops import flops_per_row, parameter_count
from bert_jax.model.layers import norm_layer, padded_vocab_size
from bert_jax.model.lstm import BiLSTM
from bert_jax.objectives import losses
from bert_jax.objectives.masking import NextTokenTargets
from bert_jax.runtime import sharding
from bert_jax.training import optim
from tests.helpers.models import (
    assert_trees_close,
    fast_jit,
    flat,
    gradient,
    loss_of,
    make_batch,
    make_config,
    one_sequence_a_row,
    random_params,
    shapes,
)


@pytest.fixture(scope="module")
def reference():
    """A packed batch, parameters, and the default model's loss, logits and gradients."""
    config, rng = make_config(), np.random.default_rng(1)
    batch = make_batch(rng, [[20, 17, 11], [30, 9], [25]], 48)
    params = random_params(config, rng)
    (loss, (words, following)), grads = gradient(config)(params, batch)
    return config, batch, params, loss, words, following, grads


# --- Hugging Face ---------------------------------------------------------------------------------


def torch_model(config, params, activation):
    import torch
    import transformers

    model = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.feed_forward,
            max_position_embeddings=config.positions,
            layer_norm_eps=config.layer_norm_epsilon,
            hidden_act=activation,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            tie_word_embeddings=config.tied_decoder,
            attn_implementation="eager",
        )
    )
    tensors = {name: torch.tensor(x) for name, x in to_huggingface(params, config).items()}
    result = model.load_state_dict(tensors, strict=False)
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= (tied if config.tied_decoder else set())
    model.tie_weights()
    return model.train()


def torch_inputs(batch):
    import torch

    labels = np.full(batch.tokens.shape, -100)
    for i, j in zip(*np.nonzero(batch.weights), strict=True):
        labels[i, batch.positions[i, j]] = batch.labels[i, j]
    return {
        "input_ids": torch.tensor(np.array(batch.tokens, np.int64)),
        "attention_mask": torch.tensor(np.array(batch.layout.segment_ids < 1, np.int64)),
        "token_type_ids": torch.tensor(np.array(batch.layout.token_type_ids, np.int64)),
        "labels": torch.tensor(labels),
        "next_sentence_label": torch.tensor(np.array(batch.next_labels[:, 0], np.int64)),
    }


@pytest.mark.parametrize(
    ("size", "changes", "activation", "lengths"),
    [
        ("L2-H64-A4", {}, "gelu", [[40], [23], [9]]),
        ("mini", {"activation": "gelu_tanh"}, "gelu_new", [[31], [40]]),
        (
            "L3-H48-A2",
            {
                "activation": "gelu_tanh",
                "feed_forward": 100,
                "tied_decoder": False,
                "vocab_multiple": 64,
                # Large enough that a misplaced epsilon changes the result.
                "layer_norm_epsilon": 0.3,
            },
            "gelu_pytorch_tanh",
            [[40], [7]],
        ),
    ],
    ids=["gelu", "mini-tanh", "untied-padded-vocab"],
)
def test_outputs_and_gradients_match_hugging_face(size, changes, activation, lengths):
    rng = np.random.default_rng(2)
    config = make_config(size, **changes)
    params, batch = random_params(config, rng), make_batch(rng, lengths, 40)
    model = torch_model(config, params, activation)

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


def test_exact_and_tanh_gelu_differ():
    """Otherwise the parity test above could not detect a swap."""
    from bert_jax.model.layers import ACTIVATIONS

    x = jnp.linspace(-3, 3, 100)
    assert np.abs(ACTIVATIONS["gelu"](x) - ACTIVATIONS["gelu_tanh"](x)).max() > 1e-4
    np.testing.assert_allclose(ACTIVATIONS["gelu"](x), jax.nn.gelu(x, approximate=False), atol=1e-6)


def test_training_losses_match_pytorch():
    """Run 100 steps of BERT's Adam; the reference is written from its formula."""
    import torch

    rng, steps, tokens = np.random.default_rng(3), 100, 24
    config = make_config("L2-H32-A4", vocab_size=40, initializer_stddev=0.02)
    optimizer = optim.make_optimizer(
        Config(optim=OptimConfig(learning_rate=3e-3, warmup_steps=10), steps=steps)
    )
    params = jax.tree.map(lambda x: 0.3 * np.array(x), random_params(config, rng))
    model = torch_model(config, params, "gelu")

    batches = []
    for _ in range(steps):
        batch = make_batch(rng, [[24], [20], [15], [24]], tokens, 40)
        # Each label is a function of its token, so there is something to learn.
        labels = (jnp.take_along_axis(batch.tokens, batch.positions, 1) * 7 + 3) % 40
        batches.append(batch._replace(labels=labels))

    @fast_jit
    def step(params, state, batch):
        (loss, _), grads = jax.value_and_grad(loss_of(config), has_aux=True)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state, loss

    ours, state = [], optimizer.init(params)
    for batch in batches:
        params, state, loss = step(params, state, batch)
        ours.append(float(loss))

    theirs = []
    weights = list(dict(model.named_parameters()).items())
    moments = {name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in weights}
    for i, batch in enumerate(batches):
        model.zero_grad()
        loss = model(**torch_inputs(batch)).loss
        loss.backward()
        theirs.append(loss.item())
        rate = 3e-3 * (i / 10 if i < 10 else 1 - i / steps)
        with torch.no_grad():
            norm = sum(w.grad.square().sum() for _, w in weights).sqrt()
            for name, w in weights:
                g = w.grad / max(norm.item(), 1.0)
                m, v = moments[name]
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                update = m / (v.sqrt() + 1e-6)
                if not name.endswith("bias") and "LayerNorm" not in name:
                    update += 0.01 * w
                w.sub_(rate * update)

    assert ours[0] - np.mean(ours[-5:]) > 1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 40), st.integers(1, 16),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_hugging_face_round_trip_is_bit_exact(layers, heads, size, vocab, multiple, tied, nsp):
    config = make_config(
        layers=layers, hidden=heads * size, heads=heads, feed_forward=heads * size + 3,
        vocab_size=vocab, vocab_multiple=multiple, tied_decoder=tied, next_sentence=nsp, positions=9,
    )  # fmt: skip
    params = random_params(config, np.random.default_rng(vocab))
    tensors = to_huggingface(params, config)
    back = from_huggingface(tensors, config)
    assert flat(back).keys() == flat(params).keys()
    for path, value in flat(params).items():
        np.testing.assert_array_equal(flat(back)[path], value, err_msg=path)
    assert tensors["bert.embeddings.word_embeddings.weight"].shape == (vocab, heads * size)
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    assert tensors[name].shape == (heads * size + 3, heads * size)


# --- Packing --------------------------------------------------------------------------------------


def test_packed_rows_match_unpacked_sequences(reference):
    config, packed, params, loss, _, following, grads = reference
    single, origin = one_sequence_a_row(packed)
    assert len(single.tokens) == 6
    assert single.weights.sum() == packed.weights.sum()

    (single_loss, (_, single_following)), single_grads = gradient(config)(params, single)
    assert abs(loss - single_loss) <= 1e-5
    for i, place in enumerate(origin):
        np.testing.assert_allclose(following[place], single_following[i, 0], rtol=0, atol=1e-5)
    assert_trees_close(grads, single_grads, 1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_do_not_attend_to_each_other(causal):
    """In a causal model, a token does not affect earlier tokens either."""
    config, rng = make_config(causal=causal, next_sentence=False), np.random.default_rng(4)
    batch = make_batch(rng, [[20, 17, 6]], 48)
    params = random_params(config, rng)
    encode = jax.jit(
        lambda tokens: Bert(config).apply(
            {"params": params}, tokens, batch.layout, method=Bert.encode
        )
    )
    before = encode(batch.tokens)
    sequence = np.array(batch.layout.segment_ids[0])
    for changed in (0, 1, 2, 3):  # 3 is padding
        place = int(np.flatnonzero(sequence == changed)[2])
        after = encode(batch.tokens.at[0, place].add(1))
        moved = np.any(np.array(before != after)[0], axis=1)
        later = np.arange(48) >= (place if causal else 0)
        np.testing.assert_array_equal(moved, (sequence == changed) & later)


def test_attention_matches_hand_computation():
    """Compare with plain NumPy: one head, two sequences of two tokens, and padding."""
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 1, 5, 1, 4), np.float32)
    sequence = jnp.array([[0, 0, 1, 1, 2]])
    got = attention(*map(jnp.asarray, (q, k, v)), sequence, 0.0, None, "xla")[0, :, 0]
    for group in ([0, 1], [2, 3], [4]):
        scores = np.exp(q[0, group, 0] @ k[0, group, 0].T / 2)
        expected = scores / scores.sum(1, keepdims=True) @ v[0, group, 0]
        np.testing.assert_allclose(got[np.array(group)], expected, rtol=1e-5)


# --- Causal models --------------------------------------------------------------------------------


def next_token_loss(config):
    """Return a function (params, tokens, lengths [B, S]) → mean next-token loss."""

    def loss(params, tokens, length):
        layout = rows.layout(length, length, tokens.shape[1])
        ask = NextTokenTargets(tokens.shape[1], length.shape[1])
        asked = ask(tokens, length, length, layout, jax.random.key(0))
        words, _ = Bert(config).apply({"params": params}, asked.tokens, layout, asked.positions)
        total, weight = losses.cross_entropy(words, asked.labels, asked.weights)
        return total / weight

    return loss


def test_causal_model_matches_hugging_face_decoder():
    """Compare hidden states of all layers, the next-token loss and its gradients."""
    import torch
    import transformers

    rng = np.random.default_rng(11)
    config = make_config("L3-H32-A4", causal=True, next_sentence=False)
    params, length = random_params(config, rng), np.array([[30], [12], [5]])
    tokens = rng.integers(1, 101, (3, 30)) * (np.arange(30) < length)
    model = transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=101, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=64, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, is_decoder=True, attn_implementation="eager",
        )
    )  # fmt: skip
    tensors = {name: torch.tensor(x) for name, x in to_huggingface(params, config).items()}
    assert not model.load_state_dict(tensors, strict=False).unexpected_keys
    model.tie_weights()
    real = np.arange(30) < length
    output = model(
        input_ids=torch.tensor(tokens),
        attention_mask=torch.tensor(real.astype(int)),
        labels=torch.tensor(np.where(real, tokens, -100)),  # the model shifts labels itself
        output_hidden_states=True,
    )
    output.loss.backward()

    layout = rows.layout(length, length, 30)
    states = fast_jit(functools.partial(Bert(config).apply, method=Bert.hidden_states))(
        {"params": params}, tokens, layout
    )
    for ours, theirs in zip(states, output.hidden_states, strict=True):
        np.testing.assert_allclose(ours[real], theirs.detach().numpy()[real], rtol=0, atol=1e-5)
    loss, grads = fast_jit(jax.value_and_grad(next_token_loss(config)))(params, tokens, length)
    assert abs(float(loss) - output.loss.item()) <= 1e-5
    ours = to_huggingface(grads, config)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(ours[name], parameter.grad, rtol=0, atol=1e-5, err_msg=name)


def unpacked(tokens, length):
    """Return the sequences of packed rows, each padded to a row of its own, and their lengths."""
    results, lengths = [], []
    for row, own in zip(tokens, length, strict=True):
        start = 0
        for n in own[own > 0]:
            results.append(np.pad(row[start : start + n], (0, len(row) - n)))
            lengths.append([n])
            start += n
    return np.array(results), np.array(lengths)


def test_packed_next_token_loss_matches_unpacked():
    rng, length = np.random.default_rng(12), np.array([[9, 14, 7], [25, 1, 3], [4, 0, 0]])
    config = make_config(causal=True, next_sentence=False)
    params = random_params(config, rng)
    tokens = rng.integers(1, 101, (3, 32)) * (np.arange(32) < length.sum(1, keepdims=True))
    run = fast_jit(jax.value_and_grad(next_token_loss(config)))
    (loss, grads), (other, other_grads) = (
        run(params, *batch) for batch in ((tokens, length), unpacked(tokens, length))
    )
    assert abs(loss - other) <= 1e-5
    assert_trees_close(grads, other_grads, 1e-5)


def test_last_token_positions():
    length = jnp.array([[3, 4, 0], [8, 0, 0], [2, 2, 1]])
    layout = rows.layout(length, length, 8)
    result = np.array(last_tokens(layout))
    np.testing.assert_array_equal(result[:, 0], [2, 7, 1])
    np.testing.assert_array_equal(result[[0, 2], 1], [6, 3])
    assert result[2, 2] == 4
    assert ((result >= 0) & (result < 8)).all()


# --- The LSTM -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
def test_packed_lstm_matches_pytorch_per_sequence(layers):
    """Compare outputs and the gradients of weights and inputs."""
    import torch

    rng, width, d = np.random.default_rng(13), 5, 6
    config = make_config(hidden=d, heads=1, lstm_layers=layers)
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
    config = make_config(hidden=64, heads=1, lstm_layers=2)
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


def test_lstm_sharding():
    """Only input kernels are sharded: weights that are used for every token are replicated."""
    config = make_config(lstm_layers=2, head="token", labels=("a", "b"), features="weighted-all")
    start = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    split = {
        path: spec
        for path, spec in flat(sharding.specs(start)).items()
        if path.startswith(("lstm", "features")) and spec != PartitionSpec()
    }
    assert {path.partition("/")[2] for path in split} == {
        f"layer_{i}/{direction}/input/kernel"
        for i in range(2)
        for direction in ("forward", "backward")
    }
    assert {*split.values()} == {PartitionSpec("fsdp", None)}


# --- Equivalent computations ----------------------------------------------------------------------


def test_layer_loop_and_remat_do_not_change_results(reference):
    """Dropout is on and must draw the same masks in every variant."""
    _, batch, params, quiet_loss, *_ = reference
    key, results = jax.random.key(7), {}
    unrolled, scanned = "unrolled", "scanned"
    ways = [(unrolled, "none"), (unrolled, "dots"), (unrolled, "full")]
    for layer_loop, remat in [*ways, (scanned, "none"), (scanned, "full")]:
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

    wide = jax.tree.map(pad, params, shapes(padded))

    def real(tree):
        def slices(like):
            return tuple(slice(n) for n in like.shape)

        return jax.tree.map(lambda x, like: np.array(x)[slices(like)], tree, params)

    def padding_is_zero(tree):
        def check(x, like):
            x = np.array(x)
            x[tuple(slice(n) for n in like.shape)] = 0
            assert not x.any()

        jax.tree.map(check, tree, params)

    (loss, _), grads = gradient(config)(params, batch)
    (wide_loss, (words, _)), wide_grads = gradient(padded)(wide, batch)
    assert abs(loss - wide_loss) <= 1e-6
    assert_trees_close(real(wide_grads), grads, 1e-6)
    padding_is_zero(wide_grads)
    assert np.argmax(words, -1).max() < 101
    assert parameter_count(wide, padded) == parameter_count(params, config)

    transform = optim.make_optimizer(
        Config(optim=OptimConfig(optimizer=optimizer, warmup_steps=0), steps=10)
    )

    @fast_jit
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
    padding_is_zero(wide)
    assert_trees_close(real(wide), params, 1e-6)


def test_bfloat16_compute_with_float32_parameters(reference):
    _, batch, params, loss, _, _, grads = reference
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
        lambda tokens: Bert(config).apply(
            {"params": params}, tokens, batch.layout, method=Bert.encode
        )
    )(batch.tokens)
    assert program.out_avals[0].dtype == jnp.bfloat16
    # One product for the positions and eight in the function that all layers call.
    products = re.findall(r":(\w+)\[[\d,]*\] = dot_general", str(program))
    assert products == ["bf16"] * 9
    assert len(re.findall(r"name=layer\b", str(program))) == config.layers


# --- Dropout, initial values, normalization -------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_rate_and_mean(rate):
    x = jnp.full((1000, 1000), 3.0)
    y = np.array(dropout(x, rate, jax.random.key(1)))
    sd = (rate * (1 - rate) / y.size) ** 0.5
    assert abs((y == 0).mean() - rate) < 5 * sd
    np.testing.assert_allclose(y[y != 0], 3 / (1 - rate), rtol=1e-6)
    assert abs(y.mean() - 3) < 5 * 3 * sd / (1 - rate)


def test_dropout_off_and_dtype():
    x = jnp.ones((50, 50), jnp.bfloat16)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x
    assert dropout(x, 0.5, jax.random.key(0)).dtype == jnp.bfloat16
    one, other = (dropout(x, 0.5, jax.random.key(i)) for i in (0, 1))
    assert 0.4 < float((one != other).mean()) < 0.6


def test_dropout_is_applied_to_embeddings_and_blocks(reference):
    """Dropout applies to embeddings, attention probabilities and the output of each block."""
    _, batch, params, *_ = reference
    key = jax.random.key(3)

    def embed(config, key):
        return fast_jit(Embeddings(config).apply)(
            {"params": params["embeddings"]}, batch.tokens, batch.layout, key
        )

    dropped = np.array(embed(make_config(dropout=0.25), key) == 0)
    assert abs(dropped.mean() - 0.25) < 0.03
    assert not np.any(embed(make_config(dropout=0.25), None) == 0)

    def hidden(config, key):
        def encode():
            return Bert(config).apply(
                {"params": params}, batch.tokens, batch.layout, key, method=Bert.encode
            )

        return fast_jit(encode)()

    quiet = hidden(make_config(), None)
    for changes in ({"dropout": 0.1}, {"attention_dropout": 0.1}):
        assert np.abs(hidden(make_config(**changes), key) - quiet).mean() > 0.01


def test_initial_values():
    config = make_config(vocab_size=1000, vocab_multiple=128, tied_decoder=False)
    batch = make_batch(np.random.default_rng(0), [[8]], 8)
    params = jax.jit(Bert(config).init)(
        jax.random.key(0), batch.tokens, batch.layout, batch.positions
    )["params"]
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
    result = norm.apply(
        {"params": {"scale": np.ones(64), "bias": np.zeros(64)}}, x.astype(np.float32)
    )
    exact = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    np.testing.assert_allclose(result, exact, atol=1e-2)  # x is rounded to 2e-4


def test_layer_norm_epsilon_is_1e_12():
    """A larger epsilon would shrink inputs with a variance of about 1e-12 to almost zero."""
    config = make_config()
    assert config.layer_norm_epsilon == ModelConfig().layer_norm_epsilon == 1e-12
    rng = np.random.default_rng(0)
    batch = make_batch(rng, [[16]], 16)
    small = 1e-6 * rng.standard_normal((101, 32))
    params = {
        "word": {"embedding": jnp.asarray(small, jnp.float32)},
        "position": {"embedding": jnp.zeros((64, 32))},
        "segment": {"embedding": jnp.zeros((2, 32))},
        "norm": {"scale": jnp.ones(32), "bias": jnp.zeros(32)},
    }
    got = Embeddings(config).apply({"params": params}, batch.tokens, batch.layout, None)
    x = small[np.array(batch.tokens)]
    x -= x.mean(-1, keepdims=True)
    np.testing.assert_allclose(got, x / np.sqrt(x.var(-1, keepdims=True) + 1e-12), atol=1e-4)


# --- Sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vocab", "parameters"),
    [
        ("base", 30_522, 110_106_428),
        ("large", 30_522, 336_226_108),
        ("teaching", 8_192, 4_501_568),
    ],
)
def test_parameter_counts(name, vocab, parameters):
    config = dataclasses.replace(model_size(name), vocab_size=vocab, vocab_multiple=128)
    assert parameter_count(shapes(config), config) == parameters


@pytest.mark.parametrize(
    ("name", "tokens", "predictions", "gigaflops"),
    [
        ("base", 128, 20, 0.546),
        ("base", 512, 76, 0.588),
        ("large", 128, 20, 1.880),
        ("large", 512, 76, 1.992),
    ],
)
def test_flops_per_token_match_the_formula(name, tokens, predictions, gigaflops):
    config = dataclasses.replace(model_size(name), vocab_size=30_522)
    a_token = flops_per_row(config, tokens, 1, predictions) / tokens
    d, t, p = config.hidden, tokens, predictions
    formula = 3 * (
        config.layers * (24 * d * d + 4 * t * d)
        + p / t * (2 * d * d + 2 * d * 30_522)
        + 2 * d * d / t
    )
    assert round(a_token / 1e9, 3) == gigaflops
    # The formula omits the two columns of the next-sentence head.
    assert a_token == pytest.approx(formula, rel=1e-6)
    double = flops_per_row(config, tokens, 2, predictions) / tokens
    assert double - a_token == pytest.approx(3 * 2 * d * (d + 2) / t, rel=1e-3)


def test_flops_of_frozen_features_and_lstms():
    """The frozen encoder runs forward only, up to the highest layer used; LSTMs are trained."""
    config = dataclasses.replace(
        model_size("L12-H64-A1"), vocab_size=100, next_sentence=False, masked_lm=False
    )
    plain = flops_per_row(config, 16, 1, 0)

    def with_(**changes):
        return flops_per_row(dataclasses.replace(config, **changes), 16, 1, 0)

    assert with_(features="last") == plain / 3
    assert with_(features="second-to-last") == pytest.approx(11 / 12 * plain / 3)
    assert with_(features="embeddings") == 0
    # Per token: four gates in two directions, from the layer below and the previous state.
    lstm = 3 * 16 * 2 * (2 * 64 * 4 * 64 + 2 * 64 * 4 * 64)
    upper = 3 * 16 * 2 * (2 * 128 * 4 * 64 + 2 * 64 * 4 * 64)
    assert with_(lstm_layers=2) == plain + lstm + upper
    wide = 3 * 16 * 2 * (2 * 256 * 4 * 64 + 2 * 64 * 4 * 64)
    assert with_(lstm_layers=1, features="last4") == plain / 3 + wide
    assert with_(lstm_layers=1, features="weighted-all") == plain / 3 + lstm


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"final_norm": True, "tied_decoder": False, "transform": False, "next_sentence": False},
        {"segments": 0, "vocab_multiple": 64, "layer_loop": "scanned"},
        {
            "norm_position": "pre", "norm": "rms_norm", "position_kind": "rope", "bias": False,
            "gated_feed_forward": True, "qk_norm": True, "head": "token", "labels": ("a",),
            "head_layer": "transform",
        },
        {"causal": True, "next_sentence": False, "pooler": True},
        {"span_boundary": True, "vocab_multiple": 64},
        {"masked_lm": False, "next_sentence": False, "head": "sequence", "labels": ("a", "b")},
        {"masked_lm": False, "head": "token", "labels": ("a",), "lstm_layers": 2},
        {
            "masked_lm": False, "next_sentence": False, "head": "span", "labels": ("a", "b"),
            "features": "weighted-all",
        },
        {"masked_lm": False, "head": "choice", "labels": ("",), "features": "last4", "layers": 4},
    ],
)  # fmt: skip
def test_initial_parameters_equal_flax_init(changes):
    """Values are equal bit for bit, for a seed passed as the training loop does."""
    config = make_config(**changes)
    one = jnp.ones((1, 1), jnp.int32)
    inputs = (one, rows.layout(one, one, 1), one - 1)
    # As in runs: the rounding of the same draws depends on compiler options.
    options = {"xla_backend_optimization_level": 2}

    def alone(key):
        return Bert(config).init(key, *inputs, method=Bert.touch)["params"]

    drawn_alone, together = (
        jax.jit(lambda seed, init=init: init(jax.random.key(seed)), compiler_options=options)(
            jnp.uint32(7)
        )
        for init in (alone, functools.partial(init_params, config))
    )
    assert flat(together).keys() == flat(drawn_alone).keys()
    jax.tree.map(np.testing.assert_array_equal, together, drawn_alone)


def test_init_program_size_does_not_grow_with_layers():
    """Parameters of equal shape are drawn together."""

    def generators(layers):
        config = make_config(layers=layers)
        program = jax.make_jaxpr(lambda: init_params(config, jax.random.key(0)))()
        return str(program).count("erf_inv")

    assert generators(6) == generators(2)
