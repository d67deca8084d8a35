"""MiniBERTa: masked LM on ten million words."""

import pathlib

from bert_jax.tools.sweep import Point, module_of
from bert_jax.tools.sweep.experiment import Column, Table

recipes = module_of(pathlib.Path(__file__).parents[2] / "paper" / "recipes.py")
subset = module_of(pathlib.Path(__file__).with_name("subset.py"))
SIZES = {"small": ("L4-H128-A2", "L4-H256-A4"), "paper": ("base",)}
SMALL = {"model.next_sentence": "false"}
RATES = {"L4-H128-A2": 2e-3, "L4-H256-A4": 1e-3}  # 2e-3 is too high for the wider model (table 6)
# Zhang et al. 2020 (arXiv 2011.04946), roberta-base-10M: 512 sequences of 512 tokens for 10,000
# steps, peak learning rate 5e-4 after 6% of them. As RoBERTa: no next-sentence prediction.
RECIPE = {
    "steps": 10_000,
    "batch_size": 512,
    "model.next_sentence": "false",
    "optim.optimizer": "adamw",
    "optim.learning_rate": 5e-4,
    "optim.beta2": 0.98,
    "optim.warmup_steps": 600,
    "evaluate_every_steps": 500,
    "checkpoint.every_steps": 500,
}
COLUMNS = {
    "nats per piece": Column("per_piece", factor=1.0, digits=2),
    "per word": Column("per_word", factor=1.0, digits=2),
    "per byte": Column("per_byte", factor=1.0, digits=3),
    "pieces per word": Column("pieces_per_word", factor=1.0, digits=2),
}


def get_points(args):
    """Return the pretraining of each size on the subset, and its held-out losses."""
    if args.data.is_dir():
        subset.check(args.data)
    texts, small = subset.sources(args.data), args.scale == "small"
    vocabulary = Point("vocab10M", ("vocab", "--size", 8_192 if small else 30_522, *texts))
    lengths = recipes.SMALL_LENGTHS if small else {512: 1}

    def rows(tokens):
        shape = ("--tokens", tokens, "--sequences", max(tokens // 32, 1), "--pairs", "none")
        command = ("prepare", "--vocab", vocabulary, *shape, "--heldout-fraction", 0.02, *texts)
        return Point(f"rows{tokens}-10M", command)

    folders = [rows(tokens) for tokens in lengths]
    for size in SIZES[args.scale]:
        changes = SMALL | {"optim.learning_rate": RATES[size]} if small else RECIPE
        model = recipes.pretrained(args, size, size, changes, lengths, folders)
        script = ("python", "experiments/pretraining/miniberta/measure.py", "--init", model)
        yield Point(f"{size}/losses", (*script, "--rows", folders[-1]), {"of": size})


def get_blocks(results):
    """Return a table for each scale."""

    def table(scale):
        return Table({size: {"of": size} for size in SIZES[scale]}, COLUMNS, title="model")

    return recipes.page(small=(table("small"), []), paper=(table("paper"), []))
