"""Sweeps of points that run a small script."""

import sys

from bert_jax.tools import sweep
from bert_jax.tools.sweep import SweepArgs
from bert_jax.tools.sweep.results import Results
from bert_jax.tools.sweep.run import run
from bert_jax.tools.sweep.scheduler import Engine
from tests.helpers import processes
from tests.helpers.runs import ONE_DEVICE

# A stand-in for a long job: logs its start, waits for a file, then writes its metrics.
SCRIPT = """
import json, os, pathlib, signal, sys, time
name, folder, *rest = sys.argv[1:-2]
folder, out = pathlib.Path(folder), pathlib.Path(sys.argv[-1])
with open(folder / "calls", "a") as file:
    file.write(f"{name} {os.getpid()}\\n")
def stop(*_):
    (folder / f"{name}.saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
if "again" in rest and not (folder / "again").exists():
    (folder / "again").touch()
    sys.exit(75)
while "waits" in rest and not (folder / "go").exists():
    time.sleep(0.01)
if "meets" in rest:  # ends only where another runs at the same time
    (folder / f"{name}.here").touch()
    while len(list(folder.glob("*.here"))) < 2:
        time.sleep(0.01)
while "second" in rest and len((folder / "calls").read_text().splitlines()) < 2:
    time.sleep(0.01)
if "alone" in rest:  # fails where another runs at the same time
    (folder / "busy").touch(exist_ok=False)
    time.sleep(0.5)
    (folder / "busy").unlink()
if "fails" in rest:
    print("bert-jax: the one line that says why", file=sys.stderr)
    sys.exit(2)
out.mkdir(parents=True, exist_ok=True)
text = "{" if "breaks" in rest else json.dumps({"score": float(len(name))})
(out / "metrics.json").write_text(text)
"""

WAITING = """
def get_points(args):
    a = Point("a", ("python", args.data / "work.py", "a", args.data))
    return [Point("b", ("python", args.data / "work.py", "b", args.data, "waits", a))]
"""


def run_sweep(points, tmp_path, jobs=1, **options):
    """Run points in this process and return the exit status and the results."""
    folder = tmp_path / "experiment"
    folder.mkdir(exist_ok=True)
    args = SweepArgs(data=tmp_path / "data")
    result = sweep.Sweep(folder / "sweep.py", args, sweep.ordered("x", points, args.data))
    engine = options.pop("engine", Engine(jobs=jobs))
    status = run(result, tmp_path / "runs", engine, **options)
    return status, Results(folder).read()


def background(tmp_path, file, *options):
    """Start a sweep in a process of its own."""
    argv = [sys.executable, "-m", "bert_jax", "sweep", file, "--runs", tmp_path / "runs", *options]
    return processes.Process(argv, env=ONE_DEVICE)
