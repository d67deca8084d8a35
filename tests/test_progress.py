"""Progress: a bar in a terminal, plain lines elsewhere, and the log file."""

import io
import re
import sys

import pytest

from bert_jax.runtime import progress


@pytest.mark.parametrize(
    ("total", "shown"),
    [(500, "0 kB"), (123_456, "123 of 123 kB"), (8_500_000, "8 of 8 MB")],
)
def test_byte_counts_are_shown_in_kb_or_mb(monkeypatch, capsys, total, shown):
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0)
    with progress.Progress("reading", total, "B") as bar:
        bar.advance(total)
    line = capsys.readouterr().err.splitlines()[0]
    assert shown in line
    assert f"{shown.split()[-1]}/s" in line


@pytest.mark.parametrize("total", [9_999, 1_000_000])
def test_training_bar_fits_in_80_columns(monkeypatch, total):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    note = "mlm 2.416 acc 35.9% lr 6e-05 890k tok/s 42% MFU"
    with progress.Progress("train", total, "steps", done=total // 2) as bar:
        assert bar.is_narrow
        bar.advance(1)
        bar.note(note)
        bar._bar.refresh()
    shown = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", terminal.getvalue())
    last = [line for line in re.split(r"[\r\n]", shown) if note in line][-1]
    assert f"{total // 2 + 1}/{total}" in last.replace(" ", "")
    assert re.search(r"MFU \d:\d\d:\d\d", last)
    assert len(last.rstrip()) <= 80


def test_quiet_mode_prints_only_warnings_but_logs_all_lines(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0)
    monkeypatch.setattr(progress.Progress, "is_quiet", True)
    with progress.Progress("train", 2, "steps") as bar:
        bar.keep(tmp_path / "log.txt")
        bar.say("a line")
        bar.say("warning: another")
        bar.advance()
    assert capsys.readouterr().err == "warning: another\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[20:27] for line in lines] == ["a line", "warning", "train: "]
