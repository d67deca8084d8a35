"""Low-rank adapters: initial values, gradients, trained and saved parameters, and merging."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import cli
from bert_jax.config.checks import validate
from bert_jax.config.fields import with_fields
from bert_jax.config.model import LORA_TARGETS, HeadConfig, LoraConfig, ModelConfig
from bert_jax.config.schema import Config, FinetuneConfig, MeshConfig, OptimConfig, TaskConfig
from bert_jax.data import rows
from bert_jax.model.bert import Bert, flatten, init_params, shapes
from bert_jax.model.flops import flops_per_row
from bert_jax.model.layers import merge_lora
from bert_jax.objectives import finetuning
from bert_jax.runs import checkpoint
from bert_jax.runtime import sharding
from bert_jax.runtime.sharding import shard_batch
from bert_jax.training import optim
from bert_jax.training import state as state_lib
from bert_jax.training import step as step_lib
from tests.helpers import tasks
from tests.helpers.checkpoints import error_of, random_params, write_run
from tests.helpers.examples import RandomExamples
from tests.helpers.runs import WORDS, refused

LORA = LoraConfig(rank=3, alpha=4.5, targets=LORA_TARGETS)
BASE = ModelConfig(
    layers=2, hidden=12, heads=3, feed_forward=20, vocab_size=40, positions=64, dropout=0.0,
    attention_dropout=0.0, masked_lm=False, next_sentence=False, head=HeadConfig("sequence", ("a", "b")),
)  # fmt: skip
MODEL = dataclasses.replace(BASE, lora=LORA)
QUERY = "encoder/layer_1/attention/query"


def is_adapter(path):
    return path.endswith(("/lora_a", "/lora_b"))


@functools.cache
def inputs():
    lengths = np.array([[5, 7], [9, 0]])
    tokens = np.random.default_rng(0).integers(5, 40, (2, 14)).astype(np.int32)
    return jnp.asarray(tokens), rows.Layout(*map(jnp.asarray, rows.layout(lengths, lengths, 14)))


def logits(model, params, key=None):
    def classify(params, tokens, layout, key):
        return Bert(model).apply({"params": params}, tokens, layout, None, key).head

    return jax.jit(classify)(params, *inputs(), key)


def test_adapters_leave_base_parameters_unchanged():
    key = jax.random.key(3)
    base, ours = (flatten(init_params(model, key)) for model in (BASE, MODEL))
    adapters = {path: value for path, value in ours.items() if is_adapter(path)}
    assert ours.keys() - adapters.keys() == base.keys()
    for path, value in base.items():
        np.testing.assert_array_equal(ours[path], value)
    assert len(adapters) == 2 * 2 * 6
    assert adapters[f"{QUERY}/lora_a"].shape == (12, 3)
    assert adapters[f"{QUERY}/lora_b"].shape == (3, 3, 4)
    assert adapters["encoder/layer_0/attention/output/lora_a"].shape == (3, 4, 3)
    for path, value in adapters.items():
        assert np.any(value) == path.endswith("lora_a")


def test_merged_parameters_give_the_same_logits():
    model = dataclasses.replace(MODEL, layer_loop="scanned")
    params = random_params(model)
    ours = logits(model, params)
    merged = merge_lora(params, LORA)
    assert flatten(merged).keys() == flatten(shapes(BASE)).keys()
    np.testing.assert_allclose(ours, logits(BASE, merged), atol=1e-5, rtol=0)
    flat = flatten(params)
    w, a, b = (flat[f"{QUERY}/{name}"] for name in ("kernel", "lora_a", "lora_b"))
    by_hand = w + 1.5 * np.einsum("dr,rnk->dnk", a, b)
    np.testing.assert_allclose(flatten(merged)[f"{QUERY}/kernel"], by_hand, atol=1e-6)


def test_adapter_gradients_match_merged_kernel_gradients():
    params = random_params(MODEL)

    def loss(params, model):
        return jnp.sum(logits(model, params) ** 2)

    ours = flatten(jax.jit(jax.grad(functools.partial(loss, model=MODEL)))(params))
    merged = flatten(
        jax.jit(jax.grad(functools.partial(loss, model=BASE)))(merge_lora(params, LORA))
    )
    flat = flatten(params)
    for path, grad in merged.items():
        module = path.removesuffix("/kernel")
        if f"{module}/lora_a" not in flat:
            continue
        a, b = (np.asarray(flat[f"{module}/{name}"]) for name in ("lora_a", "lora_b"))
        whole = np.asarray(grad).reshape(a[..., 0].size, b[0].size)  # dL/dW of y = x (W + s A B)
        for name, expected in (
            ("lora_a", 1.5 * whole @ b.reshape(3, -1).T),
            ("lora_b", 1.5 * a.reshape(-1, 3).T @ whole),
        ):
            result = np.asarray(ours[f"{module}/{name}"]).reshape(expected.shape)
            np.testing.assert_allclose(result, expected, atol=1e-4 * np.abs(whole).max(), rtol=1e-4)


def test_adapter_dropout_depends_on_the_key():
    lora = dataclasses.replace(LORA, dropout=0.5)
    params, model = random_params(MODEL), dataclasses.replace(MODEL, lora=lora)
    clean = logits(MODEL, params, key=jax.random.key(1))
    one, other = (logits(model, params, key=jax.random.key(i)) for i in (1, 2))
    assert np.abs(one - other).max() > 1e-3
    np.testing.assert_array_equal(logits(model, params), clean)


def config_of(**changes):
    values = dict(model=MODEL, lora=LORA, task=TaskConfig(tokens=20), steps=10)
    return FinetuneConfig(**{**values, **changes})


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_only_adapters_and_head_are_trained_and_have_moments(optimizer):
    config = config_of(optim=OptimConfig(optimizer=optimizer, warmup_steps=0))
    params = random_params(MODEL)
    transform = optim.make_optimizer(config)
    state = jax.jit(transform.init)(params)
    trained = {k for k in flatten(params) if is_adapter(k) or not k.startswith(("enc", "emb"))}
    assert {"classifier/kernel", "pooler/bias", f"{QUERY}/lora_a"} < trained
    size = sum(flatten(params)[path].size for path in trained)
    moments = [x for x in jax.tree.leaves(state) if np.ndim(x)]
    assert sum(x.size for x in moments) == 2 * size
    ones = jax.tree.map(np.ones_like, params)
    updates, _ = jax.jit(transform.update)(ones, state, params)
    assert {path for path, x in flatten(updates).items() if np.any(x)} == trained
    specs = sharding.specs(params)["encoder"]["layer_1"]["attention"]["value"]
    assert specs["lora_a"] == sharding.PartitionSpec("fsdp", None)
    assert specs["lora_b"] == sharding.PartitionSpec(None, "tensor", None)


def test_sharded_steps_match_single_device():
    dataset = RandomExamples("sequence", count=30)
    model = with_fields(
        MODEL,
        {"layers": 1, "hidden": 8, "heads": 2, "feed_forward": 16, "head.labels": dataset.labels},
    )
    dataset.splits["dev"] = dataset.splits["train"]
    results = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        config = config_of(model=model, batch_size=8, mesh=MeshConfig(*sizes))
        mesh = sharding.make_mesh(config.mesh, jax.devices()[: np.prod(sizes)])
        config, _, plan, phase = finetuning.make_phase(config, dataset, [0], 4)
        init, abstract = state_lib.initial_state(config, phase, mesh)
        step = step_lib.compile_step(config, phase, mesh, abstract)
        state = init(jnp.uint32(0))
        for i in range(2):  # the learning rate is 0 in the first step
            state, _, _ = step(state, shard_batch(plan.batch(i, 0), mesh))
        results.append(jax.device_get(flatten(state.params)))
    assert np.any(results[0]["encoder/layer_0/attention/value/lora_b"])
    for path, value in results[0].items():
        np.testing.assert_allclose(results[1][path], value, atol=1e-5, err_msg=path)


def test_flops_exclude_weight_gradients_of_frozen_kernels():
    one = dataclasses.replace(BASE, layers=1)
    kernels = 8 * (8 * 12 * 12 + 4 * 12 * 20)
    saved = flops_per_row(one, 8, 1, 0) - flops_per_row(
        dataclasses.replace(one, lora=LORA), 8, 1, 0
    )
    assert saved == kernels


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (FinetuneConfig(lora=LoraConfig(rank=2, targets=("quary",))), "lora.targets"),
        (FinetuneConfig(lora=LoraConfig(alpha=32.0)), "lora.alpha"),
        (FinetuneConfig(lora=LORA, frozen_layers=1), "frozen_layers"),
        (
            FinetuneConfig(lora=LORA, model=with_fields(BASE, {"head.features": "last"})),
            "model.head.features",
        ),
        (Config(model=ModelConfig(lora=LORA)), "model.lora.rank"),
    ],
)
def test_incompatible_settings_are_rejected(config, key):
    assert error_of(validate, config).startswith(f"config.{key} is")


def test_lora_without_a_checkpoint_is_rejected(tmp_path, capsys):
    data = tasks.write_table(tmp_path)
    message = refused(capsys, *tasks.arguments(data, tmp_path / "run", "lora.rank=2"))
    assert "config.lora.rank" in message


def test_run_learns_and_saves_a_merged_model(tmp_path):
    """Fine-tune adapters on a random base."""
    data = tasks.write_table(tmp_path)
    model = with_fields(
        BASE,
        {"layers": 1, "hidden": 16, "heads": 2, "feed_forward": 32, "positions": 32}
        | {"initializer_stddev": 0.2, "head.labels": ("no", "yes")},
    )
    write_run(tmp_path / "base", model, init_params(model, jax.random.key(0)), WORDS)
    changes = ["lora.rank=4", "lora.targets=('query','value','output')", "lora.dropout=0.1"]
    ours = [
        argument
        for argument in tasks.arguments(data, tmp_path / "run", *changes, init=tmp_path / "base")
        if not argument.startswith(("--config.model.", "--config.optim"))
    ]
    settings = ("optim.learning_rate=2e-2", "evaluate_every_steps=50")
    assert cli.main([*ours, *(f"--config.{setting}" for setting in settings)]) == 0
    run = tmp_path / "run"
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["dev"]["accuracy"] > 0.9
    config, _, params, _ = checkpoint.load_model(run)
    assert (config.model.lora.rank, config.lora.rank) == (0, 4)
    base = flatten(checkpoint.load_model(tmp_path / "base")[2])
    flat = flatten(params)
    assert flat.keys() == base.keys()
    changed = {path for path, value in flat.items() if not np.array_equal(value, base[path])}
    assert {path.split("/")[-2] for path in changed if path.startswith("encoder")} == {
        "query", "value", "output",
    }  # fmt: skip
    assert not any(path.startswith("embeddings") for path in changed)
    # The metrics of the merged model are the best ones of the adapters during training.
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    best = max(x["accuracy"] for x in lines if x["split"] == "heldout")
    assert metrics["dev"]["accuracy"] == pytest.approx(best)
