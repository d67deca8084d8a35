"""Table 2: how well does a fine-tuned BERT find answers in texts (SQuAD 1.1)?"""

import recipes

from bert_jax.tools.report.experiment import Column

PAPER = {"base": {"EM": 80.8, "F1": 88.5}, "large": {"EM": 84.1, "F1": 90.9}}
COLUMNS = {"EM": Column("dev.exact", factor=1.0), "F1": Column("dev.f1", factor=1.0)}


def get_points(given):
    """Each model, fine-tuned."""
    for model, start in recipes.starts(given).items():
        yield recipes.finetuned(given, model, start, "SQuAD")


def get_blocks(results):
    """Exact matches and F1 on dev."""
    return recipes.comparison(results, PAPER, COLUMNS, COLUMNS)
