"""Figure 5: does masked LM, which predicts fewer tokens, learn more slowly than left-to-right?

Intermediate checkpoints of both runs are fine-tuned.
"""

import recipes

from bert_jax.tools.report.experiment import Claim, Column, Curves, Table

TASK = {"small": "Banking77", "paper": "MNLI"}
MASKED, CAUSAL = "masked LM", "left-to-right"


def get_points(given):
    """Return the fine-tuning of intermediate checkpoints of both runs."""
    runs = {MASKED: recipes.base(given), CAUSAL: recipes.left_to_right(given)}
    for step in recipes.checkpoints(given):
        for label, run in runs.items():
            start = ["--init", run, "--checkpoint", step]
            yield recipes.finetuned(
                given, label, start, TASK[given.scale], more=str(step), steps=step
            )  # fmt: skip


def get_blocks(results):
    """Return a table with a column per checkpoint, and the plot."""
    series = {label: {"model": label} for label in (MASKED, CAUSAL)}

    def told(scale):
        at = recipes.checkpoints(recipes.SweepArgs(scale))
        columns = {f"{step:,}": Column("dev.accuracy", {"steps": step}) for step in at}
        return Table(series, columns, {}, TASK[scale]), [Claim(c, MASKED, CAUSAL) for c in columns]

    def curves(scale):
        labels = ("steps of pretraining", f"{TASK[scale]}, accuracy on dev")
        own = {label: {**facts, "task": TASK[scale]} for label, facts in series.items()}
        return recipes.At(scale, Curves(f"{scale}.svg", own, "steps", "dev.accuracy", labels))

    return recipes.page(small=told("small"), paper=told("paper")) | {
        f"{scale}_curves": curves(scale) for scale in TASK
    }
