"""Measure the growth of memory, open files, threads and disk over 20,000 steps.

    python experiments/reliability/leaks.py [--steps 20000]

The smallest model on rows made here, evaluated and saved every 500 steps. What the process holds is
read from /proc twice a second; leaks.jsonl has a line each, and `report.py` draws them.
"""

import argparse
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
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total


def look(process: int, out: pathlib.Path) -> dict[str, int]:
    """Return the resources that the process uses."""
    fields = dict(
        line.split(":", 1)
        for line in pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
    )
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return {
        "step": json.loads(lines[-1])["step"],
        # Its own, wherever the system keeps it by now; what is mapped from files comes and goes.
        "memory_bytes": sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap")) * 1024,
        "threads": int(fields["Threads"]),
        "open_files": len(os.listdir(f"/proc/{process}/fd")),
        # Curves and metrics grow by design; what must not is what is kept beside them.
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
        found, begun = [], time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            try:
                found.append(
                    {"seconds": round(time.monotonic() - begun, 1), **look(process.pid, out)}
                )
            except (OSError, ValueError, IndexError, KeyError):  # not begun, or gone
                continue
        said = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"status {process.returncode}\n{said}")
    (HERE / "leaks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))


if __name__ == "__main__":
    main()
