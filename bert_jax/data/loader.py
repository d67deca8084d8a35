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
from typing import Any

import numpy as np
from jaxtyping import Int

from bert_jax import files, storage
from bert_jax.data.rows import Manifest, RowFormat, Shard, read_manifest
from bert_jax.data.shards import ShardCache, ShardFile
from bert_jax.data.shuffle import shuffled
from bert_jax.errors import UserError

Batch = dict[str, np.ndarray]

# Per split; a process may have about 1,000 open files, shared by several phases and splits.
_OPEN_SHARDS = 256
HELDOUT_SEED = 0  # constant, so that all runs evaluate on the same rows


class Rows:
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
        copy: bool = True,
    ):
        """Open a split.

        Args:
            folder: folder of rows.
            split: "train" or "heldout".
            skip: called with a message once for each damaged record, from any reading thread; the
                record is replaced with a row of padding. Without it a damaged record is an error.
            copy: whether to copy shards on object storage to the cache, in the background.
        """
        self._url = str(folder).rstrip("/") if storage.is_remote(folder) else ""
        self._folder, self._skip = pathlib.Path(folder), skip
        self._reported: set[int] = set()
        self._report_lock = threading.Lock()
        self.manifest: Manifest = read_manifest(folder)
        self._shards: tuple[Shard, ...] = getattr(self.manifest, split).shards
        self._format: RowFormat = self.manifest.format
        self._starts = np.cumsum([0] + [shard.rows for shard in self._shards])
        if self._url:
            self._check_remote_sizes()
            self._cache = ShardCache(
                self._url, self.manifest.digest, self._shards, self._format.dtype.itemsize, copy
            )
            self._folder = self._cache.folder
        else:
            for shard in self._shards:
                self._check_size(shard)
        self._source: Any = range(len(self)) if self._url else self._open(self._shards)
        if len(self._source) != len(self):
            raise UserError(
                f"{folder}: the shards of {split} hold {len(self._source)} rows, but the "
                f"manifest says {len(self)}; prepare the rows again"
            )
        # Bound the number of open files; evicted ones close when no thread reads from them.
        self._file = functools.lru_cache(_OPEN_SHARDS)(self._open_directly)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def is_local(self) -> bool:
        """Whether all shards are on this machine, so that reading sends no requests."""
        return not self._url or all(map(self._cache.is_local, range(len(self._shards))))

    def _check_remote_sizes(self) -> None:
        sizes = storage.listing(self._url)
        for shard in self._shards:
            if shard.name not in sizes:
                raise UserError(f"the shard {self._url}/{shard.name} is missing; upload it again")
            self._compare_size(shard, f"{self._url}/{shard.name}", sizes[shard.name].size)

    def _compare_size(self, shard: Shard, path: object, size: int) -> None:
        if size != shard.bytes:
            raise UserError(
                f"the shard {path} has {size} bytes, but its manifest says {shard.bytes}: "
                "it is truncated or altered; prepare the rows again"
            )

    def _check_size(self, shard: Shard) -> None:
        path = self._folder / shard.name
        try:
            with open(path, "rb") as file:  # fails if too many files are open, not only if damaged
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise UserError(f"cannot read the shard {path}: {files.describe(error)}") from None
        self._compare_size(shard, path, size)

    def _open(self, shards: Sequence[Shard]) -> Any:
        from grain.sources import ArrayRecordDataSource

        paths = [str(self._folder / shard.name) for shard in shards]
        try:
            # Grain rejects an empty list of paths.
            return ArrayRecordDataSource(paths) if paths else []
        except Exception as error:  # of various types, without the name of the file
            if len(shards) > 1:
                for shard in shards:
                    self._open([shard])
            raise UserError(
                f"cannot open the shard {paths[0]} ({' '.join(str(error).split())}): its index is "
                "damaged; prepare the rows again"
            ) from None

    def _open_directly(self, shard: int) -> ShardFile:
        try:
            return ShardFile(self._folder / self._shards[shard].name, self._format.dtype.itemsize)
        except FileNotFoundError:
            if self._url:
                self._cache.forget_missing()
            raise

    def _records(self, indices: Sequence[int] | Int[np.ndarray, " rows"]) -> list[bytes]:
        """Read records at their computed positions, without checking them."""
        shards = np.searchsorted(self._starts, indices, "right") - 1
        numbers = indices - self._starts[shards]
        locations = list(zip(shards.tolist(), numbers.tolist(), strict=True))
        remote = [at for at in locations if self._url and not self._cache.is_local(at[0])]
        fetched = dict(zip(remote, self._cache.fetch(remote), strict=True)) if remote else {}
        for shard, number in locations:
            if (shard, number) not in fetched:
                self._file(shard).prefetch(number)
        return [fetched.get(at) or self._file(at[0]).read(at[1]) for at in locations]

    def verify(self) -> None:
        """Read every shard once and compare its SHA-256 with the manifest's.

        On object storage, a shard is verified when it is copied to the cache, and `read` raises the
        error. If damaged records are skipped, an altered shard of the right size is only reported.
        """
        if self._url:
            return
        with concurrent.futures.ThreadPoolExecutor() as pool:  # hashing releases the GIL
            digests = pool.map(files.sha256, [self._folder / s.name for s in self._shards])
            for shard, digest in zip(self._shards, digests, strict=True):
                if digest != shard.sha256:
                    self._report_altered(f"{self._folder}/{shard.name}")

    def _report_altered(self, path: str) -> None:
        altered = f"the shard {path} fails its checksum: it was altered"
        if self._skip is None:
            raise UserError(f"{altered}; prepare the rows again")
        self._skip(f"{altered}; damaged records will be skipped")

    def read(self, indices: Sequence[int] | Int[np.ndarray, " rows"]) -> Batch:
        """Return the rows at `indices` as arrays (see `RowFormat.decode`)."""
        with self._report_lock:
            while self._url and self._cache.altered:
                self._report_altered(f"{self._url}/{self._cache.altered[0]}")
                del self._cache.altered[0]
        try:
            return self._decode(self._records(indices))
        except (OSError, ValueError):  # find the bad records one by one with the slower library
            rows = [self._read_or_skip(int(index)) for index in indices]
            return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _decode(self, records: list[bytes]) -> Batch:
        arrays = self._format.decode(records)
        self._format.check(arrays)
        return arrays

    def _read_or_skip(self, index: int) -> Batch:
        number = int(np.searchsorted(self._starts, index, "right")) - 1
        shard, record = self._shards[number], index - int(self._starts[number])
        try:
            if self._url:
                return self._decode(self._cache.fetch([(number, record)]))
            return self._decode([self._source[index]])
        except UserError:  # the storage does not answer, or the shard cannot be read
            raise
        except Exception as error:
            if not self._url:
                self._check_size(shard)
            damaged = (
                f"record {record} of the shard {self._url or self._folder}/{shard.name} "
                f"is damaged ({' '.join(str(error).split())})"
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


class _Batches:
    """Random-access source of this process's slice of every batch, for Grain's prefetching."""

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        seed: int,
        steps: int,
        process: int,
        processes: int,
        offset: int,
    ):
        self._rows, self._seed, self._steps = rows, seed, steps
        self._batch_size, self._local = batch_size, batch_size // processes
        self._first = offset + process * self._local

    def __len__(self) -> int:
        return self._steps

    def indices(self, step: int) -> Int[np.ndarray, " rows"]:
        """Return the indices of the rows of the slice of a step."""
        first = step * self._batch_size + self._first
        positions = np.arange(first, first + self._local)
        return shuffled(positions, len(self._rows), self._seed)

    def __getitem__(self, step: int) -> Batch:
        return self._rows.read(self.indices(step))


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
    import grain

    source = _Batches(rows, batch_size, seed, end_step, process, processes, offset)
    dataset = grain.MapDataset.source(source)[first_step:]
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def row_indices(rows: Rows, batch_size: int, seed: int, step: int, offset: int = 0) -> list[int]:
    """Return the indices of the rows of a step's global batch (arguments as of `batches`)."""
    return _Batches(rows, batch_size, seed, step + 1, 0, 1, offset).indices(step).tolist()


def heldout_batches(
    rows: Rows, batch_size: int, max_rows: int, process: int = 0, processes: int = 1
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
