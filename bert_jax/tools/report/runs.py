"""Compare runs: a page, and pictures for papers."""

import base64
import html
import pathlib
import statistics

from bert_jax import storage
from bert_jax.config import fields as fields_lib
from bert_jax.tools.report import curves, page, plots

_MISSING = "—"


@storage.with_local_inputs("folders")
@storage.with_uploaded_output("out")
def write(folders: list[str], out: str) -> pathlib.Path:
    """Write a page on runs (.html), or a picture of their loss (.png, .svg, .pdf), and return its path."""
    path = plots.check_suffix(out)
    if path.suffix == ".html":
        return page.write(path, html_of(curves.read(folders)))
    return plots.save(plots.draw_loss(curves.read(folders)), path)


def html_of(runs: list[curves.Recorded]) -> str:
    """Return the page of runs."""
    body = [_headlines(runs), '<div class="pictures">']
    for group, figure in plots.draw_groups(runs).items():
        svg = base64.b64encode(plots.render(figure, ".svg")).decode()
        titles = html.escape(", ".join(axes.get_title("left") for axes in figure.axes))
        image = f'<img alt="{titles}" src="data:image/svg+xml;base64,{svg}">'
        body.append(f"<section><h2>{group}</h2>{image}</section>")
    body += ["</div>", *_samples(runs)]
    body += ["<h2>Metrics at the best step</h2>", _metrics(runs)]
    body += ["<h2>Settings</h2>", _differences(runs)]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return page.page(title, "\n".join(body))


def _headlines(runs: list[curves.Recorded]) -> str:
    """Return the numbers to see first, a row per run."""
    columns = ["run", "best held-out", "steps", "real tokens", "hours", "real tokens/s", "MFU"]
    lines = []
    for run in runs:
        by, best = run.best["best_by"], run.best_heldout
        _, tokens, hours = (x[-1] for x in curves.clock(run.speed).values())
        utilization = [x[curves.UTILIZATION] for x in run.speed if curves.UTILIZATION in x]
        line = [
            f"{by} {best[by]:.4g} at step {best['step']:,}" if best else _MISSING,
            f"{run.metrics[-1]['step']:,} of {run.config.steps:,}",
            plots.short(tokens),
            f"{hours:.3g}",
            plots.short(tokens / 3600 / hours) if hours else _MISSING,
            f"{statistics.median(utilization):.0%}" if utilization else _MISSING,
        ]
        lines.append([run.name, *line])
    return page.table(columns, lines)


def _samples(runs: list[curves.Recorded]) -> list[str]:
    """Return how runs filled the masks of each sample text, by step."""
    tables: dict[str, list[list[str]]] = {}
    for run in runs:
        for text in dict.fromkeys(str(line.get("text")) for line in run.samples):
            lines = [line for line in run.samples if line.get("text") == text]
            every = len(lines) // 8 + 1
            for line in lines[::-every][::-1]:  # with the last one
                masks = [
                    ", ".join(f"{x['token']} {x['probability']:.0%}" for x in mask[:3])
                    for mask in line["masks"]
                ]
                tables.setdefault(text, []).append([run.name, f"{line['step']:,}", *masks])
    parts = ["<h2>Predictions over time</h2>"] if tables else []
    for text, rows in tables.items():
        columns = ["run", "step", *["[MASK]"] * (len(rows[0]) - 2)]
        parts += [f"<h3>{html.escape(text)}</h3>", page.table(columns, rows, numbers=False)]
    return parts


def _metrics(runs: list[curves.Recorded]) -> str:
    """Return a table of the metrics that select the best checkpoint, or else of the last ones."""
    lines = [run.best_heldout or run.metrics[-1] for run in runs]
    names = list(dict.fromkeys(name for line in lines for name in line))
    cells = [[line.get(name, _MISSING) for name in names] for line in lines]
    rows = [[run.name, *each] for run, each in zip(runs, cells, strict=True)]
    return page.table(["run", *names], rows)


def _differences(runs: list[curves.Recorded]) -> str:
    """Return the settings that differ between runs, or from the defaults for a single run."""
    columns, settings = [run.name for run in runs], [run.settings for run in runs]
    if len(runs) == 1:
        default = fields_lib.flatten(type(runs[0].config)())
        columns, settings = ["default", *columns], [default, fields_lib.flatten(runs[0].config)]
    rows = []
    for key in dict.fromkeys(key for each in settings for key in each):
        values = [repr(each[key]) if key in each else _MISSING for each in settings]
        if len({*values}) > 1:
            rows.append([key, *values])
    return page.table(["", *columns], rows, numbers=False)
