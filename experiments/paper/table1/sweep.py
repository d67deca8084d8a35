"""Table 1: fine-tuning on the tasks of GLUE.

Every task is fine-tuned on a grid of hyperparameters. The table shows the best point on the dev set;
`bert-jax glue-zip` makes a submission to the GLUE server of it.
"""

import recipes

from bert_jax.tools.sweep import grid
from bert_jax.tools.sweep.experiment import Column

# The grid of section A.3, with the fourth learning rate of section 4.1.
GRID = {
    "small": {"rate": ("3e-4", "1e-4")},
    "paper": {
        "rate": ("5e-5", "4e-5", "3e-5", "2e-5"),
        "batch": (16, 32),
        "epochs": (2, 3, 4),
    },
}
SETTINGS = {"rate": "optim.learning_rate", "batch": "batch_size", "epochs": "epochs"}
TASKS = {
    "small": ("SST-2", "CoLA", "RTE", "QNLI"),
    "paper": ("MNLI", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE"),
}
NAMES = ("MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE")
NUMBERS = (
    (84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4),
    (86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1),
)
PAPER = recipes.numbers(("base", "large"), NAMES, NUMBERS)
METRICS = {"QQP": "dev.f1", "MRPC": "dev.f1", "STS-B": "dev.spearman", "CoLA": "dev.matthews"}


def get_points(args):
    """Return the grid of each model and task."""
    choices = GRID[args.scale]
    if args.scale == "small" and args.init:  # the small models' rates are too high for larger ones
        choices = {"rate": GRID["paper"]["rate"]}
    for model, start in recipes.starts(args).items():
        for task in TASKS[args.scale]:
            for chosen in grid(**choices):
                setting = "-".join(f"{name}{value}" for name, value in chosen.items())
                changes = {SETTINGS[name]: value for name, value in chosen.items()}
                yield recipes.finetuned(args, model, start, task, changes, setting, setting=setting)


def settings(results, folder):
    """Return a table of the selected grid points."""
    facts = [line["facts"] for line in results if "setting" in line["facts"]]
    chosen = {(each["model"], each["task"]): each["setting"] for each in facts}
    rows = [(*model_and_task, setting) for model_and_task, setting in chosen.items()]
    return recipes.pages.table(("model", "task", "setting"), rows)


def get_blocks(results):
    """Return the tables of results and of selected grid points."""

    def column(task, metric=None):
        return Column(metric or METRICS.get(task, "dev.accuracy"), {"task": task})

    matched = {
        "MNLI-m": column("MNLI"),
        "MNLI-mm": column("MNLI", "dev_mismatched.accuracy"),
    }
    small = {task: column(task) for task in TASKS["small"]}
    paper = matched | {task: column(task) for task in TASKS["paper"][1:]}
    blocks = recipes.comparison(results, PAPER, {"small": small, "paper": paper}, average=True)
    block = recipes.pages.Lines(settings)
    chosen = {f"{scale}_settings": recipes.AtScale(scale, block) for scale in GRID}
    names = {"SST-2": "sst2", "CoLA": "cola", "RTE": "rte", "QNLI, 8,999 examples": "qnli"}
    return blocks | chosen | {"larger": recipes.larger(names)}
