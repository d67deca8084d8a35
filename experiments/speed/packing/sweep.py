"""Packing: does training on packed rows give the same loss in less time?"""

import pathlib

from bert_jax.tools.sweep import module_of
from bert_jax.tools.sweep.experiment import Column, Curves, Table

recipes = module_of(pathlib.Path(__file__).parents[2] / "paper" / "recipes.py")
PACKED, SINGLE = "packed", "one a row"
STEPS = 1_500
# Rows per batch with the same number of sequences, from the manifests: the small text has about
# 513,000 sequences in 403,653 packed rows.
BATCH = {SINGLE: 23, PACKED: 18}


def get_points(args):
    """Return two runs with about the same number of sequences per step."""
    recipes.only(args, "small")
    for label, sequences in ((SINGLE, 1), (PACKED, 8)):
        # Random sequence lengths, since nine in ten sequences fill a row by default.
        rows = recipes.rows(
            args,
            sequences=sequences,
            name=f"rows128-short-{sequences}",
            more=("--short-fraction", 1),
        )
        changes = {"steps": STEPS, "batch_size": BATCH[label]}
        # Evaluate on all held-out rows, whose sequences are the same for both, and less often.
        changes |= {"evaluate_rows": 0, "evaluate_every_steps": STEPS // 10}
        yield recipes.pretrained(args, label, changes=changes, lengths={128: 1}, on=[rows])


def get_blocks(results):
    """Return the final metrics, and loss curves by tokens and by time."""
    series = {label: {"model": label} for label in (SINGLE, PACKED)}
    columns = {
        "held-out loss": Column("masked_lm_loss", factor=1.0, digits=3),
        "million real tokens": Column("tokens", factor=1.0),
        "minutes of steps": Column("minutes", factor=1.0),
    }
    axes = {"tokens": ("real_tokens", "real tokens"), "clock": ("seconds", "seconds of steps")}
    curves = {
        f"small_{name}": Curves(
            f"small_{name}.svg", series, x, "loss", (label, "held-out masked-LM loss")
        )
        for name, (x, label) in axes.items()
    }
    return recipes.page(lambda _: (Table(series, columns), []), ["small"]) | curves
