"""What engines share: jobs, their states, and what runs on the machines."""

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

import bert_jax
from bert_jax.errors import EXIT_NEGATIVE, EXIT_USER_ERROR, UserError
from bert_jax.runtime.chips import CHIPS, CHIPS_PER_VM
from bert_jax.runtime.topology import Topology, parse_topology, slice_shape

CHECKOUT = pathlib.Path(__file__).resolve().parents[4]
SCRIPTS = pathlib.Path(__file__).resolve().parents[1] / "scripts"
WHEEL = f"bert_jax-{bert_jax.__version__}-py3-none-any.whl"
# Exit statuses of a command that would fail again.
FINAL = (EXIT_NEGATIVE, EXIT_USER_ERROR)
# Verbs that run in one process, on one machine.
ONE_PROCESS = ("finetune", "prepare", "sweep")


class Job(NamedTuple):
    """A command to run."""

    command: Sequence[str]  # arguments of `bert-jax`, starting with the verb
    name: str  # of the job, slice or workload
    folder: str  # that the command writes to
    environment: dict[str, str]  # variables of the command
    config: str = ""  # config file of the command; "" for none
    inputs: Sequence[str] = ()  # other paths that the command reads

    @property
    def is_distributed(self) -> bool:
        """Whether all processes of all machines take part."""
        return self.command[0] not in ONE_PROCESS

    @property
    def assignments(self) -> list[str]:
        """The environment as NAME=VALUE."""
        return [f"{name}={value}" for name, value in self.environment.items()]


class State(NamedTuple):
    """What an engine says of a job."""

    # "waiting", "running", "done", "failed", "stopped" (by its user), "lost" (there is no such job) or "unknown"
    # (the engine does not answer).
    kind: str
    status: int | None = None  # exit status of a failed job; None if it is unknown
    text: str = ""  # why it waits or has failed, and the last lines of its output


def state_folder(name: str) -> pathlib.Path:
    """Return the folder of this machine that describes a job."""
    root = os.environ.get("BERT_JAX_LAUNCH")
    return pathlib.Path(root or pathlib.Path.home() / ".local/state/bert_jax/launch") / name


def python_command() -> list[str]:
    """Return the command `bert-jax` with this Python."""
    return [sys.executable, "-m", "bert_jax"]


def has_checkout() -> bool:
    """Whether this package runs from a checkout, not from a wheel."""
    return (CHECKOUT / "configs").is_dir()


def check_one(job: Job, option: str, is_more: bool, where: str = "on one machine") -> None:
    """Check that an option gives a verb that runs in one process no more than one machine or process."""
    if is_more and not job.is_distributed:
        raise UserError(f"{option}: {job.command[0]} runs {where}")


def check_accelerator(on: str, job: Job, accelerator: str) -> None:
    """Check that verbs that train, and only they, have an accelerator."""
    if job.command[0] in ("pretrain", "finetune") and not accelerator:
        raise UserError(f"--on {on} needs --accelerator for {job.command[0]}")
    if job.command[0] == "prepare" and accelerator:
        raise UserError(f"--accelerator {accelerator}: prepare runs on CPUs; remove it")


def tpu_topology(job: Job, accelerator: str, vm: bool = False) -> Topology:
    """Return a topology of TPUs, with `vm` of those that Cloud TPU VMs have, after checking it for a verb."""
    option, topology = f"--accelerator {accelerator}", parse_topology(accelerator)
    tpus = [kind for kind, chip in CHIPS.items() if (chip.tpu_vm if vm else chip.is_tpu)]
    if topology.kind not in tpus:
        raise UserError(f"{option}: choose from {', '.join(tpus)}")
    most = topology.chip.most_on_vm if vm else CHIPS_PER_VM
    where = f"on one machine, of at most {most} chips"
    check_one(job, option, topology.chips > most or topology.slices > 1, where)
    return topology


def slice_type(topology: Topology, optional: bool = False) -> tuple[str, str]:
    """Return gcloud's name of the type of a slice, such as v5litepod-16, and of its software.

    If its shape has no type, this is an error, or the first name is "" if the type is `optional`.
    """
    kind, software = topology.chip.tpu_vm or ("", "")
    cores = topology.chips // topology.slices * topology.chip.cores
    if slice_shape(topology.kind, cores) == topology.shape:
        return f"{kind}-{cores}", software
    if optional:
        return "", software
    known = f"{topology.kind}-8 and {topology.kind}-16"
    raise UserError(f"--accelerator {topology.name}: use accelerator types, such as {known}")


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks of lines, as people do."""

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        return super().represent_scalar(tag, value, "|" if value.endswith("\n") else style)


def to_yaml(content: dict[str, Any]) -> str:
    """Return YAML without aliases and line breaks within values."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)
