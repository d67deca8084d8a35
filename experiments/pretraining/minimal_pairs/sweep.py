"""Minimal pairs: which grammatical contrasts of BLiMP and Zorro has a model learned?"""

import models

from bert_jax.tools.sweep import Point
from bert_jax.tools.sweep.experiment import Claim, Table

recipes = models.recipes
BASE, CAUSAL = "base", "left-to-right, no NSP"
# Pairs of each paradigm at the small scale; there are 1,000 (BLiMP) and 2,000 (Zorro).
PAIRS = 200


def get_points(args):
    """Return the measurement of each model, or of the checkpoint of `--init`."""
    if args.init:
        inits = {recipes.checkpoint_label(args.init): [args.init]}
    else:
        seeds = recipes.pretraining_seeds(args)
        inits = {
            BASE: [recipes.base(args, seed=seed) for seed in seeds],
            CAUSAL: [recipes.left_to_right(args, seed=seed) for seed in seeds],
        }
    pairs = ("--pairs", PAIRS) if args.scale == "small" else ()
    for label, each in inits.items():
        for seed, init in enumerate(each):
            name = f"{label}, seed {seed}" if seed else label
            facts = {"of": label, **({"pretraining_seed": seed} if seed else {})}
            yield Point(
                f"{name}/pairs", (*models.MEASURE, init, "--data", args.data, *pairs), facts
            )


def get_blocks(results):
    """Return a table and claims for each scale."""

    def table(scale):
        measured = [
            line["facts"]["of"]
            for line in results
            if line["scale"] == scale and "of" in line["facts"]
        ]
        labels = list(dict.fromkeys([BASE, CAUSAL, *measured]))
        rows = {label: {"of": label} for label in labels}
        return Table(rows, models.PAIRS, title="model")

    claims = [Claim(name, BASE, CAUSAL) for name in models.PAIRS]
    return recipes.page(small=(table("small"), claims), paper=(table("paper"), claims))
