"""Table 3: fine-tuning on SQuAD 2.0, which has unanswerable questions."""

import recipes

from bert_jax.tools.sweep.experiment import Column

PAPER = {"large": {"EM": 78.7, "F1": 81.9}}
COLUMNS = {
    "EM": Column("dev.exact", factor=1.0),
    "F1": Column("dev.f1", factor=1.0),
    "F1, answerable": Column("dev.HasAns_f1", factor=1.0),
    "F1, unanswerable": Column("dev.NoAns_f1", factor=1.0),
}


def get_points(args):
    """Return the fine-tuning of each model."""
    recipes.only(args, "paper")
    for model, start in recipes.starts(args).items():
        yield recipes.finetuned(args, model, start, "SQuAD 2.0")


def get_blocks(results):
    """Return the table of exact match and F1 on the dev set, at its best threshold."""
    return recipes.comparison(results, PAPER, {"paper": COLUMNS})
