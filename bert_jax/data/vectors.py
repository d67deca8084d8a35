"""Streaming writers for vectors: .npy and JSON lines."""

import array
import json
import pathlib
from typing import Any

import numpy as np


class Npy:
    """Writer of an .npy file; without pooling, a second file has the number of vectors per text."""

    def __init__(self, path: pathlib.Path, lengths: pathlib.Path | None, dimension: int):
        self._file, self._lengths_path = open(path, "wb"), lengths  # noqa: SIM115 (see close)
        self._dimension, self._lengths, self._count = dimension, array.array("q"), 0
        self._write_header()

    def _write_header(self) -> None:
        # NumPy pads headers so that the first axis can grow, so the final header fits in place.
        self._file.seek(0)
        shape = (self._count, self._dimension)
        fields = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, fields)

    def write(self, text: str, pieces: list[str], vectors: np.ndarray) -> None:
        vectors = vectors.reshape(-1, self._dimension)
        self._file.write(vectors.astype("<f4").tobytes())
        self._lengths.append(len(vectors))
        self._count += len(vectors)

    def close(self) -> None:
        with self._file:
            self._write_header()
        if self._lengths_path:
            with open(self._lengths_path, "wb") as file:
                np.save(file, np.array(self._lengths, np.int64))


class Jsonl:
    """Writer of a JSON lines file with an object per text."""

    def __init__(self, path: pathlib.Path, tokens: bool):
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (see close)
        self._tokens, self._count = tokens, 0

    def write(self, text: str, pieces: list[str], vectors: np.ndarray) -> None:
        fields: dict[str, Any] = {"index": self._count, "text": text}
        if self._tokens:
            fields["tokens"] = pieces
        start = json.dumps(fields, ensure_ascii=False)[:-1]
        self._file.write(f'{start}, "vector": {_numbers(vectors.tolist())}}}\n')
        self._count += 1

    def close(self) -> None:
        self._file.close()


def _numbers(values: list) -> str:
    """Format a vector or several as JSON, with enough digits to restore float32 exactly."""
    if values and isinstance(values[0], list):
        return f"[{', '.join(map(_numbers, values))}]"
    return f"[{', '.join([format(x, '.9g') for x in values])}]"
