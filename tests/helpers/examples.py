"""Random examples for every head, and plans of their batches."""

import numpy as np

from bert_jax.config.fields import with_fields
from bert_jax.config.model import HeadConfig, ModelConfig
from bert_jax.data.examples import NO_EXAMPLE, Examples, PackedBatches
from bert_jax.tasks.base import FinetuneDataset

# Heads with the objectives of their targets.
HEADS = [
    ("sequence", "class"), ("sequence", "number"), ("sequence", "classes"), ("choice", "class"),
    ("token", "class"), ("span", "class"),
]  # fmt: skip
LABELS = {
    "sequence": ("no", "maybe", "yes"), "choice": ("score",), "token": ("O", "B", "I"),
    "span": ("start", "end"),
}  # fmt: skip


def random_examples(head, objective="class", count=23, seed=0, longest=20):
    rng = np.random.default_rng(seed)
    group = 3 if head == "choice" else 1
    tokens = [
        np.array([2, *rng.integers(5, 40, rng.integers(1, longest - 2)), 3], np.int32)
        for _ in range(count * group)
    ]
    a_length = [int(rng.integers(2, len(t) + 1)) for t in tokens]
    result = Examples(tokens, a_length, group=group)
    if head == "token":
        result.token_targets["label"] = [
            np.where(rng.random(len(t)) < 0.3, NO_EXAMPLE, rng.integers(0, 3, len(t))).astype(
                np.int32
            )
            for t in tokens
        ]
    elif head == "span":
        label = [sorted(rng.integers(0, len(t), 2)) for t in tokens]
        result.targets["label"] = np.array(label, np.int32)
    elif objective == "number":
        result.targets["label"] = rng.normal(size=count).astype(np.float32)
    elif objective == "classes":
        result.targets["label"] = rng.integers(0, 2, (count, 3)).astype(np.float32)
    else:
        result.targets["label"] = rng.integers(0, 3, count).astype(np.int32)
    return result


class RandomExamples(FinetuneDataset):
    """A `FinetuneDataset` of random examples."""

    best_by = "score"

    def __init__(self, head, objective="class", **options):
        self.head, self.objective = head, objective
        self.labels = ("value",) if objective == "number" else LABELS[head]
        self.splits = {"train": random_examples(head, objective, **options)}
        self.report = []

    def score(self, split, logits):
        return {"score": float(np.mean([np.mean(x) for x in logits]))}

    def write(self, split, logits, folder):
        (folder / "done").touch()


def model_config(dataset, **changes):
    model = ModelConfig(
        layers=2, hidden=12, heads=3, feed_forward=20, vocab_size=40, positions=64, dropout=0.0,
        attention_dropout=0.0, masked_lm=False, next_sentence=False,
        head=HeadConfig(dataset.head, dataset.labels),
    )  # fmt: skip
    return with_fields(model, changes)


def plans(dataset, batch_size=7, steps=5, **options):
    examples = dataset.splits["train"]
    packed = PackedBatches(examples, batch_size, steps, (0, 1), **options)
    return packed, PackedBatches(examples, batch_size, steps, (0, 1), one_a_row=True, **options)
