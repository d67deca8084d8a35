"""Fast random access to the records of a shard.

A shard is an ArrayRecord file in Riegeli's format, uncompressed, with one record per chunk. The
library needs about 20 µs for a random record, to locate, check and parse its chunk. As all records
of a shard have one size, their positions can be computed, and rows have their own checksums
(`RowFormat.decode`). If a checksum fails, callers fall back to the library.
"""

import os
import pathlib

# Riegeli's file format: each block begins with a block header, even inside a chunk. The first chunk
# is only a header, the file's signature.
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_BLOCK_DATA = _BLOCK - _BLOCK_HEADER


class ShardFile:
    """An open shard with records of one size. Threads may share it.

    Args:
        path: path of the file.
        record_bytes: size of a record; less than 64 KiB.

    Raises:
        OSError: the file cannot be opened.
        ValueError: records are too large.
    """

    def __init__(self, path: str | pathlib.Path, record_bytes: int):
        if record_bytes >= _BLOCK_DATA:
            raise ValueError(f"records of {record_bytes} bytes span several blocks")
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = record_bytes
        # The data of a chunk: compression type (one byte), length of the list of sizes (one byte),
        # list of sizes (one varint), and the record.
        prefix = 2 + -(-record_bytes.bit_length() // 7)
        self._stride = _CHUNK_HEADER + prefix + record_bytes
        self._first = 2 * _CHUNK_HEADER + prefix

    def __del__(self):
        if hasattr(self, "_file"):
            os.close(self._file)

    def _locate(self, number: int) -> tuple[int, int]:
        """Return the start of a record in the file, and the number of bytes left in its block."""
        block, offset = divmod(self._first + number * self._stride, _BLOCK_DATA)
        return block * _BLOCK + _BLOCK_HEADER + offset, _BLOCK_DATA - offset

    def expect(self, number: int) -> None:
        """Ask the system to prefetch a record, so that those of a batch are read concurrently."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            start, _ = self._locate(number)
            os.posix_fadvise(self._file, start, self._size, os.POSIX_FADV_WILLNEED)

    def read(self, number: int) -> bytes:
        """Return a record; arbitrary bytes if the file is truncated or has another layout."""
        start, left = self._locate(number)
        if left >= self._size:
            return os.pread(self._file, self._size, start)
        data = os.pread(self._file, self._size + _BLOCK_HEADER, start)
        return data[:left] + data[left + _BLOCK_HEADER :]
