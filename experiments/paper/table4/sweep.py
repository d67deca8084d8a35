"""Table 4: fine-tuning on SWAG, choosing the continuation of a text."""

import recipes

from bert_jax.tools.sweep.experiment import Column

PAPER = {"base": {"dev": 81.6}, "large": {"dev": 86.6}}
COLUMNS = {"dev": Column("dev.accuracy")}


def get_points(args):
    """Return the fine-tuning of each model."""
    recipes.only(args, "paper")
    for model, start in recipes.starts(args).items():
        yield recipes.finetuned(args, model, start, "SWAG")


def get_blocks(results):
    """Return the table of accuracy on the dev set."""
    return recipes.comparison(results, PAPER, {"paper": COLUMNS})
