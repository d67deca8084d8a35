"""Cross-encoders: BM25, a run that reranks its candidates, and the export."""

import collections
import json
import math
import random

import numpy as np
import torch
import transformers

import bert_jax
from bert_jax import cli
from bert_jax.convert.export import export
from bert_jax.tasks import embeddings, relevance
from tests.helpers import tasks
from tests.helpers.runs import VOCABULARY, refused


def write_data(folder):
    """Write pairs whose relevance is that of the document: 1 with w5, 0.5 with w6, else 0."""
    rng = random.Random(0)

    def document(mark):
        words = ["w0", *(f"w{rng.randrange(7, 30)}" for _ in range(rng.randint(1, 4))), mark]
        return " ".join(rng.sample(words, len(words)))

    grades = {"w5": 1.0, "w6": 0.5, "w4": 0.0}
    marks = [rng.choice([*grades]) for _ in range(200)]
    lines = [f"w0 w{i % 9}\t{document(mark)}\t{grades[mark]}" for i, mark in enumerate(marks)]
    (folder / "train.tsv").write_text("\n".join(["query\tdocument\tscore", *lines]) + "\n")
    corpus = [{"_id": f"d{i}", "text": document([*grades][i % 3])} for i in range(30)]
    words = [["w0", *(f"w{rng.randrange(4, 30)}" for _ in range(6))] for _ in range(5)]
    queries = [{"_id": f"q{i}", "text": " ".join(dict.fromkeys(x))} for i, x in enumerate(words)]
    qrels = [f"q{i}\td{j}\t{2 - j % 3}" for i in range(5) for j in range(30)]
    (folder / "beir" / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / "beir" / f"{name}.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in rows))
    text = "\n".join(["query-id\tcorpus-id\tscore", *qrels])
    (folder / "beir" / "qrels" / "test.tsv").write_text(text + "\n")
    VOCABULARY.save(folder / "vocab")
    return folder


def arguments(folder, *changes):
    files = f"task.train={folder}/train.tsv", f"task.dev={folder}/beir"
    argv = tasks.arguments(folder, folder / "run", *files, *changes)
    argv[1] = f"--config={tasks.CONFIGS / 'pairs.py'}:cross"
    return argv


def test_bm25_matches_a_loop(tmp_path):
    data = embeddings.read_beir(write_data(tmp_path) / "beir")
    texts = [collections.Counter(text.split()) for text in data.documents.values()]
    mean = sum(words.total() for words in texts) / len(texts)
    for query, ranked in zip(data.queries.values(), relevance.bm25(data, 7), strict=True):
        scores = []
        for words in texts:
            score = 0.0
            for word in query.split():
                n, tf = sum(word in other for other in texts), words[word]
                idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
                score += idf * tf / (tf + 0.9 * (0.6 + 0.4 * words.total() / mean))
            scores.append(score)
        assert len(ranked) == 7
        np.testing.assert_allclose(np.array(scores)[ranked], sorted(scores)[:-8:-1])


def test_run_reranks_and_its_export_predicts_the_same(tmp_path, capsys):
    assert cli.main(arguments(write_data(tmp_path))) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["best_by"] == "ndcg_at_10"
    assert metrics["dev"]["ndcg_at_10"] > 0.95
    assert "candidates by BM25, whose nDCG@10 is 0." in capsys.readouterr().out
    lines = (tmp_path / "run" / "predictions" / "dev" / "predictions.trec").read_text().splitlines()
    assert len(lines) == 5 * 30
    assert int(lines[0].split()[2][1:]) % 3 == 0
    config = export(str(tmp_path / "run"), tmp_path / "out")
    assert len(config["id2label"]) == 1
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pairs = [("w0 w7", "w5 w9 w0"), ("w0", "w4 w0")]
    with torch.no_grad():
        logits = theirs(**tokenizer(pairs, padding=True, return_tensors="pt")).logits[:, 0]
    predicted = [x.label for x in bert_jax.load(tmp_path / "run").predict(pairs)]
    np.testing.assert_allclose(predicted, torch.sigmoid(logits), rtol=0, atol=1e-5)
    assert predicted[0] > 0.8 > 0.2 > predicted[1]


def test_scores_must_be_from_0_to_1(tmp_path, capsys):
    write_data(tmp_path)
    (tmp_path / "train.tsv").write_text("query\tdocument\tscore\na\tb\t3\n")
    assert "from 0 to 1" in refused(capsys, *arguments(tmp_path))
