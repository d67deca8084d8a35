"""Where the records of a shard are, and the cache of shards on object storage.

A shard is an ArrayRecord file, uncompressed, with one record per chunk. All records of a shard have
one size, so their positions can be computed, and rows have their own checksums (`RowFormat.decode`).
Reading at computed positions needs a sixth of the library's time per record, and no file's index.
"""

import fcntl
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from bert_jax import storage
from bert_jax.data.rows import Shard
from bert_jax.errors import Unavailable, UserError
from bert_jax.storage import files

# Riegeli's file format: each block begins with a block header, even inside a chunk. The first chunk
# is only a header, the file's signature.
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_BLOCK_DATA = _BLOCK - _BLOCK_HEADER


class ShardLayout:
    """Where the records of a shard are.

    Args:
        record_bytes: size of a record.
    """

    def __init__(self, record_bytes: int):
        self._size = record_bytes
        # The data of a chunk: compression type (one byte), length of the list of sizes (one byte),
        # list of sizes (one varint), and the record.
        prefix = 2 + -(-record_bytes.bit_length() // 7)
        self._stride = _CHUNK_HEADER + prefix + record_bytes
        self._first = 2 * _CHUNK_HEADER + prefix

    def span(self, numbers: int | Int[np.ndarray, " n"]) -> tuple[Any, Any]:
        """Return the start and end of the part of the file that holds a record, or of several."""
        block, offset = divmod(self._first + numbers * self._stride, _BLOCK_DATA)
        start = block * _BLOCK + _BLOCK_HEADER + offset
        headers = (offset + self._size - 1) // _BLOCK_DATA
        return start, start + self._size + headers * _BLOCK_HEADER

    def record(self, number: int, data: bytes) -> bytes:
        """Return a record from its part of the file (`span`), arbitrary bytes if it is damaged."""
        left = _BLOCK_DATA - (self._first + number * self._stride) % _BLOCK_DATA
        if left >= self._size:
            return data
        starts = range(left + _BLOCK_HEADER, len(data), _BLOCK)
        return data[:left] + b"".join(data[start : start + _BLOCK_DATA] for start in starts)


class ShardCache:
    """Local copies of the shards of a folder on object storage, made in the background.

    Copies are verified when they are made, kept for other runs, and bounded in size together. The
    processes of a machine share them, and none deletes those that another has open.

    Args:
        url: folder of the shards.
        digest: what identifies their content.
        shards: the shards.
        copy: whether to copy the shards; otherwise only existing copies are used.

    Attributes:
        folder: where the copies are.
        altered: names of shards whose copies failed their checksums, which `RowDataset.read` reports.
    """

    def __init__(self, url: str, digest: str, shards: Sequence[Shard], copy: bool):
        self._url, self._shards = url, shards
        self.folder = storage.cache_folder() / "rows" / digest
        self.altered: list[str] = []
        with files.one_line_errors(f"cannot write {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = files.open_lock(self.folder / files.LOCK)
            weakref.finalize(self, lock.close)
            fcntl.flock(lock, fcntl.LOCK_SH)  # `make_room` keeps the folder
            os.utime(self.folder)
        if copy:
            threading.Thread(target=self._copy_all, daemon=True).start()

    def _copy_all(self) -> None:
        for shard in self._shards:
            path = self.folder / shard.name
            lock, temporary = (path.with_name(f"{path.name}.{end}") for end in ("lock", "partial"))
            try:
                with files.open_lock(lock) as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # wait while another process copies it
                    if path.exists():
                        continue
                    if not storage.make_room(self.folder, shard.bytes):
                        return
                    storage.download([f"{self._url}/{shard.name}"], [temporary])
                    if files.sha256(str(temporary)) == shard.sha256:
                        os.replace(temporary, path)
                    else:
                        temporary.unlink()
                        self.altered.append(shard.name)
            except Unavailable:
                continue  # its rows are read from the storage, when it answers again
            except (UserError, OSError):
                return  # no room, or no access: reading rows will say so
