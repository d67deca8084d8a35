"""Evaluation of sentence embeddings: metrics against scikit-learn, data files, and the command."""

import gzip
import json

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import ndcg_score
from sklearn.metrics.pairwise import cosine_similarity

from bert_jax import cli
from bert_jax.config.schema import ModelConfig
from bert_jax.errors import UserError
from bert_jax.tasks import embeddings, metrics
from tests.helpers import checkpoints
from tests.helpers.runs import refused

STS, PAIR = ("sentence1", "sentence2", "score"), ("anchor", "positive")


def random_retrieval(queries=9, documents=40, seed=0):
    rng = np.random.default_rng(seed)
    relevant = [
        {int(i): float(rng.integers(1, 4)) for i in rng.permutation(documents)[: rng.integers(1, 15)]}
        for _ in range(queries)
    ]  # fmt: skip
    names = [{f"{kind}{i}": f"text {i}" for i in range(n)} for kind, n in (("q", queries), ("d", documents))]  # fmt: skip
    vectors = rng.normal(size=(queries + documents, 5)).astype(np.float32)
    return embeddings.Retrieval(*names, relevant), vectors


def test_retrieval_metrics_match_scikit_learn():
    data, vectors = random_retrieval()
    scores = cosine_similarity(vectors[:9], vectors[9:])
    truth = np.array([[grades.get(i, 0.0) for i in range(40)] for grades in data.relevant])
    result = data.score(vectors)
    assert result["ndcg_at_10"] == pytest.approx(ndcg_score(truth, scores, k=10), abs=1e-6)
    order = np.argsort(-scores, 1)
    for k in (1, 10, 100):
        hits = [sum(truth[q, d] > 0 for d in order[q, :k]) / (truth[q] > 0).sum() for q in range(9)]
        assert result[f"recall_at_{k}"] == pytest.approx(np.mean(hits))
    ranks = [next((i + 1 for i, d in enumerate(order[q, :10]) if truth[q, d]), np.inf) for q in range(9)]  # fmt: skip
    assert result["mrr_at_10"] == pytest.approx(np.mean(1 / np.array(ranks)))
    assert len({*np.round(list(result.values()), 4)}) == 5


def test_retrieval_metrics_with_fewer_documents_than_k():
    result = metrics.retrieval([np.array([2, 0])], [{0: 1.0, 1: 1.0, 5: 1.0}])
    ideal = 1 + 1 / np.log2(3) + 1 / np.log2(4)
    assert result["ndcg_at_10"] == pytest.approx(1 / np.log2(3) / ideal)
    assert (result["mrr_at_10"], result["recall_at_1"], result["recall_at_100"]) == (0.5, 0, 1 / 3)


def test_chunked_ranking_excludes_the_query_document(monkeypatch):
    data, vectors = random_retrieval()
    expected = data.rank(vectors)
    monkeypatch.setattr(embeddings, "_CHUNK_SCORES", 80)  # two queries per chunk
    for (ranked, scores), (documents, _) in zip(data.rank(vectors), expected, strict=True):
        np.testing.assert_array_equal(ranked, documents)
        assert (np.diff(scores) <= 0).all()
    renamed = {("q3" if name == "d7" else name): text for name, text in data.documents.items()}
    ranked = embeddings.Retrieval(data.queries, renamed, data.relevant).rank(vectors)
    assert 7 not in ranked[3][0]
    assert len(ranked[3][0]) == 39
    assert 7 in ranked[2][0]
    monkeypatch.setattr(embeddings, "RANKED", 3)
    nearest = embeddings.Retrieval(data.queries, data.documents, data.relevant).rank(vectors)
    for (few, _), (documents, _) in zip(nearest, expected, strict=True):
        np.testing.assert_array_equal(few, documents[:3])


def test_correlations_match_scipy(tmp_path):
    rng = np.random.default_rng(0)
    data = embeddings.Similarity([""] * 40, rng.integers(0, 6, 20).astype(float))
    vectors = rng.normal(size=(40, 5)).astype(np.float32)
    cosines = np.diag(cosine_similarity(vectors[::2], vectors[1::2]))
    assert data.score(vectors) == pytest.approx(
        {
            "pearson": stats.pearsonr(cosines, data.scores).statistic,
            "spearman": stats.spearmanr(cosines, data.scores).statistic,
        }
    )
    data.write(vectors, tmp_path)
    lines = (tmp_path / "predictions.tsv").read_text().splitlines()
    assert lines[1] == f"0\t{cosines[0]:.6f}"


def beir(folder, **changes):
    """Write a small folder in BEIR's layout; `changes` replaces files."""
    lines = {
        "corpus.jsonl": [
            {"_id": "a", "title": "Cat", "text": "sat"},
            {"_id": "b", "title": "", "text": "mat"},
            {"_id": "c", "text": "on"},
        ],
        "queries.jsonl": [{"_id": "x", "text": "un"}, {"_id": "y", "text": "the"}],
        **changes,
    }
    (folder / "qrels").mkdir(parents=True)
    for name, rows in lines.items():
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "qrels" / "test.tsv").write_text(
        "query-id\tcorpus-id\tscore\nx\tb\t2\nx\tc\t1\nx\ta\t0\n"
    )
    return folder


def test_beir_folder_is_read_and_predictions_written(tmp_path):
    data = embeddings.read(beir(tmp_path / "b"), STS, PAIR)
    assert data.texts == ["un", "Cat sat", "mat", "on"]  # y has no relevance judgments
    assert data.relevant == [{1: 2.0, 2: 1.0}]
    vectors = np.array([[1, 0], [1, 0.5], [1, 0.1], [0, 1]], np.float32)
    data.write(vectors, tmp_path)
    assert (tmp_path / "predictions.trec").read_text().splitlines() == [
        "x Q0 b 1 0.995037 bert_jax",
        "x Q0 a 2 0.894427 bert_jax",
        "x Q0 c 3 0.000000 bert_jax",
    ]
    corpus = tmp_path / "b" / "corpus.jsonl"
    (tmp_path / "b" / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    corpus.unlink()
    (tmp_path / "b" / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\ny\ta\t1\n")
    assert embeddings.read(tmp_path / "b", STS, PAIR, ("dev", "test")).texts[0] == "the"


def test_table_type_is_inferred_from_columns(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("sentence1,sentence2,score,genre\na,b,4.5,x\nc,a,0,y\n")
    data = embeddings.read(path, STS, PAIR)
    assert data.texts == ["a", "b", "c", "a"]
    assert data.scores.tolist() == [4.5, 0]
    path.write_text("anchor,positive,negative\na,b,c\nd,b,e\na,c,b\n")
    data = embeddings.read(path, STS, (*PAIR, "negative"))
    assert data.texts == ["a", "d", "b", "c", "e"]
    assert data.relevant == [{0: 1.0, 1: 1.0}, {0: 1.0}]
    assert embeddings.read(path, (), PAIR).texts == ["a", "d", "b", "c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\nx,y\n", "needs the columns sentence1, sentence2, score or anchor, positive (it has: a, b)"),
        ("anchor,positive\n", "(it has: no rows)"),
        ("sentence1,sentence2,score\nx,y,good\n", "t.csv:2: 'good' is not a number"),
        ("sentence1,sentence2,score\nx,,1\n", "t.csv:2: 'sentence2' is empty"),
    ],
)  # fmt: skip
def test_invalid_table_is_rejected(tmp_path, content, message):
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        embeddings.read(path, STS, PAIR)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (lambda f: (f / "queries.jsonl").unlink(), "no queries.jsonl; a folder in BEIR's layout has"),
        (lambda f: (f / "qrels" / "test.tsv").unlink(), "no qrels/test.tsv; a folder"),
        (
            lambda f: (f / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nz\ta\t1\n"),
            "queries.jsonl has no query 'z'",
        ),
        (
            lambda f: (f / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nx\tz\t1\n"),
            "test.tsv:2: corpus.jsonl has no document 'z'",
        ),
        (
            lambda f: (f / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nx\ta\t0\n"),
            "test.tsv: it has no rows to evaluate on",
        ),
        (
            lambda f: (f / "corpus.jsonl").write_text('{"_id": "a", "text": "b"}\n' * 2),
            "corpus.jsonl:2: 'a' is not an identifier",
        ),
    ],
)  # fmt: skip
def test_invalid_beir_folder_is_rejected(tmp_path, break_, message):
    break_(beir(tmp_path / "b"))
    with pytest.raises(UserError) as caught:
        embeddings.read(tmp_path / "b", STS, PAIR)
    assert message in str(caught.value)


def test_evaluate_embeddings_command(tmp_path, capsys):
    model = ModelConfig(
        layers=1, hidden=12, heads=3, feed_forward=20, vocab_size=len(checkpoints.WORDS),
        positions=24, masked_lm=False, next_sentence=False,
    )  # fmt: skip
    run = checkpoints.write_run(tmp_path / "run", model, checkpoints.random_params(model), checkpoints.WORDS)  # fmt: skip
    table = tmp_path / "t.csv"
    table.write_text("q,d\ncat,cat\nmat,mat\nsat,sat\n")
    command = ["evaluate-embeddings", "--init", str(run)]
    assert cli.main([*command, "--columns", "q,d", str(table), str(beir(tmp_path / "b"))]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == str(table)
    assert shown[1].split() == ["ndcg_at_10", "1.0000"]
    assert shown[6] == str(tmp_path / "b")
    assert "it must be two or three names" in refused(capsys, *command, "--columns", "q", table)
