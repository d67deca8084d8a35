"""Progress as lines, where there is no terminal."""

import pytest

from bert_jax import progress


@pytest.mark.parametrize(
    ("total", "shown"),
    [(500, "0 kB"), (123_456, "123 of 123 kB"), (8_500_000, "8 of 8 MB")],
)
def test_small_files_are_counted_in_kilobytes(monkeypatch, capsys, total, shown):
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0)
    with progress.Progress("reading", total, "B") as bar:
        bar.advance(total)
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("reading: ")
    assert shown in line
    assert f"{shown.split()[-1]}/s" in line
