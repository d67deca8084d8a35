"""The points and the page of a model that is pretrained on Wikipedia and novels: `mini`, `base`."""

import json
import pathlib

from bert_jax.tools.sweep import Point, module_of
from bert_jax.tools.sweep.experiment import Column, Curves, Table

HERE = pathlib.Path(__file__).parent
MEASURE = ("python", "experiments/pretraining/measure.py", "--init")
recipes = module_of(HERE.parent / "paper" / "recipes.py")
LOSSES = {
    "nats per piece": Column("per_piece", factor=1.0, digits=2),
    "per word": Column("per_word", factor=1.0, digits=2),
    "per byte": Column("per_byte", factor=1.0, digits=3),
}
PAIRS = {"BLiMP": Column("blimp"), "Zorro": Column("zorro")}


def points(args, name, lengths, settings, pairs=200):
    """Return the pretraining of a model on rows of single sequences, and its measurements.

    Args:
        args: arguments of the sweep.
        name: name of the model.
        lengths: lengths of rows.
        settings: the command's config and its changes.
        pairs: pairs of each paradigm of BLiMP and Zorro.
    """
    recipes.only(args, "small")
    rows = [rows for rows in recipes.single_rows(args) if rows.options["--tokens"] in lengths]
    folders = [part for point in rows for part in ("--rows", point)]
    model = Point(name, ("pretrain", *settings, *folders), {"model": name})
    yield Point(f"{name}/losses", (*MEASURE, model, "--rows", rows[-1]), {"of": name})
    minimal = ("--data", args.data, "--pairs", pairs)
    yield Point(f"{name}/pairs", (*MEASURE, model, *minimal), {"of": name, "pairs": pairs})


def recorded(folder):
    """Return the results of earlier runs, results.json and others, as lines of a sweep."""
    lines = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        run = json.loads(path.read_text())
        on = run["starts"][-1]["devices"]
        on = f"{run['cores']} CPU cores" if on == "1 cpu" else on
        name = f"{folder.name}, on {on}, {run['training_minutes']:.0f} minutes"
        pairs = {"fill_mask": run["fill_mask"], **run.get("minimal_pairs", {})}
        heldout = run["heldout"]
        curve = {
            "step": [line["step"] for line in heldout],
            "loss": [line["masked_lm_loss"] for line in heldout],
        }
        facts = {"of": name, "model": name}
        lines.append({"facts": facts, "metrics": {**run["losses"], **pairs}, "curve": curve})
    return lines


class Masks:
    """A table of the words that the newest model predicts."""

    def markdown(self, results, folder):
        """Return a row per text."""
        texts = [line["metrics"]["fill_mask"] for line in results if "fill_mask" in line["metrics"]]
        lines = ["| text | candidates |", "|---|---|"]
        for text in texts[0]:
            words = [f"{each['token']} {each['probability']:.0%}" for each in text["masks"][0]]
            lines.append(f"| {text['text']} | {', '.join(words)} |")
        return "\n".join(lines)


class With:
    """A block for the results of the sweep and the recorded ones."""

    def __init__(self, make):
        self.make = make

    def markdown(self, results, folder):
        """Return the block with a row or a curve per model."""
        results = [*results, *recorded(folder)]
        names = dict.fromkeys(line["facts"]["of"] for line in results if "of" in line["facts"])
        return self.make(names).markdown(results, folder)


def blocks():
    """Return the blocks of the page: losses and minimal pairs, predicted words, loss by step."""
    axes = ("steps", "held-out masked-LM loss")
    return {
        "table": With(
            lambda names: Table({n: {"of": n} for n in names}, LOSSES | PAIRS, title="model")
        ),
        "masks": With(lambda names: Masks()),
        "curve": With(
            lambda names: Curves(
                "curve.svg", {n: {"model": n} for n in names}, "step", "loss", axes
            )
        ),
    }
