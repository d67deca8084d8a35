"""Progress of long tasks: a live bar in a terminal, occasional plain lines in a log."""

import contextlib
import datetime
import os
import pathlib
import sys
import time
from typing import Any, TextIO

from bert_jax.errors import with_user_paths
from bert_jax.storage import files

LOG_EVERY_SECONDS = 15.0
SILENT_SECONDS = 0.5  # tasks shorter than this write no line to a log
_WIDE = 100  # columns of a terminal that has room for a title and a long bar


def _write(text: str) -> None:
    """Write to file descriptor 2, unbuffered; ignore errors such as a closed pipe."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


class Progress:
    """Progress bar on standard error, or plain lines if that is not a terminal.

    Use it as a context manager. `advance` moves it, `note` sets the text at its end (such as a loss
    or speed), and `say` prints a line above the bar.

    Args:
        title: name of the task, a word or two.
        total: number of units; None if unknown.
        unit: name of a unit; "B" shows sizes as kB or MB.
        done: units already done at the start, for a resumed run.
    """

    shown = True  # False in processes that must not print, such as all but process 0
    is_quiet = False  # print only warnings, for `--quiet`
    json_lines: TextIO | None = None  # where runs write their metrics as JSON lines, for `--json`

    def __init__(self, title: str, total: int | None, unit: str, done: int = 0):
        self._title, self._total, self._unit = title, total, unit
        self._initial, self._done = done, done
        self._note = ""
        self._bar = None
        self._file: TextIO | None = None
        self.is_narrow = False  # whether there is room only for the most important numbers
        self._start = self._logged = time.monotonic()

    def __enter__(self) -> "Progress":
        self._start = self._logged = time.monotonic()
        if self.shown and not self.is_quiet and sys.stderr.isatty():
            from rich import console, progress  # importing rich takes 0.1 s

            sizes: list[Any] = [progress.MofNCompleteColumn()]
            if self._unit == "B":
                sizes = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
            terminal = console.Console(stderr=True)
            self.is_narrow = terminal.width < _WIDE and self._unit == "steps"
            title = [progress.TextColumn("[bold]{task.description}"), progress.BarColumn(20)]
            self._bar = progress.Progress(
                progress.SpinnerColumn(),
                *(() if self.is_narrow else title),
                *sizes,
                progress.TextColumn("{task.fields[note]}"),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(compact=True),
                console=terminal,
                refresh_per_second=4,
                speed_estimate_period=60,
            )
            self._task = self._bar.add_task(
                self._title, total=self._total, completed=self._done, note=""
            )
            self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._done > self._initial and time.monotonic() - self._start > SILENT_SECONDS:
            self._log()
        if self._file is not None:
            self._file.close()

    def keep(self, path: pathlib.Path) -> None:
        """Append all further lines to a file too, with the time."""
        with files.one_line_errors(f"cannot write {path}"):
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed in __exit__)

    def advance(self, units: int = 1) -> None:
        """Advance by `units`."""
        self._done += units
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        if time.monotonic() - self._logged > LOG_EVERY_SECONDS:
            self._log()

    def restart(self) -> None:
        """Count speed and remaining time from now on, after a part that is not repeated."""
        self._start, self._initial, self._note = time.monotonic(), self._done, ""
        if self._bar is not None:
            self._bar.reset(self._task, total=self._total, completed=self._done, note="")

    def note(self, text: str) -> str:
        """Set the text at the end of the bar, and return the one before."""
        before, self._note = self._note, text
        if self._bar is not None:
            self._bar.update(self._task, note=text)
        return before

    def status(self, text: str) -> None:
        """Set the text at the end of the bar; without a terminal, print it as a line."""
        self.note(text)
        if self._bar is None:
            self.say(text)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        line = with_user_paths(line)
        self._keep(line)
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        elif self.shown and (not self.is_quiet or line.startswith("warning: ")):
            print(line, file=sys.stderr, flush=True)

    def say_in_handler(self, line: str) -> None:
        """Print a line in a signal handler, without `sys.stderr`, which may be amid a write."""
        if self.shown:
            _write(f"\r\x1b[2K{line}\n" if self._bar else f"{line}\n")

    def show_cursor(self) -> None:
        """Restore the cursor in a signal handler that exits without calling `__exit__`."""
        if self._bar is not None:
            _write("\x1b[?25h\n")

    def _log(self) -> None:
        now = time.monotonic()
        self._logged = now
        rate = (self._done - self._initial) / max(now - self._start, 1e-9)
        scale, unit = 1.0, self._unit
        if unit == "B":  # kB for small files, which would be 0 MB
            scale, unit = (1e6, "MB") if (self._total or self._done) >= 1e6 else (1e3, "kB")
        text = f"{self._title}: {self._done / scale:,.0f}"
        if self._total is not None:
            text += f" of {self._total / scale:,.0f}"
        text += f" {unit}, {rate / scale:,.3g} {unit}/s"
        if self._total is not None and rate > 0:
            seconds = max(self._total - self._done, 0) / rate
            text += f", {datetime.timedelta(seconds=round(seconds))} left"
        text += f", {self._note}" if self._note else ""
        self._keep(text)
        if self._bar is None and self.shown and not self.is_quiet:
            print(text, file=sys.stderr, flush=True)

    def _keep(self, line: str) -> None:
        if self._file is not None:
            now = datetime.datetime.now().isoformat(" ", "seconds")
            # A full disk is reported by what the run cannot do without.
            with contextlib.suppress(OSError):
                self._file.write(f"{now} {line}\n")
                self._file.flush()
