"""Plots of runs: for a page, where a script shows and hides their lines, and for a paper."""

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
# Inches, and where in them the axes lie: left, bottom, width, height, as parts of the whole. The same
# for all, so plots stand in line below each other and a script knows where a point is.
SIZE = (6.0, 3.3)
BOX = (0.115, 0.15, 0.865, 0.77)
_POINTS = 72
# Stands for the page's own text color, which SVG can name and matplotlib cannot.
_INK = "#010203"
_LINES = ("-", "--", ":", "-.")


def color(run: int) -> str:
    """Of a run's lines."""
    from matplotlib import colormaps, colors

    # The first ten are those of tab10, the next ten their lighter sisters.
    return colors.to_hex(colormaps["tab20"](2 * run % 20 + run // 10 % 2))


def is_logarithmic(name: str, lines: list[Curve]) -> bool:
    """Whether a plot's y axis is: where what falls by orders of magnitude did so."""
    low, high = _range(lines)
    return (name.endswith("perplexity") or name == "gradient_norm") and 0 < 10 * low <= high


def _range(lines: list[Curve]) -> tuple[float, float]:
    """The lowest and the highest value."""
    return min(float(line.y.min()) for line in lines), max(float(line.y.max()) for line in lines)


def short(value: float | int) -> str:
    """A number of an axis in a few characters: 1500000 is 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def draw(name: str, lines: list[Curve], axis: str, names: list[str] | None = None) -> Any:
    """A figure of a metric by one of `AXES`.

    Args:
        names: of the runs, for a legend; None for a plot in a page, whose lines can be told by
            the group ids `run-0`, ….
    """
    figure, axes = _figure(_INK if names is None else "black")
    seen = {}
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
        elif len(line.y) == 1:  # nothing to draw a line between
            style = {"marker": "."}
        (seen[line.run],) = axes.plot(
            line.x[axis],
            line.y,
            color=color(line.run),
            ls=_LINES[line.run // 10 % len(_LINES)],
            gid=f"run-{line.run}",
            **style,
        )
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
        legend(axes, {names[run]: line for run, line in seen.items()})
    return figure


def draw_lengths(histogram: Int[np.ndarray, " L"], paper: bool = False) -> Any:
    """A figure of how many sequences have each length 0..L-1, in tokens."""
    figure, axes = _figure("black" if paper else _INK)
    axes.stairs(histogram, np.arange(len(histogram) + 1) - 0.5, fill=True, color=color(0))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    _label(axes, "tokens of a sequence", "sequences")
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
    """Left, right, bottom and top of a figure's axes, in the units of its data."""
    (axes,) = figure.axes
    return [float(x) for x in (*axes.get_xlim(), *axes.get_ylim())]


def box() -> list[float]:
    """Where the axes lie in an inline picture's own units: left, top, width, height."""
    (width, height), (left, bottom, wide, high) = SIZE, BOX
    whole = (width * left, height * (1 - bottom - high), width * wide, height * high)
    return [round(_POINTS * x, 3) for x in whole]


def inline(figure: Any, key: str) -> str:
    """A figure as an SVG element to stand in a page among others.

    Its color is the text's around it; lines of run i have `data-run="i"`.

    Args:
        key: no other picture's of the page; what is defined in it is called after that.
    """
    from matplotlib import rc_context

    told = io.StringIO()
    # Text stays text: a page of paths would be several times as large.
    with rc_context({"svg.hashsalt": key, "svg.fonttype": "none"}):
        figure.savefig(told, format="svg", transparent=True, metadata={"Date": None})
    text = told.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="run-(\d+)"', r' data-run="\1"', text)
    # Names such as line2d_1 are every picture's, and an id is to be one element's.
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    # As wide as the page has room.
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)


def legend(axes: Any, lines: Mapping[str, Any]) -> None:
    """Names lines as they are called: matplotlib reads mathematics in $ and hides _names."""
    texts = axes.legend(lines.values(), map(str, range(len(lines))), frameon=False, fontsize=8)
    for text, name in zip(texts.get_texts(), lines, strict=True):
        text.set(text=name, parse_math=False)


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    """Writes a picture of `PICTURES`, by its suffix; the same picture is the same file.

    Raises:
        UserError: it cannot be written.
    """
    from matplotlib import rc_context

    # Letters as shapes in SVG, as TrueType in PDF: journals refuse matplotlib's usual Type 3.
    settings = {"svg.hashsalt": "bert_jax", "pdf.fonttype": 42}
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    with (
        files.one_line_errors(f"cannot write the picture {path}"),
        warnings.catch_warnings(),
        rc_context(settings),
    ):
        # Its font lacks some scripts, which a page, with the browser's fonts, shows.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as beside:
            figure.savefig(beside, format=path.suffix[1:], dpi=150, metadata=dates)
    return path
