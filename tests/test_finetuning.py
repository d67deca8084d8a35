"""Fine-tuning: packing, equivalence with PyTorch, and which parameters are trained."""

import dataclasses
import json
import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bert_jax.config.model import FEATURES, HeadConfig, ModelConfig
from bert_jax.config.schema import Config, FinetuneConfig, OptimConfig, TaskConfig
from bert_jax.convert.huggingface import to_huggingface
from bert_jax.data import rows
from bert_jax.data.examples import NO_EXAMPLE
from bert_jax.errors import UserError
from bert_jax.inference.predict import _statistics, over_seeds
from bert_jax.model import bert, embeddings, encoder
from bert_jax.model.bert import Bert, init_params, shapes
from bert_jax.model.dropout import generator_key
from bert_jax.model.lstm import BiLSTM
from bert_jax.objectives import finetuning, warm_start
from bert_jax.objectives.finetuning import make_objective
from bert_jax.runtime import sharding
from bert_jax.runtime.sharding import shard_batch
from bert_jax.train import finetune
from bert_jax.training import optim
from bert_jax.training import state as state_lib
from bert_jax.training import step as step_lib
from bert_jax.training.log import EarlyStopping
from tests.helpers.checkpoints import random_params
from tests.helpers.examples import (
    HEADS,
    RandomExamples,
    model_config,
    plans,
)
from tests.helpers.models import flat, torch_bert

SEQUENCE, TOKEN = RandomExamples("sequence"), RandomExamples("token")


def loss_and_grads(dataset, plan, config, key=None):
    """Return a function (parameters, batch) -> ((loss, weight), gradients)."""
    task = make_objective(config, dataset, "train", plan)

    def loss(params, batch):
        inputs = task.make_inputs(batch, jax.random.key(0))
        total, weight = task.loss_terms(params, inputs, key)["loss"]
        return total / jnp.maximum(task.normalizers(inputs)["loss"], 1), weight

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def assert_trees_close(actual, expected, **tolerance):
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), actual, expected)


def updates(config, params, grads):
    """Return the optimizer's first updates by path."""

    @jax.jit
    def first(params, grads):
        transform = optim.make_optimizer(config)
        return transform.update(grads, transform.init(params), params)[0]

    return flat(jax.device_get(first(params, grads)))


# --- Objectives -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("head", "objective"), HEADS)
def test_padding_rows_and_unlabelled_examples_have_no_weight(head, objective):
    """Padding changes neither loss, gradients nor the units that dropout sets to zero."""
    dataset = RandomExamples(head, objective)
    config = model_config(dataset, layers=1, dropout=0.3, attention_dropout=0.3)
    params, plan = random_params(config), plans(dataset)[0]
    run = loss_and_grads(dataset, plan, config, generator_key(jax.random.key(1), "hash"))
    batch = plan.batch(1, 0)
    (loss, weight), grads = run(params, batch)
    labels = dataset.splits["train"].token_targets.get("label")
    assert weight == (sum(np.sum(labels[i] >= 0) for i in plan.members(1, 0)) if labels else 7)
    padding = plan.empty(plan.shape._replace(rows=3))
    padded = {k: np.concatenate([v, padding[k]]) for k, v in batch.items()}
    (other, other_weight), other_grads = run(params, padded)
    assert weight == other_weight
    np.testing.assert_allclose(other, loss, rtol=2e-6)
    assert_trees_close(other_grads, grads, rtol=1e-5, atol=1e-6)
    unknown = np.nan if batch["label"].dtype == np.float32 else NO_EXAMPLE
    (loss, weight), _ = run(params, {**batch, "label": np.full_like(batch["label"], unknown)})
    assert (float(loss), float(weight)) == (0, 0)


def test_accumulated_step_does_not_depend_on_row_count():
    """With dropout, rows dealt to accumulation parts, and each part split over devices."""
    dataset = RandomExamples("sequence", count=50)
    dataset.splits["dev"] = dataset.splits["train"]
    config = FinetuneConfig(
        model=model_config(dataset, layers=1, dropout=0.2, attention_dropout=0.2),
        task=TaskConfig(tokens=20), batch_size=16, accumulation=2, steps=3,
    )  # fmt: skip
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:2])
    config, _, plan, phase = finetuning.make_phase(config, dataset, [0], 2)
    init, shapes = state_lib.initial_state(config, phase, mesh)
    batch, results = plan.batch(0, 0), []
    for rows_ in (phase.batch_size, phase.batch_size + 4):
        padding = plan.empty(plan.shape._replace(rows=rows_ - phase.batch_size))
        padded = {k: np.concatenate([v, padding[k]]) for k, v in batch.items()}
        step = step_lib.compile_step(config, phase.with_rows(rows_), mesh, shapes)
        _, sums, _ = step(init(jnp.uint32(0)), shard_batch(padded, mesh))
        results.append({name: np.array(sums[name]) for name in ("loss", "gradient_norm")})
    assert_trees_close(results[1], results[0], rtol=2e-6)


def torch_model(dataset, config, params):
    """Return Transformers' model with the same head and weights."""
    name = {
        "sequence": "BertForSequenceClassification", "choice": "BertForMultipleChoice",
        "token": "BertForTokenClassification", "span": "BertForQuestionAnswering",
    }[dataset.head]  # fmt: skip
    kind = {"number": "regression", "classes": "multi_label_classification"}
    labels = {} if dataset.head in ("choice", "span") else {"num_labels": len(dataset.labels)}
    labels["problem_type"] = kind.get(dataset.objective)
    return torch_bert(name, config, to_huggingface(params, config), **labels)


def torch_inputs(dataset, members):
    """Return training examples as inputs of Transformers' model, padded to the longest."""
    examples, head = dataset.splits["train"], dataset.head
    sequences = [i * examples.group + j for i in members for j in range(examples.group)]
    longest = max(len(examples.tokens[i]) for i in sequences)
    ids, mask, types = (np.zeros((len(sequences), longest), int) for _ in range(3))
    for row, i in enumerate(sequences):
        n = len(examples.tokens[i])
        ids[row, :n], mask[row, :n], types[row, examples.a_length[i] : n] = examples.tokens[i], 1, 1
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    inputs = {k: torch.tensor(v) for k, v in inputs.items()}
    if head == "choice":
        inputs = {k: v.reshape(len(members), 3, -1) for k, v in inputs.items()}
    if head == "token":
        label = np.full((len(members), longest), -100)
        for row, i in enumerate(members):
            own = examples.token_targets["label"][i]
            label[row, : len(own)] = np.where(own == NO_EXAMPLE, -100, own)
        return inputs | {"labels": torch.tensor(label)}
    label = torch.tensor(examples.targets["label"][members])
    if head == "span":
        return inputs | {"start_positions": label[:, 0].long(), "end_positions": label[:, 1].long()}
    return inputs | {"labels": label.long() if dataset.objective == "class" else label}


@pytest.mark.parametrize(("head", "objective"), HEADS)
def test_losses_and_logits_match_transformers(head, objective):
    """Transformers gets one batch, padded to its longest sequence; ours is packed."""
    dataset = RandomExamples(head, objective, count=7)
    config = model_config(dataset)
    params = random_params(config)
    model = torch_model(dataset, config, params).eval()
    plan = plans(dataset, 7, 1)[0]
    examples, members = dataset.splits["train"], plan.members(0, 0)
    inputs = torch_inputs(dataset, members)
    with torch.no_grad():
        out = model(**inputs)
        if head == "span":  # Transformers also scores padding; ours has none
            big = torch.finfo(torch.float32).min
            theirs = [torch.where(inputs["attention_mask"] == 1, x, big) for x in (out.start_logits, out.end_logits)]  # fmt: skip
            label = inputs["start_positions"], inputs["end_positions"]
            expected = sum(map(torch.nn.functional.cross_entropy, theirs, label)) / 2
        else:
            expected = out.loss
    (loss, _), _ = loss_and_grads(dataset, plan, config)(params, plan.batch(0, 0))
    assert abs(float(loss) - float(expected)) <= 1e-5

    task = make_objective(config, dataset, "train", plan)
    batch = plan.batch(0, 0)
    inputs = jax.jit(task.make_inputs)(batch, jax.random.key(0))
    logits = jax.jit(task.predict)(params, inputs)
    result = task.logits("train", [(batch, jax.device_get(logits))])
    for row, i in enumerate(members):
        n = len(examples.tokens[i])
        if head == "span":
            theirs = np.stack([out.start_logits[row, :n], out.end_logits[row, :n]], -1)
        else:
            theirs = out.logits[row, :n] if head == "token" else out.logits[row]
        np.testing.assert_allclose(result[i], theirs, rtol=0, atol=1e-5)


def test_training_run_matches_pytorch():
    """Every loss of six epochs: packing, weights, clipping, AdamW, decay exclusions, schedule."""
    dataset = RandomExamples("sequence", count=30)
    dataset.splits["dev"] = dataset.splits["train"]
    optimizer = OptimConfig(optimizer="adamw", learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5)
    config = FinetuneConfig(
        model=model_config(dataset, positions=128),
        batch_size=7,
        epochs=6.0,
        log_every_steps=1,
        optim=optimizer,
    )
    config, _, _, phase = finetuning.make_phase(config, dataset, [config.seed], 1)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    init, shapes = state_lib.initial_state(config, phase, mesh)
    step = step_lib.compile_step(config, phase, mesh, shapes)
    state = init(jnp.uint32(config.seed))

    model = torch_model(dataset, config.model, jax.device_get(state.params))
    bare = [name.endswith("bias") or "LayerNorm" in name for name, _ in model.named_parameters()]
    groups = [
        {"params": [w for w, b in zip(model.parameters(), bare, strict=True) if b is kind], "weight_decay": decay}
        for kind, decay in ((False, 0.1), (True, 0.0))
    ]  # fmt: skip
    reference = torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)
    warmup = config.optim.warmup_steps
    assert (config.steps, warmup) == (25, 2)
    for number, batch in enumerate(phase.batches(0, config.steps, 0, 1)):
        state, sums, _ = step(state, shard_batch(batch, mesh))
        result = float(sums["loss"][0] / sums["loss"][1])
        loss = model(**torch_inputs(dataset, phase.row_indices(number))).loss
        assert result == pytest.approx(loss.item(), abs=1e-4), number
        reference.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in reference.param_groups:
            part = number / warmup if number < warmup else 1 - number / config.steps
            group["lr"] = 1e-2 * part
        reference.step()
    theirs = model.state_dict()
    for name, value in to_huggingface(jax.device_get(state.params), config.model).items():
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=2e-3, err_msg=name)


# --- Trained parameters ---------------------------------------------------------------------------


def test_encoder_and_pooler_are_restored_without_heads():
    start = model_config(SEQUENCE, masked_lm=True, next_sentence=True)
    params = random_params(start)
    assert "classifier" in params  # of another task with the same number of labels
    config = FinetuneConfig(model=model_config(SEQUENCE), reset_layers=1)
    taken, new = warm_start.select_params(config, start, params)
    assert new == ["encoder/layer_1", "classifier"]
    left_out = ("classifier", "encoder/layer_1/", "masked_lm", "next")
    assert not any(path.startswith(left_out) for path in flat(taken))
    assert {"pooler/kernel", "encoder/layer_0/attention/query/kernel"} <= flat(taken).keys()
    config = FinetuneConfig(model=model_config(TOKEN))
    taken, new = warm_start.select_params(config, start, params)
    assert new == ["classifier"]
    assert "pooler" not in taken
    bare = dataclasses.replace(start, next_sentence=False, head=HeadConfig())
    config = FinetuneConfig(model=model_config(SEQUENCE))
    assert warm_start.select_params(config, bare, params)[1] == ["classifier", "pooler"]


def test_head_transform_is_initialized_from_the_masked_lm():
    start = model_config(SEQUENCE, masked_lm=True, head=HeadConfig())
    params = random_params(start)
    transform = ModelConfig(head=HeadConfig(layer="transform", pooling="mean"))
    model = warm_start.model_config(FinetuneConfig(model=transform), start, SEQUENCE)
    assert (model.head.layer, model.head.pooling) == ("transform", "mean")
    taken, new = warm_start.select_params(FinetuneConfig(model=model), start, params)
    assert new == ["classifier"]
    assert taken["head"] == {name: params["masked_lm"][name] for name in ("transform", "norm")}
    assert {*shapes(model)} - {*taken} == {"classifier"}
    # The checkpoint's head layer is kept unless the config sets another.
    kept = warm_start.model_config(FinetuneConfig(), model, TOKEN)
    assert kept.head.layer == "transform"
    taken, new = warm_start.select_params(FinetuneConfig(model=kept), model, random_params(model))
    assert "head" in taken
    assert new == ["classifier"]
    # The masked-LM head of a model with smaller embeddings has another shape.
    for changes in ({"masked_lm": False}, {"embedding_size": start.hidden // 2}):
        other = dataclasses.replace(start, **changes)
        config = FinetuneConfig(
            model=dataclasses.replace(model, embedding_size=other.embedding_size)
        )
        taken, new = warm_start.select_params(config, other, random_params(other))
        assert new == ["classifier", "head"]
        assert "head" not in taken


def test_modules_above_the_encoder_are_reinitialized():
    start = model_config(SEQUENCE, **{"head.lstm_layers": 2, "head.features": "weighted-all"})
    asked = FinetuneConfig(model=ModelConfig(head=HeadConfig(lstm_layers=1)))
    model = warm_start.model_config(asked, start, SEQUENCE)
    assert (model.head.lstm_layers, model.head.features) == (
        1,
        "",
    )  # from the config, not the checkpoint
    for changes, new in (
        (
            {"head.lstm_layers": 2, "head.features": "weighted-all"},
            ["classifier", "features", "lstm"],
        ),
        ({"head.features": "last"}, ["classifier"]),
        ({}, ["classifier", "pooler"]),
    ):
        config = FinetuneConfig(model=model_config(SEQUENCE, **changes))
        taken, result = warm_start.select_params(config, start, random_params(start))
        assert result == new
        assert taken.keys() == {"embeddings", "encoder"}
        assert {*shapes(config.model)} - {*taken} == {*new}


def states_and_logits(config, params, length):
    """Return all hidden states and the logits of random rows, and the rows' layout."""
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(1, 40, (len(length), int(length.sum(1).max()) + 2)))
    layout = rows.layout(jnp.asarray(length), jnp.asarray(length), tokens.shape[1])
    outputs = Bert(config).apply({"params": params}, tokens, layout)
    return outputs.states, outputs.head, layout


@pytest.mark.parametrize("causal", [False, True])
def test_pooled_token_is_the_first_or_the_last_if_causal(causal):
    """With causal attention only the last token sees all. Only the last layer has a pooler."""
    length = np.array([[5, 9], [12, 3]])
    places = length.cumsum(1) - 1 if causal else length.cumsum(1) - length
    for changes in ({}, {"head.lstm_layers": 1}, {"head.features": "second-to-last"}):
        config = model_config(SEQUENCE, causal=causal, **changes)
        params = random_params(config)
        states, logits, layout = states_and_logits(config, params, length)
        assert ("pooler" in params) == (not changes)
        x = states[1] if config.head.features else states[2]
        if config.head.lstm_layers:
            x = BiLSTM(config).apply({"params": params["lstm"]}, x, layout.segment_ids)
        x = np.take_along_axis(np.array(x), places[:, :, None], 1)
        if not changes:
            x = np.tanh(x @ params["pooler"]["kernel"] + params["pooler"]["bias"])
        expected = x @ params["classifier"]["kernel"] + params["classifier"]["bias"]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FEATURES[1:])
def test_features_are_those_of_the_configured_layers(name):
    config = model_config(TOKEN, layers=5, **{"head.features": name})
    params = random_params(config)
    states, logits, _ = states_and_logits(config, params, np.array([[7]]))
    if name.startswith("weighted-"):
        initial = init_params(config, jax.random.key(0))["features"]  # the mean of the layers
        assert (initial["scale"], *initial["weights"]) == (
            1,
            *[0] * len(params["features"]["weights"]),
        )
        weights = np.exp(params["features"]["weights"])
        weights *= params["features"]["scale"] / weights.sum()
        own = states[1:] if name == "weighted-all" else states[2:]
        x = sum(w * state for w, state in zip(weights, own, strict=True))
    else:
        own = {"embeddings": states[:1], "second-to-last": states[4:5], "last": states[5:]}
        x = np.concatenate(own.get(name, states[2:]), -1)
    expected = x @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


def test_feature_encoder_has_no_dropout_and_no_gradient():
    plan = plans(TOKEN)[0]
    config = model_config(
        TOKEN, dropout=0.5, attention_dropout=0.5, **{"head.features": "weighted-all"}
    )
    params, batch = random_params(config), plan.batch(0, 0)
    grads = flat(loss_and_grads(TOKEN, plan, config)(params, batch)[1])
    for path, value in grads.items():
        assert np.any(value) != path.startswith(("embeddings/", "encoder/")), path
    seen = []
    task = make_objective(config, TOKEN, "train", plan)
    inputs = jax.jit(task.make_inputs)(batch, jax.random.key(0))
    with pytest.MonkeyPatch.context() as patch:
        for module in (embeddings, encoder, bert):
            patch.setattr(module, "dropout", lambda x, rate, key: (seen.append(key), x)[1])
        arguments = (inputs.tokens, inputs.layout, None, jax.random.key(0), ("head",))
        jax.eval_shape(lambda: Bert(config).apply({"params": params}, *arguments))
    # On the embeddings, twice in the function that both layers call, and on the input of the head.
    assert [key is not None for key in seen] == [False] * 3 + [True]


def test_frozen_layers_and_layer_wise_learning_rate_decay():
    model = model_config(SEQUENCE)
    params = random_params(model)
    values = dict(warmup_steps=0, weight_decay=0.1, layer_decay=0.5, clip_norm=0.0)
    optimizer = OptimConfig(optimizer="adamw", **values)
    config = FinetuneConfig(model=model, steps=10, frozen_layers=1, optim=optimizer)
    changes = updates(config, params, jax.tree.map(np.ones_like, params))
    state = str(jax.tree_util.tree_leaves_with_path(optim.make_optimizer(config).init(params)))
    assert "layer_1" in state
    assert "layer_0" not in state  # no moments
    for path in ("embeddings/word/embedding", "encoder/layer_0/attention/norm/bias"):
        assert not changes[path].any()
    assert optim.learning_rate_multipliers(config, params)["classifier"]["bias"] == 1
    top, layer = changes["classifier/bias"], changes["encoder/layer_1/attention/norm/bias"]
    np.testing.assert_allclose(layer.mean(), top.mean() / 4, rtol=1e-5)

    def total(params):
        leaves = jax.tree.leaves(optim.stop_frozen_gradients(config, params))
        return sum(jnp.sum(leaf) for leaf in leaves)

    for path, grads in flat(jax.grad(total)(params)).items():
        assert np.all(grads) != path.startswith(("embeddings/", "encoder/layer_0/")), path


def test_frozen_layers_do_not_decay_without_layer_decay():
    params = {"embeddings": {"word": np.ones(3)}, "classifier": {"kernel": np.ones(3)}}
    optimizer = OptimConfig(warmup_steps=0, weight_decay=0.1)
    config = FinetuneConfig(steps=10, frozen_layers=1, optim=optimizer)
    changes = updates(config, params, jax.tree.map(np.zeros_like, params))
    assert not np.any(changes["embeddings/word"])
    assert np.any(changes["classifier/kernel"])


RELU = {"pooler_activation": "relu"}


@pytest.mark.parametrize(
    ("start", "config", "keys", "expected"),
    [
        # Dropout is a setting of the run, even if the model was pretrained without dropout.
        ({}, {"dropout": 0.3}, [], {"dropout": 0.3, "attention_dropout": 0.1, "layers": 2}),
        ({"causal": True}, {}, [], {"causal": True}),
        ({"head.pooling": "mean"}, {}, [], {"head.pooling": "mean"}),
        # A setting of the user counts even at its default.
        ({"head.pooling": "mean"}, {}, ["model.head.pooling"], {"head.pooling": "cls"}),
        # A new pooler has the activation of the family.
        ({}, {}, [], {"pooler_activation": "tanh"}),
        ({"family": "electra"}, {}, [], {"pooler_activation": "gelu"}),
        ({"family": "electra", "next_sentence": True}, {}, [], {"pooler_activation": "tanh"}),
        ({"family": "electra"}, RELU, [], RELU),
    ],
)
def test_model_config_comes_from_the_checkpoint(start, config, keys, expected):
    start = model_config(SEQUENCE, **{"head.kind": "", "head.labels": (), **start})
    config = FinetuneConfig(model=ModelConfig(**config))
    model = warm_start.model_config(config, start, SEQUENCE, keys)
    assert {name: operator.attrgetter(name)(model) for name in expected} == expected
    assert (model.masked_lm, model.next_sentence) == (False, False)
    tagging = warm_start.model_config(FinetuneConfig(), start, TOKEN)
    assert tagging.pooler_activation == start.pooler_activation  # it has no pooler


@pytest.mark.parametrize(
    ("start", "config", "keys", "message"),
    [
        ({}, {"layers": 3}, [], "layers is 3, the checkpoint's is 2"),
        ({}, {"causal": True}, [], "causal is True"),
        ({"activation": "gelu_tanh"}, {}, ["model.activation"], "activation is 'gelu'"),
    ],
)
def test_settings_that_contradict_the_checkpoint_are_refused(start, config, keys, message):
    config = FinetuneConfig(model=ModelConfig(**config))
    with pytest.raises(UserError, match=message):
        warm_start.model_config(config, model_config(SEQUENCE, **start), SEQUENCE, keys)


def test_early_stopping_depends_only_on_recorded_metrics(tmp_path):
    best = {"best_by": "f1", "highest": True, "since": 0}
    config, scores = FinetuneConfig(patience=2), [1.0, 3.0, 2.0, 3.0, 4.0]
    lines = [{"step": i, "split": "heldout", "f1": f1} for i, f1 in enumerate(scores)]
    lines.insert(1, {"step": 0, "split": "train", "f1": 9})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def stopping(step, since=0, config=config):
        return EarlyStopping(config, best | {"since": since}, tmp_path, step)

    assert [stopping(step).is_over for step in range(5)] == [False, False, False, True, False]
    assert stopping(2, config=FinetuneConfig(patience=1)).is_over
    assert not stopping(3, config=Config()).is_over
    # Evaluations on the rows of earlier phases do not count.
    assert stopping(2).best == (1, 3)
    # The last of tied evaluations, whose checkpoint is kept.
    assert stopping(3).best == (3, 3)
    assert stopping(2, since=2).best == (2, 2)
    assert not stopping(3, since=2).is_over


def test_multiple_processes_are_rejected(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="BERT_JAX_COORDINATOR"):
        finetune(FinetuneConfig(), "none", tmp_path / "w")


def test_statistics_over_seeds():
    statistics = _statistics([0.5, 0.7, 0.9])
    expected = {"mean": 0.7, "sd": 0.2, "median": 0.7, "best": 0.9, "values": [0.5, 0.7, 0.9]}
    assert statistics == {k: pytest.approx(v) for k, v in expected.items()}
    results = [
        {"seed": 3, "best_by": "f1", "step": 7, "dev": {"f1": f1, "mean_squared_error": f1, **more}}
        for f1, more in ((0.5, {"f1_x": 0.0}), (0.7, {}))
    ]
    summary = over_seeds(results)
    # f1_x is left out, because only one seed predicted this type.
    assert summary["dev"].keys() == {"f1", "mean_squared_error"}
    assert summary["dev"]["f1"]["best"] == 0.7
    assert summary["dev"]["mean_squared_error"]["best"] == 0.5
