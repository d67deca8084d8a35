"""Compare runs: an interactive page, and pictures for papers."""

import html
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from bert_jax import storage
from bert_jax.config import Config
from bert_jax.data.rows import read_manifest
from bert_jax.errors import UserError
from bert_jax.tools.report import curves, levels, page, plots, sections
from bert_jax.tools.report.curves import Recorded

PAPER = (".svg", ".pdf")


@storage.reads("folders")
@storage.writes("out")
@storage.writes("pictures")
def write(folders: list[str], out: str, pictures: str = "") -> list[pathlib.Path]:
    """Write a report on runs, and return the paths of its files.

    Args:
        folders: workdirs of the runs.
        out: path of a page (.html), or of a picture of the loss curve (.png, .svg, .pdf).
        pictures: folder for all plots as SVG and PDF; "" for none.

    Raises:
        UserError: a workdir without a run or without metrics, or a file that cannot be written.
    """
    path = pathlib.Path(out)
    if path.suffix not in (".html", *plots.PICTURES):
        raise UserError(
            f"--out {out}: must end in .html for a page, or in {', '.join(plots.PICTURES)} for a "
            "picture of the loss curve"
        )
    if path.suffix in plots.PICTURES:
        written = [loss_curve(folders, out)]
        runs = curves.read(folders) if pictures else []
    else:
        runs = curves.read(folders)
        page.write(path, html_of(runs))
        written = [path]
    return written + (save_pictures(runs, pathlib.Path(pictures)) if pictures else [])


def loss_curve(workdirs: list[str], out: str) -> pathlib.Path:
    """Plot the training and held-out loss of runs by step, as PNG, SVG or PDF.

    For pretraining it is the masked-LM or causal-LM loss, without the next-sentence loss.

    Raises:
        UserError: a workdir without metrics, or a picture that cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    runs, drawn = curves.read(workdirs), {}
    for i, run in enumerate(runs):
        loss = run.best["best_by"] if isinstance(run.config, Config) else "loss"
        for split, style in (
            ("train", {"lw": 1, "alpha": 0.6}),
            ("heldout", {"marker": "o", "ms": 4}),
        ):
            points = [
                (x["step"], x[loss]) for x in run.metrics if x["split"] == split and loss in x
            ]
            if points:
                name = f"{run.name}, {'held-out' if split == 'heldout' else 'training'}"
                (drawn[name],) = axes.plot(
                    *zip(*points, strict=True), color=plots.color(i), **style
                )
    is_token_loss = all(isinstance(run.config, Config) for run in runs)
    axes.set(xlabel="step", ylabel="loss (nats per token)" if is_token_loss else "loss")
    axes.set_title(
        f"Loss of {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}", parse_math=False
    )
    # Most of the loss falls in the first tenth of the steps.
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: plots.short(value))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    for reference in _levels(runs).values():
        plots.draw_levels(axes, reference)
    plots.legend(axes, drawn)
    return plots.save(figure, pathlib.Path(out))


def save_pictures(runs: list[Recorded], folder: pathlib.Path) -> list[pathlib.Path]:
    """Write all plots by step to a folder, as SVG and PDF.

    Raises:
        UserError: a picture cannot be written.
    """
    names, written, references = [run.name for run in runs], [], _levels(runs)
    for name, lines in curves.curves(runs).items():
        figure = plots.draw(name, lines, "step", names, references.get(name))
        written += [plots.save(figure, folder / f"{_file(name)}{suffix}") for suffix in PAPER]
    for i, rows in enumerate(_rows(runs)):
        if rows.histogram is not None:
            figure = plots.draw_lengths(rows.histogram)
            written += [plots.save(figure, folder / f"lengths-{i}{suffix}") for suffix in PAPER]
    return written


def html_of(runs: list[Recorded]) -> str:
    """Return the page of runs."""
    drawn: list[dict[str, Any]] = []
    shapes = sections.parameters(runs)
    body = [
        sections.headlines(runs),
        sections.overview(runs, shapes),
        sections.commands(runs),
        _curves(runs, drawn),
        sections.samples(runs),
        sections.final(runs),
        sections.differences(runs),
        sections.parameter_tables(runs, shapes),
        _data(runs, drawn),
    ]
    names = [run.name for run in runs]
    data = {
        "runs": names,
        "colors": [plots.color(i) for i in range(len(runs))],
        "axes": {**curves.AXES, "length": "tokens per sequence"},
        "plots": drawn,
        "incidents": [_incidents(run) for run in runs],
    }
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    return page.page(title, "\n".join(body), "runs.js", data)


def _incidents(run: Recorded) -> list[dict[str, Any]]:
    """Return the position on each axis and the description of each bad step."""
    steps = np.array([step for step, _ in run.incidents], float)
    x = {axis: values.tolist() for axis, values in curves.positions(run, steps).items()}
    return [
        {"x": {axis: values[i] for axis, values in x.items()}, "text": f"{run.name}: {kind} at step {step:,}"}
        for i, (step, kind) in enumerate(run.incidents)
    ]  # fmt: skip


def _curves(runs: list[Recorded], drawn: list[dict[str, Any]]) -> str:
    """Return the controls and plots, and append the data of each plot to `drawn`."""
    axes = "".join(
        f'<label><input type="radio" name="axis" value="{key}"{" checked" * (key == "step")}> {text}</label>'
        for key, text in curves.AXES.items()
    )
    checks = "".join(
        f'<label><input type="checkbox" name="run" value="{i}" checked> '
        f'<i style="background: {plots.color(i)}"></i>{html.escape(run.name)}</label>'
        for i, run in enumerate(runs)
    )
    figures: dict[int, list[str]] = {}
    references = _levels(runs)
    for name, lines in curves.curves(runs).items():
        data = [
            {
                "run": line.run,
                "split": line.split,
                "x": {axis: _rounded(values) for axis, values in line.x.items()},
                "y": _rounded(line.y),
            }
            for line in lines
        ]
        axes_of = [axis for axis in curves.AXES if any(axis in line.x for line in lines)]
        log = plots.is_logarithmic(name, lines)
        figure = _figure(
            curves.title(name), _file(name), axes_of, data, drawn, log, references.get(name)
        )
        figures.setdefault(curves.group(name), []).append(figure)
    without_speed = [run.name for run in runs if not run.speed]
    notes = [
        "Thin lines are means over training steps, thick ones with dots are held-out metrics. "
        f"Curves of more than {curves.MAX_POINTS} points are downsampled to their ends and the "
        "extremes of each interval. Tokens exclude padding; tokens and hours are interpolated "
        "between lines of speed.jsonl. Dotted levels are the held-out losses of unigram and bigram "
        "models, for masked LM multiplied by the share of targets that are not kept; triangles are "
        "bad steps.",
        "Point at a plot to read values, drag over one to zoom, and double-click to see all. With "
        "the keyboard: <kbd>Tab</kbd>, <kbd>←</kbd> <kbd>→</kbd> <kbd>Home</kbd> <kbd>End</kbd>, "
        "<kbd>+</kbd> zooms, <kbd>0</kbd> resets.",
    ]
    missing = ""
    if without_speed:
        names = html.escape(", ".join(without_speed))
        missing = f'<p class="quiet">Plotted by step only, for lack of speed.jsonl: {names}.</p>'
    groups = "".join(
        f'<h3>{curves.GROUPS[i]}</h3><div class="plots">{"".join(figures[i])}</div>'
        for i in sorted(figures)
    )
    return (
        "<h2>Curves</h2>"
        + "<noscript><p>The curves need JavaScript.</p></noscript>"
        + f'<details><summary class="quiet">How to read and zoom</summary><p>{"</p><p>".join(notes)}</p></details>'
        + missing
        + f'<div class="controls"><fieldset><legend>by</legend>{axes}</fieldset>'
        + '<fieldset><legend>scale</legend><label><input type="checkbox" name="logx"> log x</label>'
        + '<label><input type="checkbox" name="logy"> log y</label>'
        + '<label>smooth <input type="range" name="smooth" min="0" max="0.98" step="0.02" value="0"></label>'
        + '<input type="button" name="reset" value="Reset zoom" hidden></fieldset>'
        + f"<fieldset><legend>runs</legend>{checks}</fieldset></div>"
        + groups
    )


def _levels(runs: list[Recorded]) -> dict[str, dict[str, float]]:
    """Return the n-gram losses to draw, by metric; {} unless all runs end on the same rows.

    Those of a masked LM, which sees the targets that are kept, are multiplied by the share of others.
    """
    ends = {
        (
            run.best["best_by"],
            run.data[-1].get("digest", ""),
            run.config.masking.same_fraction,
        ): run.config.phases[-1].rows
        for run in runs
        if isinstance(run.config, Config) and run.data
    }
    if len(ends) != 1:
        return {}
    (((metric, digest, same_fraction), folder),) = ends.items()
    losses = levels.read(folder, digest)
    if losses is None:
        return {}
    scale = 1 - same_fraction if metric == "masked_lm_loss" else 1.0
    return {metric: {"unigram": scale * losses.unigram, "bigram": scale * losses.bigram}}


def _figure(
    title: str,
    file: str,
    axes: Sequence[str],
    lines: list[dict[str, Any]],
    drawn: list[dict[str, Any]],
    log: bool = False,
    levels: dict[str, float] | None = None,
) -> str:
    """Return a plot, which the script draws, and append its data to `drawn`.

    Args:
        title: its title.
        file: file name for saving, without suffix.
        axes: keys of the x axes that it has.
        lines: data of the curves.
        drawn: data of all plots of the page.
        log: whether the y axis is always logarithmic.
        levels: horizontal lines by label.
    """
    i, label = len(drawn), html.escape(title)
    drawn.append(
        {"title": title, "file": file, "log": log, "axes": axes, "lines": lines, "levels": levels or {}}
    )  # fmt: skip
    return (
        f'<figure data-plot="{i}" tabindex="0" role="group" aria-label="{label}"><figcaption>{label} '
        f'<button type="button" aria-label="save {label} as SVG">SVG</button></figcaption>'
        f'<div class="chart" role="img" aria-label="{label}"></div>'
        '<div class="reading" role="status"></div></figure>'
    )


class _Rows(NamedTuple):
    """Rows used by phases of runs.

    Attributes:
        users: names of the runs and phases.
        description: description of the rows in config.json.
        histogram: number of training sequences by length 0..T, or None.
        reason: why there is no histogram.
    """

    users: list[str]
    description: dict[str, Any]
    histogram: Int[np.ndarray, " L"] | None
    reason: str


def _rows(runs: list[Recorded]) -> list[_Rows]:
    """Return the rows of all pretraining runs, without duplicates."""
    result: dict[str, _Rows] = {}
    for run in runs:
        if not isinstance(run.config, Config):
            continue
        for i, (phase, description) in enumerate(zip(run.config.phases, run.data, strict=False)):
            user = run.name if len(run.config.phases) == 1 else f"{run.name}, phase {i}"
            digest = description["digest"]
            known = result.get(digest)
            if known is None or known.histogram is None:
                # Another run may have the rows in a folder that still exists.
                lengths, reason = _lengths(phase.rows, digest)
                users = known.users if known else []
                result[digest] = known = _Rows(users, description, lengths, reason)
            known.users.append(user)
    return list(result.values())


def _lengths(folder: str, digest: str) -> tuple[Int[np.ndarray, " L"] | None, str]:
    """Return the histogram of a folder of rows, or None and the reason."""
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        return None, str(error)
    if manifest.digest != digest:
        return None, f"{folder} now has other rows"
    return np.array(manifest.length_histogram, int), ""


def _data(runs: list[Recorded], drawn: list[dict[str, Any]]) -> str:
    parts = ["<h2>Data</h2>"]
    for i, rows in enumerate(_rows(runs)):
        description, lines = rows.description, []
        for split in ("train", "heldout"):
            counts = description[split]
            row = [
                split,
                *(counts[key] for key in ("documents", "sequences", "rows", "real_tokens")),
            ]
            per_row = f"{counts['sequences'] / counts['rows']:.2f}" if counts["rows"] else "—"
            lines.append([*row, per_row, f"{counts['fill_fraction']:.1%}"])
        columns = ["", "documents", "sequences", "rows", "real tokens", "sequences per row", "fill"]
        about = (
            f"Rows of T={description['tokens']} tokens with up to S={description['sequences']} "
            f"sequences, vocabulary of {description['vocab_size']:,}."
        )
        parts.append(f"<h3>{html.escape('; '.join(rows.users))}</h3><p>{about}</p>")
        parts.append(page.table(columns, lines))
        if rows.histogram is None:
            parts.append(f"<p>No histogram of lengths: {html.escape(rows.reason)}.</p>")
        else:
            parts.append(f'<div class="plots">{_histogram(rows.histogram, i, drawn)}</div>')
    tuned = [run for run in runs if not isinstance(run.config, Config)]
    splits = list(
        dict.fromkeys(k for run in tuned for x in run.data for k in x.get("examples", {}))
    )
    if splits:
        parts.append("<h3>Labeled examples</h3>")
        counts = [
            [run.name, *(run.data[0].get("examples", {}).get(split, "—") for split in splits)]
            for run in tuned
            if run.data
        ]
        parts.append(page.table(["run", *splits], counts))
    return "".join(parts)


def _histogram(counts: Int[np.ndarray, " L"], i: int, drawn: list[dict[str, Any]]) -> str:
    lengths = list(range(len(counts)))
    line = {"run": None, "split": "sequences", "x": {"length": lengths}, "y": counts.tolist()}
    total = int(counts.sum())
    middle = int(np.searchsorted(counts.cumsum(), total / 2))
    mean = float((counts * np.arange(len(counts))).sum() / max(total, 1))
    note = f"{total:,} training sequences; {mean:.1f} tokens on average, median {middle}."
    figure_html = _figure("Sequences by length", f"lengths-{i}", ["length"], [line], drawn)
    return f'<div><p class="quiet">{note}</p>{figure_html}</div>'


def _file(name: str) -> str:
    """Return a file name for a metric."""
    return re.sub(r"[^\w.-]", "_", name)


def _rounded(values: Float[np.ndarray, " n"]) -> list[float | int]:
    """Round to six digits, for JSON."""
    return [int(x) if float(x).is_integer() else float(f"{x:.6g}") for x in values]
