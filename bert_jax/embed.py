"""Texts to vectors: hidden states of any layers, pooled over each text, computed in packed rows.

A stream of texts is cut into chunks; a chunk is tokenized on all cores and packed into rows of few
lengths while the device works on the chunk before it, and leaves in the order it came.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bert_jax import files, sharding
from bert_jax.config import MeshConfig, Run, layer_numbers
from bert_jax.data import rows, texts
from bert_jax.data.vectors import Jsonl, Npy, Parquet
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model import Bert, Params
from bert_jax.progress import Progress

LONG = ("truncate", "window")
OUTPUTS = (".npy", ".jsonl", ".parquet")
# Rows are of these lengths or a further power of two. Attention costs T² a row, so short texts
# stay in short rows.
_SHORTEST_ROW = 64
# Tokens a batch and device. A CPU is fastest where a layer's activations stay in its caches.
_BATCH_TOKENS = {"cpu": 1024}
_BATCH_TOKENS_ACCELERATOR = 1 << 16
# Batches a chunk, about: at a chunk's end one batch of each row length is only partly full.
_CHUNK_BATCHES = 64
_CHUNK_TEXTS = 1 << 16
_CHUNK_BYTES = 1 << 28  # of vectors
_TOKENIZE_TEXTS = 1024  # at a time: the tokenizer's own records are some 200 bytes a token
_IN_FLIGHT = 1  # besides the batch being computed


@dataclasses.dataclass
class Counts:
    """What an `Embedder` has done so far.

    Attributes:
        texts: that went in.
        tokens: computed for them, [CLS] and [SEP] and windows' overlaps included.
        truncated, windowed: texts with more tokens than the limit, by what became of them.
        windows: sequences computed; one a text that is not windowed.
        rows: computed.
        row_tokens: tokens of these rows, padding included.
    """

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    windowed: int = 0
    windows: int = 0
    rows: int = 0
    row_tokens: int = 0

    @property
    def real_fraction(self) -> float:
        """Of the tokens computed, those that are not padding."""
        return self.tokens / max(self.row_tokens, 1)

    def __str__(self) -> str:
        cut = f"{self.truncated:,} truncated" if self.truncated else ""
        windowed = f"{self.windowed:,} in windows" if self.windowed else ""
        return ", ".join(
            filter(None, [f"{self.texts:,} texts", cut, windowed, f"{self.tokens:,} tokens"])
        )


class Window(NamedTuple):
    """A part of a long text: tokens [start, …) are computed, those in [first, last) count."""

    start: int
    first: int
    last: int


def windows(length: int, room: int, overlap: int) -> list[Window]:
    """Covers `length` tokens by windows of `room`, neighbors sharing at least `overlap`.

    Every token counts in exactly one window, that in which it lies farthest from an edge: as all
    windows are of one size, the one whose middle is nearest (the earlier of two).
    """
    if length <= room:
        return [Window(0, 0, length)]
    starts = [*range(0, length - room, room - overlap), length - room]
    between = [(a + b + room + 1) // 2 for a, b in itertools.pairwise(starts)]
    bounds = [0, *between, length]
    return list(map(Window, starts, bounds, bounds[1:]))


class _Piece(NamedTuple):
    """A sequence to compute: a text or a window of it.

    Attributes:
        text: which one of the chunk.
        tokens: ids, [CLS] and [SEP] included.
        counted: which of them make the text's vectors.
        at: which of the text's tokens the first counted one is.
    """

    text: int
    tokens: np.ndarray
    counted: np.ndarray
    at: int


class _Batch(NamedTuple):
    """Rows to compute together: T, and for each row its pieces."""

    tokens: int
    rows: list[list[_Piece]]


@dataclasses.dataclass
class _Chunk:
    """Texts on their way.

    Attributes:
        tokens: each text's ids, [CLS] and [SEP] included.
        counted: of how many tokens each text's vector is the mean.
        batches: what to compute for them.
        left: how many batches have yet to come back.
        vectors: [texts, D], sums of what has come back; without pooling one [n, D] a text.
    """

    tokens: list[np.ndarray]
    counted: list[int]
    batches: list[_Batch]
    left: int
    vectors: Any


class Embedder:
    """Turns texts into vectors with one loaded model.

    `config.embed` says which hidden states, how they are pooled, and how many tokens of a text are
    looked at. Several layers are concatenated, or summed if they have weights.

    Args:
        config, vocabulary, params: as `checkpoint.load_model` returns them.
        long: what becomes of a text of more tokens: "truncate" looks at its beginning, "window" at
            all of it in overlapping windows. Of these each token counts once, in the window where
            it lies farthest from an edge, and each window's [CLS] and [SEP] count.
        overlap_tokens: what neighboring windows share at least.
        weights: one a layer.
        batch_tokens: tokens a device computes at a time, padding included; 0 takes what suits it.

    Attributes:
        dimension: D, of a vector.
        counts: what has been done so far.

    Raises:
        UserError: settings that cannot be or that this model does not have.
    """

    def __init__(
        self,
        config: Run,
        vocabulary: Vocabulary,
        params: Params,
        *,
        long: str = "truncate",
        overlap_tokens: int = 64,
        weights: Sequence[float] = (),
        batch_tokens: int = 0,
    ):
        model, embed = config.model, config.embed
        most = embed.tokens or model.positions
        if not 3 <= most <= model.positions:
            raise UserError(
                f"config.embed.tokens is {most}: it must be 3 to {model.positions}, "
                "config.model.positions"
            )
        if long not in LONG:
            raise UserError(f"long texts: {long!r} is none of {', '.join(LONG)}")
        if long == "window" and not 0 <= overlap_tokens < most - 2:
            raise UserError(
                f"windows of {most} tokens cannot overlap by {overlap_tokens}: choose 0 to {most - 3}"
            )
        layers = layer_numbers(embed.layers, model.layers)
        if model.causal and embed.pooling == "cls":
            raise UserError(
                "config.embed.pooling is 'cls': [CLS] of a causal model sees nothing but itself; it "
                "can be 'mean' or 'none'"
            )
        if weights and len(weights) != len(layers):
            raise UserError(
                f"{len(weights)} weights for {len(layers)} layers (config.embed.layers is "
                f"{embed.layers!r}): give one a layer"
            )
        if not np.isfinite(weights).all():
            raise UserError(f"weights of layers must be numbers, not {list(weights)}")
        self.vocabulary, self.pooling = vocabulary, embed.pooling
        self.dimension = model.hidden * (1 if weights else len(layers))
        self.counts = Counts()
        self._room, self._windowing, self._overlap = most - 2, long == "window", overlap_tokens
        self._normalize, self._tokenizer = embed.normalize, vocabulary.tokenizer()
        mesh = sharding.make_mesh(MeshConfig(), jax.local_devices())
        self._devices, self._split = mesh.size, sharding.rows(mesh)
        self._params = jax.device_put(params, sharding.replicated(mesh))
        self._forward = jax.jit(_forward(Bert(model), layers, tuple(weights), embed.pooling))
        platform = mesh.devices.flat[0].platform
        self._batch_tokens = self._devices * (
            batch_tokens or _BATCH_TOKENS.get(platform, _BATCH_TOKENS_ACCELERATOR)
        )
        # Memory is bounded in vectors: one a text, or without pooling about one a character (in
        # Chinese), fewer else.
        most_vectors = max(_CHUNK_BYTES // (4 * self.dimension), 1)
        self._chunk_texts = min(most_vectors, _CHUNK_TEXTS)
        self._chunk_characters = 4 * _CHUNK_BATCHES * self._batch_tokens
        if embed.pooling == "none":
            self._chunk_characters = min(most_vectors, self._chunk_characters)

    def __call__(self, texts: Iterable[str]) -> Iterator[Float[np.ndarray, "..."]]:
        """Each text's vector [D], or without pooling its vectors [n, D], in order.

        Texts are taken from the iterable as needed, some thousands ahead of what comes out.
        """
        return (vectors for _, vectors in self.with_tokens(texts))

    def with_tokens(
        self, texts: Iterable[str]
    ) -> Iterator[tuple[Int[np.ndarray, " n"], Float[np.ndarray, "..."]]]:
        """As calling it, but with each text's token ids, [CLS] and [SEP] included."""
        in_flight: collections.deque = collections.deque()
        for chunk in self._prepared(texts):
            for batch in chunk.batches:
                in_flight.append((chunk, batch, self._start(batch)))
                if len(in_flight) > _IN_FLIGHT:
                    yield from self._finish(*in_flight.popleft())
        while in_flight:
            yield from self._finish(*in_flight.popleft())

    def _prepared(self, texts: Iterable[str]) -> Iterator[_Chunk]:
        """Chunks, each prepared while the one before it is computed."""
        with concurrent.futures.ThreadPoolExecutor(1) as ahead:
            waiting = None
            for chunk in self._chunks(texts):
                coming = ahead.submit(self._prepare, chunk)
                if waiting:
                    yield waiting.result()
                waiting = coming
            if waiting:
                yield waiting.result()

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
        tokens, counted, pieces = [], [], []
        for i, ids in enumerate(self._tokenize(texts)):
            if len(ids) > self._room:
                self.counts.windowed += self._windowing
                self.counts.truncated += not self._windowing
                ids = ids if self._windowing else ids[: self._room]
            tokens.append(self._with_special(ids))
            own = list(self._pieces(i, tokens[-1]))
            counted.append(len(own) if self.pooling == "cls" else len(ids) + 2 * len(own))
            pieces += own
        self.counts.texts += len(texts)
        self.counts.windows += len(pieces)
        self.counts.tokens += sum(len(piece.tokens) for piece in pieces)
        batches = list(self._batches(pieces))
        if self.pooling == "none":
            vectors = [np.empty((len(ids), self.dimension), np.float32) for ids in tokens]
        else:
            vectors = np.zeros((len(texts), self.dimension), np.float32)
        return _Chunk(tokens, counted, batches, len(batches), vectors)

    def _tokenize(self, texts: list[str]) -> Iterator[np.ndarray]:
        for start in range(0, len(texts), _TOKENIZE_TEXTS):
            part = texts[start : start + _TOKENIZE_TEXTS]
            for encoding in self._tokenizer.encode_batch_fast(part, add_special_tokens=False):
                yield np.array(encoding.ids, np.int32)

    def _with_special(self, ids: np.ndarray) -> np.ndarray:
        tokens = np.empty(len(ids) + 2, np.int32)
        tokens[0], tokens[1:-1], tokens[-1] = self.vocabulary.cls_id, ids, self.vocabulary.sep_id
        return tokens

    def _pieces(self, text: int, tokens: np.ndarray) -> Iterator[_Piece]:
        length = len(tokens) - 2
        for start, first, last in windows(length, self._room, self._overlap):
            own = tokens
            if length > self._room:
                own = self._with_special(tokens[1:-1][start : start + self._room])
            counted = np.zeros(len(own), bool)
            if self.pooling == "cls":
                counted[0] = True
            else:
                # Without pooling the text as a whole has one [CLS] and one [SEP].
                counted[0] = self.pooling == "mean" or first == 0
                counted[first - start + 1 : last - start + 1] = True
                counted[-1] = self.pooling == "mean" or last == length
            yield _Piece(text, own, counted, first + (first > 0))

    def _batches(self, pieces: list[_Piece]) -> Iterator[_Batch]:
        """Packs sequences into rows of T tokens, T a few powers of two, and rows into batches.

        A row of T begins with a sequence that does not fit half of it; shorter ones fill it up.
        """
        lengths = [len(piece.tokens) for piece in pieces]
        tokens = _SHORTEST_ROW
        while tokens < max(lengths):
            tokens *= 2
        left = list(range(len(pieces)))
        while left:
            least = tokens // 2 + 1 if tokens > _SHORTEST_ROW else 0
            packed = rows.pack_lengths([lengths[i] for i in left], tokens, _slots(tokens))
            packed = [[left[i] for i in row] for row in packed]
            full = [[pieces[i] for i in row] for row in packed if lengths[row[0]] >= least]
            left = [i for row in packed if lengths[row[0]] < least for i in row]
            size = self._batch_rows(tokens)
            for start in range(0, len(full), size):
                yield _Batch(tokens, full[start : start + size])
            tokens //= 2

    def _batch_rows(self, tokens: int) -> int:
        """B for rows of T tokens, a multiple of the devices."""
        return max(self._batch_tokens // (self._devices * tokens), 1) * self._devices

    def _start(self, batch: _Batch) -> jax.Array:
        """Hands a batch to the devices and returns what will be its result."""
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
        self.counts.rows += size
        self.counts.row_tokens += tokens.size
        inputs = jax.device_put((tokens, length, counted), self._split)
        result = self._forward(self._params, *inputs)
        result.copy_to_host_async()
        return result

    def _finish(
        self, chunk: _Chunk, batch: _Batch, result: jax.Array
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Takes a batch's result into its chunk; yields the texts of a chunk that is complete."""
        found = np.asarray(result)
        for i, row in enumerate(batch.rows):
            start = 0
            for slot, piece in enumerate(row):
                if self.pooling == "none":
                    end = start + len(piece.tokens)
                    own = found[i, start:end][piece.counted]
                    chunk.vectors[piece.text][piece.at : piece.at + len(own)] = own
                    start = end
                else:
                    chunk.vectors[piece.text] += found[i, slot]
        chunk.left -= 1
        if not chunk.left:
            if self.pooling != "none":
                chunk.vectors /= np.array(chunk.counted, np.float32)[:, None]
            for tokens, vectors in zip(chunk.tokens, chunk.vectors, strict=True):
                yield tokens, _unit(vectors) if self._normalize else vectors


def _slots(tokens: int) -> int:
    """S of rows of T tokens: single words, of three tokens and more, still fill most of a row."""
    return tokens // 4


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def _forward(model: Bert, layers: list[int], weights: tuple[float, ...], pooling: str):
    def forward(
        params: Params,
        tokens: Int[Array, "B T"],
        length: Int[Array, "B S"],
        counted: Bool[Array, "B T"],
    ) -> Float[Array, "B n D"]:
        """Sums over each sequence's counted tokens (n is S), or without pooling all tokens (T)."""
        slots = length.shape[1]
        place = rows.layout(length, length, tokens.shape[1])
        states = model.apply({"params": params}, tokens, place, method=Bert.hidden_states)
        chosen = [states[i].astype(jnp.float32) for i in layers]
        if weights:
            x = sum(w * state for w, state in zip(weights, chosen, strict=True))
        else:
            x = jnp.concatenate(chosen, -1)
        if pooling == "none":
            return x
        own = place.sequence[:, None, :] == jnp.arange(slots)[None, :, None]
        own = (own & counted[:, None, :]).astype(jnp.float32)
        return jnp.einsum("bst,btd->bsd", own, x, precision=jax.lax.Precision.HIGHEST)

    return forward


def embed_file(
    embedder: Embedder,
    source: str | os.PathLike,
    out: str | os.PathLike,
    column: str = "text",
) -> Counts:
    """Writes the vectors of a file's texts, in order, and shows progress.

    Args:
        embedder: makes them.
        source: as `texts.read` takes it.
        out: .npy, float32 [texts, D]; without pooling [tokens, D], one text after the other, and
            NAME.lengths.npy says how many tokens each has. .jsonl or .parquet: index, text,
            vector, and without pooling the tokens.
        column: the field or column of the texts.

    Raises:
        UserError: `out` exists or cannot be written; the source cannot be read, or something in it
            is no text (names the line). Nothing is left half-written.
    """
    path, each_token = pathlib.Path(out), embedder.pooling == "none"
    if path.suffix not in OUTPUTS:
        raise UserError(f"{path}: what to write goes by the name, one of *{', *'.join(OUTPUTS)}")
    lengths = path.with_suffix(".lengths.npy") if each_token and path.suffix == ".npy" else None
    for there in (path, lengths):
        if there and there.exists():
            raise UserError(f"{there} is there already; remove it or choose another name")
    found = texts.read(str(source), column)
    waiting: collections.deque = collections.deque()  # texts that the embedder has, in order

    def taken() -> Iterator[str]:
        for text, read in found.texts:
            waiting.append((text, read))
            yield text

    names, before = embedder.vocabulary.tokens, 0
    with (
        Progress("embed", found.total, found.unit) as progress,
        files.one_line_errors(f"cannot write {path}"),
        contextlib.ExitStack() as stack,
    ):
        beside = stack.enter_context(files.replacing(path))
        beside_lengths = stack.enter_context(files.replacing(lengths)) if lengths else None
        if path.suffix == ".npy":
            writer = Npy(beside, beside_lengths, embedder.dimension)
        else:
            writer = {".jsonl": Jsonl, ".parquet": Parquet}[path.suffix](beside, each_token)
        with contextlib.closing(writer):
            for tokens, vectors in embedder.with_tokens(taken()):
                text, read = waiting.popleft()
                pieces = [names[i] for i in tokens] if each_token else []
                writer.write(text, pieces, vectors)
                progress.advance(read - before)
                before = read
    return embedder.counts
