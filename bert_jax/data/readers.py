"""Read the documents of text files of common formats, in bounded memory."""

import functools
import html
import io
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bert_jax.data import mediawiki
from bert_jax.data.compressed import damage_errors, decompressed, parquet_batches
from bert_jax.data.formats import (
    WIKITEXT_HEADING,
    check_is_text,
    head_of,
    incomplete_end,
    kind_of_text,
    marked_kind,
)
from bert_jax.errors import UserError, missing

# Longer than any book or article; a longer document would not fit a worker's memory once tokenized.
DOCUMENT_CHARACTERS = 8 << 20
# A line of JSON is parsed as a whole.
_JSON_BYTES = 1 << 28
# Stands for a word that is lost: a word of its own that is in no vocabulary, and so becomes [UNK].
UNKNOWN_WORD = "\ufffc"
LONG_DOCUMENT = (
    f"a document is longer than {DOCUMENT_CHARACTERS >> 20} million characters",
    "split it into several documents",
)
_EMPTY_TEXT = "a text is empty", "skipped it"
# Kinds of sources that name a dataset, which a library reads.
DATASETS = ("tfds", "hf")


class RawDocument(NamedTuple):
    """A document as read from its file.

    Attributes:
        text: wiki markup for "mediawiki", plain text otherwise; at most `DOCUMENT_CHARACTERS`.
        kind: one of `KINDS`.
        file: path of its file.
        line: line number of its start, from 1 (the record number for "parquet" and `DATASETS`).
        copies: how many times the document counts, from the source's weight; at least 1.
    """

    text: str
    kind: str
    file: str
    line: int
    copies: int = 1


class Reader:
    """Reader of the files of a source, each according to its kind.

    Args:
        kind: one of `KINDS`, or None to detect it for each file.
        files: all files of the source, of which the first of plain text tells the kind of the others.
        warn: called with a problem, its consequence and its location.
        count: called with the number of bytes of each read from disk.
    """

    def __init__(
        self,
        kind: str | None,
        files: Sequence[pathlib.Path],
        warn: Callable[[str, str, str], None],
        count: Callable[[int], None],
    ):
        self._kind, self._files, self._warn_at, self._count = kind, files, warn, count

    def documents(self, path: pathlib.Path) -> Iterator[RawDocument]:
        """Stream the documents of a file."""
        with damage_errors(path):
            head = head_of(path)  # not counted, as it is read again below
            if not head.strip():
                self._warn(path, 1, "a file is empty", "skipped it")
                return
            kind = self._kind or marked_kind(path, head) or self._text_kind
            if kind == "parquet":
                for line, text in self._parquet(path):
                    yield RawDocument(text, kind, str(path), line)
                return
            check_is_text(path, head)
            with decompressed(path, self._count) as stream:
                read = {
                    "google": self._sentences,
                    "paragraphs": self._sentences,
                    "wikitext": self._wikitext,
                    "books": self._book,
                    "wikiextractor": self._wikiextractor,
                    "wikiextractor-json": self._json,
                    "jsonl": self._json,
                    "mediawiki": self._mediawiki,
                }[kind]
                documents: Iterator[tuple[int, Any]] = read(path, stream)
                if kind not in ("wikiextractor-json", "jsonl", "mediawiki"):
                    documents = self._joined(path, documents, kind)
                any_text = False
                for line, text in documents:
                    any_text = True
                    text = _without_wikitext_marks(text) if kind == "wikitext" else text
                    yield RawDocument(text, kind, str(path), line)
            if not any_text:
                self._warn(path, 1, f"a file of kind {kind} contains no text", "skipped it")

    def _warn(self, path: object, line: int, problem: str, consequence: str) -> None:
        self._warn_at(problem, consequence, f"{path}:{line}")

    @functools.cached_property
    def _text_kind(self) -> str:
        """The kind of the source's first file of plain text."""
        for path in self._files:
            with damage_errors(path):
                head = head_of(path)
            if head.strip() and marked_kind(path, head) is None:
                check_is_text(path, head)
                break
        return kind_of_text(head.decode("utf-8", "replace"))

    def _lines(
        self, path: pathlib.Path, stream: io.BufferedIOBase, max_bytes: int
    ) -> Iterator[tuple[int, str]]:
        """Yield (line number, line without line end); invalid bytes become U+FFFD.

        A line longer than `max_bytes` is split.
        """
        number, offset, rest = 1, 0, b""
        while data := stream.readline(max_bytes):
            ended = data.endswith(b"\n")
            data, rest = rest + data, b""
            if not ended:  # part of a line, or the last line: the last character may be incomplete
                cut = incomplete_end(data) if len(data) >= max_bytes else len(data)
                data, rest = data[:cut], data[cut:]
            try:
                line = data.decode()
            except UnicodeDecodeError as error:
                line = data.decode(errors="replace")
                self._warn_at(
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

    def _joined(
        self, path: pathlib.Path, lines: Iterable[tuple[int, str | None]], kind: str
    ) -> Iterator[tuple[int, str]]:
        """Join lines to documents, which None ends; one that is too long is split.

        A part of a book ends before the line that would be too much, others after it.
        """
        document: list[str] = []
        size = start = 0
        for number, line in itertools.chain(lines, [(0, None)]):
            ahead = len(line) if line is not None and kind == "books" else 0
            if document and (line is None or size + ahead > DOCUMENT_CHARACTERS):
                if line is not None:
                    self._warn(path, start, *LONG_DOCUMENT)
                if any(map(str.strip, document)):
                    yield start, "\n".join(document)
                document, size = [], 0
            if line is not None:
                start = start if document else number
                document.append(line)
                size += len(line) + 1

    def _book(self, path, stream) -> Iterator[tuple[int, str | None]]:
        yield from self._lines(path, stream, DOCUMENT_CHARACTERS)

    def _sentences(self, path, stream) -> Iterator[tuple[int, str | None]]:
        for number, line in self._lines(path, stream, DOCUMENT_CHARACTERS):
            yield number, line.strip() or None

    def _wikitext(self, path, stream) -> Iterator[tuple[int, str | None]]:
        for number, line in self._lines(path, stream, DOCUMENT_CHARACTERS):
            heading = WIKITEXT_HEADING.fullmatch(line)
            if heading and heading[1] == "=":
                yield number, None
            elif not heading and line.strip():
                yield number, line

    def _wikiextractor(self, path, stream) -> Iterator[tuple[int, str | None]]:
        start, title, inside, is_empty = 1, "", False, True
        for number, line in self._lines(path, stream, DOCUMENT_CHARACTERS):
            if line.startswith("<doc "):
                match = re.search(r'title="(.*)">', line)
                title = html.unescape(match[1]) if match else ""
                start, inside, is_empty = number, True, True
                yield number, None
            elif line.startswith("</doc>"):
                if is_empty:
                    self._warn(path, start, "an article is empty", "skipped it")
                yield number, None
                inside = False
            elif inside and line.strip() and not (is_empty and html.unescape(line) == title):
                is_empty = False
                yield start, line
        if inside and not is_empty:
            self._warn(path, start, "the last article has no </doc>", "kept the text so far")

    def _json(self, path, stream) -> Iterator[tuple[int, str]]:
        for number, line in self._lines(path, stream, _JSON_BYTES):
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
            # JSON may contain lone surrogates.
            text = value["text"].encode(errors="replace").decode()
            if text.strip():
                yield number, _without_title(text, value.get("title"))
            else:
                self._warn(path, number, *_EMPTY_TEXT)

    def _mediawiki(self, path, stream) -> Iterator[tuple[int, str]]:
        def warn(line: int) -> None:
            self._warn(path, line, *LONG_DOCUMENT)

        return mediawiki.pages(path, stream, DOCUMENT_CHARACTERS, warn)

    def _parquet(self, path: pathlib.Path) -> Iterator[tuple[int, str]]:
        number = 0
        for batch in parquet_batches(path, ["text"], count=self._count):
            for text in batch.column(0).cast("large_string"):
                number += 1
                # Parquet readers do not check that strings are UTF-8.
                data = text.as_buffer().to_pybytes() if text.is_valid else b""
                text = data.decode(errors="replace")
                if text.strip():
                    yield number, text
                else:
                    self._warn(path, number, *_EMPTY_TEXT)

    def dataset(self, kind: str, name: str) -> Iterator[RawDocument]:
        """Stream the documents of a named dataset, whose kind is one of `DATASETS`."""
        for number, text in enumerate(_tfds(name) if kind == "tfds" else _hugging_face(name), 1):
            if text.strip():
                yield RawDocument(text, kind, name, number)
            else:
                self._warn(f"{kind}:{name}", number, *_EMPTY_TEXT)


def _tfds(name: str) -> Iterator[str]:
    """Yield the texts of a prepared corpus of TensorFlow Datasets."""
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise missing(f"source 'tfds:{name}' needs TensorFlow Datasets", "tfds") from None
    try:
        # Unlike tfds.load, random access to ArrayRecord files does not need TensorFlow.
        data = tfds.data_source(name, split="train", data_dir=os.environ.get("TFDS_DATA_DIR"))
        features = list(data.dataset_info.features)
    except Exception as error:  # dataset code, the network or the disk may raise anything
        raise UserError(
            f"source 'tfds:{name}': {_reason(error)}; prepare it on a machine with network access and "
            'file_format="array_record", and set TFDS_DATA_DIR to its folder'
        ) from None
    _require_text(f"tfds:{name}", features)
    yield from (data[index]["text"].decode(errors="replace") for index in range(len(data)))


def _hugging_face(name: str) -> Iterator[str]:
    """Yield the texts of a dataset of the Hugging Face Hub or a folder, NAME[,CONFIG][:SPLIT].

    It is streamed, so it need not fit on the disk. `datasets` runs no code of a repository since version 4.
    """
    try:
        import datasets
    except ImportError:
        raise missing(f"source 'hf:{name}' needs Hugging Face's datasets", "hf") from None
    path, _, split = name.partition(":")
    repository, _, config = path.partition(",")
    try:
        split = split or "train"
        data = datasets.load_dataset(repository, config or None, split=split, streaming=True)
        for number, record in enumerate(data):
            if not number:
                _require_text(f"hf:{name}", list(record))
            yield str(record["text"] or "")
    except UserError:
        raise
    except Exception as error:  # the library, the network or the disk may raise anything
        raise UserError(
            f"source 'hf:{name}': {_reason(error)}; write hf:NAME[,CONFIG][:SPLIT], and check the name and "
            "the network"
        ) from None


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")


def _require_text(source: str, columns: list[str]) -> None:
    if "text" not in columns:
        raise UserError(
            f'{source}: no feature "text" (it has: {", ".join(columns)}); choose another'
        )


def _without_wikitext_marks(line: str) -> str:
    """Undo the marks of WikiText's tokenized version: `well @-@ known`, `1 @,@ 000`, `<unk>`."""
    return re.sub(r" @([-,.])@ ", r"\1", line).replace("<unk>", UNKNOWN_WORD)


def _without_title(text: str, title: Any) -> str:
    """Remove the title that WikiExtractor puts before an article; Google's text has none."""
    first, _, rest = text.partition("\n")
    return rest.lstrip("\n") if title and rest.strip() and first.strip() == title else text
