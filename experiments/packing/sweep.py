"""Packing: does training on packed rows give the same loss in less time?"""

import recipes

from bert_jax.tools.report.experiment import Column, Table

PACKED, SINGLE = "packed", "one a row"
STEPS = 1_500  # at the small scale
# Rows per batch with the same number of sequences, from the manifests: the small text has about
# 513,000 sequences in 403,653 packed rows. For the paper's text, estimated from 8 MB of Wikipedia
# (experiments/prepare): 94.8% real tokens unpacked and 99.0% packed at T=128, 87.4% and 98.7% at
# T=512.
SMALL_BATCH = {SINGLE: 23, PACKED: 18}
PAPER_BATCHES = (245, 227)


def get_points(args):
    """Return two runs with about the same number of sequences per step."""
    if args.scale == "paper":
        rows = [
            recipes.rows(args, tokens, sequences=tokens // 32, name=f"rows{tokens}-packed")
            for tokens in (128, 512)
        ]
        batches = {f"phases[{i}].batch_size": count for i, count in enumerate(PAPER_BATCHES)}
        yield recipes.base(args, SINGLE)
        yield recipes.pretrained(args, PACKED, changes=batches, on=rows)
        return
    for label, sequences in ((SINGLE, 1), (PACKED, 8)):
        # Random sequence lengths, since nine in ten sequences fill a row by default.
        rows = recipes.rows(
            args,
            sequences=sequences,
            name=f"rows128-short-{sequences}",
            more=("--short-fraction", 1),
        )
        changes = {"steps": STEPS, "batch_size": SMALL_BATCH[label]}
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
    return recipes.page(
        small=(Table(series, columns), []), paper=(Table(series, columns), [])
    ) | recipes.curves(series)
