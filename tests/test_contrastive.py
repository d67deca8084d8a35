"""Contrastive fine-tuning: loss and gradients against PyTorch, packing, devices, SimCSE, runs."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import torch

from bert_jax import cli
from bert_jax.config.flags import load
from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import EmbedConfig, FinetuneConfig, MeshConfig, TaskConfig
from bert_jax.convert.huggingface import to_huggingface
from bert_jax.data.examples import NO_EXAMPLE, Examples, PackedBatches
from bert_jax.objectives import finetuning, warm_start
from bert_jax.runtime import sharding
from bert_jax.runtime.sharding import shard_batch
from bert_jax.tasks.pairs import Pairs
from tests.helpers import tasks
from tests.helpers.checkpoints import error_of, random_params
from tests.helpers.models import torch_bert
from tests.helpers.runs import VOCABULARY, refused

MODEL = ModelConfig(
    layers=2, hidden=12, heads=3, feed_forward=20, vocab_size=40, positions=64, dropout=0.0,
    attention_dropout=0.0, masked_lm=False, next_sentence=False,
)  # fmt: skip
BATCH, SCALE = 9, 7.0


class RandomPairs(Pairs):
    """A dataset of random token sequences."""

    best_by, report = "spearman", []

    def __init__(self, texts_per_example, count=20, seed=0):
        rng = np.random.default_rng(seed)
        tokens = [
            np.array([2, *rng.integers(5, 40, rng.integers(1, 18)), 3], np.int32)
            for _ in range(count * texts_per_example)
        ]
        lengths = [len(x) for x in tokens]
        self.texts_per_example = texts_per_example
        self.config = TaskConfig(kind="pairs", scale=SCALE)
        train = Examples(tokens, lengths, group=texts_per_example)
        self.splits = {"train": train, "dev": Examples(tokens, lengths)}


def plan_of(dataset, **options):
    return PackedBatches(dataset.splits["train"], BATCH, 3, **options)


def loss_and_grads(dataset, plan, params, pooling="mean", devices=1, model=MODEL, key=None):
    """Return the loss, the loss terms and the gradients for the batch of step 1."""
    embed = EmbedConfig(pooling=pooling)
    task = finetuning.make_objective(model, dataset, "dev", plan, embed)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:devices])

    @jax.jit
    def run(params, batch):
        def loss(params):
            inputs = task.make_inputs(batch, jax.random.key(0))
            terms = task.loss_terms(params, inputs, key)
            return terms["loss"][0] / task.normalizers(inputs)["loss"], terms

        return jax.value_and_grad(loss, has_aux=True)(params)

    params = jax.device_put(params, sharding.replicated(mesh))
    (loss, terms), grads = run(params, shard_batch(plan.batch(1, 0), mesh))
    return float(loss), jax.device_get(terms), jax.device_get(grads)


@functools.cache
def reference(texts_per_example, pooling, count, dimensions=(12,)):
    """Compute sentence-transformers' MultipleNegativesRankingLoss in PyTorch, in its MatryoshkaLoss.

    If an example is twice in the batch, its other texts are left out of the candidates.

    Returns:
        The loss, the number of correctly ranked anchors, and the gradients by parameter name.
    """
    dataset = RandomPairs(texts_per_example, count)
    tensors = to_huggingface(random_params(MODEL), MODEL)
    tensors = {name.removeprefix("bert."): value for name, value in tensors.items()}
    bert = torch_bert("BertModel", MODEL, tensors)
    columns = [[] for _ in range(texts_per_example)]
    members = plan_of(dataset).members(1, 0)
    for example in members:
        for i, column in enumerate(columns):
            tokens = dataset.splits["train"].tokens[example * texts_per_example + i]
            hidden = bert(torch.tensor(tokens[None]).long()).last_hidden_state[0]
            column.append(hidden[0] if pooling == "cls" else hidden.mean(0))
    labels = torch.arange(BATCH)
    example = torch.tensor(members)
    same = (example[:, None] == example) & (labels[:, None] != labels)
    loss = torch.tensor(0.0)
    for size in dimensions:
        vectors = [torch.stack(x)[:, :size] for x in columns]
        anchors, *others = (torch.nn.functional.normalize(x, dim=-1) for x in vectors)
        scores = SCALE * anchors @ torch.cat(others).T
        scores = scores.masked_fill(same.repeat(1, texts_per_example - 1), float("-inf"))
        loss = loss + torch.nn.functional.cross_entropy(scores, labels)
    loss.backward()
    grads = {name: x.grad.numpy() for name, x in bert.named_parameters() if x.grad is not None}
    return loss.item(), (scores.argmax(1) == labels).sum().item(), grads


@pytest.mark.parametrize(
    ("texts", "pooling", "devices", "one_a_row", "count"),
    [
        (2, "mean", 1, False, 20),
        (2, "mean", 8, True, 20),
        (3, "cls", 8, False, 20),
        (3, "cls", 8, False, 11),
    ],
)
def test_loss_and_gradients_match_sentence_transformers(texts, pooling, devices, one_a_row, count):
    """With 11 examples, the batch spans two epochs and holds some twice."""
    dataset, params = RandomPairs(texts, count), random_params(MODEL)
    plan = plan_of(dataset, rows_multiple=devices, one_a_row=one_a_row)
    batch = plan.batch(1, 0)
    assert (len(set(plan.members(1, 0))) < BATCH) == (count < 20)
    assert (batch["example"].max(1) == NO_EXAMPLE).any() == (devices > 1)  # padding rows
    loss, terms, grads = loss_and_grads(dataset, plan, params, pooling, devices)
    expected, correct, expected_grads = reference(texts, pooling, count)
    np.testing.assert_allclose(loss, expected, atol=1e-5, rtol=0)
    assert terms["accuracy"] == (correct, BATCH)
    for name, grad in to_huggingface(grads, MODEL).items():
        theirs = expected_grads.get(name.removeprefix("bert."), 0)
        np.testing.assert_allclose(grad, theirs, atol=1e-5, rtol=0, err_msg=name)


def test_matryoshka_loss_and_gradients_match_sentence_transformers():
    dataset, dimensions = RandomPairs(2), (4, 7, 12)
    dataset.config.dimensions = dimensions[::-1]
    loss, terms, grads = loss_and_grads(dataset, plan_of(dataset), random_params(MODEL))
    expected, correct, expected_grads = reference(2, "mean", 20, dimensions)
    np.testing.assert_allclose(loss, expected, atol=1e-5, rtol=0)
    assert terms["accuracy"] == (correct, BATCH)
    for name, grad in to_huggingface(grads, MODEL).items():
        theirs = expected_grads.get(name.removeprefix("bert."), 0)
        np.testing.assert_allclose(grad, theirs, atol=2e-5, rtol=0, err_msg=name)


def test_simcse_dropout_separates_identical_texts():
    """Each example holds the same text twice, as in SimCSE."""
    dataset = RandomPairs(2)
    examples = dataset.splits["train"]
    examples.tokens[1::2] = examples.tokens[::2]
    examples.a_length[1::2] = examples.a_length[::2]
    model = dataclasses.replace(MODEL, dropout=0.3)
    run = functools.partial(loss_and_grads, dataset, plan_of(dataset), random_params(MODEL))
    same, terms, _ = run(model=model)
    assert terms["accuracy"] == (BATCH, BATCH)
    assert run(model=model, key=jax.random.key(1))[0] > same


def test_gradient_accumulation_is_rejected():
    dataset = RandomPairs(2)
    dataset.splits["dev"] = dataset.splits["train"]
    task = TaskConfig(kind="pairs", text_b="b", tokens=20)
    config = FinetuneConfig(model=MODEL, task=task, batch_size=BATCH, accumulation=2)
    assert "accumulation" in error_of(finetuning.make_phase, config, dataset, [0], 1)


@pytest.mark.parametrize(
    "change",
    [
        "embed.pooling=none",
        "embed.layers=last4",
        "model.head.features=last",
        "model.dropout=0",
        "task.name=rte",
        "task.similarity=('a',)",
        "task.dimensions=(4,0)",
    ],
)
def test_invalid_pair_settings_are_rejected(change):
    file = tasks.CONFIGS / "pairs.py"
    load([f"--config={file}:simcse"], FinetuneConfig)
    message = error_of(load, [f"--config={file}:simcse", f"--config.{change}"], FinetuneConfig)
    assert message.startswith(f"config.{change.partition('=')[0]} is")
    assert "triplets" in error_of(load, [f"--config={file}:nli"], FinetuneConfig)


def test_embed_settings_default_to_those_of_the_checkpoint():
    start = EmbedConfig(pooling="cls", normalize=True, tokens=50)
    config = FinetuneConfig(task=TaskConfig(tokens=40))
    assert warm_start.embed_config(config, start) == start
    # Training has no prompt and no truncated vectors.
    other = dataclasses.replace(start, prompt="query: ", include_prompt=False, truncate_dim=5)
    assert warm_start.embed_config(config, other) == start
    assert warm_start.embed_config(config, EmbedConfig()) == EmbedConfig(tokens=40)
    config.embed = EmbedConfig(tokens=30, layers="all")
    expected = EmbedConfig(pooling="cls", normalize=True, tokens=30, layers="all")
    assert warm_start.embed_config(config, start) == expected
    # A setting that the user has given counts, even if it is the default.
    expected = dataclasses.replace(expected, pooling="mean")
    assert warm_start.embed_config(config, start, ["embed.pooling"]) == expected


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Triplets with topic-matched positives, STS pairs of the same topics, and a vocabulary."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)

    def text(topic):
        words = [f"w{topic}", *(f"w{i}" for i in rng.integers(6, 30, rng.integers(1, 4)))]
        return " ".join(rng.permutation(words))

    lines = ["anchor\tpositive\tnegative"]
    for _ in range(160):
        topic, other = rng.permutation(6)[:2]
        lines.append(f"{text(topic)}\t{text(topic)}\t{text(other)}")
    (folder / "train.tsv").write_text("\n".join(lines) + "\n")
    records = [
        {"sentence1": text(a), "sentence2": text(b), "score": 5.0 * float(a == b)}
        for a, b in rng.integers(0, 6, (40, 2))
    ]
    (folder / "dev.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in records))
    VOCABULARY.save(folder / "vocab")
    return folder


def arguments(data, workdir, *changes):
    files = f"task.train={data}/train.tsv", f"task.dev={data}/dev.jsonl"
    settings = "task.tokens=16", "epochs=6", "evaluate_every_steps=30", "embed.normalize=true"
    argv = tasks.arguments(data, workdir, *files, *settings, *changes)
    argv[1] = f"--config={tasks.CONFIGS / 'pairs.py'}:triplets"
    return argv


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert cli.main(arguments(data, folder)) == 0
    return folder


def test_run_learns_and_selects_checkpoint_by_spearman(run, data, capsys):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    heldout = [line for line in lines if line["split"] == "heldout"]
    assert [line["step"] for line in heldout] == [30, 60]
    assert "loss" not in heldout[0]
    assert heldout[-1]["spearman"] > 0.7
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["best_by"] == "spearman"
    assert metrics["dev"]["spearman"] == max(line["spearman"] for line in heldout)
    predictions = run / "predictions" / "dev" / "predictions.tsv"
    assert len(predictions.read_text().splitlines()) == 41
    # `evaluate-embeddings` computes the same metrics from the vectors of `bert-jax embed`.
    capsys.readouterr()
    command = ["evaluate-embeddings", "--init", str(run), "--json", str(data / "dev.jsonl")]
    assert cli.main(command) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result.pop("data") == str(data / "dev.jsonl")
    assert result == pytest.approx(metrics["dev"], abs=1e-6)


def test_embedding_run_rejects_other_pooling_and_predictions(run, data, tmp_path, capsys):
    assert "objective" in refused(capsys, *arguments(data, run, "embed.pooling=cls"))
    predict = ("predict", "--workdir", run, "--out", tmp_path / "out", data / "train.tsv")
    assert "bert-jax embed" in refused(capsys, *predict)
