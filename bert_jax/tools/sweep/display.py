"""Display of a running sweep."""

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bert_jax.runs import workdir
from bert_jax.tools.sweep.folders import PointRun
from bert_jax.tools.sweep.scheduler import Scheduler, say
from bert_jax.training.summary import duration

_STYLES = {"running": "bold", "done": "green", "failed": "red", "blocked": "red", "stopped": "yellow"}  # fmt: skip
_NUMBERS = ("step", "loss", "left")
_WIDTH = 50  # of the state and the numbers, with the space between columns


def note_of(point_run: PointRun, now: float, note: str) -> dict[str, str]:
    """Return what to show of a running point: step, loss, time left; `note` without these."""
    out = point_run.files
    runs = sorted(out.glob("seed_*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    folder = runs[-1].parent if runs else out
    lines = workdir.read_steps(folder / "metrics.jsonl")
    if not lines or not (folder / "config.json").exists():
        return {"note": note}
    line = lines[-1]
    steps = json.loads((folder / "config.json").read_text())["config"]["steps"]
    starts = folder / "starts.jsonl"
    done = line["step"] - workdir.read_lines(starts)[-1]["step"]
    start_time = starts.stat().st_mtime
    seconds_per_step = (now - start_time) / done if done > 0 else None
    # The remaining seeds of a point have as many steps each.
    seeds = int(point_run.point.options.get("--seeds", 1))
    remaining = steps * (seeds - len(runs)) if runs else 0
    left = (steps - line["step"] + remaining) * seconds_per_step if seconds_per_step else None
    loss = next((v for k, v in line.items() if k.endswith("loss")), None)
    return {
        "step": f"{line['step']:,}/{steps:,}",
        "loss": "" if loss is None else f"{loss:.3f}",
        "left": duration(left) if left is not None else "",
        "note": folder.name if runs else "",
    }


@contextlib.contextmanager
def display(scheduler: Scheduler) -> Iterator[Callable[[], None]]:
    """Show a live table in a terminal, or a line for every change of state in a log.

    Yield a function that updates it.
    """
    before, drawn = dict(scheduler.state), 0.0
    if num_done := list(before.values()).count("done"):
        say(f"{num_done} of {len(before)} points are already done")

    def log_changes() -> None:
        for name, state in scheduler.state.items():
            if state != before[name]:
                before[name] = state
                log = f" ({scheduler.point_runs[name].log})"
                say(f"{name}: {state}{log if state in ('running', 'failed') else ''}")

    def redraw() -> None:
        nonlocal before, drawn
        if time.monotonic() - drawn > 1 or scheduler.state != before:
            before, drawn = dict(scheduler.state), time.monotonic()
            table.refresh()

    if not sys.stderr.isatty():
        yield log_changes
        return
    tty = Console(stderr=True)
    with Live(
        console=tty, auto_refresh=False, get_renderable=lambda: table_of(scheduler, tty.width)
    ) as table:
        yield redraw  # the last table is drawn at the end


def table_of(scheduler: Scheduler, width: int) -> Table:
    """Return the table of a terminal of `width` characters, with a line per point."""
    table = Table(box=None, pad_edge=False)
    for title in ("point", "state", *_NUMBERS, ""):
        justify = "right" if title in _NUMBERS else "left"
        table.add_column(title, justify=justify, no_wrap=bool(title))  # only the note is cropped
    states, now = scheduler.state, time.time()
    labels = zip(states, _shortened([*states], max(width - _WIDTH, 9)), strict=True)
    # Finished points come last: a small terminal shows only the first lines.
    for name, label in sorted(labels, key=lambda each: states[each[0]] == "done"):
        point_run, note = scheduler.point_runs[name], {}
        if states[name] == "running":
            note = note_of(point_run, now, scheduler.note(name))
        if states[name] == "failed":
            note = {"note": point_run.last_log_line()}
        state = Text(states[name], _STYLES.get(states[name], "dim"))
        cells = [note.get(key, "") for key in (*_NUMBERS, "note")]
        texts = [Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells]
        table.add_row(Text(label), state, *texts)  # plain strings would be markup
    return table


def _shortened(names: Sequence[str], width: int) -> list[str]:
    """Return names of at most `width` characters: without keys, and cut where they still differ, or numbered."""
    if max(map(len, names), default=0) <= width:
        return [*names]
    values = [re.sub(r"[^ ,=]+=", "", name) for name in names]
    for start in range(0, width, width // 4):  # the ends differ most often
        end = width - 1 - start
        cut = [x if len(x) <= width else f"{x[:start]}…{x[len(x) - end :]}" for x in values]
        if len({*cut}) == len(names):
            return cut
    return [f"{i} {x}"[: width - 1] + "…" for i, x in enumerate(values, 1)]
