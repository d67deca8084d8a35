"""Run the fuzzing tests on more inputs, and count the inputs and failures.

    python experiments/reliability/fuzz.py [--times 20]

Runs tests/test_fuzz.py and tests/test_fuzz_rows.py with `--times` as many random inputs as the test
suite, and counts them from pytest's report. Writes one line per test to fuzz.jsonl for the page.
"""

import argparse
import base64
import collections
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
TESTS = ("tests/test_fuzz.py", "tests/test_fuzz_rows.py")
# Inputs in hypothesis's statistics of a test, without invalid ones.
INPUTS = re.compile(r"(\d+) passing, (\d+) failing")


def count(report: pathlib.Path) -> dict[str, list[int]]:
    """Return the number of inputs and of failures by test, from a JUnit report."""
    root = xml.etree.ElementTree.parse(report).getroot()
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for case in root.iter("testcase"):
        name = case.get("name", "").split("[")[0]
        counts[name][1] += case.find("failure") is not None or case.find("error") is not None
    for prop in root.iter("property"):
        node = prop.get("name", "").removeprefix("hypothesis-statistics-")
        statistics = base64.b64decode(prop.get("value", "")).decode()
        name = node.split("::")[1].split("[")[0]
        counts[name][0] += sum(int(n) for numbers in INPUTS.findall(statistics) for n in numbers)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bert_jax_fuzz_") as temporary:
        report = pathlib.Path(temporary) / "report.xml"
        # In one process: with several, the report has no statistics.
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "-n0", "-q", f"--junitxml={report}", *TESTS],
            cwd=ROOT,
            env={**os.environ, "BERT_JAX_SOAK": str(options.times)},
            check=False,
        ).returncode
        counts = count(report)
    lines = [
        {
            "test": name,
            "inputs": inputs,
            "failed": failed,
            "times": options.times,
            "hypothesis": importlib.metadata.version("hypothesis"),
        }
        for name, (inputs, failed) in counts.items()
        if inputs or failed  # the others draw nothing
    ]
    (HERE / "fuzz.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
