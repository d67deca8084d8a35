"""Compile the training step for a topology without the hardware, and read what it needs.

A platform has a compiler if `abstract_devices` returns devices of it to make a mesh of. The rest of
this module reads the compiled program, of any platform.
"""

import contextlib
import importlib.util
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bert_jax.config.schema import Config
from bert_jax.errors import UserError, install_command, missing
from bert_jax.model import attention
from bert_jax.objectives.base import Phase
from bert_jax.runtime import device
from bert_jax.runtime.chips import GPUS_A_NODE, Gpu
from bert_jax.runtime.progress import Progress
from bert_jax.runtime.topology import Topology
from bert_jax.tools.preflight import hlo
from bert_jax.tools.preflight.formulas import StepCost
from bert_jax.training.state import State
from bert_jax.training.step import compile_step


class NotCompiled(UserError):
    """The compiler failed for another reason than memory."""


# A device's autotuner mostly picks cuBLAS for products; without a device XLA would take Triton.
_GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def abstract_devices(topology: Topology) -> Sequence[Any]:
    """Return abstract devices to compile for; () if there is no compiler for this platform."""
    if topology.chip.gpu:
        return _abstract_gpus(topology, topology.chip.gpu)
    if importlib.util.find_spec("libtpu") is None:
        problem = f"compiling for {topology.name} needs libtpu, on any x86 Linux machine without a TPU too"
        raise missing(problem, "tpu")
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


def _abstract_gpus(topology: Topology, gpu: Gpu) -> Sequence[Any]:
    """Return abstract GPUs, in whole nodes of `GPUS_A_NODE` or less than one; else ().

    They need JAX's plugin; there are none without it.
    """
    nodes, rest = divmod(topology.devices, GPUS_A_NODE)
    if not device.has_cuda_plugin() or (nodes and rest):
        return ()
    major, minor = gpu.capability
    # The text form of XLA's GpuTargetConfigProto. Limits that all of these GPUs share are literals.
    target = f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: 49152
          shared_memory_per_core: {gpu.shared_memory}
          shared_memory_per_block_optin: {gpu.block_memory}
          threads_per_core_limit: {gpu.threads}
          core_count: {gpu.cores}
          fpus_per_core: {gpu.lanes}
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          memory_bandwidth: {topology.chip.memory_bandwidth:.0f}
          l2_cache_size: {gpu.cache_bytes}
          clock_rate_ghz: {gpu.clock_ghz}
          device_memory_size: {topology.chip.memory_bytes}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        runtime_version {{ major: 13 minor: 0 patch: 0 }}
        device_description_str: "{topology.chip.device_kinds[0]}"
    """
    from jax.experimental import topologies

    shape = f"1x{nodes or 1}x{GPUS_A_NODE if nodes else rest}"
    try:
        return topologies.get_topology_desc(
            "", "cuda", target_config=target, topology=shape
        ).devices
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"topology {topology.name!r}: JAX's plugin for GPUs does not start: "
            f"{install_command('gpu-compile')} again, with JAX ({str(error).splitlines()[0]})"
        ) from error


@contextlib.contextmanager
def _progress(title: str) -> Iterator[None]:
    """Show the time that the block takes: live in a terminal, every half minute in a log."""
    done, start = threading.Event(), time.monotonic()

    def report() -> None:
        while not done.wait(30):
            bar.status(f"still {title} after {time.monotonic() - start:.0f} s")

    with Progress(title, None, "programs") as bar:
        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def compiled_cost(
    config: Config, phase: Phase, topology: Topology, mesh: Any, state: State, state_bytes: int
) -> StepCost | float | None:
    """Compile the step and return its cost.

    If it does not fit, return the bytes that it needs; None if a library is missing. `state_bytes` is
    the size per device of the step's arguments without padding.
    """
    if config.model.attention == "cudnn" and not has_cudnn():
        print(
            "formulas are used: compiling attention 'cudnn' needs pip install nvidia-cudnn-cu13",
            file=sys.stderr,
        )
        return None
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
        with _progress("compiling"):
            if topology.is_tpu:
                compiled = compile_step(config, phase, mesh, state)
            else:
                with device.tracing_for_gpu(config.deterministic) as options:
                    compiled = compile_step(config, phase, mesh, state, _GPU_OPTIONS | options)
    except RuntimeError as error:  # of the compiler, or of cuDNN's version
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
    # The products of attention kernels are not in the program's text: share out those by formula.
    kernel_flops, rows = 0.0, phase.batch_size / topology.devices
    if config.model.attention in attention.KERNELS:
        kernel_flops = 12.0 * config.model.layers * phase.tokens**2 * config.model.hidden * rows
    total = sum(kernel.bytes for kernel in program.kernels if kernel.kind == "attention")
    kernels = [
        kernel._replace(flops=kernel_flops * kernel.bytes / total)
        if kernel.kind == "attention"
        else kernel
        for kernel in program.kernels
    ]
    flops = sum(kernel.flops for kernel in kernels)
    expected = phase.objective.flops_per_row * rows
    if flops < expected / 2:
        raise NotCompiled(
            f"{topology.name}: the compiled program has {flops:.3g} FLOPs, by formula the step has "
            f"{expected:.3g}: this version of bert_jax cannot read the compiler's programs; use the "
            "versions of JAX and the compiler that it was tested with"
        )
    return StepCost(
        memory,
        flops,
        float(sum(kernel.bytes for kernel in kernels)),
        program.collectives,
        kernels,
        compile_seconds=seconds,
        cost_analysis_flops=(compiled.cost_analysis() or {}).get("flops"),
    )


def has_cudnn() -> bool:
    """Whether cuDNN is installed as a package, which compiling its attention needs."""
    find = importlib.util.find_spec
    return bool(find("nvidia") and find("nvidia.cudnn"))


def needed_bytes(message: str) -> float | None:
    """Parse the total bytes that a program needs from a compiler error; None for other errors."""
    # The "HLO temporaries" of this message include arguments and results.
    pattern = r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT])(?:\) exceeds| of [\d.]+[KMGT] hbm)"
    if not (match := re.search(pattern, message)):
        return None
    return float(match[1]) * 2.0 ** {"K": 10, "M": 20, "G": 30, "T": 40}[match[2]]
