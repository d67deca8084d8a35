"""Context: which layers separate the senses of a word?"""

import dataclasses

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


@dataclasses.dataclass(frozen=True)
class Layers:
    """A table of nearest-neighbor accuracy by layer and word."""

    def markdown(self, results, folder):
        """Return a row per layer."""
        metrics = {
            line["facts"]["of"]: line["metrics"] for line in results if "of" in line["facts"]
        }
        return "\n\n".join(_table(*item) for item in metrics.items()) or "not run"


def _table(model, metrics):
    """Return the table of a model."""
    lines = [f"| layer of {model} | {' | '.join(WORDS)} |", f"|---|{'---|' * len(WORDS)}"]
    for layer in range(len(metrics[WORDS[0]]["neighbor"])):
        cells = [
            f"{100 * metrics[word]['neighbor'][layer]:.0f}% ({metrics[word]['silhouette'][layer]:.2f})"
            for word in WORDS
        ]
        name = "0, the embeddings" if layer == 0 else layer
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, key in (("chance", "chance"), ("95th percentile of chance", "chance_high")):
        cells = [f"{100 * metrics[word][key]:.0f}%" for word in WORDS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def get_blocks(results):
    """Return a table for each scale."""
    return {scale: recipes.AtScale(scale, Layers()) for scale in SCALES}
