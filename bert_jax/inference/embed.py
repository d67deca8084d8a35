"""Text embeddings: hidden states of chosen layers, pooled over each text, computed in packed rows.

Texts are processed in chunks. While the device computes one chunk, the next is tokenized on all
cores and packed into rows of a few lengths. Vectors are returned in the order of the texts.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import operator
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bert_jax import storage
from bert_jax.config.checks import check_fields
from bert_jax.config.model import layer_numbers
from bert_jax.config.schema import MeshConfig, TrainConfig
from bert_jax.data import rows, texts
from bert_jax.data.vectors import Jsonl, Npy
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError, counted
from bert_jax.model.bert import Bert, Params
from bert_jax.model.heads import sum_tokens
from bert_jax.runtime import sharding
from bert_jax.runtime.progress import Progress
from bert_jax.storage import files
from bert_jax.tasks import embeddings

LONG = ("truncate", "window")
OUTPUTS = (".npy", ".jsonl")
# Rows have this length or a larger power of two. Attention costs T² per row, so short texts are
# packed into short rows.
_SHORTEST_ROW = 64
# Tokens per batch and device. A CPU is fastest if a layer's activations fit into its caches.
_BATCH_TOKENS = {"cpu": 1024}
_BATCH_TOKENS_ACCELERATOR = 1 << 16
# Attention scores per layer, batch and device, N T² a row, which outgrow all else in long rows.
_BATCH_SCORES = 1 << 30
# Approximate batches per chunk. At the end of a chunk, one batch per row length is only partly
# full.
_CHUNK_BATCHES = 64
_CHUNK_TEXTS = 1 << 16
_CHUNK_BYTES = 1 << 28  # of vectors
_TOKENIZE_TEXTS = 1024  # per call, as the tokenizer's encodings take about 200 bytes per token
_IN_FLIGHT = 1  # batches queued besides the one being computed


@dataclasses.dataclass
class Counts:
    """Statistics of an `Embedder`.

    Attributes:
        texts: number of texts.
        tokens: tokens computed, including [CLS], [SEP] and overlaps of windows.
        truncated: texts longer than the limit that were truncated.
        windowed: texts longer than the limit that were split into windows.
        row_tokens: tokens of the rows computed, including padding.
    """

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    windowed: int = 0
    row_tokens: int = 0

    def __str__(self) -> str:
        truncated = f", {self.truncated:,} truncated" if self.truncated else ""
        windowed = f", {self.windowed:,} in windows" if self.windowed else ""
        return f"{counted(self.texts, 'text')}{truncated}{windowed}, {self.tokens:,} tokens"


class Window(NamedTuple):
    """A part of a long text: tokens from `start` are computed, those in [first, last) are used."""

    start: int
    first: int
    last: int


def windows(length: int, max_tokens: int, overlap: int) -> list[Window]:
    """Cover `length` tokens by windows of `max_tokens`; neighbors overlap by at least `overlap`.

    Every token is used from exactly one window: the one in which it is farthest from an edge, which
    is the one with the nearest center (the earlier if tied).
    """
    if length <= max_tokens:
        return [Window(0, 0, length)]
    starts = [*range(0, length - max_tokens, max_tokens - overlap), length - max_tokens]
    between = [(a + b + max_tokens + 1) // 2 for a, b in itertools.pairwise(starts)]
    bounds = [0, *between, length]
    return list(map(Window, starts, bounds, bounds[1:]))


class _Piece(NamedTuple):
    """A sequence to compute: a text or a window of it.

    Attributes:
        text: index of the text in its chunk.
        tokens: ids, including [CLS] and [SEP].
        counted: mask of the tokens that contribute to the text's vectors.
        offset: index in the text of the first counted token.
    """

    text: int
    tokens: np.ndarray
    counted: np.ndarray
    offset: int


class _Batch(NamedTuple):
    """Rows to compute together: their length T, and the pieces in each row."""

    tokens: int
    rows: list[list[_Piece]]


@dataclasses.dataclass
class _Chunk:
    """Texts in progress.

    Attributes:
        tokens: each text's ids, including [CLS] and [SEP].
        counted: number of tokens that each text's vector is averaged over; [texts].
        batches: batches to compute.
        num_pending: number of batches that are not finished.
        vectors: [texts, D], sums over finished batches; without pooling, one [n, D] per text.
    """

    tokens: list[np.ndarray]
    counted: np.ndarray
    batches: list[_Batch]
    num_pending: int
    vectors: Any


class Embedder:
    """Text embeddings from a loaded model.

    `config.embed` selects the hidden states, the pooling, the maximum number of tokens per text and
    the prompt. Several layers are concatenated, or summed if `weights` are given.

    Args:
        config, vocabulary, params: as returned by `checkpoint.load_model`.
        long: handling of longer texts: "truncate", or "window" to compute overlapping windows. Each
            token is then used once, from the window in which it is farthest from an edge, and the
            [CLS] and [SEP] of every window are used.
        overlap_tokens: minimum overlap of neighboring windows.
        weights: one weight per layer.
        batch_tokens: tokens per device and batch, including padding; 0 selects it by platform. Batches
            of long rows are smaller, as the attention scores of a row take T² memory.

    Attributes:
        dimension: size of a vector, D.
        counts: statistics so far.
    """

    def __init__(
        self,
        config: TrainConfig,
        vocabulary: Vocabulary,
        params: Params,
        *,
        long: str = "truncate",
        overlap_tokens: int = 64,
        weights: Sequence[float] = (),
        batch_tokens: int = 0,
    ):
        model, embed = config.model, config.embed
        max_tokens = embed.tokens or model.positions
        if not 3 <= max_tokens <= model.positions:
            raise UserError(
                f"config.embed.tokens is {max_tokens}: it must be 3 to {model.positions}, "
                "config.model.positions"
            )
        check_fields(embed, "embed.")
        if long not in LONG:
            raise UserError(f"long={long!r}: it must be one of {', '.join(LONG)}")
        if long == "window" and not 0 <= overlap_tokens < max_tokens - 2:
            raise UserError(
                f"windows of {max_tokens} tokens cannot overlap by {overlap_tokens}: choose 0 to "
                f"{max_tokens - 3}"
            )
        layers = layer_numbers(embed.layers, model.layers)
        if model.causal and embed.pooling == "cls":
            raise UserError(
                "config.embed.pooling is 'cls': [CLS] of a causal model attends only to itself; use "
                "'mean' or 'none'"
            )
        if weights and len(weights) != len(layers):
            raise UserError(
                f"{len(weights)} weights for {len(layers)} layers (config.embed.layers is "
                f"{embed.layers!r}): give one per layer"
            )
        if not np.isfinite(weights).all():
            raise UserError(f"layer weights must be finite numbers, not {list(weights)}")
        self.vocabulary, self.pooling = vocabulary, embed.pooling
        self._dimension = model.hidden * (1 if weights else len(layers))
        kept = 0 if embed.pooling == "none" else embed.truncate_dim
        self.dimension = min(kept or self._dimension, self._dimension)
        self._heads, self.counts = model.heads, Counts()
        self._max_tokens = max_tokens - 2  # without [CLS] and [SEP]
        self._windowing, self._overlap = long == "window", overlap_tokens
        self._normalize, self._tokenizer = embed.normalize, vocabulary.tokenizer()
        self._prompt, self._num_skipped = embed.prompt, 0  # tokens, including [CLS]
        if embed.prompt and not embed.include_prompt:
            length = len(next(self._tokenize([""])))  # of the prompt
            self._num_skipped = 1 + (length if self._windowing else min(length, self._max_tokens))
        mesh = sharding.make_mesh(MeshConfig(), jax.local_devices())
        self._devices, self._split = mesh.size, sharding.row_sharding(mesh)
        self._params = jax.device_put(params, sharding.replicated(mesh))
        self._forward = jax.jit(_forward(Bert(model), layers, tuple(weights), embed.pooling))
        platform = mesh.devices.flat[0].platform
        self._batch_tokens = self._devices * (
            batch_tokens or _BATCH_TOKENS.get(platform, _BATCH_TOKENS_ACCELERATOR)
        )
        # Limit the memory of vectors: one per text, or without pooling up to about one per
        # character (in Chinese).
        max_vectors = max(_CHUNK_BYTES // (4 * self._dimension), 1)
        self._chunk_texts = min(max_vectors, _CHUNK_TEXTS)
        self._chunk_characters = 4 * _CHUNK_BATCHES * self._batch_tokens
        if embed.pooling == "none":
            self._chunk_characters = min(max_vectors, self._chunk_characters)

    def __call__(self, texts: Iterable[str]) -> Iterator[Float[np.ndarray, "..."]]:
        """Yield each text's vector [D], or its vectors [n, D] without pooling, in order.

        Texts are read from the iterable lazily, some thousands ahead of the results.
        """
        return (vectors for _, vectors in self.with_tokens(texts))

    def with_tokens(
        self, texts: Iterable[str]
    ) -> Iterator[tuple[Int[np.ndarray, " n"], Float[np.ndarray, "..."]]]:
        """Like `__call__`, but with each text's token ids, including [CLS] and [SEP]."""
        in_flight: collections.deque = collections.deque()
        for chunk in self._prepared(texts):
            for batch in chunk.batches:
                in_flight.append((chunk, batch, self._start(batch)))
                if len(in_flight) > _IN_FLIGHT:
                    yield from self._finish(*in_flight.popleft())
        while in_flight:
            yield from self._finish(*in_flight.popleft())

    def _prepared(self, texts: Iterable[str]) -> Iterator[_Chunk]:
        """Yield chunks, preparing the next one in a thread."""
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            pending = collections.deque()
            for chunk in self._chunks(texts):
                pending.append(executor.submit(self._prepare, chunk))
                if len(pending) > 1:
                    yield pending.popleft().result()
            if pending:
                yield pending.popleft().result()

    def _chunks(self, texts: Iterable[str]) -> Iterator[list[str]]:
        chunk, characters = [], 0
        for text in texts:
            chunk.append(text)
            characters += len(text)
            if len(chunk) >= self._chunk_texts or characters >= self._chunk_characters:
                yield chunk
                chunk, characters = [], 0
        if chunk:
            yield chunk

    def _prepare(self, texts: list[str]) -> _Chunk:
        tokens, pieces = [], []
        for i, ids in enumerate(self._tokenize(texts)):
            if len(ids) > self._max_tokens:
                self.counts.windowed += self._windowing
                self.counts.truncated += not self._windowing
                ids = ids if self._windowing else ids[: self._max_tokens]
            tokens.append(self._with_special(ids))
            pieces += self._pieces(i, tokens[-1])
        counted = np.zeros(len(texts), np.float32)
        for piece in pieces:
            counted[piece.text] += piece.counted.sum()
        self.counts.texts += len(texts)
        self.counts.tokens += sum(len(piece.tokens) for piece in pieces)
        batches = list(self._batches(pieces))
        if self.pooling == "none":
            vectors = [np.empty((len(ids), self.dimension), np.float32) for ids in tokens]
        else:
            vectors = np.zeros((len(texts), self._dimension), np.float32)
        return _Chunk(tokens, counted, batches, len(batches), vectors)

    def _tokenize(self, texts: list[str]) -> Iterator[np.ndarray]:
        for start in range(0, len(texts), _TOKENIZE_TEXTS):
            # Strings of Python may contain lone surrogates, which the tokenizer rejects.
            part = [
                (self._prompt + text).encode(errors="replace").decode()
                for text in texts[start : start + _TOKENIZE_TEXTS]
            ]
            for encoding in self._tokenizer.encode_batch_fast(part, add_special_tokens=False):
                yield np.array(encoding.ids, np.int32)

    def _with_special(self, ids: np.ndarray) -> np.ndarray:
        return np.pad(ids, 1, constant_values=(self.vocabulary.cls_id, self.vocabulary.sep_id))

    def _pieces(self, text: int, tokens: np.ndarray) -> Iterator[_Piece]:
        length = len(tokens) - 2
        for start, first, last in windows(length, self._max_tokens, self._overlap):
            window_tokens = tokens
            if length > self._max_tokens:
                window_tokens = self._with_special(tokens[1:-1][start : start + self._max_tokens])
            counted = np.zeros(len(window_tokens), bool)
            skipped = self._num_skipped - start
            if self.pooling == "cls":
                counted[skipped if not start and skipped < len(counted) else 0] = True
            else:
                # Without pooling, a windowed text keeps one [CLS] and one [SEP].
                counted[0] = self.pooling == "mean" or first == 0
                counted[first - start + 1 : last - start + 1] = True
                counted[-1] = self.pooling == "mean" or last == length
            if self.pooling == "mean":
                counted[: max(skipped, 0)] = False
            yield _Piece(text, window_tokens, counted, first + (first > 0))

    def _batches(self, pieces: list[_Piece]) -> Iterator[_Batch]:
        """Pack sequences into rows of T tokens, T a few powers of two, and rows into batches.

        The first sequence of a row fills more than half of it; shorter sequences fill the rest.
        """
        lengths = [len(piece.tokens) for piece in pieces]
        tokens = _SHORTEST_ROW
        while tokens < max(lengths):
            tokens *= 2
        remaining = list(range(len(pieces)))
        while remaining:
            min_length = tokens // 2 + 1 if tokens > _SHORTEST_ROW else 0
            packed = rows.pack_lengths([lengths[i] for i in remaining], tokens, _slots(tokens))
            packed = [[remaining[i] for i in row] for row in packed]
            full = [[pieces[i] for i in row] for row in packed if lengths[row[0]] >= min_length]
            remaining = [i for row in packed if lengths[row[0]] < min_length for i in row]
            size = self._batch_rows(tokens)
            for start in range(0, len(full), size):
                yield _Batch(tokens, full[start : start + size])
            tokens //= 2

    def _batch_rows(self, tokens: int) -> int:
        """Return B for rows of T tokens, a multiple of the number of devices."""
        rows_by_tokens = self._batch_tokens // (self._devices * tokens)
        rows_by_scores = _BATCH_SCORES // (self._heads * tokens**2)
        return max(min(rows_by_tokens, rows_by_scores), 1) * self._devices

    def _start(self, batch: _Batch) -> jax.Array:
        """Start computing a batch and return its result, which may not be available yet."""
        size = self._batch_rows(batch.tokens)
        tokens = np.full((size, batch.tokens), self.vocabulary.pad_id, np.int32)
        counted = np.zeros((size, batch.tokens), bool)
        length = np.zeros((size, _slots(batch.tokens)), np.int32)
        for i, row in enumerate(batch.rows):
            start = 0
            for slot, piece in enumerate(row):
                end = start + len(piece.tokens)
                tokens[i, start:end], counted[i, start:end] = piece.tokens, piece.counted
                length[i, slot] = end - start
                start = end
        self.counts.row_tokens += tokens.size
        inputs = jax.device_put((tokens, length, counted), self._split)
        result = self._forward(self._params, *inputs)
        result.copy_to_host_async()
        return result

    def _finish(
        self, chunk: _Chunk, batch: _Batch, result: jax.Array
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Add a batch's result to its chunk, and yield the texts of the chunk if it is complete."""
        hidden = np.asarray(result)
        for i, row in enumerate(batch.rows):
            start = 0
            for slot, piece in enumerate(row):
                if self.pooling == "none":
                    end = start + len(piece.tokens)
                    states = hidden[i, start:end][piece.counted]
                    chunk.vectors[piece.text][piece.offset : piece.offset + len(states)] = states
                    start = end
                else:
                    chunk.vectors[piece.text] += hidden[i, slot]
        chunk.num_pending -= 1
        if not chunk.num_pending:
            if self.pooling != "none":
                # A text that merges with the prompt into fewer tokens has none of its own.
                chunk.vectors /= np.maximum(chunk.counted, 1)[:, None]
            for tokens, vectors in zip(chunk.tokens, chunk.vectors, strict=True):
                vectors = embeddings.unit_vectors(vectors) if self._normalize else vectors
                yield tokens, vectors[..., : self.dimension]


def _slots(tokens: int) -> int:
    """Return S for rows of T tokens; single words (three tokens) still fill most of a row."""
    return tokens // 4


def _forward(model: Bert, layers: list[int], weights: tuple[float, ...], pooling: str):
    def forward(
        params: Params,
        tokens: Int[Array, "B T"],
        length: Int[Array, "B S"],
        counted: Bool[Array, "B T"],
    ) -> Float[Array, "B n D"]:
        """Sum over each sequence's counted tokens (n is S); without pooling, all tokens (n is T)."""
        layout = rows.layout(length, length, tokens.shape[1])
        outputs: Any = model.apply({"params": params}, tokens, layout, outputs=("states",))
        selected = [outputs.states[i].astype(jnp.float32) for i in layers]
        if weights:
            x = functools.reduce(jnp.add, map(operator.mul, weights, selected))
        else:
            x = jnp.concatenate(selected, -1)
        return x if pooling == "none" else sum_tokens(x, layout, counted)

    return forward


@storage.with_uploaded_output("out", new=True)
def embed_file(
    embedder: Embedder,
    source: str | os.PathLike,
    out: str | os.PathLike,
    column: str = "text",
) -> Counts:
    """Write the vectors of a file's texts in order, showing progress.

    Args:
        source: as in `texts.read`.
        out: output path. .npy holds float32 [texts, D], or without pooling [tokens, D] of all texts
            with the number of tokens of each in NAME.lengths.npy. .jsonl holds index, text,
            vector and, without pooling, the tokens.
        column: field or column of the texts.
    """
    path, per_token = pathlib.Path(out), embedder.pooling == "none"
    if path.suffix not in OUTPUTS:
        raise UserError(f"{path}: unknown output format: the name must end in {', '.join(OUTPUTS)}")
    lengths = path.with_suffix(".lengths.npy") if per_token and path.suffix == ".npy" else None
    for existing in (path, lengths):
        if existing and existing.exists():
            raise UserError(f"{existing} already exists: remove it or choose another name")
    source_texts = texts.read(str(source), column)
    pending: collections.deque = collections.deque()  # texts passed to the embedder, in order

    def iterate_texts() -> Iterator[str]:
        for text, read in source_texts.texts:
            pending.append((text, read))
            yield text

    names, previous = embedder.vocabulary.tokens, 0
    with (
        Progress("embed", source_texts.total, source_texts.unit) as progress,
        files.one_line_errors(f"cannot write {path}"),
        contextlib.ExitStack() as stack,
    ):
        temporary = stack.enter_context(files.atomic_write(path))
        temporary_lengths = stack.enter_context(files.atomic_write(lengths)) if lengths else None
        if path.suffix == ".npy":
            writer = Npy(temporary, temporary_lengths, embedder.dimension)
        else:
            writer = Jsonl(temporary, per_token)
        with contextlib.closing(writer):
            for tokens, vectors in embedder.with_tokens(iterate_texts()):
                text, read = pending.popleft()
                pieces = [names[i] for i in tokens] if per_token else []
                writer.write(text, pieces, vectors)
                progress.advance(read - previous)
                previous = read
    return embedder.counts


@storage.with_local_inputs("path")
def evaluate(
    embedder: Embedder,
    path: str | pathlib.Path,
    similarity: Sequence[str],
    pair: Sequence[str],
    qrels: str = "test",
) -> dict[str, float]:
    """Return the metrics of a sentence encoder on held-out data, showing progress.

    The data are those of `embeddings.read`; `qrels` is the name of one file.
    """
    if embedder.pooling == "none":
        raise UserError("config.embed.pooling is 'none': texts need one vector; use mean or cls")
    data = embeddings.read(path, similarity, pair, (qrels,))
    vectors = np.empty((len(data.texts), embedder.dimension), np.float32)
    with Progress("embed", len(vectors), "texts") as progress:
        for i, vector in enumerate(embedder(data.texts)):
            vectors[i] = vector
            progress.advance()
    return data.score(vectors)
