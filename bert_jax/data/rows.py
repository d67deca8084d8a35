"""Rows: the record on disk, packing, and the token layout on the device.

A row holds T tokens: up to S sequences end to end, then padding. A sequence is `[CLS] a [SEP]` or
`[CLS] a [SEP] b [SEP]`. The other inputs of the model (segment ids, token types, positions and
indices of [CLS]) follow from two lengths per sequence and are derived on the device, not stored.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from bert_jax import storage
from bert_jax.config.fields import build
from bert_jax.data.compressed import whole
from bert_jax.errors import UserError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
NO_LABEL = -1
SLOTS_UNBOUNDED = 1 << 30


class Example(NamedTuple):
    """A sequence before packing.

    Attributes:
        tokens: token ids, including [CLS] and [SEP]; length n.
        a_length: number of tokens in segment a, including its [CLS] and [SEP].
        label: label of the sequence (NSP: 0 = b follows a, 1 = b is random), or `NO_LABEL`.
    """

    tokens: np.ndarray
    a_length: int
    label: int = NO_LABEL


def shape_repr(self: Any) -> str:
    """Return the `repr` of a named tuple with types and shapes of arrays instead of their values."""
    shown = (
        f"{name}={value.dtype}{list(value.shape)}"
        if hasattr(value, "shape")
        else f"{name}={value!r}"
        for name, value in self._asdict().items()
    )
    return f"{type(self).__name__}({', '.join(shown)})"


class Layout(NamedTuple):
    """Per-token inputs of the model for packed rows. B rows, T tokens, S sequences.

    Attributes:
        segment_ids: index of the token's sequence in its row; S for padding.
        position_ids: distance from the [CLS] of the sequence; 0 for padding.
        token_type_ids: token type: 0 in segment a, 1 in segment b, 0 for padding.
        cls: start of each sequence; any valid index for unused slots.
    """

    segment_ids: Int[Any, "B T"]
    position_ids: Int[Any, "B T"]
    token_type_ids: Int[Any, "B T"]
    cls: Int[Any, "B S"]

    __repr__ = shape_repr


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """The fixed-size record of a row.

    Attributes:
        tokens: T, tokens per row.
        sequences: S, maximum number of sequences per row.
        vocab_size: V; token ids take two bytes each up to 65,536, four bytes above.
    """

    tokens: int
    sequences: int
    vocab_size: int

    @property
    def dtype(self) -> np.dtype:
        token = "<u2" if self.vocab_size <= 1 << 16 else "<u4"
        return np.dtype(
            [
                ("tokens", token, (self.tokens,)),
                ("a_length", "<u2", (self.sequences,)),
                ("length", "<u2", (self.sequences,)),
                ("label", "<i2", (self.sequences,)),
                ("crc32", "<u4"),
            ]
        )

    def empty(self, rows: int) -> np.ndarray:
        """Return records of padding; structured array [rows]."""
        array = np.zeros(rows, self.dtype)
        array["label"] = NO_LABEL
        return array

    def seal(self, array: np.ndarray) -> np.ndarray:
        """Fill in the checksum of each record in place, and return the array ([rows])."""
        payload = self.dtype.itemsize - 4
        flat = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)[:, :payload]
        array["crc32"] = [zlib.crc32(row) for row in flat]
        return array

    def encode(self, array: np.ndarray) -> list[bytes]:
        """Return sealed records as bytes, one per row."""
        size, data = self.dtype.itemsize, array.tobytes()
        return [data[i : i + size] for i in range(0, len(data), size)]

    def decode(self, records: Sequence[bytes]) -> dict[str, np.ndarray]:
        """Decode records to arrays `tokens` [B, T] and `a_length`, `length`, `label` [B, S].

        Raises:
            ValueError: a record has the wrong size or checksum. The message gives its index in
                `records`.
        """
        size = self.dtype.itemsize
        for i, record in enumerate(records):
            if len(record) != size:
                raise ValueError(f"record {i} has {len(record)} bytes, not {size}")
            if zlib.crc32(record[:-4]) != int.from_bytes(record[-4:], "little"):
                raise ValueError(f"record {i} fails its checksum")
        array = np.frombuffer(b"".join(records), self.dtype)
        return {name: np.ascontiguousarray(array[name]) for name in (self.dtype.names or ())[:-1]}

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Check the invariants of decoded records, which a checksum does not cover.

        Raises:
            ValueError: the lengths of a record exceed T, its slots are not filled in order, or a
                token or label is out of range. The message gives its index.
        """
        length, a_length, label = (arrays[name] for name in ("length", "a_length", "label"))
        used = length > 0
        problems = {
            f"its sequences have more than {self.tokens} tokens": length.sum(1) > self.tokens,
            "it has no sequences, or gaps between them": ~used[:, 0]
            | (used[:, 1:] & ~used[:, :-1]).any(1),
            "a segment a is longer than its sequence": (a_length > length).any(1),
            "a label is out of range": ((label < NO_LABEL) | (label > 1)).any(1),
            "it has a label without a sequence": ((label != NO_LABEL) & ~used).any(1),
            "a token is out of range": arrays["tokens"].max(1) >= self.vocab_size,
        }
        for problem, rows in problems.items():
            if rows.any():
                raise ValueError(f"record {int(rows.argmax())} is invalid: {problem}")

    def pack(self, examples: Iterable[Example]) -> np.ndarray:
        """Pack examples into sealed records ([rows]), placed by `pack_lengths`."""
        examples = list(examples)
        bins = pack_lengths([len(e.tokens) for e in examples], self.tokens, self.sequences)
        array = self.empty(len(bins))
        # Look up fields once for the whole array, as field access is slow for single records.
        row_tokens, a_lengths = array["tokens"], array["a_length"]
        lengths, labels = array["length"], array["label"]
        for row, members in enumerate(bins):
            start = 0
            for slot, index in enumerate(members):
                tokens, a_length, label = examples[index]
                end = start + len(tokens)
                row_tokens[row, start:end] = tokens
                a_lengths[row, slot], lengths[row, slot] = a_length, end - start
                labels[row, slot] = label
                start = end
        return self.seal(array)


def pack_lengths(lengths: Sequence[int], tokens: int, sequences: int) -> list[list[int]]:
    """Assign sequences of the given lengths to rows of `tokens`, at most `sequences` per row.

    Best fit decreasing: each sequence goes to the fullest row that has room for it (Krell et al.,
    arXiv 2107.02027, section 3). Rows are in the order they were opened and sequences in the order
    they were placed, so the result is a function of the arguments.

    Returns:
        The indices of the sequences of each row.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if order and lengths[order[0]] > tokens:
        raise ValueError(f"a sequence of {lengths[order[0]]} tokens does not fit {tokens}")
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(tokens + 1)]  # by number of free tokens
    open_bits = 0  # bit f is set if open_rows[f] is not empty
    for index in order:
        length = lengths[index]
        fitting = open_bits >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1  # smallest sufficient
            row = open_rows[free].pop()
            rows[row].append(index)
            if not open_rows[free]:
                open_bits ^= 1 << free
        else:
            free, row = tokens, len(rows)
            rows.append([index])
        if len(rows[row]) < sequences and free > length:
            open_rows[free - length].append(row)
            open_bits |= 1 << free - length
    return rows


def layout(length: Int[Any, "B S"], a_length: Int[Any, "B S"], tokens: int) -> Layout:
    """Derive sequence index, position and token type of every token from the sequence lengths.

    Uses only operations that NumPy and JAX arrays share, so it runs in the jitted step and on the
    host.

    Args:
        length: number of tokens of each sequence, 0 for unused slots, which come last.
        a_length: number of those tokens in segment a, including [CLS] and [SEP].
        tokens: T.
    """
    length, a_length = length.astype("int32"), a_length.astype("int32")
    slots = length.shape[1]
    end = length.cumsum(1)
    token = np.arange(tokens, dtype="int32")[None, :]
    # The sequence index of a token is the number of sequences that end before it; S is padding.
    ended = (token[:, :, None] >= end[:, None, :]).astype("int32")  # [B, T, S]
    sequence = ended.sum(2)
    not_padding = (sequence < slots).astype("int32")
    start = (ended * length[:, None, :]).sum(2)
    one_hot = (sequence[:, :, None] == np.arange(slots)[None, None, :]).astype("int32")
    position = (token - start) * not_padding
    segment = (position >= (one_hot * a_length[:, None, :]).sum(2)).astype("int32") * not_padding
    cls = (end - length).clip(0, tokens - 1)
    # NumPy sums int32 to int64, JAX to int32.
    return Layout(*(x.astype("int32") for x in (sequence, position, segment, cls)))


def is_real(layout: Layout) -> Bool[Any, "B T"]:
    """Return whether each token is not padding."""
    return layout.segment_ids < layout.cls.shape[1]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of rows: its name in the folder, number of rows and bytes, and SHA-256."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Split:
    """The shards of a split ("train" or "heldout") and its totals.

    Attributes:
        documents, sequences, rows: their numbers.
        real_tokens: number of tokens that are not padding.
        fill_fraction: real_tokens / (rows * T).
        shards: the shards, in order.
    """

    documents: int
    sequences: int
    rows: int
    real_tokens: int
    fill_fraction: float
    shards: tuple[Shard, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Description of a folder of rows (`manifest.json`).

    Attributes:
        version: version of the format.
        tokens, sequences, vocab_size: format of a row.
        vocab_sha256: SHA-256 of the vocabulary file, `vocab.txt` or `tokenizer.json` in the same
            folder.
        pairs: "nsp" (sentence pairs with labels), "none", "full-sentences" or "doc-sentences".
        seed: seed of the instance algorithm.
        settings: all settings that the rows depend on, as passed to `prepare`.
        sources: spec, kinds, bytes read and documents of each source.
        length_histogram: number of training sequences of each length 0..T.
        warnings: warnings about the corpus, one line each.
        train, heldout: the splits.
    """

    version: int
    tokens: int
    sequences: int
    vocab_size: int
    vocab_sha256: str
    pairs: str
    seed: int
    settings: dict[str, Any]
    sources: tuple[dict[str, Any], ...]
    length_histogram: tuple[int, ...]
    warnings: tuple[str, ...]
    train: Split
    heldout: Split

    @property
    def format(self) -> RowFormat:
        return RowFormat(self.tokens, self.sequences, self.vocab_size)

    @property
    def digest(self) -> str:
        """SHA-256 of the training rows, independent of their location."""
        hashes = "".join(shard.sha256 for shard in self.train.shards)
        return hashlib.sha256(hashes.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_manifest(folder: str | pathlib.Path) -> Manifest:
    """Read `folder/manifest.json`."""
    if storage.is_remote(folder):
        folder = storage.local(folder, (MANIFEST,))
    path = pathlib.Path(folder) / MANIFEST
    try:
        with path.open("rb") as file:
            fields = json.loads(whole(file, path))
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not a folder of rows (no {MANIFEST}); make one with `bert-jax prepare`"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}; prepare the rows again") from None
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has version {str(version)[:80]}, but this program reads {FORMAT_VERSION}; "
            "prepare the rows again"
        )
    try:
        manifest = build(Manifest, fields, "it")
        _check(manifest)
        return manifest
    except ValueError as error:
        raise UserError(
            f"{path} is not a manifest of rows ({error}); prepare the rows again"
        ) from None


def _check(manifest: Manifest) -> None:
    """Raise ValueError for values that could cause huge allocations or unsafe paths."""
    if not 1 <= manifest.sequences <= manifest.tokens < 1 << 16:
        raise ValueError(f"rows of {manifest.tokens} tokens, {manifest.sequences} sequences")
    if not 1 <= manifest.vocab_size < 1 << 31:
        raise ValueError(f"a vocabulary of {manifest.vocab_size}")
    for split in (manifest.train, manifest.heldout):
        for shard in split.shards:
            if not re.fullmatch(r"[\w-]+\.arrayrecord", shard.name):
                raise ValueError(f"a shard called {shard.name!r}")
            if not (0 <= shard.rows < 1 << 48 and shard.bytes >= 0):
                raise ValueError(f"{shard.name} of {shard.rows} rows, {shard.bytes} bytes")
        if split.rows != sum(shard.rows for shard in split.shards):
            raise ValueError("the number of rows differs from the total of its shards")
