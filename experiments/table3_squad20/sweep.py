"""Table 3: and where some questions have no answer in the text (SQuAD 2.0)?"""

import recipes

from bert_jax.tools.report.experiment import Column

PAPER = {"large": {"EM": 78.7, "F1": 81.9}}
COLUMNS = {
    "EM": Column("dev.exact", factor=1.0),
    "F1": Column("dev.f1", factor=1.0),
    "F1, answerable": Column("dev.HasAns_f1", factor=1.0),
    "F1, unanswerable": Column("dev.NoAns_f1", factor=1.0),
}


def get_points(given):
    """Each model, fine-tuned."""
    for model, start in recipes.starts(given).items():
        yield recipes.finetuned(given, model, start, "SQuAD 2.0")


def get_blocks(results):
    """Exact matches and F1 on dev, at the threshold that is best there."""
    return recipes.comparison(results, PAPER, COLUMNS, COLUMNS)
