"""Verbs that import and export checkpoints."""

import pathlib
import tempfile

from bert_jax.cli.common import (
    MODEL,
    add_case,
    argument,
    choice,
    flag,
    number,
    option,
    repeatable,
    verb,
)
from bert_jax.errors import UserError


@verb(
    option(
        "source",
        "SOURCE",
        "a Hugging Face folder or name, or a TensorFlow 1 release (folder or zip)",
    ),
    option("--out", "DIR", "new folder for the checkpoint", required=True),
    argument("--revision", help="branch, tag or commit on the Hugging Face hub"),
    option("--vocab", "FILE", "a vocab.txt to use instead of the source's"),
    add_case,
    argument(
        "--allow-missing",
        action="append",
        default=[],
        choices="pooler masked_lm next_sentence replaced_token head tokens added_tokens".split(),
        help="import without this part of the source, with fewer tokens than embeddings, or without added "
        "tokens that are not supported; may be repeated",
    ),
    repeatable(
        "--allow-unexpected",
        "PATTERN",
        "skip tensors or modules whose names match (* is a wildcard)",
    ),
    platform="",
)
def _import(options) -> None:
    """Import a Hugging Face or TensorFlow 1 checkpoint.

    bert-jax import bert-base-uncased --out models/base
    bert-jax import uncased_L-12_H-768_A-12.zip --out models/google
    bert-jax import all-MiniLM-L6-v2/ --out models/minilm
    """
    from bert_jax.convert import source

    imported = source.import_checkpoint(
        options.source,
        options.out,
        revision=options.revision,
        vocab=options.vocab,
        lowercase=options.lowercase,
        allow_missing=options.allow_missing,
        allow_unexpected=options.allow_unexpected,
    )
    print(f"{options.out}: {source.import_summary(imported)}")


@verb(
    *MODEL,
    option("--out", "DIR", "new folder for the model", required=True),
    option("--add", "FILE", "a text file with a word or ##piece per line"),
    option("sources", "SOURCE", "text to choose pieces from", nargs="*"),
    number("--count", 1000, "pieces to choose from the text", least=1),
    number("--min-frequency", 2, "minimum occurrences of a piece"),
    platform="",
)
def _extend_vocab(options) -> None:
    """Add words or word pieces to the vocabulary of a model.

    bert-jax extend-vocab --init bert-base-uncased --add words.txt --out models/mine
    bert-jax extend-vocab --init bert-base-uncased --count 1000 --out models/mine my_text/*.txt

    Their embeddings begin as the mean of those of their old pieces. Continue pretraining with
    `bert-jax prepare --vocab models/mine` and `bert-jax pretrain --init models/mine`.
    """
    if bool(options.add) == bool(options.sources):
        raise UserError("give either --add FILE with words, or text to choose word pieces from")

    from bert_jax.convert import source
    from bert_jax.convert.extend import extend_vocabulary
    from bert_jax.data import wordpiece

    def choose(vocabulary):
        if options.add:
            return wordpiece.new_words(vocabulary, options.add)
        return wordpiece.new_pieces(
            vocabulary, options.sources, options.count, options.min_frequency
        )

    imported = extend_vocabulary(options.init, options.out, choose, options.checkpoint)
    print(f"{options.out}: {source.import_summary(imported)}")


@verb(
    *MODEL,
    option("--out", "DIR", "new folder for the files (may be left out with --push)"),
    option(
        "--push",
        "OWNER/MODEL",
        "push to this model on the Hugging Face Hub, created if necessary, after `hf auth login`",
    ),
    flag("--private", "with --push: the model is private"),
    option("--revision", "BRANCH", "branch for --push (default main)"),
    choice(
        "--heads",
        "all masked_lm none",
        "all, or only those of BertForMaskedLM, or none as in BertModel",
    ),
    choice(
        "--format",
        "safetensors onnx onnx-int8",
        "weights for transformers, a graph for ONNX Runtime, or also one with int8 weights",
    ),
    argument("--license", help="license in the model card, such as apache-2.0"),
    repeatable("--language", "CODE", "language in the model card, such as en"),
    platform="",
)
def _export(options) -> None:
    """Export a model to Hugging Face transformers.

    bert-jax export --workdir runs/mini --out mini-hf
    bert-jax export --workdir runs/mini --out mini-fill-mask --heads masked_lm
    bert-jax export --workdir runs/mini --out mini-steps --checkpoint all --license mit --language en
    bert-jax export --workdir runs/mini --push my-name/mini --private
    bert-jax export --workdir runs/rte --out rte-onnx --format onnx-int8

    --checkpoint all writes every checkpoint of a run, to a folder step_N each. With --push they become
    branches step_N, and the best one main.
    """
    if not options.out and not options.push:
        raise UserError("give --out DIR, --push OWNER/MODEL, or both")
    for name in ("private", "revision"):
        if getattr(options, name) and not options.push:
            raise UserError(f"--{name} is for --push, which is missing")
    if options.revision and options.checkpoint == "all":
        raise UserError("--revision is for one checkpoint: --checkpoint all makes branches step_N")

    from bert_jax import storage
    from bert_jax.convert import hub

    if options.push:
        hub.check(options.push)
        if storage.is_remote(options.out):
            raise UserError(f"--out {options.out}: with --push it must be a local folder")
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or f"{temporary}/model"
        folders, result = _write_export(options, out)
        if options.out:
            print(f"{out}: {result}")
        if options.push:
            try:
                url = hub.push(options.push, folders, options.private)
            except UserError as error:
                kept = f"; the files are in {out}" if options.out else ""
                raise UserError(f"{error}{kept}") from None
            print(f"{url}: {', '.join(folders) if len(folders) > 1 else result}")


def _write_export(options, out: str) -> tuple[dict[str, pathlib.Path], str]:
    """Write the folders, and return them by branch, and a line about them."""
    from bert_jax.convert.export import export, export_all
    from bert_jax.convert.source import open_model

    card = {name: value for name in ("license", "language") if (value := getattr(options, name))}
    if options.checkpoint == "all":
        steps = export_all(
            options.init, out, options.heads, card, options.push or "", options.format
        )
        folders = {f"step_{step}": pathlib.Path(out, f"step_{step}") for step in steps}
        result = ", ".join(folders)
        if options.push:
            folders["main"] = folders[f"step_{open_model(options.init).step}"]
        return folders, result
    path, branch = options.push or "PATH", options.revision or "main"
    revisions = [options.revision] if options.revision else []
    settings = export(
        *(options.init, out, options.checkpoint, options.heads),
        *(None, card, path, revisions, options.format),
    )
    name = settings["architectures"][0]
    if options.format != "safetensors":
        return {branch: pathlib.Path(out)}, f"{name} as a graph for ONNX Runtime"
    path = options.push or out
    argument = f', revision="{branch}"' if options.revision else ""
    result = f'{name}; load it with transformers.{name}.from_pretrained("{path}"{argument})'
    return {branch: pathlib.Path(out)}, result
