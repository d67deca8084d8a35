"""Load batches of rows from shards; order and content are functions of (seed, step).

A batch depends neither on preceding batches nor on the number of hosts, so resuming needs the step
number only.
"""

import concurrent.futures
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from bert_jax import storage
from bert_jax.data.rows import Manifest, RowFormat, Shard, read_manifest
from bert_jax.data.shards import ShardCache
from bert_jax.data.shuffle import shuffled
from bert_jax.errors import UserError
from bert_jax.storage import files

Batch = dict[str, np.ndarray]

# Per split; a process may have about 1,000 open files, shared by several phases and splits.
_OPEN_SHARDS = 256
# For random access. By default a reader reads 1 MB for each record.
_READER_OPTIONS, _BUFFER_BYTES = "readahead_buffer_size:0,max_parallelism:0", 4096
HELDOUT_SEED = 0  # constant, so that all runs evaluate on the same rows


@runtime_checkable
class Rows(Protocol):
    """Rows in a shuffled order, of one folder or several (`mixture.Mixture`)."""

    def indices(self, positions: Int[np.ndarray, " m"], seed: int) -> Int[np.ndarray, " m"]:
        """Return the indices of the rows at positions of the order."""
        ...

    def read(self, indices: Int[np.ndarray, " m"]) -> Batch:
        """Return the rows at `indices`."""
        ...


class _Unreadable(ValueError):
    """The index of a shard is damaged, so that none of its rows can be found."""


class RowDataset:
    """Random access to one split of a folder of rows.

    Attributes:
        manifest: manifest of the folder.
        len(): number of rows in the split.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        split: str,
        skip: Callable[[str], None] | None = None,
    ):
        """Open a split.

        Args:
            folder: folder of rows. Shards on object storage are copied to a cache when rows of them
                are first read.
            split: "train" or "heldout".
            skip: called with a message once for each damaged record, from any reading thread; the
                record is replaced with a row of padding. Without it a damaged record is an error.
        """
        self._url = str(folder).rstrip("/") if storage.is_remote(folder) else ""
        self._name = self._url or pathlib.Path(folder)
        self._skip = skip
        self._reported: set[int] = set()
        self._lock, self._report_lock = threading.Lock(), threading.Lock()
        self.manifest: Manifest = read_manifest(folder)
        self._shards: tuple[Shard, ...] = getattr(self.manifest, split).shards
        self._format: RowFormat = self.manifest.format
        self._starts = np.cumsum([0] + [shard.rows for shard in self._shards])
        self._check_sizes()
        self._folder = pathlib.Path(folder)
        if self._url:
            self._cache = ShardCache(self._url, self.manifest.digest)
            self._folder = self._cache.folder
        # Bound the number of open files; evicted ones close when no thread reads from them.
        self._reader = functools.lru_cache(_OPEN_SHARDS)(self._open)
        # Those of shards on object storage once they have been copied.
        paths = {} if self._url else {i: self._folder / s.name for i, s in enumerate(self._shards)}
        self._paths: dict[int, pathlib.Path] = paths

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def is_local(self) -> bool:
        """Whether all shards are on this machine."""
        return all((self._folder / shard.name).exists() for shard in self._shards)

    def _check_sizes(self) -> None:
        if self._url:
            sizes = {name: stat.size for name, stat in storage.listing(self._url).items()}
        else:
            with (
                files.one_line_errors(f"cannot read {self._name}"),
                os.scandir(self._name) as entries,
            ):
                sizes = {entry.name: entry.stat().st_size for entry in entries}
        for shard in self._shards:
            path = f"{self._name}/{shard.name}"
            if shard.name not in sizes:
                raise UserError(f"the shard {path} is missing; copy or prepare the rows again")
            if sizes[shard.name] != shard.bytes:
                raise UserError(
                    f"the shard {path} has {sizes[shard.name]} bytes, but its manifest says "
                    f"{shard.bytes}: it is truncated or altered; prepare the rows again"
                )

    def _open(self, number: int) -> Any:
        from array_record.python.array_record_module import ArrayRecordReader

        shard, path = self._shards[number], self._paths[number]
        reader = ArrayRecordReader(
            str(path), _READER_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
        )
        rows = reader.num_records()  # 0 if the file cannot be read
        if rows != shard.rows:
            name = f"the shard {self._name}/{shard.name}"
            with files.one_line_errors(f"cannot read {name}"):
                open(path, "rb").close()  # fails if too many files are open
            raise _Unreadable(
                f"{name} has {rows} readable rows, but its manifest says {shard.rows}: it is damaged"
            )
        return reader

    def _copy(self, numbers: list[int]) -> None:
        """Copy shards on object storage to the cache, and report those that were altered."""
        with self._report_lock:
            new = [number for number in numbers if number not in self._paths]
            paths = self._cache.copy([self._shards[number] for number in new])
            for number, path in zip(new, paths, strict=True):
                name = self._shards[number].name
                if path.name != name:
                    self._report_altered(f"{self._url}/{name}")
                self._paths[number] = path

    def _records(self, indices: Sequence[int] | Int[np.ndarray, " rows"]) -> list[bytes]:
        """Read records, without checks."""
        indices = np.asarray(indices, np.int64)
        shards = np.searchsorted(self._starts, indices, "right") - 1
        numbers = (indices - self._starts[shards]).tolist()
        needed = np.unique(shards).tolist()
        if any(shard not in self._paths for shard in needed):
            self._copy(needed)
        records = []
        with self._lock:  # a reader has a position
            for shard, number in zip(shards.tolist(), numbers, strict=True):
                reader = self._reader(shard)
                reader.seek(number)  # `read([number])` takes five times as long
                records.append(reader.read())
        return records

    def verify(self) -> None:
        """Read every shard once and compare its SHA-256 with the manifest's.

        Shards on object storage are verified when they are copied to the cache. If damaged records
        are skipped, an altered shard of the right size is only reported.
        """
        if self._url:
            self._copy(list(range(len(self._shards))))
            return
        with concurrent.futures.ThreadPoolExecutor() as pool:  # hashing releases the GIL
            digests = pool.map(files.sha256, [self._folder / s.name for s in self._shards])
            for shard, digest in zip(self._shards, digests, strict=True):
                if digest != shard.sha256:
                    self._report_altered(f"{self._name}/{shard.name}")

    def _report_altered(self, path: str) -> None:
        altered = f"the shard {path} fails its checksum: it was altered"
        if self._skip is None:
            raise UserError(f"{altered}; prepare the rows again")
        self._skip(f"{altered}; damaged records will be skipped")

    def read(self, indices: Sequence[int] | Int[np.ndarray, " rows"]) -> Batch:
        """Return the rows at `indices` as arrays (see `RowFormat.decode`)."""
        try:
            return self._decode(self._records(indices))
        except (RuntimeError, ValueError):  # find the bad records one by one
            self._reader.cache_clear()  # a reader that has failed fails again
            rows = [self._read_or_skip(int(index)) for index in indices]
            return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def indices(self, positions: Int[np.ndarray, " m"], seed: int) -> Int[np.ndarray, " m"]:
        """Return the indices of the rows at positions of the order, an endless sequence of epochs."""
        return shuffled(positions, len(self), seed)

    def _decode(self, records: list[bytes]) -> Batch:
        arrays = self._format.decode(records)
        self._format.check(arrays)
        return arrays

    def _read_or_skip(self, index: int) -> Batch:
        number = int(np.searchsorted(self._starts, index, "right")) - 1
        shard, record = self._shards[number], index - int(self._starts[number])
        try:
            return self._decode(self._open(number).read([record]))
        except (RuntimeError, ValueError) as error:
            path = self._paths[number]
            if self._url and path.name == shard.name and files.sha256(path) != shard.sha256:
                # The copy is damaged, not the storage: copy the shard again.
                with self._report_lock:
                    path.unlink(missing_ok=True)
                    self._paths.pop(number, None)
                self._copy([number])
                return self._read_or_skip(index)
            if isinstance(error, _Unreadable):
                raise UserError(f"{error}; prepare the rows again") from None
            reason = str(error).split(";")[0]
            damaged = (
                f"record {record} of the shard {self._name}/{shard.name} is damaged ({reason})"
            )
            if self._skip is None:
                raise UserError(f"{damaged}; prepare the rows again") from None
        with self._report_lock:
            if index not in self._reported:
                self._reported.add(index)
                self._skip(f"{damaged}; replaced it with a row of padding")
        return self.empty(1)

    def empty(self, rows: int) -> Batch:
        """Return rows of padding."""
        array = self._format.seal(self._format.empty(rows))
        return self._format.decode(self._format.encode(array))


def prefetched(
    batch_of: Callable[[int], Batch], first_step: int, end_step: int, threads: int
) -> Iterator[Batch]:
    """Iterate over the batches of steps [first_step, end_step), which threads prepare in advance."""
    import grain

    dataset = grain.MapDataset.range(first_step, end_step).map(batch_of)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4)
    return iter(dataset.to_iter_dataset(options))


def batches(
    rows: Rows,
    batch_size: int,
    seed: int,
    first_step: int,
    end_step: int,
    process: int = 0,
    processes: int = 1,
    offset: int = 0,
) -> Iterator[Batch]:
    """Iterate over this process's slice of the batches of steps [first_step, end_step).

    Threads read batches in advance.

    Args:
        rows: rows to read.
        batch_size: global batch size, a multiple of `processes`.
        seed: seed of the data order.
        first_step, end_step: range of steps.
        process, processes: index of this process and number of processes.
        offset: number of rows, from the start of their first epoch, that come before step 0.
    """
    local = batch_size // processes

    def batch_of(step: int) -> Batch:
        first = step * batch_size + offset + process * local
        return rows.read(rows.indices(np.arange(first, first + local), seed))

    return prefetched(batch_of, first_step, end_step, threads=2)


def row_indices(rows: Rows, batch_size: int, seed: int, step: int, offset: int = 0) -> list[int]:
    """Return the indices of the rows of a step's global batch (arguments as of `batches`)."""
    first = step * batch_size + offset
    return rows.indices(np.arange(first, first + batch_size), seed).tolist()


def heldout_batches(
    rows: RowDataset, batch_size: int, max_rows: int, process: int = 0, processes: int = 1
) -> Iterator[Batch]:
    """Iterate over this process's slice of a fixed sample of at most `max_rows` rows (0: all).

    Each row occurs once. The last batch is padded with empty rows, which have no weight.
    """
    total = min(max_rows or len(rows), len(rows))
    local = batch_size // processes
    for first in range(0, total, batch_size):
        positions = np.arange(first + process * local, min(first + (process + 1) * local, total))
        batch = rows.read(shuffled(positions, len(rows), HELDOUT_SEED))
        if len(positions) < local:
            padding = rows.empty(local - len(positions))
            batch = {k: np.concatenate([batch[k], v]) for k, v in padding.items()}
        yield batch
