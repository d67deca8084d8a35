"""Topologies: chips, the links between them, and the time that collectives take."""

import collections
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from bert_jax.errors import UserError
from bert_jax.runtime.chips import CHIPS, GPUS_A_NODE, LONGEST_AXIS, Chip
from bert_jax.tools.preflight.hlo import Collective

# A device's island (its slice or node), and its coordinates in the slice; () for GPUs, which are
# linked to a switch.
Location = tuple[int, tuple[int, ...]]


class Topology(NamedTuple):
    """A number of chips and the links between them.

    Attributes:
        kind: a key of `CHIPS`.
        shape: shape of a slice, in chips.
        slices: number of slices, connected by the data center network; 1 for GPUs.
    """

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """The topology as a value of `--topology`."""
        several = f",slices={self.slices}" if self.slices > 1 else ""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}{several}"

    @property
    def chip(self) -> Chip:
        """Data sheet of a device."""
        return CHIPS[self.kind]

    @property
    def is_tpu(self) -> bool:
        """Whether these are TPUs."""
        return self.chip.is_tpu

    @property
    def chips(self) -> int:
        """Number of chips in all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """Number of JAX devices in all slices."""
        return self.chips * self.chip.devices


def slice_shape(kind: str, count: int) -> tuple[int, ...] | None:
    """Return the shape in chips of an accelerator type such as `v5e-16` or `v5p-8`.

    Axes are ascending powers of 2, as equal as possible, as Google lists them; 4 chips on three axes
    are 2x2x1. Returns None if there is no such slice.
    """
    axes, (chips, rest) = CHIPS[kind].axes, divmod(count, CHIPS[kind].cores)
    power = chips.bit_length() - 1
    if axes == 1 or rest or chips != 1 << max(power, 0) or (axes == 3 and chips < 4) or chips == 2:
        return None
    if axes == 3 and chips == 4:
        return (2, 2, 1)
    return tuple(1 << power // axes + (i >= axes - power % axes) for i in range(axes))


def parse_topology(text: str) -> Topology:
    """Parse `v5p:4x4x4`, `v5e:16x16,slices=4`, `h100:64`, or an accelerator type such as `v5e-16`."""
    match = re.fullmatch(r"(?:tpu-)?(\w+)(?::(\d+(?:x\d+)*)|-(\d+))(?:,slices=(\d+))?", text)
    kind, sizes, count, several = match.groups() if match else ("", "", "", "")
    kind, shape, slices = kind.replace("v5litepod", "v5e"), None, int(several or 1)
    if kind in CHIPS:
        shape = tuple(map(int, sizes.split("x"))) if sizes else slice_shape(kind, int(count))
    if not shape or len(shape) != CHIPS[kind].axes or 0 in shape or not slices:
        known = ", ".join(chip.example for chip in CHIPS.values())
        raise UserError(
            f"unknown topology {text!r}: use a shape like {known}, several slices like "
            "v5e:16x16,slices=4, or an accelerator type like v5e-16, v5p-8 or v6e-8"
        )
    topology = Topology(kind, shape, slices)
    if topology.chip.axes == 2 and max(shape) > LONGEST_AXIS:
        largest = f"{LONGEST_AXIS}x{LONGEST_AXIS}"
        needed = max(-(-math.prod(shape) // LONGEST_AXIS**2), 2)
        raise UserError(
            f"topology {text!r}: a {kind} slice is at most {largest}; "
            f"use several, {kind}:{largest},slices={needed}"
        )
    if topology.slices > 1 and (not topology.is_tpu or not topology.chip.network_bandwidth):
        raise UserError(f"topology {text!r}: {kind} does not support slices; remove them")
    return topology


def locations(topology: Topology, devices: Iterable[Any]) -> list[Location]:
    """Return the locations of all devices in mesh order, that of `devices` (not read for GPUs)."""
    if not topology.is_tpu:
        return [(i // GPUS_A_NODE, ()) for i in range(topology.devices)]
    axes = len(topology.shape)
    return [(getattr(d, "slice_index", None) or 0, tuple(d.coords[:axes])) for d in devices]


def network_seconds(topology: Topology, devices: list[Location], collective: Collective) -> float:
    """Return the minimum time of a collective: over all links within islands, then between islands.

    An all-reduce over n chips sends 2 (n-1)/n of the array over the links of the axes that the group
    spans, two links on a ring (Austin et al., "How to Scale Your Model", section 3). Between islands,
    each chip sends its share of the island's part.
    """
    group = [devices[i] for i in collective.group]
    ((largest, inside), *others) = collections.Counter(island for island, _ in group).most_common()
    passes = 2 if collective.kind == "all-reduce" else 1
    seconds = 0.0
    if inside > 1:
        coordinates = [place for island, place in group if island == largest]
        links = 0
        for size, places in zip(topology.shape, zip(*coordinates, strict=True), strict=False):
            extent = len({*places})
            # With three axes, all are rings if all are multiples of 4.
            wraps = size == LONGEST_AXIS
            if len(topology.shape) == 3:
                wraps = all(length % 4 == 0 for length in topology.shape)
            links += (2 if wraps and extent == size > 2 else 1) if extent > 1 else 0
        share = 1.0 if collective.kind == "collective-permute" else passes * (inside - 1) / inside
        seconds += share * collective.bytes / (max(links, 1) * topology.chip.link_bandwidth)
    if others:
        share = passes * len(others) / (len(others) + 1)
        seconds += share * collective.bytes / inside / topology.chip.network_bandwidth
    return seconds * collective.times
