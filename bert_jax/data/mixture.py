"""Mixtures of row folders: which row of which folder stands at a position is a function of the position.

Each folder has its own shuffled order (`shuffle`). A pattern of low discrepancy assigns positions to
folders, so every batch has their shares to within about a row, and resuming needs no state.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int64

from bert_jax.data.loader import Batch, RowDataset
from bert_jax.data.rows import Manifest, Split
from bert_jax.data.shuffle import shuffled
from bert_jax.errors import UserError

# Length of the pattern, and an odd number near it times the golden ratio's inverse: its multiples are
# spread evenly (Knuth, The Art of Computer Programming, volume 3, section 6.4, theorem S).
_PERIOD, _STRIDE = 1 << 16, 40_503
# What rows must have in common to be mixed.
_ALIKE = ("vocab_sha256", "tokens", "sequences", "vocab_size", "pairs")


def merged(manifests: Sequence[Manifest], where: str = "") -> Manifest:
    """Return the manifest of a mixture: its digest, sources and splits are those of all folders.

    Raises:
        UserError: the rows differ in vocabulary or format; it begins with `where`.
    """
    first, *others = manifests
    for name in _ALIKE:
        if differ := [m for m in others if getattr(m, name) != getattr(first, name)]:
            raise UserError(
                f"{where}: {name} is {getattr(first, name)} and {getattr(differ[0], name)}: to mix rows, prepare "
                "them with the same vocabulary and options"
            )
    if not others:
        return first

    def joined(splits: Sequence[Split]) -> Split:
        names = ("documents", "sequences", "rows", "real_tokens")
        sums = {name: sum(getattr(split, name) for split in splits) for name in names}
        fill = sums["real_tokens"] / max(sums["rows"] * first.tokens, 1)
        shards = tuple(shard for split in splits for shard in split.shards)
        return Split(**sums, fill_fraction=fill, shards=shards)

    return dataclasses.replace(
        first,
        sources=tuple(source for manifest in manifests for source in manifest.sources),
        train=joined([manifest.train for manifest in manifests]),
        heldout=joined([manifest.heldout for manifest in manifests]),
    )


def token_shares(
    weights: Sequence[float], tokens: Sequence[int], temperature: float
) -> Float[np.ndarray, " n"]:
    """Return each folder's share of the tokens, in proportion to weight * tokens ** (1 / temperature).

    With equal weights this is the sampling of languages of multilingual BERT and XLM (Lample and
    Conneau, arXiv 1901.07291, section 3.1), whose exponent is 1 / temperature. 0 takes the weights alone.
    """
    shares = np.array(weights, float)
    if temperature:
        shares *= (np.array(tokens) / max(tokens)) ** (1 / temperature)
    return shares / shares.sum()


class _Segment(NamedTuple):
    """Positions from `start` on that repeat a pattern of folders.

    Attributes:
        start: the first position.
        folder: index of the folder at each position of the pattern.
        rank: number of earlier positions of the pattern with the same folder.
        counts: number of positions of the pattern by folder.
        used: number of rows of each folder that come before the segment.
    """

    start: int
    folder: Int[np.ndarray, " period"]
    rank: Int[np.ndarray, " period"]
    counts: Int64[np.ndarray, " n"]
    used: Int64[np.ndarray, " n"]

    def rows_before(self, position: int) -> Int64[np.ndarray, " n"]:
        """Return the number of rows of each folder before a position of this segment."""
        patterns, slot = divmod(position - self.start, _PERIOD)
        partial = np.bincount(self.folder[:slot], minlength=len(self.counts))
        return self.used + patterns * self.counts + partial

    def position_of(self, folder: int, number: int) -> int:
        """Return the position of the row `number` of a folder."""
        patterns, rank = divmod(number - int(self.used[folder]), int(self.counts[folder]))
        slot = np.flatnonzero(self.folder == folder)[rank]
        return self.start + patterns * _PERIOD + int(slot)


def _segment(
    start: int, shares: Float[np.ndarray, " n"], used: Int64[np.ndarray, " n"]
) -> _Segment:
    ends = np.round(np.cumsum(shares) / shares.sum() * _PERIOD).astype(np.int64)
    counts = np.diff(ends, prepend=0)
    spread = np.arange(_PERIOD) * _STRIDE % _PERIOD  # each number once
    folder = np.searchsorted(ends, spread, "right").astype(np.int32)
    rank = np.empty(_PERIOD, np.int32)
    for i, count in enumerate(counts):
        rank[folder == i] = np.arange(count)
    return _Segment(start, folder, rank, counts, used)


class Mixture:
    """The training rows of several folders, in a mixed order.

    Attributes:
        shares: each folder's share of the tokens.
    """

    def __init__(
        self,
        datasets: Sequence[RowDataset],
        weights: Sequence[float],
        temperature: float,
        used: Sequence[int],
        repeats: bool,
    ):
        """Mix folders.

        Args:
            datasets: the training rows of each folder.
            weights, temperature: as in `token_shares`.
            used: number of rows of each folder that an earlier part of the run has read.
            repeats: whether a folder without rows left begins again. If not, the others continue in their
                proportions, and the last of them begins again.
        """
        self._datasets = datasets
        self._starts = np.cumsum([0, *map(len, datasets)])
        splits = [dataset.manifest.train for dataset in datasets]
        tokens = [split.real_tokens for split in splits]
        self.shares = token_shares(weights, tokens, temperature)
        row_shares = self.shares * [split.rows / split.real_tokens for split in splits]
        self._segments = list(self._make_segments(row_shares, np.array(used), repeats))
        if not self._segments[0].counts.all():
            raise UserError(
                f"a mixture has a folder with a share of {self.shares.min():.1g} of the tokens: it must be "
                f"1/{_PERIOD:,} or more; raise its weight"
            )

    def _make_segments(
        self, shares: Float[np.ndarray, " n"], used: Int64[np.ndarray, " n"], repeats: bool
    ) -> Iterator[_Segment]:
        segment = _segment(0, shares, used)
        yield segment
        while not repeats and np.count_nonzero(shares) > 1:
            ends = {
                segment.position_of(i, max(len(self._datasets[i]), int(segment.used[i]))): i
                for i in np.flatnonzero(segment.counts).tolist()
            }
            start = min(ends)
            shares = np.where(np.arange(len(shares)) == ends[start], 0, shares)
            segment = _segment(start, shares, segment.rows_before(start))
            yield segment

    def rows_before(self, position: int) -> Int64[np.ndarray, " n"]:
        """Return the number of rows of each folder before a position, with those of earlier parts."""
        begun = [segment for segment in self._segments if segment.start <= position]
        return begun[-1].rows_before(position)

    def indices(self, positions: Int[np.ndarray, " m"], seed: int) -> Int64[np.ndarray, " m"]:
        """Return the indices at positions of the order, counted through all folders, one after the other."""
        result = np.empty(len(positions), np.int64)
        starts = [segment.start for segment in self._segments]
        segments = np.searchsorted(starts, positions, "right") - 1
        for k in np.unique(segments):
            segment = self._segments[k]
            patterns, slots = np.divmod(positions - segment.start, _PERIOD)
            folders = np.where(segments == k, segment.folder[slots], -1)
            for i in np.unique(folders[folders >= 0]):
                here = folders == i
                numbers = segment.used[i] + patterns[here] * segment.counts[i]
                numbers += segment.rank[slots[here]]
                rows = shuffled(numbers, len(self._datasets[i]), seed)
                result[here] = self._starts[i] + rows
        return result

    def read(self, indices: Int[np.ndarray, " m"]) -> Batch:
        """Return the rows at `indices` (see `RowDataset.read`)."""
        folders = np.searchsorted(self._starts, indices, "right") - 1
        parts = [
            self._datasets[i].read(indices[folders == i] - self._starts[i])
            for i in np.unique(folders)
        ]
        back = np.argsort(np.argsort(folders, kind="stable"))
        return {name: np.concatenate([p[name] for p in parts])[back] for name in parts[0]}
