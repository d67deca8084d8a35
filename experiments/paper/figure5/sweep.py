"""Figure 5: does masked LM, which predicts fewer tokens, learn more slowly than left-to-right?

Intermediate checkpoints of both runs are fine-tuned.
"""

import recipes

from bert_jax.tools.sweep.experiment import Claim, Claims, Column, Curves, Table

TASK = {"small": "Banking77", "paper": "MNLI"}
MASKED, CAUSAL = "masked LM", "left-to-right"
# Steps of both models (small scale) after nearly equal numbers of predicted tokens.
EQUAL_TARGETS = ((8_000, 3_200), (3_200, 1_600), (4_800, 1_600))


def get_points(args):
    """Return the fine-tuning of intermediate checkpoints of both runs."""
    runs = {MASKED: recipes.base(args), CAUSAL: recipes.left_to_right(args)}
    for step in recipes.CHECKPOINTS[args.scale]:
        for label, run in runs.items():
            start, task = ["--init", run, "--checkpoint", step], TASK[args.scale]
            facts = {"steps": step}
            if args.scale == "small":
                share = recipes.SMALL_MASKED if label == MASKED else 1
                facts["targets"] = step * recipes.STEP_TOKENS * share / 1e6
            yield recipes.finetuned(args, label, start, task, more=str(step), **facts)


def get_blocks(results):
    """Return a table with a column per checkpoint, the plots, and tests at equal predictions."""
    series = {label: {"model": label} for label in (MASKED, CAUSAL)}

    def table_and_claims(scale):
        steps = recipes.CHECKPOINTS[scale]
        columns = {f"{step:,}": Column("dev.accuracy", {"steps": step}) for step in steps}
        return Table(series, columns, {}, TASK[scale]), [Claim(c, MASKED, CAUSAL) for c in columns]

    def curves(scale, x, label, name):
        labels = (label, f"{TASK[scale]}, accuracy on dev")
        task_series = {label: {**facts, "task": TASK[scale]} for label, facts in series.items()}
        return recipes.AtScale(scale, Curves(f"{name}.svg", task_series, x, "dev.accuracy", labels))

    blocks = {
        f"{scale}_curves": curves(scale, "steps", "steps of pretraining", scale) for scale in TASK
    }
    rows = {
        f"{label}, {step:,} steps": {"model": label, "steps": step}
        for pair in EQUAL_TARGETS
        for label, step in zip((MASKED, CAUSAL), pair, strict=True)
    }
    column = TASK["small"]
    claims = [
        Claim(column, f"{MASKED}, {masked:,} steps", f"{CAUSAL}, {causal:,} steps")
        for masked, causal in EQUAL_TARGETS
    ]
    equal = Table(rows, {column: Column("dev.accuracy")})
    blocks["small_equal_targets"] = recipes.AtScale("small", Claims(equal, claims))
    predicted = "million tokens predicted in pretraining"
    blocks["small_targets"] = curves("small", "targets", predicted, "small_targets")
    return recipes.page(table_and_claims) | blocks
