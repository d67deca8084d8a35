"""Relevance of documents to queries, for cross-encoders, evaluated by reranking what BM25 finds."""

import collections
import math
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from bert_jax.errors import UserError
from bert_jax.tasks import embeddings, metrics
from bert_jax.tasks.base import Logits, Text
from bert_jax.tasks.tables import Classification, Row, probabilities


class Relevance(Classification):
    """Pairs of a query and a document with a relevance from 0 to 1 (monoBERT, arXiv 1901.04085).

    Dev and test are tables too, scored by correlation; or folders in BEIR's layout, where the documents
    that BM25 ranks highest for each query are ranked again by the model.
    """

    def __init__(self, *args: Any, **options: Any):
        self._data: dict[str, tuple[embeddings.Retrieval, list[np.ndarray]]] = {}
        super().__init__(*args, **options)

    def rows(self, split: str, source: str | Sequence[Text]) -> Iterator[Row]:
        """Yield the rows of a table, or the query and each candidate of a folder."""
        if split == "train" or not isinstance(source, str) or not pathlib.Path(source).is_dir():
            yield from super().rows(split, source)
            return
        data = embeddings.read_beir(pathlib.Path(source), (split, "test"))
        candidates = bm25(data, embeddings.RANKED)
        self._data[split] = data, candidates
        score = metrics.retrieval(candidates, data.relevant)["ndcg_at_10"]
        self.report.append(f"{split}: candidates by BM25, whose nDCG@10 is {score:.4f}")
        self.best_by = data.best_by if split == "dev" else self.best_by
        documents = list(data.documents.values())
        for query, text, indices in zip(
            data.queries, data.queries.values(), candidates, strict=True
        ):
            for i in indices.tolist():
                yield Row(f"{source}: {query}", f"{query} {i}", text, documents[i], None)

    def _target(self, row: Row, ids: dict[str, int]) -> Any:
        value = super()._target(row, ids)
        if not (math.isnan(value) or 0 <= value <= 1):
            raise UserError(
                f"{row.where}: relevance is {value:g}: it must be from 0 to 1; scale it"
            )
        return value

    def stacked(self, logits: Logits) -> Float[np.ndarray, "E 1"]:
        """Return the predicted relevance of all examples, from 0 to 1."""
        return probabilities(super().stacked(logits), "classes")

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """Return metrics of the ranking, or correlations."""
        if split not in self._data:
            return super().score(split, logits)
        ranked = [documents for documents, _ in self._rank(split, logits)]
        return metrics.retrieval(ranked, self._data[split][0].relevant)

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Write predictions.trec of a folder, or predictions.tsv."""
        if split in self._data:
            self._data[split][0].write_ranking(self._rank(split, logits), folder)
        else:
            super().write(split, logits, folder)

    def _rank(self, split: str, logits: Logits) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the candidates of each query by their logits, and these."""
        _, candidates = self._data[split]
        scores = np.concatenate(logits)
        ranking, ends = [], np.cumsum([len(indices) for indices in candidates])
        for indices, values in zip(candidates, np.split(scores, ends[:-1]), strict=True):
            order = np.argsort(-values, kind="stable")
            ranking.append((indices[order], values[order]))
        return ranking


def bm25(data: embeddings.Retrieval, count: int) -> list[Int[np.ndarray, " _"]]:
    """Return up to `count` documents of each query by BM25 with k1 = 0.9 and b = 0.4, as in Anserini.

    Words are runs of letters and digits, lowercased. Documents without a word of the query are left out.
    """
    texts = [collections.Counter(_words(text)) for text in data.documents.values()]
    lengths = np.array([words.total() for words in texts], np.float64)
    norm = 0.9 * (1 - 0.4 + 0.4 * lengths / max(lengths.mean(), 1))
    postings: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for i, words in enumerate(texts):
        for word, number in words.items():
            postings[word].append((i, number))
    result = []
    for query in data.queries.values():
        scores = np.zeros(len(texts))
        for word in filter(postings.__contains__, _words(query)):
            i, number = np.array(postings[word]).T
            idf = math.log(1 + (len(texts) - len(i) + 0.5) / (len(i) + 0.5))
            scores[i] += idf * number / (number + norm[i])
        best = np.argsort(-scores, kind="stable")[:count]
        result.append(best[scores[best] > 0])
    return result


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
