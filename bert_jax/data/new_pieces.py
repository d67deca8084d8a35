"""New entries for a vocabulary in use: words of a file, or the most useful word pieces of a corpus."""

import collections
import heapq
import itertools
import os
import pathlib
from collections.abc import Sequence

from bert_jax import storage
from bert_jax.data import corpus
from bert_jax.data.vocabulary import CONTINUATION, MAX_WORD_CHARACTERS, Vocabulary
from bert_jax.data.wordpiece import count_words
from bert_jax.errors import UserError
from bert_jax.runtime.progress import Progress
from bert_jax.storage import files


@storage.with_local_inputs("path")
def of_file(vocabulary: Vocabulary, path: str | os.PathLike) -> list[str]:
    """Return the words of a text file that a vocabulary lacks, normalized as it normalizes text.

    A line with several words to the tokenizer, such as "covid-19", gives each of them. A line that
    begins with "##" is a piece that continues words.
    """
    with files.one_line_errors(f"cannot read {path}"):
        try:
            lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 at byte {error.start:,}") from None
    tokenizer, words = vocabulary.tokenizer(), {}
    for number, line in enumerate(lines, 1):
        prefix = CONTINUATION if line.startswith(CONTINUATION) else ""
        text = tokenizer.normalizer.normalize_str(line.removeprefix(prefix))
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
            if len(word) > MAX_WORD_CHARACTERS:
                raise UserError(
                    f"{path}:{number}: a word of {len(word):,} characters; the tokenizer reads more than "
                    f"{MAX_WORD_CHARACTERS} as [UNK]: remove it"
                )
            words[prefix + word] = None
    return [word for word in words if word not in vocabulary.index]


def of_corpus(
    vocabulary: Vocabulary, sources: Sequence[str], count: int, min_frequency: int = 2
) -> list[str]:
    """Return the word pieces whose addition shortens a corpus most.

    Args:
        vocabulary: the vocabulary in use.
        sources: text sources, as specified for `corpus.parse_source`.
        count: number of pieces; fewer are returned if the text has no more.
        min_frequency: minimum number of occurrences of a piece.
    """
    parsed = [corpus.parse_source(source) for source in sources]
    normalizer = vocabulary.tokenizer().normalizer
    with Progress("counting words", corpus.total_bytes(parsed), "B") as progress:
        words = count_words(parsed, normalizer, None, "en", progress)
        progress.note("merging pieces")
        return merge(vocabulary, words, count, min_frequency)


def merge(
    vocabulary: Vocabulary, words: collections.Counter[str], count: int, min_frequency: int
) -> list[str]:
    """Continue the training of a vocabulary: repeatedly merge the most frequent pair of pieces.

    Each merge adds a piece and shortens the text by the pair's frequency. Pieces that later merges
    absorb, so that fewer than `min_frequency` are left, do not count.
    """
    splits: list[list[str]] = []
    numbers: list[int] = []
    for word, number in sorted(words.items()):
        pieces = vocabulary.split(word)
        if len(pieces) > 1 and len(word) <= MAX_WORD_CHARACTERS:
            splits.append(pieces)
            numbers.append(number)
    pairs: collections.Counter[tuple[str, str]] = collections.Counter()
    used: collections.Counter[str] = collections.Counter()
    holders: dict[tuple[str, str], set[int]] = collections.defaultdict(set)

    def add(i: int, sign: int) -> set[tuple[str, str]]:
        """Add or remove the pieces and pairs of word i, by `sign`, and return the pairs."""
        for piece in splits[i]:
            used[piece] += sign * numbers[i]
        changed = set(itertools.pairwise(splits[i]))
        for pair in itertools.pairwise(splits[i]):
            pairs[pair] += sign * numbers[i]
        for pair in changed:
            (holders[pair].add if sign > 0 else holders[pair].discard)(i)
        return changed

    for i in range(len(splits)):
        add(i, 1)
    heap = [(-number, pair) for pair, number in pairs.items()]
    heapq.heapify(heap)
    new: dict[str, None] = {}
    while heap and sum(used[piece] >= min_frequency for piece in new) < count:
        number, pair = heapq.heappop(heap)
        if -number != pairs[pair]:  # outdated; the current count has another entry
            continue
        if -number < min_frequency:
            break
        piece = pair[0] + pair[1].removeprefix(CONTINUATION)
        if piece not in vocabulary.index:
            new[piece] = None
        changed = set()
        for i in sorted(holders[pair]):
            changed |= add(i, -1)
            splits[i] = _joined(splits[i], pair, piece)
            changed |= add(i, 1)
        for other in changed:
            if pairs[other] > 0:
                heapq.heappush(heap, (-pairs[other], other))
    return [piece for piece in new if used[piece] >= min_frequency]


def _joined(pieces: list[str], pair: tuple[str, str], piece: str) -> list[str]:
    joined: list[str] = []
    for other in pieces:
        if joined and (joined[-1], other) == pair:
            joined[-1] = piece
        else:
            joined.append(other)
    return joined
