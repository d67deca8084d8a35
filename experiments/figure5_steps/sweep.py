"""Figure 5: does masked LM, which predicts fewer tokens, learn more slowly than left-to-right?

Intermediate checkpoints of both runs are fine-tuned.
"""

import recipes

from bert_jax.tools.report.experiment import Claim, Column, Curves, Table

TASK = {"small": "Banking77", "paper": "MNLI"}
MASKED, CAUSAL = "masked LM", "left-to-right"


def get_points(args):
    """Return the fine-tuning of intermediate checkpoints of both runs."""
    runs = {MASKED: recipes.base(args), CAUSAL: recipes.left_to_right(args)}
    for step in recipes.checkpoints(args):
        for label, run in runs.items():
            start, task = ["--init", run, "--checkpoint", step], TASK[args.scale]
            facts = {"steps": step}
            if args.scale == "small":
                share = recipes.SMALL_MASKED if label == MASKED else 1
                facts["targets"] = step * recipes.STEP_TOKENS * share / 1e6
            yield recipes.finetuned(args, label, start, task, more=str(step), **facts)


def get_blocks(results):
    """Return a table with a column per checkpoint, and the plot."""
    series = {label: {"model": label} for label in (MASKED, CAUSAL)}

    def table_and_claims(scale):
        checkpoints = recipes.checkpoints(recipes.SweepArgs(scale))
        columns = {f"{step:,}": Column("dev.accuracy", {"steps": step}) for step in checkpoints}
        return Table(series, columns, {}, TASK[scale]), [Claim(c, MASKED, CAUSAL) for c in columns]

    def curves(scale, x, label, name):
        labels = (label, f"{TASK[scale]}, accuracy on dev")
        task_series = {label: {**facts, "task": TASK[scale]} for label, facts in series.items()}
        return recipes.At(scale, Curves(f"{name}.svg", task_series, x, "dev.accuracy", labels))

    blocks = {
        f"{scale}_curves": curves(scale, "steps", "steps of pretraining", scale) for scale in TASK
    }
    predicted = "million tokens predicted in pretraining"
    blocks["small_targets"] = curves("small", "targets", predicted, "small_targets")
    return recipes.page(small=table_and_claims("small"), paper=table_and_claims("paper")) | blocks
