"""Table 2: fine-tuning on SQuAD 1.1, extractive question answering."""

import recipes

from bert_jax.tools.sweep.experiment import Column

PAPER = {"base": {"EM": 80.8, "F1": 88.5}, "large": {"EM": 84.1, "F1": 90.9}}
COLUMNS = {"EM": Column("dev.exact", factor=1.0), "F1": Column("dev.f1", factor=1.0)}


def get_points(args):
    """Return the fine-tuning of each model."""
    for model, start in recipes.starts(args).items():
        yield recipes.finetuned(args, model, start, "SQuAD")


def get_blocks(results):
    """Return the table of exact match and F1 on the dev set."""
    larger = recipes.larger({"F1": "squad1-all", "F1, one paragraph in 12": "squad1"})
    return recipes.comparison(results, PAPER, dict.fromkeys(recipes.SCALES, COLUMNS)) | {
        "larger": larger
    }
