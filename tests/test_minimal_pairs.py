"""Sentence scores against PyTorch, and files of minimal pairs."""

import gzip
import json

import numpy as np
import pytest
import torch
import transformers

import bert_jax
from bert_jax import cli
from bert_jax.convert.source import open_model
from bert_jax.inference.sentence_scores import PLL, SentenceScorer
from bert_jax.tools import minimal_pairs
from tests.helpers.checkpoints import error_of, save_pretrained, torch_model

TEXTS = ["the cat sat on a mat", "the", "a b c d e f g h i the cat sat", "unst é , the cat !"]


def token_log_probabilities(model, tokenizer, text, pll="original"):
    """Return (token, log-probability) pairs of a text, scored by transformers one at a time."""
    encoded = tokenizer(text, return_tensors="pt")
    tokens, words, log_probabilities = encoded["input_ids"][0], encoded.word_ids(), []
    for i in range(1, len(tokens) - 1):
        masked = tokens.clone()
        for j in range(i, len(tokens)):
            if j == i or (pll == "word-l2r" and words[j] == words[i]):
                masked[j] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(masked[None])
        logits = logits.logits if "logits" in logits else logits.prediction_logits
        log_softmax = torch.log_softmax(logits[0, i].double(), -1)
        log_probabilities.append(
            (tokenizer.convert_ids_to_tokens(int(tokens[i])), log_softmax[tokens[i]].item())
        )
    return log_probabilities


def test_scores_match_transformers(tmp_path):
    model = torch_model()
    folder = save_pretrained(model, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    scorer = SentenceScorer(open_model(str(folder)))
    for pll in PLL:
        tokens = [token_log_probabilities(model, tokenizer, text, pll) for text in TEXTS]
        expected = [sum(x for _, x in own) for own in tokens]
        np.testing.assert_allclose(scorer(TEXTS, pll), expected, rtol=1e-5)
        np.testing.assert_allclose(scorer(TEXTS[::-1], pll=pll), expected[::-1], rtol=1e-5)
        for result, own in zip(scorer.tokens(TEXTS, pll), tokens, strict=True):
            assert [name for name, _ in result] == [name for name, _ in own]
            np.testing.assert_allclose([x for _, x in result], [x for _, x in own], rtol=2e-5)
    assert scorer([""]) == 0
    original, word_l2r = (scorer.tokens(["the unst cat"], pll)[0] for pll in PLL)
    assert [token for token, _ in original] == ["the", "un", "##s", "##t", "cat"]
    differs = [not np.isclose(a, b) for (_, a), (_, b) in zip(original, word_l2r, strict=True)]
    assert differs == [False, True, True, False, False]
    assert "word-l2r" in error_of(scorer, ["the"], pll="words")


def test_causal_scores_match_transformers(tmp_path):
    model = torch_model("BertLMHeadModel", is_decoder=True)
    folder = save_pretrained(model, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    scorer = SentenceScorer(open_model(str(folder)))
    for text, result in zip(TEXTS, scorer(TEXTS), strict=True):
        tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = torch.log_softmax(model(tokens).logits[0].double(), -1)
        expected = sum(logits[i, tokens[0, i + 1]].item() for i in range(tokens.shape[1] - 2))
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert "masks" in error_of(scorer, ["the"], pll="word-l2r")


def test_accuracy_on_blimp_and_zorro_formats(tmp_path, capsys):
    folder = save_pretrained(torch_model(), tmp_path / "hf")
    score = dict(zip(TEXTS[:2], SentenceScorer(open_model(str(folder)))(TEXTS[:2]), strict=True))
    good, bad = sorted(score, key=score.get, reverse=True)
    pairs = [(good, bad), (bad, good), (good, good), (good, bad)]  # a tie counts as wrong
    data = tmp_path / "copy" / "data"
    data.mkdir(parents=True)

    def write(name, pairs, **fields):
        lines = [json.dumps({"sentence_good": g, "sentence_bad": b, **fields}) for g, b in pairs]
        with gzip.open(data / f"{name}.jsonl.gz", "wt") as file:
            file.write("\n".join(lines) + "\n")

    write("verbs", pairs, field="syntax", linguistics_term="argument_structure")
    write("case", pairs[:1], field="syntax", linguistics_term="binding")
    write("domain", pairs[1:2], field="syntax/semantics", linguistics_term="binding")
    (data / "nouns.txt").write_text(f"{bad}\n{good}\n")
    expected = {
        "mean": 0.625,
        "by_phenomenon": {"case": 1.0, "domain": 0.0, "nouns": 1.0, "verbs": 0.5},
        "by_linguistics_term": {"argument_structure": 0.5, "binding": 0.5},
        "by_field": {"syntax": 0.75, "syntax_semantics": 0.0},
    }
    one_file = [str(data / "verbs.jsonl.gz")]
    assert minimal_pairs.evaluate(str(folder), [str(tmp_path / "copy")])._asdict() == expected
    assert minimal_pairs.evaluate(str(folder), one_file, 1).mean == 1
    run = ["minimal-pairs", "--init", str(folder), "--data"]
    assert cli.main([*run, str(tmp_path / "copy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert cli.main([*run, str(data / "nouns.txt"), *one_file, "--pll", "word-l2r"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line] == [
        "nouns", "verbs", "argument_structure", "syntax", "mean",
    ]  # fmt: skip


def test_score_sentences_matches_the_python_api(hf_folder, tmp_path, capsys):
    model, texts = bert_jax.load(hf_folder), ["the cat sat on a mat", "", "unst\tcat"]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"sentence": text}) + "\n" for text in texts))
    expected, tokens = model.score(texts), model.score_tokens(texts, "word-l2r")

    def run(*options):
        argv = ["score-sentences", "--init", hf_folder, "--column", "sentence", source, *options]
        assert cli.main(list(map(str, argv))) == 0
        return capsys.readouterr().out.splitlines()

    header, *rows = [line.split("\t") for line in run()]
    assert header == ["score", "tokens", "text"]
    assert [row[1:] for row in rows] == [["6", texts[0]], ["0", ""], ["4", "unst cat"]]
    np.testing.assert_allclose([float(row[0]) for row in rows], expected, atol=1e-6)
    _, *rows = [line.split("\t") for line in run("--tokens", "--pll", "word-l2r")]
    expected_rows = [(str(i), *x) for i, own in enumerate(tokens, 1) for x in own]
    assert [tuple(row[:2]) for row in rows] == [row[:2] for row in expected_rows]
    np.testing.assert_allclose(
        [float(row[2]) for row in rows], [row[2] for row in expected_rows], atol=1e-6
    )
    results = list(map(json.loads, run("--tokens", "--json")))
    assert [line["text"] for line in results] == texts
    np.testing.assert_allclose([line["score"] for line in results], expected, atol=1e-6)
    assert [len(line["tokens"]) for line in results] == [line["num_tokens"] for line in results]


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("a.jsonl", '{"sentence_good": "x"}\n', "a.jsonl:1: no text in 'sentence_bad'"),
        ("a.txt", "one\n", "1 lines"),
        ("a.txt", "\n", "no pairs"),
        ("a.txt", "a b c\n" + "the " * 30 + "\n", "32 tokens"),
        ("folder/a.md", "", "BLiMP"),
    ],
)
def test_invalid_pair_files_are_rejected(hf_folder, tmp_path, name, content, key):
    data = tmp_path / name
    data.parent.mkdir(exist_ok=True)
    data.write_text(content)
    data = data.parent if "/" in name else data
    assert key in error_of(minimal_pairs.evaluate, str(hf_folder), [str(data)])


def test_unusable_model_or_number_of_pairs_is_rejected(tmp_path):
    folder = save_pretrained(torch_model("BertModel"), tmp_path / "hf")
    assert "masked-LM head" in error_of(SentenceScorer, open_model(str(folder)))
    assert "--pairs" in error_of(minimal_pairs.evaluate, "run", [], -1)


def test_only_line_feeds_separate_pairs(tmp_path):
    path = tmp_path / "a.jsonl"
    pairs = [("one\u2028line", "b"), ("c", "d")]
    lines = [
        json.dumps({"sentence_good": a, "sentence_bad": b}, ensure_ascii=False) for a, b in pairs
    ]
    path.write_text("\ufeff" + "\n".join(lines))
    assert minimal_pairs.read(path).pairs == pairs
    (tmp_path / "b.txt").write_text("\ufeffb\none\u2028line\n\nd\nc\n")
    assert minimal_pairs.read(tmp_path / "b.txt").pairs == pairs
