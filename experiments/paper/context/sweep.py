"""Context: which layers separate the senses of a word?"""

import recipes

from bert_jax.tools.sweep import SCALES, Point

WORDS = ("right", "bank", "spring")


def get_points(args):
    """Return the model, and the measurement of its vectors."""
    name = recipes.checkpoint_label(args.init) if args.init else "base"
    model = args.init or recipes.base(args)
    yield Point(
        "senses", ("python", "experiments/paper/context/senses.py", "--init", model), {"of": name}
    )


def layers(results, folder):
    """Return a table per model: nearest-neighbor accuracy and silhouette by layer and word."""
    lines = []
    for line in results:
        if "of" not in line["facts"]:
            continue
        words = [line["metrics"][word] for word in WORDS]
        rows = []
        for layer in range(len(words[0]["neighbor"])):
            cells = [f"{w['neighbor'][layer]:.0%} ({w['silhouette'][layer]:.2f})" for w in words]
            rows.append((layer or "0, the embeddings", *cells))
        for name, key in (("chance", "chance"), ("95th percentile of chance", "chance_high")):
            rows.append((name, *(f"{word[key]:.0%}" for word in words)))
        head = (f"layer of {line['facts']['of']}", *WORDS)
        lines += [*([""] if lines else []), *recipes.pages.table(head, rows)]
    return lines or ["not run"]


def get_blocks(results):
    """Return a table for each scale."""
    block = recipes.pages.Lines(layers)
    return {scale: recipes.AtScale(scale, block) for scale in SCALES}
