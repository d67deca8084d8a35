"""Encoder options: parity with causal models that use them, packing, execution modes, sizes.

Qwen3 is pre-norm with RMSNorm, SwiGLU, RoPE and QK-norm; MPT has LayerNorm without biases and
ALiBi. `test_families.py` compares bidirectional and local attention.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jax.extend import core

from bert_jax.config.schema import Config, OptimConfig
from bert_jax.config.sizes import model_size
from bert_jax.data import rows
from bert_jax.model import bert, encoder
from bert_jax.model.attention import attention, probabilities
from bert_jax.model.bert import Bert
from bert_jax.model.flops import flops_per_row, parameter_count
from bert_jax.objectives import losses
from bert_jax.objectives.masking import NextTokenTargets
from bert_jax.runtime import sharding
from bert_jax.training import optim
from tests.helpers.models import (
    assert_trees_close,
    flat,
    gradient,
    load_tensors,
    loss_of,
    make_batch,
    make_config,
    one_sequence_a_row,
    random_params,
    shapes,
)

PRE = {"norm.position": "pre", "norm.final": True, "next_sentence": False, "segments": 0}
MODERN = PRE | {
    "norm.kind": "layer_norm_no_bias",
    "position_kind": "rope",
    "rope_theta": 500.0,
    "local.rope_theta": 50.0,
    "local.window": 8,
    "gated_feed_forward": True,
    "bias": False,
    "norm.epsilon": 1e-5,
}
LLAMA = PRE | {
    "norm.kind": "rms_norm",
    "position_kind": "rope",
    "gated_feed_forward": True,
    "activation": "silu",
    "bias": False,
    "norm.qk": True,
    "norm.embeddings": False,
    "transform": False,
    "tied_decoder": False,
    "decoder_bias": False,
}


def kernel(params, *paths):
    """Return kernels as the weight of one torch.nn.Linear; several paths are concatenated."""
    kernels = []
    for path in paths:
        value = np.asarray(params[f"{path}/kernel"])
        is_output = path.endswith("attention/output")
        kernels.append(value.reshape((-1, value.shape[-1]) if is_output else (len(value), -1)))
    return np.concatenate(kernels, 1).T


def qwen3(config, params):
    params = flat(params)
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            head_dim=config.hidden // config.heads,
            intermediate_size=config.feed_forward,
            max_position_embeddings=config.positions,
            rms_norm_eps=config.norm.epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    )
    tensors = {
        "model.embed_tokens.weight": params["embeddings/word/embedding"],
        "model.norm.weight": params["encoder/norm/scale"],
        "lm_head.weight": params["masked_lm/decoder"].T,
    }
    for i in range(config.layers):
        ours, theirs = f"encoder/layer_{i}", f"model.layers.{i}"
        for name in ("query", "key", "value", "output"):
            weight = kernel(params, f"{ours}/attention/{name}")
            tensors[f"{theirs}.self_attn.{name[0]}_proj.weight"] = weight
        for name in ("query", "key"):
            scale = params[f"{ours}/attention/{name}_norm/scale"]
            tensors[f"{theirs}.self_attn.{name[0]}_norm.weight"] = scale
        for name, other in (("intermediate", "gate"), ("gate", "up"), ("output", "down")):
            weight = kernel(params, f"{ours}/feed_forward/{name}")
            tensors[f"{theirs}.mlp.{other}_proj.weight"] = weight
        tensors[f"{theirs}.input_layernorm.weight"] = params[f"{ours}/attention/norm/scale"]
        scale = params[f"{ours}/feed_forward/norm/scale"]
        tensors[f"{theirs}.post_attention_layernorm.weight"] = scale
    return model, tensors


def mpt(config, params):
    params = flat(params)
    model = transformers.MptForCausalLM(
        transformers.MptConfig(
            vocab_size=config.vocab_size,
            d_model=config.hidden,
            n_layers=config.layers,
            n_heads=config.heads,
            expansion_ratio=config.feed_forward // config.hidden,
            max_seq_len=config.positions,
            layer_norm_epsilon=config.norm.epsilon,
        )
    )
    tensors = {
        "transformer.wte.weight": params["embeddings/word/embedding"],
        "transformer.norm_f.weight": params["encoder/norm/scale"],
    }
    for i in range(config.layers):
        ours, theirs = f"encoder/layer_{i}", f"transformer.blocks.{i}"
        fused = [f"{ours}/attention/{name}" for name in ("query", "key", "value")]
        tensors[f"{theirs}.attn.Wqkv.weight"] = kernel(params, *fused)
        for name, other in (
            ("attention/output", "attn.out_proj"),
            ("feed_forward/intermediate", "ffn.up_proj"),
            ("feed_forward/output", "ffn.down_proj"),
        ):
            tensors[f"{theirs}.{other}.weight"] = kernel(params, f"{ours}/{name}")
        for name, other in (("attention", "norm_1"), ("feed_forward", "norm_2")):
            tensors[f"{theirs}.{other}.weight"] = params[f"{ours}/{name}/norm/scale"]
    return model, tensors


@pytest.mark.parametrize(
    ("build", "changes"),
    [
        (qwen3, LLAMA | {"rope_theta": 100.0, "norm.epsilon": 0.01}),
        (
            mpt,
            PRE
            | {"norm.kind": "layer_norm_no_bias", "position_kind": "alibi", "bias": False}
            | {"norm.embeddings": False, "transform": False, "decoder_bias": False}
            | {"norm.epsilon": 0.01, "heads": 6, "hidden": 48, "feed_forward": 192},
        ),
    ],
)
def test_causal_model_matches_transformers(build, changes):
    """Compare the hidden states of all layers, the next-token loss and its gradients."""
    rng = np.random.default_rng(0)
    config = make_config("L2-H32-A4", causal=True, **changes)
    params, (b, t) = random_params(config, rng), (2, 24)
    tokens = jnp.asarray(rng.integers(1, 101, (b, t)), jnp.int32)
    length = jnp.full((b, 1), t)
    layout = rows.layout(length, length, t)

    def loss(params):
        asked = NextTokenTargets(t, 1)(tokens, length, length, layout, jax.random.key(0))
        outputs = Bert(config).apply({"params": params}, asked.tokens, layout, asked.positions)
        total, weight = losses.cross_entropy(outputs.masked_lm, asked.labels, asked.weights)
        return total / weight, outputs.states

    (value, states), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    model, tensors = build(config, params)
    load_tensors(model, tensors)
    ids = torch.tensor(np.array(tokens, np.int64))
    output = model(input_ids=ids, labels=ids, output_hidden_states=True, use_cache=False)
    output.loss.backward()
    assert abs(float(value) - output.loss.item()) <= 1e-5
    for ours, theirs in zip(states, output.hidden_states, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-5)
    _, grads = build(config, grads)
    for name, parameter in model.named_parameters():
        theirs = parameter.grad.numpy()
        np.testing.assert_allclose(grads[name], theirs, rtol=0, atol=1e-5, err_msg=name)
        assert np.abs(theirs).max() > 1e-4, name


def test_local_layers_without_a_theta_rotate_by_that_of_global_layers():
    config = make_config(**MODERN | {"local.rope_theta": 0.0})
    lengths = jnp.array([[9]])
    _, (_, rotation) = encoder.attention_context(config, rows.layout(lengths, lengths, 9))
    # The second pair of features of a head of 8 rotates by theta ** -1/4 for each position.
    np.testing.assert_allclose(rotation.cos[0, 5, 1], np.cos(5 * 500**-0.25), rtol=1e-5)


def reference_attention(q, k, v, segment_ids, causal, reach, alibi):
    """Compute the probabilities and outputs of one row token by token; inputs are [T, N, K]."""
    tokens, heads, size = q.shape
    weights, output = np.zeros((heads, tokens, tokens)), np.zeros(q.shape)
    for head in range(heads):
        for i in range(tokens):
            seen = [
                j
                for j in range(tokens)
                if segment_ids[j] == segment_ids[i]
                and not (causal and j > i)
                and not (reach and abs(i - j) > reach)
            ]
            scores = np.array([q[i, head] @ k[j, head] / size**0.5 for j in seen])
            if alibi:  # slopes for eight heads
                scores -= 0.5 ** (head + 1) * np.array([abs(i - j) for j in seen])
            share = np.exp(scores) / np.exp(scores).sum()
            weights[head, i, seen] = share
            output[i, head] = share @ v[seen, head]
    return weights, output


@pytest.mark.parametrize(
    ("causal", "reach", "alibi"),
    [(False, 0, False), (False, 3, False), (True, 2, False), (True, 1, True)],
)
def test_attention_matches_tokenwise_reference(causal, reach, alibi):
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 20, 8, 4))
    segment_ids = np.repeat([0, 1, 2, 3], [9, 5, 2, 4])
    weights, output = reference_attention(q, k, v, segment_ids, causal, reach, alibi)
    q, k, v = (jnp.asarray(x, jnp.float32)[None] for x in (q, k, v))
    options = {"causal": causal, "reach": reach, "alibi": alibi}
    ids = jnp.asarray(segment_ids)[None]
    np.testing.assert_allclose(probabilities(q, k, ids, **options)[0], weights, atol=1e-6)
    result = attention(q, k, v, ids, 0.0, None, "xla", **options)
    np.testing.assert_allclose(result[0], output, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"position_kind": "alibi", "gated_feed_forward": True},
        MODERN | {"layers": 4, "next_sentence": True, "segments": 2},
        LLAMA | {"layers": 1},
    ],
    ids=["bert", "causal", "alibi", "modern", "llama"],
)
def test_packed_rows_match_one_sequence_per_row(changes):
    config, rng = make_config(**changes), np.random.default_rng(3)
    packed = make_batch(rng, [[20, 17, 11], [30, 9], [25]], 48)
    single, origin = one_sequence_a_row(packed)
    assert single.weights.sum() == packed.weights.sum()
    params = random_params(config, rng)
    run = gradient(config)
    (loss, (_, following)), grads = run(params, packed)
    (single_loss, (_, single_following)), single_grads = run(params, single)
    assert abs(loss - single_loss) <= 1e-5
    assert_trees_close(grads, single_grads, 1e-5)
    if config.next_sentence:
        for i, place in enumerate(origin):
            np.testing.assert_allclose(following[place], single_following[i, 0], rtol=0, atol=1e-5)


def test_scan_and_remat_match_unrolled_alternating_layers():
    """The first layer has no attention norm. Of six, three form a scan group and two remain."""
    rng = np.random.default_rng(6)
    quiet = make_config(**MODERN | {"layers": 6})
    params, batch = random_params(quiet, rng), make_batch(rng, [[20, 17], [30]], 40)
    key, results, states = jax.random.key(7), [], []
    for layer_loop, remat in [("unrolled", "none"), ("scanned", "dots")]:
        config = dataclasses.replace(
            quiet, dropout=0.1, attention_dropout=0.1, layer_loop=layer_loop, remat=remat
        )
        results.append(gradient(config)(params, batch, key))
        model = functools.partial(Bert(config).apply, outputs=("states",))
        states.append(jax.jit(model)({"params": params}, batch.tokens, batch.layout).states)
    ((loss, _), grads), *others = results
    assert abs(loss - jax.jit(loss_of(quiet))(params, batch)[0]) > 1e-3
    for (other, _), other_grads in others:
        assert abs(loss - other) <= 1e-6
        assert_trees_close(other_grads, grads, 1e-6)
    for other in states[1:]:
        for a, b in zip(states[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_scan_traces_a_layer_group_once():
    def products(layers):
        config = make_config(**MODERN | {"layers": layers, "layer_loop": "scanned"})
        batch = make_batch(np.random.default_rng(0), [[8]], 8)
        params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes(config))
        return str(jax.make_jaxpr(loss_of(config))(params, batch)).count("dot_general")

    assert products(13) == products(4) < products(6)


def test_weight_decay_sharding_and_lr_of_norms_and_gates():
    params = shapes(make_config(**LLAMA))
    decays = flat(optim.decay_mask(params))
    assert {path for path, decay in decays.items() if not decay} == {
        path for path in decays if path.endswith("norm/scale")
    }
    specs = flat(sharding.specs(params))
    layer = "encoder/layer_1/feed_forward"
    assert specs[f"{layer}/gate/kernel"] == specs[f"{layer}/intermediate/kernel"]
    config = Config(model=make_config(**LLAMA), optim=OptimConfig(layer_decay=0.5))
    factors = flat(optim.learning_rate_multipliers(config, params))
    assert factors[f"{layer}/gate/kernel"] == 0.25
    assert factors["encoder/norm/scale"] == 1


def multiplications(jaxpr):
    """Return the FLOPs of a jaxpr's matrix products, except selections by a one-hot matrix."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            size = np.prod([equation.invars[0].aval.shape[i] for i in contracted])
            is_selection = "select" in str(equation.source_info.name_stack)
            total += 0 if is_selection else 2 * size * equation.outvars[0].aval.size
        inner = equation.params
        if equation.primitive.name == "cond":  # a platform-dependent branch
            inner = equation.params["branches"][0]
        for value in jax.tree.leaves(
            inner, is_leaf=lambda x: isinstance(x, core.ClosedJaxpr | core.Jaxpr)
        ):
            if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
                total += multiplications(getattr(value, "jaxpr", value))
    return total


@pytest.mark.parametrize("changes", [{}, MODERN, LLAMA, {"gated_feed_forward": True}])
def test_flops_and_parameter_count_match_the_program(changes):
    config, padded = make_config(**changes), make_config(vocab_multiple=64, **changes)
    batch, params = make_batch(np.random.default_rng(0), [[20, 9]], 32), shapes(config)
    program = jax.make_jaxpr(jax.grad(lambda p: loss_of(config)(p, batch)[0]))(params)
    assert multiplications(program.jaxpr) == flops_per_row(config, 32, 2, 6)
    assert parameter_count(shapes(padded), padded) == sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize(("name", "layers"), [("modern-base", 22), ("modern-large", 28)])
def test_modernbert_sizes_match_transformers(name, layers):
    """Compare with ModernBertConfig, whose defaults are base's, and the parameter count."""
    large = {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16}
    theirs = transformers.ModernBertConfig(
        **({**large, "intermediate_size": 2624} if name == "modern-large" else {})
    )
    config = model_size(name)
    kinds = ["sliding_attention" if config.is_local(i) else "full_attention" for i in range(layers)]
    assert kinds == theirs.layer_types
    assert (config.local.window, config.positions) == (
        theirs.local_attention, theirs.max_position_embeddings,
    )  # fmt: skip
    theta = {name: kind["rope_theta"] for name, kind in theirs.rope_parameters.items()}
    assert theta == {
        "full_attention": config.rope_theta, "sliding_attention": config.local.rope_theta,
    }  # fmt: skip
    assert config.norm.epsilon == theirs.norm_eps
    config = dataclasses.replace(config, vocab_size=theirs.vocab_size)
    with torch.device("meta"):
        model = transformers.ModernBertForMaskedLM(theirs)
    expected = sum(p.numel() for p in model.parameters())
    assert parameter_count(bert.shapes(config), config) == expected
