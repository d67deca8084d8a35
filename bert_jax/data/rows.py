"""Rows: the record on disk, the layout on the device, and packing.

A row holds `T` tokens and up to `S` sequences, end to end, padding only at the end. A sequence is
`[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`. What the model needs beside the tokens (sequence ids,
positions, type ids, where each [CLS] stands) follows from two lengths a sequence, so it is derived
where it is used and never stored.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from bert_jax.config import build
from bert_jax.data.compressed import whole
from bert_jax.errors import UserError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
NO_LABEL = -1
SLOTS_UNBOUNDED = 1 << 30


class Example(NamedTuple):
    """One sequence before packing.

    Attributes:
        tokens: all token ids, [CLS] and [SEP] included; length n.
        a_length: how many of them belong to segment a, its [CLS] and [SEP] included.
        label: the sequence's label (NSP: 0 = b follows a, 1 = b is random), or `NO_LABEL`.
    """

    tokens: np.ndarray
    a_length: int
    label: int = NO_LABEL


class Layout(NamedTuple):
    """What the model needs to know about every token of packed rows. B rows, T tokens, S sequences.

    Attributes:
        segment_ids: [B, T] which of the row's sequences a token belongs to; S for padding.
        position_ids: [B, T] distance from the sequence's [CLS]; 0 for padding.
        token_type_ids: [B, T] 0 in segment a, 1 in segment b, 0 for padding.
        cls: [B, S] where each sequence starts; for an unused slot, some valid token.
    """

    segment_ids: Any
    position_ids: Any
    token_type_ids: Any
    cls: Any


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """The fixed-size record of a row.

    Attributes:
        tokens: T, tokens a row.
        sequences: S, most sequences a row.
        vocab_size: token ids are below this; up to 65,536 they take two bytes, above it four.
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
        """`rows` records of padding; structured array of shape [rows]."""
        array = np.zeros(rows, self.dtype)
        array["label"] = NO_LABEL
        return array

    def seal(self, array: np.ndarray) -> np.ndarray:
        """Fills in each record's checksum, in place, and returns the array ([rows])."""
        payload = self.dtype.itemsize - 4
        flat = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)[:, :payload]
        array["crc32"] = [zlib.crc32(row) for row in flat]
        return array

    def encode(self, array: np.ndarray) -> list[bytes]:
        """Sealed records as bytes, one a row."""
        size, data = self.dtype.itemsize, array.tobytes()
        return [data[i : i + size] for i in range(0, len(data), size)]

    def decode(self, records: Sequence[bytes]) -> dict[str, np.ndarray]:
        """Records to arrays `tokens` [B, T] and `a_length`, `length`, `label` [B, S].

        Raises:
            ValueError: a record of another size, or one whose checksum does not hold. The
                message names its place among `records`.
        """
        size = self.dtype.itemsize
        for i, record in enumerate(records):
            if len(record) != size:
                raise ValueError(f"record {i} has {len(record)} bytes, not {size}")
            if zlib.crc32(record[:-4]) != int.from_bytes(record[-4:], "little"):
                raise ValueError(f"record {i} fails its checksum")
        array = np.frombuffer(b"".join(records), self.dtype)
        return {name: np.ascontiguousarray(array[name]) for name in self.dtype.names[:-1]}

    def pack(self, examples: Iterable[Example]) -> np.ndarray:
        """Examples to sealed records ([rows]), in order, as `pack_lengths` places them."""
        examples = list(examples)
        bins = pack_lengths([len(e.tokens) for e in examples], self.tokens, self.sequences)
        array = self.empty(len(bins))
        # Fields of the whole array, because those of a single record are slow to reach.
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
    """Places sequences of the given lengths into rows of `tokens`, at most `sequences` a row.

    Best fit, longest first: each sequence goes to the fullest row that still takes it (Krell et
    al., arXiv 2107.02027, section 3). Rows come out in the order they were opened and members in
    order of placement, so the result is a function of the arguments alone.

    Returns:
        For each row the indices of its sequences.

    Raises:
        ValueError: a sequence is longer than a row.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if order and lengths[order[0]] > tokens:
        raise ValueError(f"a sequence of {lengths[order[0]]} tokens does not fit {tokens}")
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(tokens + 1)]  # by free tokens
    some_open = 0  # bit f is set where open_rows[f] holds a row
    for index in order:
        length = lengths[index]
        fitting = some_open >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1  # the least that suffices
            row = open_rows[free].pop()
            rows[row].append(index)
            if not open_rows[free]:
                some_open ^= 1 << free
        else:
            free, row = tokens, len(rows)
            rows.append([index])
        if len(rows[row]) < sequences and free > length:
            open_rows[free - length].append(row)
            some_open |= 1 << free - length
    return rows


def layout(length: Int[Any, "B S"], a_length: Int[Any, "B S"], tokens: int) -> Layout:
    """Derives every token's sequence, position and segment from the sequences' lengths.

    Written with operators that NumPy and JAX arrays share, so the same lines run in the jitted
    step and in a test on the host.

    Args:
        length: tokens of each sequence, 0 for an unused slot (unused slots come last).
        a_length: of those, tokens of segment a with its [CLS] and [SEP].
        tokens: T.
    """
    length, a_length = length.astype("int32"), a_length.astype("int32")
    slots = length.shape[1]
    end = length.cumsum(1)
    token = np.arange(tokens, dtype="int32")[None, :]
    # A token lies behind every sequence that ends at or before it; behind all S, it is padding.
    behind = (token[:, :, None] >= end[:, None, :]).astype("int32")  # [B, T, S]
    sequence = behind.sum(2)
    real = (sequence < slots).astype("int32")
    start = (behind * length[:, None, :]).sum(2)
    own = (sequence[:, :, None] == np.arange(slots)[None, None, :]).astype("int32")
    position = (token - start) * real
    segment = (position >= (own * a_length[:, None, :]).sum(2)).astype("int32") * real
    cls = (end - length).clip(0, tokens - 1)
    # NumPy sums to 64 bits where JAX stays at 32.
    return Layout(*(x.astype("int32") for x in (sequence, position, segment, cls)))


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of rows: its name inside the folder, rows, bytes and SHA-256."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Split:
    """The shards of `train` or `heldout` and what they hold in all.

    Attributes:
        documents, sequences, rows: counts.
        real_tokens: tokens that are not padding.
        fill_fraction: real_tokens / (rows * T).
        shards: in order.
    """

    documents: int
    sequences: int
    rows: int
    real_tokens: int
    fill_fraction: float
    shards: tuple[Shard, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a folder of rows says of itself (`manifest.json`).

    Attributes:
        version: of this format.
        tokens, sequences, vocab_size: the row's format.
        vocab_sha256: of the vocabulary file (`vocab.txt`, kept beside the shards).
        pairs: "nsp" (sentence pairs with labels) or "none".
        seed: of the instance algorithm.
        settings: every setting the rows depend on, as given.
        sources: for each source its name, kind, bytes read, documents.
        length_histogram: for each sequence length 0..T how many training sequences have it.
        warnings: what was odd about the corpus, one line each.
        train, heldout: the shards.
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
        """What rows there are to train on, wherever they lie."""
        sums = "".join(shard.sha256 for shard in self.train.shards)
        return hashlib.sha256(sums.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_manifest(folder: str | pathlib.Path) -> Manifest:
    """Reads `folder/manifest.json`.

    Raises:
        UserError: no folder of rows, not a manifest, or one of another version.
    """
    path = pathlib.Path(folder) / MANIFEST
    try:
        with path.open("rb") as file:
            fields = json.loads(whole(file, path))
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not a folder of rows: it has no {MANIFEST}; make one with `bert-jax prepare`"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}; prepare the rows again") from None
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} is of version {str(version)[:80]}, this program reads {FORMAT_VERSION}; "
            "prepare the rows again"
        )
    try:
        manifest = build(Manifest, fields, "it")
        _check(manifest)
        return manifest
    except ValueError as error:
        raise UserError(f"{path} is not a manifest of rows ({error}); prepare again") from None


def _check(manifest: Manifest) -> None:
    """Refuses what `prepare` cannot have written: what follows trusts it with memory and paths."""
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
            raise ValueError("its shards have other rows than it says")
