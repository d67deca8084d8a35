"""Read plain or compressed files, and report damaged ones."""

import bz2
import contextlib
import gzip
import io
import lzma
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from bert_jax import storage
from bert_jax.errors import UserError, WrongColumn
from bert_jax.storage.files import one_line_errors

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_BLOCK_BYTES = 1 << 20
# Maximum sizes of settings and benchmark files that are read as a whole, far above those in use, to
# guard against decompression bombs.
SETTINGS_BYTES, DATA_BYTES = 1 << 26, 1 << 30


def decompressed(
    path: pathlib.Path, count: Callable[[int], None] | None = None
) -> io.BufferedReader:
    """Open a file for reading, decompressing it as its first bytes (not its name) indicate.

    Args:
        path: path of the file.
        count: called with the number of bytes of each read from disk.
    """
    raw = storage.open_file(path) or io.FileIO(path)
    file: Any = io.BufferedReader(raw if count is None else _Counted(raw, count), _BLOCK_BYTES)
    magic = file.peek(6)
    if magic.startswith(b"\x1f\x8b"):
        return io.BufferedReader(gzip.GzipFile(fileobj=file), _BLOCK_BYTES)
    if magic.startswith(b"BZh"):
        return io.BufferedReader(bz2.BZ2File(file), _BLOCK_BYTES)
    if magic.startswith(b"\xfd7zXZ\x00"):
        return io.BufferedReader(lzma.LZMAFile(file), _BLOCK_BYTES)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), _BLOCK_BYTES)
    return file


def whole(
    stream: io.BufferedIOBase | IO[bytes], where: object, max_bytes: int = SETTINGS_BYTES
) -> bytes:
    """Read a whole stream."""
    blocks, size = [], 0
    while block := stream.read(_BLOCK_BYTES):
        blocks.append(block)
        size += len(block)
        if size > max_bytes:
            raise UserError(
                f"{where}: more than {max_bytes >> 20:,} MB (decompressed), too large for such a "
                "file; check that it is the right one"
            )
    return b"".join(blocks)


@contextlib.contextmanager
def damage_errors(path: pathlib.Path) -> Iterator[None]:
    """Convert errors of reading a `decompressed` file to a `UserError` that names it."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        if error.errno is None:  # how bz2 and pyarrow report bad data
            raise _damaged(path, error) from None
        with one_line_errors(f"cannot read {path}"):
            raise


def parquet_batches(
    path: pathlib.Path,
    texts: Sequence[str],
    others: Sequence[str] = (),
    optional: Sequence[str] = (),
    count: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """Yield the record batches of a Parquet file.

    Args:
        path: path of the file.
        texts: columns of strings that it must have.
        others: columns of any type that it must have.
        optional: columns that are read if present.
        count: called with each batch's share of the size of the file.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        source = storage.open_file(path) or path
        with parquet.ParquetFile(source, memory_map=False, pre_buffer=False) as table:
            schema = table.schema_arrow
            for name in (*texts, *others):
                if name not in schema.names:
                    raise WrongColumn(f"{path}: no column", name, schema.names)
            for name in texts:
                kind = schema.field(name).type
                if pyarrow.types.is_dictionary(kind):
                    kind = kind.value_type
                if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                    raise UserError(
                        f"{path}: the column {name!r} has type {kind}; convert it to strings"
                    )
            requested, rows = {*texts, *others, *optional}, 0
            columns = [name for name in schema.names if name in requested]
            size, total = storage.stat(path)[0], max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(256, columns=columns, use_threads=False):
                before, rows = rows, rows + batch.num_rows
                if count is not None:
                    count(size * rows // total - size * before // total)
                yield batch
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: not a complete Parquet file ({str(error).splitlines()[0][:200]}); copy or "
            "download it again"
        ) from None


def _damaged(path: pathlib.Path, error: Exception) -> UserError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(
        f"{path}: the compressed data is damaged or truncated ({reason.rstrip('.')}); "
        "copy or download it again"
    )


class _Counted(io.RawIOBase):
    """A file that reports the number of bytes read from it."""

    mode = "rb"

    def __init__(self, file: io.RawIOBase, count: Callable[[int], None]):
        self._file, self._count = file, count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        size = self._file.readinto(buffer) or 0
        self._count(size)
        return size

    def close(self) -> None:
        self._file.close()
        super().close()
