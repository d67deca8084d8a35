"""Table 5: ablations of next-sentence prediction and of bidirectional attention."""

import recipes

from bert_jax.tools.sweep.experiment import Claim, Column, Table

TASKS = {
    "small": ("Banking77", "SST-2", "QNLI", "NER"),
    "paper": ("MNLI", "QNLI", "MRPC", "SST-2", "SQuAD"),
}
ROWS = ("base", "no NSP", "left-to-right, no NSP", "+ BiLSTM")
NUMBERS = (
    (84.4, 88.4, 86.7, 92.7, 88.5),
    (83.9, 84.9, 86.5, 92.6, 87.9),
    (82.1, 84.3, 77.5, 92.1, 77.8),
    (82.1, 84.1, 75.7, 91.6, 84.9),
)
PAPER = recipes.numbers(ROWS, TASKS["paper"], NUMBERS)
LOWER = {"no NSP": "base", "left-to-right, no NSP": "no NSP"}


def get_points(args):
    """Return three pretraining runs on the same rows, and all four models on every task."""
    without, lstm = {"model.next_sentence": "false"}, {"model.head.lstm_layers": 1}
    for seed in recipes.pretraining_seeds(args):
        causal = recipes.left_to_right(args, seed=seed)
        for label, start, changes in (
            ("base", recipes.base(args, seed=seed), {}),
            ("no NSP", recipes.pretrained(args, "no NSP", changes=without, seed=seed), {}),
            ("left-to-right, no NSP", causal, {}),
            ("+ BiLSTM", causal, lstm),
        ):
            for task in TASKS[args.scale]:
                start_from = ["--init", start]
                yield recipes.finetuned(args, label, start_from, task, changes, seed=seed)


def get_blocks(results):
    """Return the table, and the order of its rows in the paper as claims."""
    rows = {row: {"model": row} for row in ROWS}

    def table_and_claims(scale):
        columns = {
            task: Column(
                recipes.TASKS[scale][task].metric, {"task": task}, 1.0 if task == "SQuAD" else 100.0
            )
            for task in TASKS[scale]
        }
        table = Table(rows, columns, PAPER, "pretraining")
        claims = [Claim(task, above, below) for below, above in LOWER.items() for task in columns]
        # The paper claims it for a token-level task only.
        tasks = TASKS[scale] if scale == "small" else TASKS[scale][-1:]
        claims += [Claim(task, "+ BiLSTM", "left-to-right, no NSP") for task in tasks]
        return table, claims

    return recipes.page(table_and_claims)
