"""The text of an estimate."""

from typing import Any

from bert_jax.errors import install_command
from bert_jax.runtime.chips import Chip, find
from bert_jax.tools.preflight.kernels import format_sources


def format_report(
    report: dict[str, Any], explain: int = 0, before: dict[str, Any] | None = None
) -> str:
    """Format the result of `preflight` as text.

    Args:
        report: the result.
        explain: number of sources of traffic to list for each compiled phase.
        before: an earlier result for the same topology, to compare with.
    """
    chip = find(report["device"])
    assert chip
    mesh = ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    per_chip = report["devices"] // report["chips"]
    several = f" of {per_chip} devices" if per_chip > 1 else ""
    lines = [
        f"{report['topology']}: {report['chips']:,} x {report['device']}{several}, mesh {mesh}; "
        f"{report['parameters']:,} parameters",
        f"{report['dtype']}; {report['attention']}",
    ]
    if report["vocab_size_assumed"]:
        lines.append(f"assumed: a vocabulary of {report['vocab_size']:,}, since no rows are given")
    if not report["has_compiler"]:
        lines.append(
            "formulas are used: compiling for GPUs (up to 8, or nodes of 8) needs Python 3.12 or newer and "
            f"{install_command('gpu-compile')}, but no GPU"
        )
    for i, phase in enumerate(report["phases"]):
        lines += ["", *_phase_lines(i, phase, chip)]
        if explain and phase["kernels"]:
            earlier = before["phases"][i] if before and i < len(before["phases"]) else None
            if earlier:
                size = _size(earlier["memory"]["temporaries"])
                lines.append(f"  before: {size} of temporaries")
            lines += format_sources(phase["kernels"], earlier and earlier["kernels"], explain)
    lines.append("")
    for name, prefix in (("expected", "expected_"), ("at least", "")):
        hours, chip_hours, dollars = (
            report[f"{prefix}{key}"] for key in ("hours", "chip_hours", "dollars")
        )
        price = "" if dollars is None else f", {dollars:,.2f} dollars"
        lines.append(f"total, {name}: {hours:,.2f} hours, {chip_hours:,.1f} chip-hours{price}")
    methods = {phase["method"] for phase in report["phases"]}
    if "compiled" in methods:
        lines.append(f"expected of compiled steps: {_speed_line(report, chip)}")
    if "formula" in methods:
        used = report["utilization"]
        source = f"{'ASSUMED from' if used['assumed'] else 'as in'} {used['measured']}"
        lines.append(f"expected by formula: {used['share']:.0%} of the peak, {source}")
    return "\n".join([*lines, f"data sheet: {report['source']}"])


def _speed_line(report: dict[str, Any], chip: Chip) -> str:
    source = report["speed"]["measured"]
    if chip.clock_hz:
        return f"PREDICTED by its compiler at {chip.clock_hz / 1e9:g} GHz (attention kernels as on an H100), never timed"
    if report["speed"]["assumed"]:
        return f"PREDICTED, never timed: the data sheet's share that kernels reach on another chip, {source}"
    return f"the sum of its kernels at measured speed, {source}"


def _size(count: int | float) -> str:
    power = 2 if count < 2**30 else 3
    return f"{count / 1024**power:,.2f} {'MiB' if power == 2 else 'GiB'}"


def _phase_lines(i: int, phase: dict[str, Any], chip: Chip) -> list[str]:
    memory, flops, times = phase["memory"], phase["flops"], phase["roofline"]
    how, counted = "BY FORMULA, not compiled", ""
    if phase["method"] == "compiled":
        how = f"compiled in {phase['compile_seconds']:.0f} s"
        counted = f", compiled {flops['compiled']:.4g}"
    elif phase["rejected"]:
        how = "BY FORMULA: the compiler rejects a program that does not fit"
    if flops["cost_analysis"]:
        counted += f" (XLA's cost analysis, which counts loops once: {flops['cost_analysis']:.4g})"
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
    total, capacity = _size(memory["total"]), _size(memory["capacity"])
    lines.append(f"    {'total':14} {total:>12} of {capacity}: {verdict}")
    if change := phase["would_fit"]:
        size = _size(change["total"])
        lines.append(f"    by estimate {change['arguments']} would fit, with {size}")
    elif not phase["fits"]:
        lines.append("    by estimate no remat, accumulation or fsdp would fit: use more chips")
    lines.append(f"  FLOPs per device and step: formula {flops['formula']:.4g}{counted}")
    for kind, sent in sorted(phase["collectives"].items()):
        lines.append(
            f"  {kind}: {sent['bytes'] / 1e9:.4g} GB sent per device and step, {sent['times']:,} times, "
            f"{sent['seconds'] * 1e3:.3g} ms"
        )
    compute, memory_time, network, step = (
        f"{times[f'{name}_seconds'] * 1e3:.3g} ms"
        for name in ("compute", "memory", "network", "step")
    )
    return [
        *lines,
        f"  roofline: compute {compute} at {times['peak_flops'] / 1e12:g} TFLOP/s, memory {memory_time} "
        f"at {chip.memory_bandwidth / 1e9:g} GB/s, network {network} at {chip.link_bandwidth / 1e9:g} "
        "GB/s per link",
        f"  step: {phase['expected_step_seconds'] * 1e3:.3g} ms expected "
        f"({phase['expected_tokens_per_second']:,.0f} tokens/s), at least {step} ({times['bound']})",
    ]
