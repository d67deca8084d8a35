"""Pretraining as in the BERT paper, for any size.

    --config configs/pretrain.py:base          90% of the steps at T=128, then 10% at T=512
    --config configs/pretrain.py:base,128      all steps at T=128
    --config configs/pretrain.py:L6-H768-A3    any layers, hidden size, attention heads
    --config configs/pretrain.py:teaching      the 4.5M-parameter model of the quickstart

Devlin et al. 2018, section A.2: 1,000,000 steps of 256 sequences, learning rate 1e-4, 10,000 steps
of warm-up, linear decay.
"""

from bert_jax.config import Config, OptimConfig, Phase, model_size


def get_config(argument: str = "base") -> Config:
    """`argument` is SIZE or SIZE,T or SIZE,T,T (the last phase takes 10% of the steps)."""
    size, *lengths = argument.split(",")
    model = model_size(size)
    if size == "teaching":
        return Config(
            model=model,
            optim=OptimConfig(learning_rate=1e-3, warmup_steps=200),
            phases=(Phase(tokens=int(lengths[0]) if lengths else 64),),
            steps=4_000,
            batch_size=32,
            evaluate_every_steps=500,
        )
    if len(lengths) == 1:
        phases = (Phase(tokens=int(lengths[0])),)
    else:
        short, long = map(int, lengths or (128, 512))
        phases = (Phase(tokens=short, fraction=0.9), Phase(tokens=long, fraction=0.1))
    return Config(model=model, phases=phases)
