"""Tables in files: records with named fields from .tsv, .csv, .jsonl, .parquet or lines of text."""

import csv
import io
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bert_jax import files
from bert_jax.data import compressed, corpus
from bert_jax.data.compressed import damage, decompressed
from bert_jax.errors import UserError

KINDS = (".tsv", ".csv", ".jsonl", ".parquet", ".txt")
STANDARD_INPUT = "-"
LINE_BYTES = corpus.DOCUMENT_CHARACTERS


class Record(NamedTuple):
    """A row.

    Attributes:
        where: "file:line" (of Parquet "file: row number"), both from 1, for messages.
        fields: its values by column; of text files all strings.
    """

    where: str
    fields: dict[str, Any]


def kind_of(path: str | pathlib.Path) -> str:
    """The suffix that says what a file is, in lower case, without that of its compression."""
    suffixes = [suffix.lower() for suffix in pathlib.Path(path).suffixes]
    return next((s for s in reversed(suffixes) if s not in compressed.SUFFIXES), "")


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
    line_bytes: int = LINE_BYTES,
) -> Iterator[Record]:
    """The records of a file, in order.

    Args:
        path: of the file; all but Parquet may be compressed. "-" is standard input.
        texts: columns that must be there and hold strings.
        others: columns that must be there and hold something.
        optional: columns to read where they are there (what is not asked for may be missing).
        kind: one of `KINDS`; "" goes by the name. ".txt" takes a line as it is for one column and
            splits it at tabs for several.
        header: names of the columns, for a file without a line of them; ".txt" never has one.
        quoting: whether fields may be "quoted", as they are in .csv and not in .tsv by default.
        empty: whether texts may be empty.
        skip: is told of a row with too many or too few columns, which is then left out; without it
            that is an error.
        count: is told how many more bytes were read, now and then.
        line_bytes: of the longest line.

    Raises:
        UserError: the file cannot be read, or (when its turn comes) a row is not as asked for;
            names the file and line.
    """
    kind = kind or kind_of(path)
    if kind not in KINDS:
        raise UserError(
            f"{path}: its name does not say what it is; a table is one of {' '.join(KINDS)}, "
            f"all but .parquet also compressed ({' '.join(compressed.SUFFIXES)})"
        )
    if str(path) == STANDARD_INPUT:
        path = "standard input"
        found = lines(sys.stdin.buffer, path, line_bytes)
    else:
        path = pathlib.Path(path)
        with files.one_line_errors(f"cannot read {path}"):
            path.open("rb").close()
        found = _file_lines(path, count, line_bytes)
    if kind == ".parquet":
        records = _parquet(pathlib.Path(path), texts, others, optional, count)
    elif kind == ".jsonl":
        records = _objects(found, path)
    else:
        quoting = kind == ".csv" if quoting is None else quoting
        delimiter = {".csv": ",", ".tsv": "\t"}.get(kind) or ("\t" if len(header or ()) > 1 else "")
        rows = _quoted(found, path, delimiter) if quoting else _plain(found, path, delimiter)
        records = _named(rows, path, header, [*texts, *others], skip)
    return _checked(records, texts, others, empty)


def lines(stream: io.BufferedIOBase, where: object, line_bytes: int = LINE_BYTES) -> Iterator[str]:
    """Lines without their ends; only line feeds end one.

    Raises:
        UserError: one is too long, not UTF-8, or holds a NUL. What is not read would shift all that
            comes after it, so nothing is passed over.
    """
    number = 0
    while data := stream.readline(line_bytes + 1):
        number += 1
        if len(data) > line_bytes:
            raise UserError(
                f"{where}:{number}: a line of more than {line_bytes:,} bytes; put a text on each line"
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


def _file_lines(
    path: pathlib.Path, count: Callable[[int], None] | None, line_bytes: int
) -> Iterator[str]:
    with damage(path), decompressed(path, count) as stream:
        yield from lines(stream, path, line_bytes)


def _plain(found: Iterator[str], path: object, delimiter: str) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(found, 1):
        yield f"{path}:{number}", line.split(delimiter) if delimiter else [line]


def _quoted(found: Iterator[str], path: object, delimiter: str) -> Iterator[tuple[str, list[str]]]:
    csv.field_size_limit(LINE_BYTES)  # its own is 128 KiB; lines are bounded already
    # With their ends again: a quoted field may go over several lines.
    reader = csv.reader((f"{line}\n" for line in found), delimiter=delimiter, strict=True)
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"{where}: {error}, from this row on; a quote in a quoted field is written twice"
            ) from None
        yield where, row or [""]


def _named(
    rows: Iterator[tuple[str, list[str]]],
    path: object,
    header: Sequence[str] | None,
    needed: Sequence[str],
    skip: Callable[[str], None] | None,
) -> Iterator[Record]:
    names = None if header is None else list(header)
    for where, row in rows:
        if row == [""] and (names is None or len(names) > 1):
            continue
        if names is None:
            names = row
            for name in needed:
                if names.count(name) != 1:
                    raise UserError(
                        f"{where}: {'no' if name not in names else 'more than one'} column {name!r} "
                        f"(it has: {', '.join(names)[:200]}); name the columns in the first line"
                    )
            continue
        if len(row) != len(names):
            message = f"{where}: {_columns(len(row))} where {_columns(len(names))} are expected"
            if skip is None:
                raise UserError(f"{message} ({', '.join(names)[:200]}); mend or remove that row")
            skip(message)
            continue
        yield Record(where, dict(zip(names, row, strict=True)))
    if names is None:
        raise UserError(f"{path} is empty; its first line must name the columns")


def _columns(count: int) -> str:
    return f"{count} column{'s' * (count != 1)}"


def _objects(found: Iterator[str], path: object) -> Iterator[Record]:
    for number, line in enumerate(found, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error}); mend or remove it") from None
        if not isinstance(value, dict):
            raise UserError(
                f"{where}: a JSON {type(value).__name__} where an object is expected, "
                'like {"text": "…"}'
            )
        yield Record(where, value)


def _parquet(
    path: pathlib.Path,
    texts: Sequence[str],
    others: Sequence[str],
    optional: Sequence[str],
    count: Callable[[int], None] | None,
) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, memory_map=False, pre_buffer=False) as table:
            schema = table.schema_arrow
            for name in (*texts, *others):
                if name not in schema.names:
                    raise UserError(
                        f"{path}: no column {name!r} (it has: {', '.join(schema.names)[:200]}); "
                        "name one of those"
                    )
            for name in texts:
                kind = schema.field(name).type
                if pyarrow.types.is_dictionary(kind):
                    kind = kind.value_type
                if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                    raise UserError(f"{path}: the column {name!r} holds {kind}, not strings")
            wanted = {*texts, *others, *optional}
            columns = [name for name in schema.names if name in wanted]
            size, number, before = path.stat().st_size, 0, 0
            for batch in table.iter_batches(256, columns=columns, use_threads=False):
                for i in range(batch.num_rows):
                    number += 1
                    where, fields = f"{path}: row {number}", {}
                    for name in columns:
                        try:
                            fields[name] = batch.column(name)[i].as_py()
                        except UnicodeDecodeError:  # nobody has checked
                            raise UserError(
                                f"{where}: no UTF-8 text in {name!r}; mend or remove that row"
                            ) from None
                        except (ValueError, OverflowError) as error:  # such as a date after 9999
                            raise UserError(
                                f"{where}: {name!r} cannot be read ({error}); mend or remove that row"
                            ) from None
                    if count is not None:
                        by_now = size * number // max(table.metadata.num_rows, number)
                        count(by_now - before)
                        before = by_now
                    yield Record(where, fields)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: not a whole Parquet file ({str(error).splitlines()[0][:200]}); copy or "
            "download it again"
        ) from None


def _checked(
    records: Iterator[Record], texts: Sequence[str], others: Sequence[str], empty: bool
) -> Iterator[Record]:
    for where, fields in records:
        for name in (*texts, *others):
            value = fields.get(name)
            text = name in texts
            if value is None or (text and not isinstance(value, str)):
                raise UserError(
                    f"{where}: no {'text in ' * text}{name!r} (it has: "
                    f"{', '.join(fields)[:200]}); name a field that every row has"
                )
            if isinstance(value, str):
                if not value.strip() and not (text and empty):
                    raise UserError(f"{where}: {name!r} is empty; fill it in or remove that row")
                # JSON may hold half characters, which nothing can write again.
                fields[name] = value.encode(errors="replace").decode()
        yield Record(where, fields)
