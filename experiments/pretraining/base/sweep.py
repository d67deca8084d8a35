"""BERT-base (L12 H768 A12) on Wikipedia and novels in some minutes of one GPU.

The recipe is that of the small sizes (configs/pretrain.py) with larger batches and a lower learning rate:
short rows first, 40% masking, no dropout, no next-sentence prediction, AdamW with beta2 0.98.
"""

import pathlib

import models

CHANGES = {
    "steps": 8_000,
    "phases[0].batch_size": 1_024,
    "batch_size": 128,
    "model.dtype": "bfloat16",
    "model.vocab_multiple": 128,
    "model.dropout": 0,
    "model.attention_dropout": 0,
    "model.next_sentence": "false",
    "masking.rate": 0.4,
    "optim.optimizer": "adamw",
    "optim.learning_rate": 3e-4,
    "optim.beta2": 0.98,
    "warmup_fraction": 0.0667,
    "evaluate_every_steps": 500,
    "evaluate_rows": 1_024,
    "checkpoint.every_steps": 2_000,
}


def get_points(args):
    """Return the pretraining, and its losses and accuracies on minimal pairs."""
    config = ("--config", "configs/pretrain.py:base,16=0.2,128=0.8")
    command = (*config, *models.recipes.settings(CHANGES))
    yield from models.points(args, "base", {"16", "128"}, command)


def get_blocks(results):
    """Return the blocks of the page."""
    return models.blocks(results, pathlib.Path(__file__).parent)
