"""Training of WordPiece vocabularies, in the layout of Google's files."""

import collections
import itertools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from bert_jax import storage
from bert_jax.data import corpus
from bert_jax.data.readers import UNKNOWN_WORD
from bert_jax.data.sentences import split_sentences
from bert_jax.data.vocabulary import (
    CONTINUATION,
    MAX_WORD_CHARACTERS,
    SETTINGS,
    SPECIAL,
    VOCAB,
    Vocabulary,
)
from bert_jax.errors import UserError
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
        force: write to a folder that contains other files, such as those of a run.
    """
    from tokenizers import normalizers

    if not force:
        _check_out(pathlib.Path(out))
    head = reserved(size, unused)
    if size < len(head) + 100:
        raise UserError(
            f"size: {size:,} leaves {max(size - len(head), 0):,} for word pieces after "
            f"{len(head):,} special and unused tokens; choose at least {len(head) + 100:,}"
        )
    if size > _MAX_SIZE:
        raise UserError(f"size: {size:,} is too large; choose at most {_MAX_SIZE:,}")
    if not 0 <= min_frequency < 1 << 31:
        raise UserError(f"min_frequency: {min_frequency:,} is out of range; choose 0 to 2**31 - 1")
    parsed = [corpus.parse_source(source) for source in sources]
    with Progress("counting words", corpus.total_bytes(parsed), "B") as progress:
        normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        words = count_words(parsed, normalizer, sample_bytes, language, progress)
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
    sample_bytes: int | None,
    language: str,
    progress: Progress,
) -> collections.Counter[str]:
    """Return the number of occurrences of each normalized word."""
    from tokenizers import pre_tokenizers

    # Count strings between spaces first, in order to normalize each distinct one only once.
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
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words: collections.Counter[str] = collections.Counter()
    for chunk, count in chunks.items():
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(chunk)):
            if UNKNOWN_WORD not in word:
                words[word] += count
    return words


def _check_out(folder: pathlib.Path) -> None:
    """Refuse to replace the vocabulary of a run or of rows."""
    with files.one_line_errors(f"cannot write the vocabulary to {folder}"):
        if url := storage.remote(folder):
            names = list(storage.listing(url))
        else:
            names = os.listdir(folder) if folder.is_dir() else []
    others = sorted(set(names) - {VOCAB, SETTINGS})
    if others:
        raise UserError(
            f"{folder} contains other files ({', '.join(others[:3])}): choose another folder, or add "
            "--force to replace the vocabulary in it"
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
    tokenizer.train_from_iterator(_repeat(words), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


_BATCH_CHARACTERS = 1 << 20


def _repeat(words: collections.Counter[str]) -> Iterator[str]:
    """Yield every word as often as it occurs, as the trainer does its own counting."""
    for word, count in sorted(words.items()):
        if len(word) <= MAX_WORD_CHARACTERS:
            max_repeats = max(1, _BATCH_CHARACTERS // len(word))
            while count > 0:
                yield f"{word} " * min(count, max_repeats)
                count -= max_repeats
