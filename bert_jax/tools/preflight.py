"""Estimate memory, time and cost of a pretraining run without the hardware.

For TPUs, libtpu compiles the training step ahead of time on any x86 machine, and the report is read
from the compiled program. For GPUs, whose compiler needs the GPU's libraries, and where a program
does not fit, formulae replace it, and the report says so.

Two times are reported. The roofline is a lower bound: what the data sheet allows when compute, memory
and network overlap perfectly. The expected time assumes a share of the peak that was measured
(`UTILIZATIONS`).
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

from bert_jax import checkpoint, device, sharding
from bert_jax.config import Config
from bert_jax.device import Chip
from bert_jax.errors import UserError
from bert_jax.model import attention
from bert_jax.model.flops import parameter_count
from bert_jax.objectives import pretraining
from bert_jax.objectives.base import Phase
from bert_jax.step import State, compile_step, initial_state
from bert_jax.tools import hlo
from bert_jax.tools.hlo import Collective

GPUS_A_NODE = 8
# What a kind needs that not every supported version of JAX brings.
_NEEDS = {"tpu7x": ", which needs JAX 0.12 and libtpu 0.0.50 (Python 3.12 or newer)"}


class Kind(NamedTuple):
    """A kind of hardware as `--topology` names it.

    Attributes:
        device_kind: what JAX calls its devices.
        axes: of a slice's shape; 1 for GPUs, which are only counted.
        longest: an axis may be at most so long; 0 for no limit.
        ring: an axis of a TPU slice closes to a ring at a multiple of this (if all axes are, where
            there are three).
        example: of a topology.
        devices: a chip is this many devices.
        cores: what the number in an accelerator type (`v5p-8`) counts of each chip.
    """

    device_kind: str
    axes: int
    longest: int
    ring: int
    example: str
    devices: int = 1
    cores: int = 1


KINDS = {
    "v4": Kind("TPU v4", 3, 0, 4, "v4:2x2x1", cores=2),
    "v5e": Kind("TPU v5 lite", 2, 16, 16, "v5e:4x4"),
    "v5p": Kind("TPU v5", 3, 0, 4, "v5p:4x4x4", cores=2),
    "v6e": Kind("TPU v6 lite", 2, 16, 16, "v6e:16x16"),
    "tpu7x": Kind("TPU7x", 3, 0, 4, "tpu7x:2x2x1", devices=2, cores=2),
    "a100": Kind("NVIDIA A100", 1, 0, 0, "a100:64"),
    "h100": Kind("NVIDIA H100", 1, 0, 0, "h100:8"),
    "h200": Kind("NVIDIA H200", 1, 0, 0, "h200:16"),
    "b200": Kind("NVIDIA B200", 1, 0, 0, "b200:8"),
    "l4": Kind("NVIDIA L4", 1, 0, 0, "l4:8"),
}


class Utilization(NamedTuple):
    """A measured share of a device's bfloat16 peak in training: `flops_per_row` over the data sheet.

    Attributes:
        share: of the peak.
        measured: what was measured, and where it is published.
    """

    share: float
    measured: str


UTILIZATIONS = {
    "NVIDIA H100": Utilization(0.31, "this project, base, T=128, on one H100 (experiments/speed)"),
    "NVIDIA A100": Utilization(
        0.45, "BERT-large, T=128, on one A100 (NVIDIA DeepLearningExamples)"
    ),
}
# For devices on which no training of BERT in bfloat16 is known to have been measured.
ASSUMED_FROM = "NVIDIA H100"


def utilization(device_kind: str) -> tuple[Utilization, bool]:
    """The measured utilization to expect on a kind of device; whether it is assumed from another."""
    assumed = device_kind not in UTILIZATIONS
    return UTILIZATIONS[ASSUMED_FROM if assumed else device_kind], assumed


class Topology(NamedTuple):
    """Chips and how they are joined.

    Attributes:
        kind: of `KINDS`.
        shape: of a slice, in chips.
        slices: slices joined by the data center's network; of GPUs 1.
    """

    kind: str
    shape: tuple[int, ...]
    slices: int

    @property
    def name(self) -> str:
        """As `--topology` takes it."""
        several = f",slices={self.slices}" if self.slices > 1 else ""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}{several}"

    @property
    def is_tpu(self) -> bool:
        """Whether libtpu compiles for it."""
        return "TPU" in KINDS[self.kind].device_kind

    @property
    def chips(self) -> int:
        """In all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """As JAX counts them, in all slices."""
        return self.chips * KINDS[self.kind].devices

    @property
    def chip(self) -> Chip:
        """The data sheet."""
        return device.CHIPS[KINDS[self.kind].device_kind]

    def wraps(self) -> tuple[bool, ...]:
        """For each axis whether its ends are joined."""
        ring = KINDS[self.kind].ring
        closed = tuple(bool(ring) and size % ring == 0 for size in self.shape)
        return (all(closed),) * 3 if len(closed) == 3 else closed


class NotCompiled(UserError):
    """Libtpu fails at a program, and not because it needs too much memory."""


def slice_shape(kind: str, count: int) -> tuple[int, ...] | None:
    """The shape of a TPU slice of an accelerator type such as `v5e-16` or `v5p-8`, in chips.

    Axes are powers of 2, as equal as can be and ascending, as Google lists them; 4 chips in three axes
    are 2x2x1. None if there is no such slice.
    """
    axes, (chips, rest) = KINDS[kind].axes, divmod(count, KINDS[kind].cores)
    power = chips.bit_length() - 1
    if rest or chips < 1 or chips != 1 << power or (axes == 3 and chips < 4) or chips == 2:
        return None
    if axes == 3 and chips == 4:
        return (2, 2, 1)
    return tuple(1 << power // axes + (i >= axes - power % axes) for i in range(axes))


def parse_topology(text: str) -> Topology:
    """Parse `v5p:4x4x4`, `v5e:16x16,slices=4`, `h100:64`, or an accelerator type such as `v5e-16`.

    Raises:
        UserError: unknown; the line lists the known kinds.
    """
    known = ", ".join(kind.example for kind in KINDS.values())
    accelerator = re.fullmatch(r"(?:tpu-)?(v5litepod|\w+)-(\d+)(,slices=\d+)?", text)
    if accelerator:
        name = accelerator.group(1).replace("v5litepod", "v5e")
        is_tpu = name in KINDS and "TPU" in KINDS[name].device_kind
        shape = slice_shape(name, int(accelerator.group(2))) if is_tpu else None
        if shape is None:
            raise UserError(
                f"unknown accelerator type {text!r}: name one such as v5e-16, v5p-8 or v6e-8, or a "
                f"topology such as {known}"
            )
        text = f"{name}:{'x'.join(map(str, shape))}{accelerator.group(3) or ''}"
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?:,slices=(\d+))?", text)
    if not found or found.group(1) not in KINDS:
        raise UserError(
            f"unknown topology {text!r}: known are {', '.join(KINDS)} with a shape, such as {known}, "
            "or several slices, v5e:16x16,slices=4"
        )
    name, kind = found.group(1), KINDS[found.group(1)]
    shape = tuple(int(size) for size in found.group(2).split("x"))
    topology = Topology(name, shape, int(found.group(3) or 1))
    if len(shape) != kind.axes or 0 in shape or topology.slices < 1:
        raise UserError(f"topology {text!r}: {name} takes a shape such as {kind.example}")
    if kind.longest and max(shape) > kind.longest:
        most = "x".join([str(kind.longest)] * kind.axes)
        slices = -(-math.prod(shape) // kind.longest**kind.axes)
        raise UserError(
            f"topology {text!r}: a {name} slice is at most {most}; "
            f"join several, {name}:{most},slices={max(slices, 2)}"
        )
    if topology.slices > 1 and (not topology.is_tpu or not topology.chip.network_bandwidth):
        raise UserError(f"topology {text!r}: slices are not known for {name}; leave them out")
    return topology


def tpu_devices(topology: Topology) -> Sequence[jax.Device]:
    """Devices to compile for, none of which is here.

    Raises:
        UserError: libtpu is not installed, or knows no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"compiling for {topology.name} needs libtpu: pip install 'bert-jax[tpu]' here, "
            "on any x86 Linux machine (no TPU is needed)"
        )
    # Otherwise libtpu asks the network and the user which TPU this machine has.
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
        example = KINDS[topology.kind].example
        raise UserError(
            f"topology {topology.name!r}: the installed libtpu knows no such slice"
            f"{_NEEDS.get(topology.kind, '')}; take one such as {example} "
            f"({str(error).splitlines()[0]})"
        ) from error


class PointRun(NamedTuple):
    """Where a device is."""

    # Its slice or node.
    island: int
    # In the slice; empty for GPUs, which all have a link to their node's switch.
    coordinates: tuple[int, ...]


def places(topology: Topology, devices: Sequence[jax.Device] | None = None) -> list[PointRun]:
    """The places of all devices in the mesh's order: that of `devices`, or of coordinates."""
    if not topology.is_tpu:
        return [PointRun(i // GPUS_A_NODE, ()) for i in range(topology.devices)]
    if devices is None:
        chips = [tuple(map(int, place)) for place in np.ndindex(*topology.shape)]
        inside = [place for place in chips for _ in range(KINDS[topology.kind].devices)]
        return [PointRun(i, place) for i in range(topology.slices) for place in inside]
    axes = len(topology.shape)
    return [PointRun(getattr(d, "slice_index", None) or 0, tuple(d.coords[:axes])) for d in devices]


def network_seconds(topology: Topology, where: list[PointRun], collective: Collective) -> float:
    """How long a collective takes at least: in each island all its links at once, then between islands.

    An all-reduce sends 2 (n-1)/n of the array, on n chips, through the links of the axes along which
    the group lies, two on an axis whose ends are joined (Austin et al., "How to Scale Your Model",
    section 3). Between islands each chip sends its share of the island's part.
    """
    group = [where[i] for i in collective.groups[0]]
    islands = collections.Counter(place.island for place in group)
    inside = max(islands.values())
    both_ways = 2 if collective.kind == "all-reduce" else 1
    seconds = 0.0
    if inside > 1:
        first = next(island for island, count in islands.items() if count == inside)
        coordinates = [place.coordinates for place in group if place.island == first]
        links = 0 if topology.is_tpu else 1
        for axis, (size, wraps) in enumerate(zip(topology.shape, topology.wraps(), strict=True)):
            along = len({c[axis] for c in coordinates}) if topology.is_tpu else 1
            links += (2 if wraps and along == size > 2 else 1) if along > 1 else 0
        share = (
            1.0 if collective.kind == "collective-permute" else both_ways * (inside - 1) / inside
        )
        seconds += share * collective.bytes / (max(links, 1) * topology.chip.link_bandwidth)
    if len(islands) > 1:
        share = both_ways * (len(islands) - 1) / len(islands)
        seconds += share * collective.bytes / inside / topology.chip.network_bandwidth
    return seconds * collective.times


# Formulae


def activation_bytes(config: Config, phase: Phase, rows: int | float) -> float:
    """What a layer's backward pass needs of `rows` rows, all layers, and the logits.

    34 D + 5 N T bytes a token and layer at 2 bytes a number (Korthikanti et al., arXiv 2205.05198,
    section 4.1); with remat "dots" the results of the matrix products with weights, with "full" the
    layers' inputs, and one layer in full.
    """
    model, tokens = config.model, phase.tokens
    size = 2 if model.dtype == "bfloat16" else 4
    whole = (17 * model.hidden + 2.5 * model.heads * tokens) * size
    dots = (6 * model.hidden + model.feed_forward) * size
    kept = {"none": whole, "dots": dots, "full": model.hidden * size}[model.remat]
    layers = model.layers * kept + (whole if model.remat != "none" else 0)
    predictions = phase.objective.masker.predictions
    logits = 2 * 4 * predictions * model.vocab_size
    return rows * (tokens * layers + logits)


def expected_temporaries(config: Config, phase: Phase, sizes: Sequence[int], params: int) -> float:
    """Bytes of a chip besides its state, by formula: activations and the gradients."""
    data, fsdp, tensor = sizes
    parts = phase.accumulation
    rows = phase.batch_size / (data * fsdp * parts)
    # A scan holds the layers' parameters and gradients a second time, stacked.
    copies = 1 + 2 * (config.model.layer_loop == "scanned") + (parts > 1)
    return activation_bytes(config, phase, rows) / tensor + copies * params


def expected_collectives(
    config: Config, phase: Phase, sizes: Sequence[int], params: int
) -> list[Collective]:
    """What a step exchanges by formula; `params` are bytes of a chip's parameters."""
    data, fsdp, tensor = sizes
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    model, parts = config.model, phase.accumulation
    along_data = grid.transpose(1, 2, 0).reshape(-1, data)
    along_fsdp = grid.transpose(0, 2, 1).reshape(-1, fsdp)
    along_tensor = grid.reshape(-1, tensor)
    size = 2 if model.dtype == "bfloat16" else 4
    rows = phase.batch_size // (data * fsdp * parts)
    hidden = rows * phase.tokens * model.hidden * size
    found = [
        Collective("all-reduce", params, along_data, parts),
        Collective("all-gather", params * fsdp, along_fsdp, 2 * parts),
        Collective("reduce-scatter", params * fsdp, along_fsdp, parts),
        Collective("all-reduce", hidden, along_tensor, 4 * model.layers * parts),
    ]
    return [one for one in found if one.groups.shape[1] > 1]


def expected_traffic(config: Config, phase: Phase, sizes: Sequence[int], params: int) -> float:
    """Main-memory bytes of a step by formula.

    Parameters are read twice a part and gradients written; the update reads parameters, gradients and
    both moments and writes three of them; activations are written once and read twice.
    """
    data, fsdp, tensor = sizes
    rows = phase.batch_size / (data * fsdp)
    activations = activation_bytes(config, phase, rows) / tensor
    return params * (3 * phase.accumulation + 7) + 3 * activations


# The report


def preflight(
    config: Config,
    topology: Topology,
    sequences: int = 1,
    dollars_per_chip_hour: float | None = None,
) -> dict[str, Any]:
    """What the configured run needs on a topology.

    Args:
        config: validated; no rows need be there.
        topology: of `parse_topology`.
        sequences: S, where a phase names no rows.
        dollars_per_chip_hour: adds prices.

    Returns:
        Plain values for JSON; `describe` turns them into text. Sizes in bytes and a chip, times in
        seconds and a step, unless the name says otherwise.

    Raises:
        UserError: the mesh or the batch does not divide, or libtpu is missing.
        NotCompiled: libtpu fails at the program for another reason than its memory.
    """
    told = bool(config.model.vocab_size)
    sizes = sharding.mesh_sizes(config.mesh, topology.devices)
    platform = "tpu" if topology.is_tpu else "gpu"
    choice = attention.choose(config, platform, sizes[-1])
    attention.check(config, platform, sizes[-1])
    # Nothing is compiled for a GPU, and its kernels cannot be traced without its libraries.
    traced = choice.implementation if topology.is_tpu else "xla"
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention=traced))
    config, phases = pretraining.abstract_phases(config, sequences)
    if topology.is_tpu:
        devices = tpu_devices(topology)
        mesh = sharding.make_mesh(config.mesh, list(devices))
        where = places(topology, list(mesh.devices.flat))
    else:
        mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
        where = places(topology)
    for phase in phases:
        sharding.check_batch(mesh, phase.batch_size, phase.accumulation)
    found, first_step = [], 0
    for i, (phase_config, phase) in enumerate(zip(config.phases, phases, strict=True)):
        entry = _phase(config, i, phase, topology, mesh, sizes, where)
        steps = phase.end_step - first_step
        hours = steps * entry["roofline"]["step_seconds"] / 3600
        expected_hours = steps * entry["expected_step_seconds"] / 3600
        entry |= {"steps": steps, "hours": hours, "chip_hours": hours * topology.chips}
        entry |= {
            "expected_hours": expected_hours,
            "expected_chip_hours": expected_hours * topology.chips,
        }
        entry["rows_from"] = phase_config.rows or None
        found.append(entry)
        first_step = phase.end_step
    hours = sum(entry["hours"] for entry in found)
    expected_hours = sum(entry["expected_hours"] for entry in found)
    measured, assumed = utilization(KINDS[topology.kind].device_kind)
    price = dollars_per_chip_hour
    shapes = jax.eval_shape(phases[0].objective.init, jax.random.key(0))
    return {
        "topology": topology.name,
        "chips": topology.chips,
        "devices": topology.devices,
        "attention": choice._asdict(),
        "device": KINDS[topology.kind].device_kind,
        "source": topology.chip.source,
        "mesh": dict(zip(sharding.AXES, sizes, strict=True)),
        "parameters": parameter_count(shapes, config.model),
        "vocab_size": config.model.vocab_size,
        "vocab_size_assumed": not told and not any(phase.rows for phase in config.phases),
        "phases": found,
        "fits": all(entry["fits"] for entry in found),
        "hours": hours,
        "chip_hours": hours * topology.chips,
        "dollars": price and hours * topology.chips * price,
        "utilization": {**measured._asdict(), "assumed": assumed},
        "expected_hours": expected_hours,
        "expected_chip_hours": expected_hours * topology.chips,
        "expected_dollars": price and expected_hours * topology.chips * price,
    }


def _phase(
    config: Config,
    i: int,
    phase: Phase,
    topology: Topology,
    mesh: Any,
    sizes: tuple[int, int, int],
    where: list[PointRun],
) -> dict[str, Any]:
    chip, model = topology.chip, config.model
    state = _placed(initial_state(config, phase, mesh)[1], mesh)
    batch = checkpoint.abstract(phase.batch_shape, sharding.rows(mesh))
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
        begun = time.monotonic()
        compiled, needed = _compile(config, phase, topology, mesh, state)
        compile_seconds = time.monotonic() - begun
    if compiled is not None:
        told, program = compiled.memory_analysis(), hlo.read(compiled.as_text())
        arguments = told.argument_size_in_bytes
        new = told.output_size_in_bytes - told.alias_size_in_bytes
        memory |= {
            "padding": arguments - program.argument_bytes,
            "temporaries": told.temp_size_in_bytes,
            "program": told.generated_code_size_in_bytes,
            "arguments": arguments,
        }
        memory["total"] = arguments + new + memory["temporaries"] + memory["program"]
        flops["compiled"] = computed = program.matrix_flops
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
    for one in collectives:
        kind = sent.setdefault(one.kind, {"bytes": 0.0, "times": 0, "seconds": 0.0})
        kind["bytes"] += one.sent_bytes
        kind["times"] += one.times
        kind["seconds"] += network_seconds(topology, where, one)
    # A TPU multiplies float32 in one bfloat16 pass by default, a GPU as TF32 at half the rate.
    peak = chip.flops / (1 if topology.is_tpu or model.dtype == "bfloat16" else 2)
    network = sum((kind["seconds"] for kind in sent.values()), 0.0)
    times = roofline(chip._replace(flops=peak), computed, traffic, network)
    # Utilization counts the model's own operations, which remat does not change.
    share = utilization(KINDS[topology.kind].device_kind)[0].share
    expected = max(times["step_seconds"], formula_flops / (share * peak))
    change = None
    if not fits:
        change = would_fit(config, i, phase, topology, state, memory["temporaries"])
    return {
        "tokens": phase.tokens,
        "sequences": phase.objective.masker.sequences,
        "batch_size": phase.batch_size,
        "accumulation": phase.accumulation,
        "method": "formula" if compiled is None else "compiled",
        "compile_seconds": compile_seconds,
        "memory": {**memory, "capacity": chip.memory_bytes},
        "fits": fits,
        "would_fit": change,
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
    """The compiled step, or None and the bytes it would have taken."""
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
                f"libtpu does not compile the step of T={phase.tokens} for {topology.name} "
                f"({' '.join(str(error).split())[:300]}): try another mesh, batch or version of it"
            ) from error
        return None, needed


def _placed(state: State, mesh: Any) -> State:
    """The shapes of a state on a mesh."""
    placed = checkpoint.abstract(state, sharding.shardings(mesh, state))
    for path, leaf in jax.tree_util.tree_leaves_with_path(placed):
        try:
            leaf.sharding.shard_shape(leaf.shape)
        except ValueError as error:
            name = "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path)
            raise UserError(
                f"config.mesh does not divide {name} of shape {leaf.shape}: choose other fsdp and "
                "tensor sizes (--config.model.vocab_multiple=128 pads the vocabulary)"
            ) from error
    return placed


def needed_bytes(message: str) -> float | None:
    """What a program would have taken, arguments and all, from the compiler's refusal.

    None if it refused for another reason.
    """
    # What this message calls HLO temporaries has arguments and results in it.
    said = r"HLO temporaries \(([\d.]+)([KMGT])\) exceeds|Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm"
    if not (found := re.search(said, message)):
        return None
    number, unit = (part for part in found.groups() if part)
    return float(number) * 2.0 ** {"K": 10, "M": 20, "G": 30, "T": 40}[unit]


def roofline(chip: Chip, flops: float, traffic: float, network: float) -> dict[str, Any]:
    """The least time of a step: the longest of computing, memory and network (seconds)."""
    times: dict[str, Any] = {
        "compute_seconds": flops / chip.flops,
        "memory_seconds": traffic / chip.memory_bandwidth,
        "network_seconds": network,
    }
    bound = max(times, key=lambda name: times[name])
    step = {"step_seconds": times[bound], "bound": bound.removesuffix("_seconds")}
    return {**times, **step, "peak_flops": chip.flops}


def _changes(config: Config, i: int, phase: Phase, chips: int) -> Iterator[tuple[str, Config, int]]:
    """Ways to need less memory, cheapest first: (arguments, config, accumulation)."""
    # A phase that has a setting of its own takes no notice of the run's.
    own = config.phases[i].accumulation
    setting = f"--config.phases[{i}].accumulation" if own else "--config.accumulation"
    parts = [2**i for i in range(1, 11) if phase.batch_size % (2**i * phase.accumulation) == 0]
    shards = [2**i for i in range(1, 11) if chips % 2**i == 0]

    def changed(remat: str, fsdp: int) -> Config:
        other = copy.deepcopy(config)
        other.model.remat = remat
        if fsdp:
            other.mesh.data, other.mesh.fsdp = -1, fsdp
        return other

    stronger = {"none": ("dots", "full"), "dots": ("full",), "full": ()}[config.model.remat]
    for remat in stronger:
        yield f"--config.model.remat={remat}", changed(remat, 0), phase.accumulation
    for part in parts:
        total = part * phase.accumulation
        yield f"{setting}={total}", changed(config.model.remat, 0), total
    for fsdp in shards:
        yield f"--config.mesh.fsdp={fsdp}", changed(config.model.remat, fsdp), phase.accumulation
    for fsdp in [0, *shards]:
        for part in parts:
            total = part * phase.accumulation
            named = f"--config.mesh.fsdp={fsdp} " if fsdp else ""
            yield (
                f"{named}--config.model.remat=full {setting}={total}",
                changed("full", fsdp),
                total,
            )


def would_fit(
    config: Config, i: int, phase: Phase, topology: Topology, state: State, temporaries: int | float
) -> dict[str, Any] | None:
    """The first change that by estimate would make phase i fit, and the total bytes it would take.

    The formula's temporaries are scaled by what the present program is known to need.
    """
    params = sharding.bytes_per_device(state.params)
    sizes = sharding.mesh_sizes(config.mesh, topology.devices)
    scale = temporaries / expected_temporaries(config, phase, sizes, params)

    @functools.cache
    def place(sizes: tuple[int, int, int]) -> tuple[int, int]:
        placed = _placed(state, jax.sharding.AbstractMesh(sizes, sharding.AXES))
        return sharding.bytes_per_device(placed), sharding.bytes_per_device(placed.params)

    for arguments, other, parts in _changes(config, i, phase, topology.devices):
        try:
            sizes = sharding.mesh_sizes(other.mesh, topology.devices)
            mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
            sharding.check_batch(mesh, phase.batch_size, parts)
            total, params = place(sizes)
        except UserError:
            continue
        part = dataclasses.replace(phase, accumulation=parts)
        total += scale * expected_temporaries(other, part, sizes, params)
        if total <= topology.chip.memory_bytes:
            return {"arguments": arguments, "total": total}
    return None


def describe(report: dict[str, Any]) -> str:
    """A report as text."""
    chip = device.CHIPS[report["device"]]
    mesh = ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    each = report["devices"] // report["chips"]
    lines = [
        f"{report['topology']}: {report['chips']:,} x {report['device']}"
        f"{f' of {each} devices' if each > 1 else ''}, mesh {mesh}; "
        f"{report['parameters']:,} parameters",
        "attention: {implementation} ({reason})".format(**report["attention"]),
    ]
    if report["vocab_size_assumed"]:
        lines.append(f"assumed: a vocabulary of {report['vocab_size']:,}, as no rows are given")
    for i, phase in enumerate(report["phases"]):
        lines += ["", *_describe_phase(i, phase, report, chip)]
    used = report["utilization"]
    lines += [
        "",
        _total("the run, expected", report, "expected_"),
        _total("the run, at the least", report, ""),
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


def _describe_phase(i: int, phase: dict[str, Any], report: dict[str, Any], chip: Chip) -> list[str]:
    memory, flops, times = phase["memory"], phase["flops"], phase["roofline"]
    compiled = phase["method"] == "compiled"
    how = (
        f"compiled in {phase['compile_seconds']:.0f} s"
        if compiled
        else "BY FORMULA, not compiled"
        if phase["compile_seconds"] is None
        else "BY FORMULA: the compiler refuses a program that does not fit"
    )
    parts = f" in {phase['accumulation']} parts" if phase["accumulation"] > 1 else ""
    lines = [
        f"phase {i}: {phase['steps']:,} steps of {phase['batch_size']:,} rows{parts}, "
        f"T={phase['tokens']}, S={phase['sequences']}; {how}",
        "  memory a device",
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
            else "    by estimate no remat, accumulation or fsdp would fit: take more chips"
        )
    counted = f", compiled {flops['compiled']:.4g}" if compiled else ""
    if flops["cost_analysis"]:
        counted += f" (XLA's cost analysis, which counts loops once: {flops['cost_analysis']:.4g})"
    lines.append(f"  FLOPs a device and step: formula {flops['formula']:.4g}{counted}")
    for kind, sent in sorted(phase["collectives"].items()):
        lines.append(
            f"  {kind}: {sent['bytes'] / 1e9:.4g} GB sent a device and step, {sent['times']:,} times, "
            f"{sent['seconds'] * 1e3:.3g} ms"
        )
    link = f"{chip.link_bandwidth / 1e9:g} GB/s a link"
    lines.append(
        f"  roofline: compute {times['compute_seconds'] * 1e3:.3g} ms at {times['peak_flops'] / 1e12:g} TFLOP/s, "
        f"memory {times['memory_seconds'] * 1e3:.3g} ms at {chip.memory_bandwidth / 1e9:g} GB/s, "
        f"network {times['network_seconds'] * 1e3:.3g} ms at {link}"
    )
    lines.append(
        f"  a step: {phase['expected_step_seconds'] * 1e3:.3g} ms expected "
        f"({phase['expected_tokens_per_second']:,.0f} tokens/s), at least "
        f"{times['step_seconds'] * 1e3:.3g} ms ({times['bound']})"
    )
    return lines
