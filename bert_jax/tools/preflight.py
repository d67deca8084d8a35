"""Estimate memory, time and cost of a pretraining run without the hardware.

For TPUs, libtpu compiles the training step ahead of time on any x86 machine, and the report is read
from the compiled program. For GPUs, whose compiler needs the GPU's libraries, and where a program
does not fit, formulas replace it, and the report says so.

Two times are reported. The roofline is a lower bound: what the data sheet allows when compute, memory
and network overlap perfectly. The expected time assumes a share of the peak that was measured
(`runtime/chips.py`).
"""

import collections
import copy
import dataclasses
import functools
import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.config.schema import Config, batch_size_key
from bert_jax.errors import UserError
from bert_jax.model import attention
from bert_jax.model.flops import parameter_count
from bert_jax.objectives import pretraining
from bert_jax.objectives.base import Phase
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.runs import checkpoint
from bert_jax.runtime import sharding
from bert_jax.runtime.chips import CHIPS, Chip, find
from bert_jax.tools import hlo
from bert_jax.tools.hlo import Collective
from bert_jax.training.state import State, initial_state
from bert_jax.training.step import compile_step

GPUS_A_NODE = 8
# Maximum length of an axis of a TPU slice with two axes.
_LONGEST = 16


# Whose utilization is assumed for chips on which BERT was not measured.
_ASSUMED = "h100"


def utilization(chip: Chip) -> dict[str, Any]:
    """Return the expected utilization of a chip, and whether it was measured on another one."""
    measured_here = chip.utilization
    share, measured = measured_here or CHIPS[_ASSUMED].utilization or (1.0, "")
    return {"share": share, "measured": measured, "assumed": measured_here is None}


class Topology(NamedTuple):
    """A number of chips and the links between them.

    Attributes:
        kind: a key of `CHIPS`.
        shape: shape of a slice, in chips.
        slices: number of slices, connected by the data center network; 1 for GPUs.
    """

    kind: str
    shape: tuple[int, ...]
    slices: int

    @property
    def name(self) -> str:
        """The topology as a value of `--topology`."""
        several = f",slices={self.slices}" if self.slices > 1 else ""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}{several}"

    @property
    def is_tpu(self) -> bool:
        """Whether this is a TPU, for which libtpu compiles."""
        return self.chip.is_tpu

    @property
    def chips(self) -> int:
        """Number of chips in all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """Number of JAX devices in all slices."""
        return self.chips * self.chip.devices

    @property
    def chip(self) -> Chip:
        """Data sheet of a device."""
        return CHIPS[self.kind]

    def wraps(self) -> tuple[bool, ...]:
        """Return for each axis whether it is a ring: at 16 chips, or if all of three are multiples of 4."""
        if len(self.shape) == 3:
            return (all(size % 4 == 0 for size in self.shape),) * 3
        return tuple(self.is_tpu and size == _LONGEST for size in self.shape)


class NotCompiled(UserError):
    """Libtpu failed to compile a program for another reason than memory."""


def slice_shape(kind: str, count: int) -> tuple[int, ...] | None:
    """Return the shape in chips of an accelerator type such as `v5e-16` or `v5p-8`.

    Axes are ascending powers of 2, as equal as possible, as Google lists them; 4 chips on three axes
    are 2x2x1. Returns None if there is no such slice.
    """
    axes, (chips, rest) = CHIPS[kind].axes, divmod(count, CHIPS[kind].cores)
    power = chips.bit_length() - 1
    if rest or chips < 1 or chips != 1 << power or (axes == 3 and chips < 4) or chips == 2:
        return None
    if axes == 3 and chips == 4:
        return (2, 2, 1)
    return tuple(1 << power // axes + (i >= axes - power % axes) for i in range(axes))


def parse_topology(text: str) -> Topology:
    """Parse `v5p:4x4x4`, `v5e:16x16,slices=4`, `h100:64`, or an accelerator type such as `v5e-16`."""
    known = ", ".join(kind.example for kind in CHIPS.values())
    accelerator = re.fullmatch(r"(?:tpu-)?(v5litepod|\w+)-(\d+)(,slices=\d+)?", text)
    if accelerator:
        name = accelerator.group(1).replace("v5litepod", "v5e")
        is_tpu = name in CHIPS and CHIPS[name].is_tpu
        shape = slice_shape(name, int(accelerator.group(2))) if is_tpu else None
        if shape is None:
            raise UserError(
                f"unknown accelerator type {text!r}: use one like v5e-16, v5p-8 or v6e-8, or a "
                f"topology like {known}"
            )
        text = f"{name}:{'x'.join(map(str, shape))}{accelerator.group(3) or ''}"
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?:,slices=(\d+))?", text)
    if not match or match.group(1) not in CHIPS:
        raise UserError(
            f"unknown topology {text!r}: choose from {', '.join(CHIPS)} with a shape, like {known}, "
            "or several slices, like v5e:16x16,slices=4"
        )
    name, kind = match.group(1), CHIPS[match.group(1)]
    shape = tuple(int(size) for size in match.group(2).split("x"))
    topology = Topology(name, shape, int(match.group(3) or 1))
    if len(shape) != kind.axes or 0 in shape or topology.slices < 1:
        raise UserError(f"topology {text!r}: {name} takes a shape like {kind.example}")
    if kind.axes == 2 and max(shape) > _LONGEST:
        largest = f"{_LONGEST}x{_LONGEST}"
        slices = -(-math.prod(shape) // _LONGEST**2)
        raise UserError(
            f"topology {text!r}: a {name} slice is at most {largest}; "
            f"use several, {name}:{largest},slices={max(slices, 2)}"
        )
    if topology.slices > 1 and (not topology.is_tpu or not topology.chip.network_bandwidth):
        raise UserError(f"topology {text!r}: {name} does not support slices; remove them")
    return topology


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


class Location(NamedTuple):
    """Location of a device.

    Attributes:
        island: its slice or node.
        coordinates: coordinates in the slice; empty for GPUs, which are linked to a switch.
    """

    island: int
    coordinates: tuple[int, ...]


def locations(topology: Topology, devices: Sequence[Any] | None = None) -> list[Location]:
    """Return the locations of all devices in mesh order: that of `devices`, or of coordinates."""
    if not topology.is_tpu:
        return [Location(i // GPUS_A_NODE, ()) for i in range(topology.devices)]
    if devices is None:
        chips = [tuple(map(int, index)) for index in np.ndindex(*topology.shape)]
        coordinates = [chip for chip in chips for _ in range(topology.chip.devices)]
        return [Location(i, chip) for i in range(topology.slices) for chip in coordinates]
    axes = len(topology.shape)
    return [Location(getattr(d, "slice_index", None) or 0, tuple(d.coords[:axes])) for d in devices]


def network_seconds(topology: Topology, devices: list[Location], collective: Collective) -> float:
    """Return the minimum time of a collective: over all links within islands, then between islands.

    An all-reduce over n chips sends 2 (n-1)/n of the array over the links of the axes that the group
    spans, two links on a ring (Austin et al., "How to Scale Your Model", section 3). Between islands,
    each chip sends its share of the island's part.
    """
    group = [devices[i] for i in collective.groups[0]]
    islands = collections.Counter(device.island for device in group)
    inside = max(islands.values())
    passes = 2 if collective.kind == "all-reduce" else 1
    seconds = 0.0
    if inside > 1:
        first = next(island for island, count in islands.items() if count == inside)
        coordinates = [device.coordinates for device in group if device.island == first]
        links = 0 if topology.is_tpu else 1
        for axis, (size, wraps) in enumerate(zip(topology.shape, topology.wraps(), strict=True)):
            extent = len({c[axis] for c in coordinates}) if topology.is_tpu else 1
            links += (2 if wraps and extent == size > 2 else 1) if extent > 1 else 0
        share = 1.0 if collective.kind == "collective-permute" else passes * (inside - 1) / inside
        seconds += share * collective.bytes / (max(links, 1) * topology.chip.link_bandwidth)
    if len(islands) > 1:
        share = passes * (len(islands) - 1) / len(islands)
        seconds += share * collective.bytes / inside / topology.chip.network_bandwidth
    return seconds * collective.times


# ---- Formulas ----------------------------------------------------------------------------------


def activation_bytes(config: Config, phase: Phase, rows: int | float) -> float:
    """Return the bytes of activations that the backward pass needs for `rows` rows.

    A layer needs 34 D + 5 N T bytes per token at 2 bytes per number (Korthikanti et al., arXiv
    2205.05198, section 4.1), of which N T are the mask of attention dropout; fused attention kernels do
    not need the 5 N T. With remat "dots" a layer needs the results of its dense layers, with "full"
    its input; one layer at a time is recomputed in full. Of the 34 D, 16 D are the inputs and results
    of an activation of size 4 D; gating needs twice as much.
    """
    tokens, layers = phase.tokens, 0.0
    score_size = 0.0 if config.model.attention in attention.KERNELS else 2.0
    score_size += 0.5 * bool(config.model.attention_dropout)
    generators = [config.model.generator()] if config.model.electra.generator_hidden else []
    for model in [config.model, *generators]:
        size = 2 if model.dtype == "bfloat16" else 4
        wide = model.feed_forward * (1 + model.gated_feed_forward)
        full = (9 * model.hidden + 2 * wide + score_size * model.heads * tokens) * size
        dots = (6 * model.hidden + wide) * size
        kept = {"none": full, "dots": dots, "full": model.hidden * size}[model.remat]
        layers += model.layers * kept + (full if model.remat != "none" else 0)
    assert isinstance(phase.objective, MaskedLM)
    predictions = phase.objective.masker.predictions
    logits = 2 * 4 * predictions * config.model.vocab_size
    return rows * (tokens * layers + logits)


def expected_temporaries(config: Config, phase: Phase, sizes: Sequence[int], params: int) -> float:
    """Return the formula for temporaries per chip in bytes: activations and gradients."""
    data, fsdp, tensor = sizes
    parts = phase.accumulation
    rows = phase.batch_size / (data * fsdp * parts)
    # A scan over layers holds their parameters and gradients a second time, stacked.
    copies = 1 + 2 * (config.model.layer_loop == "scanned") + (parts > 1)
    return activation_bytes(config, phase, rows) / tensor + copies * params


def expected_collectives(
    config: Config, phase: Phase, sizes: Sequence[int], params: int
) -> list[Collective]:
    """Return the collectives of a step by formula; `params` is bytes of parameters per chip."""
    data, fsdp, tensor = sizes
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    model, parts = config.model, phase.accumulation
    along_data = grid.transpose(1, 2, 0).reshape(-1, data)
    along_fsdp = grid.transpose(0, 2, 1).reshape(-1, fsdp)
    along_tensor = grid.reshape(-1, tensor)
    size = 2 if model.dtype == "bfloat16" else 4
    rows = phase.batch_size // (data * fsdp * parts)
    hidden = rows * phase.tokens * model.hidden * size
    collectives = [
        Collective("all-reduce", params, along_data, parts),
        Collective("all-gather", params * fsdp, along_fsdp, 2 * parts),
        Collective("reduce-scatter", params * fsdp, along_fsdp, parts),
        Collective("all-reduce", hidden, along_tensor, 4 * model.layers * parts),
    ]
    return [collective for collective in collectives if collective.groups.shape[1] > 1]


def expected_traffic(config: Config, phase: Phase, sizes: Sequence[int], params: int) -> float:
    """Return the main-memory traffic of a step in bytes, by formula.

    Each accumulation part reads the parameters twice and writes gradients. The update reads
    parameters, gradients and both moments, and writes three of them. Activations are written once and
    read twice.
    """
    data, fsdp, tensor = sizes
    rows = phase.batch_size / (data * fsdp)
    activations = activation_bytes(config, phase, rows) / tensor
    return params * (3 * phase.accumulation + 7) + 3 * activations


# ---- Report ------------------------------------------------------------------------------------


def preflight(
    config: Config,
    topology: Topology,
    sequences: int = 1,
    dollars_per_chip_hour: float | None = None,
) -> dict[str, Any]:
    """Estimate what a run needs on a topology; its rows need not exist.

    `sequences` is S of phases that name no rows.

    Returns:
        Plain values for JSON, which `format_report` formats. Sizes are in bytes per device and times in
        seconds per step, unless the name says otherwise.

    Raises:
        NotCompiled: libtpu failed for another reason than memory.
    """
    has_vocab_size = bool(config.model.vocab_size)
    sizes = sharding.mesh_sizes(config.mesh, topology.devices)
    platform = "tpu" if topology.is_tpu else "gpu"
    attention.check(config, platform, sizes[-1])

    def implementation(tokens: int) -> str:
        return attention.choose(config, platform, sizes[-1], tokens).implementation

    # GPU kernels cannot be traced without the GPU's libraries, and nothing is compiled for GPUs.
    traced = implementation if topology.is_tpu else lambda _: "xla"
    config, phases = pretraining.abstract_phases(config, sequences, traced)
    if topology.is_tpu:
        devices = tpu_devices(topology)
        mesh = sharding.make_mesh(config.mesh, list(devices))
        device_locations = locations(topology, list(mesh.devices.flat))
    else:
        mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
        device_locations = locations(topology)
    for i, phase in enumerate(phases):
        sharding.check_batch(mesh, phase.batch_size, phase.accumulation, batch_size_key(config, i))
    entries, first_step = [], 0
    for i, (phase_config, phase) in enumerate(zip(config.phases, phases, strict=True)):
        model = dataclasses.replace(config.model, attention=implementation(phase.tokens))
        resolved = dataclasses.replace(config, model=model)  # for the formulas
        entry = _phase(resolved, i, phase, topology, mesh, sizes, device_locations)
        steps = phase.end_step - first_step
        entry |= {"steps": steps, "rows_from": phase_config.rows or None}
        for prefix, seconds in (
            ("", entry["roofline"]["step_seconds"]),
            ("expected_", entry["expected_step_seconds"]),
        ):
            entry |= _hours(prefix, steps * seconds / 3600, topology)
        entries.append(entry)
        first_step = phase.end_step
    shapes = jax.eval_shape(phases[0].objective.init, jax.random.key(0))
    report = {
        "topology": topology.name,
        "chips": topology.chips,
        "devices": topology.devices,
        "attention": attention.attention_line(
            config, platform, sizes[-1], [phase.tokens for phase in phases]
        ),
        "device": topology.chip.device_kinds[0],
        "source": topology.chip.source,
        "mesh": dict(zip(sharding.AXES, sizes, strict=True)),
        "parameters": parameter_count(shapes, config.model),
        "vocab_size": config.model.vocab_size,
        "vocab_size_assumed": not has_vocab_size and not any(phase.rows for phase in config.phases),
        "phases": entries,
        "fits": all(entry["fits"] for entry in entries),
        "utilization": utilization(topology.chip),
    }
    for prefix in ("", "expected_"):
        report |= _hours(prefix, sum(entry[f"{prefix}hours"] for entry in entries), topology)
        price = dollars_per_chip_hour
        report[f"{prefix}dollars"] = price and report[f"{prefix}chip_hours"] * price
    return report


def _hours(prefix: str, hours: float, topology: Topology) -> dict[str, float]:
    return {f"{prefix}hours": hours, f"{prefix}chip_hours": hours * topology.chips}


def _phase(
    config: Config,
    i: int,
    phase: Phase,
    topology: Topology,
    mesh: Any,
    sizes: tuple[int, int, int],
    device_locations: list[Location],
) -> dict[str, Any]:
    chip, model = topology.chip, config.model
    _, state = initial_state(config, phase, mesh)
    batch = checkpoint.abstract(phase.batch_shape, sharding.row_sharding(mesh))
    params = sharding.bytes_per_device(state.params)
    state_bytes = sharding.bytes_per_device((state, batch))
    memory: dict[str, Any] = {
        "parameters": params,
        "optimizer": sharding.bytes_per_device(state.optimizer),
        "batch": sharding.bytes_per_device(batch),
    }
    formula_flops = phase.objective.flops_per_row * phase.batch_size / topology.devices
    flops: dict[str, Any] = {"formula": formula_flops, "compiled": None, "cost_analysis": None}
    compiled, compile_seconds, needed = None, None, None
    if topology.is_tpu:
        start = time.monotonic()
        compiled, needed = _compile(config, phase, topology, mesh, state)
        compile_seconds = time.monotonic() - start
    if compiled is not None:
        analysis, program = compiled.memory_analysis(), hlo.read(compiled.as_text())
        arguments = analysis.argument_size_in_bytes
        new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        memory |= {
            "padding": arguments - program.argument_bytes,
            "temporaries": analysis.temp_size_in_bytes,
            "program": analysis.generated_code_size_in_bytes,
            "arguments": arguments,
        }
        memory["total"] = arguments + new + memory["temporaries"] + memory["program"]
        # A Pallas kernel's products are not in the program's text.
        kernel_flops = 0.0
        if model.attention in attention.KERNELS:
            kernel_flops = 12.0 * model.layers * phase.tokens**2 * model.hidden
            kernel_flops *= phase.batch_size / topology.devices
        flops["compiled"] = computed = program.matrix_flops + kernel_flops
        if program.matrix_flops < (formula_flops - kernel_flops) / 2:
            raise NotCompiled(
                f"{topology.name}: the program that libtpu compiled has {program.matrix_flops:.3g} FLOPs "
                f"besides attention, by formula the step has {formula_flops - kernel_flops:.3g}: this "
                "version of bert_jax cannot read the text of libtpu's programs; use the versions of JAX "
                "and libtpu that it was tested with"
            )
        flops["cost_analysis"] = (compiled.cost_analysis() or {}).get("flops")
        collectives, traffic = program.collectives, program.traffic_bytes
    else:
        memory["temporaries"] = (
            needed - state_bytes if needed else expected_temporaries(config, phase, sizes, params)
        )
        memory["total"] = state_bytes + memory["temporaries"]
        collectives = expected_collectives(config, phase, sizes, params)
        traffic = expected_traffic(config, phase, sizes, params)
        computed = formula_flops * (4 / 3 if model.remat == "full" else 1)
    fits = compiled is not None or (not needed and memory["total"] <= chip.memory_bytes)
    sent: dict[str, dict[str, Any]] = {}
    for collective in collectives:
        kind = sent.setdefault(collective.kind, {"bytes": 0.0, "times": 0, "seconds": 0.0})
        kind["bytes"] += collective.sent_bytes
        kind["times"] += collective.times
        kind["seconds"] += network_seconds(topology, device_locations, collective)
    # By default, TPUs multiply float32 in one bfloat16 pass, and GPUs as TF32 at half the rate.
    peak = chip.flops / (1 if topology.is_tpu or model.dtype == "bfloat16" else 2)
    network = sum((kind["seconds"] for kind in sent.values()), 0.0)
    times = roofline(chip._replace(flops=peak), computed, traffic, network)
    # Utilization counts the FLOPs of the model, without recomputation.
    share = utilization(topology.chip)["share"]
    expected = max(times["step_seconds"], formula_flops / (share * peak))
    assert isinstance(phase.objective, MaskedLM)
    temporaries = memory["temporaries"]
    return {
        "tokens": phase.tokens,
        "sequences": phase.objective.masker.sequences,
        "batch_size": phase.batch_size,
        "accumulation": phase.accumulation,
        "method": "formula" if compiled is None else "compiled",
        "compile_seconds": compile_seconds,
        "memory": {**memory, "capacity": chip.memory_bytes},
        "fits": fits,
        "would_fit": None if fits else would_fit(config, i, phase, topology, state, temporaries),
        "flops": flops,
        "traffic": traffic,
        "collectives": sent,
        "roofline": times,
        "tokens_per_second": phase.batch_size * phase.tokens / times["step_seconds"],
        "expected_step_seconds": expected,
        "expected_tokens_per_second": phase.batch_size * phase.tokens / expected,
    }


def _compile(
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


def roofline(chip: Chip, flops: float, traffic: float, network: float) -> dict[str, Any]:
    """Return the minimum time of a step: the longest of compute, memory and network, in seconds."""
    times: dict[str, Any] = {
        "compute_seconds": flops / chip.flops,
        "memory_seconds": traffic / chip.memory_bandwidth,
        "network_seconds": network,
    }
    bound = max(times, key=lambda name: times[name])
    step = {"step_seconds": times[bound], "bound": bound.removesuffix("_seconds")}
    return {**times, **step, "peak_flops": chip.flops}


def _changes(config: Config, i: int, phase: Phase, chips: int) -> Iterator[tuple[str, Config, int]]:
    """Yield changes that need less memory, cheapest first: (arguments, config, accumulation)."""
    # The accumulation of a phase overrides that of the run.
    accumulation = f"phases[{i}].accumulation" if config.phases[i].accumulation else "accumulation"
    parts = [2**i for i in range(1, 11) if phase.batch_size % (2**i * phase.accumulation) == 0]
    shards = [2**i for i in range(1, 11) if chips % 2**i == 0]

    remat = config.model.remat
    stronger = {"none": ("dots", "full"), "dots": ("full",), "full": ()}[remat]
    changes = [
        *((stronger_remat, 1, 1) for stronger_remat in stronger),
        *((remat, 1, part) for part in parts),
        *((remat, fsdp, 1) for fsdp in shards),
        *(("full", fsdp, part) for fsdp in (1, *shards) for part in parts),
    ]
    for other_remat, fsdp, part in changes:
        other, settings = copy.deepcopy(config), []
        if fsdp > 1:
            settings += [] if other.mesh.data == -1 else ["mesh.data=-1"]
            settings.append(f"mesh.fsdp={fsdp}")
            other.mesh.data, other.mesh.fsdp = -1, fsdp
        if other_remat != remat:
            settings.append(f"model.remat={other_remat}")
            other.model.remat = other_remat
        if part > 1:
            settings.append(f"{accumulation}={part * phase.accumulation}")
        arguments = " ".join(f"--config.{setting}" for setting in settings)
        yield arguments, other, part * phase.accumulation


def would_fit(
    config: Config, i: int, phase: Phase, topology: Topology, state: State, temporaries: int | float
) -> dict[str, Any] | None:
    """Return the first change with which phase i is estimated to fit, and its total bytes.

    Temporaries by formula are scaled to those of the current program.
    """
    params = sharding.bytes_per_device(state.params)
    sizes = sharding.mesh_sizes(config.mesh, topology.devices)
    scale = temporaries / expected_temporaries(config, phase, sizes, params)

    @functools.cache
    def sharded_bytes(sizes: tuple[int, int, int]) -> tuple[int, int]:
        mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
        placed = checkpoint.abstract(state, sharding.shardings(mesh, state))
        return sharding.bytes_per_device(placed), sharding.bytes_per_device(placed.params)

    for arguments, other, parts in _changes(config, i, phase, topology.devices):
        try:
            sizes = sharding.mesh_sizes(other.mesh, topology.devices)
            if sizes[0] % topology.slices:  # only `data` may span slices
                continue
            mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
            sharding.check_batch(mesh, phase.batch_size, parts)
            total, params = sharded_bytes(sizes)
        except UserError:
            continue
        part = dataclasses.replace(phase, accumulation=parts)
        total += scale * expected_temporaries(other, part, sizes, params)
        if total <= topology.chip.memory_bytes:
            return {"arguments": arguments, "total": total}
    return None


def format_report(report: dict[str, Any]) -> str:
    """Format a report as text."""
    chip = find(report["device"])
    assert chip
    mesh = ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    per_chip = report["devices"] // report["chips"]
    lines = [
        f"{report['topology']}: {report['chips']:,} x {report['device']}"
        f"{f' of {per_chip} devices' if per_chip > 1 else ''}, mesh {mesh}; "
        f"{report['parameters']:,} parameters",
        report["attention"],
    ]
    if report["vocab_size_assumed"]:
        lines.append(f"assumed: a vocabulary of {report['vocab_size']:,}, since no rows are given")
    for i, phase in enumerate(report["phases"]):
        lines += ["", *_phase_lines(i, phase, chip)]
    used = report["utilization"]
    lines += [
        "",
        _total("total, expected", report, "expected_"),
        _total("total, at least", report, ""),
        f"expected at {used['share']:.0%} of the peak, "
        + (f"ASSUMED from {used['measured']}" if used["assumed"] else f"as in {used['measured']}"),
        f"data sheet: {report['source']}",
    ]
    return "\n".join(lines)


def _total(name: str, report: dict[str, Any], prefix: str) -> str:
    hours, chip_hours, dollars = (
        report[f"{prefix}{key}"] for key in ("hours", "chip_hours", "dollars")
    )
    price = "" if dollars is None else f", {dollars:,.2f} dollars"
    return f"{name}: {hours:,.2f} hours, {chip_hours:,.1f} chip-hours{price}"


def _size(count: int | float) -> str:
    power = 2 if count < 2**30 else 3
    return f"{count / 1024**power:,.2f} {'MiB' if power == 2 else 'GiB'}"


def _phase_lines(i: int, phase: dict[str, Any], chip: Chip) -> list[str]:
    memory, flops, times = phase["memory"], phase["flops"], phase["roofline"]
    compiled = phase["method"] == "compiled"
    how = "BY FORMULA, not compiled"
    if compiled:
        how = f"compiled in {phase['compile_seconds']:.0f} s"
    elif phase["compile_seconds"] is not None:
        how = "BY FORMULA: the compiler rejects a program that does not fit"
    parts = f" in {phase['accumulation']} parts" if phase["accumulation"] > 1 else ""
    lines = [
        f"phase {i}: {phase['steps']:,} steps of {phase['batch_size']:,} rows{parts}, "
        f"T={phase['tokens']}, S={phase['sequences']}; {how}",
        "  memory per device",
    ]
    for name in ("parameters", "optimizer", "batch", "padding", "temporaries", "program"):
        if name in memory:
            lines.append(f"    {name:14} {_size(memory[name]):>12}")
    verdict = "fits" if phase["fits"] else "DOES NOT FIT"
    lines.append(
        f"    {'total':14} {_size(memory['total']):>12} of {_size(memory['capacity'])}: {verdict}"
    )
    if not phase["fits"]:
        change = phase["would_fit"]
        lines.append(
            f"    by estimate {change['arguments']} would fit, with {_size(change['total'])}"
            if change
            else "    by estimate no remat, accumulation or fsdp would fit: use more chips"
        )
    counted = f", compiled {flops['compiled']:.4g}" if compiled else ""
    if flops["cost_analysis"]:
        counted += f" (XLA's cost analysis, which counts loops once: {flops['cost_analysis']:.4g})"
    lines.append(f"  FLOPs per device and step: formula {flops['formula']:.4g}{counted}")
    for kind, sent in sorted(phase["collectives"].items()):
        lines.append(
            f"  {kind}: {sent['bytes'] / 1e9:.4g} GB sent per device and step, {sent['times']:,} times, "
            f"{sent['seconds'] * 1e3:.3g} ms"
        )
    link = f"{chip.link_bandwidth / 1e9:g} GB/s per link"
    lines.append(
        f"  roofline: compute {times['compute_seconds'] * 1e3:.3g} ms at {times['peak_flops'] / 1e12:g} TFLOP/s, "
        f"memory {times['memory_seconds'] * 1e3:.3g} ms at {chip.memory_bandwidth / 1e9:g} GB/s, "
        f"network {times['network_seconds'] * 1e3:.3g} ms at {link}"
    )
    lines.append(
        f"  step: {phase['expected_step_seconds'] * 1e3:.3g} ms expected "
        f"({phase['expected_tokens_per_second']:,.0f} tokens/s), at least "
        f"{times['step_seconds'] * 1e3:.3g} ms ({times['bound']})"
    )
    return lines
