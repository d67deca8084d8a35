"""Measure how well a model separates the senses of a word, by layer.

    python experiments/paper/context/senses.py --init MODEL --out FOLDER

Takes the word's vector in each sentence of sentences.tsv from every layer. Layer 0 is the embeddings,
which depend only on the word and its position. metrics.json has for each word and layer

neighbor      share of sentences whose nearest other sentence, by cosine similarity of the word's
              vectors, has the word in the same sense
silhouette    silhouette score of the senses by cosine distance: 1 separated, 0 not at all

and for each word "chance", the mean of `neighbor` in the last layer over a thousand random permutations
of the senses, and "chance_high", their 95th percentile.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

SENTENCES = pathlib.Path(__file__).parent / "sentences.tsv"
_PERMUTATIONS = 1_000


def read() -> dict[str, list[tuple[str, str]]]:
    """Return the senses and sentences of each word."""
    sentences: dict[str, list[tuple[str, str]]] = {}
    for line in SENTENCES.read_text().splitlines()[1:]:
        word, sense, sentence = line.split("\t")
        sentences.setdefault(word, []).append((sense, sentence))
    return sentences


def measure(vectors: np.ndarray, senses: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of a word.

    Args:
        vectors: [sentences, layers, D].
        senses: sense of the word in each sentence.
    """
    from sklearn.metrics import silhouette_score

    labels = np.unique(senses, return_inverse=True)[1]
    metrics: dict[str, Any] = {"neighbor": [], "silhouette": []}
    for x in vectors.swapaxes(0, 1).astype(np.float64):
        unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        similarity = unit @ unit.T
        np.fill_diagonal(similarity, -np.inf)
        nearest = similarity.argmax(1)
        metrics["neighbor"].append(float((labels[nearest] == labels).mean()))
        # Rounding makes the distances of equal vectors slightly negative.
        distance = np.maximum(1 - unit @ unit.T, 0)
        np.fill_diagonal(distance, 0)
        metrics["silhouette"].append(
            float(silhouette_score(distance, labels, metric="precomputed"))
        )
    rng = np.random.default_rng(0)
    permutations = [rng.permutation(labels) for _ in range(_PERMUTATIONS)]
    shares = [(permuted[nearest] == permuted).mean() for permuted in permutations]
    metrics["chance"] = float(np.mean(shares))
    metrics["chance_high"] = float(np.quantile(shares, 0.95))
    return metrics


def vectors(source: str) -> dict[str, np.ndarray]:
    """Return the vectors of each word in its sentences, [sentences, layers, D], embeddings first.

    Args:
        source: model, as specified for `convert.source.open_model`.

    Raises:
        UserError: as for `open_model`, or a sentence does not contain its word exactly once.
    """
    from bert_jax.convert.source import open_model
    from bert_jax.errors import UserError
    from bert_jax.inference.embed import Embedder

    config, vocabulary, params, _ = open_model(source)
    layers = config.model.layers + 1
    config.embed.pooling, config.embed.normalize = "none", False
    config.embed.layers = ",".join(map(str, range(layers)))
    embedder = Embedder(config, vocabulary, params)
    states_of = {}
    for word, sentences in read().items():
        (word_ids,) = vocabulary.encode_all([word])
        word_ids = list(word_ids.ids)
        states_of[word] = []
        texts = [text for _, text in sentences]
        for text, (tokens, states) in zip(texts, embedder.with_tokens(texts), strict=True):
            ids = tokens.tolist()
            starts = [i for i in range(len(ids)) if ids[i : i + len(word_ids)] == word_ids]
            if len(starts) != 1:
                raise UserError(f"{text!r} contains {word!r} {len(starts)} times, must be once")
            states = states[starts[0] : starts[0] + len(word_ids)].mean(0)
            states_of[word].append(states.reshape(layers, -1))
    return {word: np.stack(states) for word, states in states_of.items()}


def main() -> None:
    """Embed the sentences, and measure the separation of senses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--init", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()

    from bert_jax.runtime import device

    device.start("")
    sentences = read()
    metrics = {
        word: measure(states, [sense for sense, _ in sentences[word]])
        for word, states in vectors(options.init).items()
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main()
