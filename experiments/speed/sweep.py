"""Blocks of the page, which `bert-jax report experiments/speed` writes from the files of results."""

import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pages
from pages import Lines, read

from bert_jax.tools.sweep import module_of

HERE = pathlib.Path(__file__).parent
Line = dict[str, Any]
cases = module_of(HERE / "cases.py")
CASES = cases.CASES
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
    "start": ["start", "help"],
    "disk": ["save", "restore", "stall"],
    "storage": ["storage-read", "storage-save"],
    "parts": ["host", "memory", "products", "layers", "dropout", "activation"],
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


def recorded() -> list[Line]:
    """Return a line for each case and contender, also of those that earlier programs measured."""
    lines = read(HERE / "cases.jsonl")
    known = {line["case"] for line in lines}
    return [*lines, *(line for line in earlier() if line["case"] not in known)]


def earlier() -> list[Line]:
    """Return the results of earlier programs as lines of cases."""
    storage = json.loads((HERE / "storage.json").read_text())
    lines: list[Line] = [
        {"case": "storage-read", "contender": name, "seconds": [1 / rate for rate in rates], "rows": [1] * len(rates)}
        for name, rates in storage["rows_per_second"].items()
    ]  # fmt: skip
    lines += [
        {"case": "storage-save", "contender": name, "seconds": times, "steps": [1] * len(times)}
        for name, times in storage["step_seconds"].items()
    ]
    (fill,) = (line["fill"] for line in read(HERE / "prepare.jsonl") if line["what"] == "fill")
    lines += [
        {"case": "fill", "contender": name, "real_tokens": [share], "padded_tokens": [1]}
        for name, share in fill.items()
    ]
    changes: dict[str, list] = {}
    for line in read(HERE / "mup.jsonl"):
        changes.setdefault(f"{line['kind']}, {line['hidden']}", []).append(line["changes"])
    lines += [{"case": "mup", "contender": name, "changes": x} for name, x in changes.items()]
    programs: dict[tuple[str, str], Line] = {}
    for line in read(HERE / "scale.jsonl"):
        if line["run"] == "recipe" and "report" in line:
            key = f"tpu-{line['topology']}", f"{line['size']}, T={line['tokens']}"
            programs[key] = {"change": [line["change"]], "report": [line["report"]]}
    return [*lines, *({"case": c, "contender": n, **x} for (c, n), x in programs.items())]


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
    values = [value for line in lines for value in line.get("calibration", [1])]
    low, high = np.percentile(values, (10, 90))
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
    measures = {CASES[name].measure for name in shown}
    title = UNITS[min(measures)][0] if len(measures) == 1 and measures <= UNITS.keys() else ""
    padded = measures <= {"real_tokens", "examples", "texts"}
    rows = []
    for name in shown:
        known = CASES[name].contenders
        case_lines = [x for x in lines if x["case"] == name and x["contender"] in known]
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
            rows.append(cells)
    head = ["case", "contender", title, *["padded tokens/s"] * padded, "speed-up of the first"]
    return pages.table(head, rows)


def _of(lines: Sequence[Line], case: str, contender: str) -> Line | None:
    matches = [x for x in lines if (x["case"], x["contender"]) == (case, contender)]
    return matches[0] if matches else None


def hardware(lines: Sequence[Line]) -> list[str]:
    """Return the machines and versions of the cases."""
    machines = dict.fromkeys(_machine(line) for line in lines if "cores" in line)
    return [f"- {machine}" for machine in machines]


def _machine(line: Line) -> str:
    names = ("python", "jax", "torch", "transformers", "datasets")
    versions = ", ".join(f"{name} {line[name]}" for name in names if line.get(name))
    return f"{line['cores']} cores ({line['processor']}), {versions}"


def speed_up(lines: Sequence[Line], comparison: Comparison) -> tuple[Line | None, float]:
    """Return bert_jax's line and its median speed-up; None and 0 if it was not run."""
    case = CASES[comparison.case]
    baseline = _of(lines, comparison.case, comparison.contender)
    line = _of(lines, comparison.case, comparison.variant or next(iter(case.contenders)))
    if line is None or baseline is None:
        return None, 0.0
    return line, statistics.median(ratios(baseline, line, case.measure))


def summary() -> list[str]:
    """Return the table of docs/speed.md: median speed-up over each baseline."""
    lines, rows = recorded(), []
    for comparison in FRONT:
        line, times = speed_up(lines, comparison)
        if line is not None:
            machine = f"{line['cores']} CPU cores ({line['processor']})"
            rows.append((comparison.workload, comparison.baseline, f"{times:.2g}", machine))
    return pages.table(("workload", "baseline", "speed-up", "hardware"), rows)


def fill(lines: Sequence[Line]) -> list[str]:
    """Return the share of real tokens in rows."""
    rows = [
        (line["contender"], f"{line['real_tokens'][0] / line['padded_tokens'][0]:.1%}")
        for line in lines
        if line["case"] == "fill"
    ]
    return pages.table(("setting", "real tokens / tokens of rows"), rows)


def coordinates(lines: Sequence[Line]) -> list[str]:
    """Return the changes of activations after the last step, relative to those of the narrowest model."""
    rows, first = [], np.ones(1)
    for line in lines:
        if line["case"] == "mup":
            last = np.mean([changes[-1] for changes in line["changes"]], axis=0)
            kind, hidden = line["contender"].split(", ")
            first = last if int(hidden) == cases.MUP_WIDTHS[0] else first
            rows.append((kind, hidden, *(f"{x:.2f}" for x in last / first)))
    return pages.table(("", "hidden size", *cases.MUP_PARTS), rows)


def slices(lines: Sequence[Line]) -> list[str]:
    """Return memory, time of a step and hours of the paper's recipe on slices of TPUs."""
    rows = []
    for case in (name for name in CASES if name.startswith("tpu-")):
        for size in ("base", "large"):
            memory, times, hours, chips = [], [], 0.0, 0
            for tokens, steps in cases.RECIPE_STEPS.items():
                line = _of(lines, case, f"{size}, T={tokens}")
                if line is None or not line["report"][0]["fits"]:
                    memory, times, hours = [*memory, "not run"], [*times, "not run"], float("nan")
                    continue
                report, change = line["report"][0], line["change"][0]
                (phase,), chips = report["phases"], report["chips"]
                changed = f" with {change.rpartition('.')[2]}" if change else ""
                seconds, bound = (phase["roofline"][key] for key in ("step_seconds", "bound"))
                memory.append(f"{phase['memory']['total'] / 2**30:.2f}{changed}")
                times.append(f"{1e3 * seconds:.3g} {bound}")
                hours += steps * seconds / 3600
            spent = (f"{hours:.3g}", f"{hours * chips:.4g}") if hours == hours else ("-", "-")
            rows.append((size, case.removeprefix("tpu-"), *memory, *times, *spent))
    each = [f"{what}, T={tokens}" for what in ("GiB", "ms a step") for tokens in cases.RECIPE_STEPS]
    return pages.table(("model", "slice", *each, "hours", "chip-hours"), rows)


def quickstart() -> list[str]:
    """Return the table of quickstart.py."""
    rows = [
        (f"{line['install_seconds']:.0f}", f"{line['seconds']:.0f}", _machine(line))
        for line in read(HERE / "quickstart.jsonl")
    ]
    return pages.table(("installation, s", "quickstart, s", "machine"), rows)


# --- On a GPU (gpu.py) ----------------------------------------------------------------------------


def _attention(line: Line) -> str:
    """Return the attention of a line, without its dropout."""
    return f"{line['attention']}{', deterministic' * line.get('deterministic', False)}"


def gpu_section(lines: Sequence[Line]) -> list[str]:
    """Return the section on gpu.py: speed, parity, profile."""
    top = next((x for x in lines if x["kind"] == "ceilings" and "status" not in x), None)
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
        *_gpu_speeds(lines, peak),
    ]
    if parity := [line for line in lines if line["kind"] == "parity"]:
        rows = []
        for line in parity:
            found = [line["status"], line["why"]] if "status" in line else [
                f"{line[f'{what}_difference']:.2g}" for what in ("loss", "gradient")
            ]  # fmt: skip
            rows.append((_attention(line), f"{line['attention_dropout']:g}", *found))
        head = ("bfloat16 against float32", "attention dropout", "loss", "gradient, worst part")
        shown += ["", *pages.table(head, rows)]
    for line in lines:
        if line["kind"] == "profile":
            what = f"profile of {line['size']}, T={line['tokens']}, {_attention(line)}"
            parts = line["table"]["parts"] if "status" not in line else []
            rows = [(part["part"], number(1e3 * part["seconds"])) for part in parts]
            shown += ["", *pages.table((what, "ms a step"), rows)]
    return shown


def gpu_speedup(line: Line, lines: Sequence[Line]) -> float | None:
    """Return the real tokens/s relative to the baseline with the same rows."""
    for other in lines:
        same = all(other.get(key) == line.get(key) for key in ("size", "tokens", "rows"))
        if other["kind"] == "torch" and "status" not in other and same:
            return line["real_tokens_per_second"] / other["real_tokens_per_second"]
    return None


def _gpu_speeds(lines: Sequence[Line], peak: float | None) -> list[str]:
    """Return a table of training steps."""
    rows = []
    for line in lines:
        if line["kind"] not in ("step", "torch"):
            continue
        what = f"{line['size']}, T={line['tokens']}"
        cells = [line["program"], what, _attention(line), f"{line['attention_dropout']:g}"]
        cells.append(f"{line['rows']:,}")
        if "status" in line:
            cells += [line["status"], line["why"], "", ""]
        else:
            speed = line["real_tokens_per_second"]
            share = f"{speed * line['operations_per_token'] / peak:.1%}" if peak else "unknown"
            times = gpu_speedup(line, lines) if line["kind"] == "step" else None
            cells += [spread([1e3 * each for each in line["seconds"]]), f"{speed:,.0f}", share]
            cells.append(f"{times:.2f}" if times else "")
        rows.append(cells)
    head = ("program", "workload", "attention", "attention dropout", "rows", "ms a step")
    return pages.table(
        (*head, "real tokens/s", "share of bf16 peak", "speed-up over torch.compile"), rows
    )


def get_blocks(results: Sequence[Line]) -> dict[str, Lines]:
    """Return the blocks of the page."""
    lines = recorded()
    return {
        "hardware": Lines(lambda _: hardware(lines)),
        "fill": Lines(lambda _: fill(lines)),
        "mup": Lines(lambda _: coordinates(lines)),
        "slices": Lines(lambda _: slices(lines)),
        "quickstart": Lines(lambda _: quickstart()),
        "gpu": Lines(lambda _: gpu_section(read(HERE / "gpu.jsonl"))),
        **{
            name: Lines(lambda _, chosen=each: table(lines, chosen))
            for name, each in BLOCKS.items()
        },
    }
