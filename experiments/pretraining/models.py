"""The points and the page of a model that is pretrained on Wikipedia and novels: `mini`, `base`."""

import json
import pathlib

from bert_jax.tools.sweep import Point, module_of
from bert_jax.tools.sweep.experiment import Column, Curves, Table

HERE = pathlib.Path(__file__).parent
MEASURE = ("python", "experiments/pretraining/measure.py", "--init")
recipes = module_of(HERE.parent / "paper" / "recipes.py")
pages = recipes.pages
# Pairs of each paradigm of BLiMP and Zorro at the small scale; there are 1,000 and 2,000.
NUM_PAIRS = 200
LOSSES = {
    "nats per piece": Column("per_piece", factor=1.0, digits=2),
    "per word": Column("per_word", factor=1.0, digits=2),
    "per byte": Column("per_byte", factor=1.0, digits=3),
}
PAIRS = {"BLiMP": Column("blimp"), "Zorro": Column("zorro")}


def points(args, model):
    """Return the measurements of a model that was pretrained on rows of single sequences up to T=128."""
    name, rows = model.name, recipes.single_rows(args)[-1]
    yield Point(f"{name}/losses", (*MEASURE, model, "--rows", rows), {"of": name})
    minimal = ("--data", args.data, "--pairs", NUM_PAIRS)
    yield Point(f"{name}/pairs", (*MEASURE, model, *minimal), {"of": name, "pairs": NUM_PAIRS})


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


def masks(results, folder):
    """Return a table of the words that the newest model predicts, with a row per text."""
    texts = [line["metrics"]["fill_mask"] for line in results if "fill_mask" in line["metrics"]]
    rows = [
        (text["text"], ", ".join(f"{x['token']} {x['probability']:.0%}" for x in text["masks"][0]))
        for text in texts[0]
    ]
    return pages.table(("text", "candidates"), rows)


def blocks(results, folder):
    """Return the blocks of the page, with a row or a curve for each run of the sweep or recorded earlier."""
    results = [*results, *recorded(folder)]
    names = dict.fromkeys(line["facts"]["of"] for line in results if "of" in line["facts"])
    series, axes = {name: {"model": name} for name in names}, ("steps", "held-out masked-LM loss")
    made = {
        "table": Table({name: {"of": name} for name in names}, LOSSES | PAIRS, title="model"),
        "masks": pages.Lines(masks),
        "curve": Curves("curve.svg", series, "step", "loss", axes),
    }
    return {
        name: pages.Lines(lambda _, out, block=block: [block.markdown(results, out)])
        for name, block in made.items()
    }
