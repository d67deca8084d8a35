"""Work units of `prepare`; each writes its output files atomically.

A chunk is a group of tokenized documents, a unit the documents of one shard. See prepare.py for how
they are combined.
"""

import array
import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import os
import pathlib
import random
import string
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data import corpus
from bert_jax.data.instances import Instances
from bert_jax.data.rows import RowFormat
from bert_jax.data.sentences import split_sentences
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.storage import files

# A worker holds one chunk (1 MB of text) or one window of sequences in memory at a time.
CHUNK_CHARACTERS = 1 << 20
_WINDOW_SEQUENCES = 1 << 13
# Maximum number and length of the words whose ids a worker caches (about 20 MB).
_CACHED_WORDS, _CACHED_CHARACTERS = 1 << 17, 32
# Grain reads single records, and random token ids hardly compress.
_WRITER_OPTIONS = "group_size:1,uncompressed"

# Entry of a tokenized document: hash of its text, byte offset of its sentence bounds in its chunk,
# number of the chunk, numbers of sentences and tokens.
DOCUMENT = np.dtype(
    [("hash", "<u8"), ("at", "<u8"), ("chunk", "<u8"), ("sentences", "<u4"), ("tokens", "<u4")]
)
_DOCUMENT_STRUCT = struct.Struct("<QQQII")
_FOOTER = struct.Struct("<II")  # documents, bytes of statistics


@dataclasses.dataclass(frozen=True)
class Job:
    """Input, settings of `prepare` and file names that all workers share."""

    out: pathlib.Path
    sources: tuple[corpus.Source, ...]
    vocabulary: Vocabulary
    settings: dict[str, Any]

    @property
    def folder(self) -> pathlib.Path:
        """The working folder."""
        return self.out / ".partial"

    @property
    def format(self) -> RowFormat:
        settings = self.settings
        return RowFormat(settings["tokens"], settings["sequences"], len(self.vocabulary))

    @property
    def files(self) -> list[pathlib.Path]:
        """The files of all sources."""
        return [path for source in self.sources for path in source.files]

    @property
    def token_type(self) -> np.dtype:
        return self.format.dtype["tokens"].base

    def chunk(self, number: int) -> pathlib.Path:
        return self.folder / f"{number:06}.tokens"

    def index(self, split: str) -> pathlib.Path:
        return self.folder / f"{split}.index"


class Unit(NamedTuple):
    """Documents [first, end) of a split, to be written to the shard `name`."""

    split: str
    pass_index: int  # pass over the corpus, from 0
    first: int
    end: int
    name: str


def chunks(documents: Iterable[corpus.RawDocument]) -> Iterator[list[corpus.RawDocument]]:
    """Group consecutive documents into chunks of about `CHUNK_CHARACTERS`."""
    chunk: list[corpus.RawDocument] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def read_table(path: pathlib.Path) -> tuple[np.ndarray, dict[str, list[int]]]:
    """Return a chunk's documents ([n] of `DOCUMENT`), and [tokens, unknown tokens] by file."""
    with open(path, "rb") as file:
        file.seek(-_FOOTER.size, os.SEEK_END)
        documents, statistics_bytes = _FOOTER.unpack(file.read())
        size = documents * DOCUMENT.itemsize
        file.seek(-_FOOTER.size - statistics_bytes - size, os.SEEK_END)
        return np.frombuffer(file.read(size), DOCUMENT), json.loads(file.read(statistics_bytes))


class _Documents:
    """The tokenized documents of a split, read from disk on demand."""

    def __init__(self, job: Job, split: str):
        self._job, self._type = job, job.token_type
        self._index = open(job.index(split), "rb", buffering=0)  # noqa: SIM115
        self._count = os.fstat(self._index.fileno()).st_size // DOCUMENT.itemsize
        # A corpus can have more chunks than a process may have open files.
        self._chunk = functools.lru_cache(maxsize=128)(self._open)

    def __len__(self) -> int:
        return self._count

    def _open(self, number: int) -> Any:
        return open(self._job.chunk(number), "rb", buffering=0)

    def entry(self, number: int) -> tuple[int, int, int, int, int]:
        """Return the fields of a document's `DOCUMENT` entry."""
        size = _DOCUMENT_STRUCT.size
        return _DOCUMENT_STRUCT.unpack(os.pread(self._index.fileno(), size, size * number))

    def sentences(self, entry: tuple, first: int, end: int) -> list[int]:
        """Return the end - first + 1 token bounds of sentences [first, end) in the chunk."""
        handle = self._chunk(entry[2]).fileno()
        data = os.pread(handle, 4 * (end - first + 1), entry[1] + 4 * first)
        return np.frombuffer(data, "<u4").tolist()

    def tokens(self, entry: tuple, start: int, end: int) -> np.ndarray:
        """Return tokens [start, end) of the document's chunk."""
        size = self._type.itemsize
        data = os.pread(self._chunk(entry[2]).fileno(), size * (end - start), size * start)
        return np.frombuffer(data, self._type)


class _WordCache(dict):
    """Cached mapping from a word to its token ids, as bytes.

    Most words of a text are repetitions, so this is several times faster than tokenizing all of
    it. The ids are the same: BERT's normalization and splitting do not look across spaces, split
    off every punctuation character, and keep words of the vocabulary whole.
    """

    def __init__(self, vocabulary: Vocabulary, token_type: np.dtype):
        self._encode = vocabulary.tokenizer().encode
        self._vocabulary = vocabulary.index
        self._lowercase = vocabulary.lowercase
        self._code = {2: "H", 4: "I"}[token_type.itemsize]

    def __missing__(self, word: str) -> bytes:
        ids = None
        if word.isascii() and word.isalpha():
            token_id = self._vocabulary.get(word.lower() if self._lowercase else word)
            if token_id is not None:
                ids = array.array(self._code, (token_id,)).tobytes()
        elif 1 < len(word) <= _CACHED_CHARACTERS:
            if word[-1] in string.punctuation:
                ids = self[word[:-1]] + self[word[-1]]
            elif word[0] in string.punctuation:
                ids = self[word[0]] + self[word[1:]]
        if ids is None:
            ids = array.array(
                self._code, self._encode(word, add_special_tokens=False).ids
            ).tobytes()
        if len(word) <= _CACHED_CHARACTERS:
            if len(self) >= _CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids


def _encoder(vocabulary: Vocabulary, token_type: np.dtype) -> Callable[[str, bool], bytes]:
    """Return a function from a sentence, and whether it begins a document, to its ids as bytes."""
    if vocabulary.is_wordpiece:
        word_ids = _WordCache(vocabulary, token_type).__getitem__
        return lambda sentence, _: b"".join(map(word_ids, sentence.split(" ")))
    encode = vocabulary.encode_sentence  # of a tokenizer that caches words itself
    return lambda sentence, first: np.array(encode(sentence, first), token_type).tobytes()


class Worker:
    """Executor of work units, in any process."""

    def __init__(self, job: Job):
        self._job = job
        self._encode = _encoder(job.vocabulary, job.token_type)

    def tokenize(self, number: int, documents: list[corpus.RawDocument]) -> None:
        """Write a chunk: tokens, sentence bounds (uint32), document table and statistics."""
        job = self._job
        tokens = bytearray()
        bounds = array.array("I", [0])
        table = []
        statistics: dict[str, list[int]] = {}
        size = job.token_type.itemsize
        for document in documents:
            start, first = len(tokens), len(bounds) - 1
            for sentence in split_sentences(document, job.settings["language"]):
                ids = self._encode(sentence, len(tokens) == start)
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
        documents_table = np.array(table, DOCUMENT)
        documents_table["at"] += len(tokens)
        encoded = json.dumps(statistics).encode()
        with files.atomic_write(job.chunk(number)) as temporary, open(temporary, "wb") as file:
            file.write(tokens)
            file.write(bounds)
            file.write(documents_table.tobytes())
            file.write(encoded)
            file.write(_FOOTER.pack(len(table), len(encoded)))

    def write_shard(self, unit: Unit) -> None:
        """Write a unit's rows and their statistics, which `prepare` reads."""
        from array_record.python.array_record_module import ArrayRecordWriter

        job, row_format, settings = self._job, self._job.format, self._job.settings
        rng = random.Random(f"{settings['seed']} {unit.split} {unit.pass_index} {unit.first}")
        instances = Instances(
            _Documents(job, unit.split),
            job.vocabulary,
            row_format.tokens,
            settings["pairs"],
            settings["short_fraction"],
        )
        examples = instances.of_all(unit.first, unit.end, rng)
        rows = 0
        histogram = np.zeros(row_format.tokens + 1, np.int64)
        with files.atomic_write(job.folder / unit.name) as temporary:
            writer = ArrayRecordWriter(str(temporary), _WRITER_OPTIONS)
            try:
                while window := list(itertools.islice(examples, _WINDOW_SEQUENCES)):
                    packed = row_format.pack(window)
                    order = list(range(len(packed)))  # shuffled below, as packing sorts by length
                    rng.shuffle(order)
                    for record in row_format.encode(packed[order]):
                        writer.write(record)
                    rows += len(packed)
                    lengths = [len(example.tokens) for example in window]
                    histogram += np.bincount(lengths, minlength=len(histogram))
                writer.close()
            except RuntimeError as error:  # raised by ArrayRecord for failed writes
                disk_full = os.strerror(errno.ENOSPC) in str(error)
                raise OSError(errno.ENOSPC if disk_full else errno.EIO, str(error)) from None
            statistics = {
                "rows": rows,
                "bytes": temporary.stat().st_size,
                "sha256": files.sha256(temporary),
                "lengths": histogram.tolist(),
            }
        files.write_json(job.folder / f"{unit.name}.json", statistics)

    def call(self, method: str, arguments: tuple) -> Any:
        with files.one_line_errors(f"cannot write to {self._job.out}"):
            return getattr(self, method)(*arguments)
