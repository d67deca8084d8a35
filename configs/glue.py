"""Fine-tuning on GLUE with the paper's search space (Devlin et al., section 4.1 and A.3).

    --config configs/glue.py:sst2 --data GLUE      cola sst2 mrpc qqp stsb mnli qnli rte wnli

GLUE is the folder with CoLA, SST-2, …, or `tfds`. Batch size 32, 3 epochs, learning rate 3e-5; the
paper selects from 5e-5, 4e-5, 3e-5 and 2e-5 on the dev set: --config.optim.learning_rate=2e-5.
"""

from bert_jax.config.schema import FinetuneConfig, TaskConfig


def get_config(argument: str = "sst2") -> FinetuneConfig:
    """Return the config of a task, given its name."""
    objective = "number" if argument == "stsb" else "class"
    return FinetuneConfig(task=TaskConfig(name=argument, objective=objective))
