"""Documents to rows: BERT's instance algorithm over a corpus of any size, on all cores.

Two stages, both made of independent pieces of work whose extent follows from the corpus alone:

1. `read` documents are gathered into chunks; a worker tokenizes a chunk into one file.
2. The documents are divided into train and heldout, and each split into units of consecutive
   documents; a worker turns a unit into one shard of rows.

Every piece is a file that appears whole or not at all, and its random numbers depend on the seed
and its place only. So the bytes are the same with any number of workers, and after a kill the work
goes on with the pieces that are missing. No process ever holds more than a piece; next sentences
from anywhere in the corpus are read from disk as they are drawn.

Apache Beam's workers (beam.py) do the same pieces of stage 2. In stage 1 they read the files
themselves, a batch of files being a piece, so that no text passes through the machine that started
them; where chunks end shows nowhere in the rows.
"""

import array
import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import pickle
import random
import shutil
import signal
import string
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np

from bert_jax import files
from bert_jax.data import corpus, wordpiece
from bert_jax.data.instances import Instances
from bert_jax.data.rows import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    RowFormat,
    Shard,
    Split,
    read_manifest,
)
from bert_jax.errors import UserError
from bert_jax.progress import Progress

PAIRS = ("nsp", "none")
RUNNERS = ("local", "beam")
UNKNOWN_FRACTION = 0.2  # beyond this share of [UNK] the vocabulary does not fit the text

# One of these at a time is what a worker holds: 1 MB of text, 8,192 sequences.
_CHUNK_CHARACTERS = 1 << 20
_WINDOW_SEQUENCES = 1 << 13
# What a worker that reads files takes at a time, as they lie on disk; the least multiple of it that
# files make. Its chunks are numbered from a multiple of _BATCH_CHUNKS, more than any has.
_BATCH_BYTES, _BATCH_CHUNKS = 1 << 24, 10**6
# A shard is a 64th of the corpus within these bounds, in tokens.
_SHARDS, _LEAST_SHARD_TOKENS, _MOST_SHARD_TOKENS = 64, 1 << 18, 1 << 24
# Words whose pieces a worker remembers (about 20 MB), and up to which length.
_REMEMBERED_WORDS, _REMEMBERED_CHARACTERS = 1 << 17, 32
# Grain reads records one by one, and random token ids hardly compress.
_WRITER_OPTIONS = "group_size:1,uncompressed"

# A document among the tokenized ones: hash of its text, the chunk it is in, the byte there at
# which the bounds of its sentences stand, how many sentences and tokens.
_DOCUMENT = np.dtype(
    [("hash", "<u8"), ("at", "<u8"), ("chunk", "<u8"), ("sentences", "<u4"), ("tokens", "<u4")]
)
_DOCUMENT_STRUCT = struct.Struct("<QQQII")
_FOOTER = struct.Struct("<II")  # documents, bytes of statistics


@dataclasses.dataclass(frozen=True)
class _Job:
    """What a worker needs to know."""

    folder: pathlib.Path  # working folder
    sources: tuple[corpus.Source, ...]
    vocabulary: wordpiece.Vocabulary
    format: RowFormat
    pairs: str
    seed: int
    short_fraction: float
    language: str

    @property
    def token_type(self) -> np.dtype:
        return self.format.dtype["tokens"].base

    def chunk(self, number: int) -> pathlib.Path:
        return self.folder / f"{number:06}.tokens"

    def lines(self, chunk: int) -> pathlib.Path:
        return self.folder / f"{chunk:06}.lines"

    def batch(self, number: int) -> pathlib.Path:
        return self.folder / f"{number:06}.batch"

    def index(self, split: str) -> pathlib.Path:
        return self.folder / f"{split}.index"


class _Batch(NamedTuple):
    """Files [first, end) of a source, to be read and tokenized by one worker."""

    number: int
    source: int
    first: int
    end: int


class _Unit(NamedTuple):
    """Documents [first, end) of a split, to become the shard `name`."""

    split: str
    turn: int  # which pass over the corpus
    first: int
    end: int
    name: str


def prepare(
    sources: list[str],
    vocab: str | os.PathLike,
    out: str | os.PathLike,
    *,
    tokens: int = 128,
    sequences: int = 1,
    pairs: str = "nsp",
    passes: int = 1,
    seed: int = 0,
    heldout_fraction: float = 0.01,
    short_fraction: float = 0.1,
    lowercase: bool | None = None,
    language: str = "en",
    workers: int | None = None,
    runner: str = "local",
    beam: Sequence[str] = (),
    force: bool = False,
) -> Manifest:
    """Turns text into a folder of rows, with BERT's instance algorithm.

    Follows `create_instances_from_document` of create_pretraining_data.py in Google's repository,
    except that masking happens in training. Interrupted, it goes on where it was when called
    again. Work in progress lies in `out/.partial` and takes about half the size of the text.
    With more than one worker, a script that calls this needs `if __name__ == "__main__":`.

    Args:
        sources: of text, each as `corpus.parse_source` reads it.
        vocab: a vocab.txt or a folder with one.
        out: folder for shards, vocabulary and manifest.
        tokens: T, tokens a row.
        sequences: S, most sequences packed into a row.
        pairs: "nsp" for `[CLS] a [SEP] b [SEP]`, half with a random b, labelled 0 = is next and
            1 = random; "none" for `[CLS] a [SEP]`.
        passes: over the training documents, each with other random choices (`dupe_factor`).
        seed: of every random choice.
        heldout_fraction: of documents, chosen by the hash of their text; at least two of them
            where there are four, unless it is 0.
        short_fraction: of documents that are cut into sequences of a random, shorter length.
        lowercase: None to go by the vocabulary.
        language: of the sentence splitter, two letters.
        workers: processes; None for one a core, 1 to work in this one. Changes nothing else.
        runner: "local" for processes here; "beam" for an Apache Beam pipeline, whose workers must
            reach sources and `out` by the same paths. Changes nothing else.
        beam: options of Beam's, each NAME=VALUE or a NAME alone.
        force: replace rows of other settings.

    Returns:
        The manifest, which is written last.

    Raises:
        UserError: settings, sources or vocabulary that cannot be; no text; fewer than two
            documents for "nsp"; `out` holds other rows or is in use; a full disk.
    """
    _check(tokens, sequences, pairs, passes, heldout_fraction, short_fraction, workers)
    _check_runner(runner, beam, workers)
    vocabulary = wordpiece.load(vocab, lowercase)
    parsed = [corpus.parse_source(source) for source in sources]
    if not parsed:
        raise UserError("no source of text; name at least one file, folder or glob")
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
    job = _Job(
        out / ".partial",
        tuple(parsed),
        vocabulary,
        RowFormat(tokens, sequences, len(vocabulary)),
        pairs,
        seed,
        short_fraction,
        language,
    )
    if not job.folder.exists() and (manifest := _finished(out, settings, vocabulary, force)):
        return manifest
    with files.one_line_errors(f"cannot write to {out}"), files.only_process(job.folder):
        if manifest := _finished(
            out, settings, vocabulary, force
        ):  # just now, or all but tidied up
            shutil.rmtree(job.folder)
            return manifest
        _keep_or_discard(job, settings, runner)
        with _pool(job, workers, runner, beam) as pool:
            plan = _tokenize_all(job, pool, heldout_fraction)
            units = {
                "train": _units("train", plan["starts"]["train"], passes),
                "heldout": _units("heldout", plan["starts"]["heldout"], 1),
            }
            _write_all(job, pool, [*units["train"], *units["heldout"]])
        return _finish(job, out, settings, plan, units)


def _check(
    tokens: int,
    sequences: int,
    pairs: str,
    passes: int,
    heldout_fraction: float,
    short_fraction: float,
    workers: int | None,
) -> None:
    if not 8 <= tokens < 1 << 16:
        raise UserError(f"tokens is {tokens}; a row has 8 to 65,535 tokens")
    if not 1 <= sequences <= tokens:
        raise UserError(f"sequences is {sequences}; a row of {tokens} tokens holds 1 to {tokens}")
    if pairs not in PAIRS:
        raise UserError(f"pairs is {pairs!r}; choose one of {', '.join(PAIRS)}")
    if not 1 <= passes <= 10_000:
        raise UserError(f"passes is {passes}; it takes at least 1, at most 10,000")
    if not 0 <= heldout_fraction < 1:
        raise UserError(f"heldout_fraction is {heldout_fraction}; it lies from 0 to below 1")
    if not 0 <= short_fraction <= 1:
        raise UserError(f"short_fraction is {short_fraction}; it lies from 0 to 1")
    if workers is not None and not 1 <= workers <= 1024:
        raise UserError(f"workers is {workers}; it takes at least 1, at most 1,024")


def _check_runner(runner: str, beam: Sequence[str], workers: int | None) -> None:
    if runner not in RUNNERS:
        raise UserError(f"runner is {runner!r}; choose one of {', '.join(RUNNERS)}")
    if runner == "beam":
        if workers is not None:
            raise UserError(
                "workers is for the local runner; Beam's runners have options of their own, "
                "such as --beam direct_num_workers=4"
            )
        from bert_jax.data import beam as beam_runner

        beam_runner.options(beam)
    elif beam:
        raise UserError(f"--beam {beam[0]} is an option of Beam's: add --runner beam")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _finished(
    out: pathlib.Path, settings: dict[str, Any], vocabulary: wordpiece.Vocabulary, force: bool
) -> Manifest | None:
    """The manifest of `out` if its rows are the ones asked for; None if they are to be made."""
    if not (out / MANIFEST).exists():
        return None
    try:
        manifest = read_manifest(out)
    except UserError:
        if force:
            return None
        raise
    there = {**manifest.settings, "vocabulary": manifest.vocab_sha256[:12]}
    asked = {**settings, "vocabulary": vocabulary.sha256[:12]}
    differing = [
        f"{name} {there.get(name)!r}, not {asked.get(name)!r}"
        for name in dict.fromkeys([*asked, *there])
        if there.get(name) != asked.get(name)
    ]
    if not differing:
        print(f"{out} already holds these rows: nothing to do")
        return manifest
    if force:
        return None
    raise UserError(
        f"{out} holds rows of other settings ({'; '.join(differing)}); "
        "choose another folder, or --force to replace them"
    )


def _keep_or_discard(job: _Job, settings: dict[str, Any], runner: str) -> None:
    """Empties the working folder unless what it holds was made from the same input and settings."""
    stats = [(str(file), file.stat()) for source in job.sources for file in source.files]
    files_read = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    sizes = [_CHUNK_CHARACTERS, _BATCH_BYTES]
    content = json.dumps([settings, files_read, job.vocabulary.sha256, runner, sizes])
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    folder = job.folder
    path = folder / "fingerprint"
    if path.exists() and path.read_text() == fingerprint:
        return
    path.unlink(missing_ok=True)  # first, so that a half-emptied folder vouches for nothing
    for entry in folder.iterdir():
        if entry.name != "lock":
            entry.unlink()
    files.write(path, fingerprint)


# Stage 1: documents to chunks of tokens.


def _tokenize_all(job: _Job, pool: "_Workers", heldout_fraction: float) -> dict[str, Any]:
    """Tokenizes what is not yet tokenized and plans the rest; returns what `_plan` does."""
    path = job.folder / "plan.json"
    if path.exists():
        return json.loads(path.read_text())
    report = corpus.Report()
    tokenize = _tokenize_chunks if isinstance(pool, _Workers) else _tokenize_batches
    with Progress("tokenizing", corpus.total_bytes(job.sources), "B") as progress:
        chunks = tokenize(job, pool, report, progress)
    plan = _plan(job, chunks, heldout_fraction)
    plan["sources"] = report.sources
    plan["warnings"] = [*report.warnings, *plan["warnings"]]
    files.write_json(path, plan)
    return plan


def _tokenize_chunks(
    job: _Job, pool: "_Workers", report: corpus.Report, progress: Progress
) -> Sequence[int]:
    """Reads the sources and has workers tokenize them; returns the chunks' numbers in order."""
    chunks = 0

    def missing() -> Iterator[tuple[int, tuple[int, list[corpus.RawDocument]]]]:
        nonlocal chunks
        bytes_before = 0
        documents = itertools.chain.from_iterable(
            corpus.read(source, report) for source in job.sources
        )
        for chunk in _chunks(documents):
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
    job: _Job, pool: Any, report: corpus.Report, progress: Progress
) -> Sequence[int]:
    """Has workers read and tokenize the sources; returns the chunks' numbers in order."""
    batches = list(_batches(job.sources))
    missing = []
    for batch in batches:
        size = sum(f.stat().st_size for f in job.sources[batch.source].files[slice(*batch[2:])])
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
            first = batch.number * _BATCH_CHUNKS
            for chunk in range(first, end):
                for file, *columns in pickle.loads(job.lines(chunk).read_bytes()):
                    report.look(file, zip(*columns, strict=True))
            chunks += range(first, end)
        report.end()
    return chunks


def _batches(sources: Sequence[corpus.Source]) -> Iterator[_Batch]:
    """Consecutive files of a source, of `_BATCH_BYTES` or a little more; "tfds" is one batch."""
    numbers = itertools.count()
    for i, source in enumerate(sources):
        first = size = 0
        for end, file in enumerate(source.files, 1):
            size += file.stat().st_size
            if size >= _BATCH_BYTES:
                yield _Batch(next(numbers), i, first, end)
                first, size = end, 0
        if first < len(source.files) or not source.files:
            yield _Batch(next(numbers), i, first, len(source.files))


def _chunks(documents: Iterable[corpus.RawDocument]) -> Iterator[list[corpus.RawDocument]]:
    """Consecutive documents of about `_CHUNK_CHARACTERS` in all."""
    chunk: list[corpus.RawDocument] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _read_table(path: pathlib.Path) -> tuple[np.ndarray, dict[str, list[int]]]:
    """A chunk's documents ([n] of `_DOCUMENT`) and for each file its tokens and unknown ones."""
    with open(path, "rb") as file:
        file.seek(-_FOOTER.size, os.SEEK_END)
        documents, statistics = _FOOTER.unpack(file.read())
        size = documents * _DOCUMENT.itemsize
        file.seek(-_FOOTER.size - statistics - size, os.SEEK_END)
        return np.frombuffer(file.read(size), _DOCUMENT), json.loads(file.read(statistics))


def _plan(job: _Job, chunks: Sequence[int], heldout_fraction: float) -> dict[str, Any]:
    """Divides the documents into splits and units and writes each split's index.

    Returns:
        `starts` (for each split the first document of each unit, and the end) and `warnings`.
    """
    documents = tokens = 0
    lowest = highest = np.zeros(0, np.uint64)  # the extreme ones among the distinct hashes
    unknown: collections.Counter[str] = collections.Counter()
    mostly_unknown: list[tuple[float, str]] = []
    by_file = (
        (file, counts)
        for number in chunks
        for file, counts in _read_table(job.chunk(number))[1].items()
    )
    for file, group in itertools.groupby(by_file, key=lambda item: item[0]):
        total, missed = (sum(column) for column in zip(*(c for _, c in group), strict=True))
        unknown["tokens"] += total
        unknown["missed"] += missed
        if missed > UNKNOWN_FRACTION * total:
            mostly_unknown.append((missed / total, file))
    for number in chunks:
        table, _ = _read_table(job.chunk(number))
        documents += len(table)
        tokens += int(table["tokens"].sum())
        distinct = np.unique(table["hash"])
        lowest = np.unique(np.concatenate([lowest, distinct[:4]]))[:4]
        highest = np.unique(np.concatenate([highest, distinct[-2:]]))[-2:]

    warnings = []
    if not documents:
        raise UserError("the sources hold no text with words in it; check the files")
    if job.pairs == "nsp" and len(lowest) == 1:
        raise UserError(
            "the corpus has one document only, and a random next sentence comes from another; "
            "separate documents by blank lines, or use --pairs none"
        )
    if mostly_unknown:
        fraction, file = max(mostly_unknown)
        warnings.append(
            f"{file}: {fraction:.0%} of its tokens are unknown to the vocabulary "
            f"({len(mostly_unknown):,} such files, {unknown['missed'] / unknown['tokens']:.0%} of "
            "the corpus); went on, but check that the vocabulary is of this language and case"
        )

    threshold = int(heldout_fraction * 2**64)
    if threshold and len(lowest) < 4:
        threshold = 0
        warnings.append(
            f"the corpus has {len(lowest)} different documents, fewer than four; "
            "went on with nothing held out"
        )
    elif threshold:
        threshold = max(threshold, int(lowest[1]) + 1)
        if highest[0] < threshold:
            raise UserError(
                f"heldout_fraction {heldout_fraction} leaves fewer than two documents to train on; "
                "lower it"
            )

    shard_tokens = min(max(tokens // _SHARDS, _LEAST_SHARD_TOKENS), _MOST_SHARD_TOKENS)
    starts: dict[str, list[int]] = {"train": [], "heldout": []}
    with contextlib.ExitStack() as stack:
        indices = {
            split: stack.enter_context(
                open(stack.enter_context(files.replacing(job.index(split))), "wb")
            )
            for split in starts
        }
        count = dict.fromkeys(starts, 0)
        size = dict.fromkeys(starts, 0)
        unit = dict.fromkeys(starts, -1)
        for number in chunks:
            table, _ = _read_table(job.chunk(number))
            heldout = table["hash"] < np.uint64(threshold)
            for split, part in (("train", table[~heldout]), ("heldout", table[heldout])):
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
    return {"starts": starts, "warnings": warnings}


# Stage 2: tokens to shards of rows.


def _units(split: str, starts: list[int], passes: int) -> list[_Unit]:
    bounds = list(itertools.pairwise(starts))
    total = passes * len(bounds)
    return [
        _Unit(split, turn, first, end, f"{split}-{number:05}-of-{total:05}.arrayrecord")
        for number, (turn, (first, end)) in enumerate(itertools.product(range(passes), bounds))
    ]


def _write_all(job: _Job, pool: "_Workers", units: list[_Unit]) -> None:
    done = {u for u in units if (job.folder / f"{u.name}.json").exists()}
    size = {u: u.end - u.first for u in units}
    total, before = sum(size.values()), sum(size[u] for u in done)
    with Progress("writing rows", total, "documents", before) as progress:
        missing = ((size[u], (u,)) for u in units if u not in done)
        for documents, _ in pool.run("write_shard", missing):
            progress.advance(documents)


class _Documents:
    """The tokenized documents of a split, read from disk where needed."""

    def __init__(self, job: _Job, split: str):
        self._job, self._type = job, job.token_type
        self._index = open(job.index(split), "rb", buffering=0)  # noqa: SIM115
        self._count = os.fstat(self._index.fileno()).st_size // _DOCUMENT.itemsize
        # A corpus can have more chunks than a process may have open files.
        self._chunk = functools.lru_cache(maxsize=128)(self._open)

    def __len__(self) -> int:
        return self._count

    def _open(self, number: int) -> Any:
        return open(self._job.chunk(number), "rb", buffering=0)

    def entry(self, number: int) -> tuple[int, int, int, int, int]:
        """A document's fields, as `_DOCUMENT` has them."""
        size = _DOCUMENT_STRUCT.size
        return _DOCUMENT_STRUCT.unpack(os.pread(self._index.fileno(), size, size * number))

    def sentences(self, entry: tuple, first: int, end: int) -> list[int]:
        """The bounds of sentences [first, end) within the chunk: one more than sentences."""
        handle = self._chunk(entry[2]).fileno()
        data = os.pread(handle, 4 * (end - first + 1), entry[1] + 4 * first)
        return np.frombuffer(data, "<u4").tolist()

    def tokens(self, entry: tuple, start: int, end: int) -> np.ndarray:
        """Tokens [start, end) of the chunk."""
        size = self._type.itemsize
        data = os.pread(self._chunk(entry[2]).fileno(), size * (end - start), size * start)
        return np.frombuffer(data, self._type)


# Workers.


class _Pieces(dict):
    """Word → its token ids as bytes, asked of the tokenizer once, if at all.

    Most words of a text were there before, so this takes a fraction of the time of tokenizing all
    of it. It changes nothing: BERT's normalization and splitting never look across a space, take
    punctuation apart character by character, and leave a word of the vocabulary whole.
    """

    def __init__(self, vocabulary: wordpiece.Vocabulary, token_type: np.dtype):
        self._encode = vocabulary.tokenizer().encode
        self._vocabulary = vocabulary.index
        self._lowercase = vocabulary.lowercase
        self._code = {2: "H", 4: "I"}[token_type.itemsize]

    def __missing__(self, word: str) -> bytes:
        ids = None
        if word.isascii() and word.isalpha():
            known = self._vocabulary.get(word.lower() if self._lowercase else word)
            if known is not None:
                ids = array.array(self._code, (known,)).tobytes()
        elif 1 < len(word) <= _REMEMBERED_CHARACTERS:
            if word[-1] in string.punctuation:
                ids = self[word[:-1]] + self[word[-1]]
            elif word[0] in string.punctuation:
                ids = self[word[0]] + self[word[1:]]
        if ids is None:
            ids = array.array(
                self._code, self._encode(word, add_special_tokens=False).ids
            ).tobytes()
        if len(word) <= _REMEMBERED_CHARACTERS:
            if len(self) >= _REMEMBERED_WORDS:
                self.clear()
            self[word] = ids
        return ids


class _Worker:
    """Does the pieces of work, in whatever process."""

    def __init__(self, job: _Job):
        self._job = job
        self._pieces = _Pieces(job.vocabulary, job.token_type)

    def tokenize(self, number: int, documents: list[corpus.RawDocument]) -> None:
        """Writes a chunk: tokens, bounds of sentences (uint32), table of documents, statistics."""
        job, pieces = self._job, self._pieces.__getitem__
        tokens = bytearray()
        bounds = array.array("I", [0])
        table = []
        statistics: dict[str, list[int]] = {}
        size = job.token_type.itemsize
        for document in documents:
            start, first = len(tokens), len(bounds) - 1
            for sentence in corpus.sentences(document, job.language):
                ids = b"".join(map(pieces, sentence.split(" ")))
                if ids:
                    tokens += ids
                    bounds.append(len(tokens) // size)
            if len(tokens) > start:
                ids = np.frombuffer(bytes(tokens[start:]), job.token_type)
                text = document.text.encode("utf-8", "surrogatepass")
                digest = hashlib.blake2b(text, digest_size=8).digest()
                entry = (
                    int.from_bytes(digest, "little"),
                    first * bounds.itemsize,
                    number,
                    len(bounds) - 1 - first,
                    len(ids),
                )
                table += [entry] * document.copies
                counts = statistics.setdefault(document.file, [0, 0])
                counts[0] += len(ids)
                counts[1] += int(np.count_nonzero(ids == job.vocabulary.unk_id))
        documents_table = np.array(table, _DOCUMENT)
        documents_table["at"] += len(tokens)
        encoded = json.dumps(statistics).encode()
        with files.replacing(job.chunk(number)) as beside, open(beside, "wb") as file:
            file.write(tokens)
            file.write(bounds)
            file.write(documents_table.tobytes())
            file.write(encoded)
            file.write(_FOOTER.pack(len(table), len(encoded)))

    def tokenize_files(self, batch: _Batch) -> None:
        """Writes a batch's chunks, beside each its `long_lines`, then what was read."""
        job, source = self._job, self._job.sources[batch.source]
        report = corpus.Report()
        report.begin(source)
        end = batch.number * _BATCH_CHUNKS
        paths = source.files[batch.first : batch.end]
        for chunk in _chunks(corpus.read_files(source, paths, report)):
            self.tokenize(end, chunk)
            lines = []
            for file, documents in itertools.groupby(chunk, key=lambda document: document.file):
                found = itertools.chain.from_iterable(map(corpus.long_lines, documents))
                columns = zip(*found, strict=True)
                lines.append((file, *(array.array("Q", column) for column in columns)))
            files.write(job.lines(end), pickle.dumps(lines))
            end += 1
        files.write(job.batch(batch.number), pickle.dumps((report, end)))

    def write_shard(self, unit: _Unit) -> None:
        """Writes a unit's rows, then beside them what they are (`_finish` reads it)."""
        from array_record.python.array_record_module import ArrayRecordWriter

        job = self._job
        rng = random.Random(f"{job.seed} {unit.split} {unit.turn} {unit.first}")
        instances = Instances(
            _Documents(job, unit.split),
            job.vocabulary,
            job.format.tokens,
            job.pairs,
            job.short_fraction,
        )
        examples = itertools.chain.from_iterable(
            instances.of(number, rng) for number in range(unit.first, unit.end)
        )
        rows = 0
        histogram = np.zeros(job.format.tokens + 1, np.int64)
        with files.replacing(job.folder / unit.name) as beside:
            writer = ArrayRecordWriter(str(beside), _WRITER_OPTIONS)
            try:
                while window := list(itertools.islice(examples, _WINDOW_SEQUENCES)):
                    packed = job.format.pack(window)
                    order = list(range(len(packed)))  # packing sorts by length
                    rng.shuffle(order)
                    for record in job.format.encode(packed[order]):
                        writer.write(record)
                    rows += len(packed)
                    lengths = [len(example.tokens) for example in window]
                    histogram += np.bincount(lengths, minlength=len(histogram))
                writer.close()
            except RuntimeError as error:  # how it tells of a failed write
                full = os.strerror(errno.ENOSPC) in str(error)
                raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from None
            statistics = {
                "rows": rows,
                "bytes": beside.stat().st_size,
                "sha256": files.sha256(beside),
                "lengths": histogram.tolist(),
            }
        files.write_json(job.folder / f"{unit.name}.json", statistics)

    def call(self, method: str, arguments: tuple) -> Any:
        with files.one_line_errors(f"cannot write to {self._job.folder.parent}"):
            return getattr(self, method)(*arguments)


_worker: _Worker  # of this worker process


def _start_worker(job: _Job) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    parent = multiprocessing.parent_process()

    def die_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=die_with_parent, daemon=True).start()
    _worker = _Worker(job)


def _call_worker(method: str, arguments: tuple) -> Any:
    return _worker.call(method, arguments)


def _call(job: _Job, method: str, arguments: tuple) -> None:
    _Worker(job).call(method, arguments)


def _pool(job: _Job, workers: int | None, runner: str, beam: Sequence[str]) -> Any:
    """What has a `run` as `_Workers` has."""
    if runner == "local":
        return _Workers(job, workers or _cores())
    from bert_jax.data.beam import Pipelines

    return Pipelines(functools.partial(_call, job), job.folder / "error", beam)


class _Workers:
    """Processes that do pieces of work; a single one is this process itself."""

    def __init__(self, job: _Job, workers: int):
        self._job, self._workers = job, workers
        self._pool = None

    def __enter__(self) -> "_Workers":
        if self._workers > 1:
            # Spawned, because a fork of a process with threads (JAX, tokenizers) can hang.
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._workers, multiprocessing.get_context("spawn"), _start_worker, (self._job,)
            )
        return self

    def __exit__(self, *error) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def run(self, method: str, tasks: Iterable[tuple[Any, tuple]]) -> Iterator[tuple[Any, Any]]:
        """Calls a `_Worker` method for every (tag, arguments); yields (tag, result) when done.

        At most two tasks a worker are under way, so `tasks` is not read ahead of the work.
        """
        if not self._pool:
            worker = _Worker(self._job)
            for tag, arguments in tasks:
                yield tag, worker.call(method, arguments)
            return
        pending: dict[concurrent.futures.Future, Any] = {}
        try:
            for tag, arguments in tasks:
                pending[self._pool.submit(_call_worker, method, arguments)] = tag
                if len(pending) >= 2 * self._workers:
                    yield from self._done(pending)
            while pending:
                yield from self._done(pending)
        except BrokenProcessPool:
            raise UserError(
                "a worker process died, most likely for want of memory; run the same command "
                "again, with fewer --workers if need be: what is done is kept"
            ) from None

    @staticmethod
    def _done(pending: dict[concurrent.futures.Future, Any]) -> Iterator[tuple[Any, Any]]:
        done, _ = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            yield pending.pop(future), future.result()


# The end.


def _finish(
    job: _Job,
    out: pathlib.Path,
    settings: dict[str, Any],
    plan: dict[str, Any],
    units: dict[str, list[_Unit]],
) -> Manifest:
    """Moves the shards into place and writes the manifest, in an order that a kill cannot spoil."""
    (out / MANIFEST).unlink(missing_ok=True)  # from here on the old rows, if any, are none
    statistics = {
        unit.name: json.loads((job.folder / f"{unit.name}.json").read_text())
        for unit in itertools.chain(*units.values())
    }
    for name in statistics:
        if (job.folder / name).exists():  # not if a killed run moved it
            os.replace(job.folder / name, out / name)
    for path in [*out.glob("*-of-*.arrayrecord"), *out.glob(".*.partial")]:
        if path.name not in statistics:  # of other settings; begun when a run was killed
            path.unlink()
    files.sync_folder(out)
    job.vocabulary.save(out)
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
    print(f"{out}: rows of {manifest.tokens} tokens, at most {manifest.sequences} sequences each")
    print(f"{'':9}{'documents':>12}{'sequences':>13}{'rows':>12}{'real tokens':>15}   fill  shards")
    for name, split in (("train", manifest.train), ("held out", manifest.heldout)):
        print(
            f"{name:9}{split.documents:12,}{split.sequences:13,}{split.rows:12,}"
            f"{split.real_tokens:15,}{split.fill_fraction:7.1%}{len(split.shards):8,}"
        )
