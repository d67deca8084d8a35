"""Fine-tuning on tagged words in CoNLL columns: named entities, parts of speech.

    --config configs/tagging.py --config.task.train=train.txt --config.task.dev=dev.txt

The word is the first column and its tag the last. The paper's NER (section 5.3) sees the whole
document: --config.task.document_context=true.
"""

from bert_jax.config import FinetuneConfig, OptimConfig, TaskConfig


def get_config(argument: str = "") -> FinetuneConfig:
    """`argument` is not used."""
    return FinetuneConfig(
        task=TaskConfig(kind="tagging"), optim=OptimConfig(optimizer="adamw", learning_rate=5e-5)
    )
