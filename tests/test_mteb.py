"""The adapter for MTEB on tasks with local data; skipped without the extra mteb."""

import datasets
import numpy as np
import pytest

import bert_jax
from bert_jax.tasks import embeddings
from tests.helpers.checkpoints import WORDS, small_run

mteb = pytest.importorskip("mteb", reason="needs the extra mteb")
from mteb import TaskMetadata  # noqa: E402
from mteb.abstasks import AbsTaskRetrieval, AbsTaskSTS  # noqa: E402


def metadata(name, kind, score):
    return TaskMetadata(
        name=name, type=kind, main_score=score, category="t2t", modalities=["text"],
        dataset={"path": "local/local", "revision": "1"}, description="", reference=None,
        eval_splits=["test"], eval_langs=["eng-Latn"], date=None, domains=None, license=None,
        task_subtypes=None, annotations_creators=None, dialect=None, sample_creation=None, bibtex_citation="",
    )  # fmt: skip


RNG = np.random.default_rng(0)
TEXTS = [" ".join(RNG.choice(WORDS[5:], 6)) for _ in range(40)]
SCORES = RNG.random(20).tolist()


class Similarity(AbsTaskSTS):
    metadata = metadata("LocalSTS", "STS", "cosine_spearman")
    min_score, max_score = 0, 1

    def load_data(self, **_):
        rows = {"sentence1": TEXTS[::2], "sentence2": TEXTS[1::2], "score": SCORES}
        self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows)})
        self.data_loaded = True


class Retrieval(AbsTaskRetrieval):
    metadata = metadata("LocalRetrieval", "Retrieval", "ndcg_at_10")

    def load_data(self, **_):
        names = [f"t{i}" for i in range(40)]
        corpus = {"id": names[10:], "title": [""] * 30, "text": TEXTS[10:]}
        queries = {"id": names[:10], "text": TEXTS[:10]}
        split = {
            "corpus": datasets.Dataset.from_dict(corpus),
            "queries": datasets.Dataset.from_dict(queries),
            "relevant_docs": {f"t{i}": {f"t{10 + i}": 1, f"t{25 + i}": 1} for i in range(10)},
            "top_ranked": None,
        }
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


def test_scores_are_those_of_evaluate_embeddings(tmp_path):
    model = bert_jax.load(small_run(tmp_path / "run"))
    encoder = bert_jax.mteb(model, pooling="cls")
    assert isinstance(encoder, mteb.EncoderProtocol)
    tasks = [Similarity(), Retrieval()]
    cache = mteb.ResultCache(tmp_path / "cache")
    results = mteb.evaluate(encoder, tasks, cache=cache, show_progress_bar=False)
    similarity, retrieval = (result.get_score() for result in results.task_results)
    vectors = model.embed(TEXTS, pooling="cls")
    expected = embeddings.Similarity(TEXTS, np.array(SCORES)).score(vectors)
    assert similarity == pytest.approx(expected["spearman"], abs=1e-5)
    queries, documents = ({f"{i}": TEXTS[i] for i in range(*x)} for x in ((0, 10), (10, 40)))
    relevant = [{i: 1.0, 15 + i: 1.0} for i in range(10)]
    expected = embeddings.Retrieval(queries, documents, relevant).score(vectors)
    assert retrieval == pytest.approx(expected["ndcg_at_10"], abs=1e-5)


def test_prompts_apply_by_type(tmp_path):
    model = bert_jax.load(small_run(tmp_path / "run"))
    encoder = bert_jax.mteb(model, prompts={"query": "the "})
    kinds = mteb.types.PromptType
    for kind, text in ((kinds.query, "the cat"), (kinds.document, "cat"), (None, "cat")):
        got = encoder.encode([{"text": ["cat"]}], prompt_type=kind)
        np.testing.assert_allclose(got, model.embed([text]), atol=1e-6)
