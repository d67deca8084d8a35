"""Time the README's first commands on a fresh clone, and run the tests under load to find flaky ones.

    python experiments/test_suite/run.py first              # clone, make quickstart, make test
    python experiments/test_suite/run.py first quickstart   # without make test
    python experiments/test_suite/run.py stress --times 10  # make test under load

Each run appends a line to results.jsonl, from which the tables of README.md are written. The quickstart's
answers are written to the project's README, and its loss curve to this folder. `first` clones the
repository, so it uses only committed files; packages come from pip's cache or the network.
"""

import argparse
import contextlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time

from bert_jax import workdir

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results.jsonl"
SUMMARY = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def environment() -> dict[str, str]:
    """Return the environment without variables that select a virtual environment or devices."""
    removed = ("VIRTUAL_ENV", "PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS", "BERT_JAX_CACHE")
    return {name: value for name, value in os.environ.items() if name not in removed}


def timed(command: list[str], folder: pathlib.Path, env: dict[str, str]) -> tuple[float, str]:
    """Run a command, and return its seconds and output; exit if it fails."""
    begin = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"{' '.join(command)} failed in {folder}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return round(time.monotonic() - begin, 1), done.stdout


def counts(output: str) -> dict[str, int]:
    """Return the counts in the last line of pytest."""
    last = output.strip().splitlines()[-1]
    return {name.rstrip("s"): int(number) for number, name in SUMMARY.findall(last)}


def first(options: argparse.Namespace) -> None:
    """Clone the repository, and time its first commands and their installation."""
    with tempfile.TemporaryDirectory() as name:
        clone, env = pathlib.Path(name, "bert_jax"), environment()
        # Empty caches of compiled programs; the tests' is in the folder for temporary files.
        env |= {"TMPDIR": name, "BERT_JAX_CACHE": str(pathlib.Path(name, "cache"))}
        timed(["git", "clone", "--quiet", str(ROOT), str(clone)], pathlib.Path(name), env)
        for command in [options.command] if options.command else ("quickstart", "test"):
            install = ".venv/run.done" if command == "quickstart" else ".venv/test.done"
            install_seconds, _ = timed(["make", install], clone, env)
            seconds, output = timed(["make", command], clone, env)
            line = {"command": f"make {command}", "install_seconds": install_seconds}
            line |= {"seconds": seconds, **(counts(output) if command == "test" else {})}
            record(line, clone)
            if command == "quickstart":
                show(clone, output)


def show(clone: pathlib.Path, output: str) -> None:
    """Write the quickstart's results to the project's README, and its loss curve to this folder."""
    curve = HERE / "quickstart.svg"
    timed([".venv/bin/bert-jax", "report", "quickstart/model", "--out", str(curve)], clone, {})
    results = output.partition("5/6 ")[2].partition("\n6/6 ")[0]
    lines = results.replace(f"{clone}/", "").splitlines()[1:]
    left_out = ("  $ ", "  loss ", "  real_fraction ")
    lines = [line for line in lines if line.strip() and not line.startswith(left_out)]
    write_blocks(ROOT / "README.md", {"quickstart": ["```text", *lines, "```"]})


def stress(options: argparse.Namespace) -> None:
    """Run `make test` repeatedly with one busy process per core, and record failures."""
    spin = [sys.executable, "-c", "while True: sum(range(1000))"]
    for _ in range(options.times):
        with contextlib.ExitStack() as stack:
            for _ in range(len(os.sched_getaffinity(0))):
                process = stack.enter_context(subprocess.Popen(spin))
                stack.callback(process.kill)
            begin = time.monotonic()
            done = subprocess.run(
                ["make", "test"], cwd=ROOT, env=environment(), capture_output=True, text=True
            )
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        seconds = round(time.monotonic() - begin, 1)
        record({"command": "stress", "seconds": seconds, "failures": failed, **counts(done.stdout)})


def record(line: dict, checkout: pathlib.Path = ROOT) -> None:
    """Append a line of a run in a checkout to results.jsonl, and rewrite the tables."""
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": workdir.commit(checkout),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps({**line, **about}) + "\n")
    print(json.dumps(line), flush=True)
    write_page()


def write_page() -> None:
    """Write the tables of README.md from results.jsonl."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    tables = {
        "first": [
            "| command | installation, s | command, s | tests | date | commit | machine |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| `{line['command']}` | {line['install_seconds']:.0f} | {line['seconds']:.0f} | "
                f"{line.get('passed', '')} | {line['date']} | {line['commit']} | "
                f"{line['cores']} cores ({line['processor']}), Python {line['python']} |"
                for line in lines
                if line["command"].startswith("make")
            ),
        ],
        "stress": [
            "| run | seconds | passed | failed | commit |",
            "|---|---|---|---|---|",
            *(
                f"| {number} | {line['seconds']:.0f} | {line.get('passed', 0):,} | "
                f"{', '.join(line['failures']) or 'none'} | {line['commit']} |"
                for number, line in enumerate((x for x in lines if x["command"] == "stress"), 1)
            ),
        ],
    }
    write_blocks(HERE / "README.md", tables)


def write_blocks(path: pathlib.Path, blocks: dict[str, list[str]]) -> None:
    """Replace the lines between the markers of each block in a page."""
    text = path.read_text()
    for name, rows in blocks.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, after = text.partition(begin)
        text = "\n".join([before + begin, *rows, end + after.partition(end)[2]])
    path.write_text(text)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    commands = verbs.add_parser("first", help="time the first commands")
    commands.add_argument(
        "command", nargs="?", choices=("quickstart", "test"), help="one of them (default both)"
    )
    commands.set_defaults(run=first)
    under_load = verbs.add_parser("stress", help="run the tests under load")
    under_load.add_argument("--times", type=int, default=10, help="number of runs (default 10)")
    under_load.set_defaults(run=stress)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
