"""Pairs of texts to train sentence embeddings on, with held-out data to evaluate the vectors."""

import pathlib

import numpy as np

from bert_jax.config.schema import TaskConfig
from bert_jax.data import tables
from bert_jax.data.examples import Examples
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.tasks import embeddings
from bert_jax.tasks.base import Logits
from bert_jax.tasks.tables import encode


class Pairs:
    """A `FinetuneDataset` of anchors, positives and negatives, without a head: logits are vectors.

    A training example is a row of a table: `text_a`, the anchor; `text_b`, the positive, or the
    anchor again if `text_b` is ""; and the columns `negatives`. The other splits hold single texts,
    of a table or a folder that `embeddings.read` reads. `labels` is not used, as there are none.

    Attributes:
        texts_per_example: number of texts of a training example.
    """

    head = ""
    objective = "contrastive"
    labels = ()

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        training: bool = True,
        labels: tuple[str, ...] = (),
    ):
        self.config = config
        columns = [config.text_a, config.text_b or config.text_a, *config.negatives]
        self.texts_per_example = len(columns)
        self.report: list[str] = []
        self.splits: dict[str, Examples] = {}
        self._data: dict[str, embeddings.Similarity | embeddings.Retrieval] = {}
        self.best_by = ""
        for name in ("train", "dev", "test"):
            source = getattr(config, name)
            if not source or (name == "train" and not training):
                continue
            if name == "train":
                records = tables.read(source, list(dict.fromkeys(columns)))
                texts = [fields[column] for _, fields in records for column in columns]
                if not texts:
                    raise UserError(f"{source} (train) holds no rows: add at least one")
            else:
                pair = [config.text_a, config.text_b, *config.negatives] if config.text_b else []
                qrels = ("dev", "test") if name == "dev" else ("test",)
                data = embeddings.read(source, config.similarity, pair, qrels)
                self._data[name], texts = data, data.texts
                self.best_by = self.best_by or data.best_by
            tokens, a_length, note = encode(vocabulary, texts, [None] * len(texts), config.tokens)
            group = self.texts_per_example if name == "train" else 1
            examples = Examples(tokens, a_length, group=group)
            if name != "train":  # evaluated texts are known by their label
                examples.targets["label"] = np.zeros(len(examples), np.float32)
            self.splits[name] = examples
            self.report.append(f"{name}: {len(texts):,} texts{note}")

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """Return correlations, or metrics of retrieval."""
        return self._data[split].score(np.stack(logits))

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Write cosines or rankings."""
        self._data[split].write(np.stack(logits), folder)
