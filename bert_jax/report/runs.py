"""Runs beside each other, from their workdirs."""

import pathlib

from bert_jax import files, workdir
from bert_jax.errors import UserError


def loss_curve(workdirs: list[str], out: str) -> pathlib.Path:
    """Draws pretraining runs' loss on words by step, training and held-out, to a PNG, SVG or PDF.

    It is that of the masked words, or of a causal model's next ones.

    Raises:
        UserError: a workdir without metrics, or a picture that cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for i, folder in enumerate(workdirs):
        path = pathlib.Path(folder) / "metrics.jsonl"
        if not path.exists():
            raise UserError(f"{folder} has no metrics: it holds no metrics.jsonl")
        lines, name = workdir.read_lines(path), pathlib.Path(folder).name
        for split, style in (
            ("train", {"lw": 1, "alpha": 0.6}),
            ("heldout", {"marker": "o", "ms": 4}),
        ):
            points = [
                (x["step"], x["masked_lm_loss" if "masked_lm_loss" in x else "next_token_loss"])
                for x in lines
                if x["split"] == split
            ]
            if points:
                label = f"{name}, {'held-out' if split == 'heldout' else 'training'}"
                axes.plot(*zip(*points, strict=True), color=f"C{i}", label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path = pathlib.Path(out)
    with files.one_line_errors(f"cannot write the picture {out}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as beside:
            figure.savefig(beside, format=path.suffix[1:] or "png", dpi=150)
    return path
