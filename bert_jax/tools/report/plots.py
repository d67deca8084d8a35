"""Plot the metrics of runs for papers."""

import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from bert_jax import files
from bert_jax.tools.report.curves import AXES, Curve, title

PICTURES = (".png", ".svg", ".pdf")
# Size of figures in inches, and the axes in them as fractions (left, bottom, width, height). The same
# for all plots, to align them.
_SIZE = (6.0, 3.3)
_BOX = (0.115, 0.15, 0.865, 0.77)
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
    names: list[str],
    levels: Mapping[str, float] | None = None,
) -> Any:
    """Return a figure of a metric by one of `AXES`.

    Args:
        name: name of the metric.
        lines: curves to draw.
        axis: key of `AXES`.
        names: names of the runs for a legend.
        levels: horizontal lines to draw for reference, by label.
    """
    figure, axes = _figure()
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
    _label(axes, AXES[axis], title(name))
    legend(axes, {names[run]: line for run, line in drawn.items()})
    return figure


def draw_levels(axes: Any, levels: Mapping[str, float]) -> None:
    """Draw labeled horizontal lines, behind the curves."""
    for label, value in levels.items():
        axes.axhline(value, color="black", lw=0.8, ls=":", alpha=0.7, zorder=1)
        position = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        axes.text(0.995, value, f"{label} {value:.2f}", fontsize=7, **position)


def draw_lengths(histogram: Int[np.ndarray, " L"]) -> Any:
    """Return a figure of the number of sequences by length 0..L-1, in tokens."""
    figure, axes = _figure()
    axes.stairs(histogram, np.arange(len(histogram) + 1) - 0.5, fill=True, color=color(0))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    _label(axes, "tokens per sequence", "sequences")
    return figure


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=72)
    axes = figure.add_axes(_BOX)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(alpha=0.15, color="black")
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))
    axes.yaxis.get_offset_text().set(size=8)
    return figure, axes


def _label(axes: Any, x: str, y: str) -> None:
    for label, text in ((axes.xaxis.label, x), (axes.yaxis.label, y)):
        label.set(text=text, size=9, parse_math=False)


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
