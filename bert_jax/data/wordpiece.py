"""WordPiece: the vocabulary, its tokenizer, and training one.

The tokens and ids are BERT's: a `vocab.txt` of Google's or Hugging Face's loads as it is, and what
`train` writes has the same layout. Accents are stripped where text is put in lower case and kept
where it is not, as in BERT.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from bert_jax import files
from bert_jax.data import corpus
from bert_jax.data.compressed import whole
from bert_jax.errors import UserError
from bert_jax.progress import Progress

if TYPE_CHECKING:
    import tokenizers

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB = "vocab.txt"
SETTINGS = "vocab.json"
CONTINUATION = "##"
_WORD_CHARACTERS = 100  # BERT: a longer word is [UNK]
_BATCH_TEXTS = 1000


class Encoded(NamedTuple):
    """A text as n word pieces.

    Attributes:
        ids: of the pieces.
        spans: where in the text each begins and ends, in characters.
    """

    ids: Int[np.ndarray, " n"]
    spans: Int[np.ndarray, "n 2"]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """V tokens; a token's place is its id.

    Attributes:
        tokens: in order of id; those that go on within a word begin with "##".
        lowercase: whether text is put in lower case first.
        strip_accents: whether accents are stripped first; None: where text is put in lower case.
        split_chinese: whether every Chinese character is a word.
    """

    tokens: tuple[str, ...]
    lowercase: bool
    strip_accents: bool | None = None
    split_chinese: bool = True

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def settings(self) -> dict[str, bool | None]:
        """All but the tokens."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "tokens"}

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Token to id."""
        return {token: i for i, token in enumerate(self.tokens)}

    @property
    def pad_id(self) -> int:
        return self.index["[PAD]"]

    @property
    def unk_id(self) -> int:
        return self.index["[UNK]"]

    @property
    def cls_id(self) -> int:
        return self.index["[CLS]"]

    @property
    def sep_id(self) -> int:
        return self.index["[SEP]"]

    @property
    def mask_id(self) -> int:
        return self.index["[MASK]"]

    @functools.cached_property
    def sha256(self) -> str:
        """Hexadecimal, of the bytes that `save` writes to vocab.txt."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The content of its vocab.txt."""
        return "".join(f"{token}\n" for token in self.tokens).encode()

    def tokenizer(self) -> "tokenizers.Tokenizer":
        """A new tokenizer of plain text to ids, without [CLS] and [SEP].

        "[SEP]" or "[MASK]" in the text are brackets and a word like any others: no text becomes a
        special id but [UNK].
        """
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers

        tokenizer = tokenizers.Tokenizer(
            models.WordPiece(
                self.index, unk_token="[UNK]", max_input_chars_per_word=_WORD_CHARACTERS
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
        """`[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]` as ids.

        Args:
            text_a: any text.
            text_b: the second segment.
            mask: whether "[MASK]" in the text means the token and not its characters.
        """
        ids = [self.cls_id]
        for text in (text_a,) if text_b is None else (text_a, text_b):
            for i, part in enumerate(text.split("[MASK]") if mask else [text]):
                ids += [self.mask_id] * (i > 0)
                part = part.encode("utf-8", "replace").decode()  # a command line may hold any bytes
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
            ids.append(self.sep_id)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[Encoded]:
        """Of each text its ids, without [CLS] and [SEP], and where they stand in it."""
        encoded = []
        with Progress("tokenizing", len(texts), "texts") as progress:
            # Some at a time: the library's objects take far more memory than what is in them.
            for start in range(0, len(texts), _BATCH_TEXTS):
                part = list(texts[start : start + _BATCH_TEXTS])
                for found in self._tokenizer.encode_batch(part, add_special_tokens=False):
                    spans = np.array(found.offsets, np.int32).reshape(-1, 2)
                    encoded.append(Encoded(np.array(found.ids, np.int32), spans))
                progress.advance(len(part))
        return encoded

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " n"]) -> str:
        """Ids to text for people: words put together again, special tokens shown."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def continuation(self) -> Bool[np.ndarray, " V"]:
        """Which tokens go on within a word; for whole-word masking."""
        return np.array([token.startswith(CONTINUATION) for token in self.tokens])

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes `vocab.txt` and `vocab.json` (the settings) to a folder, creating it if need be.

        Raises:
            UserError: the folder cannot be written to.
        """
        folder = pathlib.Path(folder)
        with files.one_line_errors(f"cannot write the vocabulary to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            files.write_json(folder / SETTINGS, self.settings)
            files.write(folder / VOCAB, self.to_bytes())


def load(path: str | pathlib.Path, lowercase: bool | None = None) -> Vocabulary:
    """Reads a `vocab.txt`, or a folder that holds one.

    Args:
        path: of the file or the folder.
        lowercase: None: as `vocab.json` beside it says; without one, as `looks_lowercase` does.

    Raises:
        UserError: no such file, not a vocabulary, a special token missing, a token twice.
    """
    path = pathlib.Path(path)
    try:
        if path.is_dir():
            path = path / VOCAB
        with path.open("rb") as file:
            data = whole(file, path)
    except FileNotFoundError:
        raise UserError(
            f"no vocabulary at {path}; make one with `bert-jax vocab` or name a vocab.txt"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {files.describe(error)}") from None
    tokens = parse(data, path)
    vocabulary = Vocabulary(tokens, looks_lowercase(tokens))
    if (path.parent / SETTINGS).exists():
        vocabulary = dataclasses.replace(vocabulary, **_saved_settings(path.parent / SETTINGS))
    if lowercase is not None:
        vocabulary = dataclasses.replace(vocabulary, lowercase=lowercase)
    return vocabulary


def parse(data: bytes, where: object) -> tuple[str, ...]:
    """The tokens of a vocab.txt's content, checked.

    Args:
        data: the bytes.
        where: what to call them in an error.

    Raises:
        UserError: not a vocabulary, a special token missing, a token twice.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 at byte {error.start:,}; a vocabulary is text, a token a line"
        ) from None
    lines = text.removeprefix("\ufeff").removesuffix("\n").split("\n")
    tokens = tuple(line.removesuffix("\r") for line in lines)
    if tokens == ("",):
        raise UserError(f"{where} is empty; a vocabulary has a token a line")
    seen: dict[str, int] = {}
    for number, token in enumerate(tokens, 1):
        if not token:
            raise UserError(f"{where}:{number}: an empty line; a vocabulary has a token a line")
        if token in seen:
            raise UserError(
                f"{where}:{number}: {token!r} is there already (line {seen[token]}); "
                "every token must have one id"
            )
        seen[token] = number
    for token in SPECIAL:
        if token not in seen:
            raise UserError(
                f"{where} has no {token}; it is not a BERT vocabulary (it needs {' '.join(SPECIAL)})"
            )
    return tokens


def looks_lowercase(tokens: Sequence[str]) -> bool:
    """Whether no token but special and unused ones has a capital letter."""
    return not any(token != token.lower() for token in tokens if not _is_slot(token))


def _saved_settings(path: pathlib.Path) -> dict[str, bool | None]:
    allowed = {"lowercase": (bool,), "strip_accents": (bool, type(None)), "split_chinese": (bool,)}
    try:
        with path.open("rb") as file:
            found = json.loads(whole(file, path))
        if "lowercase" in found and all(isinstance(found[k], allowed[k]) for k in found):
            return found
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    raise UserError(f'{path} does not say {{"lowercase": true}} or false; write that or remove it')


def _is_slot(token: str) -> bool:
    """A special or unused token, in any vocabulary's spelling."""
    return token.startswith("[") and token.endswith("]") and len(token) > 2


def reserved(size: int, unused: int | None = None) -> list[str]:
    """The tokens before the first word piece, as in Google's files.

    [PAD] is 0; up to 99 unused slots follow, then [UNK], [CLS], [SEP], [MASK] (100 to 103 with all
    99 slots) and the other unused slots. `unused` defaults to Google's 994 from a size of 20,000
    on, to 99 from 2,000 on (the special ids stay Google's), and to none below.
    """
    if unused is None:
        unused = 994 if size >= 20_000 else 99 if size >= 2_000 else 0
    slots = [f"[unused{i}]" for i in range(unused)]
    return [SPECIAL[0], *slots[:99], *SPECIAL[1:], *slots[99:]]


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
) -> Vocabulary:
    """Trains a WordPiece vocabulary on text and saves it to a folder.

    The same text and settings give the same bytes. Memory grows with the number of different words,
    up to `_MOST_WORDS`, not with the amount of text.

    Args:
        sources: as `corpus.parse_source` reads them.
        out: the folder for vocab.txt and vocab.json.
        size: V. Where the text does not hold that many pieces there are fewer, and it is said.
        lowercase: put text in lower case and strip accents.
        min_frequency: a piece must occur this often.
        unused: unused slots; None as `reserved` says.
        sample_bytes: stop reading after so much text in each source.
        language: for `corpus.sentences`.

    Raises:
        UserError: what `corpus.read` raises; a size that leaves no room for pieces.
    """
    head = reserved(size, unused)
    if size < len(head) + 100:
        raise UserError(
            f"a vocabulary of {size:,} leaves {max(size - len(head), 0):,} for word pieces after "
            f"{len(head):,} special and unused tokens; ask for at least {len(head) + 100:,}"
        )
    if size > _MOST_SIZE:
        raise UserError(f"a vocabulary of {size:,} is too large; ask for {_MOST_SIZE:,} at most")
    if not 0 <= min_frequency < 1 << 31:
        raise UserError(f"a least frequency of {min_frequency:,} cannot be; ask for 0 or a few")
    parsed = [corpus.parse_source(source) for source in sources]
    with Progress("counting words", corpus.total_bytes(parsed), "B") as progress:
        words = _count_words(parsed, lowercase, sample_bytes, language, progress)
        if not words:
            raise UserError(f"no words in {', '.join(map(repr, sources))}; check the sources")
        progress.note("merging pieces")
        vocabulary = Vocabulary(
            (*head, *_train_pieces(words, size - len(head), min_frequency)), lowercase
        )
        if len(vocabulary) < size:
            progress.say(
                f"warning: the text holds only {len(vocabulary):,} pieces, not {size:,}, that occur "
                f"{min_frequency} times; went on with those, more text gives more"
            )
    vocabulary.save(out)
    return vocabulary


# Twenty times the largest that models have.
_MOST_SIZE = 5_000_000
# About 1.5 GB of memory; past it the rarest are dropped, which say little about frequent pieces.
_MOST_WORDS = 10_000_000


def _count_words(
    sources: Sequence[corpus.Source],
    lowercase: bool,
    sample_bytes: int | None,
    language: str,
    progress: Progress,
) -> collections.Counter[str]:
    """How often each normalized word occurs."""
    from tokenizers import normalizers, pre_tokenizers

    # What stands between spaces is counted first, for normalizing the different ones is enough.
    chunks: collections.Counter[str] = collections.Counter()
    report = corpus.Report()
    for source in sources:
        left, shown = sample_bytes, report.bytes_read
        for document in corpus.read(source, report):
            for sentence in corpus.sentences(document, language):
                for _ in range(document.copies):
                    chunks.update(sentence.split())
            if len(chunks) > _MOST_WORDS:
                chunks = _frequent(chunks, _MOST_WORDS // 2)
            progress.advance(report.bytes_read - shown)
            shown = report.bytes_read
            if left is not None:
                left -= len(document.text.encode(errors="replace"))
                if left <= 0:
                    break
    for warning in report.warnings:
        progress.say(f"warning: {warning}")
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words: collections.Counter[str] = collections.Counter()
    for chunk, count in chunks.items():
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(chunk)):
            words[word] += count
    return words


def _frequent(counts: collections.Counter[str], most: int) -> collections.Counter[str]:
    for least in itertools.count(2):
        counts = collections.Counter({word: n for word, n in counts.items() if n >= least})
        if len(counts) <= most:
            return counts


def _train_pieces(words: collections.Counter[str], size: int, min_frequency: int) -> list[str]:
    """At most `size` pieces: single characters, sorted, then merged ones, the frequent first.

    The library's trainer takes characters inside words in the random order of its hash table, which
    then decides ties among merges. So the characters and their "##" forms are chosen here, and
    handed over as special tokens, whose order it keeps.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    first: collections.Counter[str] = collections.Counter()
    inner: collections.Counter[str] = collections.Counter()
    for word, count in words.items():
        if len(word) <= _WORD_CHARACTERS:
            first[word[0]] += count
            for character in word[1:]:
                inner[character] += count
    total = first + inner
    frequent = [c for c in sorted(total, key=lambda c: (-total[c], c)) if total[c] >= min_frequency]
    # Characters must leave room: rare ones (other scripts) become [UNK]. The library's limit is 1,000.
    alphabet = set(frequent[: min(1000, size // 3)])
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
    found = tokenizer.get_vocab()
    return sorted(found, key=found.__getitem__)


_BATCH_CHARACTERS = 1 << 20


def _repeat(words: collections.Counter[str]) -> Iterator[str]:
    """Every word as often as it occurs, for the trainer counts for itself."""
    for word, count in sorted(words.items()):
        if len(word) <= _WORD_CHARACTERS:
            most = max(1, _BATCH_CHARACTERS // len(word))
            while count > 0:
                yield f"{word} " * min(count, most)
                count -= most
