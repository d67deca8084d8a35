"""Vocabularies: BERT's WordPiece, and the tokenizers of other models as they are.

Tokens and ids are those of the files: a `vocab.txt` from Google or Hugging Face, or a tokenizer of
transformers, loads unchanged, is kept byte by byte with rows and runs, and is exported unchanged.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from bert_jax.runtime.progress import Progress
from bert_jax.storage import files

if TYPE_CHECKING:
    import tokenizers

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB = "vocab.txt"
SETTINGS = "vocab.json"
CONTINUATION = "##"
MAX_WORD_CHARACTERS = 100  # as in BERT: a longer word becomes [UNK]
TOKENIZER = "tokenizer.json"
CONFIG, _SPECIAL_MAP = "tokenizer_config.json", "special_tokens_map.json"
# The files of a tokenizer in transformers. Only the first three are read; vocab.json and merges.txt
# replace a missing tokenizer.json.
FILES = (
    *(TOKENIZER, CONFIG, _SPECIAL_MAP, "added_tokens.json", "vocab.json", "merges.txt"),
    *("sentencepiece.bpe.model", "spiece.model", "tokenizer.model"),
)
_ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_MASK = SPECIAL[4]
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
        tokens: tokens in order of id. In WordPiece those that continue a word begin with "##"; other
            tokenizers have their own spelling ("Ġthe" or "▁the" for " the").
        lowercase: whether WordPiece lowercases text; False for other tokenizers, where what is done
            to text is part of the tokenizer.
        strip_accents: whether WordPiece strips accents; None follows `lowercase`.
        split_chinese: whether every Chinese character is a word of WordPiece.
        files: name and content of each of the files of another tokenizer (byte-level BPE or
            SentencePiece); empty for WordPiece.
    """

    tokens: tuple[str, ...] = dataclasses.field(repr=False)
    lowercase: bool
    strip_accents: bool | None = None
    split_chinese: bool = True
    files: tuple[tuple[str, bytes], ...] = dataclasses.field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_wordpiece(self) -> bool:
        return not self.files

    @property
    def file(self) -> str:
        """Name of the file that identifies the vocabulary, in its folder."""
        return VOCAB if self.is_wordpiece else TOKENIZER

    @property
    def contents(self) -> dict[str, bytes]:
        """Content of each file that `save` writes."""
        if not self.is_wordpiece:
            return dict(self.files)
        settings = json.dumps(self.settings, indent=2) + "\n"
        return {SETTINGS: settings.encode(), VOCAB: "".join(f"{t}\n" for t in self.tokens).encode()}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of WordPiece, or another tokenizer's special tokens by role."""
        if not self.is_wordpiece:
            return dict(zip(_ROLES, self.special, strict=True))
        return {
            name: getattr(self, name) for name in ("lowercase", "strip_accents", "split_chinese")
        }

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Mapping from token to id."""
        return {token: i for i, token in enumerate(self.tokens)}

    @functools.cached_property
    def special(self) -> tuple[str, ...]:
        """The tokens for padding, unknown words, start, separator and mask, in this order."""
        if self.is_wordpiece:
            return SPECIAL
        settings: dict[str, Any] = {}
        for name in (_SPECIAL_MAP, CONFIG):
            settings |= json.loads(self.contents.get(name, b"{}"))
        tokens = []
        for i, role in enumerate(_ROLES):
            token = settings.get(role)
            token = token.get("content") if isinstance(token, dict) else token
            known = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
            token = token or next((t for t in (SPECIAL[i], known[i]) if t in self.index), None)
            if token not in self.index:
                raise ValueError(f"it has no {role}")
            tokens.append(token)
        return tuple(tokens)

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

    @functools.cached_property
    def separator_ids(self) -> list[int]:
        """Ids between the texts of a pair: RoBERTa's are `</s></s>`."""
        tokenizer = self._tokenizer
        a, b = (tokenizer.encode(text, add_special_tokens=False).ids for text in "ab")
        pair = tokenizer.encode("a", "b").ids
        single = [self.cls_id, *a, self.sep_id]
        for separators in ([self.sep_id], [self.sep_id] * 2):
            expected = [*single[:-1], *separators, *b, self.sep_id]
            if (tokenizer.encode("a").ids, pair) == (single, expected):
                return separators
        raise ValueError(
            f"it does not encode a pair as {self.special[2]} a {self.special[3]} b {self.special[3]}"
        )

    @property
    def has_token_types(self) -> bool:
        """Whether transformers gives the second text of a pair token type 1."""
        return 1 in self._tokenizer.encode("a", "b").type_ids

    @functools.cached_property
    def _json(self) -> dict[str, Any]:
        return json.loads(self.contents.get(TOKENIZER, b"{}"))

    @property
    def _pre_tokenizers(self) -> list[dict[str, Any]]:
        """The steps that divide a text into words, of another tokenizer than WordPiece."""
        first = self._json.get("pre_tokenizer") or {}
        return [first, *first.get("pretokenizers", [])]

    @functools.cached_property
    def _word_start(self) -> str:
        """What tokens after a space begin with, of another tokenizer than WordPiece."""
        for step in self._pre_tokenizers:
            if step.get("type") == "ByteLevel":
                return "Ġ"
            if step.get("type") == "Metaspace":
                return step.get("replacement", "▁")
        raise ValueError("its pre_tokenizer is neither ByteLevel nor Metaspace")

    def check(self) -> None:
        """Raise ValueError if a tokenizer other than WordPiece cannot be used here; says why."""
        _ = self.special, self.separator_ids, self._word_start

    @functools.cached_property
    def _needs_space(self) -> bool:
        """Whether a word needs a space before it to be encoded as inside a sentence."""
        return any(
            step.get("type") == "ByteLevel" and not step.get("add_prefix_space")
            for step in self._pre_tokenizers
        )

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 (hexadecimal) of `to_bytes`."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the content of `file`: vocab.txt or tokenizer.json."""
        return self.contents[self.file]

    def tokenizer(self) -> "tokenizers.Tokenizer":
        """Return a new tokenizer; special tokens in the text are read as plain characters.

        That of WordPiece adds no [CLS] and [SEP].
        """
        if not self.is_wordpiece:
            return _read(self.to_bytes().decode())
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers

        tokenizer = tokenizers.Tokenizer(
            models.WordPiece(
                self.index, unk_token=SPECIAL[1], max_input_chars_per_word=MAX_WORD_CHARACTERS
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
        """The tokenizer, with special tokens around texts and correct spans."""
        if not self.is_wordpiece:
            # The library trims a character off a span for every "Ġ" of its token, also where the "Ġ"
            # was added to a word by the pre_tokenizer. `encode_all` trims the spaces of the text.
            return _read(re.sub(r'("trim_offsets":\s*)true', r"\1false", self.to_bytes().decode()))
        from tokenizers import processors

        tokenizer = self.tokenizer()
        sep, cls = (SPECIAL[3], self.sep_id), (SPECIAL[2], self.cls_id)
        tokenizer.post_processor = processors.BertProcessing(sep, cls)
        return tokenizer

    @functools.cached_property
    def _mask_tokenizer(self) -> "tokenizers.Tokenizer":
        tokenizer = self.tokenizer()
        tokenizer.encode_special_tokens = False
        if self.is_wordpiece:
            tokenizer.post_processor = self._tokenizer.post_processor
            tokenizer.add_special_tokens([_MASK])
        return tokenizer

    def encode(self, text_a: str, text_b: str | None = None, *, mask: bool = False) -> list[int]:
        """Return the ids of `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`, as transformers encodes them.

        Args:
            text_a: first text.
            text_b: second text, or None.
            mask: whether "[MASK]" stands for the token rather than its characters, as do special tokens
                in the spelling of another tokenizer than WordPiece.
        """
        # Arguments may contain surrogates.
        texts = [text.encode("utf-8", "replace").decode() for text in (text_a, text_b or "")]
        tokenizer = self._tokenizer
        if mask:
            tokenizer = self._mask_tokenizer
            texts = [text.replace(_MASK, self.special[4]) for text in texts]
        return tokenizer.encode(texts[0], None if text_b is None else texts[1]).ids

    def split(self, token: str) -> list[str]:
        """Split a word, or the part of a word after "##", into word pieces by longest match.

        Returns ["[UNK]"] if a part of the word matches no piece.
        """
        return [piece.value for piece in self._tokenizer.model.tokenize(token)]

    def encode_all(self, texts: Sequence[str]) -> list[Encoded]:
        """Return ids, without special tokens, and character spans of each text, without spaces."""
        encoded = []
        with Progress("tokenizing", len(texts), "texts") as progress:
            # In batches, as the library's objects take far more memory than the arrays.
            for start in range(0, len(texts), _BATCH_TEXTS):
                part = list(texts[start : start + _BATCH_TEXTS])
                encodings = self._tokenizer.encode_batch(part, add_special_tokens=False)
                for text, encoding in zip(part, encodings, strict=True):
                    ids = np.array(encoding.ids, np.int32)
                    spans = np.array(encoding.offsets, np.int32).reshape(-1, 2)
                    spans = spans if self.is_wordpiece else self._trimmed(text, ids, spans)
                    encoded.append(Encoded(ids, spans))
                progress.advance(len(part))
        return encoded

    def _trimmed(
        self, text: str, ids: Int[np.ndarray, " n"], spans: Int[np.ndarray, "n 2"]
    ) -> Int[np.ndarray, "n 2"]:
        """Return the spans without spaces of the text at their ends."""
        letters = np.flatnonzero(~np.strings.isspace(np.array([text]).view("U1")))
        first, end = np.append(letters, len(text)), np.append(0, letters + 1)
        start = np.minimum(first[np.searchsorted(first, spans[:, 0])], spans[:, 1])
        stop = np.maximum(end[np.searchsorted(end, spans[:, 1], "right") - 1], start)
        # An added space has the offsets of the character after it.
        stop = np.where(self._is_space[ids], start, stop)
        return np.stack([start, stop], 1).astype(np.int32)

    @functools.cached_property
    def _is_space(self) -> Bool[np.ndarray, " V"]:
        """Whether a token of byte-level BPE is nothing but spaces."""
        is_byte_level = self._word_start == "Ġ"
        return np.array([is_byte_level and set(token) == {"Ġ"} for token in self.tokens])

    def encode_words(self, words: Sequence[str]) -> list[Encoded]:
        """Return the ids of each word inside a sentence, as with `is_split_into_words`."""
        return self.encode_all([f" {word}" if self._needs_space else word for word in words])

    def encode_sentence(self, sentence: str, is_first: bool) -> list[int]:
        """Return the ids of a sentence; a document's ids are those of its sentences in turn."""
        if self._needs_space and not is_first:
            sentence = f" {sentence}"
        return self._tokenizer.encode(sentence, add_special_tokens=False).ids

    def text_of(self, token_id: int) -> str:
        """Return a token as text to show."""
        if self.is_wordpiece:
            return self.tokens[token_id]
        text = self.decode([token_id]).removeprefix(self._word_start).strip()
        return text or self.tokens[token_id]

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " n"]) -> str:
        """Return readable text for ids: word pieces joined to words, special tokens included."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def continuation(self) -> Bool[np.ndarray, " V"]:
        """Return which tokens continue a word, for whole-word masking.

        In other tokenizers than WordPiece, words begin after a space and at each punctuation mark.
        Unlike in BERT, letters continue the word of a mark before them: "(much)" is "(much" and ")".
        """
        if self.is_wordpiece:
            return np.array([token.startswith(CONTINUATION) for token in self.tokens])
        added = {token["content"] for token in self._json.get("added_tokens") or []}
        return np.array([
            not token.startswith(self._word_start)
            and token not in added
            and (token[0].isalnum() or not token[0].isascii())
            for token in self.tokens
        ])  # fmt: skip

    def resized(self, size: int) -> "Vocabulary":
        """Return the vocabulary with unused tokens added at its end."""
        rest = tuple(f"[row{i}]" for i in range(len(self), size))
        return dataclasses.replace(self, tokens=self.tokens + rest)

    def save(self, folder: str | pathlib.Path) -> None:
        """Write the files to a folder, creating it if necessary."""
        folder = pathlib.Path(folder)
        with files.one_line_errors(f"cannot write the vocabulary to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in self.contents.items():
                files.write(folder / name, content)


def _read(tokenizer_json: str) -> "tokenizers.Tokenizer":
    """Return a tokenizer that reads special tokens in the text as plain characters."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer
