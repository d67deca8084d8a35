"""Read checkpoints of TensorFlow 1 (and 2) without TensorFlow.

`PREFIX.index` is a table in LevelDB's format (github.com/google/leveldb, doc/table_format.md) from
tensor names to BundleEntryProto messages (tensorflow/core/protobuf/tensor_bundle.proto), and
`PREFIX.data-0000i-of-0000n` contain the tensors' bytes. The checksums of blocks and tensors are
verified. The files may be in a folder or a zip archive. `read_bert` gives variables of Google's BERT
the names of transformers.
"""

import contextlib
import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from importlib.resources.abc import Traversable
from typing import IO, Any, NamedTuple

import google_crc32c
import ml_dtypes
import numpy as np
from google.protobuf import empty_pb2, unknown_fields
from google.protobuf.message import DecodeError

from bert_jax.convert.weights import read_json
from bert_jax.errors import UserError
from bert_jax.storage.files import format_error

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
# The index of BERT Large with its optimizer takes 60 KB. Bounded because keys are prefix-compressed:
# a small damaged file could otherwise fill the memory.
_INDEX_BYTES = 1 << 24
_NAME_BYTES = 1000
_PIECE_BYTES = 1 << 22


class Entry(NamedTuple):
    """Index entry of a tensor.

    Attributes:
        dtype: None for unsupported types (strings, resources, ...).
        shape: shape of the tensor.
        shard: index of its data file, from 0.
        shards: number of data files.
        offset: position in the data file, in bytes.
        size: size in bytes.
        crc32c: masked checksum of its bytes.
        sliced: whether it is a partitioned variable, which is not supported.
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
    """Read the index of the checkpoint `folder/prefix`: its tensors by name."""
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
            raise ValueError("big-endian files are not supported")
        if _last(_fields(_last(header, 3, b"")), 2) > _VERSION:
            raise ValueError("newer versions of the format are not supported")
        return {name.decode(): _entry(record, shards) for name, record in records.items()}


def read(
    folder: Traversable, prefix: str, select: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """Return by name the tensors of the checkpoint `folder/prefix` whose names satisfy `select`.

    The bytes of other tensors, such as the optimizer's slots, are not read.
    """
    chosen = {name: entry for name, entry in entries(folder, prefix).items() if select(name)}
    index = folder / f"{prefix}.index"
    with _reading(index):
        for name, entry in chosen.items():
            _check(name, entry)
    tensors = {}
    for shard, shards in sorted({(entry.shard, entry.shards) for entry in chosen.values()}):
        path = folder / f"{prefix}.data-{shard:05d}-of-{shards:05d}"
        # In order of offset, to read a compressed member of a zip archive once.
        inside = sorted((e.offset, name) for name, e in chosen.items() if e.shard == shard)
        with _reading(path), path.open("rb") as file:
            end = 0
            for offset, name in inside:
                if offset < end:
                    raise ValueError(f"tensor {name!r} overlaps the previous one")
                end = offset + chosen[name].size
                tensors[name] = _tensor(file, name, chosen[name])
    return {name: tensors[name] for name in chosen}


@contextlib.contextmanager
def _reading(path: Any) -> Iterator[None]:
    """Convert the exceptions that damaged bytes can raise to a `UserError` with the file's name."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UserError(
            f"{path} does not exist; a TensorFlow checkpoint consists of PREFIX.index and all "
            "PREFIX.data-* files"
        ) from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        reason = format_error(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot read {path}: {reason or 'it is truncated'}") from None
    except (ValueError, IndexError, OverflowError, MemoryError, struct.error, DecodeError) as error:
        reason = str(error) if type(error) is ValueError else "it is damaged"
        raise UserError(
            f"{path} is not a readable TensorFlow checkpoint: {reason}; "
            "if it should be one, download or copy it again"
        ) from None


def _masked_crc32c(crc: int) -> int:
    """Return the checksum as stored: rotated, plus a constant (leveldb, util/crc32c.h)."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# --- The table ---


def _records(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table, in order."""
    if len(table) > _INDEX_BYTES:
        raise ValueError(f"it is larger than {_INDEX_BYTES >> 20} MB")
    footer = table[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ValueError("it lacks the footer of an index")
    _, at = _handle(footer, 0)  # the metaindex, which is empty
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
    """Return a block's (offset, size), and the position after the handle."""
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return (offset, size), at


def _block(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block.

    A block has entries, restart points and their count; kind and checksum follow it.
    """
    block, trailer = table[offset : offset + size], table[offset + size : offset + size + 5]
    if len(block) < size or len(trailer) < 5:
        raise ValueError("a block exceeds the file")
    kind, crc = struct.unpack("<BI", trailer)
    if _masked_crc32c(google_crc32c.value(block + trailer[:1])) != crc:
        raise ValueError(f"wrong checksum of the block at byte {offset}")
    if kind != 0:
        raise ValueError("Snappy compression is not supported")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")
    if size < 4 or end < 0:
        raise ValueError("a block has no entries")
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at)
        unshared, at = _varint(block, at)
        length, at = _varint(block, at)
        if shared > len(key) or at + unshared + length > end:
            raise ValueError("an entry exceeds its block")
        if shared + unshared > _NAME_BYTES:
            raise ValueError(f"a name is longer than {_NAME_BYTES} bytes")
        key = key[:shared] + block[at : at + unshared]
        at += unshared + length
        yield key, block[at - length : at]


# --- Protocol buffers ---


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer below 2**64, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("an integer is too long")


def _fields(message: Any) -> dict[int, list[Any]]:
    """Return a message's values by field number: integers, or bytes of length-delimited fields."""
    if not isinstance(message, bytes):
        raise ValueError("a field of a message has the wrong type")
    fields: dict[int, list[Any]] = {}
    for field in unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message)):
        fields.setdefault(field.field_number, []).append(field.data)
    return fields


def _last(fields: dict[int, list[Any]], number: int, default: Any = 0) -> Any:
    """Return the last value of a field, which must have the type of its default."""
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


# --- The data ---


def _check(name: str, entry: Entry) -> None:
    """Raise ValueError if an entry is not supported or inconsistent."""
    if entry.dtype is None:
        types = ", ".join(dtype.name for dtype in _DTYPES.values())
        raise ValueError(f"tensor {name!r} has an unsupported type; supported: {types}")
    if entry.sliced:
        raise ValueError(f"tensor {name!r} is partitioned, which is not supported")
    if entry.shard >= entry.shards:
        raise ValueError(f"tensor {name!r} is in data file {entry.shard} of {entry.shards}")
    # Negative numbers are decoded as values of 2**63 or more.
    if max(entry.offset, entry.size, *entry.shape, 0) >= 1 << 63 or len(entry.shape) > 32:
        raise ValueError(f"tensor {name!r} has an impossible shape, size or offset")
    if math.prod(entry.shape) * entry.dtype.itemsize != entry.size:
        raise ValueError(
            f"tensor {name!r} has {entry.size} bytes, which does not match its shape "
            f"{list(entry.shape)} of {entry.dtype.name}"
        )


def _tensor(file: io.BufferedIOBase | IO[bytes], name: str, entry: Entry) -> np.ndarray:
    """Read a tensor in pieces, to never allocate more than the file has."""
    file.seek(entry.offset)
    data, crc = bytearray(), 0
    while len(data) < entry.size:
        piece = file.read(min(_PIECE_BYTES, entry.size - len(data)))
        if not piece:
            raise ValueError(f"truncated inside or before tensor {name!r}")
        data += piece
        crc = google_crc32c.extend(crc, piece)
    if _masked_crc32c(crc) != entry.crc32c:
        raise ValueError(f"wrong checksum of tensor {name!r}")
    return np.frombuffer(data, entry.dtype).reshape(entry.shape)


# --- Google's BERT ---

# Names of variables without "/" or of another layout → canonical names (`families.BERT`).
_NAMES = {
    "cls/predictions/output_bias": "cls.predictions.bias",
    "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
    "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
}


def read_bert(
    folder: Traversable, prefix: str
) -> tuple[dict[str, Any], dict[str, np.ndarray], list[Traversable]]:
    """Return bert_config.json, the tensors by canonical name, and the files that hold them."""
    config = folder / "bert_config.json"
    if not config.is_file():
        raise UserError(f"no {config.name} next to {prefix}.index")
    settings, tensors = read_json(config), {}
    for name, value in read(folder, prefix, _is_weight).items():
        new = _NAMES.get(name) or re.sub(r"layer_(\d+)", r"layer.\1", name).replace("/", ".")
        if new.endswith("_embeddings"):
            new += ".weight"
        elif new.endswith(".kernel"):
            new, value = f"{new.removesuffix('kernel')}weight", value.T
        tensors[new] = value
    if "classifier.weight" in tensors:  # run_classifier.py's
        settings["architectures"] = ["BertForSequenceClassification"]
    used = [f for f in folder.iterdir() if f.name.startswith(f"{prefix}.data-")]
    return settings, tensors, sorted(used, key=lambda f: f.name)


def _is_weight(name: str) -> bool:
    """Whether a variable is not part of the optimizer's state."""
    return not re.search(
        r"(/|_)(adam|lamb)_[mv](_\d+)?$|^global_step$|^(beta|gamma)\d_power$", name
    )
