"""Read vocabularies from vocab.txt, or from the files of any tokenizer of transformers."""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax import storage
from bert_jax.data.compressed import whole
from bert_jax.data.vocabulary import (
    CONFIG,
    CONTINUATION,
    FILES,
    MAX_WORD_CHARACTERS,
    SETTINGS,
    SPECIAL,
    TOKENIZER,
    VOCAB,
    Vocabulary,
)
from bert_jax.errors import UserError
from bert_jax.storage import files


def load(path: str | os.PathLike, lowercase: bool | None = None) -> Vocabulary:
    """Load a vocabulary from a `vocab.txt`, or from a folder with one or with a tokenizer.

    Args:
        path: path of the file or folder.
        lowercase: whether to lowercase text; None follows the tokenizer, `vocab.json` beside
            `vocab.txt`, or else `looks_lowercase`.
    """
    if storage.is_remote(path):
        is_file = str(path).endswith(".txt")
        path = storage.local(path, () if is_file else (VOCAB, SETTINGS, *FILES))
    folder = pathlib.Path(path)
    present = [folder / name for name in FILES if (folder / name).is_file()]
    contents = {}
    if (folder / VOCAB).exists() or not {TOKENIZER, "merges.txt"} & {p.name for p in present}:
        return _load_txt(folder / VOCAB if folder.is_dir() else folder, lowercase)
    for path in present:
        with files.one_line_errors(f"cannot read {path}"), path.open("rb") as file:
            contents[path.name] = whole(file, path)
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


def _load_txt(path: pathlib.Path, lowercase: bool | None) -> Vocabulary:
    try:
        with path.open("rb") as file:
            data = whole(file, path)
    except FileNotFoundError:
        raise UserError(
            f"no vocabulary at {path}; train one with `bert-jax vocab` or name a vocab.txt"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {files.format_error(error)}") from None
    tokens = parse(data, path)
    settings: dict[str, Any] = {"lowercase": looks_lowercase(tokens)}
    if (path.parent / SETTINGS).exists():
        settings |= _saved_settings(path.parent / SETTINGS)
    if lowercase is not None:
        settings["lowercase"] = lowercase
    return Vocabulary(tokens, **settings)


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
    reserved = re.compile(r"\[.+\]", re.DOTALL)  # in any vocabulary
    return not any(token != token.lower() for token in tokens if not reserved.fullmatch(token))


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
    in_model = {
        "continuing_subword_prefix": CONTINUATION,
        "max_input_chars_per_word": MAX_WORD_CHARACTERS,
        "unk_token": SPECIAL[1],
    }
    settings = {
        "model": (_model_type(model), "WordPiece"),
        "normalizer": (normalizer.get("type"), "BertNormalizer"),
        "clean_text": (bool(normalizer.get("clean_text", True)), True),
        "pre_tokenizer": ((file.get("pre_tokenizer") or {}).get("type"), "BertPreTokenizer"),
        **{name: (model.get(name, expected), expected) for name, expected in in_model.items()},
    }
    for name, (value, expected) in settings.items():
        if value != expected:
            raise ValueError(f"its {name} is {value!r}, not {expected!r}")
    ids = dict(model["vocab"])
    added = {token["content"]: token["id"] for token in file.get("added_tokens") or []}
    ids = added | ids
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
    if vocabulary.is_wordpiece:
        accents = bool(vocabulary.strip_accents)
        return dataclasses.replace(vocabulary, lowercase=True, strip_accents=accents)
    tokenizer = json.loads(vocabulary.to_bytes())
    steps = [{"type": "Lowercase"}, *filter(None, [tokenizer.get("normalizer")])]
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": steps}
    contents = vocabulary.contents | {TOKENIZER: json.dumps(tokenizer).encode()}
    return dataclasses.replace(vocabulary, files=tuple(contents.items()))


def lowercases(vocabulary: Vocabulary) -> bool:
    """Whether a vocabulary lowercases all texts."""
    if vocabulary.is_wordpiece:
        return vocabulary.lowercase
    normalizer = json.loads(vocabulary.to_bytes()).get("normalizer") or {}
    return any(x.get("type") == "Lowercase" for x in normalizer.get("normalizers", [normalizer]))


def from_files(contents: Mapping[str, bytes]) -> Vocabulary:
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
    vocabulary = Vocabulary(tuple(tokens), lowercase=False, files=kept)
    vocabulary.check()
    return vocabulary


def _byte_level(contents: Mapping[str, bytes]) -> bytes:
    """Return the tokenizer.json of RoBERTa's vocab.json and merges.txt."""
    import tokenizers
    from tokenizers import processors
    from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

    ids = json.loads(contents["vocab.json"])
    lines = contents["merges.txt"].decode().splitlines()
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    settings = json.loads(contents.get(CONFIG, b"{}"))
    add_space = bool(settings.get("add_prefix_space", False))
    tokenizer = ByteLevelBPETokenizer(ids, [(a, b) for a, b in pairs], add_space)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", ids["</s>"]), ("<s>", ids["<s>"]), add_prefix_space=add_space
    )
    special = [tokenizers.AddedToken(token) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    tokenizer.add_special_tokens([*special, tokenizers.AddedToken("<mask>", lstrip=True)])
    return tokenizer.to_str(pretty=True).encode()


def check_segments(vocabulary: Vocabulary, segments: int) -> None:
    """Refuse a model that would compute other results of pairs in transformers."""
    if segments > 1 and not vocabulary.has_token_types:
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
