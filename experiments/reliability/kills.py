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
import importlib.metadata
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
TRAINED = ("pretrain", "finetune")
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
FINETUNE = "epochs=8 batch_size=8 task.tokens=16 checkpoint.every_steps=13 evaluate_every_steps=20"


def commands(data: pathlib.Path) -> dict[str, Callable[[pathlib.Path], list]]:
    """Return the commands of each scenario."""
    config = ROOT / "configs"

    def pretrain(out):
        phases = ["--rows", data / "rows32", "--rows", data / "rows64"]
        changes = [f"--config.{change}" for change in PRETRAIN]
        return [
            *("pretrain", f"--config={config}/pretrain.py:L2-H32-A2,32,64"),
            *(*changes, *phases, "--workdir", out),
        ]

    def finetune(out):
        size = "model.layers=2 model.hidden=32 model.heads=2 model.feed_forward=64"
        files = [f"task.{split}={data / split}.csv" for split in ("train", "dev")]
        changes = [f"--config.{change}" for change in [*FINETUNE.split(), *size.split(), *files]]
        start = ["--init", "none", "--vocab", data / "vocab"]
        return ["finetune", f"--config={config}/table.py", *start, *changes, "--workdir", out]

    def prepare(out):
        return ["prepare", *rows(data, 32), "--out", out]

    def export(out):
        return ["export", "--workdir", data / "pretrain", "--out", out]

    def import_(out):
        return ["import", data / "export", "--out", out]

    return {
        "pretrain": pretrain,
        "finetune": finetune,
        "prepare": prepare,
        "export": export,
        "import": import_,
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


def saving(out: pathlib.Path, rng: random.Random) -> Callable[[], bool]:
    """Return a predicate: a checkpoint is being written."""
    return lambda: any("tmp" in name for name in names(out / "checkpoints"))


def sealed(out: pathlib.Path, rng: random.Random) -> Callable[[], bool]:
    """Return a predicate: a checkpoint is written with its manifest but not yet renamed."""

    def now() -> bool:
        tmp = (name for name in names(out / "checkpoints") if "tmp" in name)
        return any((out / "checkpoints" / name / "manifest.json").exists() for name in tmp)

    return now


def committed(out: pathlib.Path, rng: random.Random) -> Callable[[], bool]:
    """Return a predicate: a new checkpoint has been renamed, and an old one is deleted next."""
    before = names(out / "checkpoints")
    return lambda: any(name.isdigit() for name in names(out / "checkpoints") - before)


def deleting(out: pathlib.Path, rng: random.Random) -> Callable[[], bool]:
    """Return a predicate: the folder of an old checkpoint has just disappeared."""
    folder, seen = out / "checkpoints", set()

    def now() -> bool:
        nonlocal seen
        here = {name for name in names(folder) if name.isdigit()}
        gone, seen = seen - here, here
        return bool(gone)

    return now


def line_of(out: pathlib.Path, condition: Callable[[dict], bool]) -> Callable[[], bool]:
    """Return a predicate: the last line of metrics.jsonl is new and satisfies a condition."""
    path = out / "metrics.jsonl"
    begun = path.stat().st_size if path.exists() else 0

    def now() -> bool:
        if not path.exists() or path.stat().st_size <= begun:
            return False
        try:
            return condition(json.loads(path.read_text().splitlines()[-1]))
        except (ValueError, IndexError):
            return False

    return now


def evaluating(out: pathlib.Path, rng: random.Random) -> Callable[[], bool]:
    """Return a predicate: the last line of metrics before an evaluation has been written."""
    return line_of(out, lambda line: line["split"] == "train" and line["step"] % 16 >= 11)


def phase(out: pathlib.Path, rng: random.Random) -> Callable[[], bool]:
    """Return a predicate: the step is near a change of phase."""
    return line_of(out, lambda line: 135 <= line["step"] <= 150)


def first_step(out: pathlib.Path, rng: random.Random) -> Callable[[], bool]:
    """Return a predicate: the run has recorded its start and is about to do its first step."""
    starts = out / "starts.jsonl"
    before = starts.stat().st_size if starts.exists() else 0
    return lambda: starts.exists() and starts.stat().st_size > before


def any_time(out: pathlib.Path, rng: random.Random) -> Callable[[], bool]:
    """Return a predicate: a random time has passed."""
    at = time.monotonic() + rng.uniform(0, 12)
    return lambda: time.monotonic() > at


def writing(out: pathlib.Path, rng: random.Random) -> Callable[[], bool]:
    """Return a predicate: the temporary folder next to the output has files."""
    partial = out.parent / f".{out.name}.partial"
    return lambda: partial.exists() and any(name != "lock" for name in names(partial))


def working(out: pathlib.Path, rng: random.Random) -> Callable[[], bool]:
    """Return a predicate: `prepare` has written another part of its output."""
    partial = out / ".partial"
    before = names(partial)
    return lambda: bool(names(partial) - before)


TRAINING = (
    *(saving, saving, sealed, sealed, committed, committed, deleting),
    *(evaluating, phase, first_step, any_time),
)
MOMENTS = {
    "pretrain": TRAINING,
    "finetune": tuple(moment for moment in TRAINING if moment is not phase),
    "prepare": (working, working, any_time),
    "export": (writing, writing, any_time),
    "import": (writing, writing, any_time),
}


def kill_once(command: list, out: pathlib.Path, moment, rng: random.Random) -> bool:
    """Start the command and kill it at the moment; return False if it ended before."""
    due, delay = moment(out, rng), rng.uniform(0, 0.03)
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
    if scenario in (*TRAINED, "import"):
        return trained_differences(out, reference)
    expected = sorted(str(p.relative_to(reference)) for p in reference.rglob("*") if p.is_file())
    actual = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    if actual != expected:
        return ["the list of files"]
    return [
        name for name in expected if not filecmp.cmp(out / name, reference / name, shallow=False)
    ]


def trained_differences(out: pathlib.Path, reference: pathlib.Path) -> list[str]:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    differ = []
    for name in ("metrics.jsonl", "metrics.json", "vocab.txt"):
        if (reference / name).exists() and not filecmp.cmp(
            out / name, reference / name, shallow=False
        ):
            differ.append(name)
    steps = [sorted(n for n in names(f / "checkpoints") if n.isdigit()) for f in (out, reference)]
    if steps[0] != steps[1]:
        return [*differ, f"the checkpoints that are kept: {steps[0]}, not {steps[1]}"]
    for step in steps[0]:
        for item in ("params", "training"):
            if (reference / "checkpoints" / step / item).exists():
                one, other = (
                    jax.tree.leaves(
                        ocp.StandardCheckpointer().restore(
                            f.absolute() / "checkpoints" / step / item
                        )
                    )
                    for f in (out, reference)
                )
                if len(one) != len(other) or not all(
                    np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True)
                ):
                    differ.append(f"step {step}: {item}")
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # shares a GPU with the runs
    rng, results = random.Random(options.seed), HERE / "kills.jsonl"
    done = 0
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
        number = 0
        while done < options.kills:
            scenario = rng.choices(options.only, weights)[0]
            number += 1
            out = folder / f"{scenario}_{number}"
            lines = []
            for _ in range(KILLS_A_RUN):
                moment = rng.choice(MOMENTS[scenario])
                if not kill_once(make[scenario](out), out, moment, rng):
                    break
                lines.append({"command": scenario, "moment": moment.__name__})
            # Commands that create a folder atomically are done if it exists; the others resume.
            if scenario in (*TRAINED, "prepare") or not out.exists():
                call(*make[scenario](out))
            differ = differences(scenario, out, folder / scenario)
            resumed = [line["step"] for line in workdir.read_lines(out / "starts.jsonl")]
            with open(results, "a") as file:
                for line in lines:
                    line |= {"seed": options.seed, "run": number, "resumed_at": resumed,
                             "differs": differ, "jax": importlib.metadata.version("jax"), **on}  # fmt: skip
                    file.write(json.dumps(line) + "\n")
            done += len(lines)
            print(f"{done} kills; {scenario}: {', '.join(line['moment'] for line in lines)}: "
                  f"{'differs in ' + ', '.join(differ) if differ else 'the same'}", flush=True)  # fmt: skip
            if differ:
                shutil.copytree(out, HERE / "differs", dirs_exist_ok=True)
                raise SystemExit(f"{scenario}: {differ}")
            shutil.rmtree(out)


if __name__ == "__main__":
    main()
