"""Pretraining as in the BERT paper, for any size and any lengths of rows.

    --config configs/pretrain.py:base                      90% of the steps at T=128, 10% at T=512
    --config configs/pretrain.py:base,128                  all steps at T=128
    --config configs/pretrain.py:base,64=0.2,128=0.7,512=0.1    phases with their shares of the steps
    --config configs/pretrain.py:L6-H768-A3                any layers, hidden size, attention heads
    --config configs/pretrain.py:teaching                  the 4.5M-parameter model of the quickstart

Devlin et al. 2018, section A.2: 1,000,000 steps of 256 sequences, learning rate 1e-4, 10,000 steps
of warm-up, linear decay.
"""

from bert_jax.config import (
    CheckpointConfig,
    Config,
    MaskingConfig,
    ModelConfig,
    OptimConfig,
    PhaseConfig,
    model_size,
)


def get_config(argument: str = "base") -> Config:
    """Return the config of a size: SIZE, SIZE,T or SIZE,T=SHARE,T=SHARE,…."""
    size, *lengths = argument.split(",")
    model = model_size(size)
    if size == "teaching":
        return _teaching(model, _phases(lengths or ["8=0.15", "16=0.15", "32=0.2", "64=0.5"]))
    return Config(model=model, phases=_phases(lengths or ["128", "512"]))


def _phases(lengths: list[str]) -> tuple[PhaseConfig, ...]:
    """Parse T or T=SHARE of each phase. Two lengths without shares are the paper's 90% and 10%."""
    if len(lengths) == 2 and "=" not in "".join(lengths):
        lengths = [f"{lengths[0]}=0.9", f"{lengths[1]}=0.1"]
    parsed = [length.partition("=") for length in lengths]
    return tuple(PhaseConfig(tokens=int(t), fraction=float(share or 1)) for t, _, share in parsed)


def _teaching(model: ModelConfig, phases: tuple[PhaseConfig, ...]) -> Config:
    """Return a config for minutes on a CPU.

    It differs from the paper:
    - short rows first, without which small models stay at the loss of word frequencies for
      thousands of steps (experiments/plateau);
    - no dropout, because no text is seen often;
    - 40% masking, for more targets per step (Wettig et al., arXiv 2202.08005);
    - AdamW with beta2 0.98 and a high learning rate, because BERT's Adam takes its largest steps
      before its averages have settled, and there is no time for a long warm-up.
    """
    model.dropout = model.attention_dropout = 0.0
    for phase in phases[:-1]:  # the last phase takes config.batch_size
        phase.batch_size = 16 * phases[-1].tokens // phase.tokens
    return Config(
        model=model,
        masking=MaskingConfig(rate=0.4),
        optim=OptimConfig(optimizer="adamw", learning_rate=2e-3, beta2=0.98, warmup_steps=200),
        phases=phases,
        steps=3_000,
        batch_size=16,
        evaluate_every_steps=250,
        evaluate_rows=256,
        checkpoint=CheckpointConfig(every_steps=250),
    )
