"""Sources of text, of every common format, to documents and their sentences.

Reading is split in two, because one part must be sequential and the other is expensive. `read`
streams raw documents in file order, cheaply and in bounded memory; `sentences` turns one raw
document into sentences (markup removal, joining of wrapped lines, sentence splitting) and can run
in any process. A `Report` collects how much was read and what was odd about it.
"""

import array
import dataclasses
import difflib
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

from bert_jax.data.compressed import damage, decompressed
from bert_jax.data.formats import (
    KINDS,
    WRAPPED_CHARACTERS,
    check_is_text,
    head_of,
    incomplete_end,
    kind_of_text,
    marked_kind,
)
from bert_jax.data.mediawiki import plain_text
from bert_jax.errors import UserError
from bert_jax.files import one_line_errors

# No book or article is this long; whatever is would not fit a worker's memory once tokenized.
DOCUMENT_CHARACTERS = 8 << 20
# Far beyond T tokens of any row; longer ones are not sentences but text without punctuation.
SENTENCE_CHARACTERS = 10_000
_BLOCK_BYTES = 1 << 20
_MOST_WEIGHT = 1000
_REPEATS = "a long line repeats an earlier one"


class RawDocument(NamedTuple):
    """One document as it stands in its file.

    Attributes:
        text: wiki markup for "mediawiki", else text; never longer than `DOCUMENT_CHARACTERS`.
        kind: one of `KINDS`.
        file: where it comes from.
        line: where it starts, from 1 (the record's number for "parquet" and "tfds").
        copies: how often it counts, from the source's weight; at least 1.
    """

    text: str
    kind: str
    file: str
    line: int
    copies: int = 1


@dataclasses.dataclass(frozen=True)
class Source:
    """Where text comes from.

    Attributes:
        spec: as the user wrote it.
        kind: one of `KINDS`, or None to find out file by file.
        pattern: a folder, a glob, a file; NAME/CONFIG for "tfds".
        weight: copies of each document; a fraction means that share of the documents.
        files: what the pattern stands for, sorted; empty for "tfds".
    """

    spec: str
    kind: str | None
    pattern: str
    weight: float = 1.0
    files: tuple[pathlib.Path, ...] = ()


class _SeenLines:
    """Finds lines that were there before, in a table of fixed size (16 MB).

    A newer line takes an older one's slot, so among many millions of lines some repetitions are
    missed; none is invented, save for one in 2^64.
    """

    def __init__(self, slots: int = 1 << 21):
        self._table = array.array("Q", bytes(8 * slots))

    def again(self, lines: Iterable[tuple[int, int]]) -> Iterator[int]:
        """The numbers of those of (fingerprint, line number) that were there before."""
        table, slots = self._table, len(self._table)
        for fingerprint, number in lines:
            slot = fingerprint % slots
            if table[slot] == fingerprint:
                yield number
            table[slot] = fingerprint


def long_lines(document: RawDocument) -> Iterator[tuple[int, int]]:
    """(64-bit fingerprint, line number in the file) of lines that seldom come twice in good text."""
    by_line = document.kind in ("google", "books", "wikiextractor")
    for number, line in enumerate(document.text.split("\n")):
        # Short lines repeat in any text, and lines of markup and tables in any wiki.
        if len(line) > 40 and line[0].isalpha():
            data = line.encode()
            fingerprint = zlib.crc32(data) << 32 | zlib.adler32(data)
            yield fingerprint, document.line + (number if by_line else 0)


@dataclasses.dataclass
class Report:
    """What was read and what was odd about it.

    Attributes:
        bytes_read: of files, as they lie on disk (compressed).
        documents: read and kept.
        sources: for each source its spec, kinds, files, bytes and documents.
    """

    bytes_read: int = 0
    documents: int = 0
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _problems: dict[tuple[str, str], list[Any]] = dataclasses.field(default_factory=dict)
    _seen: _SeenLines | None = None
    # Of the last source: documents read, those of one sentence, where the first of them is.
    _read: int = 0
    _singles: int = 0
    _single: str = ""

    def begin(self, source: Source) -> None:
        """What follows is of this source, until `end`."""
        entry = {"spec": source.spec, "kinds": [], "files": len(source.files), "bytes": 0}
        self.sources.append({**entry, "documents": 0})
        self._read, self._singles, self._single = 0, 0, ""

    def end(self) -> None:
        """The last source has been read.

        Raises:
            UserError: there was no text in it.
        """
        spec = self.sources[-1]["spec"]
        if not self._read:
            raise UserError(f"source {spec!r} holds no text; check its files")
        if self._singles > 1 and self._singles >= 0.9 * self._read:
            self.tell(
                spec,
                "a blank line follows nearly every sentence, so documents have one sentence",
                "went on, but all next sentences would be random; blank lines belong between documents",
                self._single,
                self._singles,
            )

    def add(self, part: "Report") -> None:
        """Adds what was read elsewhere of the last source's next files."""
        entry, more = self.sources[-1], part.sources[-1]
        entry["kinds"] += [kind for kind in more["kinds"] if kind not in entry["kinds"]]
        entry["bytes"] += more["bytes"]
        entry["documents"] += more["documents"]
        self.bytes_read += part.bytes_read
        self.documents += part.documents
        self._read += part._read
        self._singles += part._singles
        self._single = self._single or part._single
        for (source, problem), (where, count, consequence) in part._problems.items():
            self.tell(source, problem, consequence, where, count)

    def look(self, file: str, lines: Iterable[tuple[int, int]]) -> None:
        """Tells which of the last source's next `long_lines`, all of one file, were there before."""
        self._seen = self._seen or _SeenLines()
        for number in self._seen.again(lines):
            self.tell(self.sources[-1]["spec"], _REPEATS, "kept it", f"{file}:{number}")

    def count(self, size: int) -> None:
        """Adds to the bytes read."""
        self.bytes_read += size

    def tell(self, source: str, problem: str, consequence: str, where: str, count: int = 1) -> None:
        """Records a problem; the same one of the same source is counted, with its first place."""
        entry = self._problems.setdefault((source, problem), [where, 0, consequence])
        entry[1] += count

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line a problem: the first place, what, how often, and what was done about it.

        Repeated lines come last, because who reads files side by side finds them at the end.
        """
        return tuple(
            f"{where}: {problem} ({count:,} in {source}); {consequence}"
            for (source, problem), (where, count, consequence) in sorted(
                self._problems.items(), key=lambda item: item[0][1] == _REPEATS
            )
        )


def parse_source(spec: str) -> Source:
    """Parses `[KIND:]GLOB_OR_FOLDER[@WEIGHT]` and finds the files.

    Examples: `books:novels/`, `wiki/**/*.gz@0.5`, `tfds:wikipedia/20230601.en`. A folder stands
    for all files below it but hidden ones.

    Raises:
        UserError: an unknown kind, a weight that is not positive, no such files.
    """
    kind, pattern, weight = None, spec, 1.0
    prefix, colon, rest = spec.partition(":")
    if colon and prefix in KINDS:
        kind, pattern = prefix, rest
    elif colon and re.fullmatch(r"[\w-]+", prefix) and not os.path.lexists(spec):
        near = difflib.get_close_matches(prefix, KINDS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"unknown kind of source {prefix!r} in {spec!r}; {hint}known kinds: {', '.join(KINDS)}"
        )
    path, at, number = pattern.rpartition("@")
    if at and "/" not in number and not os.path.lexists(pattern):
        try:
            pattern, weight = path, float(number)
        except ValueError:
            weight = math.nan
        if not (0 < weight <= _MOST_WEIGHT):
            raise UserError(
                f"the weight {number!r} of source {spec!r} is not a positive number up to {_MOST_WEIGHT:,}; "
                "write for example @0.5 or @3, or leave it out"
            )
    if kind == "tfds":
        return Source(spec, kind, pattern, weight)
    return Source(spec, kind, pattern, weight, _find_files(spec, pattern))


def _find_files(spec: str, pattern: str) -> tuple[pathlib.Path, ...]:
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
        raise UserError(f"source {spec!r}: the folder {pattern!r} holds no files")
    return tuple(pathlib.Path(file) for file in sorted(files))


def total_bytes(sources: Iterable[Source]) -> int | None:
    """The files' sizes on disk, summed; None where a source has no files to measure ("tfds").

    Raises:
        UserError: a file is gone.
    """
    total = 0
    for source in sources:
        if source.kind == "tfds":
            return None
        for file in source.files:
            with one_line_errors(f"cannot read {file}"):
                total += file.stat().st_size
    return total


def read(source: Source, report: Report) -> Iterator[RawDocument]:
    """Streams a source's documents in file order; memory does not depend on its size.

    Adds to `report` as it goes: bytes, documents, problems that it could pass over.

    Raises:
        UserError: a file that is not text, is damaged or has no such field; no text at all.
    """
    report.begin(source)
    for document in read_files(source, source.files, report):
        report.look(document.file, long_lines(document))
        yield document
    report.end()


def read_files(
    source: Source, files: Iterable[pathlib.Path], report: Report
) -> Iterator[RawDocument]:
    """Streams the documents of some of a source's files, as `read` would reach them.

    Does all that `read` does but looking for repeated lines, which takes the files before.

    Args:
        source: which `report` has begun.
        files: consecutive ones of the source's; none for "tfds", which is read whole.
    """
    entry = report.sources[-1]
    before = report.bytes_read
    whole, share = divmod(source.weight, 1)
    documents = _Reader(source, report).documents(files)
    for document in _pieces(documents, source.spec, report):
        if document.kind not in entry["kinds"]:
            entry["kinds"].append(document.kind)
        entry["bytes"] = report.bytes_read - before
        report._read += 1
        if document.kind == "google" and "\n" not in document.text:
            report._single = report._single or f"{document.file}:{document.line}"
            report._singles += 1
        copies = int(whole) + (share > 0 and _fraction(document.text) < share)
        if copies:
            report.documents += 1
            entry["documents"] += 1
            yield document._replace(copies=copies)
    entry["bytes"] = report.bytes_read - before


def sentences(document: RawDocument, language: str = "en") -> list[str]:
    """The sentences of a document, in order: markup removed, none empty, no line breaks.

    Google's format is split already and is left as it is. Sentences longer than
    `SENTENCE_CHARACTERS` are cut between words.

    Args:
        document: from `read`.
        language: two-letter code, for the sentence splitter.
    """
    text = document.text
    if document.kind == "google":
        found = text.split("\n")
    else:
        import sentencex

        if document.kind == "mediawiki":
            text = plain_text(text)
        elif document.kind.startswith("wikiextractor") and "&" in text:
            text = html.unescape(text)  # some versions escape, others do not
        paragraphs = _paragraphs(text) if document.kind == "books" else text.split("\n")
        found = itertools.chain.from_iterable(
            sentencex.segment(language, paragraph) for paragraph in paragraphs
        )
    return [piece for sentence in found for piece in _cut(" ".join(sentence.split()))]


def _cut(sentence: str) -> Iterator[str]:
    while len(sentence) > SENTENCE_CHARACTERS:
        space = sentence.rfind(" ", 1, SENTENCE_CHARACTERS)
        end = space if space > 0 else SENTENCE_CHARACTERS
        yield sentence[:end]
        sentence = sentence[end:].lstrip()
    if sentence:
        yield sentence


def _paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in text.split("\n"):
        line = line.strip()
        if line and len(line) <= WRAPPED_CHARACTERS:
            lines.append(line)
            continue
        if lines:
            yield " ".join(lines)
            lines = []
        if line:
            yield line
    if lines:
        yield " ".join(lines)


def _fraction(text: str) -> float:
    """A number in [0, 1) that is a function of the text alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _pieces(documents: Iterable[RawDocument], spec: str, report: Report) -> Iterator[RawDocument]:
    """Passes documents on, those beyond `DOCUMENT_CHARACTERS` in pieces."""
    for document in documents:
        text = document.text
        if len(text) > DOCUMENT_CHARACTERS:
            report.tell(
                spec,
                f"a document is longer than {DOCUMENT_CHARACTERS:,} characters",
                "went on with it cut into pieces",
                f"{document.file}:{document.line}",
            )
        while len(text) > DOCUMENT_CHARACTERS:
            end = text.rfind("\n", 1, DOCUMENT_CHARACTERS)
            end = end if end > 0 else DOCUMENT_CHARACTERS
            yield document._replace(text=text[:end])
            text = text[end:].lstrip("\n")
        yield document._replace(text=text)


class _Reader:
    """Reads a source's files, each by its kind."""

    def __init__(self, source: Source, report: Report):
        self._source, self._report = source, report

    def documents(self, files: Iterable[pathlib.Path]) -> Iterator[RawDocument]:
        if self._source.kind == "tfds":
            for record, text in self._tfds():
                yield RawDocument(text, "tfds", self._source.pattern, record)
        for path in files:
            with damage(path):
                yield from self._documents_of(path)

    def _documents_of(self, path: pathlib.Path) -> Iterator[RawDocument]:
        head = head_of(path)  # not counted: it is read again below
        if not head.strip():
            self._tell(path, 1, "a file is empty", "went on without it")
            return
        kind = self._source.kind or marked_kind(path, head) or self._text_kind
        if kind == "parquet":
            found = self._parquet(path)
        else:
            check_is_text(path, head)
            with decompressed(path, self._report.count) as stream:
                read = {
                    "google": self._google,
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
                self._tell(path, 1, f"a file of kind {kind} holds no text", "went on without it")
            return
        for line, text in found:
            yield RawDocument(text, kind, str(path), line)

    def _tell(self, path, line: int, problem: str, consequence: str) -> None:
        self._report.tell(self._source.spec, problem, consequence, f"{path}:{line}")

    @functools.cached_property
    def _text_kind(self) -> str:
        """ "google" or "books", from the source's first file that is plain text."""
        for path in self._source.files:
            with damage(path):
                head = head_of(path)
            if head.strip() and marked_kind(path, head) is None:
                check_is_text(path, head)
                break
        return kind_of_text(head.decode("utf-8", "replace"))

    def _lines(self, path: pathlib.Path, stream: io.BufferedIOBase) -> Iterator[tuple[int, str]]:
        """The file's lines with their numbers, without their ends; bad bytes become U+FFFD.

        A line beyond `DOCUMENT_CHARACTERS` comes in pieces.
        """
        number, offset, rest = 1, 0, b""
        while data := stream.readline(DOCUMENT_CHARACTERS):
            ended = data.endswith(b"\n")
            data, rest = rest + data, b""
            if not ended:  # a piece, or the last line: a character may be cut in two
                cut = incomplete_end(data) if len(data) >= DOCUMENT_CHARACTERS else len(data)
                data, rest = data[:cut], data[cut:]
            try:
                line = data.decode()
            except UnicodeDecodeError as error:
                line = data.decode(errors="replace")
                self._report.tell(
                    self._source.spec,
                    "a line is not UTF-8",
                    "went on, bad bytes became U+FFFD",
                    f"{path}:{number} (byte {offset + error.start:,} of the text)",
                )
            if "\0" in line:
                line = line.replace("\0", " ")
                self._tell(path, number, "a line holds NUL characters", "went on without them")
            yield number, line.rstrip("\r\n").removeprefix("\ufeff" if number == 1 else "\n")
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
                    self._tell_long(path, start)
                yield start, "\n".join(lines)
                lines, size = [], 0
        if lines:
            yield start, "\n".join(lines)

    def _books(self, path, stream) -> Iterator[tuple[int, str]]:
        lines: list[str] = []
        size, start = 0, 1
        for number, line in self._lines(path, stream):
            if size + len(line) > DOCUMENT_CHARACTERS and lines:
                self._tell_long(path, start)
                yield start, "\n".join(lines)
                lines, size, start = [], 0, number
            lines.append(line)
            size += len(line) + 1
        if any(line.strip() for line in lines):
            yield start, "\n".join(lines)

    def _tell_long(self, path, line: int) -> None:
        self._tell(
            path,
            line,
            f"a document is longer than {DOCUMENT_CHARACTERS:,} characters",
            "went on with it cut into pieces",
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
                    self._tell(path, start, "an article is empty", "went on without it")
                lines, inside = [], False
            elif inside and line.strip() and not (not lines and html.unescape(line) == title):
                lines.append(line)
                size += len(line) + 1
                if size > DOCUMENT_CHARACTERS:
                    self._tell_long(path, start)
                    yield start, "\n".join(lines)
                    lines, size = [], 0
        if lines:
            self._tell(path, start, "the last article has no </doc>", "kept what is there")
            yield start, "\n".join(lines)

    def _json(self, path, stream) -> Iterator[tuple[int, str]]:
        for number, line in self._lines(path, stream):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                self._tell(path, number, "a line is not JSON", "went on without it")
                continue
            if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                have = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                raise UserError(
                    f'{path}:{number}: no field "text" with a string (it has: {have[:200]}); '
                    'rename the field that holds the text to "text"'
                )
            text = value["text"].encode(errors="replace").decode()  # JSON may hold half characters
            if text.strip():
                yield number, _without_title(text, value.get("title"))
            else:
                self._tell(path, number, "a text is empty", "went on without it")

    def _mediawiki(self, path, stream) -> Iterator[tuple[int, str]]:
        # Expat itself rather than a tree builder: memory stays at one page, and lines are known.
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        pages: list[tuple[int, str]] = []
        fields: dict[str, list[str]] = {}
        open_elements: list[str] = []
        start = 0

        def begin(name, attributes):
            nonlocal start
            name = name.rpartition(" ")[2]
            open_elements.append(name)
            if name == "page":
                start = parser.CurrentLineNumber
                fields.clear()
            fields[name] = []  # a later revision's text takes an earlier one's place

        def characters(text):
            if open_elements and open_elements[-1] in ("ns", "text"):
                fields[open_elements[-1]].append(text)

        def end(name):
            open_elements.pop()
            if name.rpartition(" ")[2] == "page":
                article = "".join(fields.get("ns", "0")).strip() in ("", "0")
                text = "".join(fields.get("text", ""))
                if article and "redirect" not in fields and text.strip():
                    pages.append((start, text))

        def refuse(*_):
            raise UserError(
                f"{path}:{parser.CurrentLineNumber}: a document type declaration, which no "
                "MediaWiki dump has; it could expand without bound, so the file is refused"
            )

        parser.StartElementHandler, parser.EndElementHandler = begin, end
        parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = characters, refuse
        try:
            while block := stream.read(_BLOCK_BYTES):
                parser.Parse(block)
                yield from pages
                pages.clear()
            parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise UserError(
                f"{path}:{error.lineno}: not well-formed XML ({expat.errors.messages[error.code]}); "
                "the file may be cut short: copy or download it again"
            ) from None

    def _parquet(self, path: pathlib.Path) -> Iterator[tuple[int, str]]:
        import pyarrow
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path, memory_map=False, pre_buffer=False) as table:
                schema = table.schema_arrow
                if "text" not in schema.names:
                    raise UserError(
                        f'{path}: no column "text" (it has: {", ".join(schema.names)[:200]}); '
                        'rename the column that holds the text to "text"'
                    )
                kind = schema.field("text").type
                if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                    raise UserError(f'{path}: the column "text" holds {kind}, not strings')
                size, rows, number = path.stat().st_size, table.metadata.num_rows, 0
                before = self._report.bytes_read
                for batch in table.iter_batches(256, columns=["text"], use_threads=False):
                    for text in batch.column(0):
                        number += 1
                        # Nobody has checked that the bytes are UTF-8.
                        text = (
                            text.as_buffer().to_pybytes().decode(errors="replace")
                            if text.is_valid
                            else ""
                        )
                        if text.strip():
                            yield number, text
                        else:
                            self._tell(path, number, "a text is empty", "went on without it")
                    self._report.bytes_read = before + size * number // max(rows, number)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{path}: not a whole Parquet file ({str(error).splitlines()[0][:200]}); "
                "copy or download it again"
            ) from None

    def _tfds(self) -> Iterator[tuple[int, str]]:
        name = self._source.pattern
        try:
            import tensorflow_datasets as tfds

            # Random access into ArrayRecord needs no TensorFlow, unlike tfds.load.
            data = tfds.data_source(name, split="train", data_dir=os.environ.get("TFDS_DATA_DIR"))
            features = list(data.dataset_info.features)
        except Exception as error:  # whatever a dataset's own code, the network or the disk does
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise UserError(
                f"source 'tfds:{name}': {reason.rstrip('.')}; prepare it where there is a "
                'network, with file_format="array_record", and set TFDS_DATA_DIR to its folder'
            ) from None
        if "text" not in features:
            raise UserError(f'tfds:{name}: no feature "text" (it has: {", ".join(features)})')
        for index in range(len(data)):
            text = data[index]["text"].decode(errors="replace")
            if text.strip():
                yield index + 1, text
            else:
                self._tell(f"tfds:{name}", index + 1, "a text is empty", "went on without it")


def _without_title(text: str, title: Any) -> str:
    """WikiExtractor begins an article with its title, as Google's text does not."""
    first, _, rest = text.partition("\n")
    return rest.lstrip("\n") if title and rest.strip() and first.strip() == title else text
