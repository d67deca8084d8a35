"""Context: which layers separate the senses of a word?"""

import dataclasses

import recipes

from bert_jax.storage import files
from bert_jax.tools.sweep import SCALES, Point

WORDS = ("right", "bank", "spring")


def get_points(args):
    """Return the model, and the measurement of its vectors."""
    name = recipes.called(args.init) if args.init else "base"
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


@dataclasses.dataclass(frozen=True)
class Picture:
    """A plot of the word's vectors in the plane of the first two principal components."""

    file: str

    def markdown(self, results, folder):
        """Draw the embeddings, the middle layer and the last layer."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        measured = [line["metrics"] for line in results if "of" in line["facts"]]
        if not measured:
            return "not run"
        metrics = measured[-1]
        last = len(metrics[WORDS[0]]["neighbor"]) - 1
        layers = sorted({0, (last + 1) // 2, last})
        with rc_context({"svg.hashsalt": "bert_jax"}):
            figure = Figure(figsize=(3 * len(layers), 3 * len(WORDS)), layout="constrained")
            axes = figure.subplots(len(WORDS), len(layers), squeeze=False)
            for row, word in zip(axes, WORDS, strict=True):
                senses = metrics[word]["senses"]
                for plot, layer in zip(row, layers, strict=True):
                    for sense in dict.fromkeys(senses):
                        points = [
                            point
                            for point, label in zip(
                                metrics[word]["places"][layer], senses, strict=True
                            )
                            if label == sense
                        ]
                        plot.scatter(*zip(*points, strict=True), s=12, label=sense)
                    plot.set(title=f"{word}, layer {layer}", xticks=[], yticks=[])
                row[0].legend(frameon=False, fontsize="small")
            with files.atomic_write(folder / self.file) as beside:
                figure.savefig(beside, format="svg", metadata={"Date": None})
        return f"![vectors of {', '.join(WORDS)}]({self.file})"


def get_blocks(results):
    """Return a table and a plot for each scale."""
    blocks = {}
    for scale in SCALES:
        blocks[scale] = recipes.At(scale, Layers())
        blocks[f"{scale}_picture"] = recipes.At(scale, Picture(f"{scale}.svg"))
    return blocks
