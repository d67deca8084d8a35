"""Training of WordPiece vocabularies, in the layout of Google's files, and new entries for them."""

import collections
import heapq
import itertools
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from bert_jax import storage
from bert_jax.data import corpus
from bert_jax.data.readers import UNKNOWN_WORD
from bert_jax.data.sentences import split_sentences
from bert_jax.data.vocabulary import (
    CONTINUATION,
    MAX_WORD_CHARACTERS,
    SPECIAL,
    Vocabulary,
)
from bert_jax.errors import UserError, shorten
from bert_jax.runtime.progress import Progress
from bert_jax.storage import files

# Twenty times the size of the largest vocabularies in use.
_MAX_SIZE = 5_000_000
# About 1.5 GB of memory. Beyond it the rarest are dropped, which hardly affects frequent pieces.
_MAX_WORDS = 10_000_000
# Share of a text that the characters of a vocabulary must cover if 1,000 do not suffice, as in scripts with
# thousands of them: the default of SentencePiece's character_coverage.
_COVERAGE = 0.9995


def reserved(size: int, unused: int | None = None) -> list[str]:
    """Return the tokens before the first word piece, as in Google's files.

    [PAD] is 0, followed by up to 99 unused tokens, [UNK], [CLS], [SEP], [MASK] (100 to 103 after
    99 unused tokens) and the remaining unused tokens. `unused`, their number, defaults to Google's
    994 for sizes from 20,000, to 99 from 2,000 (which keeps Google's special ids), and to 0 below.
    """
    if unused is None:
        unused = 994 if size >= 20_000 else 99 if size >= 2_000 else 0
    unused_tokens = [f"[unused{i}]" for i in range(unused)]
    return [SPECIAL[0], *unused_tokens[:99], *SPECIAL[1:], *unused_tokens[99:]]


@storage.with_uploaded_output("out")
def train(
    sources: Sequence[str],
    out: str | pathlib.Path,
    *,
    size: int = 30_522,
    lowercase: bool = True,
    min_frequency: int = 2,
    unused: int | None = None,
    sample_bytes: int | None = None,
    language: str = "en",
    force: bool = False,
) -> Vocabulary:
    """Train a WordPiece vocabulary on text and save it to a folder.

    The same text and settings give the same bytes. Memory depends on the number of distinct words,
    up to `_MAX_WORDS`, not on the amount of text.

    Args:
        sources: text sources, as specified for `corpus.parse_source`.
        out: output folder for vocab.txt and vocab.json.
        size: V; the vocabulary is smaller, with a warning, if the text yields fewer pieces.
        lowercase: whether to lowercase text and strip accents.
        min_frequency: minimum number of occurrences of a piece.
        unused: number of unused tokens; None for the default of `reserved`.
        sample_bytes: stop reading each source after this much text; None for no limit.
        language: language code for `split_sentences`.
        force: write to a folder that contains a vocabulary, or other files, such as those of a run.
    """
    from tokenizers import normalizers

    check_out(pathlib.Path(out), force)
    head = reserved(size, unused)
    if size < len(head) + 100:
        raise UserError(
            f"size: {size:,} leaves {max(size - len(head), 0):,} for word pieces after "
            f"{len(head):,} special and unused tokens; choose at least {len(head) + 100:,}"
        )
    check_numbers(size, min_frequency)
    parsed = [corpus.parse_source(source) for source in sources]
    with Progress("counting words", corpus.total_bytes(parsed), "B") as progress:
        normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        words = count_words(parsed, normalizer, progress, sample_bytes, language)
        if not words:
            raise UserError(f"no words in {', '.join(map(repr, sources))}; check the sources")
        progress.note("merging pieces")
        vocabulary = Vocabulary(
            (*head, *_train_pieces(words, size - len(head), min_frequency)), lowercase
        )
        if len(vocabulary) < size:
            progress.say(
                f"warning: the text yields only {len(vocabulary):,} pieces of frequency "
                f"{min_frequency} or more, not {size:,}; use more text for a larger vocabulary"
            )
    vocabulary.save(out)
    return vocabulary


def count_words(
    sources: Sequence[corpus.Source],
    normalizer: Any,
    progress: Progress,
    sample_bytes: int | None = None,
    language: str = "en",
) -> collections.Counter[str]:
    """Return the number of occurrences of each normalized word."""
    from tokenizers import pre_tokenizers

    # Strings between spaces first, in order to normalize each distinct one only once.
    chunks = count_chunks(sources, progress, sample_bytes, language)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words: collections.Counter[str] = collections.Counter()
    for chunk, count in chunks.items():
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(chunk)):
            if UNKNOWN_WORD not in word:
                words[word] += count
    return words


def count_chunks(
    sources: Sequence[corpus.Source],
    progress: Progress,
    sample_bytes: int | None = None,
    language: str = "en",
) -> collections.Counter[str]:
    """Return the number of occurrences of each string between spaces."""
    chunks: collections.Counter[str] = collections.Counter()
    report = corpus.Report()
    for source in sources:
        remaining_bytes, bytes_before = sample_bytes, report.bytes_read
        for document in corpus.read(source, report):
            for sentence in split_sentences(document, language):
                for _ in range(document.copies):
                    chunks.update(sentence.split())
            if len(chunks) > _MAX_WORDS:
                chunks = _frequent(chunks, _MAX_WORDS // 2)
            progress.advance(report.bytes_read - bytes_before)
            bytes_before = report.bytes_read
            if remaining_bytes is not None:
                remaining_bytes -= len(document.text.encode(errors="replace"))
                if remaining_bytes <= 0:
                    break
    for warning in report.warnings:
        progress.say(f"warning: {warning}")
    return chunks


def check_numbers(size: int, min_frequency: int) -> None:
    """Refuse settings of a trainer that are out of range."""
    if size > _MAX_SIZE:
        raise UserError(f"size: {size:,} is too large; choose at most {_MAX_SIZE:,}")
    if not 0 <= min_frequency < 1 << 31:
        raise UserError(f"min_frequency: {min_frequency:,} is out of range; choose 0 to 2**31 - 1")


def check_out(folder: pathlib.Path, force: bool) -> None:
    """Refuse a folder that cannot be written to or, unless `force`, has a vocabulary or other files."""
    with files.one_line_errors(f"cannot write the vocabulary to {folder}"):
        if url := storage.remote(folder):
            names = list(storage.listing(url))
        else:
            names = os.listdir(folder) if folder.exists() else []
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            tempfile.TemporaryFile(dir=existing).close()
    if names and not force:
        raise UserError(
            f"{folder} is not empty ({shorten(sorted(names))}): choose another folder, or add --force to "
            "replace the vocabulary in it"
        )


def _frequent(counts: collections.Counter[str], max_words: int) -> collections.Counter[str]:
    """Drop the rarest words until at most `max_words` are left."""
    min_count = 1
    while len(counts) > max_words or min_count < 2:
        min_count += 1
        counts = collections.Counter({word: n for word, n in counts.items() if n >= min_count})
    return counts


def _train_pieces(words: collections.Counter[str], size: int, min_frequency: int) -> list[str]:
    """Return at most `size` pieces: single characters, sorted, then merged ones by frequency.

    The library's trainer collects the characters of words in the random order of a hash table,
    which then breaks ties between merges. So select the characters and their "##" forms here and
    pass them as special tokens, whose order the trainer keeps.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    first: collections.Counter[str] = collections.Counter()
    inner: collections.Counter[str] = collections.Counter()
    for word, count in words.items():
        if len(word) <= MAX_WORD_CHARACTERS:
            first[word[0]] += count
            for character in word[1:]:
                inner[character] += count
    total = first + inner
    frequent = [c for c in sorted(total, key=lambda c: (-total[c], c)) if total[c] >= min_frequency]
    # Leave room for merges: rare characters become [UNK].
    covered, sums = (
        _COVERAGE * sum(total.values()),
        itertools.accumulate(total[c] for c in frequent),
    )
    needed = sum(s < covered for s in sums) + 1
    alphabet = set(frequent[: min(max(1_000, needed), size // 3)])
    characters = sorted(alphabet & set(first)) + [
        CONTINUATION + c for c in sorted(alphabet & set(inner))
    ]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=characters,
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    tokenizer.train_from_iterator(repeat(words, MAX_WORD_CHARACTERS), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


_BATCH_CHARACTERS = 1 << 20


def repeat(words: collections.Counter[str], longest: int) -> Iterator[str]:
    """Yield every word as often as it occurs, after spaces, as the trainers do their own counting."""
    for word, count in sorted(words.items()):
        if len(word) <= longest:
            max_repeats = max(1, _BATCH_CHARACTERS // len(word))
            while count > 0:
                yield f" {word}" * min(count, max_repeats)
                count -= max_repeats


# New entries for a vocabulary in use.


@storage.with_local_inputs("path")
def new_words(vocabulary: Vocabulary, path: str | os.PathLike) -> list[str]:
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


def new_pieces(
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
        words = count_words(parsed, normalizer, progress)
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
