"""Write README.md and leaks.svg from the .jsonl files beside it.

python experiments/reliability/report.py
"""

import collections
import json
import pathlib

from bert_jax.storage import files

HERE = pathlib.Path(__file__).parent
RESOURCES = {
    "memory_bytes": ("memory, MB", 1e6),
    "disk_bytes": ("checkpoints on disk, MB", 1e6),
    "open_files": ("open files", 1),
    "threads": ("threads", 1),
}
# Share of a run that is warm-up: compilation, the first evaluation and the first save.
WARM = 0.2
CPU = "2 CPU cores"


def read(name):
    path = HERE / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kills(lines):
    """Return a table with a row per command and device, and a column per moment."""
    if not lines:
        return ["not run"]
    by_device = collections.defaultdict(list)
    for line in lines:
        by_device[line.get("device", CPU)].append(line)
    counts = collections.Counter(
        (f"{line['command']}, {on}" if on != CPU else line["command"], line["moment"])
        for on, killed in by_device.items()
        for line in killed
    )
    commands, moments = (sorted({key[i] for key in counts}) for i in range(2))
    table = [
        f"| | {' | '.join(moment.replace('_', ' ') for moment in moments)} | all |",
        f"|---|{'---|' * (len(moments) + 1)}",
    ]
    for command in commands:
        command_counts = [counts[command, moment] for moment in moments]
        table.append(
            f"| {command} | {' | '.join(str(n or '') for n in command_counts)} | {sum(command_counts)} |"
        )
    sentences = []
    for on, killed in by_device.items():
        runs = len({(line["seed"], line["command"], line["run"]) for line in killed})
        seeds = ", ".join(str(seed) for seed in sorted({line["seed"] for line in killed}))
        differ = sum(bool(line["differs"]) for line in killed)
        sentences.append(
            f"On {on}: {len(killed)} kills in {runs} runs (seed {seeds}); {differ} of them in runs that "
            "ended differently from the undisturbed one."
        )
    return [*sentences, "", *table]


def leaks(lines):
    """Return resources at the end of warm-up and of the run, and draw the plot."""
    if not lines:
        return ["not run"]
    end = lines[-1]["step"]
    warm = [line for line in lines if line["step"] >= WARM * end]
    tenth = max(len(warm) // 10, 1)
    table = [f"| | steps {warm[0]['step']:,} to {warm[tenth - 1]['step']:,} | as many at the end | maximum |",
             "|---|---|---|---|"]  # fmt: skip
    for key, (name, unit) in RESOURCES.items():
        values = [line[key] / unit for line in warm]
        first, last = (sum(part) / tenth for part in (values[:tenth], values[-tenth:]))
        table.append(f"| {name} | {first:,.1f} | {last:,.1f} | {max(values):,.1f} |")
    draw(lines)
    return [
        f"{end:,} steps, {len(lines):,} samples.",
        "",
        *table,
        "",
        "![resources by step](leaks.svg)",
    ]


def fuzz(lines):
    """Return a table with a row per test."""
    if not lines:
        return ["not run"]
    inputs, failed = (sum(line[key] for line in lines) for key in ("inputs", "failed"))
    table = [
        f"| {line['test'].removeprefix('test_').replace('_', ' ')} | {line['inputs']:,} |"
        for line in lines
    ]
    return [
        f"{inputs:,} inputs, {lines[0]['times']} times as many as in the test suite, drawn by hypothesis "
        f"{lines[0]['hypothesis']}; {failed} tests failed.",
        "",
        "| | inputs |",
        "|---|---|",
        *table,
    ]


def attacks(lines):
    """Return a table with a row per situation."""
    rows = [f"| {line['what'].rstrip('.')} | {line['times']} | {line['found']} |" for line in lines]
    return ["| situation | times | result |", "|---|---|---|", *rows] if rows else ["not run"]


def mutations(lines):
    """Return counts by package, and the mutants that survived all tests."""
    if not lines:
        return ["not run"]
    lines = [line for line in lines if "by" in line]
    survived = [line for line in lines if not line["by"]]
    packages, survivors = (
        collections.Counter(line["module"].rpartition(".")[0] or "(root)" for line in some)
        for some in (lines, survived)
    )
    table = [
        f"| {name} | {count} | {count - survivors[name]} |"
        for name, count in sorted(packages.items())
    ]
    return [
        f"{len(lines)} mutants, {len(lines) - len(survived)} killed.",
        "",
        "| package | mutants | killed |",
        "|---|---|---|",
        *table,
        *([""] if survived else []),
        *(
            f"- {line['module']}: `{line['old'].strip()}` → `{line['new'].strip()}`: {line['why']}"
            for line in survived
        ),
    ]


def draw(lines):
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "bert_jax"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        for axis, (key, (name, unit)) in zip(
            figure.subplots(2, 2).flat, RESOURCES.items(), strict=True
        ):
            axis.plot([line["step"] for line in lines], [line[key] / unit for line in lines])
            axis.set(title=name, xlabel="step", ylim=(0, None))
        with files.atomic_write(HERE / "leaks.svg") as beside:
            figure.savefig(beside, format="svg", metadata={"Date": None})


def main():
    path = HERE / "README.md"
    text = path.read_text()
    for name, lines in (
        ("kills", kills(read("kills.jsonl"))),
        ("leaks", leaks(read("leaks.jsonl"))),
        ("fuzz", fuzz(read("fuzz.jsonl"))),
        ("attacks", attacks(read("attacks.jsonl"))),
        ("mutations", mutations(read("mutations.jsonl"))),
    ):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{chr(10).join(lines)}\n{end}{rest.split(end)[1]}"
    path.write_text(text)


if __name__ == "__main__":
    main()
