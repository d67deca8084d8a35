"""Scores of sentences against PyTorch's, and files of minimal pairs."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bert_jax import cli
from bert_jax.config import ModelConfig
from bert_jax.data import rows
from bert_jax.errors import UserError
from bert_jax.inference import SentenceScorer
from bert_jax.model.bert import Bert
from bert_jax.tools import minimal_pairs
from tests.helpers.checkpoints import (
    WORDS,
    random_params,
    save_pretrained,
    torch_model,
    write_run,
)
from tests.helpers.runs import refused

TEXTS = ["the cat sat on a mat", "the", "a b c d e f g h i the cat sat", "unst é , the cat !"]


def pseudo_log_likelihood(model, vocabulary, text):
    """Of one sentence, a mask at a time, with transformers."""
    tokens, total = vocabulary.encode(text), 0.0
    for i in range(1, len(tokens) - 1):
        masked = torch.tensor([tokens])
        masked[0, i] = vocabulary.mask_id
        with torch.no_grad():
            logits = model(masked).prediction_logits[0, i]
        total += torch.log_softmax(logits.double(), -1)[tokens[i]].item()
    return total


def test_scores_are_those_of_transformers(tmp_path):
    model = torch_model().eval()
    folder = save_pretrained(model, tmp_path / "hf")
    scorer = SentenceScorer(folder)
    expected = [pseudo_log_likelihood(model, scorer.vocabulary, text) for text in TEXTS]
    counts = []
    np.testing.assert_allclose(scorer(TEXTS, counts.append), expected, rtol=1e-5)
    assert sum(counts) == sum(len(scorer.vocabulary.encode(text)) - 2 for text in TEXTS)
    np.testing.assert_allclose(scorer(TEXTS[::-1]), expected[::-1], rtol=1e-5)


def test_a_causal_model_scores_each_piece_given_those_before(tmp_path):
    config = ModelConfig(
        layers=2, hidden=12, heads=3, feed_forward=20, positions=24, vocab_size=len(WORDS),
        causal=True, next_sentence=False,
    )  # fmt: skip
    scorer = SentenceScorer(write_run(tmp_path / "run", config, random_params(config), WORDS))
    model = Bert(config)
    for text, found in zip(TEXTS, scorer(TEXTS), strict=True):
        tokens, total = scorer.vocabulary.encode(text), 0.0
        for i in range(1, len(tokens) - 1):  # from the prefix alone
            layout = rows.Layout(
                *map(jnp.asarray, rows.layout(np.array([[i]]), np.array([[i]]), i))
            )
            prefix, last = jnp.array([tokens[:i]]), jnp.array([[i - 1]])
            logits = model.apply({"params": scorer._params}, prefix, layout, last)[0][0, 0]
            total += float(jax.nn.log_softmax(logits)[tokens[i]])
        np.testing.assert_allclose(found, total, rtol=1e-4)


def test_files_of_both_kinds(tmp_path, capsys):
    folder = save_pretrained(torch_model(), tmp_path / "hf")
    score = dict(zip(TEXTS[:2], SentenceScorer(folder)(TEXTS[:2]), strict=True))
    good, bad = sorted(score, key=score.get, reverse=True)
    pairs = [(good, bad), (bad, good), (good, good), (good, bad)]
    blimp = [json.dumps({"sentence_good": g, "sentence_bad": b, "UID": "x"}) for g, b in pairs]
    with gzip.open(tmp_path / "verbs.jsonl.gz", "wt") as file:
        file.write("\n".join(blimp) + "\n")
    (tmp_path / "nouns.txt").write_text(f"{bad}\n{good}\n")
    files = [str(tmp_path / "verbs.jsonl.gz"), str(tmp_path / "nouns.txt")]
    expected = {"verbs": 2.5 / 4, "nouns": 1.0, "mean": 6.5 / 8}
    assert minimal_pairs.evaluate(str(folder), files) == expected
    assert minimal_pairs.evaluate(str(folder), files[:1], 1) == {"verbs": 1.0, "mean": 1.0}
    assert cli.main(["minimal-pairs", "--init", str(folder), "--json", *files]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert cli.main(["minimal-pairs", "--init", str(folder), *files]) == 0
    assert capsys.readouterr().out == "verbs   62.5%\nnouns  100.0%\nmean    81.2%\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"sentence_good": "x"}\n', "a.jsonl:1: not JSON with sentence_good"),
        ("a.txt", "one\n", "a.txt: 1 lines; pairs need an even number"),
        ("a.txt", "\n", "a.txt: no pairs"),
        ("a.txt", "a b c\n" + "the " * 30 + "\n", "has 32 tokens, the model takes 24"),
    ],
)
def test_what_is_no_pairs_is_refused(tmp_path, capsys, name, content, said):
    folder = save_pretrained(torch_model(), tmp_path / "hf")
    (tmp_path / name).write_text(content)
    assert said in refused(capsys, "minimal-pairs", "--init", folder, tmp_path / name)


def test_a_model_without_a_token_head_is_refused(tmp_path):
    folder = save_pretrained(torch_model("BertModel"), tmp_path / "hf")
    with pytest.raises(UserError, match="no masked-LM head"):
        SentenceScorer(folder)


def test_files_of_real_benchmarks(shared_data):
    assert len(minimal_pairs.read(shared_data("blimp/causative.jsonl.gz"))) == 1000
    zorro = shared_data("zorro/agreement_determiner_noun-across_1_adjective.txt.gz")
    good, bad = minimal_pairs.read(zorro)[0]
    assert (good, bad) == ("look at this purple thing .", "look at this purple things .")
