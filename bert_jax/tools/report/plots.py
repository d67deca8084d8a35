"""Draw the metrics of runs with matplotlib."""

import io
import pathlib
import re
import warnings
from collections.abc import Mapping
from typing import Any

from bert_jax.config.schema import Config
from bert_jax.errors import UserError
from bert_jax.tools.report import levels, page
from bert_jax.tools.report.curves import Curve, Recorded, by_seed, curves

PICTURES = (".png", ".svg", ".pdf")
# Groups of metrics, by a regular expression of their names; the first that matches counts.
_GROUPS = {
    "Loss": "loss$",
    "Quality": "(accuracy|perplexity|f1|exact|matthews|pearson|spearman)$",
    "Optimization": "learning_rate|gradient_norm",
    "Speed": "tokens_per_second|utilization",
    "Data and other": "",
}
_STYLES = {"train": {"lw": 0.8, "alpha": 0.6}, "heldout": {"lw": 1.4, "marker": "o", "ms": 3}}
_PHASE = {"color": "0.5", "lw": 0.8, "ls": "--", "zorder": 1}


def check_suffix(out: str) -> pathlib.Path:
    """Return the path of a page or picture to write, whose suffix says which."""
    path = pathlib.Path(out)
    if path.suffix not in (".html", *PICTURES):
        raise UserError(f"--out {out}: must end in .html, {', '.join(PICTURES[:-1])} or .pdf")
    return path


def draw_groups(runs: list[Recorded]) -> dict[str, Any]:
    """Return a figure of each group of metrics, by its name."""
    panels: dict[str, dict[str, list[Curve]]] = {group: {} for group in _GROUPS}
    for name, lines in curves(runs).items():
        group = next(group for group, pattern in _GROUPS.items() if re.search(pattern, name))
        panels[group][name] = lines
    return {group: draw(runs, metrics) for group, metrics in panels.items() if metrics}


def draw_loss(runs: list[Recorded]) -> Any:
    """Return a figure of the loss; for pretraining that of tokens, without next-sentence prediction."""
    losses = [run.best["best_by"] if isinstance(run.config, Config) else "loss" for run in runs]
    panels = {name: lines for name, lines in curves(runs).items() if name in losses}
    if not panels:
        raise UserError(f"nothing to draw: metrics.jsonl of {runs[0].name} has no {losses[0]}")
    return draw(runs, panels, height=3.0)


def draw(runs: list[Recorded], panels: Mapping[str, list[Curve]], height: float = 1.75) -> Any:
    """Return a figure with a panel of `height` inches per metric, over a common axis of steps.

    Seeds are drawn as their mean, with a band from the lowest to the highest. Curves are not joined
    across phases, since losses on rows of different lengths are not comparable.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(layout="constrained")
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    end = max(int(line.steps[-1]) for lines in panels.values() for line in lines)
    since = min(run.best["since"] for run in runs)
    phases = {step for run in runs for step in run.phase_ends[:-1] if step < end}
    for axes, (name, lines) in zip(rows, panels.items(), strict=True):
        for line in lines:
            _draw_curve(axes, line)
        for step in phases:
            axes.axvline(step, **_PHASE)
        references = ngram_losses(runs, name) if since < end else {}
        for model, loss in references.items():
            axes.hlines(loss, since, end, color="black", lw=0.8, ls=":", alpha=0.7, zorder=1)
            axes.text(end, loss, f"  {model} {loss:.2f}", va="center", fontsize=7)
        low, high = min(x.values.min() for x in lines), max(x.values.max() for x in lines)
        if re.search("perplexity|gradient_norm", name) and 0 < 10 * low <= high:
            axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        title = f"{name} (nats)" if name.endswith("loss") else name
        axes.set_title(title.replace("_", " "), fontsize=9, loc="left", parse_math=False)
    rows[-1].set_xlabel("step", fontsize=9)
    rows[-1].xaxis.set_major_formatter(lambda value, _: short(value))
    rows[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    count = _draw_legend(figure, runs, {line.split for lines in panels.values() for line in lines})
    figure.set_size_inches(4.2, 0.5 + height * len(rows) + 0.15 * count)
    return figure


def short(value: float | int) -> str:
    """Format a number in a few characters: 1500000 is 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _color(series: int) -> dict[str, Any]:
    return {"color": f"C{series % 10}", "ls": ("-", "--", ":", "-.")[series // 10 % 4]}


def _draw_curve(axes: Any, curve: Curve) -> None:
    style = _STYLES[curve.split] | _color(curve.series)
    if len(curve.steps) == 1:
        style["marker"] = "."
    axes.plot(curve.steps, curve.values.mean(0), markevery=len(curve.steps) // 20 + 1, **style)
    if len(curve.values) > 1:
        # Matplotlib simplifies long lines in SVG files, but not areas.
        band = {"fc": style["color"], "alpha": 0.2, "rasterized": len(curve.steps) > 1000}
        axes.fill_between(curve.steps, curve.values.min(0), curve.values.max(0), lw=0, **band)


def ngram_losses(runs: list[Recorded], metric: str) -> dict[str, float]:
    """Return the n-gram losses of the rows that all pretraining runs end on, if `metric` ranks the runs.

    A masked LM sees the targets that are kept: its levels are multiplied by the share of the others.
    """
    ends = {
        (run.best["best_by"], run.data[-1]["digest"], run.config.masking.same_fraction): run.config
        for run in runs
        if isinstance(run.config, Config) and run.data
    }
    if len(ends) != 1:
        return {}
    (((best_by, digest, same_fraction), config),) = ends.items()
    losses = levels.read(config.phases[-1].rows, digest) if metric == best_by else None
    scale = 1 - same_fraction if metric == "masked_lm_loss" else 1.0
    return {n: scale * getattr(losses, n) for n in ("unigram", "bigram")} if losses else {}


def _draw_legend(figure: Any, runs: list[Recorded], splits: set[str]) -> int:
    """Draw the legend above the panels, and return its number of lines."""
    from matplotlib.lines import Line2D

    entries = []
    for series, seeds in enumerate(by_seed(runs)):
        more = f", …: mean and range of {len(seeds)} seeds" if len(seeds) > 1 else ""
        entries.append((seeds[0].name[-50:] + more, _color(series)))
    names = {"train": "training", "heldout": "held-out"}
    entries += [(names[split], _STYLES[split] | {"color": "0.4"}) for split in sorted(splits)[::-1]]
    lengths = [[str(rows.get("tokens")) for rows in run.data] for run in runs if run.phase_ends[1:]]
    entries += [(f"phases of T={x}", _PHASE) for x in dict.fromkeys(map(", ".join, lengths))]
    handles = [Line2D([], [], **style) for _, style in entries]
    place = {"loc": "outside upper left", "frameon": False, "fontsize": 7}
    legend = figure.legend(handles, map(str, range(len(entries))), **place)
    # Literal names: matplotlib would parse $…$ and hide _name.
    for text, (name, _) in zip(legend.get_texts(), entries, strict=True):
        text.set(text=name, parse_math=False)
    return len(entries)


def render(figure: Any, suffix: str) -> bytes:
    """Return a picture in the format of a suffix (one of `PICTURES`), the same bytes every time."""
    from matplotlib import rc_context

    # Text as paths in SVG, and as TrueType in PDF: journals reject matplotlib's default Type 3.
    settings: Any = {"svg.hashsalt": "bert_jax", "pdf.fonttype": 42}
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
    content = io.BytesIO()
    # Matplotlib's font lacks some scripts, of which it warns.
    with warnings.catch_warnings(action="ignore", category=UserWarning), rc_context(settings):
        figure.savefig(content, format=suffix[1:], dpi=150, metadata=dates)
    return content.getvalue()


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    """Write a figure in the format of the path's suffix (one of `PICTURES`), and return the path."""
    return page.write(path, render(figure, path.suffix))
