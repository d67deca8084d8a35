"""Division of tokenized documents into splits and units of work, each a shard of rows."""

import collections
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bert_jax.data.prepare_worker import DOCUMENT, Job, Unit, read_table
from bert_jax.errors import UserError, with_user_paths
from bert_jax.storage import files

_UNKNOWN_FRACTION = 0.2  # with more [UNK] than this, the vocabulary does not fit the text
# How many documents are considered where few are to be held out.
_LOWEST_DOCUMENTS = 1_000
# A shard holds 1/64 of the corpus, within these bounds in tokens.
_SHARDS, _MIN_SHARD_TOKENS, _MAX_SHARD_TOKENS = 64, 1 << 18, 1 << 24


def make_plan(job: Job, chunks: Sequence[int]) -> dict[str, Any]:
    """Divide the documents into splits and units, and write the index of each split.

    Returns:
        `starts` (first document of each unit and the end, for each split) and `warnings`.
    """
    heldout_fraction, is_nsp = job.settings["heldout_fraction"], job.settings["pairs"] == "nsp"
    documents = tokens = heldout_tokens = 0
    threshold = np.uint64(heldout_fraction * 2**64)
    # The documents with the lowest hashes, each once, and how many copies the corpus has of them.
    lowest, copies = np.zeros(0, DOCUMENT), np.zeros(0, np.int64)
    for number in chunks:
        table, _ = read_table(job.chunk(number))
        documents += len(table)
        tokens += int(table["tokens"].sum())
        heldout_tokens += int(table["tokens"][table["hash"] < threshold].sum())
        lowest = np.concatenate([lowest, table])
        copies = np.concatenate([copies, np.ones(len(table), np.int64)])
        _, first, groups = np.unique(lowest["hash"], return_index=True, return_inverse=True)
        copies = np.bincount(groups, copies)[:_LOWEST_DOCUMENTS].astype(np.int64)
        lowest = lowest[first[:_LOWEST_DOCUMENTS]]
    if not documents:
        raise UserError("the sources contain no text with words; check the files")
    if is_nsp and len(lowest) == 1:
        raise UserError(
            "the corpus has one document only, but random next sentences come from another one; "
            "separate documents by blank lines, or use --pairs none"
        )
    warnings = _unknown_warnings(job, chunks)

    # How many tokens at the end of a document are held out, by its hash, where it is not all.
    tails: dict[int, tuple[int, int]] = {}
    # A random next sentence comes from another document of the same split.
    min_documents = 2 if is_nsp else 1
    target = math.ceil(heldout_fraction * tokens)
    enough = len(lowest) > 1 and lowest["hash"][1] < threshold
    if target and not (enough and target / 2 <= heldout_tokens <= 2 * target):
        threshold = np.uint64(0)
        tails = _heldout_ends(job, lowest, copies, target)
        if len(tails) < min_documents:
            tails = {}
            warnings.append(
                f"the corpus has {documents:,} documents, too few or too short to hold out a part"
            )

    shard_tokens = min(max(tokens // _SHARDS, _MIN_SHARD_TOKENS), _MAX_SHARD_TOKENS)
    starts, size = {}, {}
    for i, split in enumerate(("train", "heldout")):
        tables = (read_table(job.chunk(number))[0] for number in chunks)
        parts = (_divided(table, threshold, tails)[i] for table in tables)
        starts[split], size[split] = _write_index(job, split, parts, shard_tokens)
    if starts["train"][-1] < min_documents:
        raise UserError(
            f"heldout_fraction {heldout_fraction} leaves fewer than two documents to train on; lower it"
        )
    share = size["heldout"] / sum(size.values())
    if share > 2 * heldout_fraction or 0 < share < heldout_fraction / 2:
        reason = (
            f"the corpus has few documents ({documents:,})"
            if share > heldout_fraction
            else f"of {documents:,} documents, those with the lowest hashes are short"
        )
        warnings.append(
            f"{share:.1%} of the tokens are held out, not {heldout_fraction:.1%}: {reason}"
        )
    return {"starts": starts, "warnings": warnings}


def _unknown_warnings(job: Job, chunks: Sequence[int]) -> list[str]:
    """Warn of files that do not fit the vocabulary."""
    by_file: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(2, np.int64))
    for number in chunks:
        for file, counts in read_table(job.chunk(number))[1].items():
            by_file[file] += counts
    tokens, unknown = sum(by_file.values(), np.zeros(2, np.int64))
    shares = [(missed / total, file) for file, (total, missed) in by_file.items()]
    worst = [(share, file) for share, file in shares if share > _UNKNOWN_FRACTION]
    if not worst:
        return []
    share, file = max(worst)
    return [
        f"{with_user_paths(file)}: {share:.0%} of its tokens are unknown to the vocabulary "
        f"({len(worst):,} such files, {unknown / tokens:.0%} of the corpus); check that the vocabulary "
        "matches the language and case of the text"
    ]


def _heldout_ends(
    job: Job, documents: np.ndarray, copies: np.ndarray, target: int
) -> dict[int, tuple[int, int]]:
    """Choose the ends of documents that are held out where few documents are to be.

    Args:
        job: the job.
        documents: [n] of `DOCUMENT`, in order of preference.
        copies: [n], how many times each is in the corpus.
        target: number of tokens to hold out. At least two documents have a part in it if possible,
            because random next sentences come from another document.

    Returns:
        Numbers of sentences and tokens at the end of a document, by its hash; both are all that the
        document has if it is held out whole.
    """
    tails: dict[int, tuple[int, int]] = {}
    remaining_tokens = target
    for document, num_copies in zip(documents, copies.tolist(), strict=True):
        if remaining_tokens <= 0 and len(tails) > 1:
            break
        budget = max(remaining_tokens if tails else target // 2, 1) / num_copies
        count, total = int(document["sentences"]), int(document["tokens"])
        if total > budget:
            bounds = np.fromfile(
                job.chunk(int(document["chunk"])), "<u4", count + 1, offset=int(document["at"])
            )
            sizes = bounds[-1] - bounds[1:-1].astype(
                np.int64
            )  # of the ends after 1, 2, … sentences
            if not len(sizes):
                continue
            first = 1 + int(np.abs(sizes - budget).argmin())
            count, total = count - first, int(sizes[first - 1])
        tails[int(document["hash"])] = count, total
        remaining_tokens -= total * num_copies
    return tails


def _divided(
    table: np.ndarray, threshold: np.uint64, tails: dict[int, tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Divide the documents of a chunk into those to train on and those held out.

    Args:
        table: [n] of `DOCUMENT`.
        threshold: documents with lower hashes are held out.
        tails: of other documents, the ends that are held out (see `_heldout_ends`).
    """
    heldout = table["hash"] < threshold
    train, held = table[~heldout], table[heldout]
    split = np.isin(train["hash"], np.array([*tails], np.uint64))
    if split.any():
        held = train[split]
        count, total = np.array([tails[int(value)] for value in held["hash"]]).T
        train["sentences"][split] -= count.astype(np.uint32)
        train["tokens"][split] -= total.astype(np.uint32)
        held["at"] += 4 * (held["sentences"] - count).astype(np.uint64)
        held["sentences"], held["tokens"] = count, total
        train = train[train["sentences"] > 0]
    return train, held


def _write_index(
    job: Job, split: str, parts: Iterable[np.ndarray], shard_tokens: int
) -> tuple[list[int], int]:
    """Write the documents of a split ([n] of `DOCUMENT` each part) to its index.

    Returns:
        The first document of each unit of about `shard_tokens`, and their number; their tokens.
    """
    starts: list[int] = []
    count = size = 0
    unit = -1
    with files.atomic_write(job.index(split)) as temporary, open(temporary, "wb") as file:
        for part in parts:
            if len(part):
                ends = size + part["tokens"].cumsum(dtype=np.int64)
                units = (ends - part["tokens"]) // shard_tokens
                (new,) = np.nonzero(np.diff(units, prepend=unit))
                starts += (count + new).tolist()
                file.write(part.tobytes())
                count += len(part)
                size, unit = int(ends[-1]), int(units[-1])
    return [*starts, count], size


def units_of(split: str, starts: list[int], passes: int) -> list[Unit]:
    bounds = list(itertools.pairwise(starts))
    total = passes * len(bounds)
    return [
        Unit(split, pass_index, first, end, f"{split}-{number:05}-of-{total:05}.arrayrecord")
        for number, (pass_index, (first, end)) in enumerate(
            itertools.product(range(passes), bounds)
        )
    ]
