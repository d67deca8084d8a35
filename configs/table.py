"""Fine-tuning on files of one's own: TSV, CSV, JSON lines or Parquet with named columns.

    --config configs/table.py --config.task.train=train.csv --config.task.dev=dev.csv

The columns are `text` and `label`; --config.task.text_a=…, .text_b=… (pairs), .label=… name others.
`configs/table.py:classes` learns several labels at a time, `:number` a number.
"""

from bert_jax.config import FinetuneConfig, TaskConfig


def get_config(argument: str = "class") -> FinetuneConfig:
    """`argument` is the objective: class, classes or number."""
    return FinetuneConfig(task=TaskConfig(objective=argument))
