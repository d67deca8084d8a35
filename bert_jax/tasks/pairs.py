"""Pairs of texts to train sentence embeddings on, with held-out data to evaluate the vectors."""

import pathlib

import numpy as np

from bert_jax.config.schema import TaskConfig
from bert_jax.data import tables
from bert_jax.data.examples import Examples
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import counted
from bert_jax.tasks import embeddings
from bert_jax.tasks.base import FinetuneDataset, Logits
from bert_jax.tasks.tables import encode, read_splits


class Pairs(FinetuneDataset):
    """A dataset of anchors, positives and negatives, without a head: logits are vectors.

    A training example is a row of a table: `text_a`, the anchor; `text_b`, the positive, or the
    anchor again if `text_b` is ""; and the columns `negatives`. The other splits hold single texts,
    of a table or a folder that `embeddings.read` reads. `labels` is not used, as there are none.

    Attributes:
        texts_per_example: number of texts of a training example.
    """

    head = ""
    objective = "contrastive"

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        training: bool = True,
        labels: tuple[str, ...] = (),
    ):
        self.config = config
        self._columns = [config.text_a, config.text_b or config.text_a, *config.negatives]
        self.texts_per_example = len(self._columns)
        self.report, self.splits, self.best_by = [], {}, ""
        self._data: dict[str, embeddings.Similarity | embeddings.Retrieval] = {}
        sources = {
            name: path for name in ("train", "dev", "test") if (path := getattr(config, name))
        }
        for name, texts in read_splits(sources, training, self._texts).items():
            if name != "train":
                self.best_by = self.best_by or self._data[name].best_by
            tokens, a_length, note = encode(vocabulary, texts, [None] * len(texts), config.tokens)
            group = self.texts_per_example if name == "train" else 1
            examples = Examples(tokens, a_length, group=group)
            if name != "train":  # evaluated texts are known by their label
                examples.targets["label"] = np.zeros(len(examples), np.float32)
            self.splits[name] = examples
            self.report.append(f"{name}: {counted(len(texts), 'text')}{note}")

    def _texts(self, split: str, source: str) -> list[str]:
        """Return the texts of a split, and keep what evaluated ones are compared by."""
        config = self.config
        if split == "train":
            records = tables.read(source, list(dict.fromkeys(self._columns)))
            return [fields[column] for _, fields in records for column in self._columns]
        pair = self._columns if config.text_b else []
        qrels = ("dev", "test") if split == "dev" else ("test",)
        self._data[split] = embeddings.read(source, config.similarity, pair, qrels)
        return self._data[split].texts

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """Return correlations, or metrics of retrieval."""
        return self._data[split].score(np.stack(logits))

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Write cosines or rankings."""
        self._data[split].write(np.stack(logits), folder)
