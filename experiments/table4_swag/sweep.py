"""Table 4: does it tell which of four sentences goes on (SWAG)?"""

import recipes

from bert_jax.tools.report.experiment import Column

PAPER = {"base": {"dev": 81.6}, "large": {"dev": 86.6}}
COLUMNS = {"dev": Column("dev.accuracy")}


def get_points(given):
    """Each model, fine-tuned."""
    for model, start in recipes.starts(given).items():
        yield recipes.finetuned(given, model, start, "SWAG")


def get_blocks(results):
    """Accuracy on dev."""
    return recipes.comparison(results, PAPER, COLUMNS, COLUMNS)
