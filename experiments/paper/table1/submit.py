"""Create a submission to the GLUE server from fine-tuning runs.

    python experiments/paper/table1/submit.py GLUE RUN … --out FOLDER

Selects for each task the run with the best mean on the dev set, and its best seed. WNLI, if GLUE has
it, gets the majority label, as in the paper (section B.1). The submission is FOLDER/glue.zip;
metrics.json lists the selected runs and what the server will reject.
"""

import argparse
import collections
import json
import pathlib

from bert_jax.runs import workdir
from bert_jax.tasks import glue


def best_seed(run: pathlib.Path) -> tuple[str, float, pathlib.Path]:
    """Return a run's task, its mean dev score, and the workdir of its best seed."""
    metrics = json.loads((run / "metrics.json").read_text())
    value = metrics["dev"][metrics["best_by"]]
    if "seeds" not in metrics:
        return workdir.read_config(run).task.name, value, run
    best = metrics["seeds"][value["values"].index(max(value["values"]))]
    folder = run / f"seed_{best}"
    return workdir.read_config(folder).task.name, value["mean"], folder


def chosen(runs: list[pathlib.Path]) -> dict[str, tuple[float, pathlib.Path]]:
    """Return the best mean and the workdir to submit, by task."""
    best: dict[str, tuple[float, pathlib.Path]] = {}
    for run in runs:
        task, value, folder = best_seed(run)
        if task not in best or value > best[task][0]:
            best[task] = (value, folder)
    return best


def majority(folder: pathlib.Path, out: pathlib.Path) -> None:
    """Write WNLI.tsv if GLUE has WNLI."""
    sources = {split: glue.existing(folder / f"{split}.tsv") for split in ("train", "test")}
    if not all(sources.values()):
        return
    train, test = (
        list(glue.read("wnli", source, split, split == "train", []))
        for split, source in sources.items()
    )
    label = collections.Counter(row.label for row in train).most_common(1)[0][0]
    lines = ["index\tprediction", *(f"{row.index}\t{label}" for row in test)]
    (out / "WNLI.tsv").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Write the zip file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("glue", type=pathlib.Path)
    parser.add_argument("runs", type=pathlib.Path, nargs="+")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    best = chosen(options.runs)
    majority(options.glue / "WNLI", options.out)
    folders = [options.out, *(folder for _, folder in best.values())]
    notes = glue.submission(folders, options.out / "glue.zip")
    scores = {task: value for task, (value, _) in best.items()}
    (options.out / "metrics.json").write_text(json.dumps({**scores, "notes": notes}))
    print("\n".join(notes))


if __name__ == "__main__":
    main()
