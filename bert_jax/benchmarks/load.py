"""Choose the class that reads a task's data."""

import dataclasses
from typing import Any

from bert_jax import storage
from bert_jax.benchmarks.base import FinetuneDataset
from bert_jax.config import TaskConfig
from bert_jax.data import tables
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError

# Fields of a task that are paths.
_PATH_FIELDS = ("data", "train", "dev", "test")


def load_dataset(
    task: TaskConfig, vocabulary: Vocabulary, labels: tuple[str, ...] = (), **options: Any
) -> FinetuneDataset:
    """Read and tokenize the data of a task.

    Args:
        task: the task and where its data are.
        vocabulary: the model's vocabulary.
        labels: labels of a model that is already fine-tuned.
        options: further arguments of the dataset's class.
    """
    if options.get("new") and task.kind == "pairs":
        raise UserError(
            "a model that was fine-tuned on pairs has vectors, no predictions: use `bert-jax embed`, or "
            "`bert-jax evaluate-embeddings` for data with answers"
        )
    if options.get("new") == tables.STANDARD_INPUT and task.kind in ("squad", "choice"):
        raise UserError(
            f"lines from standard input do not suffice for a task of kind {task.kind!r}: pass a file "
            "in the layout of the fine-tuning data"
        )
    local_paths = {name: str(storage.local(getattr(task, name))) for name in _PATH_FIELDS}
    task = dataclasses.replace(task, **local_paths)
    if task.kind == "squad":
        from bert_jax.benchmarks.squad import Squad as kind
    elif task.kind == "pairs":
        from bert_jax.benchmarks.pairs import Pairs as kind
    elif task.kind == "tagging":
        from bert_jax.benchmarks.conll import TokenClassification as kind
    elif task.kind == "choice":
        from bert_jax.benchmarks.swag import MultipleChoice as kind
    elif task.name:
        from bert_jax.benchmarks.glue import Glue as kind
    else:
        from bert_jax.benchmarks.tables import Classification as kind
    return kind(task, vocabulary, labels=labels, **options)
