"""Attention kernels: equality with XLA in Pallas' interpreter, lowering per platform, validation.

No accelerator is needed. cuDNN has no interpreter, so its tests check the arguments of the call and
the lowered program.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config.fields import with_fields
from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import Config, MeshConfig, PhaseConfig
from bert_jax.config.sizes import model_size
from bert_jax.errors import UserError
from bert_jax.model.attention import KERNELS, attention, attention_line, check, choose
from bert_jax.objectives import pretraining
from bert_jax.runs import workdir
from bert_jax.runs.checkpoint import abstract
from bert_jax.runtime import sharding
from bert_jax.training import state as state_lib
from bert_jax.training import step as step_lib


def make_inputs(tokens, heads=2, size=16, rows=2, dtype=jnp.float32):
    """Return [queries, keys, values, cotangent] and segment IDs.

    Even rows hold three packed sequences and padding; odd rows hold one sequence.
    """
    rng = np.random.default_rng(tokens)
    arrays = rng.standard_normal((4, rows, tokens, heads, size), np.float32)
    sequence = np.zeros((rows, tokens), np.int32)
    for start, number in ((3, 1), (tokens // 2, 2), (tokens - 9, 3)):  # 3 is padding
        sequence[::2, start:] = number
    return [jnp.asarray(x, dtype) for x in arrays], jnp.asarray(sequence)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def value_and_gradients(arrays, sequence, implementation, interpret=True, causal=False, reach=0):
    *inputs, cotangent = arrays
    settings = (sequence, 0.0, None, implementation, interpret, causal, reach)
    value, gradients = jax.vjp(lambda q, k, v: attention(q, k, v, *settings), *inputs)
    return value, *gradients(cotangent)


@pytest.mark.parametrize(("tokens", "reach"), [(150, 0), (300, 20)])
@pytest.mark.parametrize("causal", [False, True])
def test_splash_matches_xla_on_packed_rows(causal, tokens, reach):
    arrays, sequence = make_inputs(tokens, size=24)
    result, expected = (
        value_and_gradients(arrays, sequence, name, True, causal, reach)
        for name in ("splash", "xla")
    )
    for ours, theirs in zip(result, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    everywhere = value_and_gradients(arrays, sequence, "xla", True, causal)[0]
    assert not reach or np.abs(everywhere - expected[0]).max() > 0.1


@pytest.mark.parametrize("reach", [0, 20])
def test_cudnn_mask_is_causal_and_local(monkeypatch, reach):
    """XLA computes the call to cuDNN, including its mask."""
    theirs = jax.nn.dot_product_attention

    def by_xla(*arrays, mask, implementation):
        assert implementation == "cudnn"
        return theirs(*arrays, mask=mask, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    (*inputs, _), sequence = make_inputs(128)
    result, expected = (
        attention(*inputs, sequence, 0.0, None, name, causal=True, reach=reach)
        for name in ("cudnn", "xla")
    )
    np.testing.assert_allclose(result, expected, atol=2e-5)


def test_sharded_attention_needs_no_communication():
    arrays, sequence = make_inputs(128, heads=4, rows=4)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    places = [jax.NamedSharding(mesh, sharding.QKV_SPEC)] * 4, sharding.row_sharding(mesh)
    with jax.set_mesh(mesh):
        compiled = value_and_gradients.lower(
            *abstract((arrays, sequence), places), "splash"
        ).compile()
    result = compiled(*jax.device_put((arrays, sequence), places))
    expected = value_and_gradients(arrays, sequence, "xla")
    for ours, theirs in zip(result, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
        assert ours.sharding.spec == sharding.QKV_SPEC
    assert "all-" not in compiled.as_text()


@pytest.mark.parametrize(
    ("implementation", "platform", "calls"),
    [
        ("splash", "tpu", ["tpu_custom_call"]),
        (
            "cudnn",
            "cuda",
            ["__cudnn$fmhaScaleBiasSoftmax(", "__cudnn$fmhaScaleBiasSoftmaxBackward("],
        ),
    ],
)
def test_kernel_lowers_to_platform_custom_calls(monkeypatch, implementation, platform, calls):
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91200)
    inputs = make_inputs(96, dtype=jnp.bfloat16)
    traced = value_and_gradients.trace(*inputs, implementation, False)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    for call in calls:
        assert call in text
    if implementation == "cudnn":  # forward and backward get the mask, padded to T=128
        fmha = [line for line in text.split("\n") if "fmha" in line]
        assert sum("tensor<2x1x128x128xbf16>" in line for line in fmha) == 2
    assert "exponential" not in text, "XLA's softmax beside the kernel's"


@pytest.mark.tpu
def test_sharded_step_compiles_for_tpu(rows):
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5e:2x2", "tpu").devices
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2), devices)
    model = dataclasses.replace(
        model_size("L1-H32-A2"), attention_dropout=0.0, attention="splash", dtype="bfloat16"
    )
    config = Config(model=model, phases=(PhaseConfig(rows=str(rows())),), batch_size=4)
    config, _, _, (phase,) = pretraining.make_phases(config)
    check(config, devices[0].platform, mesh.shape["tensor"])
    _, shapes = state_lib.initial_state(config, phase, mesh)
    text = step_lib.compile_step(config, phase, mesh, shapes).as_text()
    for kernel in ("fwd", "dkv"):  # the gradients are of one kernel
        assert f"splash_mha_{kernel}" in text


def run_config(deterministic=False, **changes):
    values = {"attention_dropout": 0.0, "dtype": "bfloat16", **changes}
    return Config(model=with_fields(ModelConfig(), values), deterministic=deterministic)


def refusal(platform, tensor=1, **changes):
    with pytest.raises(UserError) as error:
        check(run_config(**changes), platform, tensor)
    return str(error.value)


WINDOW = {"local.window": 128, "position_kind": "rope"}


@pytest.mark.parametrize("name", KERNELS)
def test_unsupported_kernel_settings_are_rejected(name):
    platform = KERNELS[name].platform
    check(run_config(attention=name, **WINDOW), platform, 4)
    for changes, key in (
        ({"hidden": 12 * 260}, "model.hidden / heads is 260"),
        ({"position_kind": "alibi"}, "model.position_kind is 'alibi'"),
        ({"tensor": 5}, "mesh.tensor is 5"),
    ):
        error = refusal(platform, attention=name, **changes)
        assert error.startswith(f"config.model.attention='{name}'")
        assert key in error
    for changes, supporting, key in (
        ({"attention_dropout": 0.1}, ("packed",), "model.attention_dropout is 0.1"),
        (
            {"attention_dropout": 0.1, "dropout_generator": "rbg"},
            (),
            "dropout_generator" if name == "packed" else "model.attention_dropout is 0.1",
        ),
        ({"hidden": 12 * 8}, ("cudnn", "splash"), "model.hidden / heads"),
        ({"hidden": 12 * 128}, ("cudnn", "splash"), "model.hidden / heads"),
        ({"hidden": 12 * 136}, ("splash",), "model.hidden / heads"),
        ({"hidden": 12 * 20}, ("splash",), "model.hidden / heads"),
        ({"electra.generator_hidden": 96}, ("cudnn", "splash"), "heads is 96 in the generator"),
        ({"dtype": "float32"}, ("splash",), "model.dtype"),
        ({"deterministic": True}, ("packed", "splash"), "config.deterministic"),
    ):
        if name in supporting:
            check(run_config(attention=name, **changes), platform, 1)
        else:
            assert key in refusal(platform, attention=name, **changes)
    other = {"gpu": "tpu", "tpu": "cpu"}[platform]
    assert f"runs on a {platform}" in refusal(other, attention=name)


def test_auto_is_not_cudnn_when_jax_started_with_deterministic_kernels(monkeypatch):
    """The config cannot change the flag any more."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    assert choose(run_config(), "gpu", 1, 512).implementation == "xla"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    assert choose(run_config(), "gpu", 1, 512).implementation == "cudnn"


@pytest.mark.parametrize(
    ("platform", "changes", "implementation", "reason"),
    [
        ("cpu", {}, "xla", "CPU"),
        ("gpu", {}, "cudnn", "GPU"),
        ("tpu", {}, "splash", "TPU"),
        ("gpu", {"deterministic": True}, "xla", "config.deterministic is true"),
        ("gpu", {"attention_dropout": 0.1}, "xla", "config.model.attention_dropout is 0.1"),
        ("tpu", {"local.window": 128}, "splash", "TPU"),
        ("gpu", {"attention": "cudnn"}, "cudnn", "as configured"),
        ("gpu", {"kernels": "pallas", "attention_dropout": 0.1}, "packed", "never timed"),
        ("gpu", {"kernels": "pallas", "hidden": 12 * 128}, "cudnn", "timed"),
    ],
)
def test_auto_selects_a_kernel_that_supports_the_config(platform, changes, implementation, reason):
    config = run_config(**changes)
    assert config.model.attention == changes.get("attention", "auto")
    check(config, platform, 1)
    choice = choose(config, platform, 1, 512)
    assert choice.implementation == implementation
    assert reason in choice.reason
    # Fine-tuning calls `attention_line` after "auto" has been resolved.
    config.model.attention = implementation
    check(config, platform, 1)
    line = attention_line(config, platform, 1, [512])
    assert line.startswith(f"attention: {implementation} (")
    assert reason in line or "attention" in changes


def test_resumed_run_keeps_the_choice_of_auto(tmp_path):
    starts = [{"step": 0, "attention": f"{name} at T=8, splash at T=512"} for name in ("x", "xla")]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    kept = workdir.attention_at(tmp_path)
    assert kept == {8: "xla", 512: "splash"}
    assert workdir.attention_at(tmp_path, -2)[8] == "x"
    assert workdir.attention_at(tmp_path, -3) == workdir.attention_at(tmp_path / "none") == {}
    assert choose(run_config(), "tpu", 1, 512, {512: "xla"}).implementation == "xla"
    assert choose(run_config(), "tpu", 1, 8, {8: "splash"}).implementation == "splash"
    # This device, or the config, has it no more.
    for platform, changes in (("cpu", {}), ("tpu", {"attention_dropout": 0.1})):
        assert choose(run_config(**changes), platform, 1, 512, kept).implementation == "xla"
    assert choose(run_config(attention="splash"), "tpu", 1, 8, kept).implementation == "splash"


def test_auto_dtype_is_that_of_the_device_where_the_run_began(tmp_path, run_folder, monkeypatch):
    config = run_config(dtype="auto")
    text = (run_folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"dtype": "auto"', '"dtype": "bfloat16"'))
    with monkeypatch.context() as patch:
        for platform, dtype in (("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")):
            patch.setattr(jax, "default_backend", lambda name=platform: name)
            assert workdir.dtype_at(config) == workdir.dtype_at(config, tmp_path / "new") == dtype
            assert workdir.dtype_at(config, tmp_path) == "bfloat16"
            assert workdir.dtype_at(config, run_folder) == "float32"  # it was not trained here
    assert workdir.dtype_at(run_config(dtype="bfloat16"), run_folder) == "bfloat16"


def test_auto_depends_on_the_tokens_of_each_phase():
    line = attention_line(run_config(), "tpu", 1, [8, 128, 512, 512])
    assert line.startswith("attention: xla at T=8, 128 (")
    assert "splash at T=512 (" in line
    assert choose(run_config(attention="splash"), "tpu", 1, 8).implementation == "splash"
    assert choose(run_config(kernels="pallas"), "gpu", 1, 1024).implementation == "cudnn"
    phases = [PhaseConfig(tokens=8, fraction=0.5), PhaseConfig(tokens=512, fraction=0.5)]
    config = Config(phases=tuple(phases), model=ModelConfig(attention_dropout=0.0))

    def implementation(tokens):
        return choose(config, "tpu", 1, tokens).implementation

    phases = pretraining.abstract_phases(config, 1, implementation)[1]
    used = [phase.objective.model.config.attention for phase in phases]
    assert used == ["xla", "splash"]
