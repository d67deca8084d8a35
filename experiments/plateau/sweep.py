"""Plateau: what makes a small model leave the loss of word frequencies?

A small BERT first learns how frequent tokens are, and stays at that loss until attention to
neighboring tokens forms. All runs have the same model, text and tokens per step; they differ in the
length of rows or in one hyperparameter.
"""

import dataclasses

import recipes

from bert_jax.tools.report.experiment import Curves
from bert_jax.tools.sweep import Point

STEPS, STEP_TOKENS = 3_000, 1_024
LENGTHS = (8, 16, 32, 64, 128)
# Lengths with their shares of the steps.
CURRICULA = (
    {16: 0.3, 32: 0.2, 64: 0.2, 128: 0.3},
    {8: 0.3, 16: 0.2, 32: 0.15, 64: 0.15, 128: 0.2},
)
LEVELS = (6.0, 5.5, 5.0)  # nats
BASE = {
    "steps": STEPS,
    "model.next_sentence": "false",
    "masking.rate": 0.4,
    "optim.learning_rate": 2e-3,
    "optim.beta2": 0.98,
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


def get_points(given):
    """Return a run for each length, curriculum and changed hyperparameter."""
    folders = {tokens: _rows(given, tokens) for tokens in LENGTHS}
    for tokens in LENGTHS:
        yield _run(given, f"T={tokens}", f",{tokens}", [folders[tokens]], STEP_TOKENS // tokens)
    for shares in CURRICULA:
        phases = ",".join(f"{tokens}={share}" for tokens, share in shares.items())
        sizes = {
            f"phases[{i}].batch_size": STEP_TOKENS // tokens for i, tokens in enumerate(shares)
        }
        rows = [folders[tokens] for tokens in shares]
        yield _run(given, _name(shares), f",{phases}", rows, 8, sizes)
    for name, changes in CHANGES.items():
        rows = _rows(given, 16, "nsp") if "next" in name else folders[16]
        yield _run(given, name, ",16", [rows], STEP_TOKENS // 16, changes)


def _name(shares):
    return ", ".join(map(str, shares))


def _names():
    lengths = [f"T={tokens}" for tokens in LENGTHS]
    return [*lengths, *map(_name, CURRICULA), *CHANGES]


def _rows(given, tokens, pairs="none"):
    text = f"{given.data}/text/wikipedia/featured_0*" + ("" if given.scale == "paper" else ".gz")
    size = ("--tokens", tokens, "--sequences", max(tokens // 16, 1), "--pairs", pairs)
    command = ("prepare", "--vocab", recipes.vocabulary(given), *size, "--heldout-fraction", 0.02)
    return Point(f"featured{tokens}{'' if pairs == 'none' else '-' + pairs}", (*command, text))


def _run(given, name, config, rows, batch_size, changes=None):
    settings = BASE | {"batch_size": batch_size} | (changes or {})
    return recipes.pretrained(given, name, f"{recipes.SMALL_SIZE}{config}", settings, rows)


@dataclasses.dataclass(frozen=True)
class Steps:
    """A table of the steps after which the held-out loss is below each level."""

    def markdown(self, results, folder):
        """Return a row per run."""
        results = [line for line in results if "curve" in line]
        lines = [
            "| run | " + " | ".join(f"steps to {level}" for level in LEVELS) + " | last loss |",
            "|---|" + "---|" * (len(LEVELS) + 1),
        ]
        for line in sorted(results, key=lambda line: _names().index(line["point"])):
            points = list(zip(line["curve"]["step"], line["curve"]["loss"], strict=True))
            first = [next((s for s, x in points if x < level), None) for level in LEVELS]
            cells = [f"{step:,}" if step else "—" for step in first]
            lines.append(f"| {line['point']} | {' | '.join(cells)} | {points[-1][1]:.2f} |")
        return "\n".join(lines) if len(lines) > 2 else "not run"


def get_blocks(results):
    """Return the table of steps, and the loss curves by length and by hyperparameter."""
    lengths = [f"T={tokens}" for tokens in LENGTHS] + [_name(shares) for shares in CURRICULA]
    others = ["T=16", *CHANGES]
    axes = ("steps", "held-out masked-LM loss (nats)")

    def curves(name, labels):
        series = {label: {"model": label} for label in labels}
        return recipes.At("small", Curves(f"{name}.svg", series, "step", "loss", axes))

    return {
        "steps": recipes.At("small", Steps()),
        "lengths": curves("lengths", lengths),
        "changes": curves("changes", others),
    }
