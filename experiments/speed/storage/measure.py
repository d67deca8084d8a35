"""Measure object storage against the local disk, and write README.md.

    python experiments/speed/storage/measure.py TEXT [--rounds N]

TEXT is a text file or a source such as wiki/*.gz. Each scheme is served on this machine (tests/helpers),
so this is the overhead of the protocol and of this package, not of a network. Rows are read in random order in
batches, as training does; a run of a tiny model saves often, and the time of its steps is compared.
"""

import argparse
import contextlib
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))
BATCH, BATCHES = 256, 40
STEPS, SAVE_EVERY, LOG_EVERY = 400, 100, 10
LOCATIONS = ("local", "gs", "s3")


@contextlib.contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables during the block."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def rows_per_second(folder: str, seed: int, wait: bool) -> float:
    """Return the rate of reading random batches; `wait` for local copies of the rows first."""
    import numpy as np

    from bert_jax.data import loader

    rows = loader.Rows(folder, "train")
    if wait:
        while not rows.is_local:
            time.sleep(0.05)
    order = np.random.default_rng(seed).permutation(len(rows))[: BATCH * BATCHES]
    rows.read(order[:BATCH])
    began = time.perf_counter()
    for start in range(0, len(order), BATCH):
        rows.read(order[start : start + BATCH])
    return len(order) / (time.perf_counter() - began)


def pretrain(rows: str, workdir: str, seed: int) -> float:
    """Return the seconds of the loop of a run that saves every few steps."""
    command = [
        *(
            sys.executable,
            "-m",
            "bert_jax",
            "pretrain",
            "--config",
            "configs/pretrain.py:L2-H64-A1,64",
        ),
        *("--rows", rows, "--workdir", workdir, f"--config.seed={seed}", f"--config.steps={STEPS}"),
        f"--config.checkpoint.every_steps={SAVE_EVERY}",
        *(
            "--config.batch_size=16",
            "--config.optim.warmup_steps=40",
            "--config.log_every_steps=10",
        ),
        *("--config.evaluate_every_steps=400", "--config.evaluate_rows=16"),
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=HERE.parents[2])
    from bert_jax import storage

    lines = pathlib.Path(storage.local(f"{workdir}/speed.jsonl")).read_text().splitlines()
    logged = [json.loads(line) for line in lines][2:]  # without steps that compile
    return sum(line["seconds"] for line in logged) / (
        logged[-1]["step"] - logged[0]["step"] + LOG_EVERY
    )


def main() -> None:
    """Measure all locations in turn, and write the results and the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from bert_jax import storage
    from bert_jax.data import prepare, wordpiece
    from tests.helpers.objects import serve

    work = pathlib.Path(tempfile.mkdtemp())
    wordpiece.train([options.text], str(work / "vocab"), size=8192)
    local = work / "rows"
    prepare.prepare([options.text], str(work / "vocab"), str(local), tokens=64, sequences=2)
    reading: dict[str, list[float]] = {}
    steps: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        servers = {
            scheme: stack.enter_context(serve(scheme, str(work / scheme)))
            for scheme in ("gs", "s3")
        }
        everything = {k: v for server in servers.values() for k, v in server.environment.items()}
        stack.enter_context(variables(everything))
        paths = [path for path in local.iterdir() if path.is_file() and path.name != "lock"]
        for server in servers.values():
            storage.upload(paths, [f"{server.url}/rows/{path.name}" for path in paths])
        roots = {"local": str(work), **{scheme: server.url for scheme, server in servers.items()}}
        for number in range(options.rounds):
            for scheme in LOCATIONS:
                rows = f"{roots[scheme]}/rows"
                cases = (
                    [("", "1")] if scheme == "local" else [(", by range", "0"), (", cache", "1")]
                )
                for suffix, gigabytes in cases:
                    cache = {
                        "BERT_JAX_STORAGE_CACHE": str(work / f"cache{gigabytes}"),
                        "BERT_JAX_STORAGE_CACHE_GB": gigabytes,
                    }
                    with variables(cache):
                        waits = scheme != "local" and gigabytes == "1"
                        rate = rows_per_second(rows, number, waits)
                    reading.setdefault(scheme + suffix, []).append(rate)
            for scheme in LOCATIONS:
                with variables({"BERT_JAX_STORAGE_CACHE": str(work / "cache1")}):
                    folder = f"{roots[scheme]}/run{number}"
                    seconds = pretrain(f"{roots[scheme]}/rows", folder, number)
                steps.setdefault(scheme, []).append(seconds)
    shutil.rmtree(work, ignore_errors=True)
    results = {
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "load": round(os.getloadavg()[0], 2),
        "rows_per_second": reading,
        "step_seconds": steps,
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    write_page(results)


def write_page(results: dict) -> None:
    """Write README.md from the results."""

    def table(title: str, values: dict[str, list[float]], scale: float, inverse: bool) -> list[str]:
        lines = [f"| | {title} | of local |", "|---|---|---|"]
        for name, each in values.items():
            pairs = zip(each, values["local"], strict=True)
            shares = [b / a if inverse else a / b for a, b in pairs]
            low, middle, high = (f(shares) for f in (min, statistics.median, max))
            rate = f"{statistics.median(each) * scale:,.{0 if scale == 1 else 1}f}"
            lines.append(f"| {name} | {rate} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
        return lines

    rounds = len(results["rows_per_second"]["local"])
    (HERE / "README.md").write_text(
        "\n".join(
            [
                "# Object storage against the local disk",
                "",
                "    python experiments/speed/storage/measure.py TEXT",
                "",
                "Local servers with the protocols of Google Cloud Storage (gs) and S3, on the machine that reads and trains",
                f"({results['machine']}, load average {results['load']}). This measures the overhead of the protocol and",
                "of this package, not of a network, and the servers compete with the reader for the cores. Numbers are",
                f"medians over {rounds} rounds, in which the locations take turns; the last column is the speed relative to",
                "the local disk in the same round, with its range.",
                "",
                "## Reading rows",
                "",
                f"Random batches of {BATCH} rows of T=64, {BATCHES} per round. By range: without a cache, where each row is",
                "a request. Cache: after the rows have been copied, which a run does in the background. The cache should be",
                "large enough for the rows of a run, since reading by range is slow.",
                "",
                *table("rows per second", results["rows_per_second"], 1, False),
                "",
                "## Saving",
                "",
                f"Mean time of a step of a tiny model (L2-H64-A1, 16 rows of T=64) that saves every {SAVE_EVERY} steps.",
                "",
                *table("ms per step", results["step_seconds"], 1e3, True),
                "",
            ]
        )
    )


if __name__ == "__main__":
    main()
