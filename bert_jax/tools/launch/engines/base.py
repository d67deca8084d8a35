"""What engines share: jobs, their states, and what runs on the machines."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

import bert_jax
from bert_jax.errors import EXIT_NEGATIVE, EXIT_USER_ERROR, UserError
from bert_jax.runtime.chips import CHIPS
from bert_jax.runtime.topology import Topology, parse_topology, slice_shape

CHECKOUT = pathlib.Path(__file__).resolve().parents[4]
SCRIPTS = pathlib.Path(__file__).resolve().parents[1] / "scripts"
WHEEL = f"bert_jax-{bert_jax.__version__}-py3-none-any.whl"
# Exit statuses of a command that would fail again.
FINAL = (EXIT_NEGATIVE, EXIT_USER_ERROR)
# Verbs that run in one process, on one machine.
ONE_PROCESS = ("finetune", "prepare", "sweep")


class Job(NamedTuple):
    """A command to run.

    Attributes:
        command: arguments of `bert-jax`, starting with the verb.
        name: name of the job, slice or workload.
        folder: folder that the command writes to.
        environment: environment variables of the command.
        config: config file of the command; "" for none.
        inputs: other paths that the command reads.
    """

    command: Sequence[str]
    name: str
    folder: str
    environment: dict[str, str]
    config: str = ""
    inputs: Sequence[str] = ()

    @property
    def is_distributed(self) -> bool:
        """Whether all processes of all machines take part."""
        return self.command[0] not in ONE_PROCESS

    @property
    def assignments(self) -> list[str]:
        """The environment as NAME=VALUE."""
        return [f"{name}={value}" for name, value in self.environment.items()]


class State(NamedTuple):
    """What an engine says of a job.

    Attributes:
        kind: "waiting", "running", "done", "failed", "stopped" (by its user), "lost" (there is no such
            job) or "unknown" (the engine does not answer).
        status: exit status of a failed job; None if it is unknown.
        text: why it waits or has failed, and the last lines of its output.
    """

    kind: str
    status: int | None = None
    text: str = ""


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


def query(command: Sequence[str], seconds: float = 120.0) -> tuple[str | None, str]:
    """Return the output of a command and "", or None and the line that says why it failed."""
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=seconds)
    except FileNotFoundError:
        return None, f"{command[0]} is not on the PATH"
    except subprocess.TimeoutExpired:
        return None, f"{shlex.join(command)} did not answer within {seconds:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if re.match("error", line, re.IGNORECASE)] + lines[-1:]
        return None, errors[0] if errors else f"{command[0]} exited with status {done.returncode}"
    return done.stdout.strip(), ""


def check_nodes(job: Job, nodes: int) -> None:
    """Check that a verb that runs in one process has one machine."""
    if nodes > 1 and not job.is_distributed:
        raise UserError(f"--nodes {nodes}: {job.command[0]} runs on one machine")


def check_accelerator(on: str, job: Job, accelerator: str) -> None:
    """Check that verbs that train, and only they, have an accelerator."""
    if job.command[0] in ("pretrain", "finetune") and not accelerator:
        raise UserError(f"--on {on} needs --accelerator for {job.command[0]}")
    if job.command[0] == "prepare" and accelerator:
        raise UserError(
            f"--accelerator {accelerator}: prepare runs in one process, on CPUs; remove it"
        )


def check_machines(job: Job, accelerator: str, topology: Topology, max_chips: int = 0) -> None:
    """Check that the slice of a command in one process has one machine, of at most `max_chips`."""
    max_chips = max_chips or topology.chip.most_on_vm
    if max(topology.chips / max_chips, topology.slices) > 1 and not job.is_distributed:
        raise UserError(
            f"--accelerator {accelerator}: {job.command[0]} runs on one machine, of at most "
            f"{max_chips} chips"
        )


def tpu_topology(accelerator: str, vm: bool = False) -> Topology:
    """Return a topology of TPUs; with `vm`, of those that Cloud TPU VMs have."""
    topology = parse_topology(accelerator)
    tpus = [kind for kind, chip in CHIPS.items() if (chip.tpu_vm if vm else chip.is_tpu)]
    if topology.kind not in tpus:
        raise UserError(f"--accelerator {accelerator}: choose from {', '.join(tpus)}")
    return topology


def accelerator_type(topology: Topology) -> str:
    """Return gcloud's name of the type of a slice, such as v5litepod-16; "" if its shape has none."""
    kind, cores = (topology.chip.tpu_vm or ("", ""))[0], topology.chips * topology.chip.cores
    cores //= topology.slices
    return f"{kind}-{cores}" if slice_shape(topology.kind, cores) == topology.shape else ""


def known_type(topology: Topology) -> str:
    """Return the type of a slice, whose shape must have one."""
    if name := accelerator_type(topology):
        return name
    raise UserError(
        f"--accelerator {topology.name}: only the shapes of accelerator types can be created, such as "
        f"{topology.kind}-8 and {topology.kind}-16"
    )


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks of lines, as people do."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, "|" if text.endswith("\n") else None
    ),
)


def to_yaml(content: dict[str, Any]) -> str:
    """Return YAML without aliases and line breaks within values."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)
