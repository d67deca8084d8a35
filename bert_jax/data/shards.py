"""The records of a shard, straight from the file.

A shard is an ArrayRecord file (Riegeli's format, a chunk a record, nothing compressed). The format's
library takes some 20 µs of a core for each record out of order, as it finds, checks and parses a
chunk. Here all records are of one size, so where one stands is arithmetic, and a row has a checksum
of its own (`RowFormat.decode`). Where that does not hold, whoever reads goes back to the library.
"""

import os
import pathlib

# Riegeli's file format: a header of its own begins each block, wherever in a chunk that is. The
# first chunk is a header alone, the file's signature.
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_ROOM = _BLOCK - _BLOCK_HEADER


class ShardFile:
    """An open shard whose records are all of one size. Threads may share it.

    Args:
        path: the file.
        record_bytes: the size; below 64 KiB.

    Raises:
        OSError: it cannot be opened.
        ValueError: larger records.
    """

    def __init__(self, path: str | pathlib.Path, record_bytes: int):
        if record_bytes >= _ROOM:
            raise ValueError(f"records of {record_bytes} bytes span several blocks")
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = record_bytes
        # A chunk's data is how it is compressed (a byte), how many bytes the list of sizes takes (a
        # byte), that list (the one size, seven bits a byte), and the record.
        before = 2 + -(-record_bytes.bit_length() // 7)
        self._stride = _CHUNK_HEADER + before + record_bytes
        self._first = 2 * _CHUNK_HEADER + before

    def __del__(self):
        if hasattr(self, "_file"):
            os.close(self._file)

    def _place(self, number: int) -> tuple[int, int]:
        """Where a record begins in the file, and how many bytes are left of its block."""
        block, offset = divmod(self._first + number * self._stride, _ROOM)
        return block * _BLOCK + _BLOCK_HEADER + offset, _ROOM - offset

    def expect(self, number: int) -> None:
        """Has the system fetch a record, so that those of a batch are waited for together."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            place, _ = self._place(number)
            os.posix_fadvise(self._file, place, self._size, os.POSIX_FADV_WILLNEED)

    def read(self, number: int) -> bytes:
        """A record; of a file that is cut short or laid out otherwise, anything."""
        place, here = self._place(number)
        if here >= self._size:
            return os.pread(self._file, self._size, place)
        data = os.pread(self._file, self._size + _BLOCK_HEADER, place)
        return data[:here] + data[here + _BLOCK_HEADER :]
