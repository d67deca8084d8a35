"""Fine-tuning on tagged words in CoNLL format: named entities, parts of speech.

    --config configs/tagging.py --config.task.train=train.txt --config.task.dev=dev.txt

The first column is the word and the last its tag. As context the paper's NER (section 5.3) uses the
whole document: --config.task.document_context=true.
"""

from bert_jax.config.schema import FinetuneConfig, OptimConfig, TaskConfig


def get_config(argument: str = "") -> FinetuneConfig:
    """Return the config; `argument` is not used."""
    return FinetuneConfig(
        task=TaskConfig(kind="tagging"), optim=OptimConfig(optimizer="adamw", learning_rate=5e-5)
    )
