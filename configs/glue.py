"""Fine-tuning on GLUE with the paper's search space (Devlin et al., section 4.1 and A.3).

    --config configs/glue.py:sst2 --data GLUE      any of cola sst2 mrpc qqp stsb mnli qnli rte wnli

GLUE is the folder that holds CoLA, SST-2, …, or `tfds`. Batch 32, 3 epochs, rate 3e-5; the paper
took the best of 5e-5, 4e-5, 3e-5 and 2e-5 on the dev set: --config.optim.learning_rate=2e-5.
"""

from bert_jax.config import FinetuneConfig, TaskConfig


def get_config(argument: str = "sst2") -> FinetuneConfig:
    """`argument` is a task's name."""
    objective = "number" if argument == "stsb" else "class"
    return FinetuneConfig(task=TaskConfig(name=argument, objective=objective))
