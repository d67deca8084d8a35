"""Coordinate check of muP: does the change of activations in a step depend on the width?

    python experiments/speed/mup/run.py            # about four minutes on two CPU cores
    python experiments/speed/mup/run.py --page     # only write README.md from results.jsonl

Models of two layers and hidden sizes from 64 to 512 take a few AdamW steps on one batch of random
tokens. After every step, the root mean square of the change since initialization is measured: of
the word vectors, of the hidden states of each layer, and of the logits. With muP it does not grow with
the width, so that a learning rate tuned on a narrow model transfers to a wide one.
"""

import argparse
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.config.schema import Config, ModelConfig, OptimConfig
from bert_jax.data.rows import layout
from bert_jax.model.bert import Bert, init_params
from bert_jax.objectives import losses
from bert_jax.runtime import device
from bert_jax.training import optim

HERE = pathlib.Path(__file__).parent
BASE, HEAD, VOCAB, STEPS, SEEDS = 64, 32, 1_000, 5, 3
WIDTHS = (64, 128, 256, 512)
RATE = 5e-3
PARTS = ("embeddings", "layer 1", "layer 2", "logits")
KINDS = {"standard": 0, "muP": BASE}


def measure(hidden: int, base: int, seed: int) -> list[list[float]]:
    """Return the root mean square changes of `PARTS` after each step."""
    model = ModelConfig(
        layers=2,
        hidden=hidden,
        heads=hidden // HEAD,
        feed_forward=4 * hidden,
        vocab_size=VOCAB,
        positions=32,
        dropout=0.0,
        attention_dropout=0.0,
        next_sentence=False,
        base_hidden=base,
    )
    settings = OptimConfig(optimizer="adamw", learning_rate=RATE, warmup_steps=0, clip_norm=0.0)
    optimizer = optim.make_optimizer(Config(model=model, optim=settings, steps=1_000))
    rng = np.random.default_rng(seed)
    tokens, labels = (jnp.asarray(rng.integers(0, VOCAB, (16, 32))) for _ in range(2))
    whole = jnp.full((16, 1), 32)
    rows, positions = layout(whole, whole, 32), jnp.tile(jnp.arange(32), (16, 1))
    bert = Bert(model)

    @jax.jit
    def step(params, state):
        def loss(params):
            logits = bert.apply({"params": params}, tokens, rows, positions)[0]
            return losses.cross_entropy(logits, labels, jnp.ones(labels.shape))[0] / labels.size

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def activations(params):
        states = bert.apply({"params": params}, tokens, rows, method="hidden_states")
        return *states, bert.apply({"params": params}, tokens, rows, positions)[0]

    params = init_params(model, jax.random.key(seed))
    state, first, changes = optimizer.init(params), activations(params), []
    for _ in range(STEPS):
        params, state = step(params, state)
        now = activations(params)
        changes.append(
            [float(jnp.sqrt(jnp.mean((a - b) ** 2))) for a, b in zip(now, first, strict=True)]
        )
    return changes


def draw(lines: list[dict], path: pathlib.Path) -> None:
    """Plot the changes after each step by width, standard beside muP."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(PARTS), figsize=(11, 5), sharex=True)
    for row, kind in zip(axes, KINDS, strict=True):
        for i, (axis, part) in enumerate(zip(row, PARTS, strict=True)):
            for step in range(STEPS):
                means = [_mean(lines, kind, width, step, i) for width in WIDTHS]
                axis.plot(WIDTHS, means, marker="o", markersize=3, label=f"step {step + 1}")
            axis.set(title=f"{part}, {kind}", xscale="log", yscale="log", xticks=WIDTHS)
            axis.set_xticklabels(WIDTHS)
            axis.minorticks_off()
    for axis in axes[-1]:
        axis.set_xlabel("hidden size")
    axes[0][0].set_ylabel("change (root mean square)")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _mean(lines: list[dict], kind: str, width: int, step: int, part: int) -> float:
    selected = [line for line in lines if (line["kind"], line["hidden"]) == (kind, width)]
    return float(np.mean([line["changes"][step][part] for line in selected]))


def table(lines: list[dict]) -> str:
    """Return the changes after the last step, relative to those of the narrowest model."""
    rows = [f"| | hidden size | {' | '.join(PARTS)} |", "|---|---|" + "---|" * len(PARTS)]
    for kind in KINDS:
        for width in WIDTHS:
            ratios = [
                _mean(lines, kind, width, STEPS - 1, i) / _mean(lines, kind, BASE, STEPS - 1, i)
                for i in range(len(PARTS))
            ]
            rows.append(f"| {kind} | {width} | {' | '.join(f'{x:.2f}' for x in ratios)} |")
    return "\n".join(rows)


def main() -> None:
    """Measure, unless --page is given, and write the plot and the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--page", action="store_true", help="only write the page")
    path = HERE / "results.jsonl"
    if not parser.parse_args().page:
        device.start("cpu")
        lines = [
            {"kind": kind, "hidden": hidden, "seed": seed, "changes": measure(hidden, base, seed)}
            for kind, base in KINDS.items()
            for hidden in WIDTHS
            for seed in range(SEEDS)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    draw(lines, HERE / "coordinates.svg")
    page = HERE / "README.md"
    block = f"<!-- table -->\n{table(lines)}\n<!-- /table -->"
    text = re.sub("<!-- table -->.*<!-- /table -->", block, page.read_text(), flags=re.DOTALL)
    page.write_text(text)


if __name__ == "__main__":
    main()
