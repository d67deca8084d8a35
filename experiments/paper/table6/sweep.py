"""Table 6: the effect of layers, hidden size and attention heads."""

import recipes

from bert_jax.tools.sweep.experiment import Claim, Column, Curves, Table

# L/H/A. The small scale has three depths at two widths, and three widths at one depth.
SIZES = {
    "small": (
        "L2-H64-A1",
        "L4-H64-A1",
        "L8-H64-A1",
        "L2-H128-A2",
        "L4-H128-A2",
        "L4-H128-A8",
        "L8-H128-A2",
        "L4-H256-A4",
    ),
    "paper": (
        "L3-H768-A12",
        "L6-H768-A3",
        "L6-H768-A12",
        "L12-H768-A12",
        "L12-H1024-A16",
        "L24-H1024-A16",
    ),
}
# At the small scale: 3 million tokens, and no next-sentence prediction, which prolongs the plateau. A
# learning rate of 2e-3 is too high for a hidden size of 256.
SMALL = {"steps": 3_000, "model.next_sentence": "false"}
WIDE = {"optim.learning_rate": 1e-3}
TASKS = {"small": ("SST-2", "Banking77"), "paper": ("MNLI", "MRPC", "SST-2")}
COLUMNS = ("perplexity", "MNLI", "MRPC", "SST-2")
NUMBERS = (
    (5.84, 77.9, 79.8, 88.4),
    (5.24, 80.6, 82.2, 90.7),
    (4.68, 81.9, 84.8, 91.3),
    (3.99, 84.4, 86.7, 92.9),
    (3.54, 85.7, 86.9, 93.3),
    (3.23, 86.6, 87.8, 93.7),
)
PAPER = recipes.numbers(SIZES["paper"], COLUMNS, NUMBERS)
# Pairs of sizes that differ in one dimension, the larger one first.
LARGER = {
    "small": [
        ("L4-H64-A1", "L2-H64-A1"),
        ("L8-H64-A1", "L4-H64-A1"),
        ("L4-H128-A2", "L2-H128-A2"),
        ("L8-H128-A2", "L4-H128-A2"),
        ("L4-H128-A2", "L4-H64-A1"),
        ("L4-H256-A4", "L4-H128-A2"),
        ("L4-H128-A8", "L4-H128-A2"),
    ],
    "paper": [
        ("L6-H768-A12", "L3-H768-A12"),
        ("L12-H768-A12", "L6-H768-A12"),
        ("L6-H768-A12", "L6-H768-A3"),
        ("L12-H1024-A16", "L12-H768-A12"),
        ("L24-H1024-A16", "L12-H1024-A16"),
    ],
}


def pretrained(args, size, seed):
    """Return the pretraining of a size, shared with other experiments for base and large."""
    if args.scale == "paper" and size in ("L12-H768-A12", "L24-H1024-A16"):
        return recipes.base(args, size) if size == "L12-H768-A12" else recipes.large(args, size)
    if args.scale == "paper":
        return recipes.pretrained(args, size, size)
    changes = SMALL | (WIDE if "-H256-" in size else {})
    on = recipes.single_rows(args)
    return recipes.pretrained(args, size, size, changes, on=on, seed=seed)


def get_points(args):
    """Return the pretraining of every size, and its fine-tuning on every task."""
    for seed in recipes.pretraining_seeds(args):
        for size in SIZES[args.scale]:
            model = pretrained(args, size, seed)
            yield model
            for task in TASKS[args.scale]:
                yield recipes.finetuned(args, size, ["--init", model], task, seed=seed)


def get_blocks(results):
    """Return the table, claims that larger is better, and loss curves."""

    def table_and_claims(scale):
        tasks = {task: Column("dev.accuracy", {"task": task}) for task in TASKS[scale]}
        columns = {"perplexity": Column("masked_lm_perplexity", factor=1.0, digits=2), **tasks}
        rows = {size: {"model": size} for size in SIZES[scale]}
        table = Table(rows, columns, PAPER if scale == "paper" else {}, "L/H/A")
        claims = [
            Claim(column, large, small, lower=column == "perplexity")
            for large, small in LARGER[scale]
            for column in columns
        ]
        return table, claims

    def curves(scale):
        series = {size: {"model": size} for size in SIZES[scale]}
        labels = ("real tokens", "held-out masked-LM loss")
        return recipes.AtScale(scale, Curves(f"{scale}.svg", series, "real_tokens", "loss", labels))

    return recipes.page(table_and_claims) | {f"{scale}_curves": curves(scale) for scale in SIZES}
