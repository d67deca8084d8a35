"""WordPiece vocabularies, tokenization and vocabulary training.

Tokens and ids are BERT's: a `vocab.txt` from Google or Hugging Face loads unchanged, and `train`
writes the same layout. As in BERT, accents are stripped when text is lowercased and kept otherwise.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from bert_jax import storage
from bert_jax.data import corpus
from bert_jax.data.compressed import whole
from bert_jax.data.sentences import split_sentences
from bert_jax.errors import UserError
from bert_jax.runtime.progress import Progress
from bert_jax.storage import files

if TYPE_CHECKING:
    import tokenizers

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB = "vocab.txt"
SETTINGS = "vocab.json"
CONTINUATION = "##"
MAX_WORD_CHARACTERS = 100  # as in BERT: a longer word becomes [UNK]
_BATCH_TEXTS = 1000


class Encoded(NamedTuple):
    """A text as n word pieces.

    Attributes:
        ids: token ids.
        spans: start and end of each piece in the text, in characters.
    """

    ids: Int[np.ndarray, " n"]
    spans: Int[np.ndarray, "n 2"]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A vocabulary of V tokens; the index of a token is its id.

    Attributes:
        tokens: tokens in order of id; those that continue a word begin with "##".
        lowercase: whether text is lowercased before tokenization.
        strip_accents: whether accents are stripped before tokenization; None follows `lowercase`.
        split_chinese: whether every Chinese character is a word.
    """

    # File that identifies the vocabulary, in its folder.
    file: ClassVar[str] = VOCAB

    tokens: tuple[str, ...]
    lowercase: bool
    strip_accents: bool | None = None
    split_chinese: bool = True

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def contents(self) -> dict[str, bytes]:
        """Content of each file that `save` writes: the settings and vocab.txt."""
        settings = json.dumps(self.settings, indent=2) + "\n"
        return {SETTINGS: settings.encode(), VOCAB: self.to_bytes()}

    @property
    def settings(self) -> dict[str, Any]:
        """All fields except the tokens."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "tokens"}

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Mapping from token to id."""
        return {token: i for i, token in enumerate(self.tokens)}

    @property
    def special(self) -> tuple[str, ...]:
        """The tokens for padding, unknown words, start, separator and mask, in this order."""
        return SPECIAL

    @property
    def pad_id(self) -> int:
        return self.index[self.special[0]]

    @property
    def unk_id(self) -> int:
        return self.index[self.special[1]]

    @property
    def cls_id(self) -> int:
        return self.index[self.special[2]]

    @property
    def sep_id(self) -> int:
        return self.index[self.special[3]]

    @property
    def mask_id(self) -> int:
        return self.index[self.special[4]]

    @property
    def separator_ids(self) -> list[int]:
        """Ids between the texts of a pair."""
        return [self.sep_id]

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 (hexadecimal) of the bytes that `save` writes to vocab.txt."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the content of vocab.txt."""
        return "".join(f"{token}\n" for token in self.tokens).encode()

    def tokenizer(self) -> "tokenizers.Tokenizer":
        """Return a new tokenizer from plain text to ids, without [CLS] and [SEP].

        "[SEP]" or "[MASK]" in the text are tokenized as brackets and a word: text yields no special
        id except [UNK].
        """
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers

        tokenizer = tokenizers.Tokenizer(
            models.WordPiece(
                self.index, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS
            )
        )
        tokenizer.normalizer = normalizers.BertNormalizer(
            handle_chinese_chars=self.split_chinese,
            strip_accents=self.strip_accents,
            lowercase=self.lowercase,
        )
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION)
        return tokenizer

    @functools.cached_property
    def _tokenizer(self) -> "tokenizers.Tokenizer":
        return self.tokenizer()

    def encode(self, text_a: str, text_b: str | None = None, *, mask: bool = False) -> list[int]:
        """Return the ids of `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`.

        Args:
            text_a: text of the first segment.
            text_b: text of the second segment, or None.
            mask: whether "[MASK]" in the text stands for the token rather than its characters.
        """
        ids = [self.cls_id]
        for text in (text_a,) if text_b is None else (text_a, text_b):
            for i, part in enumerate(text.split("[MASK]") if mask else [text]):
                ids += [self.mask_id] * (i > 0)
                part = part.encode("utf-8", "replace").decode()  # arguments may contain surrogates
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
            ids.append(self.sep_id)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[Encoded]:
        """Return ids, without [CLS] and [SEP], and character spans of each text."""
        encoded = []
        with Progress("tokenizing", len(texts), "texts") as progress:
            # In batches, as the library's objects take far more memory than the arrays.
            for start in range(0, len(texts), _BATCH_TEXTS):
                part = list(texts[start : start + _BATCH_TEXTS])
                for encoding in self._tokenizer.encode_batch(part, add_special_tokens=False):
                    spans = np.array(encoding.offsets, np.int32).reshape(-1, 2)
                    encoded.append(Encoded(np.array(encoding.ids, np.int32), spans))
                progress.advance(len(part))
        return encoded

    def encode_words(self, words: Sequence[str]) -> list[Encoded]:
        """Return the result of `encode_all` for words of sentences."""
        return self.encode_all(words)

    def text_of(self, token_id: int) -> str:
        """Return a token as text to show."""
        return self.tokens[token_id]

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " n"]) -> str:
        """Return readable text for ids: word pieces joined to words, special tokens included."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def continuation(self) -> Bool[np.ndarray, " V"]:
        """Return which tokens continue a word, for whole-word masking."""
        return np.array([token.startswith(CONTINUATION) for token in self.tokens])

    def save(self, folder: str | pathlib.Path) -> None:
        """Write the files to a folder, creating it if necessary."""
        folder = pathlib.Path(folder)
        with files.one_line_errors(f"cannot write the vocabulary to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in self.contents.items():
                files.write(folder / name, content)


def load(path: str | os.PathLike, lowercase: bool | None = None) -> Vocabulary:
    """Load a vocabulary from a `vocab.txt` or from a folder with one.

    Args:
        path: path of the file or folder.
        lowercase: whether to lowercase text; None follows `vocab.json` in the same folder, or else
            `looks_lowercase`.
    """
    if storage.is_remote(path):
        path = storage.local(path, () if str(path).endswith(".txt") else (VOCAB, SETTINGS))
    path = pathlib.Path(path)
    try:
        if path.is_dir():
            path = path / VOCAB
        with path.open("rb") as file:
            data = whole(file, path)
    except FileNotFoundError:
        raise UserError(
            f"no vocabulary at {path}; train one with `bert-jax vocab` or name a vocab.txt"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {files.format_error(error)}") from None
    tokens = parse(data, path)
    vocabulary = Vocabulary(tokens, looks_lowercase(tokens))
    if (path.parent / SETTINGS).exists():
        vocabulary = dataclasses.replace(vocabulary, **_saved_settings(path.parent / SETTINGS))
    if lowercase is not None:
        vocabulary = dataclasses.replace(vocabulary, lowercase=lowercase)
    return vocabulary


def parse(data: bytes, where: object) -> tuple[str, ...]:
    """Parse and check the content of a vocab.txt.

    Args:
        data: content of the file.
        where: its name in error messages.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 at byte {error.start:,}; a vocabulary has a token per line"
        ) from None
    lines = text.removeprefix("\ufeff").removesuffix("\n").split("\n")
    tokens = tuple(line.removesuffix("\r") for line in lines)
    if tokens == ("",):
        raise UserError(f"{where}: the file is empty; a vocabulary has a token per line")
    seen: dict[str, int] = {}
    for number, token in enumerate(tokens, 1):
        if not token:
            raise UserError(f"{where}:{number}: an empty line; a vocabulary has a token per line")
        if token in seen:
            raise UserError(
                f"{where}:{number}: duplicate token {token!r} (first on line {seen[token]}); "
                "remove one of them"
            )
        seen[token] = number
    for token in SPECIAL:
        if token not in seen:
            raise UserError(f"{where}: no {token}; a BERT vocabulary contains {' '.join(SPECIAL)}")
    return tokens


def looks_lowercase(tokens: Sequence[str]) -> bool:
    """Whether no token has a capital letter, except special and unused ones."""
    return not any(token != token.lower() for token in tokens if not _is_reserved(token))


def _saved_settings(path: pathlib.Path) -> dict[str, bool | None]:
    allowed = {"lowercase": (bool,), "strip_accents": (bool, type(None)), "split_chinese": (bool,)}
    try:
        with path.open("rb") as file:
            settings = json.loads(whole(file, path))
        if "lowercase" in settings and all(isinstance(settings[k], allowed[k]) for k in settings):
            return settings
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    raise UserError(
        f'{path}: no valid settings; write {{"lowercase": true}} or false, or remove it'
    )


def _is_reserved(token: str) -> bool:
    """Whether a token has the form of a special or unused token in any vocabulary."""
    return token.startswith("[") and token.endswith("]") and len(token) > 2


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


# Twenty times the size of the largest vocabularies in use.
_MAX_SIZE = 5_000_000
# About 1.5 GB of memory. Beyond it the rarest are dropped, which hardly affects frequent pieces.
_MAX_WORDS = 10_000_000
# Share of a text that the characters of a vocabulary must cover if 1,000 do not suffice, as in scripts with
# thousands of them: the default of SentencePiece's character_coverage.
_COVERAGE = 0.9995


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
            if corpus.UNKNOWN_WORD not in word:
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
