"""Count the damaged inputs that the fuzzing tests try, and check that they end as documented.

    python experiments/reliability/fuzz.py [--times 20]

Runs tests/test_fuzz.py and tests/test_fuzz_rows.py with so many times the usual inputs, drawn anew,
and counts from pytest's own report. A line a test goes to fuzz.jsonl, and `report.py` shows them.
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
# As hypothesis describes a test; what is invalid was never tried.
TRIED = re.compile(r"(\d+) passing, (\d+) failing")


def count(report: pathlib.Path) -> dict[str, list[int]]:
    """Return the inputs tried and the failures by test, from a JUnit report."""
    root = xml.etree.ElementTree.parse(report).getroot()
    tried: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for case in root.iter("testcase"):
        name = case.get("name", "").split("[")[0]
        tried[name][1] += case.find("failure") is not None or case.find("error") is not None
    for prop in root.iter("property"):
        node = prop.get("name", "").removeprefix("hypothesis-statistics-")
        told = base64.b64decode(prop.get("value", "")).decode()
        name = node.split("::")[1].split("[")[0]
        tried[name][0] += sum(int(n) for found in TRIED.findall(told) for n in found)
    return tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bert_jax_fuzz_") as temporary:
        report = pathlib.Path(temporary) / "report.xml"
        # In one process: of several, the report has no statistics.
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "-n0", "-q", f"--junitxml={report}", *TESTS],
            cwd=ROOT,
            env={**os.environ, "BERT_JAX_SOAK": str(options.times)},
            check=False,
        ).returncode
        found = count(report)
    lines = [
        {
            "test": name,
            "inputs": inputs,
            "failed": failed,
            "times": options.times,
            "hypothesis": importlib.metadata.version("hypothesis"),
        }
        for name, (inputs, failed) in found.items()
        if inputs or failed  # the others draw nothing
    ]
    (HERE / "fuzz.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
