"""Sections of a page of runs: overview, final metrics, config differences, parameters."""

import collections
import html
import re
import statistics
from typing import Any

import jax

from bert_jax import config as config_lib
from bert_jax import summary
from bert_jax.model import bert, flops
from bert_jax.tools.report import curves, page, plots
from bert_jax.tools.report.curves import Recorded


def headlines(runs: list[Recorded]) -> str:
    """Return the numbers to see first, a line of them per run."""
    return "".join(_headline(run, len(runs) > 1) for run in runs)


def _headline(run: Recorded, named: bool) -> str:
    by, last = run.best["best_by"], run.metrics[-1]
    items: list[tuple[str, str]] = []
    if best := run.best_heldout:
        items.append((f"best held-out {curves.label(by)}", _number(best[by])))
        items += [
            (curves.label(name), f"{best[name]:.1%}")
            for name in ("masked_lm_accuracy", "accuracy")
            if name in best and name != by
        ][:1]
        items.append(("at step", f"{best['step']:,}"))
    elif "loss" in last:
        items.append(("training loss", _number(last["loss"])))
    items.append(("steps", f"{max(line['step'] for line in run.metrics):,}"))
    progress = curves.clock(run.speed)
    if len(progress["step"]) > 1:
        tokens, hours = progress["tokens"][-1], progress["hours"][-1]
        items += [
            ("training", summary.duration(3600 * hours)),
            ("real tokens", plots.short(_rounded(tokens))),
            ("real tokens/s", plots.short(_rounded(tokens / max(3600 * hours, 1e-9)))),
        ]
    utilization = [line["model_flops_utilization"] for line in run.speed if "model_flops_utilization" in line]  # fmt: skip
    if utilization:
        items.append(("MFU, median", f"{statistics.median(utilization):.0%}"))
    if run.incidents:
        items.append(("bad steps", f"{len(run.incidents):,}"))
    name = f'<p class="run">{html.escape(run.name)}</p>' if named else ""
    parts = "".join(
        f"<div><dt>{html.escape(text)}</dt><dd>{html.escape(value)}</dd></div>"
        for text, value in items
    )
    return f'{name}<dl class="headline">{parts}</dl>'


def commands(runs: list[Recorded]) -> str:
    """Return the command line of every start."""
    parts = []
    for run in runs:
        lines = dict.fromkeys(str(start["command"]) for start in run.starts if "command" in start)
        parts += [f"# {run.name}", *lines] if lines else []
    if not parts:
        return ""
    text = html.escape("\n".join(parts))
    return f"<details><summary>Commands</summary><pre>{text}</pre></details>"


def samples(runs: list[Recorded]) -> str:
    """Return how each run filled the masks of its sample texts, by step."""
    parts = []
    for run in runs:
        texts = dict.fromkeys(str(line.get("text")) for line in run.samples)
        for text in texts:
            lines = [
                [f"{line['step']:,}", *(_candidates(mask) for mask in line["masks"])]
                for line in _thinned([x for x in run.samples if x.get("text") == text])
            ]
            title = f"{run.name}: {text}" if len(runs) > 1 else text
            columns = ["step", *("[MASK]" for _ in lines[0][1:])]
            parts.append(f"<h3>{html.escape(title)}</h3>")
            parts.append(page.table(columns, lines, numbers=False))
    if not parts:
        return (
            '<h2>Predictions over time</h2><p class="quiet">None were recorded. '
            '<code>--config.sample_texts="The [MASK] of the day."</code> fills in the masks at every '
            "evaluation; <code>|</code> separates texts.</p>"
        )
    return "<h2>Predictions over time</h2>" + "".join(parts)


def _candidates(mask: list[dict[str, Any]]) -> str:
    return ", ".join(f"{x['token']} {x['probability']:.0%}" for x in mask[:3])


def _thinned(lines: list[Any], most: int = 12) -> list[Any]:
    """Return at most `most` lines, evenly spaced, with the first and the last."""
    if len(lines) <= most:
        return lines
    return [lines[round(i * (len(lines) - 1) / (most - 1))] for i in range(most)]


def overview(runs: list[Recorded], shapes: list[dict[str, jax.ShapeDtypeStruct]]) -> str:
    """Return a table with a row per run."""
    lines = []
    for run, each in zip(runs, shapes, strict=True):
        last, progress = run.starts[-1] if run.starts else {}, curves.clock(run.speed)
        step = max(line["step"] for line in run.metrics)
        known = len(progress["step"]) > 1
        lines.append(
            [
                run.name,
                f"{step:,} of {run.config.steps:,}",
                flops.parameter_count(each, run.config.model),
                round(progress["tokens"][-1]) if known else "—",
                f"{progress['hours'][-1]:.3g}" if known else "—",
                last.get("devices", "—"),
                len(run.starts),
                last.get("commit") or "—",
                last.get("versions", {}).get("jax", "—"),
            ]
        )
    columns = ["run", "steps", "parameters", "real tokens", "hours", "devices", "starts", "commit", "JAX"]  # fmt: skip
    hours = "Hours exclude evaluations, compilation and the time between starts."
    return page.table(columns, lines) + f'<p class="quiet">{hours}</p>'


def final(runs: list[Recorded]) -> str:
    """Return the last held-out metrics of each run, and those of its best checkpoint."""
    lines: list[tuple[str, dict[str, Any]]] = []
    for run in runs:
        if not run.heldout:
            lines.append((f"{run.name}, last (training)", run.metrics[-1]))
            continue
        lines.append((f"{run.name}, last", run.heldout[-1]))
        if best := run.best_heldout:
            lines.append((f"{run.name}, best {run.best['best_by']}", best))
    names = list(dict.fromkeys(name for _, line in lines for name in line))
    names = sorted(set(names) - {"step", "split"}, key=names.index)
    cells = [
        [title, line["step"], *(_number(line.get(name)) for name in names)] for title, line in lines
    ]
    return (
        '<h2>Final metrics</h2><p class="quiet">Held-out metrics, unless noted.</p>'
        + page.table(["", "step", *names], cells)
    )


def differences(runs: list[Recorded]) -> str:
    """Return the config keys that differ between runs, or from the defaults for a single run."""
    settings_of = [_settings(run) for run in runs]
    columns, note = [run.name for run in runs], "Settings that differ between runs."
    if len(runs) == 1:
        kind = type(runs[0].config)
        settings_of = [config_lib.flatten(kind()), config_lib.flatten(runs[0].config)]
        columns, note = ["default", *columns], "Settings that differ from the defaults."
    keys = dict.fromkeys(key for settings in settings_of for key in settings)
    missing = object()
    lines = []
    for key in keys:
        values = [settings.get(key, missing) for settings in settings_of]
        if any(value != values[0] for value in values):
            lines.append([key, *("—" if value is missing else _text(value) for value in values)])
    if not lines:
        return "<h2>Config</h2><p>All settings are equal.</p>"
    return f'<h2>Config</h2><p class="quiet">{note}</p>' + page.table(
        ["", *columns], lines, numbers=False
    )


def _settings(run: Recorded) -> dict[str, Any]:
    """Return the flattened config, and digests of the data and the initial weights."""
    digests = {
        f"{what} of phase {i}": rows[key][:10]
        for i, rows in enumerate(run.data)
        for key, what in (("digest", "data"), ("start", "initial weights"))
        if key in rows
    }
    return {**config_lib.flatten(run.config), **digests}


def parameters(runs: list[Recorded]) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Return the shapes of the parameters of each run by path, without allocating them."""
    known: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for run in runs:
        if repr(run.config.model) not in known:  # tracing takes seconds for large models
            flat = bert.flatten(bert.shapes(run.config.model))
            known[repr(run.config.model)] = {
                path: flat[path] for path in sorted(flat, key=_parameter_order)
            }
    return [known[repr(run.config.model)] for run in runs]


def _parameter_order(path: str) -> tuple:
    """Return the sort key of parameters: the order of the forward pass, layers by number."""
    first, *rest = path.split("/")
    number = [int(n) for n in re.findall(r"layer_(\d+)", path)]
    return {"embeddings": 0, "encoder": 1, "pooler": 2}.get(first, 3), first, number, rest


def parameter_tables(runs: list[Recorded], shapes: list[dict[str, jax.ShapeDtypeStruct]]) -> str:
    """Return a table of parameters for each group of runs with the same ones."""
    groups: dict[tuple, list[int]] = {}
    for i, (run, each) in enumerate(zip(runs, shapes, strict=True)):
        count = flops.parameter_count(each, run.config.model)
        groups.setdefault((count, *((path, x.shape) for path, x in each.items())), []).append(i)
    return "<h2>Parameters</h2>" + "".join(
        _parameter_table(", ".join(runs[i].name for i in same), shapes[same[0]], count)
        for (count, *_), same in groups.items()
    )


def _parameter_table(names: str, shapes: dict[str, jax.ShapeDtypeStruct], count: int) -> str:
    groups: collections.Counter[str] = collections.Counter()
    for path, x in shapes.items():
        first, *rest = path.split("/")
        groups[f"{first}/{rest[0]}" if first == "encoder" else first] += x.size
    total = groups.total()
    note = f"{count:,} parameters, {_mebibytes(total)} MiB in float32"
    if total > count:
        note += f"; {total - count:,} more pad the vocabulary"
    by_group = page.table(
        ["part", "parameters", "MiB"],
        [[group, size, _mebibytes(size)] for group, size in groups.items()],
    )
    each = page.table(
        ["parameter", "shape", "count", "MiB"],
        [[path, str(list(x.shape)), x.size, _mebibytes(x.size)] for path, x in shapes.items()],
    )
    return (
        f"<details><summary>{html.escape(names)}: {note}</summary>"
        f"<h3>By part</h3>{by_group}<h3>Each</h3>{each}</details>"
    )


def _number(value: Any) -> str:
    if value is None:
        return "—"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"
    return str(value)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _text(value: Any) -> str:
    return (", ".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "''"


def _mebibytes(count: int) -> str:
    """Format the size of `count` float32 values in MiB."""
    return f"{4 * count / 2**20:,.2f}"
