"""Fine-tuning a sentence encoder on pairs of texts, by multiple negatives ranking.

    --config configs/pairs.py --config.task.train=pairs.tsv --config.task.dev=dev.tsv

The columns are `anchor` and `positive`; `configs/pairs.py:triplets` adds hard negatives in `negative`.
`configs/pairs.py:simcse` needs only a column `text` (unsupervised SimCSE, Gao et al., arXiv
2104.08821). `configs/pairs.py:cross` trains a cross-encoder instead, on the columns `query`, `document`
and `score` (relevance from 0 to 1). The dev file holds pairs or triplets too, or STS (`sentence1`, `sentence2`, `score`), or
it is a folder in BEIR's layout. Other columns: --config.task.text_a=…, .text_b=…, .negatives=….
"""

from bert_jax.config.schema import EmbedConfig, FinetuneConfig, OptimConfig, TaskConfig
from bert_jax.errors import UserError

KINDS = ("pairs", "triplets", "simcse", "cross")


def get_config(argument: str = "pairs") -> FinetuneConfig:
    """Return the config of "pairs", "triplets", "simcse" or "cross"."""
    if argument not in KINDS:
        raise UserError(f"configs/pairs.py:{argument}: choose one of {', '.join(KINDS)}")
    task = TaskConfig(kind="pairs", text_a="anchor", text_b="positive")
    if argument == "triplets":
        task.negatives = ("negative",)
    if argument == "cross":
        columns = {"text_a": "query", "text_b": "document", "label": "score"}
        task = TaskConfig(objective="relevance", **columns)
    config = FinetuneConfig(
        task=task,
        epochs=1.0,
        batch_size=64,
        optim=OptimConfig(optimizer="adamw", learning_rate=2e-5),
    )
    if argument == "simcse":  # table D.1 of the paper, for BERT-base
        config.task = TaskConfig(kind="pairs", text_a="text", tokens=32)
        config.optim.learning_rate = 3e-5
        config.embed = EmbedConfig(pooling="cls")
        config.evaluate_every_steps = 250
    return config
