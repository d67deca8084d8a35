"""Blocks of the page, which `bert-jax report experiments/speed` writes from the files of results."""

import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

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
# The steps of the paper's recipe by T, and the order of TPUs in the table.
RECIPE_STEPS = {128: 900_000, 512: 100_000}
TPUS = ("v5e", "v5p", "v4", "v6e")


PACKED = "PyTorch, packed, logits of masked tokens only"
BY_LENGTH = "transformers, texts sorted by length"
# The table in docs/explanation/speed.md: workload, case, contenders that are bert_jax and the baseline, its name.
FRONT = (
    *(
        (f"pretraining, {size}, T={tokens}", f"pretrain-{size}-{tokens}", "bert_jax", *baseline)
        for tokens in (128, 512)
        for size in ("teaching", "mini", "base")
        for baseline in (("transformers", "transformers"), ("gathered, packed", PACKED))
    ),
    *(
        (f"fine-tuning, {name}", f"finetune-{case}", "packed", *baseline)
        for name, case in (("SST-2", "sst2"), ("QNLI", "qnli"), ("SQuAD 1.1", "squad1"))
        for baseline in (
            ("trainer", "transformers Trainer"),
            ("grouped", "Trainer, batches grouped by length"),
        )
    ),
    ("text embedding, MiniLM-L6", "embed", "packed", "sorted", BY_LENGTH),
    ("loading rows", "loader", "loader", "DataLoader", "PyTorch DataLoader with masking"),
    ("first step of base, cached program", "start", "cached", *2 * ("transformers",)),
    ("first step of base, cold start", "start", "cold", *2 * ("transformers",)),
    ("saving a checkpoint with checksums", "save", "checkpoint", *2 * ("torch.save",)),
    ("restoring a checkpoint", "restore", "checkpoint", *2 * ("torch.load",)),
)


def recorded() -> list[Line]:
    """Return a line for each case and contender, also of object storage, which has a file of its own."""
    storage = json.loads((HERE / "storage.json").read_text())
    return [
        *read(HERE / "cases.jsonl"),
        *(
            {"case": "storage-read", "contender": name, "seconds": [1 / rate for rate in rates]}
            | {"rows": [1] * len(rates)}
            for name, rates in storage["rows_per_second"].items()
        ),
        *(
            {"case": "storage-save", "contender": name, "seconds": times, "steps": [1] * len(times)}
            for name, times in storage["step_seconds"].items()
        ),
    ]


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
    measures = set(map(cases.measure, shown))
    title = UNITS[min(measures)][0] if len(measures) == 1 and measures <= UNITS.keys() else ""
    padded = measures <= {"real_tokens", "examples", "texts"}
    rows = []
    for name in shown:
        case_lines = [x for x in lines if x["case"] == name]
        if name in CASES:
            case_lines = [x for x in case_lines if x["contender"] in CASES[name]]
        measure, noisiness = cases.measure(name), noise(case_lines)
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


def hardware(lines: Sequence[Line]) -> list[str]:
    """Return the machines and versions of the cases."""
    machines = dict.fromkeys(_machine(line) for line in lines if "cores" in line)
    return [f"- {machine}" for machine in machines]


def _machine(line: Line) -> str:
    names = ("python", "jax", "torch", "transformers", "datasets")
    versions = ", ".join(f"{name} {line[name]}" for name in names if line.get(name))
    return f"{line['cores']} cores ({line['processor']}), {versions}"


def speedups() -> list[tuple[str, str, str, str]]:
    """Return workload, baseline, median speed-up over it, and hardware, for each of `FRONT`."""
    lines = {(line["case"], line["contender"]): line for line in recorded()}
    rows = []
    for workload, case, contender, baseline, name in FRONT:
        line, measure = lines[case, contender], cases.measure(case)
        times = statistics.median(ratios(lines[case, baseline], line, measure))
        machine = f"{line['cores']} CPU cores ({line['processor']})"
        rows.append((workload, name, f"{times:.2g}", machine))
    return rows


def summary() -> list[str]:
    """Return the table of docs/explanation/speed.md."""
    return pages.table(("workload", "baseline", "speed-up", "hardware"), speedups())


def fill() -> list[str]:
    """Return the share of real tokens in rows."""
    (shares,) = (line["fill"] for line in read(HERE / "prepare.jsonl") if line["what"] == "fill")
    rows = [(setting, f"{share:.1%}") for setting, share in shares.items()]
    return pages.table(("setting", "real tokens / tokens of rows"), rows)


def coordinates() -> list[str]:
    """Return the changes of activations after the last step, relative to those of the narrowest model."""
    last: dict[tuple[str, int], list[list[float]]] = {}
    for line in read(HERE / "mup.jsonl"):
        last.setdefault((line["kind"], line["hidden"]), []).append(line["changes"][-1])
    means = {key: np.mean(changes, axis=0) for key, changes in last.items()}
    narrowest = min(hidden for _, hidden in means)
    rows = [
        (kind, hidden, *(f"{x:.2f}" for x in mean / means[kind, narrowest]))
        for (kind, hidden), mean in means.items()
    ]
    return pages.table(("", "hidden size", "embeddings", "layer 1", "layer 2", "logits"), rows)


def slices() -> list[str]:
    """Return memory, time of a step and hours of the paper's recipe on slices of TPUs."""
    fitting: dict[tuple[str, str], dict[int, Line]] = {}
    for line in read(HERE / "scale.jsonl"):
        if line["run"] == "recipe" and "report" in line and line["report"]["fits"]:
            fitting.setdefault((line["topology"], line["size"]), {})[line["tokens"]] = line

    def place(key):
        return TPUS.index(key[0].partition(":")[0]), fitting[key][128]["report"]["chips"], key[1]

    rows = []
    for topology, size in sorted(fitting, key=place):
        memory, times, hours = [], [], 0.0
        for tokens, steps in RECIPE_STEPS.items():
            line = fitting[topology, size].get(tokens)
            if line is None:
                memory, times, hours = [*memory, "not run"], [*times, "not run"], float("nan")
                continue
            (phase,), change = line["report"]["phases"], line["change"].rpartition(".")[2]
            seconds, bound = (phase["roofline"][key] for key in ("step_seconds", "bound"))
            changed = f" with {change}" if change else ""
            memory.append(f"{phase['memory']['total'] / 2**30:.2f}{changed}")
            times.append(f"{1e3 * seconds:.3g} {bound}")
            hours += steps * seconds / 3600
        chips = fitting[topology, size][128]["report"]["chips"]
        spent = (f"{hours:.3g}", f"{hours * chips:.4g}") if hours == hours else ("-", "-")
        rows.append((size, topology, *memory, *times, *spent))
    each = [f"{what}, T={tokens}" for what in ("GiB", "ms a step") for tokens in RECIPE_STEPS]
    return pages.table(("model", "slice", *each, "hours", "chip-hours"), rows)


def launch() -> list[str]:
    """Return memory, time of a step, hours and price of the paper's recipe on the machines of docs/launch/."""
    rows = []
    for report in read(HERE / "launch.jsonl"):
        cells = [report["topology"]]
        for phase in report["phases"]:
            least = 1e3 * phase["roofline"]["step_seconds"]
            cells.append(f"{phase['memory']['total'] / 2**30:.1f}")
            cells.append(f"{1e3 * phase['expected_step_seconds']:.3g} ({least:.3g})")
        for key, digits in (("hours", ".1f"), ("chip_hours", ",.0f"), ("dollars", ",.0f")):
            expected, least = report[f"expected_{key}"], report[key]
            known = expected is not None
            cells.append(f"{expected:{digits}} ({least:{digits}})" if known else "-")
        rows.append(cells)
    each = [f"{what}, T={tokens}" for tokens in RECIPE_STEPS for what in ("GiB", "ms a step")]
    return pages.table(("machines", *each, "hours", "chip-hours", "dollars"), rows)


def quickstart() -> list[str]:
    """Return the table of quickstart.py."""
    rows = [
        (f"{line['install_seconds']:.0f}", f"{line['seconds']:.0f}", _machine(line))
        for line in read(HERE / "quickstart.jsonl")
    ]
    return pages.table(("installation, s", "quickstart, s", "machine"), rows)


# --- On a GPU (gpu.py) ----------------------------------------------------------------------------


def gpu_section(lines: Sequence[Line]) -> list[str]:
    """Return the section on gpu.py: the measured ceilings, and a table of training steps."""
    top = next((x for x in lines if x["kind"] == "ceilings" and "status" not in x), None)
    if top is None:
        return ["Not run."]
    peak = top["sheet_operations_per_second"]
    sheet = f" (data sheet {peak / 1e12:,.0f})" if peak else ""
    names = {"jax": "JAX", "flax": "Flax", "torch": "PyTorch", "transformers": "transformers"}
    versions = ", ".join(f"{name} {top[key]}" for key, name in names.items() if top.get(key))
    rows = []
    for line in lines:
        if line["kind"] in ("ceilings", "parity"):
            continue
        attention = gpu_kernels(line)
        cells = [line["program"], f"{line['size']}, T={line['tokens']}", attention]
        cells += [f"{line['attention_dropout']:g}", f"{line['rows']:,}"]
        if "status" in line:
            rows.append([*cells, line["status"], line["why"], "", ""])
            continue
        speed, times = line["real_tokens_per_second"], gpu_speedup(line, lines)
        share = f"{speed * line['operations_per_token'] / peak:.1%}" if peak else "unknown"
        cells += [spread([1e3 * each for each in line["seconds"]]), f"{speed:,.0f}", share]
        rows.append([*cells, f"{times:.2f}" if times else ""])
    head = ("program", "workload", "attention", "attention dropout", "rows", "ms a step")
    more = ("real tokens/s", "share of bf16 peak", "speed-up over torch.compile")
    return [
        f"One {top['device']}; {versions}; commit {top['commit'] or 'unknown'}. Measured ceilings: "
        f"{top['operations_per_second'] / 1e12:,.4g} TFLOP/s{sheet} for a matrix product in bfloat16, "
        f"{top['bytes_per_second'] / 1e12:,.3g} TB/s for memory.",
        "",
        *pages.table((*head, *more), rows),
        *gpu_parity(lines),
    ]


def gpu_kernels(line: Line) -> str:
    """Return a line's attention and what else differs from the defaults."""
    kernels = "own norms and loss" * (line.get("kernels") == "pallas")
    other = (kernels, line.get("activation"), "deterministic" * line["deterministic"])
    return ", ".join(filter(None, (line["attention"], *other)))


def gpu_parity(lines: Sequence[Line]) -> list[str]:
    """Return how far the losses of own kernels are from XLA's, and whether two runs are equal."""
    measured = [line for line in lines if line["kind"] == "parity" and "status" not in line]
    texts, by_xla = [], [line for line in measured if line["attention"] == "xla"]
    for line in measured:
        bits = "the same" if line["same_bits"] else "different"
        text = f"{gpu_kernels(line)}: two runs of {len(line['losses'])} steps end with {bits} bits"
        if by_xla and line["attention"] != "xla":
            pairs = zip(line["losses"], by_xla[0]["losses"], strict=True)
            most = max(abs(a - b) / b for a, b in pairs)
            text += f", and losses differ from those of xla by at most {most:.1e} of them"
        texts += ["", f"- {text}."]
    return texts


def gpu_speedup(line: Line, lines: Sequence[Line]) -> float | None:
    """Return the real tokens/s relative to torch.compile with the same rows; None for torch.compile."""
    for other in lines:
        same = all(other.get(key) == line[key] for key in ("size", "tokens", "rows"))
        if other.get("compiled") and "status" not in other and same and other is not line:
            return line["real_tokens_per_second"] / other["real_tokens_per_second"]
    return None


def registers() -> list[str]:
    """Return the table of registers.py."""
    lines = read(HERE / "registers.jsonl")
    head = (
        "T",
        "kernel",
        "threads",
        "registers a thread",
        "bytes spilled",
        "bytes of shared memory",
    )
    return pages.table(head, (line.values() for line in lines))


def get_blocks(results: Sequence[Line]) -> dict[str, Lines]:
    """Return the blocks of the page."""
    lines = recorded()
    blocks = {name: lambda chosen=chosen: table(lines, chosen) for name, chosen in BLOCKS.items()}
    blocks |= {
        "hardware": lambda: hardware(lines),
        "fill": fill,
        "mup": coordinates,
        "slices": slices,
        "launch": launch,
        "quickstart": quickstart,
        "registers": registers,
        "gpu": lambda: gpu_section(read(HERE / "gpu.jsonl")),
    }
    return {name: Lines(lambda *_, make=make: make()) for name, make in blocks.items()}
