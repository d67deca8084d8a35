"""Plateau: what makes a small model leave the unigram loss?

A small BERT first learns how frequent tokens are, and stays at that loss until attention to
neighboring tokens forms. All runs have the same model, text and tokens per step; they differ in the
length of rows or in one hyperparameter.
"""

import models

from bert_jax.tools.sweep import Point
from bert_jax.tools.sweep.experiment import Curves

recipes = models.recipes
STEPS = 3_000
LENGTHS = (8, 16, 32, 64, 128)
# Lengths with their shares of the steps.
CURRICULA = ({16: 0.3, 32: 0.2, 64: 0.2, 128: 0.3}, recipes.SMALL_LENGTHS)
SEEDED, SEEDS = ({8: 1}, {16: 1}, {32: 1}, CURRICULA[1]), (1, 2)
LEVELS = (6.0, 5.5, 5.0)  # nats
# What differs from the pretraining of the small scale, which has 40% masked, no dropout, and AdamW
# with a learning rate of 2e-3 and beta2 of 0.98.
BASE = {
    "steps": STEPS,
    "model.next_sentence": "false",
    "optim.warmup_steps": 200,
    "evaluate_every_steps": 100,
    "log_every_steps": 100,
    "checkpoint.every_steps": 1_000,
}
# Changes of single hyperparameters at T=16.
CHANGES = {
    "T=16, 15% masked": {"masking.rate": 0.15},
    "T=16, dropout 0.1": {"model.dropout": 0.1, "model.attention_dropout": 0.1},
    "T=16, rate 5e-4": {"optim.learning_rate": 5e-4},
    "T=16, rate 4e-3": {"optim.learning_rate": 4e-3},
    "T=16, beta2 0.999": {"optim.beta2": 0.999},
    "T=16, next sentence": {"model.next_sentence": "true"},
}
MASK_ONLY = {
    "masking.mask_fraction": 1.0,
    "masking.same_fraction": 0.0,
    "masking.random_fraction": 0.0,
}
MUON, WIDE = {"optim.optimizer": "muon"}, {"model.initializer_stddev": 0.05}
# What the paper does not vary. Large batches have as many tokens in all.
OTHERS = {
    "T=16, 20% masked": {"masking.rate": 0.2},
    "T=16, rate 1e-3": {"optim.learning_rate": 1e-3},
    "T=16, [MASK] only": MASK_ONLY,
    "T=16, [MASK] only, rate 1e-3": MASK_ONLY | {"optim.learning_rate": 1e-3},
    "T=16, stddev 0.05": WIDE,
    "T=16, stddev 0.1": {"model.initializer_stddev": 0.1},
    "T=16, Muon": MUON,
    "T=16, 4,096 tokens per step": {
        "batch_size": 4 * recipes.STEP_TOKENS // 16,
        "steps": STEPS // 4,
        "optim.warmup_steps": 50,
        "evaluate_every_steps": 25,
    },
}
# What helps at T=16, combined, on longer rows, and with a curriculum.
COMBINED = {
    "T=16, rate 1e-3, stddev 0.05": ({16: 1}, {"optim.learning_rate": 1e-3} | WIDE),
    "T=16, Muon, stddev 0.05": ({16: 1}, MUON | WIDE),
    "T=32, Muon": ({32: 1}, MUON),
    "T=32, stddev 0.05": ({32: 1}, WIDE),
    "T=128, Muon": ({128: 1}, MUON),
    "T=8 to 128, Muon": (CURRICULA[1], MUON),
    "T=8 to 128, stddev 0.05": (CURRICULA[1], WIDE),
    "T=8 to 128, Muon, stddev 0.05": (CURRICULA[1], MUON | WIDE),
}


def get_points(args):
    """Return a run for each length, curriculum and change."""
    for shares in [*({tokens: 1} for tokens in LENGTHS), *CURRICULA]:
        yield _run(args, shares)
    for name, changes in (CHANGES | OTHERS).items():
        yield _run(args, {16: 1}, name, changes, "nsp" if "next" in name else "none")
    for name, (shares, changes) in COMBINED.items():
        yield _run(args, shares, name, changes)
    for seed in SEEDS:
        for shares in SEEDED:
            yield _run(args, shares, seed=seed)


def _name(shares):
    return ", ".join(map(str, shares)) if len(shares) > 1 else f"T={next(iter(shares))}"


def _names():
    lengths = [f"T={tokens}" for tokens in LENGTHS]
    return [*lengths, *map(_name, CURRICULA), *CHANGES, *OTHERS, *COMBINED]


def _rows(args, tokens, pairs="none"):
    text = f"{args.data}/text/wikipedia/featured_0*" + ("" if args.scale == "paper" else ".gz")
    size = ("--tokens", tokens, "--sequences", max(tokens // 16, 1), "--pairs", pairs)
    command = ("prepare", "--vocab", recipes.vocabulary(args), *size, "--heldout-fraction", 0.02)
    return Point(f"featured{tokens}{'' if pairs == 'none' else '-' + pairs}", (*command, text))


def _run(args, lengths, name="", changes=None, pairs="none", seed=0):
    rows = [_rows(args, tokens, pairs) for tokens in lengths]
    changes = BASE | (changes or {})
    return recipes.pretrained(args, name or _name(lengths), "", changes, lengths, rows, seed)


def steps_to_levels(results, folder):
    """Return a table of the steps after which the held-out loss is below each level, by seed."""
    rows = []
    for name in _names():
        lines = [line for line in results if line["facts"].get("model") == name]
        if curves := [line["curve"] for line in lines if "curve" in line]:
            cells = [", ".join(_first_below(curve, level) for curve in curves) for level in LEVELS]
            rows.append((name, *cells, ", ".join(f"{curve['loss'][-1]:.2f}" for curve in curves)))
    return recipes.pages.table(
        ("run", *(f"steps to {level}" for level in LEVELS), "last loss"), rows
    )


def _first_below(curve, level):
    """Return the first step whose loss is below the level."""
    below = (s for s, x in zip(curve["step"], curve["loss"], strict=True) if x < level)
    return f"{step:,}" if (step := next(below, None)) else "—"


def get_blocks(results):
    """Return the table of steps, and the loss curves by length and by hyperparameter."""
    lengths = [f"T={tokens}" for tokens in LENGTHS] + [_name(shares) for shares in CURRICULA]
    curricula = [name for name, (shares, _) in COMBINED.items() if len(shares) > 1]
    axes = ("steps", "held-out masked-LM loss (nats)")

    def curves(name, labels):
        series = {label: {"model": label} for label in labels}
        return recipes.AtScale("small", Curves(f"{name}.svg", series, "step", "loss", axes))

    return {
        "steps": recipes.AtScale("small", recipes.pages.Lines(steps_to_levels)),
        "lengths": curves("lengths", lengths),
        "changes": curves("changes", ["T=16", *CHANGES]),
        "others": curves("others", ["T=16", *OTHERS]),
        "combined": curves("combined", [name for name in COMBINED if name not in curricula]),
        "curricula": curves("curricula", [_name(CURRICULA[1]), *curricula]),
    }
