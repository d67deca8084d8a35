"""Time `make quickstart` on a fresh clone, with pip's cache but without compiled programs.

    python experiments/speed/quickstart.py

Appends a line to quickstart.jsonl and writes README.md, the answers on the project's page, and
quickstart.svg, the loss curve. Only committed files are used; packages come from pip's cache or the
network.
"""

import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

from bert_jax.runs import workdir
from bert_jax.storage import files
from bert_jax.tools.sweep import experiment, module_of

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent


def timed(command: list[str], folder: pathlib.Path, env: dict[str, str]) -> tuple[float, str]:
    """Run a command, and return its seconds and output; exit if it fails."""
    begin = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"{' '.join(command)} failed in {folder}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return round(time.monotonic() - begin, 1), done.stdout


def answers(clone: pathlib.Path, output: str) -> list[str]:
    """Return the held-out metrics and the predictions that the quickstart prints."""
    results = output.partition("5/6 ")[2].partition("\n6/6 ")[0]
    lines = results.replace(f"{clone}/", "").splitlines()[1:]
    left_out = ("  $ ", "  loss ")
    return [line for line in lines if line.strip() and not line.startswith(left_out)]


def main() -> None:
    """Clone the repository, time the quickstart and its installation, and write the pages."""
    removed = ("VIRTUAL_ENV", "PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS")
    env = {name: value for name, value in os.environ.items() if name not in removed}
    with tempfile.TemporaryDirectory() as name:
        clone = pathlib.Path(name, "bert_jax")
        env |= {"BERT_JAX_CACHE": str(pathlib.Path(name, "cache"))}
        timed(["git", "clone", "--quiet", str(ROOT), str(clone)], pathlib.Path(name), env)
        install_seconds, _ = timed(["make", ".venv/run.done"], clone, env)
        seconds, output = timed(["make", "quickstart"], clone, env)
        line = {
            "install_seconds": install_seconds,
            "seconds": seconds,
            "date": time.strftime("%Y-%m-%d"),
            "commit": workdir.commit(clone),
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "processor": platform.machine(),
        }
        curve = ["report", "quickstart/model", "--out", str(HERE / "quickstart.svg")]
        timed([".venv/bin/bert-jax", *curve], clone, {})
    with (HERE / "quickstart.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    experiment.write_readme(HERE)
    pages = module_of(HERE.parent / "pages.py")
    path, block = ROOT / "README.md", ["```text", *answers(clone, output), "```"]
    files.write(path, pages.with_block(path.read_text(), "quickstart", block, path))


if __name__ == "__main__":
    main()
