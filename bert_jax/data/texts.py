"""Read texts for inference from text files, JSON lines, Parquet or standard input."""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from bert_jax import storage
from bert_jax.data import compressed, tables
from bert_jax.storage import files


class Texts(NamedTuple):
    """A stream of texts.

    Attributes:
        texts: each text with the progress of reading so far, in `unit`.
        total: progress at the end, None if unknown.
        unit: unit of progress: "texts", or "B" for bytes.
    """

    texts: Iterator[tuple[str, int]]
    total: int | None
    unit: str


@storage.with_local_inputs("source")
def read(source: str, column: str) -> Texts:
    """Open a source of texts, read in order.

    Args:
        source: path of a .txt (one text per line, possibly empty), .jsonl or .parquet file, the
            first two optionally compressed; "-" reads lines from standard input.
        column: field or column with the text in .jsonl and .parquet.
    """
    options = {"header": [column], "empty": True}
    if source == tables.STANDARD_INPUT:
        records = tables.read(source, [column], kind=".txt", **options)
        texts = ((record.fields[column], number) for number, record in enumerate(records, 1))
        return Texts(texts, None, "texts")
    path = pathlib.Path(source)
    tables.check_kind(
        path,
        (".txt", ".jsonl", ".parquet"),
        "use .txt with a text per line, or .jsonl or .parquet with a field for the text (.txt and .jsonl "
        f"optionally compressed: {' '.join(compressed.SUFFIXES)})",
    )
    bytes_read = 0

    def count(size: int) -> None:
        nonlocal bytes_read
        bytes_read += size

    records = tables.read(path, [column], count=count, **options)
    with files.one_line_errors(f"cannot read {path}"):
        size = path.stat().st_size
    return Texts(((record.fields[column], bytes_read) for record in records), size, "B")
