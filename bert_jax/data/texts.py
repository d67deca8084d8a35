"""Texts for a trained model to look at: a text a line, JSON lines, or Parquet, or standard input."""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from bert_jax import files
from bert_jax.data import compressed, tables
from bert_jax.errors import UserError

_LINE_BYTES = tables.LINE_BYTES


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
    lines = {"header": [column], "empty": True, "line_bytes": _LINE_BYTES}
    if source == tables.STANDARD_INPUT:
        records = tables.read(source, [column], kind=".txt", **lines)
        texts = ((record.fields[column], number) for number, record in enumerate(records, 1))
        return Texts(texts, None, "texts")
    path = pathlib.Path(source)
    if tables.kind_of(path) not in (".txt", ".jsonl", ".parquet"):
        raise UserError(
            f"{path}: its name does not say what it is; .txt has a text a line, .jsonl and "
            f".parquet a field for texts, and of these .txt and .jsonl may be compressed "
            f"({' '.join(compressed.SUFFIXES)})"
        )
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size

    records = tables.read(path, [column], count=count, **lines)
    with files.one_line_errors(f"cannot read {path}"):
        size = path.stat().st_size
    return Texts(((record.fields[column], done) for record in records), size, "B")
