"""Vocabularies of any kind: BERT's WordPiece, and the tokenizers of other models as they are.

A `TokenizerVocabulary` has the ids of transformers' `AutoTokenizer`. Its files are kept byte by byte
with rows and runs, and exported unchanged.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool

from bert_jax import storage
from bert_jax.data import wordpiece
from bert_jax.data.compressed import whole
from bert_jax.data.wordpiece import CONTINUATION, SPECIAL, Encoded, Vocabulary
from bert_jax.errors import UserError
from bert_jax.storage import files

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
_CONFIG, _SPECIAL_MAP = "tokenizer_config.json", "special_tokens_map.json"
# The files of a tokenizer in transformers. Only the first three are read; vocab.json and merges.txt
# replace a missing tokenizer.json.
FILES = (
    *(TOKENIZER, _CONFIG, _SPECIAL_MAP, "added_tokens.json", "vocab.json", "merges.txt"),
    *("sentencepiece.bpe.model", "spiece.model", "tokenizer.model"),
)
_ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_MASK = SPECIAL[4]


@dataclasses.dataclass(frozen=True)
class TokenizerVocabulary(Vocabulary):
    """The vocabulary of a tokenizer.json: byte-level BPE, or SentencePiece.

    Attributes:
        tokens: tokens in order of id, in the tokenizer's spelling ("Ġthe" or "▁the" for " the").
        lowercase: False; what is done to text is part of the tokenizer.
        files: name and content of each of the tokenizer's files.
    """

    file: ClassVar[str] = TOKENIZER

    files: tuple[tuple[str, bytes], ...] = ()

    @functools.cached_property
    def _json(self) -> dict[str, Any]:
        return json.loads(self.to_bytes())

    @functools.cached_property
    def special(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tokens for padding, unknown words, start, separator and mask, in this order."""
        settings: dict[str, Any] = {}
        for name in (_SPECIAL_MAP, _CONFIG):
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
    def contents(self) -> dict[str, bytes]:
        """Content of each of the tokenizer's files."""
        return dict(self.files)

    @property
    def settings(self) -> dict[str, Any]:
        """The special tokens by role."""
        return dict(zip(_ROLES, self.special, strict=True))

    @functools.cached_property
    def separator_ids(self) -> list[int]:
        """Ids between the texts of a pair: RoBERTa's are `</s></s>`."""
        tokenizer = self.tokenizer()
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

    @functools.cached_property
    def _word_start(self) -> str:
        """What tokens after a space begin with."""
        steps = [self._json.get("pre_tokenizer") or {}]
        steps += steps[0].get("pretokenizers", [])
        for step in steps:
            if step.get("type") == "ByteLevel":
                return "Ġ"
            if step.get("type") == "Metaspace":
                return step.get("replacement", "▁")
        raise ValueError("its pre_tokenizer is neither ByteLevel nor Metaspace")

    @functools.cached_property
    def _needs_space(self) -> bool:
        """Whether a word needs a space before it to be encoded as inside a sentence."""
        steps = [self._json["pre_tokenizer"]]
        steps += steps[0].get("pretokenizers", [])
        return any(
            step["type"] == "ByteLevel" and not step.get("add_prefix_space") for step in steps
        )

    def check(self) -> None:
        """Raise ValueError if the tokenizer cannot be used here; says why."""
        _ = self.special, self.separator_ids, self._word_start

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 (hexadecimal) of tokenizer.json."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the content of tokenizer.json."""
        return self.contents[TOKENIZER]

    def tokenizer(self) -> "tokenizers.Tokenizer":
        """Return a new tokenizer; special tokens in the text are read as plain characters."""
        return _read(self.to_bytes().decode())

    @functools.cached_property
    def _tokenizer(self) -> "tokenizers.Tokenizer":
        # The library trims a character off a span for every "Ġ" of its token, also where the "Ġ" was
        # added to a word by the pre_tokenizer. `encode_all` trims the spaces of the text instead.
        return _read(re.sub(r'("trim_offsets":\s*)true', r"\1false", self.to_bytes().decode()))

    @functools.cached_property
    def _mask_tokenizer(self) -> "tokenizers.Tokenizer":
        tokenizer = self.tokenizer()
        tokenizer.encode_special_tokens = False
        return tokenizer

    def encode(self, text_a: str, text_b: str | None = None, *, mask: bool = False) -> list[int]:
        """Return the ids of a text or a pair, as transformers encodes them.

        Args:
            text_a: first text.
            text_b: second text, or None.
            mask: whether "[MASK]", and special tokens in their own spelling, stand for the tokens
                rather than their characters.
        """
        texts = [text.encode("utf-8", "replace").decode() for text in (text_a, text_b or "")]
        tokenizer = self._tokenizer
        if mask:
            tokenizer = self._mask_tokenizer
            texts = [text.replace(_MASK, self.special[4]) for text in texts]
        return tokenizer.encode(texts[0], None if text_b is None else texts[1]).ids

    def encode_all(self, texts: Sequence[str]) -> list[Encoded]:
        """Return ids, without special tokens, and character spans of each text, without spaces."""
        encoded = []
        for text, (ids, spans) in zip(texts, super().encode_all(texts), strict=True):
            letters = np.flatnonzero(~np.strings.isspace(np.array([text]).view("U1")))
            first, end = np.append(letters, len(text)), np.append(0, letters + 1)
            start = np.minimum(first[np.searchsorted(first, spans[:, 0])], spans[:, 1])
            stop = np.maximum(end[np.searchsorted(end, spans[:, 1], "right") - 1], start)
            # An added space has the offsets of the character after it.
            stop = np.where(self._is_space[ids], start, stop)
            encoded.append(Encoded(ids, np.stack([start, stop], 1).astype(np.int32)))
        return encoded

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
        """Return a token as readable text."""
        text = self.decode([token_id]).removeprefix(self._word_start).strip()
        return text or self.tokens[token_id]

    def continuation(self) -> Bool[np.ndarray, " V"]:
        """Return which tokens continue a word, for whole-word masking.

        Words begin after a space and at each punctuation mark. Unlike in BERT, letters continue the
        word of a mark before them: "(much)" is "(much" and ")".
        """
        added = {token["content"] for token in self._json.get("added_tokens") or []}
        return np.array([
            not token.startswith(self._word_start)
            and token not in added
            and (token[0].isalnum() or not token[0].isascii())
            for token in self.tokens
        ])  # fmt: skip

    def resized(self, size: int) -> "TokenizerVocabulary":
        """Return the vocabulary with unused tokens added at its end."""
        rest = tuple(f"[row{i}]" for i in range(len(self), size))
        return dataclasses.replace(self, tokens=self.tokens + rest)


def _read(tokenizer_json: str) -> "tokenizers.Tokenizer":
    """Return a tokenizer that reads special tokens in the text as plain characters."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_wordpiece(text: str) -> tuple[Vocabulary, list[str]]:
    """Return the vocabulary and settings of a tokenizer.json, and its added tokens.

    Raises:
        ValueError: it is not BERT's tokenizer.
    """
    file = json.loads(text)
    model, normalizer = file["model"], file.get("normalizer") or {}
    # sentence-transformers writes such a sequence for its do_lower_case.
    steps = normalizer.get("normalizers") or []
    is_lowercased = [step.get("type") for step in steps] == ["Lowercase", "BertNormalizer"]
    normalizer = steps[1] if is_lowercased else normalizer
    if (kind := _model_type(model)) != "WordPiece":
        raise ValueError(f"its model is {kind}, not WordPiece")
    if normalizer.get("type") != "BertNormalizer":
        raise ValueError(f"its normalizer is {normalizer.get('type')}, not BertNormalizer")
    if (file.get("pre_tokenizer") or {}).get("type") != "BertPreTokenizer":
        raise ValueError("its pre_tokenizer is not BertPreTokenizer")
    for name, expected in {
        "continuing_subword_prefix": CONTINUATION,
        "max_input_chars_per_word": 100,
        "unk_token": "[UNK]",
    }.items():
        if model.get(name, expected) != expected:
            raise ValueError(f"its {name} is {model[name]!r}, not {expected!r}")
    if not normalizer.get("clean_text", True):
        raise ValueError("its clean_text is off")
    ids = dict(model["vocab"])
    added = [token["content"] for token in file.get("added_tokens") or []]
    for token in file.get("added_tokens") or []:
        ids.setdefault(token["content"], token["id"])
    tokens = sorted(ids, key=ids.__getitem__)
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        raise ValueError("its ids are not consecutive from 0")
    vocabulary = Vocabulary(
        tuple(tokens),
        bool(normalizer.get("lowercase", True)),
        normalizer.get("strip_accents"),
        bool(normalizer.get("handle_chinese_chars", True)),
    )
    vocabulary = lowercased(vocabulary) if is_lowercased else vocabulary
    return vocabulary, [token for token in added if token not in SPECIAL]


def lowercased(vocabulary: Vocabulary) -> Vocabulary:
    """Return a vocabulary that lowercases texts before anything else, and keeps their accents."""
    if lowercases(vocabulary):
        return vocabulary
    if not isinstance(vocabulary, TokenizerVocabulary):
        accents = bool(vocabulary.strip_accents)
        return dataclasses.replace(vocabulary, lowercase=True, strip_accents=accents)
    tokenizer = json.loads(vocabulary.to_bytes())
    steps = [{"type": "Lowercase"}, *filter(None, [tokenizer.get("normalizer")])]
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": steps}
    contents = vocabulary.contents | {TOKENIZER: json.dumps(tokenizer).encode()}
    return dataclasses.replace(vocabulary, files=tuple(contents.items()))


def lowercases(vocabulary: Vocabulary) -> bool:
    """Whether a vocabulary lowercases all texts."""
    if not isinstance(vocabulary, TokenizerVocabulary):
        return vocabulary.lowercase
    normalizer = json.loads(vocabulary.to_bytes()).get("normalizer") or {}
    return any(x.get("type") == "Lowercase" for x in normalizer.get("normalizers", [normalizer]))


def from_files(contents: Mapping[str, bytes]) -> TokenizerVocabulary:
    """Return the vocabulary of a tokenizer's files, by name.

    Raises:
        ValueError: they are not those of a tokenizer that can be used here.
    """
    import tokenizers

    contents = dict(contents)
    if TOKENIZER not in contents:
        if not {"vocab.json", "merges.txt"} <= contents.keys():
            raise ValueError(
                f"it has no {TOKENIZER}; write one with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        contents[TOKENIZER] = _byte_level(contents)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(contents[TOKENIZER].decode())
    except Exception as error:  # the library raises no other class
        raise ValueError(" ".join(str(error).split())) from None
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [f"[row{i}]" for i in range(max(ids.values(), default=-1) + 1)]
    for token, i in ids.items():
        tokens[i] = token
    kept = tuple((name, contents[name]) for name in FILES if name in contents)
    vocabulary = TokenizerVocabulary(tuple(tokens), lowercase=False, files=kept)
    vocabulary.check()
    return vocabulary


def _byte_level(contents: Mapping[str, bytes]) -> bytes:
    """Return the tokenizer.json of RoBERTa's vocab.json and merges.txt."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    ids = json.loads(contents["vocab.json"])
    lines = contents["merges.txt"].decode().splitlines()
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    settings = json.loads(contents.get(_CONFIG, b"{}"))
    add_space = bool(settings.get("add_prefix_space", False))
    merges = [(first, second) for first, second in pairs]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, continuing_subword_prefix="", end_of_word_suffix="")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", ids["</s>"]), ("<s>", ids["<s>"]), add_prefix_space=add_space
    )
    special = [tokenizers.AddedToken(token) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    tokenizer.add_special_tokens([*special, tokenizers.AddedToken("<mask>", lstrip=True)])
    return tokenizer.to_str(pretty=True).encode()


def load(path: str | os.PathLike, lowercase: bool | None = None) -> Vocabulary:
    """Load a vocabulary from a `vocab.txt`, or from a folder with one or with a tokenizer.

    Args:
        path: path of the file or folder.
        lowercase: as in `wordpiece.load`.
    """
    if storage.is_remote(path) and not str(path).endswith(".txt"):
        path = storage.local(path, (wordpiece.VOCAB, wordpiece.SETTINGS, *FILES))
    folder = pathlib.Path(path)
    has_tokenizer = (folder / TOKENIZER).is_file() or (folder / "merges.txt").is_file()
    if (folder / wordpiece.VOCAB).exists() or not has_tokenizer:
        return wordpiece.load(path, lowercase)
    contents = {}
    for name in FILES:
        if (folder / name).is_file():
            path = folder / name
            with files.one_line_errors(f"cannot read {path}"), path.open("rb") as file:
                contents[name] = whole(file, path)
    try:
        if TOKENIZER in contents and is_wordpiece(contents[TOKENIZER]):
            vocabulary, added = read_wordpiece(contents[TOKENIZER].decode())
            if added:
                raise ValueError(f"it has added tokens, such as {added[0]}")
            return dataclasses.replace(
                vocabulary, lowercase=vocabulary.lowercase if lowercase is None else lowercase
            )
        if lowercase is not None:
            raise ValueError("its case is part of the tokenizer; remove --cased or --uncased")
        return from_files(contents)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder}: its tokenizer cannot be used: {reason}") from None


def has_token_types(vocabulary: Vocabulary) -> bool:
    """Whether transformers gives the second text of a pair token type 1."""
    if not isinstance(vocabulary, TokenizerVocabulary):
        return True
    return 1 in vocabulary.tokenizer().encode("a", "b").type_ids


def check_segments(vocabulary: Vocabulary, segments: int) -> None:
    """Refuse a model that would compute other results of pairs in transformers."""
    if segments > 1 and not has_token_types(vocabulary):
        raise UserError(
            f"config.model.segments is {segments}, but the tokenizer gives both texts of a pair token "
            "type 0, so transformers would compute other results: train with "
            "--config.model.segments=1"
        )


def is_wordpiece(tokenizer: bytes) -> bool:
    """Whether a tokenizer.json is for WordPiece, which `read_wordpiece` reads."""
    return _model_type(json.loads(tokenizer)["model"]) == "WordPiece"


def _model_type(model: Mapping[str, Any]) -> str:
    """Return the type of a tokenizer.json's model, which files of 2020 do not name."""
    if "type" in model:
        return model["type"]
    if not isinstance(model.get("vocab"), dict):
        return "Unigram"
    has_prefix = model.get("unk_token") and model.get("continuing_subword_prefix")
    return "WordPiece" if has_prefix and not model.get("merges") else "BPE"
