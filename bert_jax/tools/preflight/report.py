"""The text of an estimate."""

from typing import Any

from bert_jax.runtime.chips import Chip, find


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
