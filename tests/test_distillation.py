"""Distillation: losses against PyTorch and NumPy, packed rows, the frozen teacher, fine-tuning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bert_jax.config import flags
from bert_jax.config.checks import validate
from bert_jax.config.schema import Config, DistillConfig, MaskingConfig, MeshConfig, PhaseConfig
from bert_jax.config.sizes import model_size
from bert_jax.data import vocabulary_files
from bert_jax.data.rows import Layout, RowFormat, layout
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert, flatten
from bert_jax.model.flops import flops_per_row
from bert_jax.objectives import distillation, pretraining, warm_start
from bert_jax.objectives.distillation import Distilled
from bert_jax.objectives.finetuning import make_objective
from bert_jax.objectives.warm_start import Teacher
from bert_jax.runtime import sharding
from bert_jax.training import optim
from bert_jax.training import state as state_lib
from bert_jax.training import step as step_lib
from tests.helpers.checkpoints import error_of, random_params, write_run
from tests.helpers.examples import RandomExamples, model_config, plans
from tests.helpers.runs import arguments

VOCAB, T = 40, 32
STUDENT = dataclasses.replace(
    model_size("L1-H16-A2"), vocab_size=VOCAB, vocab_multiple=32, positions=T,
    dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
TEACHER = dataclasses.replace(STUDENT, layers=2, hidden=24, heads=3, vocab_multiple=1)
ALL = DistillConfig(
    teacher="x", labels=0.5, logits=2.0, temperature=3.0, hidden=0.25, relations=0.75,
    relation_layer=1, relation_heads=4,
)  # fmt: skip


def kl(teacher, student):
    """Return PyTorch's KL(teacher || student) of log-probabilities, [...]."""
    options = {"reduction": "none", "log_target": True}
    return torch.nn.functional.kl_div(student, teacher, **options).sum(-1)


LENGTH = np.array([[12, 9, 8], [32, 0, 0], [20, 5, 0]], np.int32)
A_LENGTH = np.array([[5, 9, 6], [32, 0, 0], [11, 5, 0]], np.int32)


def make():
    """Return the objective, the inputs of packed rows, and the parameters of both models."""
    params, teacher_params = (
        jax.tree.map(jnp.asarray, random_params(m, i)) for i, m in enumerate((STUDENT, TEACHER))
    )
    args = (STUDENT, MaskingConfig(rate=0.3), RowFormat(T, 3, VOCAB), 3, np.zeros(VOCAB, bool))
    objective = Distilled(ALL, Teacher(TEACHER, teacher_params), *args)
    params["teacher_projection"] = objective.init(jax.random.key(5))["teacher_projection"]
    tokens = np.random.default_rng(0).integers(5, VOCAB, (3, T)).astype(np.int32)
    label = (LENGTH > 0) - 1 + (LENGTH > 10)
    batch = {"tokens": tokens, "length": LENGTH, "a_length": A_LENGTH, "label": label}
    batch = jax.tree.map(jnp.asarray, batch)
    inputs = jax.jit(objective.make_inputs)(batch, jax.random.key(1))
    return objective, inputs, distillation.with_teacher(params, teacher_params)


def student_params(both):
    return {name: value for name, value in both.items() if name != "teacher"}


def forward(config):
    """Return a function (params, tokens, layout) -> (states of all layers, masked-LM logits)."""

    def run(params, tokens, one):
        outputs = Bert(config).apply({"params": params}, tokens, one)
        return jnp.stack(outputs.states), outputs.masked_lm

    return jax.jit(run)


def test_losses_of_packed_rows_match_unpacked_reference():
    """The reference applies the papers' formulas to one sequence at a time."""
    objective, inputs, params = make()
    terms = jax.jit(objective.loss_terms)(params, inputs, None)
    normalizers = objective.normalizers(inputs)
    hidden, relations, logits, count = 0.0, 0.0, 0.0, 0
    projection = jax.tree.map(np.array, params["teacher_projection"])
    models = (
        (forward(objective.model.config), student_params(params)),
        (forward(TEACHER), params["teacher"]),
    )
    for row in range(3):
        start = 0
        for n, a in zip(LENGTH[row].tolist(), A_LENGTH[row].tolist(), strict=True):
            if not n:
                continue
            one = Layout(*map(jnp.asarray, layout(np.array([[n]]), np.array([[a]]), T)))
            tokens = np.array(inputs.masked.tokens[row, start : start + n])
            tokens = jnp.asarray(np.pad(tokens, (0, T - n))[None])
            states, vectors, predictions = [], [], []
            for run, own in models:
                x, words = (np.array(y)[..., 0, :n, :] for y in run(own, tokens, one))
                states.append(x)
                # Relations come from the first layer of both models.
                attention = jax.tree.map(np.array, own["encoder"]["layer_0"]["attention"])
                projected = [
                    np.einsum("td,dnk->tnk", x[0], attention[name]["kernel"])
                    + attention[name]["bias"]
                    for name in ("query", "key", "value")
                ]
                vectors.append([torch.tensor(y).reshape(n, 4, -1) for y in projected])
                predictions.append(words)
            for x, y in zip(states[0], [states[1][0], states[1][2]], strict=True):
                x = x @ projection["kernel"] + projection["bias"]
                hidden += ((x - y) ** 2).mean(-1).sum()
            for x, y in zip(*vectors, strict=True):
                logs = [
                    torch.log_softmax(torch.einsum("qad,tad->aqt", z, z) / z.shape[-1] ** 0.5, -1)
                    for z in (y, x)
                ]
                relations += kl(*logs).mean(0).sum().item()
            weights, places = (np.array(x[row]) for x in inputs.masked[3:0:-2])
            inside = (weights > 0) & (places >= start) & (places < start + n)
            at = places[inside] - start
            x, y = (torch.log_softmax(torch.tensor(p[at, :VOCAB]) / 3, -1) for p in predictions)
            logits += kl(y, x).sum().item() * 9
            start, count = start + n, count + n
    for name, expected in (
        (distillation.HIDDEN, hidden), (distillation.RELATIONS, relations),
        (distillation.LOGITS, logits),
    ):  # fmt: skip
        np.testing.assert_allclose(terms[name][0], expected, rtol=2e-4, err_msg=name)
        assert terms[name][1] == normalizers[name]
    assert float(terms[distillation.HIDDEN][1]) == count == LENGTH.sum()
    means = {name: float(x / y) for name, (x, y) in terms.items()}
    weights = {"masked_lm_loss": 0.5, "next_sentence_loss": 1, distillation.LOGITS: 2}
    weights |= {distillation.HIDDEN: 0.25, distillation.RELATIONS: 0.75}
    loss = sum(weight * means[name] for name, weight in weights.items())
    assert objective.summarize(means)["loss"] == pytest.approx(loss)
    plain = flops_per_row(objective.model.config, T, 3, objective.masker.predictions)
    teacher = flops_per_row(TEACHER, T, 3, objective.masker.predictions) / 3
    more = 3 * 2 * T * T * (3 * 16 + 24) + 3 * 2 * T * 16 * 24 * 2
    assert objective.flops_per_row == pytest.approx(plain + teacher + more)


@pytest.mark.parametrize(
    ("distill", "teacher", "key"),
    [
        ({}, {"causal": True, "next_sentence": False}, "causal"),
        ({}, {"positions": 16}, "16 positions"),
        ({"hidden": 1.0}, {"layers": 3}, "3 layers"),
        ({"relations": 1.0, "relation_layer": 5}, {}, "2 layers"),
        ({"relations": 1.0, "relation_heads": 3}, {}, "3 heads"),
    ],
)
def test_incompatible_teacher_is_rejected(distill, teacher, key):
    student, teacher = (
        dataclasses.replace(model, **changes)
        for model, changes in ((STUDENT, {"layers": 2}), (TEACHER, teacher))
    )
    config = DistillConfig(teacher="x", **distill)
    assert key in error_of(distillation.check, config, student, teacher, T)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"temperature": 2.0}, "config.distill.temperature"),
        ({"teacher": "x", "relation_heads": 2}, "config.distill.relation_heads"),
        ({"teacher": "x", "labels": 0.0, "logits": 0.0}, "every weight is 0"),
    ],
)
def test_invalid_distill_config_is_rejected(changes, key):
    assert key in error_of(validate, Config(distill=DistillConfig(**changes)))


def test_teacher_is_frozen_and_not_checkpointed(rows, tmp_path):
    """The teacher is part of the training step and sharded like the parameters."""
    vocabulary = vocabulary_files.load(rows())
    teacher = dataclasses.replace(TEACHER, vocab_size=len(vocabulary))
    folder = write_run(tmp_path / "teacher", teacher, random_params(teacher), vocabulary.tokens)
    changes = (
        f"distill.teacher={folder}", "distill.hidden=1.0", "distill.relations=1.0", "model.positions=32",
        "distill.relation_heads=4", "model.hidden=16", "model.feed_forward=32", "optim.warmup_steps=0",
    )  # fmt: skip
    config = flags.load(arguments(*changes))
    config.phases = (PhaseConfig(rows=str(rows())),)
    config, _, data, (phase,) = pretraining.make_phases(config)
    assert len(data[0]["teacher"]) == 64
    _, shapes = state_lib.initial_state(config, phase, sharding.make_mesh(MeshConfig(fsdp=2)))
    for name in ("encoder/layer_0/feed_forward/output/kernel", "embeddings/word/embedding"):
        own, theirs = (flatten(p)[name] for p in (shapes.params, shapes.teacher))
        assert own.sharding.spec == theirs.sharding.spec
        assert "fsdp" in theirs.sharding.spec

    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    init, shapes = state_lib.initial_state(config, phase, mesh)
    state = state_lib.place_teacher(init(jnp.uint32(0)), phase.objective, shapes)
    params, rest = state_lib.checkpoint_parts(state)
    assert "teacher" not in {*params, *rest}
    assert jax.tree.structure(state.optimizer) == jax.tree.structure(
        optim.make_optimizer(config).init(state.params)
    )
    batch = next(phase.batches(0, 1, 0, 1))
    after, sums, stats = jax.jit(step_lib.make_step(config, phase))(state, batch)
    jax.tree.map(np.testing.assert_array_equal, after.teacher, phase.objective.teacher)
    changed = flatten(jax.tree.map(lambda a, b: bool((a != b).any()), after.params, state.params))
    assert changed["teacher_projection/kernel"]
    assert changed["encoder/layer_0/attention/query/kernel"]
    names = (distillation.LOGITS, distillation.HIDDEN, distillation.RELATIONS)
    means = {name: float(sums[name][0] / sums[name][1]) for name in sums if name[0] != "_"}
    assert all(means[name] > 0 for name in names)
    assert float(stats.loss_and_grad_norm[0]) == pytest.approx(
        phase.objective.summarize(means)["loss"], rel=1e-5
    )


def test_tokenizer_of_the_teacher_may_be_saved_again(monkeypatch):
    """Other versions of transformers write other settings to tokenizer_config.json."""
    tokens = (*SPECIAL, *"abc")
    config = Config(model=dataclasses.replace(TEACHER, vocab_size=len(tokens)))
    config.distill = DistillConfig(teacher="x")

    def open_teacher(tokenizer=b"{}", settings=b"{}"):
        files = (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings))
        teacher = config, Vocabulary(tokens, False, files=files), {}, 0
        monkeypatch.setattr(warm_start, "open_model", lambda *_: teacher)
        files = (("tokenizer.json", b"{}"), ("tokenizer_config.json", b"{}"))
        warm_start.open_teacher(config, Vocabulary(tokens, False, files=files))

    open_teacher(settings=b'{"version": "5"}')
    for change in ({"tokenizer": b'{"added": 1}'}, {"settings": b'{"mask_token": "a"}'}):
        with pytest.raises(UserError, match="another vocabulary"):
            open_teacher(**change)


def make_finetuning(dataset, config, teacher, distill):
    """Return the objective, the inputs of packed examples, and the parameters of both models."""
    packed, _ = plans(dataset)
    objective = make_objective(config, dataset, "train", packed)
    params, teacher_params = (
        jax.tree.map(jnp.asarray, random_params(m, i)) for i, m in enumerate((config, teacher))
    )
    objective.distill(distill, Teacher(teacher, teacher_params))
    params = objective.init(jax.random.key(5)) | params
    inputs = jax.jit(objective.make_inputs)(packed.batch(0, 0), jax.random.key(0))
    return objective, inputs, distillation.with_teacher(params, teacher_params)


@pytest.mark.parametrize(
    ("head", "kind"), [("sequence", "class"), ("sequence", "number"), ("token", "class")]
)
def test_finetuning_logit_loss_matches_pytorch(head, kind):
    dataset = RandomExamples(head, kind)
    config, teacher = model_config(dataset, layers=1), model_config(dataset)
    distill = DistillConfig(teacher="x", labels=0.5, temperature=2.0)
    objective, inputs, both = make_finetuning(dataset, config, teacher, distill)
    terms = jax.jit(objective.loss_terms)(both, inputs, None)
    weights = np.array(objective.loss_weights(inputs))
    logits = (
        jax.jit(Bert(m).apply)({"params": p}, inputs.tokens, inputs.layout).head
        for m, p in ((config, student_params(both)), (teacher, both["teacher"]))
    )
    student, taught = (torch.tensor(np.array(x)) for x in logits)
    if kind == "number":
        each = ((student - taught) ** 2)[..., 0]
    else:
        each = 4 * kl(*(torch.log_softmax(x / 2, -1) for x in (taught, student)))
    np.testing.assert_allclose(
        terms[distillation.LOGITS][0], (each.numpy() * weights).sum(), rtol=1e-4
    )
    assert terms[distillation.LOGITS][1] == objective.normalizers(inputs)["loss"] == weights.sum()
    used = {name: scale for name, scale in objective.loss_scales.items() if scale}
    assert used == {"loss": 0.5, distillation.LOGITS: 1.0}
    assert "labels" in error_of(objective.distill, distill, Teacher(TEACHER, {}))


def test_finetuning_hidden_and_relation_losses():
    """Both losses cover the tokens of packed examples and leave the other terms unchanged."""
    dataset = RandomExamples("sequence", "class")
    teacher = dataclasses.replace(model_config(dataset), layers=2, hidden=24, heads=3)
    config = model_config(dataset, layers=1, dropout=0.1)
    distill = DistillConfig(
        teacher="x", hidden=0.5, relations=2.0, relation_layer=1, relation_heads=4
    )
    objective, inputs, both = make_finetuning(dataset, config, teacher, distill)
    plain, *_ = make_finetuning(dataset, config, teacher, DistillConfig(teacher="x"))
    key = jax.random.key(3)
    terms, others = (jax.jit(x.loss_terms)(both, inputs, key) for x in (objective, plain))
    for name in others:  # with equal dropout
        np.testing.assert_allclose(terms[name], others[name], rtol=1e-5, err_msg=name)
    assert {*terms} - {*others} == {distillation.HIDDEN, distillation.RELATIONS}
    scales = [objective.loss_scales[x] for x in (distillation.HIDDEN, distillation.RELATIONS)]
    assert scales == [0.5, 2.0]
    extra = objective.flops_per_row - plain.flops_per_row
    tokens = inputs.tokens.shape[1]
    assert extra == 3 * 2 * (tokens**2 * (3 * 12 + 24) + 2 * tokens * 12 * 24)

    normalizers = objective.normalizers(inputs)
    real = np.array(inputs.layout.segment_ids) < inputs.example.shape[1]
    for name in (distillation.HIDDEN, distillation.RELATIONS):
        assert terms[name][1] == normalizers[name] == real.sum()
        assert terms[name][0] > 0
    deep = dataclasses.replace(config, layers=3)
    assert "2 layers" in error_of(make_finetuning, dataset, deep, teacher, distill)


def test_teacher_needs_positions_for_the_longest_sequence_only():
    dataset, distill = RandomExamples("sequence"), DistillConfig(teacher="x")
    plan, longest = plans(dataset)[0], max(map(len, dataset.splits["train"].tokens))
    assert plan.shape.tokens > longest
    objective = make_objective(model_config(dataset), dataset, "train", plan)
    teachers = [Teacher(model_config(dataset, positions=longest - i), {}) for i in (0, 1)]
    objective.distill(distill, teachers[0])
    assert f"{longest} tokens" in error_of(objective.distill, distill, teachers[1])


def test_span_task_cannot_be_distilled():
    dataset = RandomExamples("span")
    objective = make_objective(model_config(dataset), dataset, "train", plans(dataset)[0])
    teacher = Teacher(TEACHER, {})
    assert "classification" in error_of(objective.distill, DistillConfig(teacher="x"), teacher)
