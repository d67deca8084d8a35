"""Compile the training step for a topology without the hardware."""

import importlib.util
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax

from bert_jax.config.schema import Config
from bert_jax.errors import UserError
from bert_jax.objectives.base import Phase
from bert_jax.tools.preflight.topology import Topology
from bert_jax.training.state import State
from bert_jax.training.step import compile_step


class NotCompiled(UserError):
    """Libtpu failed to compile a program for another reason than memory."""


def tpu_devices(topology: Topology) -> Sequence[Any]:
    """Return abstract devices to compile for."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"compiling for {topology.name} needs libtpu: pip install 'bert-jax[tpu]' here, "
            "on any x86 Linux machine (no TPU is needed)"
        )
    # Otherwise libtpu queries a metadata server for the TPU of this machine.
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.kind == "v4":
        options["chip_config_name"] = "megacore"  # else a chip's two cores are two devices
    if math.prod(topology.shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = Topology(topology.kind, topology.shape, 1).name
    try:
        return topologies.get_topology_desc(name, "tpu", **options).devices
    except (RuntimeError, ValueError) as error:
        needs = "it"
        if topology.kind == "tpu7x":
            needs = "it, which needs JAX 0.12 and libtpu 0.0.50 (Python 3.12 or newer)"
        raise UserError(
            f"topology {topology.name!r}: the installed libtpu does not support {needs}; use one like "
            f"{topology.chip.example} ({str(error).splitlines()[0]})"
        ) from error


def compile_for(
    config: Config, phase: Phase, topology: Topology, mesh: Any, state: State
) -> tuple[Any, float | None]:
    """Compile the step; return None and the bytes that it needs if it does not fit."""
    hint = "--config.model.layer_loop=scanned compiles sooner"
    print(
        f"compiling the step of {phase.batch_size} rows of T={phase.tokens} for {topology.name}, "
        f"which takes minutes{'' if config.model.layer_loop == 'scanned' else f'; {hint}'}",
        file=sys.stderr,
        flush=True,
    )
    try:
        return compile_step(config, phase, mesh, state), None
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise NotCompiled(
                f"libtpu failed to compile the step of T={phase.tokens} for {topology.name} "
                f"({' '.join(str(error).split())[:300]}): try another mesh, batch size or version of libtpu"
            ) from error
        return None, needed


def needed_bytes(message: str) -> float | None:
    """Parse the total bytes that a program needs from a compiler error; None for other errors."""
    # The "HLO temporaries" of this message include arguments and results.
    pattern = (
        r"HLO temporaries \(([\d.]+)([KMGT])\) exceeds|Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm"
    )
    if not (match := re.search(pattern, message)):
        return None
    number, unit = (part for part in match.groups() if part)
    return float(number) * 2.0 ** {"K": 10, "M": 20, "G": 30, "T": 40}[unit]
