"""Benchmark this project against its peers, and its components against targets.

The contenders of a case are long-lived processes that take turns in every round, so that no two
compete for the processor or a thread pool. Starting a contender and its first turn are not timed. A
fixed calibration workload before each turn measures the speed of the machine at that moment. The new
rounds of a case replace its lines in cases.jsonl, from which README.md is written.

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

from bert_jax.tools.sweep import experiment, module_of

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "cases.jsonl"
LOGS = HERE.parent.parent / "runs" / "speed" / "log"
PACKAGES = (
    "bert-jax", "jax", "flax", "numpy", "tokenizers", "torch", "transformers", "accelerate", "datasets",
)  # fmt: skip
# Lets the threads of the previous turn and of the calibration go idle.
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
    """Run a turn for each line of input, and print its results as JSON."""
    import resource

    # Redirect stdout to stderr for what libraries print.
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        maker, settings = CASES[name][contender]
        module, function = maker.split(":")
        settings = quick(settings) if least else settings
        turn = getattr(importlib.import_module(module), function)(**settings)
        print("ready", file=output, flush=True)
        for _ in sys.stdin:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            effort, begun = sum(os.times()[:4]), time.perf_counter()
            counts = turn()
            result = {
                "seconds": time.perf_counter() - begun,
                "processor_seconds": sum(os.times()[:4]) - effort,
                "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
                **counts,
            }
            print(json.dumps(result), file=output, flush=True)


class Worker:
    """The process of a contender, in the same process group so that Ctrl-C ends it too."""

    def __init__(self, name: str, contender: str, least: bool):
        self._name = f"{name}, {contender}"
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
        self._read_line()

    def _read_line(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()  # until its log is complete
            log = self._log.read_text().splitlines() or ["no output"]
            raise SystemExit(f"{self._name} failed ({log[-1]}); see {self._log}")
        return line

    def turn(self) -> dict[str, Any]:
        """Run a turn, and return its results and seconds."""
        print("turn", file=self._process.stdin, flush=True)
        return json.loads(self._read_line())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


# The process that runs the contenders in turns


@functools.cache
def machine() -> dict[str, Any]:
    """Return the provenance of a result; cached, since results make the tree dirty."""
    from bert_jax.runs import workdir

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
    results: dict[str, dict[str, list]] = {contender: {} for contender in CASES[name]}
    with contextlib.ExitStack() as stack:
        workers = {}
        for contender in results:
            print(f"{name}: starting {contender}", flush=True)
            worker = workers[contender] = Worker(name, contender, least)
            stack.callback(worker.close)
            worker.turn()  # compiles, fills caches
        calibrate()  # the first one of a process takes longer
        for i in range(pairs):
            for contender, worker in workers.items():
                time.sleep(_SETTLE_SECONDS)
                turn = {"load": os.getloadavg()[0], "calibration": calibrate()}
                time.sleep(_SETTLE_SECONDS)
                turn |= worker.turn()
                for key, value in turn.items():
                    value = round(value, 6) if isinstance(value, float) else value
                    results[contender].setdefault(key, []).append(value)
                print(f"{name}: {i}: {contender}: {turn['seconds']:.3g} s", flush=True)
            yield [
                {"case": name, "contender": contender, **turns, **machine()}
                for contender, turns in results.items()
            ]


def keep(new: list[dict[str, Any]], finished: bool) -> None:
    """Replace the lines of a case, and write the page.

    An unfinished case does not replace lines with more rounds, since it may be interrupted.
    """
    before = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    (case,) = {line["case"] for line in new}
    old = [len(line["seconds"]) for line in before if line["case"] == case]
    if not finished and len(new[0]["seconds"]) < max(old, default=0):
        return
    lines = [line for line in before if line["case"] != case] + new
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    experiment.write_readme(HERE)


def chosen(patterns: list[str]) -> list[str]:
    """Return the cases that match any of the patterns, all without patterns, in the order of `CASES`.

    Raises:
        SystemExit: a pattern matches no case.
    """
    for pattern in patterns:
        if not fnmatch.filter(CASES, pattern):
            raise SystemExit(f"no case {pattern!r}; there are {', '.join(CASES)}")
    return [name for name in CASES if any(fnmatch.fnmatch(name, p) for p in patterns or "*")]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="cases: " + ", ".join(CASES),
    )  # fmt: skip
    parser.add_argument("cases", nargs="*", help="names or patterns (default: all)")
    parser.add_argument("--pairs", type=int, default=10, help="rounds per case (default 10)")
    parser.add_argument(
        "--quick", action="store_true", help="run one round of small turns, and record nothing"
    )
    parser.add_argument(
        "--worker",
        nargs=2,
        metavar=("CASE", "CONTENDER"),
        help="run a contender (used internally)",
    )
    options = parser.parse_args()
    if options.worker:
        work(*options.worker, options.quick)
        return
    table = module_of(HERE / "sweep.py").table
    for name in chosen(options.cases):
        rounds = 1 if options.quick else options.pairs
        for number, lines in enumerate(measure(name, rounds, options.quick), 1):
            if not options.quick:
                keep(lines, number == rounds)  # after every round: a case takes up to an hour
        print("\n".join(["", *table(lines, [name]), ""]), flush=True)


if __name__ == "__main__":
    main()
