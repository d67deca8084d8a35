"""Fine-tuning on SWAG or other multiple-choice data (Devlin et al., section 4.4).

--config configs/swag.py --data SWAG       3 epochs, batch size 16, learning rate 2e-5
"""

from bert_jax.config.schema import FinetuneConfig, OptimConfig, TaskConfig


def get_config(argument: str = "swag") -> FinetuneConfig:
    """Return the config of a benchmark, or of your own files for "own" (config.task.choices)."""
    name = "" if argument == "own" else argument
    return FinetuneConfig(
        task=TaskConfig(kind="choice", name=name),
        optim=OptimConfig(optimizer="adamw", learning_rate=2e-5),
        batch_size=16,
    )
