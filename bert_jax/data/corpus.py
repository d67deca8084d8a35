"""Read text sources of common formats into raw documents.

`read` streams documents in file order, cheaply and in bounded memory, because reading is sequential.
Splitting a document into sentences is expensive, can run in any process, and is in `sentences`. A
`Report` collects statistics and warnings.
"""

import array
import dataclasses
import functools
import glob
import hashlib
import html
import io
import itertools
import json
import math
import os
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from xml.parsers import expat

from bert_jax import storage
from bert_jax.data.compressed import damage_errors, decompressed, open_parquet
from bert_jax.data.formats import (
    KINDS,
    WIKITEXT_HEADING,
    check_is_text,
    head_of,
    incomplete_end,
    kind_of_text,
    marked_kind,
)
from bert_jax.errors import UserError, did_you_mean, missing, with_user_paths
from bert_jax.storage.files import one_line_errors

# Longer than any book or article; a longer document would not fit a worker's memory once tokenized.
DOCUMENT_CHARACTERS = 8 << 20
# A line of JSON is parsed as a whole.
_JSON_CHARACTERS = 1 << 28
_BLOCK_BYTES = 1 << 20
# Stands for a word that is lost: a word of its own that is in no vocabulary, and so becomes [UNK].
UNKNOWN_WORD = "\ufffc"
# Expat parses a tag again from its start for every block that it spans.
_XML_TAG_BYTES = 4 << 20
_MAX_WEIGHT = 1000
_REPEATED_LINE = "a long line repeats an earlier one"


class RawDocument(NamedTuple):
    """A document as read from its file.

    Attributes:
        text: wiki markup for "mediawiki", plain text otherwise; at most `DOCUMENT_CHARACTERS`.
        kind: one of `KINDS`.
        file: path of its file.
        line: line number of its start, from 1 (the record number for "parquet" and "tfds").
        copies: how many times the document counts, from the source's weight; at least 1.
    """

    text: str
    kind: str
    file: str
    line: int
    copies: int = 1


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of text.

    Attributes:
        spec: the specification as the user wrote it.
        kind: one of `KINDS`, or None to detect it for each file.
        pattern: a folder, a glob or a file; NAME/CONFIG for "tfds".
        weight: number of copies of each document; a fraction selects that share of the documents.
        files: the files that match the pattern, sorted; empty for "tfds".
    """

    spec: str
    kind: str | None
    pattern: str
    weight: float = 1.0
    files: tuple[pathlib.Path, ...] = ()


class RepeatedLineDetector:
    """Detector of repeated lines: a hash table of fixed size (16 MB).

    Colliding entries overwrite each other, so some repetitions among many millions of lines are
    missed. False positives have a probability of 2^-64.
    """

    def __init__(self):
        self._table = array.array("Q", bytes(16 << 20))

    def repeated(self, lines: Iterable[tuple[int, int]]) -> Iterator[int]:
        """Yield line numbers of the (fingerprint, line number) pairs that were seen before."""
        table, slots = self._table, len(self._table)
        for fingerprint, number in lines:
            slot = fingerprint % slots
            if table[slot] == fingerprint:
                yield number
            table[slot] = fingerprint


def long_lines(document: RawDocument) -> Iterator[tuple[int, int]]:
    """Yield (64-bit fingerprint, line number) of the lines that rarely repeat in good text."""
    by_line = document.kind in ("google", "paragraphs", "books", "wikiextractor")
    for number, line in enumerate(document.text.split("\n")):
        # Short lines repeat in any text, markup and table rows in any wiki.
        if len(line) > 40 and line[0].isalpha():
            data = line.encode()
            fingerprint = zlib.crc32(data) << 32 | zlib.adler32(data)
            yield fingerprint, document.line + (number if by_line else 0)


@dataclasses.dataclass
class Report:
    """Statistics and warnings of reading.

    Attributes:
        bytes_read: bytes read from files, as stored on disk (compressed).
        documents: number of documents read and kept.
        sources: spec, kinds, files, bytes and documents of each source.
    """

    bytes_read: int = 0
    documents: int = 0
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _problems: dict[tuple[str, str], list[Any]] = dataclasses.field(default_factory=dict)
    _seen: RepeatedLineDetector | None = None
    # Of the last source: documents, those with a single sentence, and the location of the first.
    _read: int = 0
    _singles: int = 0
    _single: str = ""

    def begin(self, source: Source) -> None:
        """Begin a source; what follows belongs to it, until `end`."""
        entry = {"spec": source.spec, "kinds": [], "files": len(source.files), "bytes": 0}
        self.sources.append({**entry, "documents": 0})
        self._read, self._singles, self._single = 0, 0, ""

    def end(self) -> None:
        """End the current source."""
        spec = self.sources[-1]["spec"]
        if not self._read:
            raise UserError(f"source {spec!r} contains no text; check its files")
        if self._singles > 1 and self._singles > 0.5 * self._read:
            self.warn(
                spec,
                "a blank line follows a single line, so most documents have one sentence",
                "their next sentences will be random; put blank lines between documents only",
                self._single,
                self._singles,
            )

    def add(self, part: "Report") -> None:
        """Add the report on the current source's next files, read by another process."""
        entry, part_entry = self.sources[-1], part.sources[-1]
        entry["kinds"] += [kind for kind in part_entry["kinds"] if kind not in entry["kinds"]]
        entry["bytes"] += part_entry["bytes"]
        entry["documents"] += part_entry["documents"]
        self.bytes_read += part.bytes_read
        self.documents += part.documents
        self._read += part._read
        self._singles += part._singles
        self._single = self._single or part._single
        for (source, problem), (where, count, consequence) in part._problems.items():
            self.warn(source, problem, consequence, where, count)

    def check_repeated_lines(self, file: str, lines: Iterable[tuple[int, int]]) -> None:
        """Warn of lines of a file (from `long_lines`) that occurred before, in any source."""
        self._seen = self._seen or RepeatedLineDetector()
        for number in self._seen.repeated(lines):
            self.warn(self.sources[-1]["spec"], _REPEATED_LINE, "kept it", f"{file}:{number}")

    def count(self, size: int) -> None:
        """Add to the number of bytes read."""
        self.bytes_read += size

    def warn(self, source: str, problem: str, consequence: str, where: str, count: int = 1) -> None:
        """Record a warning; repetitions in a source are counted and keep the first location."""
        entry = self._problems.setdefault((source, problem), [where, 0, consequence])
        entry[1] += count

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line per problem: first location (a URL on object storage), problem, count, consequence.

        Repeated lines come last, because readers that process files in parallel find them last.
        """
        return tuple(
            f"{with_user_paths(where)}: {problem} ({count:,} in {source}); {consequence}"
            for (source, problem), (where, count, consequence) in sorted(
                self._problems.items(), key=lambda item: item[0][1] == _REPEATED_LINE
            )
        )


def parse_source(spec: str) -> Source:
    """Parse `[KIND:]GLOB_OR_FOLDER[@WEIGHT]` and find the files.

    Examples: `books:novels/`, `wiki/**/*.gz@0.5`, `tfds:wikipedia/20230601.en`. A folder stands
    for all files below it except hidden ones.
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
    if kind == "tfds":
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
    """Return the total size of the files on disk, or None if a source has no files ("tfds")."""
    total = 0
    for source in sources:
        if source.kind == "tfds":
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
    for document in read_files(source, source.files, report):
        report.check_repeated_lines(document.file, long_lines(document))
        yield document
    report.end()


def read_files(
    source: Source, files: Iterable[pathlib.Path], report: Report
) -> Iterator[RawDocument]:
    """Stream the documents of consecutive files of a source, as `read` does.

    Unlike `read`, does not look for repeated lines, which requires the preceding files.

    Args:
        source: the source, which `report` has begun.
        files: consecutive files of the source; none for "tfds", which is read whole.
        report: where statistics and warnings are added.
    """
    entry = report.sources[-1]
    before = report.bytes_read
    whole_copies, fraction = divmod(source.weight, 1)
    documents = _Reader(source, report).documents(files)
    for document in _split_long_documents(documents, source.spec, report):
        if document.kind not in entry["kinds"]:
            entry["kinds"].append(document.kind)
        entry["bytes"] = report.bytes_read - before
        report._read += 1
        if document.kind == "google" and "\n" not in document.text:
            report._single = report._single or f"{document.file}:{document.line}"
            report._singles += 1
        copies = int(whole_copies) + (fraction > 0 and _uniform_hash(document.text) < fraction)
        if copies:
            report.documents += 1
            entry["documents"] += 1
            yield document._replace(copies=copies)
    entry["bytes"] = report.bytes_read - before


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
            report.warn(
                spec,
                f"a document is longer than {DOCUMENT_CHARACTERS:,} characters",
                "split it into several documents",
                f"{document.file}:{document.line}",
            )
        while len(text) > DOCUMENT_CHARACTERS:
            end = text.rfind("\n", 1, DOCUMENT_CHARACTERS)
            end = end if end > 0 else DOCUMENT_CHARACTERS
            yield document._replace(text=text[:end])
            text = text[end:].lstrip("\n")
        yield document._replace(text=text)


class _Reader:
    """Reader of a source's files, each according to its kind."""

    def __init__(self, source: Source, report: Report):
        self._source, self._report = source, report

    def documents(self, files: Iterable[pathlib.Path]) -> Iterator[RawDocument]:
        if self._source.kind == "tfds":
            for record, text in self._tfds():
                yield RawDocument(text, "tfds", self._source.pattern, record)
        for path in files:
            with damage_errors(path):
                yield from self._documents_of(path)

    def _documents_of(self, path: pathlib.Path) -> Iterator[RawDocument]:
        head = head_of(path)  # not counted, as it is read again below
        if not head.strip():
            self._warn(path, 1, "a file is empty", "skipped it")
            return
        kind = self._source.kind or marked_kind(path, head) or self._text_kind
        if kind == "parquet":
            for line, text in self._parquet(path):
                yield RawDocument(text, kind, str(path), line)
            return
        check_is_text(path, head)
        with decompressed(path, self._report.count) as stream:
            read = {
                "google": self._google,
                "paragraphs": self._google,
                "wikitext": self._wikitext,
                "books": self._books,
                "wikiextractor": self._wikiextractor,
                "wikiextractor-json": self._json,
                "jsonl": self._json,
                "mediawiki": self._mediawiki,
            }[kind]
            any_text = False
            for line, text in read(path, stream):
                any_text = True
                yield RawDocument(text, kind, str(path), line)
        if not any_text:
            self._warn(path, 1, f"a file of kind {kind} contains no text", "skipped it")

    def _warn(self, path, line: int, problem: str, consequence: str) -> None:
        self._report.warn(self._source.spec, problem, consequence, f"{path}:{line}")

    @functools.cached_property
    def _text_kind(self) -> str:
        """The kind of the source's first file of plain text."""
        for path in self._source.files:
            with damage_errors(path):
                head = head_of(path)
            if head.strip() and marked_kind(path, head) is None:
                check_is_text(path, head)
                break
        return kind_of_text(head.decode("utf-8", "replace"))

    def _lines(self, path: pathlib.Path, stream: io.BufferedIOBase) -> Iterator[tuple[int, str]]:
        """Yield (line number, line without line end); invalid bytes become U+FFFD.

        A line longer than `DOCUMENT_CHARACTERS` is split.
        """
        number, offset, rest = 1, 0, b""
        while data := stream.readline(DOCUMENT_CHARACTERS):
            ended = data.endswith(b"\n")
            data, rest = rest + data, b""
            if not ended:  # part of a line, or the last line: the last character may be incomplete
                cut = incomplete_end(data) if len(data) >= DOCUMENT_CHARACTERS else len(data)
                data, rest = data[:cut], data[cut:]
            try:
                line = data.decode()
            except UnicodeDecodeError as error:
                line = data.decode(errors="replace")
                self._report.warn(
                    self._source.spec,
                    "a line is not UTF-8",
                    "replaced invalid bytes with U+FFFD",
                    f"{path}:{number} (byte {offset + error.start:,} of the text)",
                )
            if "\0" in line:
                line = line.replace("\0", " ")
                self._warn(
                    path, number, "a line contains NUL characters", "replaced them with spaces"
                )
            yield number, line.rstrip("\r\n").removeprefix("\ufeff" if number == 1 else "")
            number += ended
            offset += len(data)

    def _google(self, path, stream) -> Iterator[tuple[int, str]]:
        lines: list[str] = []
        size = start = 0
        for number, line in self._lines(path, stream):
            line = line.strip()
            if line:
                start = start if lines else number
                lines.append(line)
                size += len(line) + 1
            if lines and (not line or size > DOCUMENT_CHARACTERS):
                if line:
                    self._warn_long_document(path, start)
                yield start, "\n".join(lines)
                lines, size = [], 0
        if lines:
            yield start, "\n".join(lines)

    def _wikitext(self, path, stream) -> Iterator[tuple[int, str]]:
        lines: list[str] = []
        size = start = 0
        for number, line in self._lines(path, stream):
            heading = WIKITEXT_HEADING.fullmatch(line)
            if lines and (size > DOCUMENT_CHARACTERS or (heading and heading[1] == "=")):
                if not heading:
                    self._warn_long_document(path, start)
                yield start, "\n".join(lines)
                lines, size = [], 0
            if not heading and line.strip():
                start = start if lines else number
                lines.append(_without_wikitext_marks(line))
                size += len(line) + 1
        if lines:
            yield start, "\n".join(lines)

    def _books(self, path, stream) -> Iterator[tuple[int, str]]:
        lines: list[str] = []
        size, start = 0, 1
        for number, line in self._lines(path, stream):
            if size + len(line) > DOCUMENT_CHARACTERS and lines:
                self._warn_long_document(path, start)
                yield start, "\n".join(lines)
                lines, size, start = [], 0, number
            lines.append(line)
            size += len(line) + 1
        if any(line.strip() for line in lines):
            yield start, "\n".join(lines)

    def _warn_long_document(self, path, line: int) -> None:
        self._warn(
            path,
            line,
            f"a document is longer than {DOCUMENT_CHARACTERS:,} characters",
            "split it into several documents",
        )

    def _wikiextractor(self, path, stream) -> Iterator[tuple[int, str]]:
        lines: list[str] = []
        size, start, title, inside = 0, 1, "", False
        for number, line in self._lines(path, stream):
            if line.startswith("<doc "):
                match = re.search(r'title="(.*)">', line)
                title = html.unescape(match[1]) if match else ""
                lines, size, start, inside = [], 0, number, True
            elif line.startswith("</doc>"):
                if lines:
                    yield start, "\n".join(lines)
                else:
                    self._warn(path, start, "an article is empty", "skipped it")
                lines, inside = [], False
            elif inside and line.strip() and not (not lines and html.unescape(line) == title):
                lines.append(line)
                size += len(line) + 1
                if size > DOCUMENT_CHARACTERS:
                    self._warn_long_document(path, start)
                    yield start, "\n".join(lines)
                    lines, size = [], 0
        if lines:
            self._warn(path, start, "the last article has no </doc>", "kept the text so far")
            yield start, "\n".join(lines)

    def _whole_lines(self, path, stream) -> Iterator[tuple[int, str]]:
        """Yield (line number, line) with the parts of split lines joined."""
        for number, parts in itertools.groupby(self._lines(path, stream), lambda item: item[0]):
            joined, size = [], 0
            for _, part in parts:
                size += len(part)
                joined = [*joined, part] if size <= _JSON_CHARACTERS else []
            if size > _JSON_CHARACTERS:
                self._warn(
                    path,
                    number,
                    f"a line is longer than {_JSON_CHARACTERS:,} characters",
                    "skipped it",
                )
            else:
                yield number, "".join(joined)

    def _json(self, path, stream) -> Iterator[tuple[int, str]]:
        for number, line in self._whole_lines(path, stream):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                if number == 1 and line.strip() in ("{", "[", "[{"):
                    raise UserError(
                        f"{path}:1: JSON over several lines, not an object per line; convert it, "
                        f"e.g. jq -c '.. | objects | select(.text)' {path}"
                    ) from None
                self._warn(path, number, "a line is not JSON", "skipped it")
                continue
            if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                have = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                raise UserError(
                    f'{path}:{number}: no field "text" with a string (it has: {have[:200]}); '
                    'rename the field with the text to "text"'
                )
            text = (
                value["text"].encode(errors="replace").decode()
            )  # JSON may contain lone surrogates
            if text.strip():
                yield number, _without_title(text, value.get("title"))
            else:
                self._warn(path, number, "a text is empty", "skipped it")

    def _mediawiki(self, path, stream) -> Iterator[tuple[int, str]]:
        # Use Expat rather than a tree builder to hold one page at a time and know line numbers.
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        pages: list[tuple[int, str]] = []
        fields: dict[str, list[str]] = {}
        open_elements: list[str] = []
        start = size = 0

        def begin(name, attributes):
            nonlocal start, size
            name = name.rpartition(" ")[2]
            open_elements.append(name)
            if name == "page":
                start = parser.CurrentLineNumber
                fields.clear()
            if name == "text":
                size = 0
            fields[name] = []  # a later revision replaces an earlier one

        def characters(text):
            nonlocal size
            name = open_elements[-1] if open_elements else ""
            if name == "text":
                size += len(text)
            if name in ("ns", "text"):
                fields[name].append(text)
            if size > DOCUMENT_CHARACTERS:
                self._warn_long_document(path, start)
                finish_page()
                fields["text"], size = [], 0

        def finish_page():
            article = "".join(fields.get("ns", "0")).strip() in ("", "0")
            text = "".join(fields.get("text", ""))
            if article and "redirect" not in fields and text.strip():
                pages.append((start, text))

        def end(name):
            open_elements.pop()
            if name.rpartition(" ")[2] == "page":
                finish_page()

        def refuse(*_):
            raise UserError(
                f"{path}:{parser.CurrentLineNumber}: a document type declaration, which "
                "MediaWiki dumps do not have and which could expand without bound; remove it"
            )

        parser.StartElementHandler, parser.EndElementHandler = begin, end
        parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = characters, refuse
        try:
            read = 0
            while block := stream.read(_BLOCK_BYTES):
                parser.Parse(block)
                read += len(block)
                if read - parser.CurrentByteIndex > _XML_TAG_BYTES:
                    raise UserError(
                        f"{path}:{parser.CurrentLineNumber}: a tag longer than {_XML_TAG_BYTES:,} "
                        "bytes, which MediaWiki dumps do not have; remove it"
                    )
                yield from pages
                pages.clear()
            parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise UserError(
                f"{path}:{error.lineno}: not well-formed XML "
                f"({expat.errors.messages[error.code]}); the file may be truncated; copy or "
                "download it again"
            ) from None

    def _parquet(self, path: pathlib.Path) -> Iterator[tuple[int, str]]:
        with open_parquet(path, ["text"]) as table:
            size, rows, number = storage.stat(path)[0], table.metadata.num_rows, 0
            before = self._report.bytes_read
            for batch in table.iter_batches(256, columns=["text"], use_threads=False):
                for text in batch.column(0).cast("large_string"):
                    number += 1
                    # Parquet readers do not check that strings are UTF-8.
                    text = (
                        text.as_buffer().to_pybytes().decode(errors="replace")
                        if text.is_valid
                        else ""
                    )
                    if text.strip():
                        yield number, text
                    else:
                        self._warn(path, number, "a text is empty", "skipped it")
                self._report.bytes_read = before + size * number // max(rows, number)

    def _tfds(self) -> Iterator[tuple[int, str]]:
        name = self._source.pattern
        try:
            import tensorflow_datasets as tfds
        except ImportError:
            raise missing(f"source 'tfds:{name}' needs TensorFlow Datasets", "tfds") from None
        try:
            # Unlike tfds.load, random access to ArrayRecord files does not need TensorFlow.
            data = tfds.data_source(name, split="train", data_dir=os.environ.get("TFDS_DATA_DIR"))
            features = list(data.dataset_info.features)
        except Exception as error:  # dataset code, the network or the disk may raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise UserError(
                f"source 'tfds:{name}': {reason.rstrip('.')}; prepare it on a machine "
                'with network access and file_format="array_record", and set TFDS_DATA_DIR to its '
                "folder"
            ) from None
        if "text" not in features:
            raise UserError(
                f'tfds:{name}: no feature "text" (it has: {", ".join(features)}); choose another'
            )
        for index in range(len(data)):
            text = data[index]["text"].decode(errors="replace")
            if text.strip():
                yield index + 1, text
            else:
                self._warn(f"tfds:{name}", index + 1, "a text is empty", "skipped it")


def _without_wikitext_marks(line: str) -> str:
    """Undo the marks of WikiText's tokenized version: `well @-@ known`, `1 @,@ 000`, `<unk>`."""
    return re.sub(r" @([-,.])@ ", r"\1", line).replace("<unk>", UNKNOWN_WORD)


def _without_title(text: str, title: Any) -> str:
    """Remove the title that WikiExtractor puts before an article; Google's text has none."""
    first, _, rest = text.partition("\n")
    return rest.lstrip("\n") if title and rest.strip() and first.strip() == title else text
