"""Fine-tuning on SWAG, or any choice of one text among several (Devlin et al., section 4.4).

--config configs/swag.py --data SWAG       3 epochs of 16 questions a step at 2e-5
"""

from bert_jax.config import FinetuneConfig, OptimConfig, TaskConfig


def get_config(argument: str = "swag") -> FinetuneConfig:
    """`argument` is a benchmark's name, or "own" for files of one's own (config.task.choices)."""
    name = "" if argument == "own" else argument
    return FinetuneConfig(
        task=TaskConfig(kind="choice", name=name),
        optim=OptimConfig(optimizer="adamw", learning_rate=2e-5),
        batch_size=16,
    )
