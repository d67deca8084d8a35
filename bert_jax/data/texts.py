"""Texts for a trained model to look at: a text a line, JSON lines, or Parquet, or standard input."""

import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bert_jax import files
from bert_jax.data import compressed, corpus
from bert_jax.data.compressed import damage, decompressed
from bert_jax.errors import UserError

_LINE_BYTES = corpus.DOCUMENT_CHARACTERS


class Texts(NamedTuple):
    """Texts to read.

    Attributes:
        texts: each with how far its source had been read by then.
        total: how far that goes, None where nobody knows.
        unit: of both.
    """

    texts: Iterator[tuple[str, int]]
    total: int | None
    unit: str


def read(source: str, column: str) -> Texts:
    """The texts of a file, in order.

    Args:
        source: .txt (a text a line, empty ones too), .jsonl or .parquet, the first two also
            compressed; "-" reads lines from standard input.
        column: the field or column of the others.

    Raises:
        UserError: the source cannot be read, or, while it is, something in it is no text (names
            the line).
    """
    if source == "-":
        lines = enumerate(_lines(sys.stdin.buffer, "standard input"), 1)
        return Texts(((line, number) for number, line in lines), None, "texts")
    path = pathlib.Path(source)
    suffixes = [
        suffix.lower() for suffix in path.suffixes if suffix.lower() not in compressed.SUFFIXES
    ]
    suffix = suffixes[-1] if suffixes else ""
    if suffix not in (".txt", ".jsonl", ".parquet"):
        raise UserError(
            f"{path}: its name does not say what it is; .txt has a text a line, .jsonl and "
            f".parquet a field for texts, and of these .txt and .jsonl may be compressed "
            f"({' '.join(compressed.SUFFIXES)})"
        )
    with files.one_line_errors(f"cannot read {path}"):
        size = path.stat().st_size
        path.open("rb").close()
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size

    if suffix == ".parquet":
        texts = _parquet_texts(path, column, count)
    elif suffix == ".jsonl":
        texts = _json_texts(_file_lines(path, count), path, column)
    else:
        texts = _file_lines(path, count)
    return Texts(((text, done) for text in texts), size, "B")


def _file_lines(path: pathlib.Path, count: Callable[[int], None]) -> Iterator[str]:
    with damage(path), decompressed(path, count) as stream:
        yield from _lines(stream, path)


def _lines(stream, where: object) -> Iterator[str]:
    """Lines without their ends; strict, for a text that is not read would get a vector too."""
    number = 0
    while data := stream.readline(_LINE_BYTES + 1):
        number += 1
        if len(data) > _LINE_BYTES:
            raise UserError(
                f"{where}:{number}: a line of more than {_LINE_BYTES:,} bytes; put a text on each line"
            )
        try:
            line = data.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where}:{number}: not UTF-8 text (byte {error.start:,} of the line); convert it, "
                "e.g. with iconv -t UTF-8"
            ) from None
        if "\0" in line:
            raise UserError(f"{where}:{number}: not text (it holds a NUL); leave that line out")
        yield line.removeprefix("\ufeff" if number == 1 else "").rstrip("\r\n")


def _json_texts(lines: Iterator[str], path: pathlib.Path, column: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON ({error}); mend or remove it") from None
        if not isinstance(value, dict) or not isinstance(value.get(column), str):
            have = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise UserError(
                f"{path}:{number}: no text in {column!r} (it has: {have[:200]}); name the field "
                "that holds the text"
            )
        yield value[column].encode(errors="replace").decode()  # JSON may hold half characters


def _parquet_texts(path: pathlib.Path, column: str, count: Callable[[int], None]) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, memory_map=False, pre_buffer=False) as table:
            schema = table.schema_arrow
            if column not in schema.names:
                raise UserError(
                    f"{path}: no column {column!r} (it has: {', '.join(schema.names)[:200]}); name "
                    "the column that holds the text"
                )
            kind = schema.field(column).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise UserError(f"{path}: the column {column!r} holds {kind}, not strings")
            size, number, before = path.stat().st_size, 0, 0
            for batch in table.iter_batches(256, columns=[column], use_threads=False):
                for cell in batch.column(0):
                    number += 1
                    try:
                        text = cell.as_py()
                    except UnicodeDecodeError:  # nobody has checked
                        text = None
                    if text is None:
                        raise UserError(
                            f"{path}: row {number}: no text in {column!r}; leave that row out"
                        )
                    by_now = size * number // table.metadata.num_rows
                    count(by_now - before)
                    before = by_now
                    yield text
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: not a whole Parquet file ({str(error).splitlines()[0][:200]}); copy or "
            "download it again"
        ) from None
