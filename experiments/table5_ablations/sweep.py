"""Table 5: ablations of next-sentence prediction and of bidirectional attention."""

import recipes

from bert_jax.tools.report.experiment import Claim, Column, Table

TASKS = {
    "small": ("Banking77", "SST-2", "QNLI", "SQuAD"),
    "paper": ("MNLI", "QNLI", "MRPC", "SST-2", "SQuAD"),
}
ROWS = ("base", "no NSP", "left-to-right, no NSP", "+ BiLSTM")
NUMBERS = (
    (84.4, 88.4, 86.7, 92.7, 88.5),
    (83.9, 84.9, 86.5, 92.6, 87.9),
    (82.1, 84.3, 77.5, 92.1, 77.8),
    (82.1, 84.1, 75.7, 91.6, 84.9),
)
PAPER = {
    row: dict(zip(TASKS["paper"], numbers, strict=True))
    for row, numbers in zip(ROWS, NUMBERS, strict=True)
}
LOWER = {"no NSP": "base", "left-to-right, no NSP": "no NSP"}


def get_points(given):
    """Return three pretraining runs on the same rows, and all four models on every task."""
    without = recipes.pretrained(given, "no NSP", changes={"model.next_sentence": "false"})
    causal = recipes.left_to_right(given)
    lstm = {"model.lstm_layers": 1}
    for label, start, changes in (
        ("base", recipes.base(given), {}),
        ("no NSP", without, {}),
        ("left-to-right, no NSP", causal, {}),
        ("+ BiLSTM", causal, lstm),
    ):
        for task in TASKS[given.scale]:
            yield recipes.finetuned(given, label, ["--init", start], task, changes)


def get_blocks(results):
    """Return the table, and the order of its rows in the paper as claims."""
    rows = {row: {"model": row} for row in ROWS}

    def told(scale):
        columns = {
            task: Column("dev.f1", {"task": task}, 1.0)
            if task == "SQuAD"
            else Column("dev.accuracy", {"task": task})
            for task in TASKS[scale]
        }
        table = Table(rows, columns, PAPER, "pretraining")
        claims = [Claim(task, above, below) for below, above in LOWER.items() for task in columns]
        return table, [*claims, Claim("SQuAD", "+ BiLSTM", "left-to-right, no NSP")]

    return recipes.page(small=told("small"), paper=told("paper"))
