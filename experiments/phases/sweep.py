"""Phases: does training on short rows first reach the same loss at lower cost?"""

import recipes

from bert_jax.tools.report.experiment import Claim, Column, Table

BOTH, LONG = "128, then 512", "512 only"
# In the paper the last phase has 512 x 0.1 of 512 x 0.1 + 128 x 0.9 tokens. The small runs have 1,024
# tokens per step in both phases, so this is the same share of tokens.
LONG_SHARE = 0.3
# The same number of tokens as 900,000 steps at T=128 and 100,000 at T=512.
PAPER_STEPS = 325_000


def get_points(args):
    """Return two runs on the same number of tokens that end on the same rows."""
    if args.scale == "paper":
        yield recipes.base(args, BOTH)
        yield recipes.pretrained(args, LONG, changes={"steps": PAPER_STEPS}, lengths={512: 1})
        return
    yield recipes.pretrained(args, BOTH, lengths={128: 1 - LONG_SHARE, 512: LONG_SHARE})
    yield recipes.pretrained(args, LONG, lengths={512: 1})


def get_blocks(results):
    """Return the final metrics, and loss curves by tokens and by time."""
    series = {label: {"model": label} for label in (BOTH, LONG)}
    loss = "held-out loss at T=512"
    columns = {
        loss: Column("masked_lm_loss", factor=1.0, digits=3),
        "next sentence": Column("next_sentence_accuracy"),
        "million real tokens": Column("tokens", factor=1.0),
        "minutes of steps": Column("minutes", factor=1.0),
    }
    faster = [Claim("minutes of steps", BOTH, LONG, lower=True)]
    return recipes.page(
        small=(Table(series, columns), faster), paper=(Table(series, columns), faster)
    ) | recipes.curves(series)
