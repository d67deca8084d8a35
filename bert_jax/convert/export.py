"""Export a model as a Hugging Face folder."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from bert_jax import storage
from bert_jax.config import fields as fields_lib
from bert_jax.config.fields import with_fields
from bert_jax.config.model import ElectraConfig, ModelConfig
from bert_jax.config.schema import EmbedConfig, FinetuneConfig, TrainConfig
from bert_jax.convert import huggingface, sentence_encoder, weights
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.source import open_model
from bert_jax.convert.tokenizer import tokenizer_files
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
    "relevance": "multi_label_classification",  # binary cross-entropy
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
    kind: str = "safetensors",
) -> dict[str, Any]:
    """Write config.json, the weights, the tokenizer's files and a model card.

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
        kind: "safetensors", "onnx" (a graph instead of weights, see `onnx_graph`) or "onnx-int8" (also a
            graph with int8 weights; prints what they change).

    Returns:
        Content of config.json.
    """
    if heads not in ("all", "masked_lm", "none"):
        raise UserError(f"heads is {heads!r}: it must be 'all', 'masked_lm' or 'none'")
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
    if isinstance(config, FinetuneConfig) and model.head.kind == "sequence":
        problem_type = _PROBLEM_TYPES[config.task.objective]
        model = with_fields(model, {"head.problem_type": problem_type})
    architecture = huggingface.architecture(model)
    usage = _usage(model, architecture, name, kind)
    text = _card(source, config, architecture, usage, params, step, card, name, revisions)
    embed = config.embed
    tokenizer = tokenizer_files(vocabulary, embed.tokens or model.positions, model.segments > 1)
    with files.new_folder(out) as folder:
        settings = _write_model(folder, model, params, vocabulary, tokenizer, kind)
        if generator:
            (folder / "generator").mkdir()
            _write_model(folder / "generator", *generator, vocabulary, tokenizer, kind)
        if embed != EmbedConfig() and embed.layers == "last" and embed.pooling != "none":
            sentence_encoder.write(folder, config, vocabulary)
        files.write(folder / "README.md", text)
    return settings


def _write_model(
    folder: pathlib.Path,
    model: ModelConfig,
    params: Params,
    vocabulary: Vocabulary,
    tokenizer: Mapping[str, Any],
    kind: str,
) -> dict[str, Any]:
    """Write config.json, the weights and the tokenizer's files; return config.json."""
    family, settings = FAMILIES[model.family], huggingface.huggingface_config(model, vocabulary)
    tensors = huggingface.to_huggingface(jax.device_get(params), model)
    settings, tensors = family.to_hf(settings, tensors)
    files.write_json(folder / "config.json", settings)
    for file, content in tokenizer.items():
        files.write(folder / file, content)
    if kind != "safetensors":
        from bert_jax.convert import onnx_graph  # imports ONNX Runtime

        onnx_graph.write(folder, model, params)
        if kind == "onnx-int8":
            print(onnx_graph.quantize(folder, vocabulary, model.positions))
        return settings
    prefix = f"{family.encoder}."
    if all(key.startswith(prefix) for key in tensors):  # the class is the encoder
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    weights.write(folder / "model.safetensors", tensors)
    return settings


@storage.with_uploaded_output("out", new=True)
def export_all(
    source: str,
    out: str | pathlib.Path,
    heads: str = "all",
    card: Mapping[str, Any] = MappingProxyType({}),
    name: str = "",
    kind: str = "safetensors",
) -> list[int]:
    """Export every checkpoint of a run to `out/step_N`, and return the steps; else as `export`.

    With a `name` on the Hugging Face Hub, the cards list all `step_N` as its branches.
    """
    source = os.path.expanduser(source)
    if not workdir.holds_run(source):
        raise UserError(f"{source} is not a run: it has no checkpoints to choose from")
    steps = checkpoint.kept_steps(source)
    options: dict[str, Any] = (
        {"name": name, "revisions": [f"step_{step}" for step in steps]} if name else {}
    )
    with files.new_folder(out) as folder:
        for step in steps:
            export(
                source, folder / f"step_{step}", str(step), heads, None, card, kind=kind, **options
            )
    return steps


def _usage(model: ModelConfig, architecture: str, name: str, kind: str) -> list[str]:
    """Return the lines of the card's example."""
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    if kind != "safetensors":
        return [
            "import onnxruntime\nfrom transformers import AutoTokenizer\n",
            tokenizer,
            f'session = onnxruntime.InferenceSession("{name}/model.onnx")',
            'outputs = session.run(None, dict(tokenizer("A text.", return_tensors="np")))',
        ]
    family = FAMILIES[model.family]
    is_encoder = architecture == f"{family.class_prefix}Model"
    lacks_pooler = is_encoder and "pooler" in family.parts and not model.has_pooler
    arguments = ", add_pooling_layer=False" if lacks_pooler else ""
    return [
        f"from transformers import AutoTokenizer, {architecture}\n",
        tokenizer,
        f'model = {architecture}.from_pretrained("{name}"{arguments})',
    ]


def _card(
    source: str,
    config: TrainConfig,
    architecture: str,
    usage: Sequence[str],
    params: Params,
    step: int,
    metadata: Mapping[str, Any],
    name: str,
    revisions: Sequence[str],
) -> str:
    """Return the model card: architecture, usage, training and metrics."""
    model, provenance = config.model, workdir.read_provenance(source, step)
    family = FAMILIES[model.family]
    # Of ForPreTraining, transformers' pipeline would report unused weights.
    pipelines = {"ForMaskedLM": "fill-mask"}
    if family.causal_class:
        pipelines[family.causal_class] = "text-generation"
    pipeline = pipelines.get(architecture.removeprefix(family.class_prefix))
    front = [
        "library_name: transformers",
        *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()),
        *([f"pipeline_tag: {pipeline}"] if pipeline else []),
        f"tags:\n- {model.family}\n- jax",
    ]
    tokens = max((data.get("tokens", 0) for data in provenance.data), default=0)
    trained = f" (trained on rows of {tokens})" if 0 < tokens < model.positions else ""
    paragraphs = [
        "\n".join(["---", *front, "---"]),
        f"# {family.title} L{model.layers}-H{model.hidden}-A{model.heads}",
        f"`{architecture}`, {parameter_count(params, model):,} parameters, vocabulary of {model.vocab_size:,} word "
        f"pieces, up to {model.positions} tokens{trained}. Exported by bert_jax.",
        "\n".join(["```python", *usage, "```"]),
    ]
    if revisions:
        branches = ", ".join(f"`{revision}`" for revision in revisions)
        example = f'from_pretrained("{name}", revision="{revisions[0]}")'
        paragraphs.append(f"Revisions, such as `{example}`: {branches}")
    paragraphs += _history(provenance, config, step)
    values = fields_lib.to_dict(config)
    if provenance.imported:  # the rest of the config does not describe it
        values = {"model": values["model"], "embed": values["embed"]}
    paragraphs += ["## Config", f"```json\n{json.dumps(values, indent=2)}\n```", ""]
    return "\n\n".join(paragraphs)


def _history(provenance: workdir.Provenance, config: TrainConfig, step: int) -> Iterator[str]:
    """Yield paragraphs about the origin, the training, the metrics and the data of a model."""
    if imported := provenance.imported:
        known = f", exactly {imported['official']}" if imported["official"] else ""
        file = pathlib.PurePath(imported["source"]).name
        yield "## Origin"
        yield f"Imported from {imported['format']} files{known} (`{file}`):"
        yield "\n".join(f"- `{x}` sha256 {sha}" for x, sha in imported.get("sha256", {}).items())
    if provenance.starts:
        last = provenance.starts[-1]
        versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        yield "## Training"
        yield f"Step {step:,} of {config.steps:,}. Commands:"
        commands = dict.fromkeys(start["command"] for start in provenance.starts)
        yield "\n".join(["```sh", *commands, "```"])
        yield f"Trained on {last['devices']}; commit {last['commit']}; {versions}."
    if heldout := provenance.heldout:
        yield f"Held-out metrics at step {heldout['step']:,}:"
        rows = [f"| {k} | {v:.4f} |" for k, v in heldout.items() if isinstance(v, float)]
        yield "\n".join(["| | |", "|---|---|", *rows])
    for data in provenance.data:
        if isinstance(config, FinetuneConfig) and "examples" in data:
            counts = ", ".join(f"{n:,} {split}" for split, n in data["examples"].items())
            yield f"Fine-tuned on {config.task.name or config.task.kind}: {counts} examples."
            continue
        train = data["train"]
        yield (
            f"Rows of T={data['tokens']}: {train['documents']:,} documents, {train['sequences']:,} "
            f"sequences, {train['real_tokens']:,} tokens in {train['rows']:,} rows, sentence pairs "
            f"`{data['pairs']}`, from"
        )
        sources = ((pathlib.PurePath(s["spec"]).name, s["documents"]) for s in data["sources"])
        yield "\n".join(f"- `{name}`: {documents:,} documents" for name, documents in sources)
