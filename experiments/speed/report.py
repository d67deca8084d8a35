"""Write README.md and growth.svg from the files of results (*.jsonl)."""

import json
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from cases import CASES

from bert_jax.storage import files

HERE = pathlib.Path(__file__).parent
Line = dict[str, Any]
# A case is noisy if the 90th percentile of its calibrations exceeds the 10th by this factor.
NOISY = 1.25
# Unit and divisor of each count.
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
# Targets of components. Saves are those of CheckpointConfig.every_steps.
SAVED_EVERY_STEPS, HOST_MICROSECONDS, STALL, LOADER_TIMES = 1_000, 300, 0.02, 10
COLD_SECONDS, CACHED_SECONDS = 25, 3
# Targets of real tokens/s relative to a peer.
TIMES = {
    ("pretrain-mini-128", "transformers"): 2.0,
    ("pretrain-mini-128", "torch.compile"): 1.6,
    ("pretrain-mini-128", "gathered, packed"): 1.0,
    ("pretrain-base-128", "transformers"): 1.3,
    ("pretrain-base-128", "torch.compile"): 1.3,
    ("pretrain-base-128", "gathered, packed"): 1.0,
}


class Comparison(NamedTuple):
    """A row of the table in docs/speed.md.

    Attributes:
        workload: what is measured.
        case: name of the case.
        contender: name of the contender that is the baseline.
        baseline: name of the baseline in the table.
        variant: name of the contender that is bert_jax; "" for the case's first.
    """

    workload: str
    case: str
    contender: str
    baseline: str
    variant: str = ""


PACKED = "PyTorch, packed, logits of masked tokens only"
FRONT = (
    *(
        Comparison(f"pretraining, {size}, T={tokens}", f"pretrain-{size}-{tokens}", name, baseline)
        for tokens in (128, 512)
        for size in ("teaching", "mini", "base")
        for name, baseline in (("transformers", "transformers"), ("gathered, packed", PACKED))
    ),
    *(
        Comparison(f"fine-tuning, {name}", f"finetune-{case}", contender, baseline)
        for name, case in (("SST-2", "sst2"), ("QNLI", "qnli"), ("SQuAD 1.1", "squad1"))
        for contender, baseline in (
            ("trainer", "transformers Trainer"),
            ("grouped", "Trainer, batches grouped by length"),
        )
    ),
    Comparison(
        "text embedding, MiniLM-L6", "embed", "sorted", "transformers, texts sorted by length"
    ),
    Comparison("loading rows", "loader", "DataLoader", "PyTorch DataLoader with masking"),
    Comparison("first step of base, cached program", "start", "transformers", "transformers"),
    Comparison("first step of base, cold start", "start", "transformers", "transformers", "cold"),
    Comparison("saving a checkpoint with checksums", "save", "torch.save", "torch.save"),
    Comparison("restoring a checkpoint", "restore", "torch.load", "torch.load"),
)


def number(value: float) -> str:
    """Format a number with three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Return the median with the range, or the only value."""
    if len(values) == 1:
        return number(values[0])
    return f"{number(statistics.median(values))} ({number(min(values))} to {number(max(values))})"


def cost(line: Line, measure: str) -> list[float]:
    """Return the seconds per item of each turn."""
    if measure == "seconds":
        return line["seconds"]
    return [seconds / count for seconds, count in zip(line["seconds"], line[measure], strict=True)]


def ratios(line: Line, reference: Line, measure: str) -> list[float]:
    """Return the speed-up of `line` over the reference in each round."""
    return [a / b for a, b in zip(cost(line, measure), cost(reference, measure), strict=True)]


def noise(lines: Sequence[Line]) -> float:
    """Return the ratio of the 90th to the 10th percentile of a case's calibrations."""
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
    """Return a table with a row per contender, compared with the first one of each case."""
    shown = [name for name in names if any(line["case"] == name for line in lines)]
    if not shown:
        return ["not run"]
    measures = {CASES[name].measure for name in shown}
    title = UNITS[min(measures)][0] if len(measures) == 1 and measures <= UNITS.keys() else ""
    padded = measures <= {"real_tokens", "examples", "texts"}
    table_lines = [
        f"| case | contender | {title} | {'padded tokens/s | ' if padded else ''}speed-up of the first |",
        f"|---|---|---|{'---|' if padded else ''}---|",
    ]
    for name in shown:
        case_lines = [line for line in lines if line["case"] == name]
        measure, noisiness = CASES[name].measure, noise(case_lines)
        for line in case_lines:
            rounds = f"{name}, {len(line['seconds'])} rounds"
            is_first = line is case_lines[0]
            cells = [rounds if is_first else "", line["contender"], _shown(line, measure)]
            if not title and measure in UNITS:
                cells[-1] += f" {UNITS[measure][0]}"
            if is_first and noisiness > NOISY:
                cells[0] += f" (noisy: {noisiness:.2f})"
            if padded:
                cells.append(_shown(line, "padded_tokens"))
            cells.append("" if is_first else spread(ratios(line, case_lines[0], measure)))
            table_lines.append(f"| {' | '.join(cells)} |")
    return table_lines


def _of(lines: Sequence[Line], case: str, contender: str) -> Line | None:
    matches = [x for x in lines if (x["case"], x["contender"]) == (case, contender)]
    return matches[0] if matches else None


def parts(lines: Sequence[Line]) -> list[str]:
    """Return the time of a step by part, as medians over profiles of separate runs."""
    shown = []
    for line in lines:
        if line["case"] != "profile":
            continue
        tables = line["table"]
        step = statistics.median([table["step_seconds"] for table in tables])
        shown += [
            f"{line['contender']}: {number(1e3 * step)} ms a step.",
            "",
            f"| {line['contender']} | ms | share |",
            "|---|---|---|",
        ]
        for rows in zip(*(table["parts"] for table in tables), strict=True):
            spent = [1e3 * row["seconds"] for row in rows]
            share = statistics.median(
                [row["seconds"] / t["step_seconds"] for row, t in zip(rows, tables, strict=True)]
            )
            shown.append(f"| {rows[0]['part']} | {spread(spent)} | {share:.1%} |")
        shown.append("")
    return shown[:-1] or ["not run"]


def _target(lines: Sequence[Line], case: str, what: str, is_met: bool) -> str:
    noisiness = noise([line for line in lines if line["case"] == case])
    noisy = f" (noisy: {noisiness:.2f})" if noisiness > NOISY else ""
    return f"- {what}: **{'met' if is_met else 'not met'}**{noisy}."


def targets(lines: Sequence[Line]) -> list[str]:
    """Return the targets of the components with their measurements; skip those that were not run."""
    shown = []
    for (case, contender), target in TIMES.items():
        if line := _of(lines, case, contender):
            times = ratios(line, _of(lines, case, "bert_jax"), CASES[case].measure)
            shown.append(
                _target(
                    lines,
                    case,
                    f"{case}: {spread(times)} times the real tokens a second of {contender}, target "
                    f"{target:.1f}",
                    statistics.median(times) >= target,
                )
            )
    if line := _of(lines, "loader", "loader"):
        from ours import rows_a_second

        from bert_jax.runtime.chips import CHIPS

        chip = max(CHIPS.values(), key=lambda chip: chip.flops)
        rate = statistics.median([1 / each for each in cost(line, "rows")])
        cores = statistics.median(
            [a / b for a, b in zip(line["processor_seconds"], line["seconds"], strict=True)]
        )
        target = rows_a_second(chip.flops)
        shown.append(
            _target(
                lines,
                "loader",
                f"the loader reads {number(rate)} rows a second ({number(rate / cores)} per core, with "
                f"{cores:.2g} cores busy), {number(rate / target)} times the {number(target)} that base "
                f"would process at the peak of the fastest chip in chips.py ({chip.device_kinds[0]}), target "
                f"{LOADER_TIMES} times",
                rate >= LOADER_TIMES * target,
            )
        )
    if line := _of(lines, "host", "bert_jax"):
        micro = 1e6 * statistics.median(cost(line, "steps"))
        shown.append(
            _target(
                lines,
                "host",
                f"the loop itself costs {number(micro)} µs a step, target below {HOST_MICROSECONDS}",
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
        shown.append(
            _target(
                lines,
                "stall",
                f"a save every {SAVED_EVERY_STEPS:,} steps, the default, takes "
                f"{statistics.median(shares):.2%} ({min(shares):.2%} to {max(shares):.2%}) of mini's "
                f"time, target below {STALL:.0%}",
                statistics.median(shares) < STALL,
            )
        )
    for contender, limit in (("cold", COLD_SECONDS), ("cached", CACHED_SECONDS)):
        if line := _of(lines, "compile", contender):
            seconds = statistics.median(line["seconds"])
            shown.append(
                _target(
                    lines,
                    "compile",
                    f"base's training step compiles in {seconds:.1f} s ({contender}) on "
                    f"{line['cores']} cores, target below {limit} s",
                    seconds < limit,
                )
            )
    for line in (_of(lines, "memory", each) for each in ("kept", "given back")):
        if line:
            pairs = zip(line["page_faults"], line["steps"], strict=True)
            faults = statistics.median([a / b for a, b in pairs])
            shown.append(f"- Memory {line['contender']}: {number(faults)} page faults a step.")
    return shown or ["not run"]


def conditions(lines: Sequence[Line]) -> list[str]:
    """Describe the machines, the commits and the noise."""
    if not lines:
        return ["not run"]
    about: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        commits = about.setdefault(_machine(line), {})
        commits.setdefault(line["commit"], []).append(line["case"])
    loads = [value for line in lines for value in line["load"]]
    cases = dict.fromkeys(line["case"] for line in lines)
    noisy = {name: noise([x for x in lines if x["case"] == name]) for name in cases}
    noisy = {name: ratio for name, ratio in noisy.items() if ratio > NOISY}
    shown = []
    for machine, commits in about.items():
        each = (
            f"{', '.join(dict.fromkeys(names))} (commit {commit})"
            for commit, names in commits.items()
        )
        shown.append(f"- {machine}: {'; '.join(each)}.")
    shown.append("")
    shown.append(
        f"Load averages before a turn: {min(loads):.2f} to {max(loads):.2f}, including the contenders' "
        "own work."
    )
    if noisy:
        each = ", ".join(f"{name} ({ratio:.2f})" for name, ratio in noisy.items())
        shown.append(
            f"**Noisy** cases, where the 90th percentile of the calibration times is more than {NOISY} "
            f"times the 10th: {each}."
        )
    return shown


def speed_up(lines: Sequence[Line], comparison: Comparison) -> tuple[Line | None, float]:
    """Return bert_jax's line and its median speed-up; None and 0 if it was not run."""
    case = CASES[comparison.case]
    baseline = _of(lines, comparison.case, comparison.contender)
    line = _of(lines, comparison.case, comparison.variant or next(iter(case.contenders)))
    if line is None or baseline is None:
        return None, 0.0
    return line, statistics.median(ratios(baseline, line, case.measure))


def summary(lines: Sequence[Line]) -> list[str]:
    """Return the table of docs/speed.md: median speed-up over each baseline."""
    rows = []
    for comparison in FRONT:
        line, times = speed_up(lines, comparison)
        if line is not None:
            hardware = f"{line['cores']} CPU cores ({line['processor']})"
            cells = (comparison.workload, comparison.baseline, f"{times:.2g}", hardware)
            rows.append(f"| {' | '.join(cells)} |")
    return ["| workload | baseline | speed-up | hardware |", "|---|---|---|---|", *rows]


def _machine(line: Line) -> str:
    names = ("python", "jax", "torch", "transformers", "datasets")
    versions = ", ".join(f"{name} {line[name]}" for name in names if line.get(name))
    return f"{line['cores']} cores ({line['processor']}), {versions}"


def growth(lines: Sequence[Line], folder: pathlib.Path) -> list[str]:
    """Draw the time of a step against the size of an input."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not any(line["case"] in GROWTH for line in lines):
        return ["not run"]
    with rc_context({"svg.hashsalt": "bert_jax"}):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        for axis, (name, label) in zip(figure.subplots(2, 3).flat, GROWTH.items(), strict=True):
            case_lines = [line for line in lines if line["case"] == name]
            times = [[1e3 * each for each in cost(line, "steps")] for line in case_lines]
            x, y = (
                [int(line["contender"]) for line in case_lines],
                list(map(statistics.median, times)),
            )
            below = [m - min(each) for m, each in zip(y, times, strict=True)]
            above = [max(each) - m for m, each in zip(y, times, strict=True)]
            if case_lines:
                axis.errorbar(x, y, yerr=[below, above], marker="o", ms=3, lw=1, capsize=2)
                # The slope of time proportional to size.
                straight = [y[-1] * each / x[-1] for each in x]
                axis.plot(x, straight, color="gray", lw=0.8, ls=":", label="in proportion")
                axis.loglog()
                axis.set_xticks(x, [line["contender"] for line in case_lines])
                axis.minorticks_off()
                axis.legend(frameon=False, fontsize="small")
            axis.set(xlabel=label, ylabel="ms a step")
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        with files.atomic_write(folder / "growth.svg") as beside:
            figure.savefig(beside, format="svg", metadata={"Date": None})
    return ["![ms a step](growth.svg)", "", *table(lines, list(GROWTH))]


def quickstart(lines: Sequence[Line]) -> list[str]:
    """Return the table of quickstart.py."""
    return [
        "| installation, s | quickstart, s | date | commit | machine |",
        "|---|---|---|---|---|",
        *(
            f"| {line['install_seconds']:.0f} | {line['seconds']:.0f} | {line['date']} | "
            f"{line['commit']} | {_machine(line)} |"
            for line in lines
        ),
    ]


# --- On a GPU (gpu.py) ----------------------------------------------------------------------------

# Real tokens/s of a workload as a share of the data sheet's bfloat16 peak, and beside the baseline.
GPU_SHARES, GPU_SPEEDUP = {("base", 128): 0.40, ("large", 512): 0.45}, 1.3
# bfloat16 has 8 bits of mantissa: gradients differ from float32's by a few hundredths. A kernel that
# differs by more than this, or by this many times what XLA's attention does, is wrong.
GPU_WRONG, GPU_WRONG_TIMES = 0.1, 2


def _read(name: str) -> list[Line]:
    path = HERE / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _workload(line: Line) -> tuple[str, int, int]:
    return line["size"], line["tokens"], line["rows"]


def _attention(line: Line) -> str:
    """Return the attention of a line, without its dropout."""
    return f"{line['attention']}{', deterministic' * line.get('deterministic', False)}"


def _wrong(lines: Sequence[Line]) -> set[str]:
    """Return the attentions whose bfloat16 gradients are too far from float32."""
    differences = {
        line["attention"]: line["gradient_difference"]
        for line in lines
        if line["kind"] == "parity" and not line["attention_dropout"] and "status" not in line
    }
    limit = min(GPU_WRONG, GPU_WRONG_TIMES * differences.get("xla", GPU_WRONG))
    return {name for name, difference in differences.items() if difference > limit}


def gpu_section(lines: Sequence[Line]) -> list[str]:
    """Return the section on gpu.py: targets, speed, parity, determinism, profile."""
    kinds: dict[str, list[Line]] = {}
    for line in lines:
        kinds.setdefault(line["kind"], []).append(line)
    top = next((line for line in kinds.get("ceilings", []) if "status" not in line), None)
    if top is None:
        return ["Not run."]
    peak = top["sheet_operations_per_second"]
    sheet = f" (data sheet {peak / 1e12:,.0f})" if peak else ""
    names = {"jax": "JAX", "flax": "Flax", "torch": "PyTorch", "transformers": "transformers"}
    versions = ", ".join(f"{name} {top[key]}" for key, name in names.items() if top.get(key))
    shown = [
        f"One {top['device']}; {versions}; commit {top['commit'] or 'unknown'}. Measured ceilings: "
        f"{top['operations_per_second'] / 1e12:,.4g} TFLOP/s{sheet} for a matrix product in bfloat16, "
        f"{top['bytes_per_second'] / 1e12:,.3g} TB/s for memory.",
        "",
        *_gpu_targets(lines, peak),
        "",
        *_gpu_speeds(lines, peak),
    ]
    if "parity" in kinds:
        shown += [
            "",
            "| bfloat16 against float32 | attention dropout | loss | gradient, worst part |",
        ]
        shown.append("|---|---|---|---|")
        for line in kinds["parity"]:
            cells = [_attention(line), f"{line['attention_dropout']:g}"]
            if "status" in line:
                cells += [line["status"], line["why"]]
            else:
                cells += [f"{line[f'{what}_difference']:.2g}" for what in ("loss", "gradient")]
                cells[-1] += " (**too far**)" * (line["attention"] in _wrong(lines))
            shown.append(f"| {' | '.join(cells)} |")
    if "determinism" in kinds:
        shown += ["", "| determinism: XLA_FLAGS | attention | result |", "|---|---|---|"]
        for line in kinds["determinism"]:
            shown.append(f"| {line['flags']} | {line['attention']} | {line['result']} |")
    for line in kinds.get("pretrain", []):
        shown += ["", *_gpu_run(line)]
    for line in kinds.get("profile", []):
        what = f"{line['size']}, T={line['tokens']}, {_attention(line)}"
        table = {**line, "case": "profile", "contender": what, "table": [line.get("table")]}
        shown += [
            "",
            *([f"Profile of {what}: {line['status']}."] if "status" in line else parts([table])),
        ]
    return shown


def _gpu_targets(lines: Sequence[Line], peak: float | None) -> list[str]:
    """Return a table with a row per target and a column per program, without variants."""
    steps = [
        line
        for line in lines
        if line["kind"] == "step" and not {"status", "variant"} & line.keys()
        and line["attention"] not in _wrong(lines)
    ]  # fmt: skip
    programs = list(dict.fromkeys(line["program"] for line in lines if line["kind"] == "step"))

    def cell(values: list[float], target: float, form: str) -> str:
        if not values:
            return "not run"
        return f"{max(values):{form}}: {'reached' if max(values) >= target else 'not reached'}"

    shown = [f"| target | {' | '.join(programs)} |", f"|---|{'---|' * len(programs)}"]
    title, cells = f"base, T=128: {GPU_SPEEDUP} times the real tokens/s of torch.compile", []
    for program in programs:
        times = [
            time
            for line in steps
            if line["program"] == program and (line["size"], line["tokens"]) == ("base", 128)
            if (time := gpu_speedup(line, lines))
        ]
        cells.append(cell(times, GPU_SPEEDUP, ".2f"))
    shown.append(f"| {title} | {' | '.join(cells)} |")
    for (size, tokens), target in GPU_SHARES.items():
        cells = []
        for program in programs:
            shares = [
                line["real_tokens_per_second"] * line["operations_per_token"] / peak
                for line in steps
                if (line["program"], line["size"], line["tokens"]) == (program, size, tokens)
                and peak
            ]
            cells.append(cell(shares, target, ".1%"))
        shown.append(
            f"| {size}, T={tokens}: {target:.0%} of the bfloat16 peak | {' | '.join(cells)} |"
        )
    return shown


def gpu_speedup(line: Line, lines: Sequence[Line]) -> float | None:
    """Return the real tokens/s relative to the baseline with the same rows."""
    for other in lines:
        if (
            other["kind"] == "torch"
            and "status" not in other
            and _workload(other) == _workload(line)
        ):
            return line["real_tokens_per_second"] / other["real_tokens_per_second"]
    return None


def _gpu_speeds(lines: Sequence[Line], peak: float | None) -> list[str]:
    """Return a table of training steps for each program, and one of its variants."""
    tables: dict[str, list[str]] = {}
    columns = (
        "rows | ms a step | real tokens/s | share of bf16 peak | speed-up over torch.compile |"
    )
    for line in lines:
        if line["kind"] not in ("step", "torch"):
            continue
        cells = [line.get("variant", "")]
        title, head = f"{line['program']}, one change at a time", f"| change | {columns}"
        if "variant" not in line:
            title, head = (
                line["program"],
                f"| workload | layers | attention | attention dropout | {columns}",
            )
            cells = [
                f"{line['size']}, T={line['tokens']}",
                line.get("layer_loop", ""),
                _attention(line),
            ]
            cells.append(f"{line['attention_dropout']:g}")
        cells.append(f"{line['rows']:,}")
        if "status" in line:
            cells += [line["status"], line["why"], "", ""]
        else:
            speed = line["real_tokens_per_second"]
            share = f"{speed * line['operations_per_token'] / peak:.1%}" if peak else "unknown"
            times = gpu_speedup(line, lines) if line["kind"] == "step" else None
            cells += [spread([1e3 * each for each in line["seconds"]]), f"{speed:,.0f}", share]
            cells.append(f"{times:.2f}" if times else "")
        rule = "|---" * (head.count("|") - 1) + "|"
        start = [f"**{title}**", "", head, rule]
        tables.setdefault(title, start).append(f"| {' | '.join(cells)} |")
    shown = [text for table in tables.values() for text in [*table, ""]]
    for line in lines:
        if line.get("kernels"):
            each = ", ".join(f"`{name}` {ms:.1f}" for name, ms in line["kernels"])
            what = f"{line['size']}, T={line['tokens']}, {line['program']}, layers {line['layer_loop']}"
            shown += [f"Longest kernels in ms a step ({what}): {each}.", ""]
    return shown[:-1]


def _gpu_run(line: Line) -> list[str]:
    """Return the description of a training run on real text."""
    shown = [
        f"`bert-jax pretrain` of {line['size']}, T={line['tokens']}, {line['rows']:,} rows a step, "
        f"attention {line['attention']} ({line['program']}), on real text: "
        f"{line['real_tokens_per_second']:,.0f} real tokens/s (median of its log); the step compiled in "
        f"{line['compile_seconds']:g} s, in {line['cached_compile_seconds']:g} s from the cache.",
        "",
        "| step | held-out masked-LM loss | next-sentence accuracy |",
        "|---|---|---|",
    ]
    for each in line["heldout"]:
        accuracy = f"{each['next_sentence_accuracy']:.1%}"
        shown.append(f"| {each['step']:,} | {each['masked_lm_loss']:.2f} | {accuracy} |")
    return shown


def page(text: str, lines: Sequence[Line], folder: pathlib.Path) -> str:
    """Replace the blocks of the page.

    Args:
        text: the page.
        lines: lines of results.jsonl.
        folder: folder for plots.
    """
    makers: dict[str, Callable[[], list[str]]] = {
        "conditions": lambda: conditions(lines),
        "targets": lambda: targets(lines),
        "profile": lambda: parts(lines),
        "growth": lambda: growth(lines, folder),
        "quickstart": lambda: quickstart(_read("quickstart.jsonl")),
        "gpu": lambda: gpu_section(_read("gpu.jsonl")),
        "gpu-earlier": lambda: gpu_section(_read("gpu_h100.jsonl")),
        **{block: lambda names=names: table(lines, names) for block, names in BLOCKS.items()},
    }
    for name, make in makers.items():
        text = with_block(text, name, make())
    return text


def with_block(text: str, name: str, lines: Sequence[str]) -> str:
    """Replace the lines between `<!-- NAME -->` and `<!-- /NAME -->` of a page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = text.partition(begin)
    _, marker, after = rest.partition(end)
    if not marker:
        raise ValueError(f"the page has no block {name}")
    return "\n".join([before + begin.rstrip(), *lines, end + after])


def write() -> None:
    """Write README.md, growth.svg, and the table of docs/speed.md."""
    lines = _read("results.jsonl")
    path = HERE / "README.md"
    files.write(path, page(path.read_text(), lines, HERE))
    path = HERE.parent.parent / "docs" / "speed.md"
    files.write(path, with_block(path.read_text(), "speed", summary(lines)))
