"""Choose the class that reads a task's data."""

import dataclasses
from typing import Any

from bert_jax import storage
from bert_jax.config.schema import TaskConfig
from bert_jax.data import tables
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError, WrongColumn
from bert_jax.tasks.base import FinetuneDataset
from bert_jax.tasks.conll import TokenClassification
from bert_jax.tasks.glue import Glue
from bert_jax.tasks.pairs import Pairs
from bert_jax.tasks.relevance import Relevance
from bert_jax.tasks.squad import Squad
from bert_jax.tasks.swag import MultipleChoice
from bert_jax.tasks.tables import Classification

# By kind of task, besides "classification".
_DATASETS = {
    "squad": Squad,
    "pairs": Pairs,
    "tagging": TokenClassification,
    "choice": MultipleChoice,
}


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
    if not (task.train or task.data or options.get("new")) and options.get("training", True):
        raise UserError(
            "no training data: add --config.task.train=FILE, and --config.task.dev=FILE"
        )
    paths = {x: str(storage.local(getattr(task, x))) for x in ("data", "train", "dev", "test")}
    table = Relevance if task.objective == "relevance" else Classification
    kind = _DATASETS.get(task.kind, Glue if task.name else table)
    try:
        return kind(dataclasses.replace(task, **paths), vocabulary, labels=labels, **options)
    except WrongColumn as error:
        _, column, _ = error.arguments
        settings = dataclasses.asdict(task).items()
        keys = [
            key
            for key, value in settings
            if column in (value if isinstance(value, tuple) else [value])
        ]
        if options.get("new") or not keys:
            raise
        advice = f"name one of these: --config.task.{keys[0]}=COLUMN"
        raise WrongColumn(*error.arguments, advice) from None
