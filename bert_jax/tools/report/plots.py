"""Plot the metrics of runs, for interactive pages and for papers."""

import io
import pathlib
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from bert_jax import files
from bert_jax.tools.report.curves import AXES, Curve

PICTURES = (".png", ".svg", ".pdf")
# Size of figures in inches, and the axes in them as fractions (left, bottom, width, height). The same
# for all plots, to align them and to let a script map points to data.
SIZE = (6.0, 3.3)
BOX = (0.115, 0.15, 0.865, 0.77)
_POINTS = 72
# Replaced by the page's text color, which SVG can refer to and matplotlib cannot.
_INK = "#010203"
_LINES = ("-", "--", ":", "-.")


def color(run: int) -> str:
    """Return the color of a run's curves."""
    from matplotlib import colormaps, colors

    # The colors of tab10, then their lighter variants.
    return colors.to_hex(colormaps["tab20"](2 * run % 20 + run // 10 % 2))


def is_logarithmic(name: str, lines: list[Curve]) -> bool:
    """Whether to use a log scale: perplexities and gradient norms that span a factor of 10."""
    low, high = _range(lines)
    return (name.endswith("perplexity") or name == "gradient_norm") and 0 < 10 * low <= high


def _range(lines: list[Curve]) -> tuple[float, float]:
    """Return the minimum and maximum of all curves."""
    return min(float(line.y.min()) for line in lines), max(float(line.y.max()) for line in lines)


def short(value: float | int) -> str:
    """Format a tick label: 1500000 is 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def draw(
    name: str,
    lines: list[Curve],
    axis: str,
    names: list[str] | None = None,
    levels: Mapping[str, float] | None = None,
) -> Any:
    """Return a figure of a metric by one of `AXES`.

    Args:
        name: name of the metric.
        lines: curves to draw.
        axis: key of `AXES`.
        names: names of the runs for a legend; None for a plot in a page, whose script identifies
            curves by their group ids `run-0`, ….
        levels: horizontal lines to draw for reference, by label.
    """
    figure, axes = _figure(_INK if names is None else "black")
    drawn = {}
    for line in lines:
        if axis not in line.x:
            continue
        style: dict[str, Any] = {"lw": 0.9, "alpha": 0.65}
        if line.split == "heldout":
            style = {
                "zorder": 3,
                "lw": 1.6,
                "marker": "o",
                "ms": 3.5,
                "markevery": len(line.y) // 40 + 1,
            }
        elif len(line.y) == 1:  # a single point
            style = {"marker": "."}
        (drawn[line.run],) = axes.plot(
            line.x[axis],
            line.y,
            color=color(line.run),
            ls=_LINES[line.run // 10 % len(_LINES)],
            gid=f"run-{line.run}",
            **style,
        )
    draw_levels(axes, levels or {})
    if is_logarithmic(name, lines):
        low, high = _range(lines)
        axes.set_yscale("log", subs=(2, 5) if high < 1e3 * low else ())
        axes.yaxis.set_minor_formatter(lambda value, _: short(value))
        axes.tick_params(which="minor", length=3.5)
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
    elif axes.get_ylim()[1] > 1e4:
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    _label(axes, AXES[axis], name.replace("_", " "))
    if names:
        legend(axes, {names[run]: line for run, line in drawn.items()})
    return figure


def draw_levels(axes: Any, levels: Mapping[str, float]) -> None:
    """Draw labeled horizontal lines, behind the curves."""
    ink = axes.spines["left"].get_edgecolor()
    for label, value in levels.items():
        axes.axhline(value, color=ink, lw=0.8, ls=":", alpha=0.7, zorder=1)
        place = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        axes.text(0.995, value, f"{label} {value:.2f}", color=ink, fontsize=7, **place)


def draw_lengths(histogram: Int[np.ndarray, " L"], paper: bool = False) -> Any:
    """Return a figure of the number of sequences by length 0..L-1, in tokens."""
    figure, axes = _figure("black" if paper else _INK)
    axes.stairs(histogram, np.arange(len(histogram) + 1) - 0.5, fill=True, color=color(0))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    _label(axes, "tokens per sequence", "sequences")
    return figure


def _figure(ink: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=_POINTS)
    axes = figure.add_axes(BOX)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(ink)
    axes.tick_params(which="both", colors=ink, labelsize=8)
    axes.grid(alpha=0.15, color=ink)
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))
    axes.yaxis.get_offset_text().set(color=ink, size=8)
    return figure, axes


def _label(axes: Any, x: str, y: str) -> None:
    ink = axes.spines["left"].get_edgecolor()
    for label, text in ((axes.xaxis.label, x), (axes.yaxis.label, y)):
        label.set(text=text, color=ink, size=9, parse_math=False)


def limits(figure: Any) -> list[float]:
    """Return left, right, bottom and top of a figure's axes, in data units."""
    (axes,) = figure.axes
    return [float(x) for x in (*axes.get_xlim(), *axes.get_ylim())]


def box() -> list[float]:
    """Return left, top, width and height of the axes in units of an inline SVG."""
    (width, height), (left, bottom, wide, high) = SIZE, BOX
    inches = (width * left, height * (1 - bottom - high), width * wide, height * high)
    return [round(_POINTS * x, 3) for x in inches]


def inline(figure: Any, key: str) -> str:
    """Return a figure as an inline SVG element.

    It uses the color of the surrounding text; the curves of run i have `data-run="i"`.

    Args:
        figure: a figure of `draw` or `draw_lengths`.
        key: seed of the ids in the SVG, unique in the page.
    """
    from matplotlib import rc_context

    svg = io.StringIO()
    # Keep text as text: paths would make the page several times larger.
    with rc_context({"svg.hashsalt": key, "svg.fonttype": "none"}):
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    text = svg.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="run-(\d+)"', r' data-run="\1"', text)
    # Ids such as line2d_1 occur in every figure, but must be unique in a page.
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    # Fill the available width.
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)


def legend(axes: Any, lines: Mapping[str, Any]) -> None:
    """Add a legend with literal names, which matplotlib would parse ($…$) or hide (_name)."""
    texts = axes.legend(lines.values(), map(str, range(len(lines))), frameon=False, fontsize=8)
    for text, name in zip(texts.get_texts(), lines, strict=True):
        text.set(text=name, parse_math=False)


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    """Write a figure reproducibly, in the format of the path's suffix (one of `PICTURES`).

    Raises:
        UserError: the picture cannot be written.
    """
    from matplotlib import rc_context

    # Text as paths in SVG, and as TrueType in PDF: journals reject matplotlib's default Type 3.
    settings: Any = {"svg.hashsalt": "bert_jax", "pdf.fonttype": 42}
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    with (
        files.one_line_errors(f"cannot write the picture {path}"),
        warnings.catch_warnings(),
        rc_context(settings),
    ):
        # matplotlib's font lacks some scripts.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:], dpi=150, metadata=dates)
    return path
