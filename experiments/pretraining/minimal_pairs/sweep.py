"""Minimal pairs: which grammatical contrasts of BLiMP and Zorro has a model learned?"""

import pathlib

from bert_jax.tools.sweep import Point, module_of
from bert_jax.tools.sweep.experiment import Claim, Column, Table

recipes = module_of(pathlib.Path(__file__).parents[2] / "paper" / "recipes.py")
BASE, CAUSAL = "base", "left-to-right, no NSP"
# Pairs of each paradigm at the small scale; there are 1,000 (BLiMP) and 2,000 (Zorro).
PAIRS = 200
COLUMNS = {"BLiMP": "blimp", "Zorro": "zorro"}


def get_points(args):
    """Return the measurement of each model, or of the checkpoint of `--init`."""
    if args.init:
        models = {recipes.called(args.init): [args.init]}
    else:
        seeds = recipes.pretraining_seeds(args)
        models = {
            BASE: [recipes.base(args, seed=seed) for seed in seeds],
            CAUSAL: [recipes.left_to_right(args, seed=seed) for seed in seeds],
        }
    pairs = ("--pairs", PAIRS) if args.scale == "small" else ()
    script = ("python", "experiments/pretraining/minimal_pairs/measure.py", args.data)
    for label, inits in models.items():
        for seed, init in enumerate(inits):
            name = f"{label}, seed {seed}" if seed else label
            facts = {"of": label, **({"pretraining_seed": seed} if seed else {})}
            yield Point(f"{name}/pairs", (*script, "--init", init, *pairs), facts)


def get_blocks(results):
    """Return a table and claims for each scale."""

    def table(scale):
        models = [
            line["facts"]["of"]
            for line in results
            if line["scale"] == scale and "of" in line["facts"]
        ]
        labels = list(dict.fromkeys([BASE, CAUSAL, *models]))
        columns = {name: Column(metric) for name, metric in COLUMNS.items()}
        rows = {label: {"of": label} for label in labels}
        return Table(rows, columns, title="model")

    claims = [Claim(name, BASE, CAUSAL) for name in COLUMNS]
    return recipes.page(small=(table("small"), claims), paper=(table("paper"), claims))
