"""Export a model as a Hugging Face folder."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import google_crc32c
import jax
import numpy as np

from bert_jax import storage
from bert_jax.config import schema as config_lib
from bert_jax.config.schema import (
    ElectraConfig,
    EmbedConfig,
    FinetuneConfig,
    ModelConfig,
    TrainConfig,
    with_fields,
)
from bert_jax.convert import huggingface
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.source import open_model
from bert_jax.data import vocabulary_files as vocabularies
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.model.bert import Params, shapes, split_generator
from bert_jax.model.flops import parameter_count
from bert_jax.runs import checkpoint, workdir
from bert_jax.storage import files

_PROBLEM_TYPES = {
    "class": "single_label_classification",
    "classes": "multi_label_classification",
    "number": "regression",
}


@storage.with_uploaded_output("out", new=True)
def export(
    source: str,
    out: str | pathlib.Path,
    which: str = "best",
    heads: str = "all",
    params: Params | None = None,
    card: Mapping[str, Any] = MappingProxyType({}),
    name: str = "PATH",
    revisions: Sequence[str] = (),
) -> dict[str, Any]:
    """Write config.json, model.safetensors, the tokenizer's files and a model card.

    For an ELECTRA run they are the discriminator's; its generator, a masked LM, is written to the
    subfolder "generator".

    Args:
        source, which: as for `open_model`.
        out: path of the new folder.
        heads: "all", "masked_lm" (such as `BertForMaskedLM`, or `BertLMHeadModel` of a causal model)
            or "none" (`BertModel`). Dropping heads avoids transformers' warning about weights that
            the loaded class does not have.
        params: parameters to write instead of the checkpoint's.
        card: metadata of the model card, such as its `license` and a list for `language`.
        name: what the card's example loads, such as the model's name on the Hugging Face Hub.
        revisions: branches on the Hub that the card lists.

    Returns:
        Content of config.json.
    """
    source = os.path.expanduser(source)
    config, vocabulary, saved, step = open_model(source, which)
    params = saved if params is None else params
    # Without the parts for pretraining only, which no class of transformers has.
    model = with_fields(config.model, {"span_boundary": False, "electra.generator_hidden": 0})
    generator = None
    if config.model.electra.generator_hidden and heads == "all":
        generator = split_generator(config.model, params)
    if heads == "masked_lm" and not model.masked_lm:
        raise UserError(f"{source} has no masked-LM head to export")
    if heads != "all":
        model = dataclasses.replace(
            model,
            masked_lm=model.masked_lm and heads == "masked_lm",
            # A causal model pools the last token, transformers' BERT the first. In some families the
            # pooler is a part of the head.
            pooler=model.has_pooler
            and heads == "none"
            and not model.causal
            and "pooler" in FAMILIES[model.family].parts,
            next_sentence=False,
            electra=ElectraConfig(),
            head=dataclasses.replace(
                model.head, kind="", labels=(), problem_type="", lstm_layers=0, features=""
            ),
        )
    if model.head.kind or model.next_sentence:
        vocabularies.check_segments(vocabulary, model.segments)
    params = {part: params[part] for part in shapes(model)}
    settings, tensors = _converted(model, params, vocabulary)
    if isinstance(config, FinetuneConfig) and model.head.kind == "sequence":
        settings["problem_type"] = _PROBLEM_TYPES[config.task.objective]
    parameters = parameter_count(params, model)
    architecture = settings["architectures"][0]
    family = FAMILIES[model.family]
    is_encoder = architecture == f"{family.class_prefix}Model"
    lacks_pooler = is_encoder and "pooler" in family.parts and not model.has_pooler
    arguments = ", add_pooling_layer=False" if lacks_pooler else ""
    text = _card(source, config, architecture, arguments, parameters, step, card, name, revisions)
    embed = config.embed
    tokenizer = huggingface.tokenizer_files(
        vocabulary, embed.tokens or model.positions, model.segments > 1
    )
    with files.new_folder(out) as folder:
        _write_model(folder, settings, tensors, tokenizer)
        if generator:
            (folder / "generator").mkdir()
            converted = _converted(*generator, vocabulary)
            _write_model(folder / "generator", *converted, tokenizer)
        if embed != EmbedConfig() and embed.layers == "last" and embed.pooling != "none":
            _write_sentence_encoder(folder, config, vocabulary)
        files.write(folder / "README.md", text)
    return settings


def _converted(
    model: ModelConfig, params: Params, vocabulary: Any
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return config.json and the tensors of a model, as transformers names them."""
    family, settings = FAMILIES[model.family], huggingface.huggingface_config(model, vocabulary)
    tensors = huggingface.to_huggingface(jax.device_get(params), model)
    settings, tensors = family.to_hf(settings, tensors)
    prefix = f"{family.encoder}."
    if all(key.startswith(prefix) for key in tensors):  # the class is the encoder
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return settings, tensors


def _write_model(
    folder: pathlib.Path,
    settings: dict[str, Any],
    tensors: dict[str, np.ndarray],
    tokenizer: Mapping[str, Any],
) -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    files.write_json(folder / "config.json", settings)
    _write_safetensors(folder / "model.safetensors", tensors)
    for file, content in tokenizer.items():
        files.write(folder / file, content)


@storage.with_uploaded_output("out", new=True)
def export_all(
    source: str,
    out: str | pathlib.Path,
    heads: str = "all",
    card: Mapping[str, Any] = MappingProxyType({}),
    name: str = "",
) -> list[int]:
    """Export every checkpoint of a run to `out/step_N`, and return the steps; else as `export`.

    With a `name` on the Hugging Face Hub, the cards list all `step_N` as its branches.
    """
    source = os.path.expanduser(source)
    if not workdir.holds_run(source):
        raise UserError(f"{source} is not a run: it has no checkpoints to choose from")
    steps = checkpoint.kept_steps(source)
    on_hub = {"name": name, "revisions": [f"step_{step}" for step in steps]} if name else {}
    with files.new_folder(out) as folder:
        for step in steps:
            export(source, folder / f"step_{step}", str(step), heads, card=card, **on_hub)
    return steps


def _write_safetensors(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """Write tensors with a checksum for each in the metadata, which `bert-jax import` verifies."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    sums = {name: google_crc32c.value(value.tobytes()) for name, value in tensors.items()}
    with files.atomic_write(path) as temporary:
        try:
            save_file(tensors, temporary, {"format": "pt", "crc32c": json.dumps(sums)})
        except SafetensorError as error:  # such as a full disk, which is no OSError here
            raise UserError(f"cannot write {path}: {error}") from None
        _order_metadata(temporary)


def _order_metadata(path: pathlib.Path) -> None:
    """Sort the metadata, which the library writes in random order, to make exports reproducible."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(ordered) <= size:
            file.seek(8)
            file.write(ordered.ljust(size))


def _write_sentence_encoder(
    folder: pathlib.Path, config: TrainConfig, vocabulary: Vocabulary
) -> None:
    """Write the files with which sentence-transformers computes the vectors of `bert-jax embed`."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if config.embed.normalize else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    files.write_json(folder / "modules.json", modules)
    tokens, embed = config.embed.tokens or config.model.positions, config.embed
    defaults = {"truncate_dim": embed.truncate_dim or None}
    if embed.prompt:
        defaults |= {"prompts": {"default": embed.prompt}, "default_prompt_name": "default"}
    files.write_json(folder / "config_sentence_transformers.json", defaults)
    files.write_json(
        folder / "sentence_bert_config.json",
        {"max_seq_length": tokens, "do_lower_case": vocabularies.lowercases(vocabulary)},
    )
    (folder / "1_Pooling").mkdir()
    pooling = {
        "word_embedding_dimension": config.model.hidden,
        "pooling_mode_cls_token": config.embed.pooling == "cls",
        "pooling_mode_mean_tokens": config.embed.pooling == "mean",
        "include_prompt": embed.include_prompt,
    }
    files.write_json(folder / "1_Pooling" / "config.json", pooling)
    if config.embed.normalize:
        (folder / "2_Normalize").mkdir()


def _card(
    source: str,
    config: TrainConfig,
    architecture: str,
    arguments: str,
    parameters: int,
    step: int,
    metadata: Mapping[str, Any],
    name: str,
    revisions: Sequence[str],
) -> str:
    """Return the model card: architecture, usage, training and metrics."""
    model, provenance = config.model, workdir.read_provenance(source, step)
    size = f"L{model.layers}-H{model.hidden}-A{model.heads}"
    family = FAMILIES[model.family]
    # Of ForPreTraining, transformers' pipeline would report unused weights.
    pipelines = {"ForMaskedLM": "fill-mask"}
    if family.causal_class:
        pipelines[family.causal_class] = "text-generation"
    pipeline = pipelines.get(architecture.removeprefix(family.class_prefix))
    # A line break at the end of a line is an empty line.
    lines = [
        "---",
        "library_name: transformers",
        *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()),
        *([f"pipeline_tag: {pipeline}"] if pipeline else []),
        f"tags:\n- {model.family}\n- jax",
        "---\n",
        f"# {family.title} {size}\n",
        f"`{architecture}`, {parameters:,} parameters, vocabulary of {model.vocab_size:,} word "
        f"pieces, up to {model.positions} tokens. Exported by bert_jax.\n",
        "```python",
        f"from transformers import AutoTokenizer, {architecture}\n",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        f'model = {architecture}.from_pretrained("{name}"{arguments})',
        "```\n",
    ]
    if revisions:
        branches = ", ".join(f"`{revision}`" for revision in revisions)
        example = f'from_pretrained("{name}", revision="{revisions[0]}")'
        lines.append(f"Revisions, such as `{example}`: {branches}\n")
    if imported := provenance.imported:
        known = f", exactly {imported['official']}" if imported["official"] else ""
        file = pathlib.PurePath(imported["source"]).name
        lines += [
            "## Origin\n",
            f"Imported from {imported['format']} files{known} (`{file}`):\n",
            *(f"- `{x}` sha256 {digest}" for x, digest in imported.get("sha256", {}).items()),
            "",
        ]
    if provenance.starts:
        last = provenance.starts[-1]
        versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        lines += [
            "## Training\n",
            f"Step {step:,} of {config.steps:,}. Commands:\n",
            "```sh",
            *dict.fromkeys(start["command"] for start in provenance.starts),
            "```\n",
            f"Trained on {last['devices']}; commit {last['commit']}; {versions}.\n",
        ]
    if heldout := provenance.heldout:
        lines += [
            f"Held-out metrics at step {heldout['step']:,}:\n",
            "| | |\n|---|---|",
            *(f"| {k} | {v:.4f} |" for k, v in heldout.items() if isinstance(v, float)),
            "",
        ]
    for data in provenance.data:
        if isinstance(config, FinetuneConfig) and "examples" in data:
            counts = ", ".join(f"{n:,} {split}" for split, n in data["examples"].items())
            task = config.task.name or config.task.kind
            lines.append(f"Fine-tuned on {task}: {counts} examples.\n")
            continue
        train, sources = data["train"], data["sources"]
        lines += [
            f"Rows of T={data['tokens']}: {train['documents']:,} documents, {train['sequences']:,} "
            f"sequences, {train['real_tokens']:,} tokens in {train['rows']:,} rows, sentence pairs "
            f"`{data['pairs']}`, from\n",
            *(
                f"- `{pathlib.PurePath(s['spec']).name}`: {s['documents']:,} documents"
                for s in sources
            ),
            "",
        ]
    values = config_lib.to_dict(config)
    if provenance.imported:  # the rest of the config does not describe it
        values = {"model": values["model"], "embed": values["embed"]}
    lines += ["## Config\n", "```json", json.dumps(values, indent=2), "```\n"]
    return "\n".join(lines)
