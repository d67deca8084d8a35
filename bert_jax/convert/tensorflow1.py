"""Checkpoints of TensorFlow 1 (and 2), read without TensorFlow.

`PREFIX.index` is a table in LevelDB's format (github.com/google/leveldb, doc/table_format.md) from
tensor names to BundleEntryProto messages (tensorflow/core/protobuf/tensor_bundle.proto), and
`PREFIX.data-0000i-of-0000n` are the tensors' bytes. Every checksum, of a block and of a tensor, is
checked. The files may lie in a folder or inside a zip archive.
"""

import contextlib
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

import google_crc32c
import ml_dtypes
import numpy as np

from bert_jax.errors import UserError
from bert_jax.files import describe

# tensorflow/core/framework/types.proto
_DTYPES = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    9: np.dtype("<i8"),
    14: np.dtype(ml_dtypes.bfloat16),
    19: np.dtype("<f2"),
}
_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_VERSION = 1  # kTensorBundleVersion
# An index of BERT Large with its optimizer takes 60 KB. The bounds keep prefix-compressed keys,
# which a few bytes can make long, from filling the memory.
_INDEX_BYTES = 1 << 24
_NAME_BYTES = 1000
_PIECE_BYTES = 1 << 22


class Entry(NamedTuple):
    """What the index says of a tensor.

    Attributes:
        dtype: None for one that cannot be read (strings, resources, ...).
        shape: in elements.
        shard: which data file holds it, counted from 0 of `shards`.
        offset, size: where in that file, in bytes.
        crc32c: of those bytes, masked.
        sliced: a part of a partitioned variable, which cannot be read.
    """

    dtype: np.dtype | None
    shape: tuple[int, ...]
    shard: int
    shards: int
    offset: int
    size: int
    crc32c: int
    sliced: bool


def entries(folder: Traversable, prefix: str) -> dict[str, Entry]:
    """The tensors of the checkpoint `folder/prefix` by name, from its index alone.

    Raises:
        UserError: there is no such index, it is damaged, or it is no TensorFlow checkpoint.
    """
    path = folder / f"{prefix}.index"
    with _reading(path):
        with path.open("rb") as file:
            table = file.read(_INDEX_BYTES + 1)
        records = dict(_records(table))
        if b"" not in records:
            raise ValueError("it has no header")
        header = _fields(records.pop(b""))
        shards = _last(header, 1)
        if _last(header, 2) != 0:
            raise ValueError("its numbers are big-endian, which this program does not read")
        if _last(_fields(_last(header, 3, b"")), 2) > _VERSION:
            raise ValueError("a newer version of the format, which this program does not read")
        return {name.decode(): _entry(record, shards) for name, record in records.items()}


def read(
    folder: Traversable, prefix: str, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """The tensors of the checkpoint `folder/prefix` whose names are `wanted`, by name.

    No other tensor's bytes are read, so an optimizer's slots cost nothing.

    Raises:
        UserError: a file is missing, truncated or damaged, or a wanted tensor is of a type that
            cannot be read. The line names the file and the tensor.
    """
    chosen = {name: entry for name, entry in entries(folder, prefix).items() if wanted(name)}
    index = folder / f"{prefix}.index"
    with _reading(index):
        for name, entry in chosen.items():
            _check(name, entry)
    tensors = {}
    for shard, shards in sorted({(entry.shard, entry.shards) for entry in chosen.values()}):
        path = folder / f"{prefix}.data-{shard:05d}-of-{shards:05d}"
        # In order of offset, so that a compressed file inside a zip is read through once.
        inside = sorted((e.offset, name) for name, e in chosen.items() if e.shard == shard)
        with _reading(path), path.open("rb") as file:
            end = 0
            for offset, name in inside:
                if offset < end:
                    raise ValueError(f"tensor {name!r} overlaps the one before it")
                end = offset + chosen[name].size
                tensors[name] = _tensor(file, name, chosen[name])
    return {name: tensors[name] for name in chosen}


@contextlib.contextmanager
def _reading(path: Any) -> Iterator[None]:
    """Turns what damaged bytes can raise into a `UserError` that names the file."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UserError(
            f"{path} does not exist; a TensorFlow checkpoint is PREFIX.index "
            "and all its PREFIX.data-* files together"
        ) from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        reason = describe(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot read {path}: {reason or 'it is truncated'}") from None
    except (ValueError, IndexError, OverflowError, MemoryError, struct.error) as error:
        reason = str(error) if type(error) is ValueError else "it is damaged"
        raise UserError(
            f"{path} is not a readable TensorFlow checkpoint: {reason}; "
            "if it should be one, download or copy it again"
        ) from None


def _masked_crc32c(crc: int) -> int:
    """As stored: rotated and shifted (leveldb, util/crc32c.h), so a crc of crcs stays sound."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# The table.


def _records(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a whole table, in order."""
    if len(table) > _INDEX_BYTES:
        raise ValueError(f"it is longer than {_INDEX_BYTES >> 20} MB, too long for an index")
    footer = table[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ValueError("it does not end as an index does")
    _, at = _handle(footer, 0)  # of the metaindex, which holds nothing here
    index, _ = _handle(footer, at)
    last_end, last_key = 0, None
    for _, value in _block(table, *index):
        (offset, size), _ = _handle(value, 0)
        if offset < last_end:
            raise ValueError("its blocks overlap")
        last_end = offset + size
        for key, record in _block(table, offset, size):
            if last_key is not None and key <= last_key:
                raise ValueError("its names are out of order")
            last_key = key
            yield key, record


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """A block's (offset, size), and where reading goes on."""
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return (offset, size), at


def _block(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block: its entries, restart points, their count; then kind and crc."""
    block, trailer = table[offset : offset + size], table[offset + size : offset + size + 5]
    if len(block) < size or len(trailer) < 5:
        raise ValueError("a block reaches beyond its end")
    kind, crc = struct.unpack("<BI", trailer)
    if _masked_crc32c(google_crc32c.value(block + trailer[:1])) != crc:
        raise ValueError(f"the checksum of the block at byte {offset} does not hold")
    if kind != 0:
        raise ValueError("it is compressed (snappy), which this program does not read")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")
    if size < 4 or end < 0:
        raise ValueError("a block has no entries")
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at)
        unshared, at = _varint(block, at)
        length, at = _varint(block, at)
        if shared > len(key) or at + unshared + length > end:
            raise ValueError("a block's entry reaches beyond it")
        if shared + unshared > _NAME_BYTES:
            raise ValueError(f"a name is longer than {_NAME_BYTES} bytes")
        key = key[:shared] + block[at : at + unshared]
        at += unshared + length
        yield key, block[at - length : at]


# Protocol buffers, as much as three messages need.


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer below 2**64, and where reading goes on."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("it holds a number that does not end")


def _fields(message: Any) -> dict[int, list[Any]]:
    """A message's values by field number: integers, and bytes for what has a length."""
    fields: dict[int, list[Any]] = {}
    if not isinstance(message, bytes):
        raise ValueError("a field of a message has the wrong type")
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(message, at)
        else:
            if wire == 2:
                length, at = _varint(message, at)
            elif wire in (1, 5):
                length = 8 if wire == 1 else 4
            else:
                raise ValueError("a message has a field of an unknown kind")
            value = message[at : at + length]
            if len(value) < length:
                raise ValueError("a message is cut short")
            at += length
            if wire != 2:
                value = int.from_bytes(value, "little")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _last(fields: dict[int, list[Any]], number: int, default: Any = 0) -> Any:
    """A field that occurs once: its last value counts, and it has the type of its default."""
    value = fields.get(number, [default])[-1]
    if type(value) is not type(default):
        raise ValueError("a field of a message has the wrong type")
    return value


def _entry(record: bytes, shards: int) -> Entry:
    fields = _fields(record)
    dimensions = _fields(_last(fields, 2, b"")).get(2, [])
    return Entry(
        dtype=_DTYPES.get(_last(fields, 1)),
        shape=tuple(_last(_fields(dimension), 1) for dimension in dimensions),
        shard=_last(fields, 3),
        shards=shards,
        offset=_last(fields, 4),
        size=_last(fields, 5),
        crc32c=_last(fields, 6),
        sliced=7 in fields,
    )


# The data.


def _check(name: str, entry: Entry) -> None:
    """Refuses an entry that cannot be read or contradicts itself."""
    if entry.dtype is None:
        types = ", ".join(dtype.name for dtype in _DTYPES.values())
        raise ValueError(f"tensor {name!r} is of a type that cannot be read, only {types} can")
    if entry.sliced:
        raise ValueError(f"tensor {name!r} is stored in slices, which this program does not read")
    if entry.shard >= entry.shards:
        raise ValueError(f"tensor {name!r} is in data file {entry.shard} of {entry.shards}")
    # A negative number arrives as one past 2**63.
    if max(entry.offset, entry.size, *entry.shape, 0) >= 1 << 63 or len(entry.shape) > 32:
        raise ValueError(f"tensor {name!r} has an impossible shape, size or offset")
    if math.prod(entry.shape) * entry.dtype.itemsize != entry.size:
        raise ValueError(
            f"tensor {name!r} has {entry.size} bytes, which is not the size of its shape "
            f"{list(entry.shape)} of {entry.dtype.name}"
        )


def _tensor(file: io.BufferedIOBase, name: str, entry: Entry) -> np.ndarray:
    """Reads piece by piece, so a size that the file does not hold is never allocated."""
    file.seek(entry.offset)
    data, crc = bytearray(), 0
    while len(data) < entry.size:
        piece = file.read(min(_PIECE_BYTES, entry.size - len(data)))
        if not piece:
            raise ValueError(f"it is truncated, it ends inside or before tensor {name!r}")
        data += piece
        crc = google_crc32c.extend(crc, piece)
    if _masked_crc32c(crc) != entry.crc32c:
        raise ValueError(f"the checksum of tensor {name!r} does not hold")
    return np.frombuffer(data, entry.dtype).reshape(entry.shape)
