"""Topologies of accelerators: the values of `preflight --topology` and `launch --accelerator`."""

import math
import re
from typing import NamedTuple

from bert_jax.errors import UserError
from bert_jax.runtime.chips import CHIPS, LONGEST_AXIS, Chip


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
