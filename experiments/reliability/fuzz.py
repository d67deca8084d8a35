"""Run the fuzzing tests on more inputs, and count the inputs and failures.

    python experiments/reliability/fuzz.py [--times 20]

Runs tests/test_fuzz.py and tests/test_fuzz_rows.py with `--times` as many random inputs as the test
suite, and counts them in pytest's output. Writes one line per test to fuzz.jsonl for the page.
"""

import argparse
import collections
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
TESTS = ("tests/test_fuzz.py", "tests/test_fuzz_rows.py")
# Inputs in hypothesis's statistics of a test, without invalid ones.
INPUTS = re.compile(r"(\d+) passing, (\d+) failing")


def count(output: str) -> dict[str, list[int]]:
    """Return the number of inputs and of failures by test, from pytest's output with statistics."""
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    name = ""
    for line in output.splitlines():
        if test := re.match(r"(FAILED |ERROR |)tests/\w+\.py::(\w+)", line):
            name = test[2]
            counts[name][1] += bool(test[1])
        counts[name][0] += sum(int(n) for numbers in INPUTS.findall(line) for n in numbers)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args()
    # In one process: with several, the output has no statistics.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-q", "--hypothesis-show-statistics", *TESTS],
        cwd=ROOT,
        env={**os.environ, "BERT_JAX_SOAK": str(options.times)},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout)
    lines = [
        {
            "test": name,
            "inputs": inputs,
            "failed": failed,
            "times": options.times,
            "hypothesis": importlib.metadata.version("hypothesis"),
        }
        for name, (inputs, failed) in count(done.stdout).items()
        if inputs or failed  # the others draw nothing
    ]
    (HERE / "fuzz.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
