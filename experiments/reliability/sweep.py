"""Blocks of the page, which `bert-jax report experiments/reliability` writes from the .jsonl files."""

import collections
import pathlib

import pages
from pages import Lines

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


def kills(lines):
    """Return a sentence per device, and a table with a row per command and a column per moment."""
    sentences, counts = [], collections.Counter()
    for on in dict.fromkeys(line.get("device", "2 CPU cores") for line in lines):
        killed = [line for line in lines if line.get("device", "2 CPU cores") == on]
        runs = len({(line["seed"], line["command"], line["run"]) for line in killed})
        differ = sum(bool(line["differs"]) for line in killed)
        sentences.append(
            f"On {on}: {len(killed)} kills in {runs} runs; {differ} of them in runs that ended differently "
            "from the undisturbed one."
        )
        for line in killed:
            counts.update((f"{line['command']}, {on}", each) for each in (line["moment"], "all"))
    commands, moments = (sorted({key[i] for key in counts} - {"all"}) for i in range(2))
    rows = [
        (command, *(counts[command, each] or "" for each in (*moments, "all")))
        for command in commands
    ]
    head = ["", *(moment.replace("_", " ") for moment in moments), "all"]
    return [*sentences, "", *pages.table(head, rows)]


def leaks(lines, folder):
    """Return resources at the end of warm-up and of the run, and draw the plot."""
    end = lines[-1]["step"]
    warm = [line for line in lines if line["step"] >= WARM * end]
    tenth, rows = max(len(warm) // 10, 1), []
    for key, (name, unit) in RESOURCES.items():
        values = [line[key] / unit for line in warm]
        first, last = (sum(part) / tenth for part in (values[:tenth], values[-tenth:]))
        rows.append((name, *(f"{value:,.1f}" for value in (first, last, max(values)))))
    steps = f"steps {warm[0]['step']:,} to {warm[tenth - 1]['step']:,}"
    table = pages.table(("", steps, "as many at the end", "maximum"), rows)
    draw(lines, folder)
    picture = "![resources by step](leaks.svg)"
    return [f"{end:,} steps, {len(lines):,} samples.", "", *table, "", picture]


def fuzz(lines):
    """Return a table with a row per test."""
    inputs, failed = (sum(line[key] for line in lines) for key in ("inputs", "failed"))
    rows = [
        (line["test"].removeprefix("test_").replace("_", " "), f"{line['inputs']:,}")
        for line in lines
    ]
    return [
        f"{inputs:,} inputs, {lines[0]['times']} times as many as in the test suite, drawn by hypothesis "
        f"{lines[0]['hypothesis']}; {failed} tests failed.",
        "",
        *pages.table(("", "inputs"), rows),
    ]


def attacks(lines):
    """Return a table with a row per situation."""
    rows = [(line["what"].rstrip("."), line["times"], line["found"]) for line in lines]
    return pages.table(("situation", "times", "result"), rows)


def mutations(lines):
    """Return counts by package, and the mutants that survived all tests."""
    lines = [line for line in lines if "by" in line]
    survived = [line for line in lines if not line["by"]]
    packages, survivors = (
        collections.Counter(line["module"].rpartition(".")[0] or "(root)" for line in some)
        for some in (lines, survived)
    )
    rows = [(name, count, count - survivors[name]) for name, count in sorted(packages.items())]
    return [
        f"{len(lines)} mutants, {len(lines) - len(survived)} killed.",
        "",
        *pages.table(("package", "mutants", "killed"), rows),
        *([""] if survived else []),
        *(
            f"- {line['module']}: `{line['old'].strip()}` → `{line['new'].strip()}`: {line['why']}"
            for line in survived
        ),
    ]


def draw(lines, folder):
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "bert_jax"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        for axis, (key, (name, unit)) in zip(
            figure.subplots(2, 2).flat, RESOURCES.items(), strict=True
        ):
            axis.plot([line["step"] for line in lines], [line[key] / unit for line in lines])
            axis.set(title=name, xlabel="step", ylim=(0, None))
        with files.atomic_write(folder / "leaks.svg") as beside:
            figure.savefig(beside, format="svg", metadata={"Date": None})


def get_blocks(results):
    """Return a block for each file of results."""
    blocks = {
        make.__name__: Lines(
            lambda *_, make=make: make(pages.read(HERE / f"{make.__name__}.jsonl"))
        )
        for make in (kills, fuzz, attacks, mutations)
    }
    picture = Lines(lambda _, folder: leaks(pages.read(HERE / "leaks.jsonl"), folder))
    return {**blocks, "leaks": picture}
