"""README.md and growth.svg from results.jsonl, and from gpu.jsonl."""

import json
import pathlib
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import gpu
import numpy as np
from cases import CASES

from bert_jax import files

HERE = pathlib.Path(__file__).parent
Line = dict[str, Any]
# Calibrations of a case that are farther apart than this are of a machine that did other work too.
NOISY = 1.25
# What is counted, and by how much it is divided.
UNITS = {
    "real_tokens": ("real tokens/s", 1),
    "padded_tokens": ("padded tokens/s", 1),
    "examples": ("examples/s", 1),
    "texts": ("texts/s", 1),
    "text_bytes": ("MB of text/s", 1e6),
    "bytes": ("MB/s", 1e6),
    "rows": ("rows/s", 1),
}
BLOCKS = {
    "pretrain": [name for name in CASES if name.startswith("pretrain-")],
    "finetune": [name for name in CASES if name.startswith("finetune-")],
    "embed": ["embed"],
    "input": ["prepare", "loader"],
    "start": ["start", "compile", "help"],
    "disk": ["save", "restore", "stall"],
    "parts": ["host", "guard", "memory", "products", "layers", "dropout", "activation"],
}
GROWTH = {
    "grow-batch": "tokens a step",
    "grow-layers": "layers",
    "grow-hidden": "hidden size",
    "grow-tokens": "T, at 2,048 tokens a step",
    "grow-devices": "virtual devices on the same cores",
    "grow-corpus": "files of text",
}
# Of the parts' cost there are promises: CheckpointConfig.every_steps, and steps that compute nothing.
SAVED_EVERY_STEPS, HOST_MICROSECONDS, STALL, LOADER_TIMES = 1_000, 300, 0.02, 10
COLD_SECONDS, CACHED_SECONDS = 25, 3
# And of real tokens a second, beside a peer's.
TIMES = {
    ("pretrain-mini-128", "transformers"): 2.0,
    ("pretrain-mini-128", "torch.compile"): 1.6,
    ("pretrain-mini-128", "gathered, packed"): 1.0,
    ("pretrain-base-128", "transformers"): 1.3,
    ("pretrain-base-128", "torch.compile"): 1.3,
    ("pretrain-base-128", "gathered, packed"): 1.0,
}

# What the project's own page tells: of some cases how they are beside a contender.
_MODELS = [f"pretrain-{size}-{tokens}" for tokens in (128, 512) for size in ("mini", "base")]
_SETS = [f"finetune-{name}" for name in ("sst2", "qnli", "squad1")]
TOLD = (
    ("pretraining (mini and base at T=128, and at T=512) beside transformers", _MODELS, "transformers"),
    ("beside PyTorch given the same tricks", _MODELS, "gathered, packed"),
    ("fine-tuning (SST-2, QNLI, SQuAD) beside transformers' Trainer", _SETS, "trainer"),
    ("beside Trainer grouping by length", _SETS, "grouped"),
    ("vectors of texts beside transformers sorting by length", ["embed"], "sorted"),
    ("loading rows beside a PyTorch DataLoader that masks too", ["loader"], "DataLoader"),
    ("base's first step, from no process", ["start"], "transformers"),
    ("saving, checksums included, beside torch.save", ["save"], "torch.save"),
    ("restoring beside torch.load", ["restore"], "torch.load"),
)  # fmt: skip


def number(value: float) -> str:
    """Three digits, without exponents."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{number(statistics.median(values))} ({number(min(values))} to {number(max(values))})"


def cost(line: Line, measure: str) -> list[float]:
    """Seconds for one of what a case measures, by turn."""
    if measure == "seconds":
        return line["seconds"]
    return [seconds / count for seconds, count in zip(line["seconds"], line[measure], strict=True)]


def ratios(line: Line, reference: Line, measure: str) -> list[float]:
    """So many times as fast as `line` is the reference, by the pairs of a round."""
    return [a / b for a, b in zip(cost(line, measure), cost(reference, measure), strict=True)]


def noise(lines: Sequence[Line]) -> float:
    """Of a case's calibrations the 90th percentile over the 10th."""
    low, high = np.percentile([value for line in lines for value in line["calibration"]], (10, 90))
    return float(high / low)


def _shown(line: Line, measure: str) -> str:
    if measure in UNITS:
        _, divisor = UNITS[measure]
        return spread([1 / each / divisor for each in cost(line, measure)])
    if measure == "steps":
        return f"{spread([1e3 * each for each in cost(line, measure)])} ms a step"
    return f"{spread(cost(line, measure))} s"


def table(lines: Sequence[Line], names: Sequence[str]) -> list[str]:
    """A row a contender of the cases; each case's first is what the others are compared with."""
    shown = [name for name in names if any(line["case"] == name for line in lines)]
    if not shown:
        return ["not run"]
    measures = {CASES[name].measure for name in shown}
    title = UNITS[min(measures)][0] if len(measures) == 1 and measures <= UNITS.keys() else ""
    padded = measures <= {"real_tokens", "examples", "texts"}
    found = [
        f"| case | contender | {title} | {'padded tokens/s | ' if padded else ''}the first is so many times as fast |",
        f"|---|---|---|{'---|' if padded else ''}---|",
    ]
    for name in shown:
        own = [line for line in lines if line["case"] == name]
        measure, how = CASES[name].measure, noise(own)
        for line in own:
            rounds = f"{name}, {len(line['seconds'])} rounds"
            cells = [rounds if line is own[0] else "", line["contender"], _shown(line, measure)]
            if not title and measure in UNITS:
                cells[-1] += f" {UNITS[measure][0]}"
            if line is own[0] and how > NOISY:
                cells[0] += f" (noisy: {how:.2f})"
            if padded:
                cells.append(_shown(line, "padded_tokens"))
            same = line is own[0]
            cells.append("" if same else spread(ratios(line, own[0], measure)))
            found.append(f"| {' | '.join(cells)} |")
    return found


def _of(lines: Sequence[Line], case: str, contender: str) -> Line | None:
    found = [x for x in lines if (x["case"], x["contender"]) == (case, contender)]
    return found[0] if found else None


def parts(lines: Sequence[Line]) -> list[str]:
    """Where the time of a step goes, by the profiles of a run each; medians, sums need not agree."""
    found = []
    for line in lines:
        if line["case"] != "profile":
            continue
        tables = line["table"]
        operations, traffic = (
            statistics.median([table[f"measured_{name}_per_second"] for table in tables])
            for name in ("operations", "bytes")
        )
        step = statistics.median([table["step_seconds"] for table in tables])
        reached = statistics.median([t["matrix_operations"] / t["step_seconds"] for t in tables])
        found += [
            f"{line['contender']}: {number(1e3 * step)} ms a step. A large matrix product was measured to "
            f"reach {operations / 1e9:,.0f} GFLOP/s, an array to be read and written at {traffic / 1e9:.3g} GB/s; the step's matrix "
            f"products, by all of its time, {reached / 1e9:,.0f} GFLOP/s, {reached / operations:.0%} of that.",
            "",
            f"| {line['contender']} | ms | share | GFLOP | GB | ms at least | gap |",
            "|---|---|---|---|---|---|---|",
        ]
        for rows in zip(*(table["parts"] for table in tables), strict=True):
            spent = [1e3 * row["seconds"] for row in rows]
            share = statistics.median(
                [row["seconds"] / t["step_seconds"] for row, t in zip(rows, tables, strict=True)]
            )
            computed, moved = rows[0]["operations"], rows[0]["bytes"]
            least = 1e3 * max(computed / operations, moved / traffic)
            cells = [f"{computed / 1e9:.3g}", f"{moved / 1e9:.3g}", f"{least:.3g}"]
            cells.append(f"{statistics.median(spent) - least:.3g}")
            told = " | ".join(cells if computed or moved else [""] * 4)
            found.append(f"| {rows[0]['part']} | {spread(spent)} | {share:.1%} | {told} |")
        found.append("")
    return found[:-1] or ["not run"]


def _promise(lines: Sequence[Line], case: str, what: str, holds: bool) -> str:
    how = noise([line for line in lines if line["case"] == case])
    noisy = f" (noisy: {how:.2f})" if how > NOISY else ""
    return f"- {what}: **{'kept' if holds else 'not kept'}**{noisy}."


def promises(lines: Sequence[Line]) -> list[str]:
    """What this project promises of its parts, each measured and judged; those not run are left out."""
    found = []
    for (case, contender), wanted in TIMES.items():
        if line := _of(lines, case, contender):
            times = ratios(line, _of(lines, case, "bert_jax"), CASES[case].measure)
            found.append(
                _promise(
                    lines,
                    case,
                    f"{case}: {spread(times)} times the real tokens a second of {contender}, wanted "
                    f"{wanted:.1f}",
                    statistics.median(times) >= wanted,
                )
            )
    if line := _of(lines, "loader", "loader"):
        from ours import rows_a_second

        from bert_jax.device import CHIPS

        name, chip = max(CHIPS.items(), key=lambda item: item[1].flops)
        rate = statistics.median([1 / each for each in cost(line, "rows")])
        cores = statistics.median(
            [a / b for a, b in zip(line["processor_seconds"], line["seconds"], strict=True)]
        )
        wanted = rows_a_second(chip.flops)
        found.append(
            _promise(
                lines,
                "loader",
                f"the loader gives {number(rate)} rows a second ({number(rate / cores)} a core, of "
                f"which it keeps {cores:.2g} busy), {number(rate / wanted)} times the "
                f"{number(wanted)} that base takes on the fastest chip of device.py ({name}) used to "
                f"the full; {LOADER_TIMES} times are wanted",
                rate >= LOADER_TIMES * wanted,
            )
        )
    if line := _of(lines, "host", "bert_jax"):
        micro = 1e6 * statistics.median(cost(line, "steps"))
        found.append(
            _promise(
                lines,
                "host",
                f"the loop itself costs {number(micro)} µs a step, wanted below {HOST_MICROSECONDS}",
                micro < HOST_MICROSECONDS,
            )
        )
    without, saving = (_of(lines, "stall", each) for each in ("steps", "steps and a save"))
    if without and saving:
        shares = [
            (b - a) / (SAVED_EVERY_STEPS * a / count)
            for a, b, count in zip(
                without["seconds"], saving["seconds"], without["steps"], strict=True
            )
        ]
        found.append(
            _promise(
                lines,
                "stall",
                f"a save every {SAVED_EVERY_STEPS:,} steps, the default, takes "
                f"{statistics.median(shares):.2%} ({min(shares):.2%} to {max(shares):.2%}) of mini's "
                f"time, wanted below {STALL:.0%}",
                statistics.median(shares) < STALL,
            )
        )
    for contender, most in (("cold", COLD_SECONDS), ("cached", CACHED_SECONDS)):
        if line := _of(lines, "compile", contender):
            seconds = statistics.median(line["seconds"])
            found.append(
                _promise(
                    lines,
                    "compile",
                    f"base's training step is made in {seconds:.1f} s {contender} on "
                    f"{line['cores']} cores, wanted below {most}",
                    seconds < most,
                )
            )
    for line in (_of(lines, "memory", each) for each in ("kept", "given back")):
        if line:
            pairs = zip(line["page_faults"], line["steps"], strict=True)
            faults = statistics.median([a / b for a, b in pairs])
            found.append(f"- Memory {line['contender']}: {number(faults)} page faults a step.")
    return found or ["not run"]


def conditions(lines: Sequence[Line]) -> list[str]:
    """The machine, and whether it was quiet."""
    if not lines:
        return ["not run"]
    about: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        commits = about.setdefault(_machine(line), {})
        commits.setdefault(line["commit"], []).append(line["case"])
    loads = [value for line in lines for value in line["load"]]
    cases = dict.fromkeys(line["case"] for line in lines)
    bad = {name: noise([x for x in lines if x["case"] == name]) for name in cases}
    bad = {name: how for name, how in bad.items() if how > NOISY}
    told = []
    for machine, commits in about.items():
        each = (
            f"{', '.join(dict.fromkeys(own))} (commit {commit})" for commit, own in commits.items()
        )
        told.append(f"- {machine}: {'; '.join(each)}.")
    told.append("")
    told.append(
        f"Load averages before a turn were {min(loads):.2f} to {max(loads):.2f}, the contenders' own "
        "work included."
    )
    if bad:
        each = ", ".join(f"{name} ({how:.2f})" for name, how in bad.items())
        told.append(
            f"**Noisy**, of the times of the fixed piece of work the 90th percentile being more than "
            f"{NOISY} times the 10th: {each}."
        )
    return told


def summary(lines: Sequence[Line]) -> str:
    """How many times as fast as its peers this project is, wherever it is ahead or behind."""
    found = []
    for what, names, contender in TOLD:
        times = []
        for name in names:
            if line := _of(lines, name, contender):
                first = _of(lines, name, next(iter(CASES[name].contenders)))
                times.append(statistics.median(ratios(line, first, CASES[name].measure)))
        if times:
            found.append(f"{what} {', '.join(f'{each:.2g}' for each in times)}")
    return "; ".join(found)


def _machine(line: Line) -> str:
    names = ("python", "jax", "torch", "transformers", "datasets")
    versions = ", ".join(f"{name} {line[name]}" for name in names if line.get(name))
    return f"{line['cores']} cores ({line['processor']}), {versions}"


def growth(lines: Sequence[Line], folder: pathlib.Path) -> list[str]:
    """Draws what a step takes against what there is of something."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not any(line["case"] in GROWTH for line in lines):
        return ["not run"]
    with rc_context({"svg.hashsalt": "bert_jax"}):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        for axis, (name, label) in zip(figure.subplots(2, 3).flat, GROWTH.items(), strict=True):
            own = [line for line in lines if line["case"] == name]
            times = [[1e3 * each for each in cost(line, "steps")] for line in own]
            x, y = [int(line["contender"]) for line in own], list(map(statistics.median, times))
            below = [m - min(each) for m, each in zip(y, times, strict=True)]
            above = [max(each) - m for m, each in zip(y, times, strict=True)]
            if own:
                axis.errorbar(x, y, yerr=[below, above], marker="o", ms=3, lw=1, capsize=2)
                # Where twice as much takes twice as long, the curve is as steep as this.
                straight = [y[-1] * each / x[-1] for each in x]
                axis.plot(x, straight, color="gray", lw=0.8, ls=":", label="in proportion")
                axis.loglog()
                axis.set_xticks(x, [line["contender"] for line in own])
                axis.minorticks_off()
                axis.legend(frameon=False, fontsize="small")
            axis.set(xlabel=label, ylabel="ms a step")
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        with files.replacing(folder / "growth.svg") as beside:
            figure.savefig(beside, format="svg", metadata={"Date": None})
    return ["![ms a step](growth.svg)", "", *table(lines, list(GROWTH))]


def page(text: str, lines: Sequence[Line], folder: pathlib.Path) -> str:
    """A page with what stands between `<!-- NAME -->` and `<!-- /NAME -->` written anew.

    Args:
        text: of the page as it is.
        lines: of results.jsonl.
        folder: that pictures are written to.
    """
    makers: dict[str, Callable[[], list[str]]] = {
        "conditions": lambda: conditions(lines),
        "promises": lambda: promises(lines),
        "profile": lambda: parts(lines),
        "growth": lambda: growth(lines, folder),
        "gpu": lambda: gpu.table(gpu.read(HERE / gpu.RESULTS)).splitlines(),
        **{block: lambda names=names: table(lines, names) for block, names in BLOCKS.items()},
    }
    for name, make in makers.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the page has no block {name}")
        text = f"{before}{begin}{chr(10).join(make())}\n{end}{after}"
    return text


def front(text: str, lines: Sequence[Line]) -> str:
    """The project's own page with its sentence between `<!-- speed -->` and `<!-- /speed -->`."""
    return re.sub(
        "(<!-- speed -->).*(<!-- /speed -->)", lambda m: m[1] + summary(lines) + m[2], text
    )


def write() -> None:
    """README.md and growth.svg anew, and the sentence of the project's own page."""
    lines = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines()]
    path = HERE / "README.md"
    files.write(path, page(path.read_text(), lines, HERE))
    path = HERE.parent.parent / "README.md"
    files.write(path, front(path.read_text(), lines))
