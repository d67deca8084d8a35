"""Draw attention maps: an interactive page, and a picture of all heads."""

import html
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8

from bert_jax import storage
from bert_jax.inference.attention_maps import AttentionMaps, entropy, mean_distance, rollout
from bert_jax.tools.report import page, plots

if TYPE_CHECKING:
    import matplotlib.figure


def paths(out: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Return the paths of the page and the picture, one of which is `out`, by its suffix."""
    path = plots.check_suffix(out)
    if path.suffix == ".html":
        return path, path.with_suffix(".png")
    return path.with_suffix(".html"), path


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
    side = float(np.clip(0.085 * tokens, 1.1, 2.2))  # of a map, in inches
    points = min(8.0, 0.85 * 72 * side / tokens)
    labels = maps.tokens if points >= 4 else []
    edge = 0.62 * points / 72 * max(map(len, labels), default=0) + 0.1
    shape = np.array([side * len(names), side * len(layers)])
    width, height = shape + edge + (0.4, 0.8)
    figure = Figure((width, height), facecolor="white")
    axes = figure.add_axes((edge / width, edge / height, *shape / (width, height)))
    weights = np.stack(layers).transpose(0, 2, 1, 3).reshape(len(layers) * tokens, -1)
    axes.imshow(np.sqrt(weights), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    text: dict[str, Any] = {"fontsize": points, "parse_math": False}
    for axis, titles, rotation in ((axes.yaxis, layers, 0), (axes.xaxis, names, 90)):
        places = range(len(titles) * len(labels))
        axis.set_ticks(places, labels * len(titles), **text, rotation=rotation)
        axis.set_ticks(np.arange(1, len(titles)) * tokens - 0.5, minor=True)
    axes.grid(which="minor", color="0.7", lw=2)
    axes.tick_params(which="both", length=0)
    above, beside = axes.secondary_xaxis("top"), axes.secondary_yaxis("right")
    middle = (tokens - 1) / 2
    above.set_xticks(np.arange(len(names)) * tokens + middle, names)
    layer_names = [f"layer {i + 1}" for i in range(len(layers))]
    beside.set_yticks(
        np.arange(len(layers)) * tokens + middle, layer_names, rotation=90, va="center"
    )
    room = int(width * 72 / 6)  # characters
    lines = (_title(maps), f"{source}; rows attend to columns; color: square root of the weight")
    title = "\n".join(x if len(x) <= room else x[: room - 1] + "…" for x in lines)
    place = {"x": 0.1 / width, "y": 1 - 0.1 / height, "ha": "left", "fontsize": 9}
    figure.suptitle(title, **place, parse_math=False)
    return figure
