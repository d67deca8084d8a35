"""Turn documents into rows: BERT's instance algorithm for a corpus of any size, on all cores.

There are two stages of independent work units, whose extent depends on the corpus only:

1. Documents from `corpus.read` are grouped into chunks; a worker tokenizes a chunk into one file.
2. The documents are divided into train and heldout, and each split into units of consecutive
   documents; a worker turns a unit into one shard of rows.

Each result is a file that is written atomically, and its random numbers depend only on the seed and
its position. So the bytes are the same for any number of workers, and an interrupted run resumes
with the missing files. No process holds more than one chunk or window of sequences in memory;
random next sentences are read from disk.
"""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bert_jax import storage
from bert_jax.data import corpus, prepare_plan, prepare_worker
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.instances import WHOLE_SENTENCES
from bert_jax.data.prepare_worker import Job, Unit
from bert_jax.data.rows import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    Shard,
    Split,
    read_manifest,
)
from bert_jax.data.vocabulary import SETTINGS, VOCAB, Vocabulary
from bert_jax.data.workers import Workers, cores
from bert_jax.errors import UserError, with_user_paths
from bert_jax.runtime.progress import Progress
from bert_jax.storage import files

PAIRS = ("nsp", "none", *WHOLE_SENTENCES)


@storage.with_uploaded_output("out", resumable=True)
def prepare(
    sources: list[str],
    vocab: str | os.PathLike | Vocabulary,
    out: str | os.PathLike,
    *,
    tokens: int = 128,
    sequences: int = 1,
    pairs: str = "nsp",
    passes: int = 1,
    seed: int = 0,
    heldout_fraction: float = 0.01,
    short_fraction: float | None = None,
    lowercase: bool | None = None,
    language: str = "en",
    workers: int | None = None,
    force: bool = False,
) -> Manifest:
    """Turn text into a folder of rows with BERT's instance algorithm.

    Follows `create_instances_from_document` in create_pretraining_data.py of Google's repository,
    except that masking is done during training. When interrupted, the same call resumes. Work in
    progress is kept in `out/.partial` and takes about half the size of the text. With more than one
    worker, a script that calls this needs `if __name__ == "__main__":`.

    Args:
        sources: text sources, as specified for `corpus.parse_source`.
        vocab: a vocabulary, or the path of a vocab.txt, or of a folder with one or with a
            tokenizer.json.
        out: output folder for shards, vocabulary and manifest.
        tokens: T, tokens per row.
        sequences: S, maximum number of sequences packed into a row.
        pairs: "nsp" for `[CLS] a [SEP] b [SEP]`, half of them with a random b (label 0 = is next,
            1 = random); "none" for `[CLS] a [SEP]` with sentences of a document until T tokens are
            reached, of which the rest is cut; "doc-sentences" for as many whole sentences of a
            document as fit; "full-sentences" for the same across documents, with a [SEP] between
            them (both as in RoBERTa: Liu et al. 2019, arXiv 1907.11692, section 4.2).
        passes: number of passes over the training documents, each with different random choices
            (`dupe_factor`).
        seed: seed of all random choices.
        heldout_fraction: fraction of tokens to hold out, in documents selected by the hash of their
            text. Where whole documents are far from it, as in a small corpus, the ends of at least
            two documents are held out.
        short_fraction: fraction of documents that are cut into sequences of a random, shorter
            length. None for 0.1, or 0 with "doc-sentences" and "full-sentences", which make no random
            choices.
        lowercase: whether to lowercase text; None follows the vocabulary. Of a path only.
        language: language code of two or three letters for the sentence splitter.
        workers: number of processes; None for one per core, 1 to work in this process. Does not
            affect the result.
        force: replace existing rows made with other settings.

    Returns:
        The manifest, which is written last.
    """
    if short_fraction is None:
        short_fraction = 0.0 if pairs in WHOLE_SENTENCES else 0.1
    language = language.lower()
    is_path = isinstance(vocab, str | os.PathLike)
    vocabulary = vocabularies.load(vocab, lowercase) if is_path else vocab
    parsed = [corpus.parse_source(source) for source in sources]
    settings = {
        "sources": list(sources),
        "source_bytes": corpus.total_bytes(parsed),
        "tokens": tokens,
        "sequences": sequences,
        "pairs": pairs,
        "passes": passes,
        "seed": seed,
        "heldout_fraction": float(heldout_fraction),
        "short_fraction": float(short_fraction),
        **vocabulary.settings,
        "language": language,
    }
    _check(settings, vocabulary)
    if workers is not None and not 1 <= workers <= 1024:
        raise UserError(f"workers: {workers} is out of range; choose 1 to 1,024")
    if not force:
        _check_out(pathlib.Path(out))
    job = Job(pathlib.Path(out), tuple(parsed), vocabulary, settings)
    return _prepare(job, force, Workers(job, workers or cores()))


def _prepare(job: Job, force: bool, pool: Workers) -> Manifest:
    """Do what is missing of the work, and return the manifest."""
    files.refuse_link(job.folder)
    if not job.folder.exists() and (manifest := _finished(job, force)):
        return manifest
    is_new = not job.out.exists()
    with (
        files.one_line_errors(f"cannot write to {job.out}"),
        files.lock_folder(job.folder),
        _removed_if_unused(job, is_new),
    ):
        # Another process may have finished, or a previous run may have stopped before cleaning up.
        if manifest := _finished(job, force):
            shutil.rmtree(job.folder)
            return manifest
        _discard_stale_work(job)
        with pool:
            plan = _tokenize_all(job, pool)
            passes = {"train": job.settings["passes"], "heldout": 1}
            units = {
                split: prepare_plan.units_of(split, plan["starts"][split], passes[split])
                for split in passes
            }
            _write_all(job, pool, [*units["train"], *units["heldout"]])
        return _finish(job, plan, units)


@contextlib.contextmanager
def _removed_if_unused(job: Job, is_new: bool) -> Iterator[None]:
    """Remove the working folder, and the output folder if new, after an error before any work.

    The caller holds the lock of the working folder.
    """
    try:
        yield
    except (UserError, OSError):
        if job.folder.exists() and not any(job.folder.glob("*.tokens")):
            shutil.rmtree(job.folder)
            if is_new:
                job.out.rmdir()
        raise


def _check(settings: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Refuse settings that are out of range or do not fit together."""
    tokens, pairs, passes, language = (
        settings[name] for name in ("tokens", "pairs", "passes", "language")
    )
    if not settings["sources"]:
        raise UserError("sources: no source of text; name at least one file, folder or glob")
    for name, is_valid, choices in (
        ("tokens", 8 <= tokens < 1 << 16, "8 to 65,535"),
        ("sequences", 1 <= settings["sequences"] <= tokens, f"1 to {tokens}, the tokens per row"),
        ("passes", 1 <= passes <= 10_000, "1 to 10,000"),
        ("heldout_fraction", 0 <= settings["heldout_fraction"] < 1, "at least 0, less than 1"),
        ("short_fraction", 0 <= settings["short_fraction"] <= 1, "0 to 1"),
    ):
        if not is_valid:
            raise UserError(f"{name}: {settings[name]} is out of range; choose {choices}")
    if pairs not in PAIRS:
        raise UserError(f"pairs: unknown value {pairs!r}; choose one of {', '.join(PAIRS)}")
    if pairs in WHOLE_SENTENCES and (passes > 1 or settings["short_fraction"]):
        name, value = ("passes", "1") if passes > 1 else ("short_fraction", "0")
        raise UserError(
            f"{name}: must be {value} with pairs {pairs!r}, which makes no random choices"
        )
    if not re.fullmatch("[a-z]{2,3}", language):  # sentencex applies English rules to unknown ones
        raise UserError(
            f"language: unknown code {language!r}; choose one of two or three letters, such as en or de"
        )
    if pairs == "nsp" and len(vocabulary.separator_ids) > 1:
        raise UserError(
            f"pairs: this vocabulary separates the texts of a pair by two {vocabulary.special[3]}, as "
            "RoBERTa, which is pretrained without pairs; add --pairs none"
        )


def _check_out(out: pathlib.Path) -> None:
    """Refuse to replace the vocabulary of a model or a run."""
    url = storage.remote(out)
    if storage.is_file(f"{url}/config.json") if url else (out / "config.json").exists():
        raise UserError(
            f"{url or out} holds a model or a run, whose vocabulary would be replaced: choose another "
            "folder, or add --force"
        )


def _finished(job: Job, force: bool) -> Manifest | None:
    """Return the manifest of the output if it holds rows made with the settings, else None."""
    out = job.out
    if not (out / MANIFEST).exists():
        return None
    try:
        manifest = read_manifest(out)
    except UserError:
        if force:
            return None
        raise
    existing = {**manifest.settings, "vocabulary": manifest.vocab_sha256[:12]}
    requested = {**job.settings, "vocabulary": job.vocabulary.sha256[:12]}
    differing = [
        f"{name} {existing.get(name)!r}, not {requested.get(name)!r}"
        for name in dict.fromkeys([*requested, *existing])
        if existing.get(name) != requested.get(name)
    ]
    if not differing:
        print(with_user_paths(f"{out} already holds these rows; nothing to do"))
        made = (out / MANIFEST).stat().st_mtime
        paths = [path for path in job.files if path.exists()]
        newer = [path for path in paths if path.stat().st_mtime > made]
        if newer and not storage.remote(out):
            print(
                with_user_paths(
                    f"{newer[0]} is newer: if its text has changed, remove {out} and run this again"
                )
            )
        return manifest
    if force:
        return None
    raise UserError(
        f"{out} holds rows made with other settings ({'; '.join(differing)}); "
        "choose another folder, or replace them with --force"
    )


def _discard_stale_work(job: Job) -> None:
    """Empty the working folder unless it was made from the same input and settings."""
    files_read = [[storage.remote(path) or str(path), *storage.stat(path)] for path in job.files]
    size = prepare_worker.CHUNK_CHARACTERS
    content = json.dumps([job.settings, files_read, job.vocabulary.sha256, size])
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    path = job.folder / "fingerprint"
    if path.exists() and path.read_text() == fingerprint:
        return
    path.unlink(missing_ok=True)  # first, as the folder may be left half-emptied
    for entry in job.folder.iterdir():
        if entry.name != "lock":
            entry.unlink()
    files.write(path, fingerprint)


# Stage 1: documents to chunks of tokens.


def _tokenize_all(job: Job, pool: Workers) -> dict[str, Any]:
    """Tokenize what is missing and plan stage 2; return the result of `make_plan`."""
    path = job.folder / "plan.json"
    if path.exists():
        return json.loads(path.read_text())
    report = corpus.Report()
    with Progress("tokenizing", corpus.total_bytes(job.sources), "B") as progress:
        chunks = _tokenize_chunks(job, pool, report, progress)
    plan = prepare_plan.make_plan(job, chunks)
    plan["sources"] = report.sources
    plan["warnings"] = [*report.warnings, *plan["warnings"]]
    files.write_json(path, plan)
    return plan


def _tokenize_chunks(
    job: Job, pool: Workers, report: corpus.Report, progress: Progress
) -> Sequence[int]:
    """Read the sources, tokenize them in workers, and return the chunk numbers in order."""
    numbers: list[int] = []

    def missing() -> Iterator[tuple[int, tuple[int, list[corpus.RawDocument]]]]:
        bytes_before = 0
        read = (corpus.read(source, report) for source in job.sources)
        chunks = prepare_worker.chunks(itertools.chain.from_iterable(read))
        for number, chunk in enumerate(chunks):
            numbers.append(number)
            size, bytes_before = report.bytes_read - bytes_before, report.bytes_read
            if job.chunk(number).exists():
                progress.advance(size)
            else:
                yield size, (number, chunk)

    for size, _ in pool.run("tokenize", missing()):
        progress.advance(size)
    return numbers


# Stage 2: tokens to shards of rows.


def _write_all(job: Job, pool: Workers, units: list[Unit]) -> None:
    done = {u for u in units if (job.folder / f"{u.name}.json").exists()}
    size = {u: u.end - u.first for u in units}
    total, before = sum(size.values()), sum(size[u] for u in done)
    with Progress("writing rows", total, "documents", before) as progress:
        missing = ((size[u], (u,)) for u in units if u not in done)
        for documents, _ in pool.run("write_shard", missing):
            progress.advance(documents)


# Completion.


def _finish(job: Job, plan: dict[str, Any], units: dict[str, list[Unit]]) -> Manifest:
    """Move the shards into place and write the manifest, in an order that is safe to interrupt."""
    out = job.out
    (out / MANIFEST).unlink(missing_ok=True)  # invalidates existing rows
    statistics = {
        unit.name: json.loads((job.folder / f"{unit.name}.json").read_text())
        for unit in itertools.chain(*units.values())
    }
    for name in statistics:
        if (job.folder / name).exists():  # an interrupted run may have moved it
            os.replace(job.folder / name, out / name)
    for path in [*out.glob("*-of-*.arrayrecord"), *out.glob(".*.partial")]:
        if path.name not in statistics:  # of other settings, or left by an interrupted run
            path.unlink()
    files.sync_folder(out)
    job.vocabulary.save(out)
    written = job.vocabulary.contents.keys()
    for name in {VOCAB, SETTINGS, *vocabularies.FILES} - written:
        (out / name).unlink(missing_ok=True)  # of a vocabulary of another kind
    splits, lengths = {}, {}
    for split, of_split in units.items():
        splits[split], lengths[split] = _split(job, plan["starts"][split][-1], of_split, statistics)
    manifest = Manifest(
        version=FORMAT_VERSION,
        tokens=job.format.tokens,
        sequences=job.format.sequences,
        vocab_size=job.format.vocab_size,
        vocab_sha256=job.vocabulary.sha256,
        pairs=job.settings["pairs"],
        seed=job.settings["seed"],
        settings=job.settings,
        sources=tuple(plan["sources"]),
        length_histogram=tuple(lengths["train"].tolist()),
        warnings=tuple(plan["warnings"]),
        **splits,
    )
    files.write_json(out / MANIFEST, manifest.to_dict())
    shutil.rmtree(job.folder)
    _print_summary(out, manifest)
    return manifest


def _split(
    job: Job, documents: int, units: list[Unit], statistics: dict[str, dict[str, Any]]
) -> tuple[Split, np.ndarray]:
    """Return the description of a split, and how many sequences of each length 0..T it has."""
    tokens, of_units = job.format.tokens, [statistics[unit.name] for unit in units]
    lengths = np.zeros(tokens + 1, np.int64)
    lengths = sum((np.array(entry["lengths"]) for entry in of_units), lengths)
    rows, real_tokens = sum(x["rows"] for x in of_units), int(lengths @ np.arange(len(lengths)))
    shards = tuple(
        Shard(unit.name, entry["rows"], entry["bytes"], entry["sha256"])
        for unit, entry in zip(units, of_units, strict=True)
    )
    fill_fraction = real_tokens / (rows * tokens) if rows else 0.0
    split = Split(documents, int(lengths.sum()), rows, real_tokens, fill_fraction, shards)
    return split, lengths


def _print_summary(out: pathlib.Path, manifest: Manifest) -> None:
    for warning in manifest.warnings:
        print(f"warning: {warning}")
    print(
        f"{with_user_paths(str(out))}: rows of {manifest.tokens} tokens with at most {manifest.sequences} "
        "sequences each"
    )
    print(f"{'':9}{'documents':>12}{'sequences':>13}{'rows':>12}{'real tokens':>15}   fill  shards")
    for name, split in (("train", manifest.train), ("held out", manifest.heldout)):
        print(
            f"{name:9}{split.documents:12,}{split.sequences:13,}{split.rows:12,}"
            f"{split.real_tokens:15,}{split.fill_fraction:7.1%}{len(split.shards):8,}"
        )
