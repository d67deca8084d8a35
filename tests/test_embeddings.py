"""Evaluation of sentence embeddings: metrics against scikit-learn, data files, and the command."""

import gzip
import json

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import ndcg_score
from sklearn.metrics.pairwise import cosine_similarity

from bert_jax import cli
from bert_jax.tasks import embeddings
from tests.helpers import checkpoints
from tests.helpers.runs import refused

STS, PAIR = ("sentence1", "sentence2", "score"), ("anchor", "positive")


def random_retrieval(queries=9, documents=40, seed=0):
    rng = np.random.default_rng(seed)
    relevant = [
        {int(i): float(rng.integers(1, 4)) for i in rng.permutation(documents)[: rng.integers(1, 15)]}
        for _ in range(queries)
    ]  # fmt: skip
    names = [
        {f"{kind}{i}": f"text {i}" for i in range(n)}
        for kind, n in (("q", queries), ("d", documents))
    ]
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
    hits = np.take_along_axis(truth, order, 1)[:, :10] > 0
    reciprocal = np.where(hits.any(1), 1 / (1 + hits.argmax(1)), 0)
    assert result["mrr_at_10"] == pytest.approx(reciprocal.mean())
    assert len({*np.round(list(result.values()), 4)}) == 5


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
    data = embeddings.Similarity(["w"] * 40, rng.integers(0, 6, 20).astype(float))
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
    assert lines[1].startswith(f"0\t{cosines[0]:.6f}\t{data.texts[0]}\t")


QRELS = "query-id\tcorpus-id\tscore\n"


def beir(folder, changes=()):
    """Write a small folder in BEIR's layout; `changes` replaces files, or removes them by None."""
    corpus = [
        {"_id": "a", "title": "Cat", "text": "sat"},
        {"_id": "b", "title": "", "text": "mat"},
        {"_id": "c", "text": "on"},
    ]
    queries = [{"_id": "x", "text": "un"}, {"_id": "y", "text": "the"}]
    files = {
        "corpus.jsonl": "".join(f"{json.dumps(row)}\n" for row in corpus),
        "queries.jsonl": "".join(f"{json.dumps(row)}\n" for row in queries),
        "qrels/test.tsv": f"{QRELS}x\tb\t2\nx\tc\t1\nx\ta\t0\n",
        **dict(changes),
    }
    (folder / "qrels").mkdir(parents=True)
    for name, content in files.items():
        if content is not None:
            (folder / name).write_text(content)
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
    (tmp_path / "b" / "qrels" / "dev.tsv").write_text(f"{QRELS}y\ta\t1\n")
    assert embeddings.read(tmp_path / "b", STS, PAIR, ("dev", "test")).texts[0] == "the"


def test_relevant_documents_are_ranked_whatever_their_identifier(tmp_path):
    """As by trec_eval: the document of the query's name, whole numbers as names, grades of 0, ties."""
    folder = beir(
        tmp_path / "b",
        {
            "corpus.jsonl": "".join(f'{{"_id": {i}, "text": "t{i}"}}\n' for i in range(4)),
            "queries.jsonl": '{"_id": 2, "text": "a"}\n{"_id": "3", "text": "b"}\n',
            "qrels/test.tsv": f"{QRELS}2\t2\t1\n3\t1\t0\n",
        },
    )
    data = embeddings.read(folder, STS, PAIR)
    assert data.relevant == [{2: 1.0}, {}]
    ranked = [documents.tolist() for documents, _ in data.rank(np.ones((6, 2), np.float32))]
    assert ranked == [[0, 1, 2, 3], [0, 1, 2]]
    scores = data.score(np.ones((6, 2), np.float32))
    assert (scores["mrr_at_10"], scores["recall_at_10"]) == (1 / 3 / 2, 1 / 2)


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
    ("content", "key"),
    [
        ("anchor,positive\n", "no rows"),
        ("sentence1,sentence2,score\nx,y,good\n", "t.csv:2: 'good'"),
        ("sentence1,sentence2,score\nx,y,1_5\n", "t.csv:2: '1_5'"),
    ],
)
def test_invalid_table_is_rejected(tmp_path, content, key):
    (tmp_path / "t.csv").write_text(content)
    assert key in checkpoints.error_of(embeddings.read, tmp_path / "t.csv", STS, PAIR)


@pytest.mark.parametrize(
    ("file", "content", "key"),
    [
        ("queries.jsonl", None, "queries.jsonl"),
        ("qrels/test.tsv", f"{QRELS}z\ta\t1\n", "no query 'z'"),
        ("qrels/test.tsv", f"{QRELS}x\tz\t1\n", "test.tsv:2: corpus.jsonl has no document 'z'"),
        ("qrels/test.tsv", f"{QRELS}x\ta\t0\n", "no rows"),
        ("corpus.jsonl", '{"_id": "a", "text": "b"}\n' * 2, "corpus.jsonl:2: 'a'"),
    ],
)
def test_invalid_beir_folder_is_rejected(tmp_path, file, content, key):
    folder = beir(tmp_path / "b", {file: content})
    assert key in checkpoints.error_of(embeddings.read, folder, STS, PAIR)


def test_evaluate_embeddings_command(tmp_path, capsys):
    run = checkpoints.small_run(tmp_path / "run", masked_lm=False, next_sentence=False)
    table = tmp_path / "t.csv"
    table.write_text("q,d\ncat,cat\nmat,mat\nsat,sat\n")
    command = ["evaluate-embeddings", "--init", str(run)]
    assert cli.main([*command, "--columns", "q,d", str(table), str(beir(tmp_path / "b"))]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == str(table)
    assert shown[1].split() == ["ndcg_at_10", "1.0000"]
    assert shown[6] == str(tmp_path / "b")
    assert "--columns" in refused(capsys, *command, "--columns", "q", table)
