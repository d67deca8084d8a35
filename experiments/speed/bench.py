"""Benchmark this project against its peers, and its components against targets.

Contenders of a case are processes that stay alive and take turns, one after the other in every round,
so that no two share the processor or a pool of threads. Making a contender and its first turn do not
count. Before a turn comes a fixed piece of work that tells how fast the machine is at that moment.
Each case's rounds take the place of its lines in results.jsonl, and README.md is written from those.

    BERT_JAX_DATA=DIR python experiments/speed/bench.py pretrain-mini-128 help
    BERT_JAX_DATA=DIR python experiments/speed/bench.py --quick
"""

import argparse
import contextlib
import fnmatch
import functools
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from cases import CASES, quick

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.jsonl"
LOGS = HERE.parent.parent / "runs" / "speed" / "log"
PACKAGES = (
    "bert-jax", "jax", "flax", "numpy", "tokenizers", "torch", "transformers", "accelerate", "datasets",
)  # fmt: skip
# For the threads of the turn before, and of the calibration, to lie down.
_SETTLE_SECONDS = 0.2
_MATRIX = np.ones((768, 768), np.float32)


def calibrate() -> float:
    """Return the seconds of a fixed calibration workload."""
    begun = time.perf_counter()
    for _ in range(10):
        _MATRIX @ _MATRIX
    return time.perf_counter() - begun


# A contender's process


def work(name: str, contender: str, least: bool) -> None:
    """Take a turn for each line of input, and answer with its results as JSON."""
    import resource

    # What libraries print to stdout is no answer.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        spec = CASES[name].contenders[contender]
        module, function = spec.maker.split(":")
        settings = quick(spec.settings) if least else spec.settings
        turn = getattr(importlib.import_module(module), function)(**settings)
        print("ready", file=answers, flush=True)
        for _ in sys.stdin:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            effort, begun = sum(os.times()[:4]), time.perf_counter()
            found = turn()
            told = {
                "seconds": time.perf_counter() - begun,
                "processor_seconds": sum(os.times()[:4]) - effort,
                "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
                **found,
            }
            print(json.dumps(told), file=answers, flush=True)


class Worker:
    """The process of a contender, in the same process group so that Ctrl-C ends it too."""

    def __init__(self, name: str, contender: str, least: bool):
        self._who = f"{name}, {contender}"
        LOGS.mkdir(parents=True, exist_ok=True)
        self._log = LOGS / f"{name}-{contender.replace(' ', '-')}.log"
        command = [sys.executable, __file__, "--worker", name, contender]
        cache = os.environ.get("BERT_JAX_CACHE", str(LOGS.parent / "cache"))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *(["--quick"] if least else [])],
                env={**os.environ, "BERT_JAX_CACHE": cache},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._answer()

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()  # until it has said why
            said = self._log.read_text().splitlines() or ["nothing"]
            raise SystemExit(f"{self._who} failed ({said[-1]}): {self._log} has it all")
        return line

    def turn(self) -> dict[str, Any]:
        """Take a turn, and return its results and seconds."""
        print("turn", file=self._process.stdin, flush=True)
        return json.loads(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


# What makes them take turns


@functools.cache
def machine() -> dict[str, Any]:
    """Return the provenance of a result; cached, since results make the tree dirty."""
    from bert_jax import workdir

    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions |= workdir.versions([package])
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "python": platform.python_version(),
        **versions,
        "commit": workdir.commit(),
    }


def measure(name: str, pairs: int, least: bool) -> Iterator[list[dict[str, Any]]]:
    """Yield the results of each round, one line per contender."""
    found: dict[str, dict[str, list]] = {contender: {} for contender in CASES[name].contenders}
    with contextlib.ExitStack() as stack:
        workers = {}
        for contender in found:
            print(f"{name}: {contender} begins", flush=True)
            worker = workers[contender] = Worker(name, contender, least)
            stack.callback(worker.close)
            worker.turn()  # compiles, fills caches
        calibrate()  # the first one of a process takes longer
        for number in range(pairs):
            for contender, worker in workers.items():
                time.sleep(_SETTLE_SECONDS)
                told = {"load": os.getloadavg()[0], "calibration": calibrate()}
                time.sleep(_SETTLE_SECONDS)
                told |= worker.turn()
                for key, value in told.items():
                    value = round(value, 6) if isinstance(value, float) else value
                    found[contender].setdefault(key, []).append(value)
                print(f"{name}: {number}: {contender}: {told['seconds']:.3g} s", flush=True)
            yield [
                {"case": name, "contender": contender, **told, **machine()}
                for contender, told in found.items()
            ]


def read() -> list[dict[str, Any]]:
    """Return the lines of results.jsonl."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return [json.loads(line) for line in lines]


def keep(new: list[dict[str, Any]], finished: bool) -> None:
    """Replace the lines of a case, and write the page.

    One that is not finished, for it may be broken off, takes no place of one with more rounds.
    """
    import report

    before = read()
    (case,) = {line["case"] for line in new}
    old = [len(line["seconds"]) for line in before if line["case"] == case]
    if not finished and len(new[0]["seconds"]) < max(old, default=0):
        return
    kept = [line for line in before if line["case"] != case] + new
    kept.sort(key=lambda line: list(CASES).index(line["case"]))
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in kept))
    report.write()


def chosen(patterns: list[str]) -> list[str]:
    """Return the cases that match any of the patterns, in their own order; all without patterns.

    Raises:
        SystemExit: one that fits nothing.
    """
    for pattern in patterns:
        if not fnmatch.filter(CASES, pattern):
            raise SystemExit(f"no case {pattern!r}; there are {', '.join(CASES)}")
    return [name for name in CASES if any(fnmatch.fnmatch(name, p) for p in patterns or ["*"])]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="cases: " + ", ".join(CASES),
    )  # fmt: skip
    parser.add_argument(
        "cases", nargs="*", help="names or patterns such as 'pretrain-*'; none: all"
    )
    parser.add_argument("--pairs", type=int, default=10, help="rounds a case (default 10)")
    parser.add_argument(
        "--quick", action="store_true", help="one round of small turns, told and not recorded"
    )
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument(
        "--worker",
        nargs=2,
        metavar=("CASE", "CONTENDER"),
        help="be a contender (used by this program)",
    )
    options = parser.parse_args()
    if options.worker:
        work(*options.worker, options.quick)
        return
    import report

    if options.page:
        report.write()
        return
    for name in chosen(options.cases):
        rounds = 1 if options.quick else options.pairs
        for number, lines in enumerate(measure(name, rounds, options.quick), 1):
            if not options.quick:
                keep(lines, number == rounds)  # at once: a case takes up to an hour
        print("\n".join(["", *report.table(lines, [name]), ""]), flush=True)


if __name__ == "__main__":
    main()
