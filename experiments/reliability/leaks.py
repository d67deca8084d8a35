"""Measure the growth of memory, open files, threads and disk over 20,000 steps.

    python experiments/reliability/leaks.py [--steps 20000]

Trains a tiny model on generated rows, and evaluates and saves every 500 steps. Resources of the
process are sampled from /proc twice a second and written to leaks.jsonl, which the page plots.
"""

import argparse
import contextlib
import json
import os
import pathlib
import tempfile
import time

from kills import corpus, start

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
CHANGES = (
    "model.positions=32 batch_size=2 log_every_steps=100 evaluate_every_steps=500 evaluate_rows=16 "
    "optim.warmup_steps=100 checkpoint.every_steps=500"
)


def disk_bytes(folder: pathlib.Path) -> int:
    """Return the total size of all files in a folder, skipping those deleted meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def sample(process: int, out: pathlib.Path) -> dict[str, int]:
    """Return the resources that the process uses."""
    fields = dict(
        line.split(":", 1)
        for line in pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
    )
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return {
        "step": json.loads(lines[-1])["step"],
        # Anonymous memory, resident or swapped; pages of mapped files come and go.
        "memory_bytes": sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap")) * 1024,
        "threads": int(fields["Threads"]),
        "open_files": len(os.listdir(f"/proc/{process}/fd")),
        # Only checkpoints, since metrics.jsonl grows by design.
        "disk_bytes": disk_bytes(out / "checkpoints"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bert_jax_leaks_") as temporary:
        data = pathlib.Path(temporary)
        corpus(data)
        out = data / "run"
        changes = [f"--config.{change}" for change in CHANGES.split()]
        process = start([
            *("pretrain", f"--config={ROOT}/configs/pretrain.py:L1-H32-A1,32", *changes),
            *(f"--config.steps={options.steps}", "--rows", data / "rows32", "--workdir", out),
        ])  # fmt: skip
        samples, begun = [], time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            # It has not started yet, or ended.
            with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
                seconds = round(time.monotonic() - begun, 1)
                samples.append({"seconds": seconds, **sample(process.pid, out)})
        output = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"status {process.returncode}\n{output}")
    (HERE / "leaks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))


if __name__ == "__main__":
    main()
