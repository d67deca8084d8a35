"""Kill real runs at critical moments, restart them, and compare with undisturbed runs.

    python experiments/reliability/kills.py --kills 100 [--seed 0] [--only pretrain finetune]
    JAX_PLATFORMS=cuda python experiments/reliability/kills.py --kills 12 --only pretrain finetune

Generates its data: a text from a grammar, a vocabulary, rows, a table to fine-tune on. Each command first
runs undisturbed. Then it is started, killed by SIGKILL at a moment drawn from `MOMENTS` and restarted,
several times, and finally runs to its end. Its output must equal that of the undisturbed run bit for bit:
arrays of all remaining checkpoints, metrics.jsonl, shards and exported files. Each kill is a line of
kills.jsonl, from which the page is written.
"""

import argparse
import filecmp
import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from bert_jax.runs import workdir

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
TRAINED = ("pretrain", "finetune", "lora")
# The files of a run that are compared, besides the arrays of checkpoints.
LOGS = ("metrics.jsonl", "metrics.json", "vocab.txt")
# Maximum number of kills of one run.
KILLS_A_RUN = 4
POLL_SECONDS = 0.001
NOUNS = "king river mountain book child city teacher horse garden winter letter ship".split()
VERBS = "sees follows remembers leaves finds builds crosses describes".split()


# --- Commands -------------------------------------------------------------------------------------


def corpus(folder: pathlib.Path) -> None:
    """Write a text, a vocabulary, rows of T=32 and 64, and a labeled table."""
    rng = random.Random(0)

    def sentence() -> str:
        return f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}."

    texts = ("\n".join(sentence() for _ in range(rng.randint(4, 30))) for _ in range(200))
    (folder / "text.txt").write_text("\n\n".join(texts) + "\n")
    for name, count in (("train", 300), ("dev", 60)):
        lines = [f"{text},{'ship' in text}" for text in (sentence() for _ in range(count))]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    (folder / "words.txt").write_text("wagon\nbridge\n")
    text, vocab = folder / "text.txt", folder / "vocab"
    call("vocab", "--out", vocab, "--size", 150, text)
    for tokens in (32, 64):
        call("prepare", *rows(folder, tokens), "--out", folder / f"rows{tokens}")


def rows(data: pathlib.Path, tokens: int) -> list:
    """Return the arguments of `prepare`."""
    shape = ["--tokens", tokens, "--sequences", 4, "--heldout-fraction", 0.1, "--passes", 3]
    return ["--vocab", data / "vocab", *shape, data / "text.txt"]


PRETRAIN = (
    "model.positions=64 batch_size=8 steps=240 log_every_steps=5 evaluate_every_steps=16 "
    "evaluate_rows=32 optim.warmup_steps=5 optim.learning_rate=1e-3 checkpoint.every_steps=9 "
    "phases[0].fraction=0.6 phases[1].fraction=0.4 phases[1].batch_size=4"
).split()
FINETUNE = (
    "epochs=8 batch_size=8 task.tokens=16 checkpoint.every_steps=13 evaluate_every_steps=20"
).split()


def commands(data: pathlib.Path) -> dict[str, Callable[[pathlib.Path], list]]:
    """Return the commands of each scenario."""

    def config(name, changes):
        return [f"--config={ROOT}/configs/{name}", *(f"--config.{each}" for each in changes)]

    def pretrain(out):
        phases = ["--rows", data / "rows32", "--rows", data / "rows64"]
        settings = config("pretrain.py:L2-H32-A2,32,64", PRETRAIN)
        return ["pretrain", *settings, *phases, "--workdir", out]

    def finetune(out, *more):
        files = [f"task.{split}={data / split}.csv" for split in ("train", "dev")]
        start = ["--init", data / "pretrain", "--workdir", out]
        return ["finetune", *config("table.py", [*FINETUNE, *files, *more]), *start]

    def extend(out):
        words = ["--add", data / "words.txt"]
        return ["extend-vocab", "--init", data / "pretrain", "--out", out, *words]

    return {
        "pretrain": pretrain,
        "finetune": finetune,
        "lora": lambda out: finetune(out, "lora.rank=4"),
        "prepare": lambda out: ["prepare", *rows(data, 32), "--out", out],
        "export": lambda out: ["export", "--workdir", data / "pretrain", "--out", out],
        "import": lambda out: ["import", data / "export", "--out", out],
        "extend-vocab": extend,
    }


def environment() -> dict[str, str]:
    platform, flags = os.environ.get("JAX_PLATFORMS", "cpu"), os.environ.get("XLA_FLAGS", "")
    if platform == "cpu":  # starting a process mostly compiles: use little optimization
        flags = "--xla_backend_optimization_level=0"
    # A separate cache.
    cache = os.path.join(tempfile.gettempdir(), "bert_jax_kills_cache")
    return {**os.environ, "JAX_PLATFORMS": platform, "XLA_FLAGS": flags, "BERT_JAX_CACHE": cache}


def start(command: list) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "bert_jax", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


def call(*command) -> None:
    process = start(list(command))
    output, _ = process.communicate(timeout=600)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: status {process.returncode}\n{output}")


# --- Moments --------------------------------------------------------------------------------------


def names(folder: pathlib.Path) -> set[str]:
    return set(os.listdir(folder)) if folder.exists() else set()


def size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def moments(out: pathlib.Path, rng: random.Random) -> dict[str, Callable[[], bool]]:
    """Return a function for each moment, which returns whether it has come."""
    checkpoints, partial = out / "checkpoints", out / ".partial"
    beside = out.parent / f".{out.name}.partial"  # what becomes the output
    metrics, starts = out / "metrics.jsonl", out / "starts.jsonl"
    before, parts_before, seen = names(checkpoints), names(partial), set()
    metrics_before, starts_before = size(metrics), size(starts)
    at = time.monotonic() + rng.uniform(0, 12)

    def unfinished():
        return [checkpoints / name for name in names(checkpoints) if "tmp" in name]

    def deleting():
        nonlocal seen
        now = names(checkpoints)
        gone, seen = seen - now, now
        return any(name.isdigit() for name in gone)

    def last_line(condition):
        if size(metrics) <= metrics_before:
            return False
        try:
            line = json.loads(metrics.read_text().splitlines()[-1])
        except (ValueError, IndexError):  # it is being written
            return False
        return condition(line["split"], line["step"])

    return {
        "saving": lambda: bool(unfinished()),
        # A checkpoint is complete but not yet renamed.
        "sealed": lambda: any((each / "manifest.json").exists() for each in unfinished()),
        # A new checkpoint has its name, and an old one is deleted next.
        "committed": lambda: any(name.isdigit() for name in names(checkpoints) - before),
        "deleting": deleting,
        # After the last line of metrics before an evaluation; near a change of phase.
        "evaluating": lambda: last_line(lambda split, step: split == "train" and step % 16 >= 11),
        "phase": lambda: last_line(lambda _, step: 135 <= step <= 150),
        # The run has recorded its start and is about to do its first step.
        "first_step": lambda: size(starts) > starts_before,
        "any_time": lambda: time.monotonic() > at,
        "writing": lambda: bool(names(beside) - {"lock"}),
        # `prepare` has written another part of its output.
        "working": lambda: bool(names(partial) - parts_before),
    }


TRAINING = (
    *("saving", "saving", "sealed", "sealed", "committed", "committed", "deleting"),
    *("evaluating", "first_step", "any_time"),
)
WRITING = ("writing", "writing", "any_time")
MOMENTS = {
    "pretrain": (*TRAINING, "phase"),
    "finetune": TRAINING,
    "lora": TRAINING,
    "prepare": ("working", "working", "any_time"),
    "export": WRITING,
    "import": WRITING,
    "extend-vocab": WRITING,
}


def kill_once(command: list, out: pathlib.Path, moment: str, rng: random.Random) -> bool:
    """Start the command and kill it at the moment; return False if it ended before."""
    due, delay = moments(out, rng)[moment], rng.uniform(0, 0.03)
    process = start(command)
    while process.poll() is None:
        if due():
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return process.returncode == -signal.SIGKILL
        time.sleep(POLL_SECONDS)
    output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{command[0]}: status {process.returncode} after a kill\n{output}")
    return False


# --- Results --------------------------------------------------------------------------------------


def differences(scenario: str, out: pathlib.Path, reference: pathlib.Path) -> list[str]:
    """Return the differences from the folder of the undisturbed run."""
    trained = scenario in (*TRAINED, "import", "extend-vocab")

    def compared(folder):
        files = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
        return sorted(p for p in files if not trained or p.name in LOGS)

    if compared(out) != compared(reference):
        return ["the list of files"]
    differ = [
        str(name)
        for name in compared(reference)
        if not filecmp.cmp(out / name, reference / name, shallow=False)
    ]
    return [*differ, *(array_differences(out, reference) if trained else [])]


def array_differences(out: pathlib.Path, reference: pathlib.Path) -> list[str]:
    """Return the differences between the checkpoints of two runs."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    def arrays(path):
        return jax.tree.leaves(ocp.StandardCheckpointer().restore(path.absolute()))

    steps, expected = (
        sorted(filter(str.isdigit, names(f / "checkpoints"))) for f in (out, reference)
    )
    if steps != expected:
        return [f"the checkpoints that are kept: {steps}, not {expected}"]
    differ = []
    for step, item in itertools.product(steps, ("params", "training")):
        ours, theirs = (f / "checkpoints" / step / item for f in (out, reference))
        if not theirs.exists():
            continue
        one, other = arrays(ours), arrays(theirs)
        equal = functools.partial(np.array_equal, equal_nan=True)
        if len(one) != len(other) or not all(map(equal, one, other)):
            differ.append(f"step {step}: {item}")
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # shares a GPU with the runs
    rng, done, number = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory(prefix="bert_jax_kills_") as temporary:
        folder = pathlib.Path(temporary)
        corpus(folder)
        make = commands(folder)
        for scenario in make:  # in this order, since some use the output of others
            if scenario in options.only or scenario in ("pretrain", "export"):
                call(*make[scenario](folder / scenario))
        device = workdir.read_lines(folder / "pretrain" / "starts.jsonl")[0]["devices"]
        on = {} if device == "1 cpu" else {"device": device}
        # Kill training, which has the most state, three times as often as the others.
        weights = [3 if scenario in TRAINED else 1 for scenario in options.only]
        while done < options.kills:
            scenario = rng.choices(options.only, weights)[0]
            number += 1
            out = folder / f"{scenario}_{number}"
            killed = []
            while len(killed) < KILLS_A_RUN:
                moment = rng.choice(MOMENTS[scenario])
                if not kill_once(make[scenario](out), out, moment, rng):
                    break
                killed.append(moment)
            # Commands that create a folder atomically are done if it exists; the others resume.
            if scenario in (*TRAINED, "prepare") or not out.exists():
                call(*make[scenario](out))
            differ = differences(scenario, out, folder / scenario)
            resumed = [line["step"] for line in workdir.read_lines(out / "starts.jsonl")]
            about = {"seed": options.seed, "run": number, "resumed_at": resumed, "differs": differ}
            about |= {"jax": importlib.metadata.version("jax"), **on}
            with open(HERE / "kills.jsonl", "a") as file:
                for moment in killed:
                    line = {"command": scenario, "moment": moment, **about}
                    file.write(json.dumps(line) + "\n")
            done += len(killed)
            outcome = differ or "the same"
            print(f"{done} kills; {scenario}: {', '.join(killed)}: {outcome}", flush=True)
            if differ:
                shutil.copytree(out, HERE / "differs", dirs_exist_ok=True)
                raise SystemExit(f"{scenario}: {differ}")
            shutil.rmtree(out)


if __name__ == "__main__":
    main()
