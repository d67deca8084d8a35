"""Replaced-token detection: losses and gradients against transformers, sampling, and a full run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
import transformers

from bert_jax import cli
from bert_jax.config.checks import validate
from bert_jax.config.fields import with_fields
from bert_jax.config.model import ElectraConfig, ModelConfig
from bert_jax.config.schema import Config, MaskingConfig, MeshConfig
from bert_jax.config.sizes import model_size
from bert_jax.convert.export import export
from bert_jax.convert.huggingface import to_huggingface
from bert_jax.data import rows
from bert_jax.data.vocabulary import SPECIAL, Vocabulary
from bert_jax.inference.fill_mask import MaskProbe
from bert_jax.model import embeddings, encoder
from bert_jax.model.bert import flatten, shapes, split_generator
from bert_jax.model.flops import flops_per_row, parameter_count
from bert_jax.objectives import electra
from bert_jax.objectives.electra import LOSS, ReplacedTokens
from bert_jax.objectives.pretraining import make_phases
from bert_jax.runtime import sharding
from tests.helpers.checkpoints import error_of, random_params, save_pretrained, write_run

VOCAB, T = 40, 16
PAD = SPECIAL.index("[PAD]")
MODEL = ModelConfig(
    **{k: getattr(model_size("electra-small"), k) for k in ("family", "masked_lm", "next_sentence")},
    layers=2, hidden=16, heads=4, feed_forward=24, embedding_size=12,
    vocab_size=VOCAB, positions=T, dropout=0.0, attention_dropout=0.0,
    electra=ElectraConfig(replaced_token=True, generator_hidden=8),
)  # fmt: skip


def make_objective(model):
    row_format = rows.RowFormat(T, 1, VOCAB)
    return ReplacedTokens(model, MaskingConfig(rate=0.4), row_format, 3, np.zeros(VOCAB, bool))


@pytest.fixture(scope="module")
def batch():
    """Return an objective, a batch with one sequence per row (for transformers), and its inputs."""
    objective = make_objective(MODEL)
    length = np.array([[16], [11], [7], [16]], np.int32)
    tokens = np.random.default_rng(0).integers(len(SPECIAL), VOCAB, (4, T)).astype(np.int32)
    tokens[np.arange(T) >= length] = PAD
    batch = {"tokens": tokens, "length": length, "a_length": length - 4, "label": length * 0 - 1}
    batch = jax.tree.map(jnp.asarray, batch)
    return objective, batch, jax.jit(objective.make_inputs)(batch, jax.random.key(1))


def weighted(objective, params, inputs, weights):
    """Return the weighted sum of the mean losses."""
    terms = objective.loss_terms(params, inputs, None)
    return sum(weight * terms[name][0] / terms[name][1] for name, weight in weights.items())


def test_losses_and_gradients_match_transformers(tmp_path, batch):
    """The transformers models share their embeddings and get the same sampled tokens."""
    objective, plain, inputs = batch
    params = random_params(MODEL)
    params["generator"]["masked_lm"]["bias"][list({*np.asarray(plain["tokens"][0])})] += 4
    params = jax.tree.map(jnp.asarray, params)
    export(str(write_run(tmp_path / "run", MODEL, params)), tmp_path / "hf")
    discriminator, info = transformers.ElectraForPreTraining.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    generator, other_info = transformers.ElectraForMaskedLM.from_pretrained(
        tmp_path / "hf" / "generator", output_loading_info=True
    )
    for keys in (info, other_info):
        assert not any(keys[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    assert (tmp_path / "hf" / "generator" / "vocab.txt").exists()
    generator.eval()
    discriminator.eval().electra.embeddings = generator.electra.embeddings

    masked, layout = inputs.masked_lm.masked, inputs.masked_lm.layout
    weights, is_real = np.asarray(masked.weights), np.asarray(layout.segment_ids) == 0
    common = {
        "attention_mask": torch.tensor(is_real.astype(int)),
        "token_type_ids": torch.tensor(np.asarray(layout.token_type_ids) * is_real).long(),
    }
    logits = generator(torch.tensor(np.asarray(masked.tokens)).long(), **common).logits
    at = np.asarray(masked.positions)
    logits = torch.gather(logits, 1, torch.tensor(at).long()[..., None].expand(-1, -1, VOCAB))
    labels = torch.tensor(np.where(weights > 0, np.asarray(masked.labels), -100)).long()
    generator_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    # Sample by inverting the cumulative distribution in float64.
    distribution = scipy.stats.rv_discrete
    corrupted = np.asarray(plain["tokens"]).copy()
    for row, column in zip(*np.nonzero(weights), strict=True):
        p = torch.softmax(logits[row, column].double(), -1).detach().numpy()
        choice = distribution(values=(np.arange(VOCAB), p / p.sum()))
        corrupted[row, at[row, column]] = choice.ppf(float(inputs.draws[row, column]))
    replaced = corrupted != np.asarray(plain["tokens"])
    assert 0 < replaced.sum() < weights.sum()
    loss = discriminator(
        torch.tensor(corrupted).long(), **common, labels=torch.tensor(replaced).long()
    ).loss
    (generator_loss + 50 * loss).backward()

    terms = jax.jit(objective.loss_terms)(params, inputs, None)
    for name, expected in (("masked_lm_loss", generator_loss), (LOSS, loss)):
        total, weight = terms[name]
        np.testing.assert_allclose(total / weight, expected.item(), rtol=1e-5)
        np.testing.assert_allclose(objective.normalizers(inputs)[name], weight)
    assert objective.loss_scales == {LOSS: 50}
    both = {"masked_lm_loss": 1, LOSS: 50}
    grads = jax.jit(jax.grad(lambda p: weighted(objective, p, inputs, both)))(params)
    own = {k: v for k, v in grads.items() if k != "generator"}
    sides = (
        (discriminator, with_fields(MODEL, {"electra.generator_hidden": 0}), own),
        (generator, *split_generator(MODEL, grads)),
    )
    for theirs, config, ours in sides:
        expected = {name: p.grad for name, p in theirs.named_parameters()}
        for name, value in to_huggingface(ours, config).items():
            if name == "generator_lm_head.bias":
                name = "generator_lm_head.bias" if name in expected else "generator_lm_head.weight"
            if name not in expected:  # tied
                continue
            other = expected[name].numpy()
            if "word_embeddings" in name:  # padding_idx has no gradient in PyTorch
                value, other = (np.delete(x, PAD, 0) for x in (value, other))
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=2e-5, err_msg=name)


def test_every_dropout_uses_a_different_key(monkeypatch, batch):
    """Not within a model, nor across generator and discriminator."""
    keys = []

    def recorded(x, rate, key):
        jax.debug.callback(lambda data: keys.append(tuple(data.tolist())), jax.random.key_data(key))
        return x

    objective = make_objective(dataclasses.replace(MODEL, dropout=0.1))
    params = random_params(MODEL)
    for module in (embeddings, encoder):
        monkeypatch.setattr(module, "dropout", recorded)
    jax.jit(objective.loss_terms)(params, batch[2], jax.random.key(0))
    jax.effects_barrier()
    # In each model on the embeddings and, in both layers, on attention's output and feed-forward.
    assert len(set(keys)) == len(keys) == 2 * (1 + 2 * 2)


@pytest.mark.parametrize("vocab", [40, 700])
def test_samples_follow_the_predicted_distribution(vocab):
    """Equally spaced draws hit each token in proportion to its probability, and never padding."""
    p = np.random.default_rng(0).dirichlet(np.full(vocab, 0.3)).astype(np.float32)
    logits = np.pad(np.log(p), (0, 8), constant_values=np.finfo(np.float32).min)
    count = 20_000
    draws = jnp.arange(count, dtype=jnp.float32)[None] / count
    tokens = electra.sample(jnp.broadcast_to(logits, (1, count, vocab + 8)), draws, vocab)
    frequency = np.bincount(np.asarray(tokens)[0], minlength=vocab + 8) / count
    np.testing.assert_allclose(frequency[:vocab], p / p.sum(), rtol=0, atol=2 / count)
    assert frequency[vocab:].sum() == 0


def test_sampling_at_the_interval_endpoints():
    ends = jnp.array([[0.0, 1 - 2**-24] * 3])
    certain = jnp.full((1, 6, 700), np.finfo(np.float32).min)
    labels = [0, 0, 256, 256, 692, 692]  # first tokens of blocks, and the last of the vocabulary
    certain = certain.at[0, jnp.arange(6), jnp.array(labels)].set(0.0)
    assert electra.sample(certain, ends, 693).tolist() == [labels]
    # A float32 cumulative sum of many probabilities does not end at exactly 1.
    flat = jnp.full((1, 2, 30_528), 0.1).at[:, :, 30_522:].set(np.finfo(np.float32).min)
    assert electra.sample(flat, ends[:, :2], 30_522).tolist() == [[0, 30_521]]


def test_detection_metrics():
    logits = jnp.array([[2.0, -1.0, 3.0, 1.0, 5.0]])
    replaced = jnp.array([[True, True, False, False, False]])
    real = jnp.array([[True, True, True, True, False]])
    terms = electra.detection_terms(logits, replaced, real)
    values = {name: float(total / weight) for name, (total, weight) in terms.items()}
    assert values.pop(LOSS) == pytest.approx((0.126928 + 1.313262 + 3.048587 + 1.313262) / 4)
    assert values == {
        "replaced_token_accuracy": 0.25,
        "replaced_token_precision": pytest.approx(1 / 3),
        "replaced_token_recall": 0.5,
        "replaced_fraction": 0.5,
    }


def test_model_sizes_match_the_paper():
    """Google's README (google-research/electra) lists 14M, 110M and 335M, including the head."""
    for size, millions, generator in (
        ("electra-small", 13.55, {"heads": 1, "feed_forward": 256, "embedding_size": 128}),
        ("electra-base", 109.48, {"heads": 4, "feed_forward": 1024, "embedding_size": 768}),
        ("electra-large", 335.1, {"heads": 4, "feed_forward": 1024, "embedding_size": 1024}),
    ):
        model = dataclasses.replace(model_size(size), vocab_size=30_522)
        assert {k: getattr(model.generator(), k) for k in generator} == generator
        alone = with_fields(model, {"electra.generator_hidden": 0})
        count = sum(int(np.prod(x.shape)) for x in flatten(shapes(alone)).values())
        assert count / 1e6 == pytest.approx(millions, rel=0.005)


def test_flops_and_parameter_count_include_the_generator():
    alone = with_fields(MODEL, {"electra.generator_hidden": 0})
    config = MODEL.generator()
    both = flops_per_row(MODEL, T, 1, 4)
    assert both == flops_per_row(alone, T, 1, 4) + flops_per_row(config, T, 1, 4)
    assert flops_per_row(alone, T, 1, 4) == flops_per_row(alone, T, 1, 0)  # no vocabulary logits
    padded = dataclasses.replace(MODEL, vocab_multiple=64)
    assert parameter_count(shapes(padded), padded) == parameter_count(shapes(MODEL), MODEL)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"masked_lm": True}, "masked_lm"),
        ({"transform": False}, "transform"),
        ({"electra.replaced_token": False}, "electra.replaced_token"),
    ],
)
def test_inconsistent_model_config_is_rejected(changes, key):
    config = Config(model=with_fields(MODEL, changes))
    assert f"model.{key} is" in error_of(validate, config)


def test_unsupported_pretraining_settings_are_rejected():
    model = with_fields(MODEL, {"electra.generator_hidden": 0, "masked_lm": True})
    validate(Config(model=model))  # as a discriminator that is imported
    assert "replaced_token" in error_of(make_phases, Config(model=model))
    model = with_fields(MODEL, {"electra.generator_hidden": 10})
    assert "generator_hidden" in error_of(make_objective, model)
    vocabulary, mesh = Vocabulary((*SPECIAL, "a"), True), sharding.make_mesh(MeshConfig())
    assert "sample_texts" in error_of(MaskProbe, MODEL, vocabulary, ["a [MASK]"], mesh)


def test_pretrained_model_learns_finetunes_and_exports(tmp_path, capsys):
    """Documents mostly repeat one word, so both models can infer masked words from the others."""
    words, rng = [chr(ord("a") + i) for i in range(12)], np.random.default_rng(0)
    documents = [
        " ".join(words[i % 12 if k < 10 else k] for k in rng.integers(0, 12, 13)) + "."
        for i in range(600)
    ]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, *words, "."]))
    labels = [f"{document}\t{document[0] < 'g'}" for document in documents[:64]]
    (tmp_path / "table.tsv").write_text("\n".join(["text\tlabel", *labels]))

    def run(command, *settings):
        command = command.replace("@", f"{tmp_path}/").split()
        assert cli.main([*command, *(f"--config.{setting}" for setting in settings)]) == 0
        output = capsys.readouterr()
        return output.out + output.err

    run(
        "prepare --vocab @vocab.txt --out @rows --tokens 16 --pairs none --heldout-fraction 0.2 @text.txt"
    )
    torch.manual_seed(0)
    discriminator = transformers.ElectraForPreTraining(
        transformers.ElectraConfig(
            vocab_size=len(SPECIAL) + 13, embedding_size=16, hidden_size=32, num_hidden_layers=1,
            num_attention_heads=2, intermediate_size=64, max_position_embeddings=16,
        )
    )  # fmt: skip
    save_pretrained(discriminator, tmp_path / "theirs", [*SPECIAL, *words, "."])
    settings = (
        "model.layers=1", "model.hidden=32", "model.heads=2", "model.feed_forward=64",
        "model.embedding_size=16", "model.electra.generator_hidden=16", "model.positions=16",
        "batch_size=32", "accumulation=2", "masking.rate=0.3", "optim.learning_rate=3e-3",
        "optim.warmup_steps=20", "evaluate_every_steps=50", "checkpoint.every_steps=100",
    )  # fmt: skip
    pretrain = "pretrain --config electra-small,16 --rows @rows --workdir @whole --init @theirs"
    output = run(pretrain, *settings, "steps=150")
    # Pretraining of a released discriminator starts with a new generator.
    assert "randomly initialized: generator" in output
    assert "fill-mask" not in output  # there is no masked-LM head
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    heldout = [line for line in map(json.loads, lines) if line["split"] == "heldout"]
    last = heldout[-1]
    assert last["loss"] == pytest.approx(last["masked_lm_loss"] + 50 * last[LOSS], rel=1e-5)
    assert last["masked_lm_loss"] < 1.6 < np.log(12)
    for line in heldout:  # better than predicting the base rate of replaced tokens
        assert line[LOSS] < scipy.stats.bernoulli(line["replaced_fraction"]).entropy() - 0.03

    table = [f"task.{split}={tmp_path}/table.tsv" for split in ("train", "dev")]
    finetune = "finetune --config table --init @whole --workdir @tuned"
    run(finetune, *table, "task.tokens=16", "steps=2")
    run("export --workdir @whole --out @hf")
