"""Open and import BERT checkpoints of any origin.

A source is a run, a folder written by `import_checkpoint`, a Hugging Face folder, the name of a
model on the Hugging Face Hub, or a TensorFlow 1 release of Google's (a folder or its zip file).
"""

import dataclasses
import fnmatch
import json
import os
import pathlib
import re
import zipfile
import zlib
from collections.abc import Collection
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax import storage
from bert_jax.config.checks import validate
from bert_jax.config.schema import Config, EmbedConfig, ModelConfig, TrainConfig
from bert_jax.convert import huggingface, pytorch, tensorflow1
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.hub import is_network_error
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.compressed import SETTINGS_BYTES, whole
from bert_jax.data.vocabulary import SETTINGS, SPECIAL, Vocabulary
from bert_jax.errors import Attempts, UserError
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
_BERT_TOKENIZERS = (
    *("BertTokenizer", "BertTokenizerFast", "DistilBertTokenizer", "DistilBertTokenizerFast"),
    *("ElectraTokenizer", "ElectraTokenizerFast"),
)
# Classes that may have BERT's vocabulary. None: old folders do not name the class. The last three
# read tokenizer.json as it is.
_TOKENIZERS = (
    *_BERT_TOKENIZERS,
    *(None, "PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer"),
)
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Modules of sentence-transformers that are a model of transformers; its first version named the class.
_TRANSFORMERS = ("Transformer", "BERT", "RoBERTa", "DistilBERT", "CamemBERT", "XLMRoBERTa")
_MODULES, _DEFAULTS = "modules.json", "config_sentence_transformers.json"
_SENTENCE_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# The only values of other settings of a sentence encoder that are supported.
_SUPPORTED: dict[str, Any] = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    **{f"{kind}_args": {} for kind in ("tokenizer", "config")},
    **{f"{kind}_kwargs": {} for kind in ("processor", "processing", "config")},
}
_BESIDE_WEIGHTS = (
    *("config.json", "bert_config.json", "vocab.txt", *vocabularies.FILES),
    *(_MODULES, _DEFAULTS, *_SENTENCE_CONFIGS, "1_Pooling/config.json"),
)

# What reading JSON of an unknown structure can raise.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
# Weights barely compress: a higher ratio of unpacked to packed size is a zip bomb.
_UNPACKED = 20


class Imported(NamedTuple):
    """An imported model.

    Attributes:
        config: config of the model, and of sentence vectors if it is a sentence encoder.
        vocabulary: the vocabulary.
        params: parameters as NumPy arrays.
        about: provenance: source, format, official (name of the known release with these weights,
            or None), vocabulary (likewise), sha256 (by file), left_out (names of tensors),
            guessed_case (whether no file says if texts are lowercased).
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
        path = storage.local(source, (*_BESIDE_WEIGHTS, SETTINGS))
    is_run, is_model = workdir.holds_run(path), _is_source(source) and path.suffix != ".txt"
    if path.is_dir():
        is_model = (_transformer_folder(path) / "config.json").is_file()
    if not is_run and not is_model:
        return vocabularies.load(source, lowercase)
    folder = path if path.is_dir() else _find(source, None, weights=False)[0]
    try:
        if is_run:
            return _with_case(workdir.read_vocabulary(path), lowercase)
        return _vocabulary(folder, None, lowercase, without_added=False)[0]
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
            settings, tensors, used = _google(folder, prefix)
        else:
            settings, tensors, used = _hugging_face(_transformer_folder(folder))
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
        found = attempts.call(
            _fitting_vocabulary, folder, vocab, lowercase, allow_missing, model.vocab_size
        )
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
    used = [*used, *([vocabulary_file] if vocabulary_file else [])]
    sums = {file.name: files.sha256(file) for file in used}
    weights = [_OFFICIAL.get(d) for name, d in sums.items() if not name.startswith("vocab")]
    about = {
        "source": name,
        "format": "Google, TensorFlow 1" if prefix else "Hugging Face",
        "official": next(filter(None, weights), None),
        "vocabulary": _OFFICIAL.get(vocabulary.sha256),
        "sha256": sums,
        "left_out": left_out + unexpected,
        "guessed_case": lowercase is None
        and vocabulary_file is not None
        and vocabulary_file.name == "vocab.txt"
        and not (_transformer_folder(folder) / "tokenizer_config.json").is_file(),
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
        f" (exactly {about[key]})" if about[key] else "" for key in ("official", "vocabulary")
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
    if about["left_out"]:
        lines.append(f"  ignored: {huggingface.shorten(about['left_out'])}")
    return "\n".join(lines)


def _check_unexpected(names: list[str], allowed: Collection[str]) -> None:
    if names := [name for name in names if not _matches(name, allowed)]:
        raise UserError(
            f"unexpected: {huggingface.shorten(names)}; ignore them with --allow-unexpected PATTERN"
        )


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _config(model: ModelConfig, folder: Traversable, allow_unexpected: Collection[str]) -> Config:
    embed = _embed_config(folder, model.positions, allow_unexpected)
    config = Config(model=model, embed=embed)
    validate(config)
    return config


# --- Locating the files --------------------------------------------------------------------------


def _find(source: str, revision: str | None, weights: bool = True) -> tuple[Traversable, str]:
    """Return the folder of the files, and the prefix of a TensorFlow checkpoint or "".

    Without `weights`, a model on the hub is downloaded without them.
    """
    try:
        path = pathlib.Path(source).expanduser()
        if source and path.is_dir():
            if revision:
                raise UserError(
                    f"{source} is a folder: --revision applies to models on the hub only"
                )
            return path, "" if _has_hugging_face(path) else _tensorflow_prefix(path)
        # A TensorFlow checkpoint is named by its prefix.
        if path.name and path.with_name(f"{path.name}.index").is_file():
            return path.parent, path.name
        if path.is_file():
            return _in_zip(path)
    except (OSError, RuntimeError) as error:
        reason = _why(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot read {source}: {reason}") from None
    if _is_hub_name(source):
        return _download(source, revision, weights), ""
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _has_hugging_face(folder: pathlib.Path) -> bool:
    return (folder / "config.json").is_file() and any((folder / n).is_file() for n in _WEIGHTS)


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


def _download(name: str, revision: str | None, weights: bool) -> pathlib.Path:
    """Download a model from the hub, or find it in the local cache, and return its folder."""
    import huggingface_hub as hub
    from huggingface_hub import errors
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # errors are reported below
    try:
        info = hub.HfApi().model_info(name, revision=revision, timeout=20)
        available = [file.rfilename for file in info.siblings or []]
        prefix = ""
        if _MODULES in available:
            root = pathlib.Path(hub.hf_hub_download(name, _MODULES, revision=revision)).parent
            prefix = f"{where}/" if (where := _transformer_path(root)) else ""
        names = [f"{prefix}{file}" for file in (_WEIGHTS if weights else _BESIDE_WEIGHTS)]
        first = next((file for file in names if file in available), None)
        if first is None:
            raise UserError(f"{name} on the hub has none of {', '.join(names)}")
        path = hub.hf_hub_download(name, first, revision=revision)
        files_needed = {*_BESIDE_WEIGHTS, *(f"{prefix}{file}" for file in _BESIDE_WEIGHTS)}
        files_needed &= {*available}
        if first.endswith(".index.json"):
            files_needed |= {f"{prefix}{file}" for file in _shards(pathlib.Path(path))}
        for file in sorted(files_needed):
            hub.hf_hub_download(name, file, revision=revision)
        return pathlib.Path(path).parents[1 if prefix else 0]
    except errors.GatedRepoError:
        problem = "the model is gated: accept its terms on the hub and run `hf auth login`"
    except errors.RevisionNotFoundError:
        problem = f"no revision {revision!r}"
    except errors.RepositoryNotFoundError:
        problem = "no such local folder, and no such public model on the hub"
    except Exception as error:
        if not isinstance(error, errors.HFValidationError) and not is_network_error(error):
            raise
        return _cached(name, revision, error)
    raise UserError(f"cannot download {name}: {problem}")


def _cached(name: str, revision: str | None, error: Exception) -> pathlib.Path:
    import huggingface_hub as hub

    try:
        return pathlib.Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:
        reason = _one_line(error)[:200]
        raise UserError(
            f"{name} is not a local folder, and the Hugging Face Hub cannot be reached ({reason}); "
            "download the model on a machine with network access and import its folder"
        ) from None


# --- Reading the files ------------------------------------------------------------------------------


def _bytes(file: Traversable) -> bytes:
    with file.open("rb") as stream:
        return whole(stream, file.name)


def _json(file: Traversable) -> dict[str, Any]:
    try:
        value = json.loads(_bytes(file))
    except (OSError, ValueError, RecursionError, zipfile.BadZipFile) as error:
        raise UserError(f"{file.name} cannot be read: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file.name} is not a JSON object")
    return value


def _hugging_face(folder: Traversable) -> tuple[dict, dict[str, np.ndarray], list[Traversable]]:
    # The oldest folders use Google's name.
    config = next(
        (f for n in ("config.json", "bert_config.json") if (f := folder / n).is_file()), None
    )
    weights = next((f for name in _WEIGHTS if (f := folder / name).is_file()), None)
    if config is None or weights is None:
        names = sorted(f.name for f in folder.iterdir())
        others = [n for n in names if n.endswith((".h5", ".msgpack", ".onnx", ".ot"))]
        raise UserError(
            f"no checkpoint: it has no {'config.json' if config is None else ' or '.join(_WEIGHTS[::2])}"
            + (f" (only {', '.join(others)}, which are not supported)" if others else "")
        )
    settings = _json(config)
    parts = [weights]
    if weights.name.endswith(".index.json"):
        parts = [folder / name for name in _shards(weights)]
    tensors: dict[str, np.ndarray] = {}
    for part in parts:
        tensors |= pytorch.read(part) if part.name.endswith(".bin") else _safetensors(part)
    return settings, tensors, parts


def _shards(index: Traversable) -> list[str]:
    """Return the names of the weight files that an index lists."""
    names = _json(index).get("weight_map")
    if not isinstance(names, dict):
        raise UserError(f"{index.name} lists no files")
    for name in names.values():
        if not _is_beside(name):
            raise UserError(f"{index.name} lists {name!r}, which is not a file in the same folder")
    return sorted(set(names.values()))


def _is_beside(name: Any) -> bool:
    """Whether a value is a plain file name, not a path to another folder."""
    if not isinstance(name, str) or "\0" in name or name != name.encode(errors="ignore").decode():
        return False
    return pathlib.PurePath(name).name == name and name not in ("", "..")


_TYPES = {
    "F64",
    "F32",
    "F16",
    "BF16",
    "BOOL",
    *(f"{sign}{size}" for sign in "IU" for size in (8, 16, 32, 64)),
}


def _safetensors(file: Any) -> dict[str, np.ndarray]:
    import google_crc32c
    import safetensors

    try:
        with safetensors.safe_open(file, "numpy") as opened:
            names = list(opened.keys())
            types = {name: opened.get_slice(name).get_dtype() for name in names}
            unsupported = [f"{n} ({kind})" for n, kind in types.items() if kind not in _TYPES]
            if unsupported:
                raise UserError(
                    f"{file.name} has tensors of types that are not supported: "
                    f"{huggingface.shorten(unsupported)}; convert them to float32 or bfloat16"
                )
            tensors = {name: opened.get_tensor(name) for name in names}
            sums = json.loads((opened.metadata() or {}).get("crc32c", "{}"))
            if not isinstance(sums, dict):
                raise ValueError("its checksums are not a JSON object")
    except FileNotFoundError:
        raise UserError(f"{file.name} is missing") from None
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{file.name} is damaged: {_damage(file, error)}") from None
    for name, value in tensors.items():
        if name in sums and google_crc32c.value(value.tobytes()) != sums[name]:
            raise UserError(f"{file.name} is damaged: {name} fails its checksum")
    return tensors


def _damage(file: pathlib.Path, error: Exception) -> str:
    """Return what is wrong with a safetensors file: where it is cut, or the library's message."""
    with file.open("rb") as opened:
        data = opened.read(8)
        if data == b"version ":
            return "it is a Git LFS pointer; fetch the file with `git lfs pull`"
        length, size = int.from_bytes(data, "little"), file.stat().st_size
        if len(data) < 8 or length > size - 8:
            return f"its header of {length:,} bytes is truncated"
        try:
            header = json.loads(opened.read(length))
            ends = [(v["data_offsets"][1], k) for k, v in header.items() if k != "__metadata__"]
            cut = min((8 + length + end, name) for end, name in ends if 8 + length + end > size)
            return f"truncated in {cut[1]}"
        except (*_MALFORMED, IndexError):
            return _one_line(error)


def _google(
    folder: Traversable, prefix: str
) -> tuple[dict, dict[str, np.ndarray], list[Traversable]]:
    config = folder / "bert_config.json"
    if not config.is_file():
        raise UserError(f"no bert_config.json next to {prefix}.index")
    settings = _json(config)
    tensors = {}
    for name, value in tensorflow1.read(folder, prefix, _is_weight).items():
        new, transposed = _google_name(name)
        tensors[new] = value.T if transposed else value
    if "classifier.weight" in tensors:  # run_classifier.py's
        settings["architectures"] = ["BertForSequenceClassification"]
    used = [f for f in folder.iterdir() if f.name.startswith(f"{prefix}.data-")]
    return settings, tensors, sorted(used, key=lambda f: f.name)


def _is_weight(name: str) -> bool:
    """Whether a variable is not part of the optimizer's state."""
    return not re.search(
        r"(/|_)(adam|lamb)_[mv](_\d+)?$|^global_step$|^(beta|gamma)\d_power$", name
    )


def _google_name(name: str) -> tuple[str, bool]:
    """Return the canonical name of a variable, and whether to transpose it."""
    fixed = {
        "cls/predictions/output_bias": "cls.predictions.bias",
        "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
        "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
        "cls/squad/output_weights": "qa_outputs.weight",
        "cls/squad/output_bias": "qa_outputs.bias",
        "output_weights": "classifier.weight",
        "output_bias": "classifier.bias",
    }
    if name in fixed:
        return fixed[name], False
    new = re.sub(r"layer_(\d+)", r"layer.\1", name).replace("/", ".")
    if new.endswith("_embeddings"):
        return f"{new}.weight", False
    return re.sub(r"\.kernel$", ".weight", new), new.endswith(".kernel")


# --- Vocabulary -----------------------------------------------------------------------------------


def _vocabulary(
    folder: Traversable, vocab: str | None, lowercase: bool | None, without_added: bool
) -> tuple[Vocabulary, Traversable | None]:
    """Return the vocabulary with the tokenizer's settings, and the file it was read from."""
    if vocab is not None:
        return vocabularies.load(vocab, lowercase), None
    vocabulary, file = _folder_vocabulary(_transformer_folder(folder), lowercase, without_added)
    sentence, name = _sentence_config(folder)
    if lowercase is None and _setting(sentence, "do_lower_case", False, name):
        vocabulary = vocabularies.lowercased(vocabulary)
    return vocabulary, file


def _folder_vocabulary(
    folder: Traversable, lowercase: bool | None, without_added: bool
) -> tuple[Vocabulary, Traversable]:
    listed, tokenizer = folder / "vocab.txt", folder / "tokenizer.json"
    saved, extra = folder / "tokenizer_config.json", folder / "added_tokens.json"
    settings = _json(saved) if saved.is_file() else {}
    kind = settings.get("tokenizer_class")
    if kind not in _TOKENIZERS or (kind not in _BERT_TOKENIZERS and _has_other(folder)):
        return _other_vocabulary(folder, kind, lowercase)
    added: list[str] = []
    if tokenizer.is_file():
        try:
            vocabulary, added = vocabularies.read_wordpiece(_bytes(tokenizer).decode())
        except _MALFORMED as error:
            raise UserError(f"tokenizer.json is not BERT's: {_one_line(error)}") from None
        if vocabularies.parse(vocabulary.to_bytes(), tokenizer.name) != vocabulary.tokens:
            raise UserError("tokenizer.json has a token that contains a line break")
        if listed.is_file():
            tokens = vocabularies.parse(_bytes(listed), listed.name)
            if vocabulary.tokens[: len(tokens)] != tokens:
                raise UserError(
                    "vocab.txt and tokenizer.json contain different vocabularies: remove one"
                )
        file = tokenizer
    elif listed.is_file():
        tokens = vocabularies.parse(_bytes(listed), listed.name)
        vocabulary, file = Vocabulary(tokens, vocabularies.looks_lowercase(tokens)), listed
        if extra.is_file():
            ids = _json(extra)
            added = sorted((t for t in ids if t not in SPECIAL), key=lambda t: str(ids[t]))
    else:
        raise UserError("neither vocab.txt nor tokenizer.json found; give one with --vocab")
    if added and not without_added:
        raise UserError(
            f"its tokenizer has added tokens, which are not supported: {huggingface.shorten(added)}; to "
            "split them into word pieces, add --allow-missing added_tokens"
        )
    if file == listed or kind is None or kind in _BERT_TOKENIZERS:
        vocabulary = dataclasses.replace(vocabulary, **_settings(settings))
    return _with_case(vocabulary, lowercase), file


def _with_case(vocabulary: Vocabulary, lowercase: bool | None) -> Vocabulary:
    """Return a vocabulary with another case; None changes nothing."""
    if lowercase is None:
        return vocabulary
    if not vocabulary.is_wordpiece:
        raise UserError("its case is part of the tokenizer; remove --cased or --uncased")
    return dataclasses.replace(vocabulary, lowercase=lowercase)


def _has_other(folder: Traversable) -> bool:
    """Whether a folder has a tokenizer of another kind than WordPiece."""
    tokenizer = folder / vocabularies.TOKENIZER
    if not tokenizer.is_file():
        return (folder / "merges.txt").is_file()
    try:
        return not vocabularies.is_wordpiece(_bytes(tokenizer))
    except _MALFORMED:
        return False  # is reported as damaged


def _other_vocabulary(
    folder: Traversable, kind: Any, lowercase: bool | None
) -> tuple[Vocabulary, Traversable]:
    """Return the vocabulary of a tokenizer that is not WordPiece, and the file it was read from."""
    present = [file for name in vocabularies.FILES if (file := folder / name).is_file()]
    try:
        vocabulary = vocabularies.from_files({file.name: _bytes(file) for file in present})
    except _MALFORMED as error:
        reason = _one_line(error)
        raise UserError(
            f"its tokenizer is {kind or 'of an unknown class'}, which cannot be used: {reason}"
        ) from None
    return _with_case(vocabulary, lowercase), present[0]


def _settings(saved: dict[str, Any]) -> dict[str, bool | None]:
    """Return the settings in a tokenizer_config.json, which override those in tokenizer.json."""
    ours = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "split_chinese",
    }
    settings = {}
    for theirs, name in ours.items():
        value = saved.get(theirs)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"tokenizer_config.json: {theirs} is {value!r}, not true or false")
        if value is not None:
            settings[name] = value
    return settings


def _fitting_vocabulary(
    folder: Traversable,
    vocab: str | None,
    lowercase: bool | None,
    allow_missing: Collection[str],
    size: int,
) -> tuple[Vocabulary, Traversable | None]:
    """Return the vocabulary for embeddings of `size` rows, padded if allowed, and its file."""
    vocabulary, file = _vocabulary(folder, vocab, lowercase, "added_tokens" in allow_missing)
    missing = size - len(vocabulary)
    if missing > 0 and "tokens" in allow_missing:
        if not vocabulary.is_wordpiece:
            return vocabulary.resized(size), file
        rest = tuple(f"[row{i}]" for i in range(len(vocabulary), size))
        return dataclasses.replace(vocabulary, tokens=vocabulary.tokens + rest), file
    if missing:
        hint = "; if the rest are padding, add --allow-missing tokens" if missing > 0 else ""
        raise UserError(
            f"the vocabulary has {len(vocabulary):,} tokens, the embeddings {size:,} rows{hint}"
        )
    return vocabulary, file


# --- Sentence encoders ----------------------------------------------------------------------------


def _modules(folder: Traversable) -> dict[str, str]:
    """Return the subfolder of each module of a sentence-transformers folder, "" for its root."""
    listed = folder / _MODULES
    if not listed.is_file():
        return {}
    try:
        kinds = {
            m["type"].rpartition(".")[2]: (m["path"] or "").removesuffix("/")
            for m in json.loads(_bytes(listed))
        }
    except _MALFORMED as error:
        raise UserError(f"{_MODULES} cannot be read: {_one_line(error)}") from None
    for where in kinds.values():
        if where and not _is_beside(where):
            raise UserError(f"{_MODULES} lists {where!r}, which is not a subfolder")
    return kinds


def _transformer_path(folder: Traversable) -> str:
    """Return the subfolder of the weights and the tokenizer, "" except in some sentence encoders."""
    modules = _modules(folder)
    return next((modules[kind] for kind in _TRANSFORMERS if kind in modules), "")


def _transformer_folder(folder: Traversable) -> Traversable:
    return folder / where if (where := _transformer_path(folder)) else folder


def _sentence_config(folder: Traversable) -> tuple[dict[str, Any], str]:
    """Return the settings of the first module of a sentence encoder, and the name of their file."""
    for name in _SENTENCE_CONFIGS if (folder / _MODULES).is_file() else ():
        file = _transformer_folder(folder) / name
        if settings := _json(file) if file.is_file() else {}:
            return settings, name
    return {}, ""


def _setting(settings: dict[str, Any], name: str, default: Any, file: str) -> Any:
    """Return a setting of the same type as its default, which stands for null."""
    value = settings.get(name)
    if value is not None and type(value) is not type(default):
        kinds = {bool: "true or false", int: "a whole number", str: "text", dict: "an object"}
        raise UserError(f"{file}: {name} is {value!r}, not {kinds[type(default)]}")
    return default if value is None else value


def _embed_config(
    folder: Traversable, positions: int, allow_unexpected: Collection[str]
) -> EmbedConfig:
    """Return the settings of a sentence-transformers folder."""
    embed, modules = EmbedConfig(), _modules(folder)
    if not (folder / _MODULES).is_file():
        return embed

    def refuse(name: str, what: str) -> None:
        if not _matches(name, allow_unexpected):
            raise UserError(
                f"{what}, which is not supported; to compute vectors without it, add "
                f"--allow-unexpected {name}"
            )

    for kind in sorted(modules.keys() - {*_TRANSFORMERS, "Pooling", "Normalize"}):
        refuse(kind, f"the sentence encoder has a module {kind}")
    embed.normalize = "Normalize" in modules
    if "Pooling" in modules and (file := folder / modules["Pooling"] / "config.json").is_file():
        pooling = _json(file)
        prefix = "pooling_mode_"
        modes = {k.removeprefix(prefix) for k, on in pooling.items() if k.startswith(prefix) and on}
        if "pooling_mode" in pooling:
            mode = pooling["pooling_mode"]
            modes = {*map(str, mode if isinstance(mode, list) else [mode])}
        if modes in ({"cls_token"}, {"cls"}):
            embed.pooling = "cls"
        elif modes and modes not in ({"mean_tokens"}, {"mean"}):
            refuse("Pooling", f"the sentence encoder pools by {', '.join(sorted(modes))}")
        embed.include_prompt = _setting(
            pooling, "include_prompt", True, f"{modules['Pooling']}/config.json"
        )
    sentence, name = _sentence_config(folder)
    for option, usual in _SUPPORTED.items():
        if (value := _setting(sentence, option, usual, name)) != usual:
            refuse(option, f"{name} sets {option} to {value!r}")
    embed.tokens = _max_tokens(folder, sentence, name, positions)
    if (file := folder / _DEFAULTS).is_file():
        defaults = _json(file)
        embed.truncate_dim = _setting(defaults, "truncate_dim", 0, _DEFAULTS)
        prompts = {"query": "", "document": ""} | _setting(defaults, "prompts", {}, _DEFAULTS)
        if default := _setting(defaults, "default_prompt_name", "", _DEFAULTS):
            if default not in prompts:
                raise UserError(
                    f"{_DEFAULTS}: default_prompt_name is {default!r}, which is not in prompts"
                )
            embed.prompt = _setting(prompts, default, "", _DEFAULTS)
    return embed


def _max_tokens(folder: Traversable, sentence: dict[str, Any], name: str, positions: int) -> int:
    """Return the maximum length of a sentence encoder's texts, or 0 for all positions."""
    length = _setting(sentence, "max_seq_length", 0, name)
    saved = _transformer_folder(folder) / "tokenizer_config.json"
    if not length and saved.is_file():
        length = _json(saved).get("model_max_length")
    return length if isinstance(length, int) and 3 <= length <= positions else 0
