"""Minimal pairs: which grammatical contrasts of BLiMP and Zorro has a model learned?"""

import models

from bert_jax.tools.sweep import Point
from bert_jax.tools.sweep.experiment import Claim, Table

recipes = models.recipes
BASE, CAUSAL = "base", "left-to-right, no NSP"


def get_points(args):
    """Return the measurement of each model, or of the checkpoint of `--init`."""
    if args.init:
        runs = [(recipes.checkpoint_label(args.init), args.init, 0)]
    else:
        seeds = recipes.pretraining_seeds(args)
        runs = [(BASE, recipes.base(args, seed=seed), seed) for seed in seeds]
        runs += [(CAUSAL, recipes.left_to_right(args, seed=seed), seed) for seed in seeds]
    pairs = ("--pairs", models.NUM_PAIRS) if args.scale == "small" else ()
    for label, init, seed in runs:
        name = f"{label}, seed {seed}" if seed else label
        facts = {"of": label, **({"pretraining_seed": seed} if seed else {})}
        yield Point(f"{name}/pairs", (*models.MEASURE, init, "--data", args.data, *pairs), facts)


def get_blocks(results):
    """Return a table and claims for each scale."""

    def table_and_claims(scale):
        measured = [
            line["facts"]["of"]
            for line in results
            if line["scale"] == scale and "of" in line["facts"]
        ]
        labels = list(dict.fromkeys([BASE, CAUSAL, *measured]))
        rows = {label: {"of": label} for label in labels}
        claims = [Claim(name, BASE, CAUSAL) for name in models.PAIRS]
        return Table(rows, models.PAIRS, title="model"), claims

    return recipes.page(table_and_claims)
