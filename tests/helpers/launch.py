"""Plans of `bert-jax launch`, a checkout and fake programs, for tests of launching."""

import os
import pathlib
import shutil
import subprocess

import pytest

from bert_jax.tools.launch import request
from bert_jax.tools.launch.engines import ENGINES, base

ROOT = pathlib.Path(__file__).parent.parent.parent
COMMAND = "pretrain --config configs/pretrain.py:mini,128 --rows /shared/rows --workdir".split()
OPTIONS = {
    "tpu-vm": {"accelerator": "v5litepod-16", "zone": "us-west4-a"},
    "gke": {"accelerator": "v5e:4x4", "image": "registry/image"},
    "slurm": {"nodes": 2, "gpus": 4},
    "sky": {"accelerator": "H100:8"},
    "local": {},
}
ON = pytest.mark.parametrize("on", ENGINES)
PREPARE = "prepare --vocab gs://b/vocab gs://b/text/* --out".split()
FINETUNE = "finetune --config configs/glue.py:rte --init gs://b/base --workdir".split()


def flags(on):
    return [f"--{key}={value}" for key, value in OPTIONS[on].items()]


def plan(on, *arguments, workdir="/shared/runs/one", name="one", env=(), command=(), **options):
    command = [*(command or COMMAND), workdir, *arguments]
    environment = request.parse_environment(env)
    job = base.Job(command, name, workdir, environment, "configs/pretrain.py")
    return request.make_plan(on, job, {**OPTIONS[on], **options})


def make_checkout(tmp_path_factory):
    """Return a Git checkout with a few committed files."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "configs" / "results.jsonl").touch()
    (folder / ".gitignore").write_text("__pycache__/\n")
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "first"], check=True)
    return folder


def enter_checkout(checkout, monkeypatch, tmp_path):
    """Launch from the checkout, with job records in a temporary folder."""
    monkeypatch.setattr(base, "CHECKOUT", checkout)
    monkeypatch.setenv("BERT_JAX_LAUNCH", str(tmp_path / "jobs"))
    monkeypatch.chdir(checkout)
    # Only /tmp counts as a temporary folder here, whatever TMPDIR is.
    monkeypatch.setattr(request.tempfile, "gettempdir", lambda: "/tmp")


class FakePrograms:
    """Fake programs, first on the PATH, that record the arguments of their calls."""

    def __init__(self, folder):
        self.bin, self.home = folder / "bin", folder / "home"
        self.calls_file = folder / "calls"
        self.bin.mkdir()
        self.home.mkdir()
        self.environment = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "FAKES": str(folder),
            "WORKER_HOME": str(self.home),
        }

    def program(self, name, body="", records=True):
        path = self.bin / name
        record = f"{{ printf '%s\\0' {name} \"$@\"; printf '\\036\\0'; }} >> \"$CALLS\"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{record if records else ''}{body}\n")
        path.chmod(0o755)
        return path

    def calls(self, name=""):
        """Return the recorded argument lists, oldest first, and clear the record."""
        text = self.calls_file.read_bytes().decode() if self.calls_file.exists() else ""
        self.calls_file.unlink(missing_ok=True)
        results = [call.split("\0")[:-1] for call in text.split("\036\0")[:-1]]
        return [call for call in results if call[0] == name] if name else results

    def bash(self, text, cwd=None):
        return subprocess.run(
            ["bash", "-c", text],
            env={**self.environment, "HOME": str(self.home)},
            cwd=cwd or self.home,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


def make_programs(tmp_path, monkeypatch):
    """Return a `FakePrograms` whose environment is also that of this process."""
    result = FakePrograms(tmp_path)
    for key, value in result.environment.items():
        monkeypatch.setenv(key, value)
    return result


def has_ended(pid):
    """Return whether a process has ended, though perhaps its new parent has not waited for it."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(") ")[2].startswith("Z")
