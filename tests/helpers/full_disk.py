"""Run commands on file systems that are too small: `full_disk.py FOLDER ROWS RUN TEXT`.

Commands run in this process, which needs its own mount namespace. Prints a JSON line per attempt:
command, size of the file system in kB, exit status, standard error, and remaining files.
"""

import contextlib
import io
import json
import pathlib
import subprocess
import sys
import traceback

from bert_jax import cli
from tests.helpers.runs import arguments

SIZES = (4, 64)


def attempt(disk: pathlib.Path, size: int, verb: str, *options: str) -> None:
    """Run a command that writes to a new file system of `size` kB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], check=True)
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = cli.main([verb, *options])
        except SystemExit as end:
            status = end.code
        except BaseException:
            status = 1
            traceback.print_exc()
    left = sorted(str(path.relative_to(disk)) for path in disk.rglob("*") if not path.is_dir())
    print(json.dumps([verb, size, status, error.getvalue(), left]), flush=True)
    subprocess.run(["umount", "--lazy", disk], check=True)


def main(folder: str, rows: str, run: str, text: str) -> None:
    """Run every command that writes files, at every size."""
    disk = pathlib.Path(folder)
    out = str(disk / "out")
    options = (*arguments("steps=4"), "--rows", rows, "--workdir", out)
    for size in SIZES:
        attempt(disk, size, "vocab", "--out", out, "--size", "120", text)
        attempt(disk, size, "prepare", "--vocab", rows, "--tokens", "32", "--out", out, text)
        if size < 32:  # fails before the first save, whose threads outlive its failure
            attempt(disk, size, "pretrain", *options)
        attempt(disk, size, "export", "--init", run, "--out", out)
        attempt(disk, size, "embed", "--init", run, "--out", f"{out}.npy", text)
        attempt(disk, size, "report", run, "--out", f"{out}.html")
        attempt(disk, size, "attention", "--init", run, "--text", "w1 w2", "--out", f"{out}.html")


if __name__ == "__main__":
    main(*sys.argv[1:])
