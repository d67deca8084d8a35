"""Read PyTorch checkpoints (`pytorch_model.bin`) without PyTorch and without executing pickles.

A pickle is a program. This module interprets its instructions, as decoded by `pickletools`, on a
stack of plain values. The only functions that it may call are stand-ins for those of PyTorch that
build tensors; anything else is an error. Nothing is imported and no attribute is set.

There are two formats (torch/serialization.py, `_save` and `_legacy_save`): since PyTorch 1.6 a zip
archive with `data.pkl` and a member for each storage; before, pickles followed by raw storages.
"""

import contextlib
import io
import math
import pickletools
import zipfile
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from bert_jax.errors import UserError
from bert_jax.storage.files import format_error

_STORAGES = {
    "torch.DoubleStorage": np.dtype("<f8"),
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.HalfStorage": np.dtype("<f2"),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.LongStorage": np.dtype("<i8"),
    "torch.IntStorage": np.dtype("<i4"),
    "torch.ShortStorage": np.dtype("<i2"),
    "torch.CharStorage": np.dtype("i1"),
    "torch.ByteStorage": np.dtype("u1"),
    "torch.BoolStorage": np.dtype("?"),
    "torch.storage.UntypedStorage": np.dtype("u1"),
}
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_PIECE_BYTES = 1 << 22
# Maximum ratio of the tensors' size to the file's; tied weights share storages.
_SHARING = 8


class _Bounded:
    """File wrapper for `pickletools` that never reads past the end.

    `pickletools` reads as many bytes as a pickle declares, and a buffered file would allocate them
    before it reaches its end.
    """

    def __init__(self, stream: IO[bytes], end: int):
        self._stream, self._end = stream, end
        self.readline = stream.readline

    def read(self, size: int) -> bytes:
        return self._stream.read(min(size, self._end - self._stream.tell()))


class _Name(NamedTuple):
    """Class or function that a pickle names."""

    name: str


class _Storage(NamedTuple):
    """Flat array in the file; `start` is nonzero in views saved by PyTorch before 0.4."""

    key: str
    dtype: np.dtype
    elements: int
    start: int


class _Tensor(NamedTuple):
    """View of a storage; offset and strides in elements, checked by `_array`."""

    storage: _Storage
    offset: int
    shape: tuple
    strides: tuple


def read(file: Traversable) -> dict[str, np.ndarray]:
    """Return the tensors of a state dict by name. Tensors of one storage share memory.

    The state dict is the file's value or the only state dict among its entries, as in
    `{"model": state_dict, "epoch": 3}`. Other tensors, such as the optimizer's, are not read.
    """
    with _reading(file), file.open("rb") as stream:
        file_bytes = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        is_zip = stream.read(4) == b"PK\3\4"
        stream.seek(0)
        load = _load_zip if is_zip else _load_legacy
        tensors, storages = load(stream, file_bytes)
        arrays = {
            name: _array(name, tensor, storages[tensor.storage.key], file_bytes)
            for name, tensor in tensors.items()
        }
        # Later copies do not share memory.
        if sum(array.nbytes for array in arrays.values()) > _SHARING * file_bytes:
            raise ValueError("its tensors share more bytes than those of any model")
        return arrays


@contextlib.contextmanager
def _reading(file: Any) -> Iterator[None]:
    """Convert the exceptions that damaged bytes can raise to a `UserError` with the file's name."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {file}: {format_error(error)}") from None
    except (
        zipfile.BadZipFile,
        ValueError,
        LookupError,
        EOFError,
        RuntimeError,
        OverflowError,
        MemoryError,
    ) as error:
        is_readable = not isinstance(error, LookupError | OverflowError | UnicodeError)
        reason = ascii(str(error))[1:-1][:300] if is_readable and str(error) else "it is damaged"
        raise UserError(
            f"{file} is not a readable PyTorch checkpoint: {reason}; "
            "download it again, or ask its owner for model.safetensors"
        ) from None


# --- The two formats ---


def _load_zip(
    stream: IO[bytes], file_bytes: int
) -> tuple[dict[str, _Tensor], dict[str, np.ndarray]]:
    with zipfile.ZipFile(stream) as archive:
        members = {member.filename: member for member in archive.infolist()}
        pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ValueError("a zip archive without data.pkl")
        folder = pickles[0].removesuffix("data.pkl")

        def content(name: str) -> np.ndarray:
            member = members.get(folder + name)
            if member is None:
                raise ValueError(f"no member {name}")
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > file_bytes:
                raise ValueError(f"its member {name} is compressed, which PyTorch never does")
            with archive.open(member) as part:
                return _take(part, member.file_size)

        if folder + "byteorder" in members and content("byteorder").tobytes() != b"little":
            raise ValueError("big-endian files are not supported")
        tensors = _state_dict(_unpickle(io.BytesIO(content("data.pkl").tobytes())))
        storages: dict[str, np.ndarray] = {}
        for name, tensor in tensors.items():
            key = tensor.storage.key
            if key not in storages:
                try:
                    storages[key] = content(f"data/{key}")
                except (ValueError, EOFError, zipfile.BadZipFile) as error:
                    raise ValueError(f"tensor {name!r}: {error}") from None
        return tensors, storages


def _load_legacy(
    stream: IO[bytes], file_bytes: int
) -> tuple[dict[str, _Tensor], dict[str, np.ndarray]]:
    pickles = _Bounded(stream, file_bytes)
    try:
        magic, protocol = _unpickle(pickles), _unpickle(pickles)
    except (ValueError, LookupError):
        magic = protocol = None
    if magic != _LEGACY_MAGIC or protocol != _LEGACY_PROTOCOL:
        raise ValueError("it lacks the header of a PyTorch checkpoint")
    match _unpickle(pickles):
        case {"little_endian": True}:
            pass
        case _:
            raise ValueError("big-endian files are not supported")
    described: dict[str, _Storage] = {}
    tensors = _state_dict(_unpickle(pickles, described))
    needed = {tensor.storage.key: name for name, tensor in tensors.items()}
    storages = {}
    keys = _unpickle(pickles)
    for key in keys if isinstance(keys, list) else ():
        if not isinstance(key, str) or key not in described:
            raise ValueError("it contains a storage that no tensor uses")
        elements = int.from_bytes(stream.read(8), "little")
        size = elements * described[key].dtype.itemsize
        if stream.tell() + size > file_bytes:
            what = f"tensor {needed[key]!r}" if key in needed else "another tensor"
            raise ValueError(f"truncated or damaged at {what}")
        if key in needed:
            storages[key] = _take(stream, size)
        else:
            stream.seek(size, io.SEEK_CUR)
    for key, name in needed.items():
        if key not in storages:
            raise ValueError(f"the data of tensor {name!r} is missing")
    return tensors, storages


def _take(stream: Any, size: int) -> np.ndarray:
    """Read `size` bytes; the caller has checked that the file is long enough."""
    data = np.empty(size, np.uint8)
    for start in range(0, size, _PIECE_BYTES):
        piece = data.data[start : start + _PIECE_BYTES]
        if stream.readinto(piece) != len(piece):
            raise EOFError("it is truncated")
    return data


def _state_dict(value: Any) -> dict[str, _Tensor]:
    """Return the only dictionary of tensors by name: `value` or one of its entries."""

    def tensors(value: Any) -> dict[str, _Tensor]:
        items = value.items() if isinstance(value, dict) else ()
        return {k: v for k, v in items if isinstance(k, str) and isinstance(v, _Tensor)}

    if state_dict := tensors(value):
        return state_dict
    entries = value.items() if isinstance(value, dict) else ()
    candidates = {key: named for key, entry in entries if (named := tensors(entry))}
    if not candidates:
        raise ValueError("it contains no state dict (tensors by name)")
    if len(candidates) > 1:
        raise ValueError(f"it contains several state dicts ({', '.join(map(repr, candidates))})")
    return next(iter(candidates.values()))


def _array(name: str, tensor: _Tensor, data: np.ndarray, file_bytes: int) -> np.ndarray:
    """Return the view of `data` (bytes) that `tensor` describes, checked against its bounds."""
    (_, dtype, elements, start), offset, shape, strides = tensor
    numbers = (offset, start, *shape, *strides)
    if len(shape) != len(strides) or len(shape) > 32:
        raise ValueError(f"tensor {name!r} has an impossible shape")
    if not all(isinstance(n, int) and 0 <= n < 1 << 63 for n in numbers):
        raise ValueError(f"tensor {name!r} has an impossible shape, offset or stride")
    if len(data) != elements * dtype.itemsize:
        raise ValueError(f"the storage of tensor {name!r} has the wrong size")
    size = math.prod(shape)
    if size == 0:
        return np.zeros(shape, dtype)
    # An expanded tensor (stride 0) has more elements than its storage, which a copy allocates.
    end = start + offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    if end > elements or size * dtype.itemsize > file_bytes:
        raise ValueError(f"tensor {name!r} reaches beyond its storage")
    steps = [s * dtype.itemsize if n > 1 else 0 for n, s in zip(shape, strides, strict=True)]
    return np.ndarray(shape, dtype, data.data, (start + offset) * dtype.itemsize, steps)


# --- The pickle ---

_CONSTANTS = frozenset(
    "NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8".split()
)
_FIXED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _unpickle(stream: Any, storages: dict[str, _Storage] | None = None) -> Any:
    """Return the value of the next pickle, built from plain values and the three classes above.

    Args:
        stream: a `BytesIO` or `_Bounded`; left at the end of the pickle.
        storages: receives the storages of the pickle by key.

    Raises:
        ValueError, IndexError: the pickle is damaged or uses anything else.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since(start: int) -> list[Any]:
        if not 0 <= start <= len(stack):
            raise ValueError("its pickle is damaged")
        items = stack[start:]
        del stack[start:]
        return items

    argument: Any
    for opcode, argument, _ in pickletools.genops(stream):
        match opcode.name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case name if name in _CONSTANTS:
                stack.append(_FIXED.get(name, argument))
            case name if name in _TUPLES:
                stack.append(tuple(since(len(stack) - _TUPLES[name])))
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(since(marks.pop())))
            case "EMPTY_LIST":
                stack.append([])
            case "LIST":
                stack.append(since(marks.pop()))
            case "APPEND" | "APPENDS" as name:
                items = since(len(stack) - 1 if name == "APPEND" else marks.pop())
                _must_be(list, stack[-1]).extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "DICT":
                items = since(marks.pop())
                stack.append({})
                _set(stack[-1], items)
            case "SETITEM" | "SETITEMS" as name:
                items = since(len(stack) - 2 if name == "SETITEM" else marks.pop())
                _set(_must_be(dict, stack[-1]), items)
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_global(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(_global(*since(len(stack) - 2)))
            case "BINPERSID":
                storage = _storage(stack.pop())
                if storages is not None:
                    storages[storage.key] = storage
                stack.append(storage)
            case "REDUCE":
                function, arguments = since(len(stack) - 2)
                stack.append(_call(_must_be(_Name, function).name, _must_be(tuple, arguments)))
            case "BUILD":
                # An OrderedDict's attributes (_metadata) hold no tensors.
                stack.pop()
                _must_be(dict, stack[-1])
            case name:
                raise ValueError(f"its pickle uses {name}, which is not allowed")
    return stack.pop()


def _must_be(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError("its pickle is damaged")
    return value


def _set(target: dict, items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Hashing nested tuples can take exponential time.
        if not isinstance(key, str | int | float | None):
            raise ValueError(
                "its pickle has a dictionary with keys that are neither strings nor numbers"
            )
        target[key] = value


def _global(module: Any, name: Any) -> _Name:
    """Return a global, if the pickle may name it."""
    full = f"{_must_be(str, module)}.{_must_be(str, name)}"
    if full not in _STORAGES and full not in _CALLS:
        raise ValueError(f"its pickle names {full[:100]}, which is not allowed")
    return _Name(full)


def _storage(identity: Any) -> _Storage:
    """Return the storage of a persistent id."""
    match identity:
        case ("storage", _Name(name), str(key), str(), int(elements), *view) if name in _STORAGES:
            match view:
                case [] | [None]:
                    return _Storage(key, _STORAGES[name], elements, 0)
                case [(str(), int(start), int())]:
                    return _Storage(key, _STORAGES[name], elements, start)
    raise ValueError("its pickle refers to something that is not a storage")


def _call(name: str, arguments: tuple) -> Any:
    if name not in _CALLS:
        raise ValueError(f"its pickle calls {name}, which is not allowed")
    return _CALLS[name](arguments)


def _rebuild_tensor(arguments: tuple) -> _Tensor:
    match arguments:
        case (_Storage() as storage, int(offset), tuple(shape), tuple(strides), *_):
            return _Tensor(storage, offset, shape, strides)
    raise ValueError("its pickle has an invalid tensor")


def _rebuild_parameter(arguments: tuple) -> _Tensor:
    match arguments:
        case (_Tensor() as tensor, *_):
            return tensor
    raise ValueError("its pickle has an invalid parameter")


def _size(arguments: tuple) -> tuple:
    match arguments:
        case (tuple(shape),):
            return shape
    raise ValueError("its pickle has an invalid shape")


def _ordered_dict(arguments: tuple) -> dict:
    if arguments:
        raise ValueError("its pickle builds an OrderedDict from arguments")
    return {}


# Functions that a pickle may call; each takes the tuple of arguments.
_CALLS = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch.nn.parameter.Parameter": _rebuild_parameter,
    "torch.Size": _size,
    "collections.OrderedDict": _ordered_dict,
}
