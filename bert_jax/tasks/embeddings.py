"""Held-out data for sentence embeddings: similarity of pairs of texts (STS), and retrieval (BEIR)."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from bert_jax.data import tables
from bert_jax.errors import UserError
from bert_jax.tasks import metrics
from bert_jax.tasks.tables import (
    PREDICTIONS,
    existing,
    read_number,
    text_cells,
    write_table,
)

RUN = "predictions.trec"
# Documents ranked per query; BEIR reports recall at 100.
RANKED = 100
_CHUNK_SCORES = 1 << 26  # of the matrix of queries and documents
_FILES = ("corpus.jsonl", "queries.jsonl")


@dataclasses.dataclass(frozen=True)
class Similarity:
    """Pairs of texts whose similarity is known, as in STS-B.

    `score` and `write` take the vectors of `texts` in their order.

    Attributes:
        texts: both texts of the first pair, of the second, and so on.
        scores: similarity of each pair, on any scale.
        best_by: the metric that selects the best checkpoint.
    """

    texts: list[str]
    scores: Float[np.ndarray, " E"]
    best_by: str = "spearman"

    def score(self, vectors: Float[np.ndarray, "N D"]) -> dict[str, float]:
        """Return Pearson and Spearman correlation of cosine and similarity."""
        scores = metrics.regression(self.scores, self._cosines(vectors))
        return {name: scores[name] for name in ("pearson", "spearman")}

    def write(self, vectors: Float[np.ndarray, "N D"], folder: pathlib.Path) -> None:
        """Write predictions.tsv with the cosine and the texts of each pair."""
        pairs = zip(self._cosines(vectors), self.texts[::2], self.texts[1::2], strict=True)
        lines = ([str(i), f"{x:.6f}", *text_cells(a, b)] for i, (x, a, b) in enumerate(pairs))
        write_table(folder / PREDICTIONS, [["index", "cosine", "text_a", "text_b"], *lines])

    def _cosines(self, vectors: Float[np.ndarray, "N D"]) -> Float[np.ndarray, " E"]:
        unit = unit_vectors(vectors)
        return np.einsum("ed,ed->e", unit[::2], unit[1::2], dtype=np.float64)


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """Queries and documents, ranked for each query by cosine similarity.

    `score` and `write` take the vectors of `texts` in their order.

    Attributes:
        queries, documents: texts by identifier.
        relevant: for each query, grades above 0 of its relevant documents, by their index. A document
            with the identifier of the query is ranked only if it is relevant. (BEIR never ranks it.)
        best_by: the metric that selects the best checkpoint.
    """

    queries: dict[str, str]
    documents: dict[str, str]
    relevant: list[dict[int, float]]
    best_by: str = "ndcg_at_10"

    @property
    def texts(self) -> list[str]:
        return [*self.queries.values(), *self.documents.values()]

    def score(self, vectors: Float[np.ndarray, "N D"]) -> dict[str, float]:
        """Return nDCG and mean reciprocal rank at 10, and recall at 1, 10 and 100."""
        ranked = [documents for documents, _ in self.rank(vectors)]
        return metrics.retrieval(ranked, self.relevant)

    def write(self, vectors: Float[np.ndarray, "N D"], folder: pathlib.Path) -> None:
        """Write the ranking to predictions.trec."""
        self.write_ranking(self.rank(vectors), folder)

    def write_ranking(
        self, ranking: Sequence[tuple[np.ndarray, np.ndarray]], folder: pathlib.Path
    ) -> None:
        """Write documents and scores of each query to predictions.trec, in the format of trec_eval."""
        names, lines = list(self.documents), []
        for query, (ranked, scores) in zip(self.queries, ranking, strict=True):
            lines += [
                [query, "Q0", names[document], str(position), f"{score:.6f}", "bert_jax"]
                for position, (document, score) in enumerate(zip(ranked, scores, strict=True), 1)
            ]
        write_table(folder / RUN, lines, " ")

    def rank(self, vectors: Float[np.ndarray, "N D"]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each query the indices of its nearest documents, nearest first, and cosines."""
        unit = unit_vectors(vectors)
        queries, documents = unit[: len(self.queries)], unit[len(self.queries) :]
        count, ranking = min(RANKED, len(documents)), []
        indices = {name: i for i, name in enumerate(self.documents)}
        same = [indices.get(name, -1) for name in self.queries]
        same = [-1 if i in grades else i for i, grades in zip(same, self.relevant, strict=True)]
        size = max(_CHUNK_SCORES // len(documents), 1)
        for start in range(0, len(queries), size):
            scores = queries[start : start + size] @ documents.T
            for row, excluded in zip(scores, same[start : start + size], strict=True):
                if excluded >= 0:
                    row[excluded] = -np.inf
                least = np.partition(row, -count)[-count]
                nearest = np.flatnonzero((row >= least) & np.isfinite(row))
                # Documents of equal score are ranked by their index.
                nearest = nearest[np.argsort(-row[nearest], kind="stable")][:count]
                ranking.append((nearest, row[nearest]))
        return ranking


def read(
    path: str | pathlib.Path,
    similarity: Sequence[str],
    pair: Sequence[str],
    qrels: Sequence[str] = ("test",),
) -> Similarity | Retrieval:
    """Read held-out data, whose kind follows from the path and the columns.

    Args:
        path: a folder in BEIR's layout; or a table with the columns of `similarity`, or of pairs.
        similarity: columns of two texts and their similarity.
        pair: columns of texts: a query, a document that is relevant to it and, optionally, others
            that are not. Each query is compared with the documents of all rows.
        qrels: names of files in the BEIR folder's qrels/, without .tsv; the first that exists.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        return read_beir(path, qrels)
    first = next(tables.read(path, [], optional=[*similarity, *pair]), None)
    columns = first.fields.keys() if first else {}
    if similarity and {*similarity} <= {*columns}:
        return read_similarity(path, similarity)
    if pair and {*pair} <= {*columns}:
        return read_pairs(path, pair)
    needed = " or ".join(", ".join(names) for names in (similarity, pair) if names)
    raise UserError(
        f"{path}: it needs the columns {needed} (it has: {', '.join(columns)[:200] or 'no rows'}); "
        "rename them, or name the file's columns"
    )


def read_similarity(path: pathlib.Path, columns: Sequence[str]) -> Similarity:
    """Read a table with two texts and a number in each row."""
    a, b, score = columns
    texts, scores = [], []
    for where, fields in tables.read(path, [a, b], [score]):
        texts += [fields[a], fields[b]]
        scores.append(read_number(where, fields[score]))
    return Similarity(_not_empty(texts, path), np.array(scores, np.float64))


def read_pairs(path: pathlib.Path, columns: Sequence[str]) -> Retrieval:
    """Read a table with a query, a relevant document and irrelevant ones in each row."""
    queries: dict[str, set[str]] = {}
    documents: dict[str, int] = {}
    for _, fields in tables.read(path, columns):
        query, *texts = (fields[name] for name in columns)
        queries.setdefault(query, set()).add(texts[0])
        for text in texts:
            documents.setdefault(text, len(documents))
    relevant = [{documents[text]: 1.0 for text in texts} for texts in queries.values()]
    names = [f"q{i}" for i in range(len(queries))]
    return Retrieval(
        dict(zip(names, _not_empty(queries, path), strict=True)),
        {f"d{i}": text for text, i in documents.items()},
        relevant,
    )


def read_beir(folder: pathlib.Path, qrels: Sequence[str] = ("test",)) -> Retrieval:
    """Read a folder in BEIR's layout (Thakur et al., arXiv 2104.08663).

    corpus.jsonl has `_id`, `text` and optionally `title`, which is prepended to the text;
    queries.jsonl `_id` and `text`; qrels/NAME.tsv the columns query-id, corpus-id and score. The files
    may be compressed. `qrels` as in `read`.
    """
    corpus, queries = (_find(folder, [name]) for name in _FILES)
    judged = _find(folder, [f"qrels/{name}.tsv" for name in qrels])
    documents = _texts(corpus)
    indices = {name: i for i, name in enumerate(documents)}
    grades: dict[str, dict[int, float]] = {}
    for where, fields in tables.read(judged, ["query-id", "corpus-id"], ["score"], kind=".tsv"):
        query, document = fields["query-id"], fields["corpus-id"]
        if document not in indices:
            raise UserError(f"{where}: {corpus.name} has no document {document!r}")
        grade = read_number(where, fields["score"])
        relevant = grades.setdefault(query, {})
        if grade > 0:
            relevant[indices[document]] = grade
    texts = _texts(queries)
    for name in grades:
        if name not in texts:
            raise UserError(f"{judged}: {queries.name} has no query {name!r}")
    _not_empty(filter(None, grades.values()), judged)
    names = [name for name in texts if name in grades]
    return Retrieval({name: texts[name] for name in names}, documents, [grades[n] for n in names])


def _find(folder: pathlib.Path, names: Iterable[str]) -> pathlib.Path:
    if path := next(filter(None, (existing(folder / name) for name in names)), ""):
        return pathlib.Path(path)
    raise UserError(
        f"{folder}: no {' or '.join(names)}; a folder in BEIR's layout has {', '.join(_FILES)} and "
        "qrels/test.tsv"
    )


def _texts(path: pathlib.Path) -> dict[str, str]:
    texts = {}
    for where, fields in tables.read(path, ["text"], ["_id"], optional=["title"], empty=True):
        name, title = fields["_id"], fields.get("title") or ""
        name = str(name) if type(name) is int else name
        if not isinstance(name, str) or not name or name in texts or len(name.split()) > 1:
            raise UserError(
                f"{where}: {name!r} is not an identifier: each line needs its own, a text without spaces or a whole number"
            )
        texts[name] = f"{title} {fields['text']}".strip()
    return texts


def _not_empty(items: Iterable[Any], path: pathlib.Path) -> list[Any]:
    items = list(items)
    if not items:
        raise UserError(f"{path}: it has no rows to evaluate on; add at least one")
    return items


def unit_vectors(vectors: np.ndarray) -> Any:
    """Scale vectors, the last axis, to unit length."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
