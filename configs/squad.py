"""Fine-tuning on SQuAD as in the paper (Devlin et al., sections 4.2, 4.3 and A.3).

    --config configs/squad.py:1 --data SQUAD       1.1: 3 epochs at 5e-5
    --config configs/squad.py:2 --data SQUAD       2.0: 2 epochs at 5e-5

SQUAD is the folder with train-v1.1.json and dev-v1.1.json (or -v2.0). To name the files instead:
--config.task.train=… --config.task.dev=…
"""

from bert_jax.config.schema import FinetuneConfig, OptimConfig, TaskConfig


def get_config(argument: str = "1") -> FinetuneConfig:
    """Return the config of SQuAD 1.1 ("1") or 2.0 ("2")."""
    argument = argument.removeprefix("squad")
    return FinetuneConfig(
        task=TaskConfig(kind="squad", name=f"squad{argument}", tokens=384),
        epochs=3.0 if argument == "1" else 2.0,
        optim=OptimConfig(optimizer="adamw", learning_rate=5e-5),
        batch_size=32 if argument == "1" else 48,
    )
