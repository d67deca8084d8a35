"""The weights of a Hugging Face folder: read safetensors and PyTorch files, and write safetensors.

The files may be in a folder or a zip archive. Weights that `write` wrote have a checksum for each
tensor in their metadata, which `read` verifies.
"""

import json
import pathlib
import zipfile
from collections.abc import Iterable, Mapping
from importlib.resources.abc import Traversable
from typing import Any

import google_crc32c
import numpy as np

from bert_jax.convert import pytorch
from bert_jax.convert.families import Settings, Tensors
from bert_jax.data.compressed import whole
from bert_jax.errors import UserError, shorten
from bert_jax.storage import files

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# The oldest folders use Google's name.
CONFIGS = ("config.json", "bert_config.json")
# What reading JSON of an unknown structure can raise.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
# Types of tensors that NumPy has.
_DTYPES = {"F64", "F32", "F16", "BF16", "BOOL"} | {f"{s}{n}" for s in "IU" for n in (8, 16, 32, 64)}


def first_file(folder: Traversable, names: Iterable[str]) -> Traversable | None:
    """Return the first of some files that a folder has."""
    return next((file for name in names if (file := folder / name).is_file()), None)


def read_bytes(file: Traversable) -> bytes:
    """Return the content of a small file."""
    with file.open("rb") as stream:
        return whole(stream, file.name)


def read_json(file: Traversable | None) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one for None."""
    if file is None:
        return {}
    try:
        value = json.loads(read_bytes(file))
    except (OSError, ValueError, RecursionError, zipfile.BadZipFile) as error:
        raise UserError(f"{file.name} cannot be read: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file.name} is not a JSON object")
    return value


def one_line(error: Exception) -> str:
    """Return the message of an exception in one line."""
    return " ".join(str(error).split())


def is_beside(name: Any) -> bool:
    """Whether a value is a plain file name, not a path to another folder."""
    if not isinstance(name, str) or "\0" in name or name != name.encode(errors="ignore").decode():
        return False
    return pathlib.PurePath(name).name == name and name not in ("", "..")


def read(folder: Traversable) -> tuple[Settings, Tensors, list[Traversable]]:
    """Return config.json, the tensors by name, and the files that hold them."""
    config, weights = first_file(folder, CONFIGS), first_file(folder, WEIGHTS)
    if config is None or weights is None:
        names = sorted(f.name for f in folder.iterdir())
        others = [n for n in names if n.endswith((".h5", ".msgpack", ".onnx", ".ot"))]
        lacking = CONFIGS[0] if config is None else " or ".join(WEIGHTS[::2])
        found = f" (only {', '.join(others)}, which are not supported)" if others else ""
        raise UserError(f"no checkpoint: it has no {lacking}{found}")
    settings, parts = read_json(config), [weights]
    if weights.name.endswith(".index.json"):
        parts = [folder / name for name in shards(weights)]
    tensors: Tensors = {}
    for part in parts:
        tensors |= pytorch.read(part) if part.name.endswith(".bin") else _safetensors(part)
    return settings, tensors, parts


def shards(index: Traversable) -> list[str]:
    """Return the names of the weight files that an index lists."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise UserError(f"{index.name} lists no files")
    for name in names.values():
        if not is_beside(name):
            raise UserError(f"{index.name} lists {name!r}, which is not a file in the same folder")
    return sorted(set(names.values()))


def _safetensors(file: Any) -> Tensors:
    import safetensors

    try:
        with safetensors.safe_open(file, "numpy") as opened:
            types = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
            unsupported = [f"{n} ({kind})" for n, kind in types.items() if kind not in _DTYPES]
            if unsupported:
                raise UserError(
                    f"{file.name} has tensors of types that are not supported: "
                    f"{shorten(unsupported)}; convert them to float32 or bfloat16"
                )
            tensors = {name: opened.get_tensor(name) for name in types}
            sums = json.loads((opened.metadata() or {}).get("crc32c", "{}"))
            if not isinstance(sums, dict):
                raise ValueError("its checksums are not a JSON object")
    except FileNotFoundError:
        raise UserError(f"{file.name} is missing") from None
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{file.name} is damaged: {_damage(file, error)}") from None
    for name, value in tensors.items():
        if name in sums and google_crc32c.value(value.tobytes()) != sums[name]:
            raise UserError(f"{file.name} is damaged: {name} fails its checksum")
    return tensors


def _damage(file: pathlib.Path, error: Exception) -> str:
    """Return what is wrong with a safetensors file: where it is cut, or the library's message."""
    with file.open("rb") as opened:
        data = opened.read(8)
        if data == b"version ":
            return "it is a Git LFS pointer; fetch the file with `git lfs pull`"
        length, size = int.from_bytes(data, "little"), file.stat().st_size
        if len(data) < 8 or length > size - 8:
            return f"its header of {length:,} bytes is truncated"
        try:
            header = json.loads(opened.read(length))
            ends = [(v["data_offsets"][1], k) for k, v in header.items() if k != "__metadata__"]
            cut = min((8 + length + end, name) for end, name in ends if 8 + length + end > size)
            return f"truncated in {cut[1]}"
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            return one_line(error)


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors as float32 in the format of safetensors (github.com/huggingface/safetensors).

    The library would write the metadata in random order, so that no two exports were equal.
    """
    arrays = {name: np.asarray(value, np.float32) for name, value in tensors.items()}
    sums = {name: google_crc32c.value(value.tobytes()) for name, value in arrays.items()}
    header: dict[str, Any] = {"__metadata__": {"crc32c": json.dumps(sums), "format": "pt"}}
    end = 0
    for name, value in sorted(arrays.items()):
        start, end = end, end + value.nbytes
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": (start, end)}
    data = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % 8)
    with files.atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.writelines(arrays[name].tobytes() for name in sorted(arrays))
