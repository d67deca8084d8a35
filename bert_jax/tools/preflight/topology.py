"""Topologies: chips, the links between them, and the time that collectives take."""

import collections
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.errors import UserError
from bert_jax.runtime.chips import CHIPS, Chip
from bert_jax.tools.preflight.hlo import Collective

GPUS_A_NODE = 8
# Maximum length of an axis of a TPU slice with two axes.
_LONGEST = 16


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
