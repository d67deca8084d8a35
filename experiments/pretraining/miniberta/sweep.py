"""MiniBERTa: masked LM on ten million words."""

import pathlib

import models

from bert_jax.errors import UserError
from bert_jax.storage import files
from bert_jax.tools.sweep import Point
from bert_jax.tools.sweep.experiment import Column, Table

recipes = models.recipes
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
COLUMNS = models.LOSSES | {"pieces per word": Column("pieces_per_word", factor=1.0, digits=2)}


def texts(data):
    """Return the sources of text, whose files have the checksums of files.tsv if DATA exists."""
    sources = []
    for line in pathlib.Path(__file__).with_name("files.tsv").read_text().splitlines():
        sha256, _, _, name = line.split("\t")
        path = data / "text" / name
        if data.is_dir() and not (path.is_file() and files.sha256(str(path)) == sha256):
            raise UserError(f"{path} is not the file of files.tsv: put that file there")
        sources.append(f"{'books:' if 'books/' in name else ''}{path}")
    return sources


def get_points(args):
    """Return the pretraining of each size on the subset, and its held-out losses."""
    sources, small = texts(args.data), args.scale == "small"
    vocabulary = Point("vocab10M", ("vocab", "--size", 8_192 if small else 30_522, *sources))
    lengths = recipes.SMALL_LENGTHS if small else {512: 1}

    def rows(tokens):
        shape = ("--tokens", tokens, "--sequences", max(tokens // 32, 1), "--pairs", "none")
        command = ("prepare", "--vocab", vocabulary, *shape, "--heldout-fraction", 0.02, *sources)
        return Point(f"rows{tokens}-10M", command)

    folders = [rows(tokens) for tokens in lengths]
    for size in SIZES[args.scale]:
        changes = SMALL | {"optim.learning_rate": RATES[size]} if small else RECIPE
        model = recipes.pretrained(args, size, size, changes, lengths, folders)
        command = (*models.MEASURE, model, "--rows", folders[-1])
        yield Point(f"{size}/losses", command, {"of": size})


def get_blocks(results):
    """Return a table for each scale."""

    def table_and_claims(scale):
        return Table({size: {"of": size} for size in SIZES[scale]}, COLUMNS, title="model"), []

    return recipes.page(table_and_claims)
