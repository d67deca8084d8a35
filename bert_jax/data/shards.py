"""Fast random access to the records of shards, in local files and on object storage.

A shard is an ArrayRecord file in Riegeli's format, uncompressed, with one record per chunk. The
library needs about 20 µs for a random record, to locate, check and parse its chunk. As all records
of a shard have one size, their positions can be computed, and rows have their own checksums
(`RowFormat.decode`). If a checksum fails, callers fall back to the library.
"""

import fcntl
import os
import pathlib
import threading
import weakref
from collections.abc import Sequence

from bert_jax import files, storage
from bert_jax.data.rows import Shard
from bert_jax.errors import Unavailable, UserError

# Riegeli's file format: each block begins with a block header, even inside a chunk. The first chunk
# is only a header, the file's signature.
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_BLOCK_DATA = _BLOCK - _BLOCK_HEADER


class ShardLayout:
    """Where the records of a shard are.

    Args:
        record_bytes: size of a record; less than 64 KiB.

    Raises:
        ValueError: records are too large.
    """

    def __init__(self, record_bytes: int):
        if record_bytes >= _BLOCK_DATA:
            raise ValueError(f"records of {record_bytes} bytes span several blocks")
        self._size = record_bytes
        # The data of a chunk: compression type (one byte), length of the list of sizes (one byte),
        # list of sizes (one varint), and the record.
        prefix = 2 + -(-record_bytes.bit_length() // 7)
        self._stride = _CHUNK_HEADER + prefix + record_bytes
        self._first = 2 * _CHUNK_HEADER + prefix

    def span(self, number: int) -> tuple[int, int]:
        """Return the start and end of the part of the file that holds a record."""
        start, left = self._locate(number)
        return start, start + self._size + (_BLOCK_HEADER if left < self._size else 0)

    def record(self, number: int, data: bytes) -> bytes:
        """Return a record from its part of the file (`span`)."""
        _, left = self._locate(number)
        return data if left >= self._size else data[:left] + data[left + _BLOCK_HEADER :]

    def _locate(self, number: int) -> tuple[int, int]:
        """Return the start of a record in the file, and the number of bytes left in its block."""
        block, offset = divmod(self._first + number * self._stride, _BLOCK_DATA)
        return block * _BLOCK + _BLOCK_HEADER + offset, _BLOCK_DATA - offset


class ShardFile(ShardLayout):
    """An open shard with records of one size. Threads may share it.

    Args:
        path: path of the file.
        record_bytes: as for `ShardLayout`.

    Raises:
        OSError: the file cannot be opened.
        ValueError: records are too large.
    """

    def __init__(self, path: str | pathlib.Path, record_bytes: int):
        super().__init__(record_bytes)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self):
        if hasattr(self, "_file"):
            os.close(self._file)

    def prefetch(self, number: int) -> None:
        """Ask the system to prefetch a record, so that those of a batch are read concurrently."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            start, _ = self._locate(number)
            os.posix_fadvise(self._file, start, self._size, os.POSIX_FADV_WILLNEED)

    def read(self, number: int) -> bytes:
        """Return a record; arbitrary bytes if the file is truncated or has another layout."""
        start, end = self.span(number)
        return self.record(number, os.pread(self._file, end - start, start))


class ShardCache:
    """Local copies of the shards of a folder on object storage, made in the background.

    Copies are verified when they are made, kept for other runs, and bounded in size together. The
    processes of a machine share them, and none deletes those that another has open. The records of
    shards without a copy are read from the storage, those of a batch together.

    Args:
        url: folder of the shards.
        digest: what identifies their content.
        shards: the shards.
        record_bytes: size of a record.
        copy: whether to copy the shards; otherwise only existing copies are used.

    Attributes:
        altered: names of shards whose copies failed their checksums, which `Rows.read` reports.
    """

    def __init__(
        self, url: str, digest: str, shards: Sequence[Shard], record_bytes: int, copy: bool = True
    ):
        self._url, self._shards = url, shards
        try:
            self._layout = ShardLayout(record_bytes)
        except ValueError as error:
            raise UserError(f"{url}: {error}; copy the folder to a local disk") from None
        self.folder = storage.cache_folder() / "rows" / digest
        self.altered: list[str] = []
        with files.one_line_errors(f"cannot write {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / files.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            weakref.finalize(self, os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH)  # `make_room` keeps the folder
            os.utime(self.folder)
        self._copied = [(self.folder / shard.name).exists() for shard in shards]
        if copy:
            threading.Thread(target=self._copy_all, daemon=True).start()

    def is_local(self, shard: int) -> bool:
        """Whether a shard has a local copy."""
        return self._copied[shard]

    def forget_missing(self) -> None:
        """Read the shards whose copies were deleted from the storage again."""
        for index, shard in enumerate(self._shards):
            if not (self.folder / shard.name).exists():
                self._copied[index] = False

    def fetch(self, records: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return records, given by shard and number, from the storage."""
        requests = [
            (f"{self._url}/{self._shards[shard].name}", *self._layout.span(number))
            for shard, number in records
        ]
        parts = storage.read_ranges(requests)
        return [
            self._layout.record(number, part)
            for (_, number), part in zip(records, parts, strict=True)
        ]

    def _copy_all(self) -> None:
        for index, shard in enumerate(self._shards):
            if self._copied[index]:
                continue
            path = self.folder / shard.name
            lock, temporary = (path.with_name(f"{path.name}.{end}") for end in ("lock", "partial"))
            try:
                with lock.open("a") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # wait while another process copies it
                    if not path.exists():
                        if not storage.make_room(self.folder, shard.bytes):
                            return
                        storage.download([f"{self._url}/{shard.name}"], [temporary])
                        if files.sha256(str(temporary)) != shard.sha256:
                            temporary.unlink()
                            self.altered.append(shard.name)
                            continue
                        os.replace(temporary, path)
                    self._copied[index] = True
            except Unavailable:
                continue  # its rows are read from the storage, when it answers again
            except (UserError, OSError):
                return  # no room, or no access: reading rows will say so
