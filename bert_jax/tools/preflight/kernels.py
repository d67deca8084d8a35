"""Expected time of a step by its kernels, and what in the model they come from."""

from collections.abc import Sequence
from typing import Any

from bert_jax.runtime.chips import Chip, speed
from bert_jax.tools.preflight.hlo import Kernel

KINDS = ("products", "attention", "other", "collectives")


def seconds(kernel: Kernel, chip: Chip, passes: int) -> float:
    """Return the expected time of all executions of a kernel; 0 for collectives.

    On TPUs this is the compiler's own estimate; it has none for copies, which overlap with the
    computation. All kernels on GPUs, and attention kernels, for which TPU compilers have no estimate
    either, take the longer of products and traffic at the speed of `chips.speed`. `passes` is that of
    `expected_seconds`.
    """
    if kernel.kind == "collectives":
        return 0.0
    if chip.clock_hz and kernel.kind != "attention":
        return (kernel.cycles or 0) / chip.clock_hz
    rates, _ = speed(chip)
    return rates.factors[kernel.kind] * max(
        kernel.flops * passes / rates.flops, kernel.bytes / rates.bandwidth
    )


def expected_seconds(kernels: Sequence[Kernel], chip: Chip, passes: int, network: float) -> float:
    """Return the expected time of a step, in which kernels and the network do not overlap.

    Args:
        kernels: the kernels of its program.
        chip: the device.
        passes: by how much products are slower than in bfloat16: 2 for TF32 on a GPU, else 1.
        network: time of all collectives.
    """
    overhead = 0.0 if chip.is_tpu else speed(chip)[0].overhead_seconds
    return sum(seconds(kernel, chip, passes) for kernel in kernels) + overhead + network


def by_source(kernels: Sequence[Kernel], chip: Chip, passes: int) -> list[dict[str, Any]]:
    """Return kernels of one kind, source and result together, those of most traffic first."""
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for kernel in kernels:
        group = groups.setdefault(
            kernel[:3],
            {
                **dict(zip(("kind", "source", "shape"), kernel[:3], strict=True)),
                **dict.fromkeys(("times", "flops", "bytes", "seconds"), 0),
            },
        )
        group["times"] += kernel.times
        group["flops"] += kernel.flops
        group["bytes"] += kernel.bytes
        group["seconds"] += seconds(kernel, chip, passes)
    return sorted(groups.values(), key=lambda group: -group["bytes"])


def format_sources(
    groups: list[dict[str, Any]], before: list[dict[str, Any]] | None, count: int
) -> list[str]:
    """Return lines with the totals by kind, and the sources of most traffic.

    Args:
        groups: as `by_source` returns them.
        before: those of an earlier step, to compare with; then the sources are those of most change.
        count: number of sources.
    """
    lines = [f"  {'kernels':<14}{'number':>8}{'GB moved':>10}{'TFLOP':>8}{'ms':>8}"]
    for kind in KINDS:
        lines.append(f"    {kind:<12}{_totals(groups, kind)}")
        if before is not None:
            lines.append(f"      {'before':<10}{_totals(before, kind)}")
    if before is None:
        lines.append(f"  sources of most traffic ({min(count, len(groups))} of {len(groups)})")
        return lines + [_line(group) for group in groups[:count]]
    changes: dict[tuple[str, str, str], dict[str, Any]] = {}
    for sign, part in ((1, groups), (-1, before)):
        for group in part:
            zero = {**group, "bytes": 0, "seconds": 0}
            change = changes.setdefault((group["kind"], group["source"], group["shape"]), zero)
            for name in ("bytes", "seconds"):
                change[name] += sign * group[name]
    changed = sorted(
        (change for change in changes.values() if change["bytes"]),
        key=lambda change: -abs(change["bytes"]),
    )
    lines.append(f"  sources of most change ({min(count, len(changed))} of {len(changed)})")
    return lines + [_line(group) for group in changed[:count]]


def _totals(groups: list[dict[str, Any]], kind: str) -> str:
    times, moved, flops, time = (
        sum(group[name] for group in groups if group["kind"] == kind)
        for name in ("times", "bytes", "flops", "seconds")
    )
    return f"{times:>8,}{moved / 1e9:>10.2f}{flops / 1e12:>8.2f}{time * 1e3:>8.2f}"


def _line(group: dict[str, Any]) -> str:
    return (
        f"    {group['bytes'] / 1e9:>8.2f} GB {group['seconds'] * 1e3:>7.2f} ms {group['times']:>4} x "
        f"{group['source']}: {group['shape']}"
    )
