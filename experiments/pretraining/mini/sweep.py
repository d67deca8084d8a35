"""BERT-mini (L4 H256 A4) on Wikipedia and novels, with the recipe of the config `mini`."""

import pathlib

import models


def get_points(args):
    """Return the pretraining, and its losses and accuracies on minimal pairs."""
    lengths = map(str, models.recipes.SMALL_LENGTHS)
    command = ("--config", "configs/pretrain.py:mini", "--config.steps=8000")
    yield from models.points(args, "mini", set(lengths), command)


def get_blocks(results):
    """Return the blocks of the page."""
    return models.blocks(results, pathlib.Path(__file__).parent)
