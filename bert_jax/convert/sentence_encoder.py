"""Read and write the settings of a sentence encoder, a folder of sentence-transformers."""

import json
import pathlib
from collections.abc import Callable, Mapping
from importlib.resources.abc import Traversable
from typing import Any

from bert_jax.config.schema import EmbedConfig, TrainConfig
from bert_jax.convert.weights import (
    MALFORMED,
    first_file,
    is_beside,
    one_line,
    read_bytes,
    read_json,
)
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.storage import files

MODULES, DEFAULTS = "modules.json", "config_sentence_transformers.json"
CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
POOLING = "1_Pooling/config.json"
# Modules of sentence-transformers that are a model of transformers; its first version named the class.
_TRANSFORMERS = ("Transformer", "BERT", "RoBERTa", "DistilBERT", "CamemBERT", "XLMRoBERTa")
# The only values of other settings of a sentence encoder that are supported.
_SUPPORTED: dict[str, Any] = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    **{f"{kind}_args": {} for kind in ("tokenizer", "config")},
    **{f"{kind}_kwargs": {} for kind in ("processor", "processing", "config")},
}


def _modules(folder: Traversable) -> dict[str, str]:
    """Return the subfolder of each module of a sentence-transformers folder, "" for its root."""
    listed = folder / MODULES
    if not listed.is_file():
        return {}
    try:
        kinds = {
            m["type"].rpartition(".")[2]: (m["path"] or "").removesuffix("/")
            for m in json.loads(read_bytes(listed))
        }
    except MALFORMED as error:
        raise UserError(f"{MODULES} cannot be read: {one_line(error)}") from None
    for where in kinds.values():
        if where and not is_beside(where):
            raise UserError(f"{MODULES} lists {where!r}, which is not a subfolder")
    return kinds


def transformer_path(folder: Traversable) -> str:
    """Return the subfolder of the weights and the tokenizer, "" except in some sentence encoders."""
    modules = _modules(folder)
    return next((modules[kind] for kind in _TRANSFORMERS if kind in modules), "")


def transformer_folder(folder: Traversable) -> Traversable:
    """Return the folder of the weights and the tokenizer."""
    return folder / where if (where := transformer_path(folder)) else folder


def _first_module(folder: Traversable) -> Callable[[str, Any], Any]:
    """Return a function from the name and the default of a setting of the first module to its value."""
    is_encoder = (folder / MODULES).is_file()
    file = first_file(transformer_folder(folder), CONFIGS) if is_encoder else None
    return _settings(file, file.name if file else "")


def _settings(
    file: Traversable | Mapping[str, Any] | None, where: str
) -> Callable[[str, Any], Any]:
    """Return a function from the name and the default of a setting in a JSON file to its value.

    The value has the type of its default, which stands for null. `where` names the file in errors.
    """
    settings = file if isinstance(file, Mapping) else read_json(file)

    def get(name: str, default: Any) -> Any:
        value = settings.get(name)
        if value is not None and type(value) is not type(default):
            kinds = {bool: "true or false", int: "a whole number", str: "text", dict: "an object"}
            raise UserError(f"{where}: {name} is {value!r}, not {kinds[type(default)]}")
        return default if value is None else value

    return get


def lowercases_texts(folder: Traversable) -> bool:
    """Whether a sentence encoder lowercases texts before its tokenizer reads them."""
    return _first_module(folder)("do_lower_case", False)


def read(folder: Traversable, positions: int, is_allowed: Callable[[str], bool]) -> EmbedConfig:
    """Return the settings of vectors of a folder.

    Args:
        folder: a folder of a model, sentence encoder or not.
        positions: number of positions of the model.
        is_allowed: whether an unsupported module or setting, given its name, is to be ignored.
    """
    embed, modules = EmbedConfig(), _modules(folder)
    if not (folder / MODULES).is_file():
        return embed

    def refuse(name: str, what: str) -> None:
        if not is_allowed(name):
            raise UserError(
                f"{what}, which is not supported; to compute vectors without it, use "
                f"`bert-jax import --allow-unexpected {name}`"
            )

    for kind in sorted(modules.keys() - {*_TRANSFORMERS, "Pooling", "Normalize"}):
        refuse(kind, f"the sentence encoder has a module {kind}")
    embed.normalize = "Normalize" in modules
    if "Pooling" in modules and (file := folder / modules["Pooling"] / "config.json").is_file():
        pooling, prefix = read_json(file), "pooling_mode_"
        modes = {k.removeprefix(prefix) for k, on in pooling.items() if k.startswith(prefix) and on}
        if "pooling_mode" in pooling:
            mode = pooling["pooling_mode"]
            modes = {*map(str, mode if isinstance(mode, list) else [mode])}
        if modes in ({"cls_token"}, {"cls"}):
            embed.pooling = "cls"
        elif modes and modes not in ({"mean_tokens"}, {"mean"}):
            refuse("Pooling", f"the sentence encoder pools by {', '.join(sorted(modes))}")
        where = f"{modules['Pooling']}/config.json"
        embed.include_prompt = _settings(pooling, where)("include_prompt", True)
    setting = _first_module(folder)
    for option, usual in _SUPPORTED.items():
        if (value := setting(option, usual)) != usual:
            refuse(option, f"the sentence encoder sets {option} to {value!r}")
    # Without a maximum, that of the tokenizer; 0 means all positions.
    saved = first_file(transformer_folder(folder), ["tokenizer_config.json"])
    length = setting("max_seq_length", 0) or read_json(saved).get("model_max_length")
    embed.tokens = length if isinstance(length, int) and 3 <= length <= positions else 0
    default = _settings(first_file(folder, [DEFAULTS]), DEFAULTS)
    embed.truncate_dim = default("truncate_dim", 0)
    prompts = {"query": "", "document": ""} | default("prompts", {})
    if name := default("default_prompt_name", ""):
        if name not in prompts:
            raise UserError(f"{DEFAULTS}: default_prompt_name is {name!r}, which is not in prompts")
        embed.prompt = _settings(prompts, DEFAULTS)(name, "")
    return embed


def write(folder: pathlib.Path, config: TrainConfig, vocabulary: Vocabulary) -> None:
    """Write the files with which sentence-transformers computes the vectors of `bert-jax embed`."""
    embed = config.embed
    kinds = ["Transformer", "Pooling", *(["Normalize"] if embed.normalize else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    for module in modules[1:]:
        (folder / str(module["path"])).mkdir()
    prompts = {"prompts": {"default": embed.prompt}, "default_prompt_name": "default"}
    contents = {
        MODULES: modules,
        DEFAULTS: {"truncate_dim": embed.truncate_dim or None, **(prompts if embed.prompt else {})},
        CONFIGS[0]: {
            "max_seq_length": embed.tokens or config.model.positions,
            "do_lower_case": vocabularies.lowercases(vocabulary),
        },
        POOLING: {
            "word_embedding_dimension": config.model.hidden,
            "pooling_mode_cls_token": embed.pooling == "cls",
            "pooling_mode_mean_tokens": embed.pooling == "mean",
            "include_prompt": embed.include_prompt,
        },
    }
    for name, content in contents.items():
        files.write_json(folder / name, content)
