"""Pretraining as in the BERT paper, for any size.

    --config configs/pretrain.py:base          90% of the steps at T=128, then 10% at T=512
    --config configs/pretrain.py:base,128      all steps at T=128
    --config configs/pretrain.py:L6-H768-A3    any layers, hidden size, attention heads
    --config configs/pretrain.py:teaching      the 4.5M-parameter model of the quickstart

Devlin et al. 2018, section A.2: 1,000,000 steps of 256 sequences, learning rate 1e-4, 10,000 steps
of warm-up, linear decay.
"""

from bert_jax.config import (
    CheckpointConfig,
    Config,
    MaskingConfig,
    OptimConfig,
    PhaseConfig,
    model_size,
)


def get_config(argument: str = "base") -> Config:
    """`argument` is SIZE or SIZE,T or SIZE,T,T (the last phase takes 10% of the steps)."""
    size, *lengths = argument.split(",")
    model = model_size(size)
    if size == "teaching":
        # For minutes on a CPU. No dropout, for no text is seen often; 40% masked, for more to learn
        # from a step (Wettig et al., arXiv 2202.08005); AdamW, for BERT's Adam takes its largest
        # steps before its averages have settled, and here there is no time for a long warm-up.
        model.dropout = model.attention_dropout = 0.0
        return Config(
            model=model,
            masking=MaskingConfig(rate=0.4),
            optim=OptimConfig(optimizer="adamw", learning_rate=1e-3, warmup_steps=200),
            phases=(PhaseConfig(tokens=int(lengths[0]) if lengths else 64),),
            steps=1_000,
            batch_size=16,
            evaluate_every_steps=250,
            evaluate_rows=256,
            checkpoint=CheckpointConfig(every_steps=250),
        )
    if len(lengths) == 1:
        phases = (PhaseConfig(tokens=int(lengths[0])),)
    else:
        short, long = map(int, lengths or (128, 512))
        phases = (PhaseConfig(tokens=short, fraction=0.9), PhaseConfig(tokens=long, fraction=0.1))
    return Config(model=model, phases=phases)
