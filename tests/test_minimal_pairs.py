"""Sentence scores against PyTorch, and files of minimal pairs."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import bert_jax
from bert_jax import cli
from bert_jax.config.schema import ModelConfig
from bert_jax.convert.source import open_model
from bert_jax.data import rows, wordpiece
from bert_jax.errors import UserError
from bert_jax.inference.sentence_scores import PLL, SentenceScorer
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


def total(scores):
    return sum(log_probability for _, log_probability in scores)


def test_scores_match_transformers(tmp_path):
    model = torch_model().eval()
    folder = save_pretrained(model, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    scorer = SentenceScorer(open_model(str(folder)))
    for pll in PLL:
        tokens = [token_log_probabilities(model, tokenizer, text, pll) for text in TEXTS]
        expected = list(map(total, tokens))
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
    with pytest.raises(UserError, match="choose one of original, word-l2r"):
        scorer(["the"], pll="words")


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_real_pairs_match_transformers(shared_data, tmp_path, causal):
    """Score 100 pairs of BLiMP and Zorro; the causal model sets transformers' is_decoder."""
    words = wordpiece.load(shared_data("vocab/bert-base-uncased-vocab.txt")).tokens[:4_000]
    kind = "BertLMHeadModel" if causal else "BertForMaskedLM"
    model = torch_model(kind, vocab_size=len(words), max_position_embeddings=64, is_decoder=causal)
    folder = save_pretrained(model, tmp_path / "hf", words)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    names = (
        "blimp/principle_A_case_2.jsonl.gz",
        "zorro/agreement_determiner_noun-across_1_adjective.txt.gz",
    )
    texts = [
        text
        for name in names
        for pair in minimal_pairs.read(shared_data(name)).pairs[:50]
        for text in pair
    ]
    scorer = SentenceScorer(open_model(str(folder)))
    for pll in PLL[:1] if causal else PLL:
        expected = []
        for text in texts:
            if not causal:
                expected.append(total(token_log_probabilities(model, tokenizer, text, pll)))
                continue
            tokens = tokenizer(text, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logits = torch.log_softmax(model(tokens).logits[0].double(), -1)
            expected.append(
                sum(logits[i, tokens[0, i + 1]].item() for i in range(tokens.shape[1] - 2))
            )
        result = scorer(texts, pll=pll)
        np.testing.assert_allclose(result, expected, rtol=2e-5)
        good, bad = np.reshape(result, (-1, 2)).T
        assert (good > bad).tolist() == (np.reshape(expected, (-1, 2)) @ [1, -1] > 0).tolist()


def test_causal_scores_depend_only_on_the_prefix(tmp_path):
    config = ModelConfig(
        layers=2, hidden=12, heads=3, feed_forward=20, positions=24, vocab_size=len(WORDS),
        causal=True, next_sentence=False,
    )  # fmt: skip
    scorer = SentenceScorer(
        open_model(str(write_run(tmp_path / "run", config, random_params(config), WORDS)))
    )
    model = Bert(config)
    for text, result in zip(TEXTS, scorer(TEXTS), strict=True):
        tokens, total = scorer.vocabulary.encode(text), 0.0
        for i in range(1, len(tokens) - 1):  # the model sees only the prefix
            layout = rows.Layout(
                *map(jnp.asarray, rows.layout(np.array([[i]]), np.array([[i]]), i))
            )
            prefix, last = jnp.array([tokens[:i]]), jnp.array([[i - 1]])
            logits = model.apply({"params": scorer._params}, prefix, layout, last)[0][0, 0]
            total += float(jax.nn.log_softmax(logits)[tokens[i]])
        np.testing.assert_allclose(result, total, rtol=1e-4)


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
    run = ["blimp", "--init", str(folder), "--data"]
    assert cli.main([*run, str(tmp_path / "copy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert cli.main([*run, str(data / "nouns.txt"), *one_file, "--pll", "word-l2r"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line] == [
        "nouns", "verbs", "argument_structure", "syntax", "mean",
    ]  # fmt: skip


def test_score_sentences_matches_the_python_api(tmp_path, capsys):
    folder = save_pretrained(torch_model(), tmp_path / "hf")
    model = bert_jax.load(folder)
    texts = ["the cat sat on a mat", "", "unst\tcat"]
    lines = "".join(json.dumps({"sentence": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    run = [
        "score-sentences",
        "--init",
        str(folder),
        "--column",
        "sentence",
        str(tmp_path / "a.jsonl"),
    ]
    expected = model.score(texts)
    assert cli.main(run) == 0
    header, *rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert header == ["score", "tokens", "text"]
    assert [row[1:] for row in rows] == [["6", texts[0]], ["0", ""], ["4", "unst cat"]]
    np.testing.assert_allclose([float(row[0]) for row in rows], expected, atol=1e-6)
    tokens = model.score_tokens(texts, "word-l2r")
    assert cli.main([*run, "--tokens", "--pll", "word-l2r"]) == 0
    header, *rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    expected_rows = [(str(i), *x) for i, own in enumerate(tokens, 1) for x in own]
    assert [tuple(row[:2]) for row in rows] == [row[:2] for row in expected_rows]
    np.testing.assert_allclose(
        [float(row[2]) for row in rows], [row[2] for row in expected_rows], atol=1e-6
    )
    assert cli.main([*run, "--tokens", "--json"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in results] == texts
    np.testing.assert_allclose([line["score"] for line in results], expected, atol=1e-6)
    assert [len(line["tokens"]) for line in results] == [line["num_tokens"] for line in results]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"sentence_good": "x"}\n', "a.jsonl:1: no text in 'sentence_bad'"),
        ("a.json", "a\nb\n", "a.json: unknown file format; use .jsonl"),
        ("a.txt", "one\n", "a.txt: 1 lines, but pairs need an even number"),
        ("a.txt", "\n", "a.txt: no pairs"),
        ("a.txt", "a b c\n" + "the " * 30 + "\n", "has 32 tokens, the model takes 24: shorten it"),
    ],
)
def test_invalid_pair_files_are_rejected(tmp_path, capsys, name, content, message):
    folder = save_pretrained(torch_model(), tmp_path / "hf")
    (tmp_path / name).write_text(content)
    assert message in refused(capsys, "blimp", "--init", folder, "--data", tmp_path / name)


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


def test_model_without_masked_lm_head_is_rejected(tmp_path):
    folder = save_pretrained(torch_model("BertModel"), tmp_path / "hf")
    with pytest.raises(UserError, match="no masked-LM head"):
        SentenceScorer(open_model(str(folder)))


def test_folder_without_pairs_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"no .jsonl or .txt files; name the folder of BLiMP"):
        minimal_pairs.find(tmp_path)


def test_negative_number_of_pairs_is_rejected():
    with pytest.raises(UserError, match="--pairs -1: must be 0"):
        minimal_pairs.evaluate("run", [], -1)


def test_causal_model_rejects_word_l2r_scores(tmp_path):
    folder = save_pretrained(torch_model("BertLMHeadModel", is_decoder=True), tmp_path / "hf")
    with pytest.raises(UserError, match="its scores are log-likelihoods, without masks"):
        SentenceScorer(open_model(str(folder)))(["the"], pll="word-l2r")


def test_reads_blimp_and_zorro(shared_data):
    files = minimal_pairs.find(shared_data("blimp"))
    assert len(files) == 67
    phenomenon = minimal_pairs.read(shared_data("blimp/causative.jsonl.gz"))
    assert (len(phenomenon.pairs), *phenomenon[1:]) == (1000, "argument_structure", "syntax")
    assert len(minimal_pairs.find(shared_data("zorro"))) == 23
    zorro = shared_data("zorro/agreement_determiner_noun-across_1_adjective.txt.gz")
    good, bad = minimal_pairs.read(zorro).pairs[0]
    assert (good, bad) == ("look at this purple thing .", "look at this purple things .")
