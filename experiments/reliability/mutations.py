"""Change one line at a time and see whether the tests notice.

    python experiments/reliability/mutations.py [--only NAME] [--again] [--coverage FILE]

mutations.jsonl lists the mutants: a module, the text to replace and its replacement, and the test that
failed. Those without a result are run in a copy of the repository. A mutant that survives is a fault that
no test detects: it gets a test, or a reason in `why`.

`--coverage` names the data of `pytest --cov=bert_jax --cov-context=test`, from which a mutant without a test
gets the tests to run: those that execute its line, then the files of these tests.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = pathlib.Path(__file__).with_name("mutations.jsonl")
SECONDS = 900  # a mutant whose tests run longer is killed, and counts as noticed


def path_of(module: str) -> pathlib.Path:
    """Return the file of a module, relative to the repository."""
    return pathlib.Path("bert_jax", *module.split(".")).with_suffix(".py")


def tests_of(mutant: dict, coverage: str) -> list[list[str]]:
    """Return lists of tests to run one after the other: that which failed before, or by coverage."""
    if mutant.get("by"):
        return [[mutant["by"]]]
    if not os.path.exists(coverage):
        raise SystemExit(f"{mutant['module']}: no test is known, and {coverage} does not exist")
    from coverage import CoverageData

    data = CoverageData(coverage)
    data.read()
    path = ROOT / path_of(mutant["module"])
    (measured,) = (
        name for name in data.measured_files() if name.endswith(str(path_of(mutant["module"])))
    )
    line = path.read_text().partition(mutant["old"])[0].count("\n") + 1
    contexts = data.contexts_by_lineno(measured).get(line, [])
    tests = sorted({context.partition("|")[0] for context in contexts} - {""})
    return [tests, sorted({test.partition("::")[0] for test in tests})] if tests else []


def run(mutant: dict, coverage: str) -> dict:
    """Return a mutant with its result: the test that notices it, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        ignored = shutil.ignore_patterns(".*", "build")
        shutil.copytree(ROOT, copy, dirs_exist_ok=True, ignore=ignored)
        path = copy / path_of(mutant["module"])
        path.write_text(path.read_text().replace(mutant["old"], mutant["new"]))
        for tests in tests_of(mutant, coverage):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *tests]
            environment = {**os.environ, "PYTHONPATH": folder}
            try:
                done = subprocess.run(
                    command, cwd=copy, env=environment, capture_output=True, text=True,
                    timeout=SECONDS, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return {**mutant, "by": tests[0]}
            failed = [
                line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
            ]
            if failed:
                return {**mutant, "by": failed[0].partition(" ")[2].partition(" - ")[0]}
            if done.returncode != 0:
                raise SystemExit(f"{mutant['module']}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {**mutant, "by": None}


def main() -> None:
    """Run the mutants that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="module")
    parser.add_argument("--again", action="store_true", help="run also those with a result")
    parser.add_argument("--coverage", default=str(ROOT / ".coverage"))
    options = parser.parse_args()
    mutants = [json.loads(line) for line in RESULTS.read_text().splitlines()]

    for mutant in mutants:
        if mutant["old"] not in (ROOT / path_of(mutant["module"])).read_text():
            raise SystemExit(f"{mutant['module']} has no {mutant['old']!r}: correct {RESULTS.name}")
    for i, mutant in enumerate(mutants):
        if options.only in mutant["module"] and (options.again or "by" not in mutant):
            mutants[i] = run(mutant, options.coverage)
            outcome = mutants[i]["by"] or "NOT NOTICED"
            print(f"{mutant['module']}: {mutant['new'].strip()}: {outcome}", flush=True)
            RESULTS.write_text("".join(json.dumps(mutant) + "\n" for mutant in mutants))


if __name__ == "__main__":
    main()
