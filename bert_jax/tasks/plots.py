"""Figures of predictions: a confusion matrix, and a scatter plot of numbers."""

import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from bert_jax.storage import files


def draw_confusion(
    counts: Int[np.ndarray, "C C"], labels: Sequence[str], path: pathlib.Path
) -> None:
    """Draw a confusion matrix: labels in rows, predictions in columns."""
    from matplotlib.figure import Figure

    n = len(labels)
    cell, font = (0.7, 10) if n <= 6 else (0.45, 10) if n <= 25 else (0.24, 8)  # inches, points
    names = [label if len(label) <= 30 else f"{label[:29]}…" for label in labels]
    figure = Figure(figsize=(cell * n + 1, cell * n + 1))
    axes = figure.add_axes((0, 0, 1, 1))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # The square root makes rare confusions visible.
    axes.pcolormesh(np.sqrt(shares), cmap="Blues", vmin=0, vmax=1.1, edgecolors="0.85", lw=0.5)
    axes.invert_yaxis()
    axes.set_xticks(np.arange(n) + 0.5, names, rotation=90, fontsize=font, parse_math=False)
    axes.set_yticks(np.arange(n) + 0.5, names, fontsize=font, parse_math=False)
    for i, j in np.argwhere(counts):
        count = counts[i, j]
        axes.text(
            j + 0.5,
            i + 0.5,
            f"{count}" if count < 10_000 else f"{count / 1000:.0f}k",
            ha="center",
            va="center",
            color="white" if shares[i, j] > 0.4 else "black",
            fontsize=min(10, cell * 25),
        )
    axes.set(xlabel="predicted", ylabel="label (darker: a larger share of its examples)")
    _save(figure, path, 150 if n <= 25 else 90)


def draw_scatter(
    truth: Float[np.ndarray, " E"], predicted: Float[np.ndarray, " E"], path: pathlib.Path
) -> None:
    """Plot predicted against true numbers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5))
    axes = figure.add_subplot()
    ends = [min(truth.min(), predicted.min()), max(truth.max(), predicted.max())]
    axes.plot(ends, ends, color="gray", lw=1)
    axes.scatter(truth, predicted, s=8, alpha=0.4, edgecolors="none")
    axes.set(xlabel="true", ylabel="predicted")
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path, 150)


def _save(figure: Any, path: pathlib.Path, dots_per_inch: int) -> None:
    with files.atomic_write(path) as temporary, warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes; users cannot do anything about it.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(temporary, format="png", dpi=dots_per_inch, bbox_inches="tight")
