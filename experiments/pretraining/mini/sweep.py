"""BERT-mini (L4 H256 A4) on Wikipedia and novels, with the recipe of the config `mini`."""

import pathlib

import models


def get_points(args):
    """Return the pretraining, and its losses and accuracies on minimal pairs."""
    yield from models.points(args, models.recipes.mini(args))


def get_blocks(results):
    """Return the blocks of the page."""
    return models.blocks(results, pathlib.Path(__file__).parent)
