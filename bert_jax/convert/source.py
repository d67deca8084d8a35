"""Open and import BERT checkpoints of any origin.

A source is a run, a folder written by `import_checkpoint`, a Hugging Face folder, the name of a
model on the Hugging Face Hub, or a TensorFlow 1 release of Google's (a folder or its zip file).
"""

import fnmatch
import os
import pathlib
import re
import zipfile
import zlib
from collections.abc import Collection
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

import jax

from bert_jax import storage
from bert_jax.config.checks import validate
from bert_jax.config.model import ModelConfig
from bert_jax.config.schema import Config, TrainConfig
from bert_jax.convert import hub, huggingface, sentence_encoder, tensorflow1, tokenizer, weights
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.sentence_encoder import transformer_folder
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.compressed import SETTINGS_BYTES
from bert_jax.data.vocabulary import SETTINGS, VOCAB, Vocabulary
from bert_jax.errors import Attempts, UserError, shorten
from bert_jax.model.bert import Params
from bert_jax.model.flops import parameter_count
from bert_jax.runs import checkpoint, workdir
from bert_jax.storage import files

_OFFICIAL = {  # SHA-256 of Google's files of October 2018
    "58580dc5e0bf0ae0d2efd51d0e8272b2f808857f0a43a88aaf7549da6d7a8a84": "Google's uncased Base",
    "734d5a1b68bf98d4e9cb6b6692725d00842a1937af73902e51776905d8f760ea": "Google's cased Base",
    "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3": "Google's uncased English",
    "eeaa9875b23b04b4c54ef759d03db9d1ba1554838f8fb26c5d96fa551df93d02": "Google's cased English",
}
# Weights barely compress: a higher ratio of unpacked to packed size is a zip bomb.
_UNPACKED = 20


class Imported(NamedTuple):
    """An imported model.

    Attributes:
        config: config of the model, and of sentence vectors if it is a sentence encoder.
        vocabulary: the vocabulary.
        params: parameters as NumPy arrays.
        about: provenance: source and format; of a conversion also official (name of the known release
            with these weights, or None), vocabulary (likewise), sha256 (by file), left_out (names of
            tensors), guessed_case (whether no file says if texts are lowercased).
    """

    config: TrainConfig
    vocabulary: Vocabulary
    params: Params
    about: dict[str, Any]


class OpenModel(NamedTuple):
    """A loaded model: config, vocabulary, parameters, and step (0 unless from a run)."""

    config: TrainConfig
    vocabulary: Vocabulary
    params: Params
    step: int


@storage.with_local_inputs("source")
def open_model(source: str, which: str = "best") -> OpenModel:
    """Load a model from any source; its parameters are on the device.

    `which` is the checkpoint of a run, as in `checkpoint.load_model`.
    """
    source = os.path.expanduser(source)
    if workdir.holds_run(source):
        return OpenModel(*checkpoint.load_model(source, which))
    if which not in ("best", "latest"):
        raise UserError(f"{source} is not a run: it has no checkpoint {which!r}")
    config, vocabulary, params, _ = read(source)
    return OpenModel(config, vocabulary, jax.device_put(params, jax.local_devices()[0]), 0)


def open_vocabulary(source: str, lowercase: bool | None = None) -> Vocabulary:
    """Load the vocabulary of a model, or from a vocab.txt or the folder of one.

    Args:
        source: see the module docstring, or a path for `vocabulary.load`.
        lowercase: whether to lowercase text; None follows the source.
    """
    path = pathlib.Path(source).expanduser()
    if storage.is_remote(source) and path.suffix != ".txt":
        path = storage.local(source, (*hub.BESIDE_WEIGHTS, SETTINGS))
    is_run, is_model = workdir.holds_run(path), _is_source(source) and path.suffix != ".txt"
    if path.is_dir():
        is_model = (transformer_folder(path) / "config.json").is_file()
    if not is_run and not is_model:
        return vocabularies.load(source, lowercase)
    folder = path if path.is_dir() else _find(source, None, with_weights=False)[0]
    try:
        if is_run:
            return tokenizer.with_case(workdir.read_vocabulary(path), lowercase)
        return tokenizer.read(folder, lowercase)[0]
    except UserError as error:
        raise UserError(f"cannot read the vocabulary of {source}: {error}") from error


@storage.with_uploaded_output("out", new=True)
def import_checkpoint(source: str, out: str | pathlib.Path, **options: Any) -> Imported:
    """Write a source's config, vocabulary and parameters (with Orbax) to a new folder.

    All commands accept the folder as they accept a run. It is written atomically. The options are
    those of `read`.
    """
    files.check_new(out)
    imported = read(source, **options)
    write(imported, out)
    return imported


@storage.with_uploaded_output("out", new=True)
def write(imported: Imported, out: str | os.PathLike) -> None:
    """Write a model's config, vocabulary and parameters (with Orbax) to a new folder, atomically."""
    files.check_new(out)
    with files.new_folder(out) as folder:
        config, best = imported.config, {"best_by": "masked_lm_loss", "highest": False}
        workdir.write_or_check_config(
            folder, config, [], best, False, imported.vocabulary, imported.about
        )
        checkpoints = checkpoint.Checkpoints(
            folder / "checkpoints",
            config.checkpoint,
            identity=workdir.read_identity(folder),
        )
        checkpoints.save(0, imported.params)
        checkpoints.wait()
        checkpoints.close()


def read(
    source: str,
    *,
    revision: str | None = None,
    vocab: str | None = None,
    lowercase: bool | None = None,
    allow_missing: Collection[str] = (),
    allow_unexpected: Collection[str] = (),
) -> Imported:
    """Read a Hugging Face or TensorFlow 1 checkpoint.

    Args:
        source: a folder, a zip file or a name on the hub.
        revision: branch, tag or commit on the hub.
        vocab: vocabulary file to use instead of the source's.
        lowercase: whether to lowercase texts; None to follow the source's tokenizer config, or else
            the vocabulary.
        allow_missing: what the source may lack: parts of the model (`families.Family.parts`), "tokens"
            (vocabulary entries of the last rows of the embeddings), and "added_tokens" (support for
            tokens that the source's tokenizer splits off before WordPiece).
        allow_unexpected: patterns of names of tensors, or of modules of sentence-transformers, to
            ignore.
    """
    name, source, vocab = source, str(storage.local(source)), vocab and str(storage.local(vocab))
    folder, prefix = _find(source, revision)
    if workdir.holds_run(source):
        raise UserError(f"{source} is a run or an imported checkpoint already: use it as it is")
    try:
        if prefix:
            settings, tensors, used = tensorflow1.read_bert(folder, prefix)
        else:
            settings, tensors, used = weights.read(transformer_folder(folder))
        family = FAMILIES[huggingface.family_of(settings)]
        names = huggingface.canonical(tensors, family)
        canonical = {new: tensors[old] for new, old in names.items()}
        settings, canonical = family.from_hf(settings, canonical)
        left_out = sorted(set(tensors) - set(names.values()))
        model = huggingface.model_config(settings, canonical, allow_missing)
        duplicates = huggingface.remove_tied_duplicates(canonical, model)
        left_out += [names[name] for name in duplicates]
        unexpected = [names.get(n, n) for n in huggingface.unexpected(canonical, model)]
        # Report all errors at once.
        attempts = Attempts()
        attempts.call(_check_unexpected, unexpected, allow_unexpected)
        params = attempts.call(huggingface.from_huggingface, canonical, model, names)
        found = attempts.call(_vocabulary, folder, vocab, lowercase, allow_missing, model)
        config = attempts.call(_config, model, folder, allow_unexpected)
        attempts.check()
        vocabulary, vocabulary_file = found
    except UserError as error:
        raise UserError(f"cannot import {source}: {error}") from error
    except OSError as error:
        where = f" {pathlib.Path(error.filename).name}" if error.filename else ""
        raise UserError(f"cannot import {source}: cannot read{where}: {_why(error)}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise UserError(f"cannot import {source}: the zip is damaged ({error})") from None
    if model.segments > 1 and not vocabulary.has_token_types:
        model.segments = 1
        table = params["embeddings"]["segment"]
        table["embedding"] = table["embedding"][:1]
    weight_sums = {file.name: files.sha256(file) for file in used}
    is_listed = vocabulary_file is not None and vocabulary_file.name == VOCAB
    about = {
        "source": name,
        "format": "Google, TensorFlow 1" if prefix else "Hugging Face",
        "official": next(filter(None, map(_OFFICIAL.get, weight_sums.values())), None),
        "vocabulary": _OFFICIAL.get(vocabulary.sha256),
        "sha256": weight_sums
        | ({vocabulary_file.name: files.sha256(vocabulary_file)} if vocabulary_file else {}),
        "left_out": left_out + unexpected,
        "guessed_case": lowercase is None
        and is_listed
        and not (transformer_folder(folder) / tokenizer.SETTINGS).is_file(),
    }
    return Imported(config, vocabulary, params, about)


def import_summary(imported: Imported) -> str:
    """Return a summary of an import, in a few lines."""
    model, vocabulary, about = imported.config.model, imported.vocabulary, imported.about
    parts = [
        f"head ({model.head.kind})" if part == "head" else part
        for part in huggingface.parts_of(model)
    ]
    case = "uncased" if vocabulary.lowercase else "cased"
    if not vocabulary.is_wordpiece:
        case = "tokenizer and"
    known, known_vocabulary = (
        f" (exactly {about[key]})" if about.get(key) else "" for key in ("official", "vocabulary")
    )
    lines = [
        f"{FAMILIES[model.family].title} L{model.layers}-H{model.hidden}-A{model.heads}, "
        f"{parameter_count(imported.params, model):,} parameters{known}",
        f"  {case} vocabulary of {len(vocabulary):,}{known_vocabulary}",
        f"  with {', '.join(parts) or 'the encoder only'}",
    ]
    if about.get("guessed_case") and not vocabulary.lowercase:
        lines.append(
            "  cased because the vocabulary is; AutoTokenizer lowercases without a tokenizer_config.json"
        )
    if left_out := about.get("left_out"):
        lines.append(f"  ignored: {shorten(left_out)}")
    return "\n".join(lines)


def _check_unexpected(names: list[str], allowed: Collection[str]) -> None:
    if names := [name for name in names if not _matches(name, allowed)]:
        raise UserError(
            f"unexpected: {shorten(names)}; ignore them with "
            "`bert-jax import --allow-unexpected PATTERN`"
        )


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _vocabulary(
    folder: Traversable,
    vocab: str | None,
    lowercase: bool | None,
    allow_missing: Collection[str],
    model: ModelConfig,
) -> tuple[Vocabulary, Traversable | None]:
    """Return the vocabulary of `vocab` or of the folder, of the model's size, and the folder's file."""
    if vocab is None:
        vocabulary, file = tokenizer.read(folder, lowercase, "added_tokens" in allow_missing)
    else:
        vocabulary, file = vocabularies.load(vocab, lowercase), None
    return tokenizer.resized(vocabulary, model.vocab_size, "tokens" in allow_missing), file


def _config(model: ModelConfig, folder: Traversable, allow_unexpected: Collection[str]) -> Config:
    embed = sentence_encoder.read(
        folder, model.positions, lambda name: _matches(name, allow_unexpected)
    )
    config = Config(model=model, embed=embed)
    validate(config)
    return config


def _find(source: str, revision: str | None, with_weights: bool = True) -> tuple[Traversable, str]:
    """Return the folder of the files, and the prefix of a TensorFlow checkpoint or "".

    Without `with_weights`, a model on the hub is downloaded without them.
    """
    try:
        path = pathlib.Path(source).expanduser()
        if source and path.is_dir():
            if revision:
                raise UserError(
                    f"{source} is a folder: --revision applies to models on the hub only"
                )
            is_hugging_face = (path / "config.json").is_file() and weights.first_file(
                path, weights.WEIGHTS
            )
            return path, "" if is_hugging_face else _tensorflow_prefix(path)
        # A TensorFlow checkpoint is named by its prefix.
        if path.name and path.with_name(f"{path.name}.index").is_file():
            return path.parent, path.name
        if path.is_file():
            return _in_zip(path)
    except (OSError, RuntimeError) as error:
        reason = _why(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot read {source}: {reason}") from None
    if _is_hub_name(source):
        return hub.download(source, revision, with_weights), ""
    raise UserError(
        f"{source}: no such file or folder, and not a valid name on the Hugging Face Hub; give a "
        "folder, the zip of a Google release, or OWNER/NAME"
    )


def _is_hub_name(source: str) -> bool:
    return bool(re.fullmatch(r"[\w][\w.-]*(/[\w.-]+)?", source))


def _is_source(source: str) -> bool:
    """Whether `_find` can look for a model there, if only on the hub."""
    path = pathlib.Path(source).expanduser()
    return path.exists() or path.with_name(f"{path.name}.index").exists() or _is_hub_name(source)


def _why(error: OSError) -> str:
    return error.strerror.lower() if error.strerror else str(error)


def _in_zip(path: pathlib.Path) -> tuple[Traversable, str]:
    try:
        archive = zipfile.ZipFile(path)
        declared, size = sum(m.file_size for m in archive.infolist()), path.stat().st_size
        if declared > _UNPACKED * size + SETTINGS_BYTES:
            raise UserError(f"{path} unpacks to {declared:,} bytes from {size:,}, more than any "
                            "checkpoint does; download it again")  # fmt: skip
        names = [n for n in archive.namelist() if not n.startswith("__MACOSX/")]
        inside = [n for n in names if pathlib.PurePosixPath(n).suffix == ".index"]
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise UserError(
            f"{path} is neither a folder nor a zip file ({error}): give the folder of the checkpoint"
        ) from None
    if len(inside) != 1:
        raise UserError(
            f"{path} contains no TensorFlow checkpoint: only zip files of Google's releases are supported"
        )
    index: Any = zipfile.Path(archive, inside[0])
    return index.parent, index.name.removesuffix(".index")


def _tensorflow_prefix(folder: pathlib.Path) -> str:
    prefixes = [p.name.removesuffix(".index") for p in sorted(folder.glob("*.ckpt*.index"))]
    if len(prefixes) > 1:
        raise UserError(f"{folder} contains {len(prefixes)} TensorFlow checkpoints: name one, such as "
                        f"{folder / prefixes[-1]}")  # fmt: skip
    return prefixes[0] if prefixes else ""
