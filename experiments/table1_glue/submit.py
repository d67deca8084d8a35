"""The zip for GLUE's server of the best of many fine-tuning runs.

    python experiments/table1_glue/submit.py GLUE RUN … --out FOLDER

Of each task it takes the run with the best mean on dev, and of that its best seed. WNLI, if GLUE has
it, is the majority's label everywhere, as in the paper (section B.1). FOLDER/glue.zip is for the
server; metrics.json says what was taken and what the server will not like.
"""

import argparse
import collections
import json
import pathlib

from bert_jax import workdir
from bert_jax.benchmarks import glue


def best_seed(run: pathlib.Path) -> tuple[str, float, pathlib.Path]:
    """The task of a run, its mean on dev by GLUE's score, and the workdir of its best seed."""
    found = json.loads((run / "metrics.json").read_text())
    value = found["dev"][found["best_by"]]
    if "seeds" not in found:
        return workdir.read_config(run).task.name, value, run
    best = found["seeds"][value["values"].index(max(value["values"]))]
    folder = run / f"seed_{best}"
    return workdir.read_config(folder).task.name, value["mean"], folder


def chosen(runs: list[pathlib.Path]) -> dict[str, tuple[float, pathlib.Path]]:
    """For each task the best mean and the workdir to submit."""
    best: dict[str, tuple[float, pathlib.Path]] = {}
    for run in runs:
        task, value, folder = best_seed(run)
        if task not in best or value > best[task][0]:
            best[task] = (value, folder)
    return best


def majority(folder: pathlib.Path, out: pathlib.Path) -> None:
    """Writes WNLI.tsv, where there is WNLI."""
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
    """Writes the zip."""
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
    told = {task: value for task, (value, _) in best.items()}
    (options.out / "metrics.json").write_text(json.dumps({**told, "notes": notes}))
    print("\n".join(notes))


if __name__ == "__main__":
    main()
