"""Rows from shards to batches: order and content are functions of (seed, step) alone.

The batch of a step is known without the batches before it and without knowing how many hosts
there are, so resuming needs the step number and nothing else.
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

from bert_jax import files
from bert_jax.data.rows import Manifest, RowFormat, Shard, read_manifest
from bert_jax.data.shards import ShardFile
from bert_jax.data.shuffle import shuffled
from bert_jax.errors import UserError

Batch = dict[str, np.ndarray]

# Of a split; a process may have some 1,000 files open, and there are phases and splits.
_OPEN_SHARDS = 256
HELDOUT_SEED = 0  # every run evaluates on the same rows


class Rows:
    """Random access to one split of a folder of rows.

    Attributes:
        manifest: the folder's.
        len(): rows in the split.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        split: str,
        skip: Callable[[str], None] | None = None,
    ):
        """Opens `split` ("train" or "heldout").

        Args:
            folder: of rows.
            split: which.
            skip: is told of each damaged record, once, from whatever thread reads it; the record
                is then read as a row of padding. Without it that is an error.

        Raises:
            UserError: not a folder of rows, or a shard that is missing, cut short or unreadable.
        """
        self._folder, self._skip = pathlib.Path(folder), skip
        self._told: set[int] = set()
        self._telling = threading.Lock()
        self.manifest: Manifest = read_manifest(folder)
        self._shards: tuple[Shard, ...] = getattr(self.manifest, split).shards
        for shard in self._shards:
            self._check_size(shard)
        self._format: RowFormat = self.manifest.format
        self._starts = np.cumsum([0] + [shard.rows for shard in self._shards])
        self._source = self._open(self._shards)
        if len(self._source) != len(self):
            raise UserError(
                f"{folder}: the shards of {split} hold {len(self._source)} rows, the manifest says "
                f"{len(self)}; prepare the rows again"
            )
        # Few are open at a time; what is dropped is closed once nobody reads from it.
        self._file = functools.lru_cache(_OPEN_SHARDS)(self._directly)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _check_size(self, shard: Shard) -> None:
        path = self._folder / shard.name
        try:
            with open(path, "rb") as file:  # too many open ones, for one, are no damage
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise UserError(f"cannot read the shard {path}: {files.describe(error)}") from None
        if size != shard.bytes:
            raise UserError(
                f"the shard {path} has {size} bytes, its manifest says {shard.bytes}: "
                "it is cut short or altered; prepare the rows again"
            )

    def _open(self, shards: Sequence[Shard]) -> Any:
        from grain.sources import ArrayRecordDataSource

        paths = [str(self._folder / shard.name) for shard in shards]
        try:
            # Grain does without a path when there is nothing to read.
            return ArrayRecordDataSource(paths) if paths else []
        except Exception as error:  # of many kinds, and silent about which file
            if len(shards) > 1:
                for shard in shards:
                    self._open([shard])
            raise UserError(
                f"cannot open the shard {paths[0]} ({' '.join(str(error).split())}): its index is "
                "damaged; prepare the rows again"
            ) from None

    def _directly(self, shard: int) -> ShardFile:
        return ShardFile(self._folder / self._shards[shard].name, self._format.dtype.itemsize)

    def _records(self, indices: Sequence[int] | Int[np.ndarray, " rows"]) -> list[bytes]:
        """As they are on disk, if they are where they are looked for."""
        shards = np.searchsorted(self._starts, indices, "right") - 1
        numbers = indices - self._starts[shards]
        where = list(zip(shards.tolist(), numbers.tolist(), strict=True))
        for shard, number in where:
            self._file(shard).expect(number)
        return [self._file(shard).read(number) for shard, number in where]

    def verify(self) -> None:
        """Reads every shard once and compares its SHA-256 with the manifest's.

        An altered shard of the right size is told where damaged records are skipped.

        Raises:
            UserError: names the altered file.
        """
        with concurrent.futures.ThreadPoolExecutor() as pool:  # hashing releases the GIL
            digests = pool.map(files.sha256, [self._folder / s.name for s in self._shards])
            for shard, digest in zip(self._shards, digests, strict=True):
                if digest == shard.sha256:
                    continue
                altered = (
                    f"the shard {self._folder / shard.name} fails its checksum: it was altered"
                )
                if self._skip is None:
                    raise UserError(f"{altered}; prepare the rows again")
                self._skip(f"{altered}; records that are damaged will be skipped")

    def read(self, indices: Sequence[int] | Int[np.ndarray, " rows"]) -> Batch:
        """The rows at `indices` as arrays (`RowFormat.decode`).

        Raises:
            UserError: a record is damaged and not to be skipped; names its shard and record. Its
                shard cannot be opened or is cut short, which is an error always.
        """
        try:
            return self._format.decode(self._records(indices))
        except (OSError, ValueError):  # the library, which is slow, finds the culprits one by one
            rows = [self._read_or_skip(int(index)) for index in indices]
            return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _read_or_skip(self, index: int) -> Batch:
        try:
            return self._format.decode([self._source[index]])
        except Exception as error:
            number = int(np.searchsorted(self._starts, index, "right")) - 1
            shard = self._shards[number]
            self._check_size(shard)
            damaged = (
                f"record {index - self._starts[number]} of the shard {self._folder / shard.name} is "
                f"damaged ({' '.join(str(error).split())})"
            )
            if self._skip is None:
                raise UserError(f"{damaged}; prepare the rows again") from None
        with self._telling:
            if index not in self._told:
                self._told.add(index)
                self._skip(f"{damaged}; skipped it: a row of padding is in its place")
        return self.empty(1)

    def empty(self, rows: int) -> Batch:
        """`rows` rows of padding."""
        array = self._format.seal(self._format.empty(rows))
        return self._format.decode(self._format.encode(array))


class _Batches:
    """This process's slice of every global batch, by step; what Grain reads ahead from."""

    def __init__(
        self, rows: Rows, batch_size: int, seed: int, steps: int, process: int, processes: int
    ):
        self._rows, self._seed, self._steps = rows, seed, steps
        self._batch_size, self._local = batch_size, batch_size // processes
        self._first = process * self._local

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Batch:
        first = step * self._batch_size + self._first
        places = np.arange(first, first + self._local)
        return self._rows.read(shuffled(places, len(self._rows), self._seed))


def batches(
    rows: Rows,
    batch_size: int,
    seed: int,
    first_step: int,
    end_step: int,
    process: int = 0,
    processes: int = 1,
) -> Iterator[Batch]:
    """This process's part of the batches of steps [first_step, end_step), read ahead in threads.

    Args:
        rows: where from.
        batch_size: rows over all processes; `processes` divides it.
        seed: of the order.
        first_step, end_step: counted from the start of the rows' first epoch.
        process, processes: which slice of how many.
    """
    import grain

    source = _Batches(rows, batch_size, seed, end_step, process, processes)
    dataset = grain.MapDataset.source(source)[first_step:]
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def heldout_batches(
    rows: Rows, batch_size: int, most_rows: int, process: int = 0, processes: int = 1
) -> Iterator[Batch]:
    """This process's part of a fixed choice of at most `most_rows` rows (0: all), each once.

    The last batch is filled up with rows of padding, which weigh nothing.
    """
    total = min(most_rows or len(rows), len(rows))
    local = batch_size // processes
    for first in range(0, total, batch_size):
        places = np.arange(first + process * local, min(first + (process + 1) * local, total))
        batch = rows.read(shuffled(places, len(rows), HELDOUT_SEED))
        if len(places) < local:
            padding = rows.empty(local - len(places))
            batch = {k: np.concatenate([batch[k], v]) for k, v in padding.items()}
        yield batch
