"""Intents: fine-tuning on Banking77, a data set that the paper does not have."""

import recipes

from bert_jax.tools.sweep.experiment import Column

COLUMNS = {"Banking77": Column("dev.accuracy", {"task": "Banking77"})}


def get_points(args):
    """Return the fine-tuning of each model."""
    recipes.only(args, "small")
    for model, start in recipes.starts(args).items():
        yield recipes.finetuned(args, model, start, "Banking77")


def get_blocks(results):
    """Return the table of accuracies, and that of earlier runs from larger models."""
    sets = {"Banking77 (test)": "banking77", "CLINC150, in scope": "clinc150"}
    return {
        "small": recipes.comparison(results, {}, {"small": COLUMNS})["small"],
        "larger": recipes.larger(sets),
    }
