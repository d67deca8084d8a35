"""Turn documents into rows: BERT's instance algorithm for a corpus of any size, on all cores.

There are two stages of independent work units, whose extent depends on the corpus only:

1. Documents from `corpus.read` are grouped into chunks; a worker tokenizes a chunk into one file.
2. The documents are divided into train and heldout, and each split into units of consecutive
   documents; a worker turns a unit into one shard of rows.

Each result is a file that is written atomically, and its random numbers depend only on the seed and
its position. So the bytes are the same for any number of workers, and an interrupted run resumes
with the missing files. No process holds more than one chunk or window of sequences in memory;
random next sentences are read from disk.

Apache Beam's workers (beam.py) process the same units in stage 2. In stage 1 they read batches of
source files themselves, so that no text passes through the machine that launches them. Rows do not
depend on chunk boundaries.
"""

import collections
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import pickle
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bert_jax import storage
from bert_jax.data import corpus, prepare_worker
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.instances import WHOLE_SENTENCES
from bert_jax.data.rows import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    RowFormat,
    Shard,
    Split,
    read_manifest,
)
from bert_jax.data.vocabulary import SETTINGS, VOCAB, Vocabulary
from bert_jax.data.workers import Workers, call, cores
from bert_jax.errors import UserError, with_user_paths
from bert_jax.runtime.progress import Progress
from bert_jax.storage import files

PAIRS = ("nsp", "none", *WHOLE_SENTENCES)
RUNNERS = ("local", "beam")
UNKNOWN_FRACTION = 0.2  # with more [UNK] than this, the vocabulary does not fit the text

# How many documents are considered where few are to be held out.
_LOWEST_DOCUMENTS = 1_000
# A shard holds 1/64 of the corpus, within these bounds in tokens.
_SHARDS, _MIN_SHARD_TOKENS, _MAX_SHARD_TOKENS = 64, 1 << 18, 1 << 24


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
    runner: str = "local",
    beam: Sequence[str] = (),
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
        runner: "local" for local processes, "beam" for an Apache Beam pipeline, whose workers must
            reach sources and `out` by the same paths. Does not affect the result.
        beam: Beam pipeline options, each NAME=VALUE or NAME.
        force: replace existing rows made with other settings.

    Returns:
        The manifest, which is written last.
    """
    if short_fraction is None:
        short_fraction = 0.0 if pairs in WHOLE_SENTENCES else 0.1
    language = language.lower()
    _check(tokens, sequences, pairs, passes, heldout_fraction, short_fraction, language, workers)
    _check_runner(runner, beam, workers)
    is_path = isinstance(vocab, str | os.PathLike)
    vocabulary = vocabularies.load(vocab, lowercase) if is_path else vocab
    if pairs == "nsp" and len(vocabulary.separator_ids) > 1:
        raise UserError(
            f"pairs: this vocabulary separates the texts of a pair by two {vocabulary.special[3]}, as "
            "RoBERTa, which is pretrained without pairs; add --pairs none"
        )
    parsed = [corpus.parse_source(source) for source in sources]
    if not parsed:
        raise UserError("sources: no source of text; name at least one file, folder or glob")
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
    out = pathlib.Path(out)
    if not force:
        _check_out(out)
    job = prepare_worker.Job(
        out / ".partial",
        tuple(parsed),
        vocabulary,
        RowFormat(tokens, sequences, len(vocabulary)),
        pairs,
        seed,
        short_fraction,
        language,
    )
    files.refuse_link(job.folder)
    finished = functools.partial(_finished, out, settings, vocabulary, force, parsed)
    if not job.folder.exists() and (manifest := finished()):
        return manifest
    is_new = not out.exists()
    with (
        files.one_line_errors(f"cannot write to {out}"),
        files.lock_folder(job.folder),
        _removed_if_unused(job, is_new),
    ):
        # Another process may have finished, or a previous run may have stopped before cleaning up.
        if manifest := finished():
            shutil.rmtree(job.folder)
            return manifest
        _discard_stale_work(job, settings, runner)
        with _pool(job, workers, runner, beam) as pool:
            plan = _tokenize_all(job, pool, heldout_fraction)
            units = {
                "train": _units("train", plan["starts"]["train"], passes),
                "heldout": _units("heldout", plan["starts"]["heldout"], 1),
            }
            _write_all(job, pool, [*units["train"], *units["heldout"]])
        return _finish(job, out, settings, plan, units)


@contextlib.contextmanager
def _removed_if_unused(job: prepare_worker.Job, is_new: bool) -> Iterator[None]:
    """Remove the working folder, and the output folder if new, after an error before any work.

    The caller holds the lock of the working folder.
    """
    try:
        yield
    except (UserError, OSError):
        if job.folder.exists() and not any(job.folder.glob("*.tokens")):
            shutil.rmtree(job.folder)
            if is_new:
                job.folder.parent.rmdir()
        raise


def _check(
    tokens: int,
    sequences: int,
    pairs: str,
    passes: int,
    heldout_fraction: float,
    short_fraction: float,
    language: str,
    workers: int | None,
) -> None:
    if not 8 <= tokens < 1 << 16:
        raise UserError(f"tokens: {tokens} is out of range; choose 8 to 65,535")
    if not 1 <= sequences <= tokens:
        raise UserError(
            f"sequences: {sequences} is out of range; choose 1 to {tokens}, the tokens per row"
        )
    if pairs not in PAIRS:
        raise UserError(f"pairs: unknown value {pairs!r}; choose one of {', '.join(PAIRS)}")
    if not 1 <= passes <= 10_000:
        raise UserError(f"passes: {passes} is out of range; choose 1 to 10,000")
    if not 0 <= heldout_fraction < 1:
        raise UserError(
            f"heldout_fraction: {heldout_fraction} is out of range; choose at least 0, less than 1"
        )
    if not 0 <= short_fraction <= 1:
        raise UserError(f"short_fraction: {short_fraction} is out of range; choose 0 to 1")
    if pairs in WHOLE_SENTENCES and (passes > 1 or short_fraction):
        name, value = ("passes", "1") if passes > 1 else ("short_fraction", "0")
        raise UserError(
            f"{name}: must be {value} with pairs {pairs!r}, which makes no random choices"
        )
    if not re.fullmatch("[a-z]{2,3}", language):  # sentencex applies English rules to unknown ones
        raise UserError(
            f"language: unknown code {language!r}; choose one of two or three letters, such as en or de"
        )
    if workers is not None and not 1 <= workers <= 1024:
        raise UserError(f"workers: {workers} is out of range; choose 1 to 1,024")


def _check_runner(runner: str, beam: Sequence[str], workers: int | None) -> None:
    if runner not in RUNNERS:
        raise UserError(f"runner: unknown value {runner!r}; choose one of {', '.join(RUNNERS)}")
    if runner == "beam":
        if workers is not None:
            raise UserError(
                "workers: not an option of the Beam runner; use Beam's own options, such as "
                "--beam direct_num_workers=4"
            )
        from bert_jax.data import beam as beam_runner

        beam_runner.options(beam)
    elif beam:
        raise UserError(f"--beam {beam[0]}: only for Apache Beam; add --runner beam")


def _check_out(out: pathlib.Path) -> None:
    """Refuse to replace the vocabulary of a model or a run."""
    url = storage.remote(out)
    if storage.is_file(f"{url}/config.json") if url else (out / "config.json").exists():
        raise UserError(
            f"{url or out} holds a model or a run, whose vocabulary would be replaced: choose another "
            "folder, or add --force"
        )


def _finished(
    out: pathlib.Path,
    settings: dict[str, Any],
    vocabulary: Vocabulary,
    force: bool,
    sources: Sequence[corpus.Source],
) -> Manifest | None:
    """Return the manifest of `out` if it holds rows made with `settings`, else None."""
    if not (out / MANIFEST).exists():
        return None
    try:
        manifest = read_manifest(out)
    except UserError:
        if force:
            return None
        raise
    existing = {**manifest.settings, "vocabulary": manifest.vocab_sha256[:12]}
    requested = {**settings, "vocabulary": vocabulary.sha256[:12]}
    differing = [
        f"{name} {existing.get(name)!r}, not {requested.get(name)!r}"
        for name in dict.fromkeys([*requested, *existing])
        if existing.get(name) != requested.get(name)
    ]
    if not differing:
        print(with_user_paths(f"{out} already holds these rows; nothing to do"))
        made = (out / MANIFEST).stat().st_mtime
        paths = [path for source in sources for path in source.files]
        newer = [path for path in paths if path.exists() and path.stat().st_mtime > made]
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


def _discard_stale_work(job: prepare_worker.Job, settings: dict[str, Any], runner: str) -> None:
    """Empty the working folder unless it was made from the same input and settings."""
    paths = [path for source in job.sources for path in source.files]
    files_read = [[storage.remote(path) or str(path), *storage.stat(path)] for path in paths]
    sizes = [prepare_worker.CHUNK_CHARACTERS, prepare_worker.BATCH_BYTES]
    content = json.dumps([settings, files_read, job.vocabulary.sha256, runner, sizes])
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    folder = job.folder
    path = folder / "fingerprint"
    if path.exists() and path.read_text() == fingerprint:
        return
    path.unlink(missing_ok=True)  # first, as the folder may be left half-emptied
    for entry in folder.iterdir():
        if entry.name != "lock":
            entry.unlink()
    files.write(path, fingerprint)


# Stage 1: documents to chunks of tokens.


def _tokenize_all(job: prepare_worker.Job, pool: Any, heldout_fraction: float) -> dict[str, Any]:
    """Tokenize what is missing and plan stage 2; return the result of `_plan`."""
    path = job.folder / "plan.json"
    if path.exists():
        return json.loads(path.read_text())
    report = corpus.Report()
    tokenize = _tokenize_chunks if isinstance(pool, Workers) else _tokenize_batches
    with Progress("tokenizing", corpus.total_bytes(job.sources), "B") as progress:
        chunks = tokenize(job, pool, report, progress)
    plan = _plan(job, chunks, heldout_fraction)
    plan["sources"] = report.sources
    plan["warnings"] = [*report.warnings, *plan["warnings"]]
    files.write_json(path, plan)
    return plan


def _tokenize_chunks(
    job: prepare_worker.Job, pool: Any, report: corpus.Report, progress: Progress
) -> Sequence[int]:
    """Read the sources, tokenize them in workers, and return the chunk numbers in order."""
    chunks = 0

    def missing() -> Iterator[tuple[int, tuple[int, list[corpus.RawDocument]]]]:
        nonlocal chunks
        bytes_before = 0
        documents = itertools.chain.from_iterable(
            corpus.read(source, report) for source in job.sources
        )
        for chunk in prepare_worker.chunks(documents):
            size, bytes_before = report.bytes_read - bytes_before, report.bytes_read
            number, chunks = chunks, chunks + 1
            if job.chunk(number).exists():
                progress.advance(size)
            else:
                yield size, (number, chunk)

    for size, _ in pool.run("tokenize", missing()):
        progress.advance(size)
    return range(chunks)


def _tokenize_batches(
    job: prepare_worker.Job, pool: Any, report: corpus.Report, progress: Progress
) -> Sequence[int]:
    """Read and tokenize the sources in workers, and return the chunk numbers in order."""
    batches = list(_batches(job.sources))
    missing = []
    for batch in batches:
        size = sum(storage.stat(f)[0] for f in job.sources[batch.source].files[slice(*batch[2:])])
        if job.batch(batch.number).exists():
            progress.advance(size)
        else:
            missing.append((size, (batch,)))
    for size, _ in pool.run("tokenize_files", missing):
        progress.advance(size)
    chunks: list[int] = []
    for number, group in itertools.groupby(batches, key=lambda batch: batch.source):
        report.begin(job.sources[number])
        for batch in group:
            part, end = pickle.loads(job.batch(batch.number).read_bytes())
            report.add(part)
            chunks += range(batch.number * prepare_worker.BATCH_CHUNKS, end)
        report.end()
    return chunks


def _batches(sources: Sequence[corpus.Source]) -> Iterator[prepare_worker.FileRange]:
    """Yield batches of consecutive files of at least `prepare_worker.BATCH_BYTES`; "tfds" is one batch."""
    numbers = itertools.count()
    for i, source in enumerate(sources):
        first = size = 0
        for end, file in enumerate(source.files, 1):
            size += storage.stat(file)[0]
            if size >= prepare_worker.BATCH_BYTES:
                yield prepare_worker.FileRange(next(numbers), i, first, end)
                first, size = end, 0
        if first < len(source.files) or not source.files:
            yield prepare_worker.FileRange(next(numbers), i, first, len(source.files))


def _plan(
    job: prepare_worker.Job, chunks: Sequence[int], heldout_fraction: float
) -> dict[str, Any]:
    """Divide the documents into splits and units, and write the index of each split.

    Returns:
        `starts` (first document of each unit and the end, for each split) and `warnings`.
    """
    documents = tokens = heldout_tokens = 0
    threshold = np.uint64(heldout_fraction * 2**64)
    # The documents with the lowest hashes, each once, and how many copies the corpus has of them.
    lowest, copies = np.zeros(0, prepare_worker.DOCUMENT), np.zeros(0, np.int64)
    unknown: collections.Counter[str] = collections.Counter()
    mostly_unknown: list[tuple[float, str]] = []
    by_file = (
        (file, counts)
        for number in chunks
        for file, counts in prepare_worker.read_table(job.chunk(number))[1].items()
    )
    for file, group in itertools.groupby(by_file, key=lambda item: item[0]):
        total, missed = (sum(column) for column in zip(*(c for _, c in group), strict=True))
        unknown["tokens"] += total
        unknown["missed"] += missed
        if missed > UNKNOWN_FRACTION * total:
            mostly_unknown.append((missed / total, file))
    for number in chunks:
        table, _ = prepare_worker.read_table(job.chunk(number))
        documents += len(table)
        tokens += int(table["tokens"].sum())
        heldout_tokens += int(table["tokens"][table["hash"] < threshold].sum())
        lowest = np.concatenate([lowest, table])
        copies = np.concatenate([copies, np.ones(len(table), np.int64)])
        _, first, groups = np.unique(lowest["hash"], return_index=True, return_inverse=True)
        copies = np.bincount(groups, copies)[:_LOWEST_DOCUMENTS].astype(np.int64)
        lowest = lowest[first[:_LOWEST_DOCUMENTS]]

    warnings = []
    if not documents:
        raise UserError("the sources contain no text with words; check the files")
    if job.pairs == "nsp" and len(lowest) == 1:
        raise UserError(
            "the corpus has one document only, but random next sentences come from another one; "
            "separate documents by blank lines, or use --pairs none"
        )
    if mostly_unknown:
        fraction, file = max(mostly_unknown)
        warnings.append(
            f"{with_user_paths(file)}: {fraction:.0%} of its tokens are unknown to the vocabulary "
            f"({len(mostly_unknown):,} such files, {unknown['missed'] / unknown['tokens']:.0%} of "
            "the corpus); check that the vocabulary matches the language and case of the text"
        )

    # How many tokens at the end of a document are held out, by its hash, where it is not all.
    tails: dict[int, tuple[int, int]] = {}
    # A random next sentence comes from another document of the same split.
    min_documents = 2 if job.pairs == "nsp" else 1
    target = math.ceil(heldout_fraction * tokens)
    enough = len(lowest) > 1 and lowest["hash"][1] < threshold
    if target and not (enough and target / 2 <= heldout_tokens <= 2 * target):
        threshold = np.uint64(0)
        tails = _heldout_ends(job, lowest, copies, target)
        if len(tails) < min_documents:
            tails = {}
            warnings.append(
                f"the corpus has {documents:,} documents, too few or too short to hold out a part"
            )

    shard_tokens = min(max(tokens // _SHARDS, _MIN_SHARD_TOKENS), _MAX_SHARD_TOKENS)
    starts: dict[str, list[int]] = {"train": [], "heldout": []}
    with contextlib.ExitStack() as stack:
        indices = {
            split: stack.enter_context(
                open(stack.enter_context(files.atomic_write(job.index(split))), "wb")
            )
            for split in starts
        }
        count = dict.fromkeys(starts, 0)
        size = dict.fromkeys(starts, 0)
        unit = dict.fromkeys(starts, -1)
        for number in chunks:
            table, _ = prepare_worker.read_table(job.chunk(number))
            for split, part in zip(starts, _divided(table, threshold, tails), strict=True):
                if not len(part):
                    continue
                ends = size[split] + part["tokens"].cumsum(dtype=np.int64)
                units = (ends - part["tokens"]) // shard_tokens
                (new,) = np.nonzero(np.diff(units, prepend=unit[split]))
                starts[split] += (count[split] + new).tolist()
                indices[split].write(part.tobytes())
                count[split] += len(part)
                size[split], unit[split] = int(ends[-1]), int(units[-1])
    for split in starts:
        starts[split].append(count[split])
    if count["train"] < min_documents:
        raise UserError(
            f"heldout_fraction {heldout_fraction} leaves fewer than two documents to train on; lower it"
        )
    share = size["heldout"] / sum(size.values())
    if share > 2 * heldout_fraction or 0 < share < heldout_fraction / 2:
        reason = (
            f"the corpus has few documents ({documents:,})"
            if share > heldout_fraction
            else f"of {documents:,} documents, those with the lowest hashes are short"
        )
        warnings.append(
            f"{share:.1%} of the tokens are held out, not {heldout_fraction:.1%}: {reason}"
        )
    return {"starts": starts, "warnings": warnings}


def _heldout_ends(
    job: prepare_worker.Job, documents: np.ndarray, copies: np.ndarray, target: int
) -> dict[int, tuple[int, int]]:
    """Choose the ends of documents that are held out where few documents are to be.

    Args:
        job: the job.
        documents: [n] of `DOCUMENT`, in order of preference.
        copies: [n], how many times each is in the corpus.
        target: number of tokens to hold out. At least two documents have a part in it if possible,
            because random next sentences come from another document.

    Returns:
        Numbers of sentences and tokens at the end of a document, by its hash; both are all that the
        document has if it is held out whole.
    """
    tails: dict[int, tuple[int, int]] = {}
    remaining_tokens = target
    for document, num_copies in zip(documents, copies.tolist(), strict=True):
        if remaining_tokens <= 0 and len(tails) > 1:
            break
        budget = max(remaining_tokens if tails else target // 2, 1) / num_copies
        count, total = int(document["sentences"]), int(document["tokens"])
        if total > budget:
            bounds = np.fromfile(
                job.chunk(int(document["chunk"])), "<u4", count + 1, offset=int(document["at"])
            )
            sizes = bounds[-1] - bounds[1:-1].astype(
                np.int64
            )  # of the ends after 1, 2, … sentences
            if not len(sizes):
                continue
            first = 1 + int(np.abs(sizes - budget).argmin())
            count, total = count - first, int(sizes[first - 1])
        tails[int(document["hash"])] = count, total
        remaining_tokens -= total * num_copies
    return tails


def _divided(
    table: np.ndarray, threshold: np.uint64, tails: dict[int, tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Divide the documents of a chunk into those to train on and those held out.

    Args:
        table: [n] of `DOCUMENT`.
        threshold: documents with lower hashes are held out.
        tails: of other documents, the ends that are held out (see `_heldout_ends`).
    """
    heldout = table["hash"] < threshold
    train, held = table[~heldout], table[heldout]
    split = np.isin(train["hash"], np.array([*tails], np.uint64))
    if split.any():
        held = train[split]
        count, total = np.array([tails[int(value)] for value in held["hash"]]).T
        train["sentences"][split] -= count.astype(np.uint32)
        train["tokens"][split] -= total.astype(np.uint32)
        held["at"] += 4 * (held["sentences"] - count).astype(np.uint64)
        held["sentences"], held["tokens"] = count, total
        train = train[train["sentences"] > 0]
    return train, held


# Stage 2: tokens to shards of rows.


def _units(split: str, starts: list[int], passes: int) -> list[prepare_worker.Unit]:
    bounds = list(itertools.pairwise(starts))
    total = passes * len(bounds)
    return [
        prepare_worker.Unit(
            split, pass_index, first, end, f"{split}-{number:05}-of-{total:05}.arrayrecord"
        )
        for number, (pass_index, (first, end)) in enumerate(
            itertools.product(range(passes), bounds)
        )
    ]


def _write_all(job: prepare_worker.Job, pool: Any, units: list[prepare_worker.Unit]) -> None:
    done = {u for u in units if (job.folder / f"{u.name}.json").exists()}
    size = {u: u.end - u.first for u in units}
    total, before = sum(size.values()), sum(size[u] for u in done)
    with Progress("writing rows", total, "documents", before) as progress:
        missing = ((size[u], (u,)) for u in units if u not in done)
        for documents, _ in pool.run("write_shard", missing):
            progress.advance(documents)


def _pool(job: prepare_worker.Job, workers: int | None, runner: str, beam: Sequence[str]) -> Any:
    """Return a context manager with a `run` method like that of `Workers`."""
    if runner == "local":
        return Workers(job, workers or cores())
    from bert_jax.data.beam import Pipelines

    return Pipelines(functools.partial(call, job), job.folder / "error", beam)


# Completion.


def _finish(
    job: prepare_worker.Job,
    out: pathlib.Path,
    settings: dict[str, Any],
    plan: dict[str, Any],
    units: dict[str, list[prepare_worker.Unit]],
) -> Manifest:
    """Move the shards into place and write the manifest, in an order that is safe to interrupt."""
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
    lengths = {
        split: sum(
            (np.array(statistics[unit.name]["lengths"]) for unit in units[split]),
            np.zeros(job.format.tokens + 1, np.int64),
        )
        for split in units
    }
    manifest = Manifest(
        version=FORMAT_VERSION,
        tokens=job.format.tokens,
        sequences=job.format.sequences,
        vocab_size=job.format.vocab_size,
        vocab_sha256=job.vocabulary.sha256,
        pairs=job.pairs,
        seed=job.seed,
        settings=settings,
        sources=tuple(plan["sources"]),
        length_histogram=tuple(lengths["train"].tolist()),
        warnings=tuple(plan["warnings"]),
        **{
            split: _split(job.format, plan["starts"][split][-1], lengths[split], [
                Shard(unit.name, *(statistics[unit.name][key] for key in ("rows", "bytes", "sha256")))
                for unit in units[split]
            ])
            for split in units
        },
    )  # fmt: skip
    files.write_json(out / MANIFEST, manifest.to_dict())
    shutil.rmtree(job.folder)
    _print_summary(out, manifest)
    return manifest


def _split(
    row_format: RowFormat, documents: int, lengths: np.ndarray, shards: list[Shard]
) -> Split:
    rows = sum(shard.rows for shard in shards)
    real_tokens = int(lengths @ np.arange(len(lengths)))
    return Split(
        documents=documents,
        sequences=int(lengths.sum()),
        rows=rows,
        real_tokens=real_tokens,
        fill_fraction=real_tokens / (rows * row_format.tokens) if rows else 0.0,
        shards=tuple(shards),
    )


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
