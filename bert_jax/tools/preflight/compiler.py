"""Compile the training step for a topology without the hardware, and read what it needs.

A platform has a compiler if `abstract_devices` returns devices of it to make a mesh of: so far TPUs
have. The rest of this module reads the compiled program, of any platform.
"""

import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from bert_jax.config.schema import Config
from bert_jax.errors import UserError
from bert_jax.model import attention
from bert_jax.objectives.base import Phase
from bert_jax.tools.preflight import hlo
from bert_jax.tools.preflight.formulas import StepCost
from bert_jax.tools.preflight.topology import Topology
from bert_jax.training.state import State
from bert_jax.training.step import compile_step


class NotCompiled(UserError):
    """The compiler failed for another reason than memory."""


def abstract_devices(topology: Topology) -> Sequence[Any]:
    """Return abstract devices to compile for; () if there is no compiler for this platform."""
    if not topology.is_tpu:
        return ()
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
    name = topology._replace(slices=1).name
    try:
        return topologies.get_topology_desc(name, "tpu", **options).devices
    except (RuntimeError, ValueError) as error:
        needs = ", which needs JAX 0.12 and libtpu 0.0.50 (Python 3.12 or newer)"
        raise UserError(
            f"topology {topology.name!r}: the installed libtpu does not support it"
            f"{needs if topology.kind == 'tpu7x' else ''}; use one like {topology.chip.example} "
            f"({str(error).splitlines()[0]})"
        ) from error


def compiled_cost(
    config: Config, phase: Phase, topology: Topology, mesh: Any, state: State, state_bytes: int
) -> StepCost | float:
    """Compile the step and return its cost; if it does not fit, the bytes that it needs.

    `state_bytes` is the size per device of the step's arguments without padding.
    """
    scanned = config.model.layer_loop == "scanned"
    hint = "" if scanned else "; --config.model.layer_loop=scanned compiles sooner"
    print(
        f"compiling the step of {phase.batch_size} rows of T={phase.tokens} for {topology.name}, "
        f"which takes minutes{hint}",
        file=sys.stderr,
        flush=True,
    )
    start = time.monotonic()
    try:
        compiled = compile_step(config, phase, mesh, state)
    except jax.errors.JaxRuntimeError as error:
        if needed := needed_bytes(str(error)):
            return needed
        raise NotCompiled(
            f"the step of T={phase.tokens} could not be compiled for {topology.name} "
            f"({' '.join(str(error).split())[:300]}): try another mesh, batch size or version of the compiler"
        ) from error
    seconds = time.monotonic() - start
    analysis, program = compiled.memory_analysis(), hlo.Program(compiled.as_text())
    memory = {
        "padding": max(analysis.argument_size_in_bytes - state_bytes, 0),
        "temporaries": analysis.temp_size_in_bytes,
        "program": analysis.generated_code_size_in_bytes,
        "arguments": analysis.argument_size_in_bytes,
    }
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    memory["total"] = memory["arguments"] + results + memory["temporaries"] + memory["program"]
    # A Pallas kernel's products are not in the program's text.
    kernel_flops, rows = 0.0, phase.batch_size / topology.devices
    if config.model.attention in attention.KERNELS:
        kernel_flops = 12.0 * config.model.layers * phase.tokens**2 * config.model.hidden * rows
    expected = phase.objective.flops_per_row * rows - kernel_flops
    if program.matrix_flops < expected / 2:
        raise NotCompiled(
            f"{topology.name}: the compiled program has {program.matrix_flops:.3g} FLOPs besides "
            f"attention, by formula the step has {expected:.3g}: this version of bert_jax cannot read "
            "the compiler's programs; use the versions of JAX and libtpu that it was tested with"
        )
    return StepCost(
        memory,
        program.matrix_flops + kernel_flops,
        float(program.traffic_bytes),
        program.collectives,
        compile_seconds=seconds,
        cost_analysis_flops=(compiled.cost_analysis() or {}).get("flops"),
    )


def needed_bytes(message: str) -> float | None:
    """Parse the total bytes that a program needs from a compiler error; None for other errors."""
    # The "HLO temporaries" of this message include arguments and results.
    pattern = r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT])(?:\) exceeds| of [\d.]+[KMGT] hbm)"
    if not (match := re.search(pattern, message)):
        return None
    return float(match[1]) * 2.0 ** {"K": 10, "M": 20, "G": 30, "T": 40}[match[2]]
