"""Draw attention maps: an interactive page, and a picture of all heads."""

import html
import pathlib
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, UInt8

from bert_jax import storage
from bert_jax.errors import UserError
from bert_jax.inference.attention_maps import AttentionMaps, entropy, mean_distance, rollout
from bert_jax.tools.report import page, plots

if TYPE_CHECKING:
    import matplotlib.figure


def paths(out: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Return the paths of the page and the picture, one of which is `out`, by its suffix."""
    path = pathlib.Path(out)
    if path.suffix == ".html":
        return path, path.with_suffix(".png")
    if path.suffix in plots.PICTURES:
        return path.with_suffix(".html"), path
    raise UserError(f"--out {out}: must end in .html, {', '.join(plots.PICTURES[:-1])} or .pdf")


@storage.with_uploaded_output("out")
def write(maps: AttentionMaps, source: str, out: str, rolled: bool = False) -> list[pathlib.Path]:
    """Write the page and the picture, each atomically, and return their paths.

    Args:
        maps: attention maps of a text.
        source: name of the model.
        out: path of the page or the picture; see `paths`.
        rolled: whether to show attention rollout too.
    """
    page_path, picture_path = paths(out)
    page.write(page_path, document(maps, source, rolled))
    return [page_path, plots.save(picture(maps, source, rolled), picture_path)]


def columns(
    maps: AttentionMaps, rolled: bool
) -> tuple[list[str], list[Float[np.ndarray, "C T T"]]]:
    """Return the C columns of the tables of maps: each head, the mean, and rollout if asked for.

    Returns:
        Names of the columns, and the maps of each layer.
    """
    names = [f"head {i + 1}" for i in range(maps.probabilities.shape[1])] + ["mean"]
    layers = [np.concatenate([heads, heads.mean(0)[None]]) for heads in maps.probabilities]
    if rolled:
        names.append("rollout")
        rollouts = rollout(maps.probabilities)
        layers = [np.concatenate([x, y[None]]) for x, y in zip(layers, rollouts, strict=True)]
    return names, layers


def _bytes(weights: Float[np.ndarray, "C T T"]) -> UInt8[np.ndarray, "C T T"]:
    # Square roots, because weights are small in long texts: linear steps would round 1/512 to 0.
    return np.rint(255 * np.sqrt(np.clip(weights, 0, 1))).astype(np.uint8)


def _title(maps: AttentionMaps) -> str:
    text = " / ".join(" ".join(text.split()) for text in maps.texts)
    return f"Attention: {text if len(text) <= 90 else text[:89] + '…'}"


def document(maps: AttentionMaps, source: str, rolled: bool = False) -> str:
    """Return the page as HTML; arguments as in `write`."""
    names, layers = columns(maps, rolled)
    count, heads, tokens, _ = maps.probabilities.shape
    data = {
        "tokens": maps.tokens,
        "segments": maps.segments.tolist(),
        "layers": count,
        "heads": heads,
        "columns": names,
        "maps": page.packed(b"".join(_bytes(layer).tobytes() for layer in layers)),
        "entropy": entropy(maps.probabilities).tolist(),
        "distance": mean_distance(maps.probabilities).tolist(),
    }
    rolling = (
        " <b>Rollout</b> accumulates attention from the input to this layer; each layer adds half "
        "the mean of its heads to half the residual (Abnar and Zuidema 2020)."
        if rolled
        else ""
    )
    longer = " (in a text of this length, those of at least four times the mean weight)" * (
        tokens > 128
    )
    style = (pathlib.Path(__file__).parent / "attention.css").read_text()
    body = f"""<style>
{style}</style>
<p class="quiet">{html.escape(source)}: {count} layers, {heads} heads, {tokens} word pieces.</p>
<noscript><p>This page needs JavaScript.</p></noscript>
<h2>All heads</h2>
<p>Each square is a head. A row shows how much one word piece attends to each other one, from left to
right. <b>Mean</b> is the mean of the layer's heads.{rolling} Select a map with a click, or with
<kbd>Tab</kbd> and the arrow keys.</p>
<p class="scale" id="scale" aria-hidden="true"></p>
<div class="wide"><table class="choice maps" id="maps"></table></div>
<h2 id="chosen" aria-live="polite"></h2>
<p>Point at a word piece on the left, or select one with <kbd>Tab</kbd> and the arrow keys, to see
what it attends to. <kbd>Esc</kbd> shows all lines again{longer}. Check heads to draw their lines over each other, each in
its color.</p>
<fieldset id="overlay"><legend>heads of the layer</legend></fieldset>
<p class="quiet">Opacity of a line by its weight:</p>
<p class="scale" id="opacity" aria-hidden="true"></p>
<section>
<p id="weights" role="status"></p>
<div class="one">
<div id="lines">
<ol id="from" role="listbox" aria-label="word pieces that attend"></ol>
<canvas id="between" aria-hidden="true"></canvas>
<ol id="to" aria-label="word pieces attended to"></ol>
</div>
<div class="wide" id="square"><canvas id="large" role="img"></canvas></div>
</div>
</section>
<h2>Entropy and distance</h2>
<p><b>Entropy</b> measures how widely a head attends: 0 nats for a single word piece, up to
{np.log(tokens):.2f} if all {tokens} have equal weight. <b>Distance</b> is the mean distance to the
attended word pieces. Both are means over queries, computed from unrounded weights.</p>
<div class="figures">
<div class="wide"><table class="choice" id="entropy"></table></div>
<div class="wide"><table class="choice" id="distance"></table></div>
</div>
<p class="quiet">Layers and heads are numbered from 1. Colors show the square root of the weight in
255 steps, so percentages are accurate to 0.4 points.</p>"""
    return page.page(_title(maps), body, "attention.js", data)


def picture(maps: AttentionMaps, source: str, rolled: bool = False) -> "matplotlib.figure.Figure":
    """Return a figure of all maps with a row per layer; arguments as in `write`.

    Word pieces label the left and the lower edge if the text would be large enough to read.
    """
    from matplotlib.figure import Figure

    names, layers = columns(maps, rolled)
    tokens = len(maps.tokens)
    # Placed manually, in inches: matplotlib would take a minute to lay out 400 axes.
    side, gap = float(np.clip(0.085 * tokens, 1.1, 2.2)), 0.1
    points = min(8.0, 0.85 * 72 * side / tokens)
    labels = maps.tokens if points >= 4 else []
    edge = 0.62 * points / 72 * max(map(len, labels), default=0) + 0.1
    left, bottom, top = 0.35 + edge, 0.1 + edge, 0.8
    width = left + len(names) * (side + gap) + 0.1
    height = bottom + len(layers) * (side + gap) + top
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.axis("off")

    def write(x, y, text, size, **how):
        axes.text(x, y, text, fontsize=size, parse_math=False, **how)

    for row, weights in enumerate(layers):
        below = height - top - (row + 1) * (side + gap)
        middle = below + side / 2
        write(0.25, middle, f"layer {row + 1}", 9, rotation=90, ha="center", va="center")
        for column, one in enumerate(weights):
            x = left + column * (side + gap)
            extent = (x, x + side, below, below + side)
            axes.imshow(np.sqrt(one), cmap="Blues", vmin=0, vmax=1, extent=extent, aspect="auto")
            axes.plot(
                [x, x + side, x + side, x, x],
                [below, below, below + side, below + side, below],
                color="0.7",
                lw=0.5,
            )
        for i, token in enumerate(labels):
            y = below + side * (1 - (i + 0.5) / tokens)
            write(left - 0.04, y, token, points, ha="right", va="center")
    for column, name in enumerate(names):
        x = left + column * (side + gap)
        write(x + side / 2, height - top + 0.02, name, 9, ha="center", va="bottom")
        for i, token in enumerate(labels):
            across = x + side * (i + 0.5) / tokens
            write(across, bottom - 0.04, token, points, ha="center", va="top", rotation=90)
    room = int((width - 0.2) * 72 / 6.5)  # characters of the title
    for line, (text, size) in enumerate(
        [
            (_title(maps), 11),
            (f"{source}; rows attend to columns; color: square root of the weight", 8),
        ]
    ):
        text = text if len(text) <= room else text[: room - 1] + "…"
        write(0.1, height - 0.12 - 0.24 * line, text, size, ha="left", va="top")
    axes.set(xlim=(0, width), ylim=(0, height))  # imshow changes them
    return figure
