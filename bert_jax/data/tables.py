"""Read tables from .tsv, .csv, .jsonl, .parquet or text files as records with named fields."""

import csv
import io
import json
import pathlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import IO, Any, NamedTuple

from bert_jax.data import compressed
from bert_jax.data.compressed import damage_errors, decompressed
from bert_jax.data.readers import DOCUMENT_CHARACTERS
from bert_jax.errors import UserError, WrongColumn, counted
from bert_jax.storage import files

KINDS = (".tsv", ".csv", ".jsonl", ".parquet", ".txt")
STANDARD_INPUT = "-"
LINE_BYTES = DOCUMENT_CHARACTERS


class Record(NamedTuple):
    """A row of a table.

    Attributes:
        where: location for messages, counted from 1: "file:line", or "file: row number" in Parquet.
        fields: values by column; strings in text files.
    """

    where: str
    fields: dict[str, Any]


def kind_of(path: str | pathlib.Path) -> str:
    """Return the lowercase suffix that gives the file format, ignoring compression suffixes."""
    suffixes = [suffix.lower() for suffix in pathlib.Path(path).suffixes]
    return next((s for s in reversed(suffixes) if s not in compressed.SUFFIXES), "")


def check_kind(
    path: str | pathlib.Path, kinds: Collection[str], advice: str, kind: str = ""
) -> str:
    """Return the format of a file, which must exist and, unless `kind` is given, be named as one of `kinds`.

    The error for another format has `advice` what to use.
    """
    if str(path) != STANDARD_INPUT:
        with files.one_line_errors(f"cannot read {path}"), open(path, "rb"):
            pass
    if (kind := kind or kind_of(path)) not in kinds:
        raise UserError(f"{path}: unknown file format; {advice}")
    return kind


def read(
    path: str | pathlib.Path,
    texts: Sequence[str],
    others: Sequence[str] = (),
    *,
    optional: Sequence[str] = (),
    kind: str = "",
    header: Sequence[str] | None = None,
    quoting: bool | None = None,
    empty: bool = False,
    skip: Callable[[str], None] | None = None,
    count: Callable[[int], None] | None = None,
) -> Iterator[Record]:
    """Stream the records of a file, in order.

    Args:
        path: path of the file, which may be compressed except for Parquet; "-" is standard input.
        texts: required columns that hold strings.
        others: required columns that hold any value.
        optional: columns to read if present. Columns in none of these three may be omitted.
        kind: one of `KINDS`; "" detects it by the file name. ".txt" reads a whole line for one
            column, and splits lines at tabs for several; a blank line is then an error, as
            predictions are aligned with lines.
        header: column names, for a file without a header line; required for ".txt".
        quoting: whether fields may be "quoted"; by default in .csv but not in .tsv.
        empty: whether texts may be empty.
        skip: called with a message for each row with the wrong number of columns, which is then
            skipped; without it such a row is an error.
        count: called with the number of bytes read since the last call.
    """
    suffixes = f"all but .parquet optionally compressed ({' '.join(compressed.SUFFIXES)})"
    kind = check_kind(path, KINDS, f"a table is one of {' '.join(KINDS)}, {suffixes}", kind)
    if str(path) == STANDARD_INPUT:
        path = "standard input"
        text_lines = lines(sys.stdin.buffer, path)
    else:
        text_lines = file_lines(pathlib.Path(path), count)
    if kind == ".parquet":
        records = _parquet(pathlib.Path(path), texts, others, optional, count)
    elif kind == ".jsonl":
        records = _objects(text_lines, path)
    else:
        quoting = kind == ".csv" if quoting is None else quoting
        delimiter = {".csv": ",", ".tsv": "\t"}.get(kind) or ("\t" if len(header or ()) > 1 else "")
        rows = (_quoted if quoting else _unquoted)(text_lines, path, delimiter)
        records = _named(rows, path, header, [*texts, *others], skip, skip_blank=kind != ".txt")
    return _checked(records, texts, others, empty)


def lines(stream: io.BufferedIOBase | IO[bytes], where: object) -> Iterator[str]:
    """Yield lines without line ends; only line feeds separate lines."""
    number = 0
    while data := stream.readline(LINE_BYTES + 1):
        number += 1
        if len(data) > LINE_BYTES:
            raise UserError(
                f"{where}:{number}: a line of more than {LINE_BYTES:,} bytes; split it into lines of "
                "one text each"
            )
        try:
            line = data.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where}:{number}: not UTF-8 text (byte {error.start:,} of the line); convert it, "
                "e.g. with iconv -t UTF-8"
            ) from None
        if "\0" in line:
            raise UserError(f"{where}:{number}: not text (contains a NUL); remove that line")
        yield line.removeprefix("\ufeff" if number == 1 else "").rstrip("\r\n")


def file_lines(path: pathlib.Path, count: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yield the `lines` of a file, which may be compressed; `count` as in `read`."""
    with damage_errors(path), decompressed(path, count) as stream:
        yield from lines(stream, path)


def _unquoted(
    text_lines: Iterator[str], path: object, delimiter: str
) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(text_lines, 1):
        yield f"{path}:{number}", line.split(delimiter) if delimiter else [line]


def _quoted(
    text_lines: Iterator[str], path: object, delimiter: str
) -> Iterator[tuple[str, list[str]]]:
    csv.field_size_limit(LINE_BYTES)  # the default is 128 KiB; lines are bounded already
    # Restore line ends, as a quoted field may span several lines.
    reader = csv.reader((f"{line}\n" for line in text_lines), delimiter=delimiter, strict=True)
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"{where}: {error}, from this row on; write quotes in quoted fields twice"
            ) from None
        yield where, row or [""]


def _named(
    rows: Iterator[tuple[str, list[str]]],
    path: object,
    header: Sequence[str] | None,
    required: Sequence[str],
    skip: Callable[[str], None] | None,
    skip_blank: bool,
) -> Iterator[Record]:
    names = None if header is None else list(header)
    for where, row in rows:
        if row == [""] and skip_blank and (names is None or len(names) > 1):
            continue
        if names is None:
            names = row
            for name in required:
                if names.count(name) != 1:
                    number = "no" if name not in names else "more than one"
                    raise WrongColumn(f"{where}: {number} column", name, names)
            continue
        if len(row) != len(names):
            message = f"{where}: {counted(len(row), 'column')} where {len(names)} are expected"
            if skip is None:
                raise UserError(f"{message} ({', '.join(names)[:200]}); correct or remove that row")
            skip(message)
            continue
        yield Record(where, dict(zip(names, row, strict=True)))
    if names is None:
        raise UserError(f"{path}: the file is empty; its first line must name the columns")


def _objects(text_lines: Iterator[str], path: object) -> Iterator[Record]:
    for number, line in enumerate(text_lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error}); correct or remove that line") from None
        if not isinstance(value, dict):
            raise UserError(
                f"{where}: a JSON {type(value).__name__} where an object is expected, "
                'such as {"text": "…"}'
            )
        yield Record(where, value)


def _parquet(
    path: pathlib.Path,
    texts: Sequence[str],
    others: Sequence[str],
    optional: Sequence[str],
    count: Callable[[int], None] | None,
) -> Iterator[Record]:
    number = 0
    for batch in compressed.parquet_batches(path, texts, others, optional, count):
        for i in range(batch.num_rows):
            number += 1
            where, fields = f"{path}: row {number}", {}
            for name in batch.schema.names:
                try:
                    fields[name] = batch.column(name)[i].as_py()
                except UnicodeDecodeError:  # Parquet readers do not check strings
                    raise UserError(
                        f"{where}: {name!r} is not UTF-8; correct or remove that row"
                    ) from None
                except (ValueError, OverflowError) as error:  # such as a date after 9999
                    raise UserError(
                        f"{where}: cannot read {name!r} ({error}); correct or remove that row"
                    ) from None
            yield Record(where, fields)


def _checked(
    records: Iterator[Record], texts: Sequence[str], others: Sequence[str], empty: bool
) -> Iterator[Record]:
    for where, fields in records:
        for name in (*texts, *others):
            value = fields.get(name)
            is_text = name in texts
            if value is None or (is_text and not isinstance(value, str)):
                raise WrongColumn(f"{where}: no{' text in' * is_text}", name, fields)
            if isinstance(value, str):
                if not value.strip() and not (is_text and empty):
                    raise UserError(f"{where}: {name!r} is empty; fill it in or remove that row")
                # JSON may contain lone surrogates, which cannot be encoded again.
                fields[name] = value.encode(errors="replace").decode()
        yield Record(where, fields)
