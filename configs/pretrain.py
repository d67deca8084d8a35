"""Pretraining as in the BERT paper, for any size and any lengths of rows.

    --config configs/pretrain.py:base                      90% of the steps at T=128, 10% at T=512
    --config configs/pretrain.py:base,128                  all steps at T=128
    --config configs/pretrain.py:base,64=0.2,128=0.7,512=0.1    phases with their shares of the steps
    --config configs/pretrain.py:L6-H768-A3                any layers, hidden size, attention heads
    --config configs/pretrain.py:mini                      a small size, with its own recipe (below)
    --config configs/pretrain.py:micro                     the 3M-parameter model of the quickstart
    --config configs/pretrain.py:teaching                  a visual guide's BERT: no segments, transform or tied
                                                           decoder, ReLU; transformers' class cannot hold it
    --config configs/pretrain.py:modern-base               also modern-large and neo-base, at T=1024
    --config configs/pretrain.py:electra-small             also electra-base and electra-large

Devlin et al. 2018, section A.2: 1,000,000 steps of 256 sequences, learning rate 1e-4, 10,000 steps
of warm-up, linear decay. This is the recipe of base, large and sizes given by their shape.

The named small sizes have a recipe that leaves the unigram loss within thousands of steps
 (experiments/pretraining/plateau). It differs from the paper:
- short rows first, because attention to neighboring tokens forms there;
- small batches, with which more steps fit a budget;
- 40% masking, for more targets per step (Wettig et al., arXiv 2202.08005);
- no dropout, because no text is seen often, and no next-sentence prediction;
- AdamW with beta2 0.98 and a high learning rate, because BERT's Adam takes its largest steps before
  its averages have settled, and there is no time for a long warm-up.

The newer models (modern-base, modern-large, neo-base) have the paper's schedule, AdamW, no dropout, and
mask 30% (ModernBERT) or 20% (NeoBERT) of the tokens.

ELECTRA (Clark et al. 2020, table 6) is pretrained at one length, small at T=128 and the others at T=512. Of
the masked tokens 85% become [MASK] and the others are kept, as in google-research/electra.
"""

from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import CheckpointConfig, Config, MaskingConfig, OptimConfig, PhaseConfig
from bert_jax.config.sizes import model_size

# Lengths of rows with their shares of the steps, unless given: 8, 16, 32, 64, 128.
_SHORT_FIRST = ["8=0.3", "16=0.2", "32=0.15", "64=0.15", "128=0.2"]
_SMALL_RATES = {"tiny": 2e-3, "mini": 1e-3, "small": 5e-4, "medium": 5e-4}


def get_config(argument: str = "base") -> Config:
    """Return the config of a size: SIZE, SIZE,T or SIZE,T=SHARE,T=SHARE,…."""
    size, *lengths = argument.split(",")
    model = model_size(size)
    if size in ("base", "large"):
        # GPUs copy the logits and the embedding table to a multiple of 8 otherwise.
        model.vocab_multiple = 128
    if size in ("micro", "teaching"):
        if size == "micro":
            model.positions, model.pooler, model.next_sentence = 128, True, False
        last = min(128, model.positions)
        phases = phases_of(lengths or ["8=0.15", "16=0.15", "32=0.2", f"{last}=0.5"])
        return _small(model, phases, rate=2e-3, steps=3_000, step_tokens=1_024)
    if size in _SMALL_RATES:
        model.next_sentence = False
        phases = phases_of(lengths or _SHORT_FIRST)
        return _small(model, phases, _SMALL_RATES[size], steps=20_000, step_tokens=2_048)
    if size.startswith(("modern-", "neo-")):
        return Config(
            model=model,
            phases=phases_of(lengths or ["1024"]),
            masking=MaskingConfig(rate=0.3 if size.startswith("modern-") else 0.2),
            optim=OptimConfig(optimizer="adamw"),
        )
    if size.startswith("electra-"):
        return _electra(size, model, lengths)
    return Config(model=model, phases=phases_of(lengths or ["128", "512"]))


def _electra(size: str, model: ModelConfig, lengths: list[str]) -> Config:
    """Return the recipe of an ELECTRA model."""
    rate, batch_size, steps = {
        "electra-small": (5e-4, 128, 1_000_000),
        "electra-base": (2e-4, 256, 766_000),
        "electra-large": (2e-4, 2_048, 400_000),
    }[size]
    masking = MaskingConfig(mask_fraction=0.85, same_fraction=0.15, random_fraction=0.0)
    if size == "electra-large":
        masking.rate = 0.25
    return Config(
        model=model,
        masking=masking,
        optim=OptimConfig(learning_rate=rate),
        phases=phases_of(lengths or ["128" if size == "electra-small" else "512"]),
        batch_size=batch_size,
        steps=steps,
    )


def phases_of(lengths: list[str]) -> tuple[PhaseConfig, ...]:
    """Parse T or T=SHARE of each phase. Two lengths without shares are the paper's 90% and 10%."""
    if len(lengths) == 2 and "=" not in "".join(lengths):
        lengths = [f"{lengths[0]}=0.9", f"{lengths[1]}=0.1"]
    parsed = [length.partition("=") for length in lengths]
    return tuple(PhaseConfig(tokens=int(t), fraction=float(share or 1)) for t, _, share in parsed)


def _small(
    model: ModelConfig,
    phases: tuple[PhaseConfig, ...],
    rate: float,
    steps: int,
    step_tokens: int,
) -> Config:
    """Return the recipe of small sizes; `step_tokens` is the number of tokens per step."""
    model.dropout = model.attention_dropout = 0.0
    for phase in phases[:-1]:  # the last phase takes config.batch_size
        phase.batch_size = step_tokens // phase.tokens
    return Config(
        model=model,
        masking=MaskingConfig(rate=0.4),
        optim=OptimConfig(optimizer="adamw", learning_rate=rate, beta2=0.98),
        warmup_fraction=1 / 15,
        phases=phases,
        steps=steps,
        batch_size=step_tokens // phases[-1].tokens,
        evaluate_every_steps=250,
        evaluate_rows=256,
        checkpoint=CheckpointConfig(every_steps=250),
    )
