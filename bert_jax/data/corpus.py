"""Read text sources of common formats into raw documents.

`read` streams documents in file order, cheaply and in bounded memory, because reading is sequential.
Splitting a document into sentences is expensive, can run in any process, and is in `sentences`. A
`Report` collects statistics and warnings.
"""

import dataclasses
import functools
import glob
import hashlib
import itertools
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from bert_jax import storage
from bert_jax.data.formats import KINDS
from bert_jax.data.readers import (
    DATASETS,
    DOCUMENT_CHARACTERS,
    LONG_DOCUMENT,
    RawDocument,
    Reader,
)
from bert_jax.errors import UserError, did_you_mean, with_user_paths
from bert_jax.storage.files import one_line_errors

_MAX_WEIGHT = 1000
# Of a document; a warning if most documents of a source are like this.
_SINGLE = (
    "a blank line follows a single line, so most documents have one sentence",
    "their next sentences will be random; put blank lines between documents only",
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of text.

    Attributes:
        spec: the specification as the user wrote it.
        kind: one of `KINDS`, or None to detect it for each file.
        pattern: a folder, a glob or a file; the name of one of `DATASETS`.
        weight: number of copies of each document; a fraction selects that share of the documents.
        files: the files that match the pattern, sorted; empty for `DATASETS`.
    """

    spec: str
    kind: str | None
    pattern: str
    weight: float = 1.0
    files: tuple[pathlib.Path, ...] = ()


@dataclasses.dataclass
class Report:
    """Statistics and warnings of reading.

    Attributes:
        bytes_read: bytes read from files, as stored on disk (compressed).
        sources: spec, kinds, files, bytes and documents of each source.
    """

    bytes_read: int = 0
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _problems: dict[tuple[str, str], list[Any]] = dataclasses.field(default_factory=dict)
    _read: int = 0  # documents of the last source, whether kept or not

    def begin(self, source: Source) -> None:
        """Begin a source; what follows belongs to it, until `end`."""
        entry = {"spec": source.spec, "kinds": [], "files": len(source.files), "bytes": 0}
        self.sources.append({**entry, "documents": 0})
        self._read = 0

    def end(self) -> None:
        """End the current source."""
        spec = self.sources[-1]["spec"]
        if not self._read:
            raise UserError(f"source {spec!r} contains no text; check its files")
        _, singles, _ = self._problems.get((spec, _SINGLE[0]), ("", 0, ""))
        if singles < 2 or singles <= 0.5 * self._read:
            self._problems.pop((spec, _SINGLE[0]), None)

    def count(self, size: int) -> None:
        """Add to the number of bytes read."""
        self.bytes_read += size

    def warn(self, source: str, problem: str, consequence: str, where: str) -> None:
        """Record a warning; repetitions in a source are counted and keep the first location."""
        entry = self._problems.setdefault((source, problem), [where, 0, consequence])
        entry[1] += 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line per problem: first location (a URL on object storage), problem, count, consequence."""
        return tuple(
            f"{with_user_paths(where)}: {problem} ({count:,} in {source}); {consequence}"
            for (source, problem), (where, count, consequence) in self._problems.items()
        )


def parse_source(spec: str) -> Source:
    """Parse `[KIND:]GLOB_OR_FOLDER[@WEIGHT]` and find the files.

    Examples: `books:novels/`, `wiki/**/*.gz@0.5`, `tfds:wikipedia/20230601.en`,
    `hf:wikimedia/wikipedia,20231101.en:train`. A folder stands for all files below it except hidden ones.
    """
    kind, pattern, weight = None, spec, 1.0
    prefix, colon, rest = spec.partition(":")
    if colon and prefix in KINDS:
        kind, pattern = prefix, rest
    elif (
        colon
        and re.fullmatch(r"[\w-]+", prefix)
        and not storage.is_remote(spec)
        and not os.path.lexists(spec)
    ):
        raise UserError(
            f"source {spec!r}: unknown kind {prefix!r} (known: {', '.join(KINDS)})"
            f"{did_you_mean(prefix, KINDS)}"
        )
    path, at, number = pattern.rpartition("@")
    if at and "/" not in number and not os.path.lexists(pattern):
        try:
            pattern, weight = path, float(number)
        except ValueError:
            weight = math.nan
        if not (0 < weight <= _MAX_WEIGHT):
            raise UserError(
                f"source {spec!r}: the weight {number!r} is not a positive number up to "
                f"{_MAX_WEIGHT:,}; write for example @0.5 or @3, or omit it"
            )
    if kind in DATASETS:
        return Source(spec, kind, pattern, weight)
    return Source(spec, kind, pattern, weight, _find_files(spec, pattern))


def _find_files(spec: str, pattern: str) -> tuple[pathlib.Path, ...]:
    if storage.is_remote(pattern):
        if paths := storage.find(pattern):
            return tuple(paths)
        raise UserError(
            f"source {spec!r}: nothing matches {pattern!r}; check the bucket and the path"
        )
    pattern = os.path.expanduser(pattern)
    matches = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
    if not matches:
        raise UserError(f"source {spec!r}: no file matches {pattern!r}; check the path")
    files = set()
    for match in matches:
        if os.path.isdir(match):
            for folder, folders, names in os.walk(match):
                folders[:] = [name for name in folders if not name.startswith(".")]
                files |= {os.path.join(folder, n) for n in names if not n.startswith(".")}
        else:
            files.add(match)
    if not files:
        raise UserError(
            f"source {spec!r}: the folder {pattern!r} contains no files; check the path"
        )
    for file in sorted(files):
        if os.path.exists(file) and not os.path.isfile(file):
            raise UserError(
                f"source {spec!r}: {file} is not a file, such as a pipe: text is read more than once, so "
                "write it to a file"
            )
    return tuple(pathlib.Path(file) for file in sorted(files))


def total_bytes(sources: Iterable[Source]) -> int | None:
    """Return the total size of the files on disk, or None if a source has no files (`DATASETS`)."""
    total = 0
    for source in sources:
        if source.kind in DATASETS:
            return None
        for file in source.files:
            with one_line_errors(f"cannot read {file}"):
                total += storage.stat(file)[0]
    return total


def read(source: Source, report: Report) -> Iterator[RawDocument]:
    """Stream a source's documents in file order, in memory independent of its size.

    Adds bytes, documents and recoverable problems to `report` while reading.
    """
    report.begin(source)
    entry = report.sources[-1]
    before = report.bytes_read
    whole_copies, fraction = divmod(source.weight, 1)
    warn = functools.partial(report.warn, source.spec)
    reader = Reader(source.kind, source.files, warn, report.count)
    if source.kind in DATASETS:
        documents = reader.dataset(source.kind, source.pattern)
    else:
        documents = itertools.chain.from_iterable(map(reader.documents, source.files))
    for document in _split_long_documents(documents, source.spec, report):
        if document.kind not in entry["kinds"]:
            entry["kinds"].append(document.kind)
        entry["bytes"] = report.bytes_read - before
        report._read += 1
        if document.kind == "google" and "\n" not in document.text:
            report.warn(source.spec, *_SINGLE, f"{document.file}:{document.line}")
        copies = int(whole_copies) + (fraction > 0 and _uniform_hash(document.text) < fraction)
        if copies:
            entry["documents"] += 1
            yield document._replace(copies=copies)
    entry["bytes"] = report.bytes_read - before
    report.end()


def _uniform_hash(text: str) -> float:
    """Map a text to a number in [0, 1), independent of the hash that selects held-out documents."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"weight").digest()
    return int.from_bytes(digest, "little") / 2**64


def _split_long_documents(
    documents: Iterable[RawDocument], spec: str, report: Report
) -> Iterator[RawDocument]:
    """Yield the documents, those longer than `DOCUMENT_CHARACTERS` in several parts."""
    for document in documents:
        text = document.text
        if len(text) > DOCUMENT_CHARACTERS:
            report.warn(spec, *LONG_DOCUMENT, f"{document.file}:{document.line}")
        while len(text) > DOCUMENT_CHARACTERS:
            end = text.rfind("\n", 1, DOCUMENT_CHARACTERS)
            end = end if end > 0 else DOCUMENT_CHARACTERS
            yield document._replace(text=text[:end])
            text = text[end:].lstrip("\n")
        yield document._replace(text=text)
