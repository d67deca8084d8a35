"""Any BERT checkpoint, whoever wrote it, to a model of ours.

A source is a run of this project or what `import_checkpoint` made, a Hugging Face folder, the name
of a model on its hub, or a TensorFlow 1 release of Google's, as a folder or as its zip.
"""

import dataclasses
import fnmatch
import json
import pathlib
import re
import zipfile
import zlib
from collections.abc import Collection
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax import checkpoint, files, workdir
from bert_jax import config as config_lib
from bert_jax.config import Config, EmbedConfig, TrainConfig
from bert_jax.convert import huggingface, pytorch, tensorflow1
from bert_jax.data import wordpiece
from bert_jax.data.compressed import SETTINGS_BYTES, whole
from bert_jax.data.wordpiece import SPECIAL, Vocabulary
from bert_jax.errors import UserError
from bert_jax.model.bert import Params
from bert_jax.model.flops import parameter_count

_OFFICIAL = {  # SHA-256 of Google's files of October 2018
    "58580dc5e0bf0ae0d2efd51d0e8272b2f808857f0a43a88aaf7549da6d7a8a84": "Google's uncased Base",
    "734d5a1b68bf98d4e9cb6b6692725d00842a1937af73902e51776905d8f760ea": "Google's cased Base",
    "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3": "Google's uncased English",
    "eeaa9875b23b04b4c54ef759d03db9d1ba1554838f8fb26c5d96fa551df93d02": "Google's cased English",
}
# None is what old folders have; the others read a tokenizer.json as it is.
_TOKENIZERS = (
    *("BertTokenizer", "BertTokenizerFast", None),
    *("PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer"),
)
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_BESIDE_WEIGHTS = (
    *("config.json", "bert_config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"),
    *("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"),
)

# Weights are nearly random bytes: a zip of them is about as large as they are.
_UNPACKED = 20


class Imported(NamedTuple):
    """A model from elsewhere.

    Attributes:
        config: the model, and how its authors make vectors with it.
        vocabulary, params: on the host.
        about: where it comes from: source, format, official (what the weights are known to be, or
            None), vocabulary (likewise), sha256 (of the files), left_out (tensors).
    """

    config: Config
    vocabulary: Vocabulary
    params: Params
    about: dict[str, Any]


def open_model(source: str, which: str = "best") -> tuple[TrainConfig, Vocabulary, Params, int]:
    """The model of any source, ready to run.

    Args:
        source: see the module.
        which: of a run, its checkpoint, as `checkpoint.load_model` takes it.

    Returns:
        Its config, vocabulary, parameters and step (0 for one from elsewhere).
    """
    if workdir.holds_run(source):
        return checkpoint.load_model(source, which)
    if which not in ("best", "latest"):
        raise UserError(f"{source} is no run: it has no checkpoint {which!r}")
    config, vocabulary, params, _ = read(source)
    return config, vocabulary, jax.device_put(params, jax.devices()[0]), 0


def import_checkpoint(source: str, out: str | pathlib.Path, **options: Any) -> Imported:
    """Makes a folder that every other command takes, with Orbax parameters and the vocabulary.

    Args:
        source: see the module.
        out: a new folder.
        options: as `read` takes them.

    Raises:
        UserError: as `read`; `out` exists. Nothing is left half-written.
    """
    files.check_new(out)
    imported = read(source, **options)
    with files.new_folder(out) as folder:
        saved = {
            "config": config_lib.to_dict(imported.config),
            "data": [],
            "imported": imported.about,
        }
        files.write_json(folder / "config.json", saved)
        imported.vocabulary.save(folder)
        checkpoints = checkpoint.Checkpoints(folder / "checkpoints", imported.config.checkpoint)
        checkpoints.save(0, imported.params)
        checkpoints.wait()
        checkpoints.close()
    return imported


def read(
    source: str,
    *,
    revision: str | None = None,
    vocab: str | None = None,
    lowercase: bool | None = None,
    allow_missing: Collection[str] = (),
    allow_unexpected: Collection[str] = (),
) -> Imported:
    """Reads a checkpoint that somebody else wrote.

    Args:
        source: a folder, a zip or a name on the hub.
        revision: branch, tag or commit on the hub.
        vocab: a vocabulary file instead of the source's own.
        lowercase: None: as the source says, or as its vocabulary looks.
        allow_missing: what may be missing although the source says that it is there: parts
            (`huggingface.PARTS`), "tokens" of the vocabulary at the end of the embeddings, and
            "added_tokens", which its tokenizer finds in a text before anything else.
        allow_unexpected: patterns of names of tensors, or of modules of sentence-transformers, to
            leave out.

    Raises:
        UserError: not a checkpoint, another architecture, tensors missing, unexpected or of another
            shape, a damaged file, a vocabulary of another size; the line names what.
    """
    folder, prefix = _find(source, revision)
    if workdir.holds_run(source):
        raise UserError(f"{source} is a run or an imported checkpoint already: use it as it is")
    try:
        if prefix:
            settings, tensors, used = _google(folder, prefix)
        else:
            settings, tensors, used = _hugging_face(folder)
        names = huggingface.canonical(tensors)
        canonical = {new: tensors[old] for new, old in names.items()}
        left_out = sorted(set(tensors) - set(names.values()))
        model = huggingface.model_config(settings, canonical, allow_missing)
        twins = huggingface.settle_decoder(canonical, model.tied_decoder)
        left_out += [names[name] for name in twins]
        strange = [names.get(n, n) for n in huggingface.unexpected(canonical, model)]
        allowed = [n for n in strange if any(fnmatch.fnmatch(n, p) for p in allow_unexpected)]
        if refused := [name for name in strange if name not in allowed]:
            raise UserError(
                f"unexpected: {huggingface.some(refused)}; leave them out with --allow-unexpected "
                "PATTERN"
            )
        params = huggingface.from_huggingface(canonical, model, names)
        vocabulary, vocabulary_file = _vocabulary(
            folder, vocab, lowercase, "added_tokens" in allow_missing
        )
        vocabulary = _fit(vocabulary, model.vocab_size, "tokens" in allow_missing)
        config = Config(model=model, embed=_embed_config(folder, model.positions, allow_unexpected))
        config_lib.validate(config)
    except UserError as error:
        raise UserError(f"cannot import {source}: {error}") from error
    except OSError as error:
        where = f" {pathlib.Path(error.filename).name}" if error.filename else ""
        raise UserError(f"cannot import {source}: cannot read{where}: {_why(error)}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise UserError(f"cannot import {source}: the zip is damaged ({error})") from None
    used = [*used, *([vocabulary_file] if vocabulary_file else [])]
    sums = {file.name: files.sha256(file) for file in used}
    weights = [_OFFICIAL.get(d) for name, d in sums.items() if not name.startswith("vocab")]
    about = {
        "source": source,
        "format": "Google, TensorFlow 1" if prefix else "Hugging Face",
        "official": next(filter(None, weights), None),
        "vocabulary": _OFFICIAL.get(vocabulary.sha256),
        "sha256": sums,
        "left_out": left_out + allowed,
    }
    return Imported(config, vocabulary, params, about)


def describe(imported: Imported) -> str:
    """What was imported, in a few lines for people."""
    model, vocabulary, about = imported.config.model, imported.vocabulary, imported.about
    parts = {"pooler": model.has_pooler, "masked_lm": model.masked_lm}
    parts |= {"next_sentence": model.next_sentence, f"head ({model.head})": bool(model.head)}
    there = [part for part, is_there in parts.items() if is_there] or ["the encoder alone"]
    case = "uncased" if vocabulary.lowercase else "cased"
    known = {
        key: f" (exactly {about[key]})" if about[key] else "" for key in ("official", "vocabulary")
    }
    lines = [
        f"BERT L{model.layers}-H{model.hidden}-A{model.heads}, "
        f"{parameter_count(imported.params, model):,} parameters{known['official']}",
        f"  {case} vocabulary of {len(vocabulary):,}{known['vocabulary']}",
        f"  with {', '.join(there)}",
    ]
    if about["left_out"]:
        lines.append(f"  left out: {huggingface.some(about['left_out'])}")
    return "\n".join(lines)


# --- Where the files are --------------------------------------------------------------------------


def _find(source: str, revision: str | None) -> tuple[Traversable, str]:
    """The folder of the files, and for TensorFlow what their names begin with."""
    try:
        path = pathlib.Path(source).expanduser()
        if source and path.is_dir():
            if revision:
                raise UserError(f"{source} is a folder: --revision is for models on the hub")
            return path, "" if _has_hugging_face(path) else _tensorflow_prefix(path)
        # A checkpoint by TensorFlow's way of naming it.
        if path.name and path.with_name(f"{path.name}.index").is_file():
            return path.parent, path.name
        if path.is_file():
            return _in_zip(path)
    except (OSError, RuntimeError) as error:
        reason = _why(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot read {source}: {reason}") from None
    if re.fullmatch(r"[\w][\w.-]*(/[\w.-]+)?", source):
        return _download(source, revision), ""
    raise UserError(
        f"{source}: no such file or folder, and no name on the Hugging Face hub; give a folder, "
        "the zip of a Google release, or OWNER/NAME"
    )


def _why(error: OSError) -> str:
    return error.strerror.lower() if error.strerror else str(error)


def _has_hugging_face(folder: pathlib.Path) -> bool:
    return (folder / "config.json").is_file() and any((folder / n).is_file() for n in _WEIGHTS)


def _in_zip(path: pathlib.Path) -> tuple[Traversable, str]:
    try:
        archive = zipfile.ZipFile(path)
        declared, size = sum(m.file_size for m in archive.infolist()), path.stat().st_size
        if declared > _UNPACKED * size + SETTINGS_BYTES:
            raise UserError(f"{path} says it unpacks to {declared:,} bytes, and it has {size:,}: no "
                            "checkpoint is packed so tightly; download it again")  # fmt: skip
        names = [n for n in archive.namelist() if not n.startswith("__MACOSX/")]
        inside = [n for n in names if pathlib.PurePosixPath(n).suffix == ".index"]
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise UserError(
            f"{path} is no folder and no zip ({error}): give the folder that holds the checkpoint"
        ) from None
    if len(inside) != 1:
        raise UserError(
            f"{path} holds no TensorFlow checkpoint; of a zip, only Google's can be read"
        )
    index = zipfile.Path(archive, inside[0])
    return index.parent, index.name.removesuffix(".index")


def _tensorflow_prefix(folder: pathlib.Path) -> str:
    found = [p.name.removesuffix(".index") for p in sorted(folder.glob("*.ckpt*.index"))]
    if len(found) > 1:
        raise UserError(f"{folder} holds {len(found)} TensorFlow checkpoints: name one, such as "
                        f"{folder / found[-1]}")  # fmt: skip
    return found[0] if found else ""


def _download(name: str, revision: str | None) -> pathlib.Path:
    """The files of a model on the hub, from its cache or from the network."""
    import huggingface_hub as hub
    from huggingface_hub import errors
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # what goes wrong is said below, once
    try:
        found = hub.HfApi().model_info(name, revision=revision, timeout=20)
        there = [file.rfilename for file in found.siblings or []]
        wanted = [file for file in _BESIDE_WEIGHTS if file in there]
        weights = next((file for file in _WEIGHTS if file in there), None)
        if weights is None:
            raise UserError(f"{name} on the hub holds none of {', '.join(_WEIGHTS)}")
        wanted.append(weights)
        if weights.endswith(".index.json"):
            index = hub.hf_hub_download(name, weights, revision=revision)
            wanted += _shards(pathlib.Path(index))
        for file in wanted:
            path = hub.hf_hub_download(name, file, revision=revision)
        # A file of the root tells the folder; the weights come last and are one.
        return pathlib.Path(path).parent
    except errors.GatedRepoError:
        problem = "it is gated: accept its terms on the hub and log in with `hf auth login`"
    except errors.RevisionNotFoundError:
        problem = f"it has no revision {revision!r}"
    except errors.RepositoryNotFoundError:
        problem = "there is no such model, or it is private; it is no folder here either"
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        return _cached(name, revision, error)
    except Exception as error:
        # The client's own exceptions for a network that is not there change with its HTTP library.
        if "httpx" not in type(error).__module__ and "requests" not in type(error).__module__:
            raise
        return _cached(name, revision, error)
    raise UserError(f"cannot download {name}: {problem}")


def _cached(name: str, revision: str | None, error: Exception) -> pathlib.Path:
    import huggingface_hub as hub

    try:
        return pathlib.Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{name} is no folder here, and the Hugging Face hub cannot be reached ({reason}); "
            "download the model where there is a network and import its folder"
        ) from None


# --- What is in them ------------------------------------------------------------------------------


def _bytes(file: Traversable) -> bytes:
    with file.open("rb") as stream:
        return whole(stream, file.name)


def _json(file: Traversable) -> dict[str, Any]:
    try:
        value = json.loads(_bytes(file))
    except (OSError, ValueError, RecursionError, zipfile.BadZipFile) as error:
        raise UserError(f"{file.name} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file.name} is not a JSON object")
    return value


def _hugging_face(folder: Traversable) -> tuple[dict, dict[str, np.ndarray], list[Traversable]]:
    # The oldest folders have Google's name for it.
    config = next(
        (f for n in ("config.json", "bert_config.json") if (f := folder / n).is_file()), None
    )
    weights = next((f for name in _WEIGHTS if (f := folder / name).is_file()), None)
    if config is None or weights is None:
        there = sorted(f.name for f in folder.iterdir())
        others = [n for n in there if n.endswith((".h5", ".msgpack", ".onnx", ".ot"))]
        raise UserError(
            f"it holds no checkpoint: no {'config.json' if config is None else ' or '.join(_WEIGHTS[::2])}"
            + (f" (only {', '.join(others)}, which are not read)" if others else "")
        )
    settings = _json(config)
    parts = [weights]
    if weights.name.endswith(".index.json"):
        parts = [folder / name for name in _shards(weights)]
    tensors: dict[str, np.ndarray] = {}
    for part in parts:
        tensors |= pytorch.read(part) if part.name.endswith(".bin") else _safetensors(part)
    return settings, tensors, parts


def _shards(index: pathlib.Path) -> list[str]:
    """The files that an index names, which are beside it."""
    names = _json(index).get("weight_map")
    if not isinstance(names, dict):
        raise UserError(f"{index.name} names no files")
    for name in names.values():
        if not _is_beside(name):
            raise UserError(f"{index.name} names {name!r}, which is no file beside it")
    return sorted(set(names.values()))


def _is_beside(name: Any) -> bool:
    """Whether this is the name of something beside the file that holds it, and no path elsewhere."""
    return isinstance(name, str) and pathlib.PurePath(name).name == name and name not in ("", "..")


def _safetensors(file: pathlib.Path) -> dict[str, np.ndarray]:
    import google_crc32c
    import safetensors

    try:
        with safetensors.safe_open(file, "numpy") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            sums = json.loads((opened.metadata() or {}).get("crc32c", "{}"))
            if not isinstance(sums, dict):
                raise ValueError("its checksums are no table")
    except FileNotFoundError:
        raise UserError(f"{file.name} is missing") from None
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{file.name} is damaged: {_damage(file, error)}") from None
    for name, value in tensors.items():
        if name in sums and google_crc32c.value(value.tobytes()) != sums[name]:
            raise UserError(f"{file.name} is damaged: {name} fails its checksum")
    return tensors


def _damage(file: pathlib.Path, error: Exception) -> str:
    """What is wrong with a safetensors file: the tensor that is cut, or what the library says."""
    with file.open("rb") as opened:
        data = opened.read(8)
        if data == b"version ":
            return "it is only a pointer of Git LFS; fetch the file with `git lfs pull`"
        length, size = int.from_bytes(data, "little"), file.stat().st_size
        if len(data) < 8 or length > size - 8:
            return f"its header of {length:,} bytes is not whole"
        try:
            header = json.loads(opened.read(length))
            ends = [(v["data_offsets"][1], k) for k, v in header.items() if k != "__metadata__"]
            cut = min((8 + length + end, name) for end, name in ends if 8 + length + end > size)
            return f"it is cut short in {cut[1]}"
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return " ".join(str(error).split())


def _google(
    folder: Traversable, prefix: str
) -> tuple[dict, dict[str, np.ndarray], list[Traversable]]:
    config = folder / "bert_config.json"
    if not config.is_file():
        raise UserError(f"no bert_config.json beside {prefix}.index")
    settings = _json(config)
    found = tensorflow1.read(folder, prefix, _is_weight)
    tensors = {}
    for name, value in found.items():
        new, transposed = _google_name(name)
        tensors[new] = value.T if transposed else value
    if "classifier.weight" in tensors:  # run_classifier.py's
        settings["architectures"] = ["BertForSequenceClassification"]
    used = [f for f in folder.iterdir() if f.name.startswith(f"{prefix}.data-")]
    return settings, tensors, sorted(used, key=lambda f: f.name)


def _is_weight(name: str) -> bool:
    """Not the optimizer's."""
    return not re.search(
        r"(/|_)(adam|lamb)_[mv](_\d+)?$|^global_step$|^(beta|gamma)\d_power$", name
    )


def _google_name(name: str) -> tuple[str, bool]:
    """The canonical name of one of Google's, and whether its matrix is transposed there."""
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
    """The vocabulary with the tokenizer's settings, and the file it was read from."""
    if vocab is not None:
        return wordpiece.load(vocab, lowercase), None
    listed, tokenizer = folder / "vocab.txt", folder / "tokenizer.json"
    saved, extra = folder / "tokenizer_config.json", folder / "added_tokens.json"
    settings = _json(saved) if saved.is_file() else {}
    kind = settings.get("tokenizer_class")
    if kind not in _TOKENIZERS:
        raise UserError(f"its tokenizer is a {kind}, not BERT's; --vocab FILE takes BERT's instead")
    added: list[str] = []
    if tokenizer.is_file():
        try:
            vocabulary, added = huggingface.read_tokenizer(_bytes(tokenizer).decode())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"tokenizer.json is not BERT's: {' '.join(str(error).split())}"
            ) from None
        if wordpiece.parse(vocabulary.to_bytes(), tokenizer.name) != vocabulary.tokens:
            raise UserError("tokenizer.json holds a token with a line break in it")
        if listed.is_file():
            tokens = wordpiece.parse(_bytes(listed), listed.name)
            if vocabulary.tokens[: len(tokens)] != tokens:
                raise UserError(
                    "vocab.txt and tokenizer.json hold different vocabularies: remove one"
                )
        file = tokenizer
    elif listed.is_file():
        tokens = wordpiece.parse(_bytes(listed), listed.name)
        vocabulary, file = Vocabulary(tokens, wordpiece.looks_lowercase(tokens)), listed
        if extra.is_file():
            ids = _json(extra)
            added = sorted((t for t in ids if t not in SPECIAL), key=lambda t: str(ids[t]))
    else:
        raise UserError("it has no vocab.txt and no tokenizer.json; name one with --vocab")
    if added and not without_added:
        raise UserError(
            f"its tokenizer finds {huggingface.some(added)} in a text, which would be taken apart "
            "here; add --allow-missing added_tokens to go on all the same"
        )
    vocabulary = dataclasses.replace(vocabulary, **_settings(settings))
    if lowercase is not None:
        vocabulary = dataclasses.replace(vocabulary, lowercase=lowercase)
    return vocabulary, file


def _settings(saved: dict[str, Any]) -> dict[str, bool | None]:
    """What a tokenizer_config.json says of the tokenizer; it goes before tokenizer.json."""
    ours = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "split_chinese",
    }
    found = {}
    for theirs, name in ours.items():
        value = saved.get(theirs)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"tokenizer_config.json: {theirs} is {value!r}, not true or false")
        if value is not None:
            found[name] = value
    return found


def _fit(vocabulary: Vocabulary, size: int, may_lack: bool) -> Vocabulary:
    """The vocabulary, if it is as long as the embeddings."""
    missing = size - len(vocabulary)
    if missing > 0 and may_lack:
        rest = tuple(f"[row{i}]" for i in range(len(vocabulary), size))
        return dataclasses.replace(vocabulary, tokens=vocabulary.tokens + rest)
    if missing:
        hint = "; add --allow-missing tokens if they are padding" if missing > 0 else ""
        raise UserError(
            f"the vocabulary has {len(vocabulary):,} tokens, the embeddings {size:,} rows{hint}"
        )
    return vocabulary


def _embed_config(
    folder: Traversable, positions: int, allow_unexpected: Collection[str]
) -> EmbedConfig:
    """How a sentence encoder's authors make vectors, as sentence-transformers writes it down."""
    embed = EmbedConfig()
    listed = folder / "modules.json"
    if not listed.is_file():
        return embed
    try:
        modules = json.loads(_bytes(listed))
        kinds = {m["type"].rpartition(".")[2]: m["path"] or "" for m in modules}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"modules.json cannot be read: {' '.join(str(error).split())}") from None

    def refuse(name: str, what: str) -> None:
        if not any(fnmatch.fnmatch(name, pattern) for pattern in allow_unexpected):
            raise UserError(
                f"{what}, which vectors here would be made without; add --allow-unexpected {name} "
                "to go on all the same"
            )

    for kind in kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
        refuse(kind, f"it is a sentence encoder with a module {kind}")
    embed.normalize = "Normalize" in kinds
    where = kinds.get("Pooling", "")
    if where and not _is_beside(where):
        raise UserError(f"modules.json names {where!r}, which is no folder beside it")
    if "Pooling" in kinds and (file := folder / where / "config.json").is_file():
        pooling = _json(file)
        modes = {name.removeprefix("pooling_mode_") for name, on in pooling.items() if on is True}
        modes = {str(pooling["pooling_mode"])} if "pooling_mode" in pooling else modes
        if modes & {"cls_token", "cls"}:
            embed.pooling = "cls"
        elif not modes & {"mean_tokens", "mean"}:
            refuse("Pooling", f"its vectors are pooled by {', '.join(map(str, sorted(modes)))}")
    if (file := folder / "sentence_bert_config.json").is_file():
        most = _json(file).get("max_seq_length")
        embed.tokens = most if isinstance(most, int) and 3 <= most <= positions else 0
    return embed
