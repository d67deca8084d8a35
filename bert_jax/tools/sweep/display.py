"""Display of a running sweep."""

import json
import sys
import time
from typing import Any

from bert_jax.runs import workdir
from bert_jax.tools.sweep.folders import PointRun
from bert_jax.tools.sweep.scheduler import Scheduler
from bert_jax.training.summary import duration

_STYLES = {"running": "bold", "done": "green", "failed": "red", "blocked": "red", "stopped": "yellow"}  # fmt: skip


def note_of(point_run: PointRun, now: float, note: str) -> dict[str, str]:
    """Return what to show of a running point: step, loss, time left; `note` without these."""
    out = point_run.files
    runs = sorted(out.glob("seed_*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    folder = runs[-1].parent if runs else out
    lines = workdir.read_steps(folder / "metrics.jsonl")
    if not lines or not (folder / "config.json").exists():
        return {"note": note[-60:]}
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


class Display:
    """A live table in a terminal; a line for every change of state in a log."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._live = scheduler, None
        self._before: dict[str, str] = {}
        self._drawn = 0.0

    def __enter__(self) -> "Display":
        self._before = dict(self._scheduler.state)
        if num_done := list(self._before.values()).count("done"):
            print(f"{num_done} of {len(self._before)} points are already done", file=sys.stderr)
        if sys.stderr.isatty():
            from rich import console, live

            self._live = live.Live(
                self._table(), console=console.Console(stderr=True), auto_refresh=False
            )
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def show(self) -> None:
        """Update the display."""
        state = self._scheduler.state
        if self._live is None:
            for name, now in state.items():
                if now != self._before[name]:
                    point_run = self._scheduler.point_runs[name]
                    log = f" ({point_run.log})" if now in ("running", "failed") else ""
                    print(f"{name}: {now}{log}", file=sys.stderr, flush=True)
        elif time.monotonic() - self._drawn > 1 or state != self._before:
            self._drawn = time.monotonic()
            self._live.update(self._table(), refresh=True)
        self._before = dict(state)

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for title in ("point", "state", "step", "loss", "left", ""):
            is_number = title in ("step", "loss", "left")
            table.add_column(title, justify="right" if is_number else "left", no_wrap=True)
        states, now = self._scheduler.state, time.time()
        # Finished points come last: a small terminal shows only the first lines.
        for name in sorted(states, key=lambda name: states[name] == "done"):
            running = states[name] == "running"
            note = {}
            if running:
                note = note_of(self._scheduler.point_runs[name], now, self._scheduler.note(name))
            if states[name] == "failed":
                note = {"note": self._scheduler.point_runs[name].last_log_line()[-80:]}
            state = Text(states[name], _STYLES.get(states[name], "dim"))
            cells = [note.get(key, "") for key in ("step", "loss", "left", "note")]
            table.add_row(Text(name), state, *map(Text, cells))  # plain strings would be markup
        return table
