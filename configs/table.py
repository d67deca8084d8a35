"""Fine-tuning on your own files: TSV, CSV, JSON Lines or Parquet with named columns.

    --config configs/table.py --config.task.train=train.csv --config.task.dev=dev.csv

The default columns are `text` and `label`; set others with --config.task.text_a=…, .text_b=… (for
pairs) and .label=…. `configs/table.py:classes` is for multiple labels per example, `:number` for
regression.
"""

from bert_jax.config.schema import FinetuneConfig, TaskConfig


def get_config(argument: str = "class") -> FinetuneConfig:
    """Return the config of an objective: class, classes or number."""
    return FinetuneConfig(task=TaskConfig(objective=argument))
