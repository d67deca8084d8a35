"""Read and write the tokenizer of a Hugging Face folder."""

import dataclasses
import json
from importlib.resources.abc import Traversable
from typing import Any

from bert_jax.convert.sentence_encoder import lowercases_texts, transformer_folder
from bert_jax.convert.weights import MALFORMED, first_file, one_line, read_bytes, read_json
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.vocabulary import SPECIAL, VOCAB, Vocabulary
from bert_jax.errors import UserError, shorten

SETTINGS = "tokenizer_config.json"
_BERT = (
    *("BertTokenizer", "BertTokenizerFast", "DistilBertTokenizer", "DistilBertTokenizerFast"),
    *("ElectraTokenizer", "ElectraTokenizerFast"),
)
# Other classes that may have BERT's vocabulary. None: old folders do not name the class. The last
# three read tokenizer.json as it is.
_ANY = (None, "PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer")
# Keys of tokenizer_config.json → fields of `Vocabulary`.
_FIELDS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "split_chinese",
}


def read(
    folder: Traversable, lowercase: bool | None = None, without_added: bool = False
) -> tuple[Vocabulary, Traversable]:
    """Return the vocabulary of a folder, and the file it was read from.

    Args:
        folder: a folder of a model.
        lowercase: whether to lowercase texts; None follows the folder.
        without_added: whether to ignore tokens that the tokenizer splits off before WordPiece.
    """
    inner = transformer_folder(folder)
    settings = read_json(first_file(inner, [SETTINGS]))
    kind = settings.get("tokenizer_class")
    if kind not in _BERT and (kind not in _ANY or _has_other(inner)):
        vocabulary, file = _other(inner, kind)
    else:
        vocabulary, file = _wordpiece(inner, without_added)
        # They override those in tokenizer.json.
        if file.name == VOCAB or kind is None or kind in _BERT:
            vocabulary = dataclasses.replace(vocabulary, **_saved_fields(settings))
    if lowercase is None and lowercases_texts(folder):
        vocabulary = vocabularies.lowercased(vocabulary)
    return with_case(vocabulary, lowercase), file


def with_case(vocabulary: Vocabulary, lowercase: bool | None) -> Vocabulary:
    """Return a vocabulary with another case; None changes nothing."""
    if lowercase is None:
        return vocabulary
    if not vocabulary.is_wordpiece:
        raise UserError("its case is part of the tokenizer; remove --cased or --uncased")
    return dataclasses.replace(vocabulary, lowercase=lowercase)


def resized(vocabulary: Vocabulary, size: int, may_pad: bool) -> Vocabulary:
    """Return the vocabulary for embeddings of `size` rows, of which the last may have no tokens."""
    missing = size - len(vocabulary)
    if missing > 0 and may_pad:
        return vocabulary.resized(size)
    if missing:
        hint = (
            "; if the rest are padding, use `bert-jax import --allow-missing tokens`"
            if missing > 0
            else ""
        )
        raise UserError(
            f"the vocabulary has {len(vocabulary):,} tokens, the embeddings {size:,} rows{hint}"
        )
    return vocabulary


def _wordpiece(folder: Traversable, without_added: bool) -> tuple[Vocabulary, Traversable]:
    """Return the vocabulary of BERT's tokenizer, and the file it was read from."""
    listed, file = (folder / name for name in (VOCAB, vocabularies.TOKENIZER))
    tokens = vocabularies.parse(read_bytes(listed), VOCAB) if listed.is_file() else ()
    if file.is_file():
        try:
            vocabulary, added = vocabularies.read_wordpiece(read_bytes(file).decode())
        except MALFORMED as error:
            raise UserError(f"{file.name} is not BERT's: {one_line(error)}") from None
        if vocabularies.parse(vocabulary.to_bytes(), file.name) != vocabulary.tokens:
            raise UserError(f"{file.name} has a token that contains a line break")
        if vocabulary.tokens[: len(tokens)] != tokens:
            raise UserError(f"{VOCAB} and {file.name} contain different vocabularies: remove one")
    elif tokens:
        vocabulary, file = Vocabulary(tokens, vocabularies.looks_lowercase(tokens)), listed
        ids = read_json(first_file(folder, ["added_tokens.json"]))
        added = sorted((t for t in ids if t not in SPECIAL), key=lambda t: str(ids[t]))
    else:
        raise UserError(
            f"neither {VOCAB} nor {file.name} found; give one with `bert-jax import --vocab`"
        )
    if added and not without_added:
        raise UserError(
            f"its tokenizer has added tokens, which are not supported: {shorten(added)}; to "
            "split them into word pieces, use `bert-jax import --allow-missing added_tokens`"
        )
    return vocabulary, file


def _saved_fields(settings: dict[str, Any]) -> dict[str, bool]:
    """Return the fields of `Vocabulary` that a tokenizer_config.json sets."""
    saved = {key: settings[key] for key in _FIELDS if settings.get(key) is not None}
    for key, value in saved.items():
        if not isinstance(value, bool):
            raise UserError(f"{SETTINGS}: {key} is {value!r}, not true or false")
    return {_FIELDS[key]: value for key, value in saved.items()}


def _has_other(folder: Traversable) -> bool:
    """Whether a folder has a tokenizer of another kind than WordPiece."""
    tokenizer = folder / vocabularies.TOKENIZER
    if not tokenizer.is_file():
        return (folder / "merges.txt").is_file()
    try:
        return not vocabularies.is_wordpiece(read_bytes(tokenizer))
    except MALFORMED:
        return False  # is reported as damaged


def _other(folder: Traversable, kind: Any) -> tuple[Vocabulary, Traversable]:
    """Return the vocabulary of a tokenizer that is not WordPiece, and the file it was read from."""
    present = [file for name in vocabularies.FILES if (file := folder / name).is_file()]
    try:
        return vocabularies.from_files({f.name: read_bytes(f) for f in present}), present[0]
    except MALFORMED as error:
        raise UserError(
            f"its tokenizer is {kind or 'of an unknown class'}, which cannot be used: "
            f"{one_line(error)}"
        ) from None


def tokenizer_files(
    vocabulary: Vocabulary, tokens: int, segments: bool = True
) -> dict[str, str | bytes]:
    """Return the files of the tokenizer by name: vocab.txt, tokenizer.json and its settings.

    Args:
        vocabulary: the vocabulary; the files of another tokenizer than WordPiece stay as they are,
            except that a model without segments gets no token types.
        tokens: maximum length of a sequence.
        segments: whether the model has different embeddings for the two texts of a pair.
    """
    from tokenizers import processors

    if not vocabulary.is_wordpiece:
        contents: dict[str, str | bytes] = dict(vocabulary.files)
        settings = json.loads(contents.get(SETTINGS, b"{}"))
        names = settings.get("model_input_names", [])
        if "token_type_ids" in names and not segments:
            names.remove("token_type_ids")
            contents[SETTINGS] = json.dumps(settings, indent=2).encode()
        return contents
    tokenizer = vocabulary.tokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary.cls_id), ("[SEP]", vocabulary.sep_id)],
    )
    special = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    settings = {
        "tokenizer_class": "BertTokenizer",
        **{key: getattr(vocabulary, field) for key, field in _FIELDS.items()},
        "model_max_length": tokens,
        **special,
    }
    if not segments:
        settings["model_input_names"] = ["input_ids", "attention_mask"]
    return {
        VOCAB: vocabulary.to_bytes(),
        vocabularies.TOKENIZER: tokenizer.to_str(pretty=True),
        SETTINGS: json.dumps(settings, indent=2),
        "special_tokens_map.json": json.dumps(special, indent=2),
    }
