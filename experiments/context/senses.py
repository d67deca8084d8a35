"""Measure how well a model separates the senses of a word, by layer.

    python experiments/context/senses.py --init MODEL --out FOLDER

The word's vector in each sentence of sentences.tsv is taken from every layer, 0 being the
embeddings, which know the word and its place alone. Of each word and layer metrics.json has

neighbor      of the sentences those whose nearest (by cosine, leaving the sentence itself out) has
              the word in the same sense
silhouette    of the senses, by cosine distance: 1 apart, 0 not at all
places        of each sentence in the plane of the two main components

and of each word "chance", the mean share of such neighbors with the senses dealt out at random, and
"chance_high", what one in twenty of these deals exceeds (of a thousand, in the last layer).
"""

import argparse
import csv
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

SENTENCES = pathlib.Path(__file__).parent / "sentences.tsv"
_DEALS = 1_000


def read() -> dict[str, list[tuple[str, str]]]:
    """Return the senses and sentences of each word."""
    found: dict[str, list[tuple[str, str]]] = {}
    with open(SENTENCES, newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            found.setdefault(row["word"], []).append((row["sense"], row["sentence"]))
    return found


def measure(vectors: np.ndarray, senses: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of a word.

    Args:
        vectors: [sentences, layers, D].
        senses: of the sentences.
    """
    from sklearn.metrics import silhouette_score

    labels = np.unique(senses, return_inverse=True)[1]
    told: dict[str, Any] = {"senses": list(senses), "neighbor": [], "silhouette": [], "places": []}
    for x in vectors.swapaxes(0, 1).astype(np.float64):
        unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        likeness = unit @ unit.T
        np.fill_diagonal(likeness, -np.inf)
        nearest = likeness.argmax(1)
        told["neighbor"].append(float((labels[nearest] == labels).mean()))
        # Where vectors differ in nothing, rounding makes distances a little negative.
        distance = np.maximum(1 - unit @ unit.T, 0)
        np.fill_diagonal(distance, 0)
        told["silhouette"].append(float(silhouette_score(distance, labels, metric="precomputed")))
        centered = unit - unit.mean(0)
        u, s, _ = np.linalg.svd(centered, full_matrices=False)
        places = u[:, :2] * s[:2]
        # The signs of components are anybody's.
        places = places * np.where(places[0] < 0, -1, 1)
        told["places"].append(places.round(4).tolist())
    draw = np.random.default_rng(0)
    deals = [draw.permutation(labels) for _ in range(_DEALS)]
    shares = [(deal[nearest] == deal).mean() for deal in deals]
    told["chance"] = float(np.mean(shares))
    told["chance_high"] = float(np.quantile(shares, 0.95))
    return told


def vectors(source: str) -> dict[str, np.ndarray]:
    """Return the vectors of each word in its sentences, [sentences, layers, D], embeddings first.

    Args:
        source: as `convert.source.open_model` takes it.

    Raises:
        UserError: what `open_model` raises; a sentence in which the word is not there once.
    """
    from bert_jax.convert.source import open_model
    from bert_jax.embed import Embedder
    from bert_jax.errors import UserError

    config, vocabulary, params, _ = open_model(source)
    layers = config.model.layers + 1
    config.embed.pooling, config.embed.normalize = "none", False
    config.embed.layers = ",".join(map(str, range(layers)))
    embedder = Embedder(config, vocabulary, params)
    found = {}
    for word, sentences in read().items():
        (own,) = vocabulary.encode_all([word])
        own = list(own.ids)
        found[word] = []
        texts = [text for _, text in sentences]
        for text, (tokens, states) in zip(texts, embedder.with_tokens(texts), strict=True):
            ids = tokens.tolist()
            at = [i for i in range(len(ids)) if ids[i : i + len(own)] == own]
            if len(at) != 1:
                raise UserError(f"{word!r} is {len(at)} times in {text!r}: it must be there once")
            states = states[at[0] : at[0] + len(own)].mean(0)
            found[word].append(states.reshape(layers, -1))
    return {word: np.stack(states) for word, states in found.items()}


def main() -> None:
    """Embed the sentences, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--init", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()

    from bert_jax import device

    device.start("")
    sentences = read()
    found = {
        word: measure(states, [sense for sense, _ in sentences[word]])
        for word, states in vectors(options.init).items()
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "metrics.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
