"""Where the devices of a topology are, and the time that collectives take between them."""

import collections
import itertools
from collections.abc import Iterable
from typing import Any

from bert_jax.runtime.chips import GPUS_A_NODE, LONGEST_AXIS
from bert_jax.runtime.topology import Topology
from bert_jax.tools.preflight.hlo import Collective

# A device's island (its slice or node), and its coordinates in the slice; () for GPUs, which are
# linked to a switch.
Location = tuple[int, tuple[int, ...]]


def locations(topology: Topology, devices: Iterable[Any]) -> list[Location]:
    """Return the locations of all devices in mesh order, that of `devices` (not read for GPUs).

    Those of TPUs without a compiler, which have none, are in the order of their coordinates.
    """
    if not topology.is_tpu:
        return [(i // GPUS_A_NODE, ()) for i in range(topology.devices)]
    devices = list(devices)
    if not devices:
        axes = [range(size) for size in (topology.slices, *topology.shape, topology.chip.devices)]
        return [(at[0], at[1:-1]) for at in itertools.product(*axes)]
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
