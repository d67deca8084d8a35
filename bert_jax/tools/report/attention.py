"""What attends to what in a text: a page to look around in, and a picture of all heads."""

import html
import pathlib
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, UInt8

from bert_jax.errors import UserError
from bert_jax.inference import AttentionMaps, distance, entropy, rollout
from bert_jax.tools.report import page, plots

if TYPE_CHECKING:
    import matplotlib.figure


def paths(out: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Where the page and the picture go: one is `out`, by its suffix, the other stands beside it.

    Raises:
        UserError: a suffix of neither.
    """
    path = pathlib.Path(out)
    if path.suffix == ".html":
        return path, path.with_suffix(".png")
    if path.suffix in plots.PICTURES:
        return path.with_suffix(".html"), path
    raise UserError(f"--out {out}: it must end in .html, {', '.join(plots.PICTURES[:-1])} or .pdf")


def write(maps: AttentionMaps, source: str, out: str, rolled: bool = False) -> list[pathlib.Path]:
    """Writes the page and the picture, each whole or not at all.

    Args:
        maps: what to show.
        source: what the model is called.
        out: as `paths` takes it.
        rolled: attention rollout too.

    Returns:
        Their paths.

    Raises:
        UserError: a file of no known kind, or one that cannot be written.
    """
    page_path, picture_path = paths(out)
    page.write(page_path, document(maps, source, rolled))
    return [page_path, plots.save(picture(maps, source, rolled), picture_path)]


def columns(
    maps: AttentionMaps, rolled: bool
) -> tuple[list[str], list[Float[np.ndarray, "C T T"]]]:
    """What there is of every layer: each head, the mean of all, and rollout.

    Returns:
        C names, and for each layer its maps.
    """
    names = [f"head {i + 1}" for i in range(maps.probabilities.shape[1])] + ["mean"]
    layers = [np.concatenate([heads, heads.mean(0)[None]]) for heads in maps.probabilities]
    if rolled:
        names.append("rollout")
        through = rollout(maps.probabilities)
        layers = [np.concatenate([x, y[None]]) for x, y in zip(layers, through, strict=True)]
    return names, layers


def _bytes(weights: Float[np.ndarray, "C T T"]) -> UInt8[np.ndarray, "C T T"]:
    # Roots, for the weights of long texts are small: 1/512 would be none of 255 equal steps.
    return np.rint(255 * np.sqrt(np.clip(weights, 0, 1))).astype(np.uint8)


def _called(maps: AttentionMaps) -> str:
    text = " / ".join(" ".join(text.split()) for text in maps.texts)
    return f"Attention: {text if len(text) <= 90 else text[:89] + '…'}"


def document(maps: AttentionMaps, source: str, rolled: bool = False) -> str:
    """The page, as HTML; arguments as `write` takes them."""
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
        "distance": distance(maps.probabilities).tolist(),
    }
    rolling = (
        " <b>Rollout</b> is what has come through all layers up to this one, each passing on half "
        "its heads' mean and half of what went in (Abnar and Zuidema 2020)."
        if rolled
        else ""
    )
    longer = ", of a text as long as this those of four times the mean weight" * (tokens > 128)
    style = (pathlib.Path(__file__).parent / "attention.css").read_text()
    body = f"""<style>
{style}</style>
<p class="quiet">{html.escape(source)}: {count} layers of {heads} heads, {tokens} word pieces.</p>
<noscript><p>What is below is drawn by JavaScript, which is switched off.</p></noscript>
<h2>Every head</h2>
<p>A square a head: each row is a word piece, and shows how much it attends to every other, from left
to right. <b>Mean</b> is that of the layer's heads.{rolling} Choose one by a click, or by
<kbd>Tab</kbd> and the arrow keys.</p>
<p class="scale" aria-hidden="true"></p>
<div class="wide"><table class="choice maps" id="maps"></table></div>
<h2 id="chosen" aria-live="polite"></h2>
<p>Point at a word piece on the left, or go through them with <kbd>Tab</kbd> and the arrow keys, to
follow what it attends to. <kbd>Esc</kbd> shows all lines again{longer}.</p>
<section>
<p id="told" role="status"></p>
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
<p><b>Entropy</b> says how widely a head looks: 0 nats is at one word piece, {np.log(tokens):.2f} at
all {tokens} alike. <b>Distance</b> says how far, in word pieces either way. Both are means over the
word pieces that attend, computed before weights were rounded.</p>
<div class="figures">
<div class="wide"><table class="choice" id="entropy"></table></div>
<div class="wide"><table class="choice" id="distance"></table></div>
</div>
<p class="quiet">Layers and heads count from 1. Colours show the root of a weight, in 255 steps: a
percentage is true to 0.4 of a point, a small one to less.</p>"""
    return page.page(_called(maps), body, "attention.js", data)


def picture(maps: AttentionMaps, source: str, rolled: bool = False) -> "matplotlib.figure.Figure":
    """All maps in one figure, a row a layer; arguments as `write` takes them.

    Word pieces are named along the left and the lower edge where a letter would be large enough to
    read.
    """
    from matplotlib.figure import Figure

    names, layers = columns(maps, rolled)
    tokens = len(maps.tokens)
    # Everything is placed by hand, in inches: matplotlib would take a minute to lay out 400 axes.
    side, gap = float(np.clip(0.085 * tokens, 1.1, 2.2)), 0.1
    points = min(8.0, 0.85 * 72 * side / tokens)
    shown = maps.tokens if points >= 4 else []
    edge = 0.62 * points / 72 * max(map(len, shown), default=0) + 0.1
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
            place = (x, x + side, below, below + side)
            axes.imshow(np.sqrt(one), cmap="Blues", vmin=0, vmax=1, extent=place, aspect="auto")
            axes.plot(
                [x, x + side, x + side, x, x],
                [below, below, below + side, below + side, below],
                color="0.7",
                lw=0.5,
            )
        for i, token in enumerate(shown):
            y = below + side * (1 - (i + 0.5) / tokens)
            write(left - 0.04, y, token, points, ha="right", va="center")
    for column, name in enumerate(names):
        x = left + column * (side + gap)
        write(x + side / 2, height - top + 0.02, name, 9, ha="center", va="bottom")
        for i, token in enumerate(shown):
            across = x + side * (i + 0.5) / tokens
            write(across, bottom - 0.04, token, points, ha="center", va="top", rotation=90)
    room = int((width - 0.2) * 72 / 6.5)  # letters of the title
    for line, (text, size) in enumerate(
        [(_called(maps), 11), (f"{source}; rows attend to columns, colour: root of weight", 8)]
    ):
        text = text if len(text) <= room else text[: room - 1] + "…"
        write(0.1, height - 0.12 - 0.24 * line, text, size, ha="left", va="top")
    axes.set(xlim=(0, width), ylim=(0, height))  # pictures move them
    return figure
