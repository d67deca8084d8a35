"""From the command line of `bert-jax launch` to a plan: checks before any machine is requested."""

import glob
import inspect
import os
import pathlib
import re
import tempfile
from collections.abc import Sequence
from typing import Any

from bert_jax import storage
from bert_jax.errors import UserError
from bert_jax.tools.launch.engines import ENGINES, REMOTE, base
from bert_jax.tools.launch.engines.base import Job
from bert_jax.tools.launch.plan import Plan, read_output

# Tokens of clouds and hubs. Arguments are logged, and visible to every user of a machine.
_CREDENTIAL = re.compile(
    r"\b(hf_|gh[pousr]_|github_pat_|glpat-|AIza|ya29\.|AKIA|ASIA|xox[abp]-)[\w-]{12,}|-----BEGIN"
)


def parse_environment(parts: Sequence[str]) -> dict[str, str]:
    """Return environment variables given as NAME=VALUE."""
    environment = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not (equals and name.isascii() and name.isidentifier()):
            raise UserError(f"--env {part}: it must be NAME=VALUE")
        _check_value(f"--env {name}", value)
        environment[name] = value
    return environment


def make_plan(on: str, job: Job, options: dict[str, Any]) -> Plan:
    """Check a job and return the plan of an engine, a key of `ENGINES` with its keyword arguments."""
    engine = ENGINES[on].plan
    _, *parameters = inspect.signature(engine).parameters.values()
    names = [parameter.name for parameter in parameters]
    known = ", ".join(map(_flag, names))
    for key in options:
        if key not in names:
            raise UserError(f"{_flag(key)} is not an option of --on {on}, which takes {known}")
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise UserError(f"--on {on} needs {_flag(parameter.name)}; it takes {known}")
    for key, value in options.items():
        for part in value if isinstance(value, list) else [value]:
            _check_value(_flag(key), str(part))
        minimum = 0 if key in ("restarts", "gpus") else 1
        if type(value) is int and not minimum <= value <= 100_000:
            raise UserError(f"--{key} {value}: it must be {minimum} to 100,000")
    for part in job.command:
        _check_value("an argument after --", part)
    if on in REMOTE:
        _check_remote(on, job)
    if on == "tpu-vm":
        _check_tpu_vm(job)
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", job.name):
        raise UserError(f"--name {job.name}: use a letter, then up to 39 of a-z, 0-9 and hyphens")
    folder = job.folder if storage.is_remote(job.folder) else os.path.abspath(job.folder)
    return engine(job, **options)._replace(name=job.name, folder=folder)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _check_value(name: str, value: str) -> None:
    if not value.isprintable():  # shells, YAML and Slurm treat these differently
        raise UserError(f"{name} {value!r} has a line break or unprintable character: remove it")
    if _CREDENTIAL.search(value):
        advice = "use a service account, or set it in the environment of the machines"
        raise UserError(f"{name} looks like a credential, which others could read: {advice}")


def _check_remote(on: str, job: Job) -> None:
    """Check that the paths exist on other machines, which have the checkout or an image."""
    if job.command[0] == "sweep":
        advice = f"use `bert-jax sweep --on {on}`, which launches each training run"
        raise UserError(f"--on {on}: the results of a sweep would be lost: {advice}")
    is_sent = base.has_checkout() and (base.CHECKOUT / job.config).exists()
    if job.config and (os.path.isabs(job.config) or not is_sent):
        advice = "give the name of a config and settings, or a path relative to a checkout"
        raise UserError(f"--config {job.config}: workers do not receive this file: {advice}")
    if _is_here(job.folder):
        advice = "give gs://BUCKET/…, s3://BUCKET/…, or a folder on a disk that the machines share"
        raise UserError(f"{job.folder} would be lost with the disk of the worker: {advice}")
    for path in job.inputs:
        # Sources of text are [KIND:]GLOB[@WEIGHT].
        local = re.sub(r"@[\d.]+$", "", path.partition(":")[2] or path)
        exists = os.path.exists(local) or glob.glob(local, recursive=True)
        if not storage.is_remote(path) and exists and _is_here(local):
            copy = f"`gcloud storage cp -r {local} gs://BUCKET/`"
            raise UserError(f"{local} is on this machine only: give a copy, made as by {copy}")


def _is_here(path: str) -> bool:
    """Whether a path is on a disk that other machines certainly do not have."""
    if storage.is_remote(path):
        return False
    posix_path = pathlib.PurePosixPath(path)
    folders = (pathlib.Path.home(), pathlib.Path(tempfile.gettempdir()), base.CHECKOUT)
    return not posix_path.is_absolute() or any(posix_path.is_relative_to(f) for f in folders)


def _check_tpu_vm(job: Job) -> None:
    """Check that the verb runs on workers, and that they receive what is in the checkout."""
    if job.command[0] == "prepare":
        raise UserError("--on tpu-vm: prepare runs in one process: use --on sky, gke or slurm")
    if not base.has_checkout():
        return  # they receive a wheel
    git = ["git", "-C", str(base.CHECKOUT)]
    # Results are written by the sweep that launches.
    of_code = ("--", ".", ":(exclude,glob)**/results.jsonl")
    changes, error = read_output([*git, "status", "--porcelain", "--untracked-files=no", *of_code])
    if error:
        raise UserError(f"{base.CHECKOUT} is not a git checkout, which workers receive: {error}")
    if changes:
        changed = changes.split("\n")[0].split(maxsplit=1)[1]
        advice = "workers receive the commit: commit or stash them"
        raise UserError(f"{base.CHECKOUT} has uncommitted changes ({changed}, …): {advice}")
    if job.config and read_output([*git, "ls-files", "--error-unmatch", job.config])[1]:
        raise UserError(f"--config {job.config} is not committed, and would be missing: commit it")


def job_name(text: str, max_length: int = 40) -> str:
    """Convert a text to a name that every engine allows."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (words if words[:1].isalpha() else f"bert-{words}")[:max_length].strip("-")
