"""Verbs that import and export checkpoints."""

import pathlib
import tempfile

from bert_jax.cli.common import Verbs, add_case, add_model
from bert_jax.errors import UserError


def add_import(verbs: Verbs) -> None:
    """Add `bert-jax import`."""
    sub = verbs.add(
        "import",
        _import,
        "import a Hugging Face or TensorFlow 1 checkpoint",
        "  bert-jax import bert-base-uncased --out models/base\n"
        "  bert-jax import uncased_L-12_H-768_A-12.zip --out models/google\n"
        "  bert-jax import all-MiniLM-L6-v2/ --out models/minilm",
        platform="",
    )
    sub.add_argument(
        "source",
        metavar="SOURCE",
        help="a Hugging Face folder or model name, or a TensorFlow 1 release by Google as a folder "
        "or zip",
    )
    sub.add_argument("--out", required=True, metavar="DIR", help="new folder for the checkpoint")
    sub.add_argument("--revision", help="branch, tag or commit on the Hugging Face hub")
    sub.add_argument("--vocab", metavar="FILE", help="a vocab.txt to use instead of the source's")
    add_case(sub)
    sub.add_argument(
        "--allow-missing",
        action="append",
        default=[],
        choices="pooler masked_lm next_sentence replaced_token head tokens added_tokens".split(),
        help="import even if this part of the source is missing, if there are fewer tokens than "
        "embeddings, or without support for added tokens; may be repeated",
    )
    sub.repeatable(
        "--allow-unexpected",
        "PATTERN",
        "skip tensors or modules whose names match (* is a wildcard)",
    )


def _import(options) -> None:
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


def add_extend_vocab(verbs: Verbs) -> None:
    """Add `bert-jax extend-vocab`."""
    sub = verbs.add(
        "extend-vocab",
        _extend_vocab,
        "add words or word pieces to the vocabulary of a model",
        "  bert-jax extend-vocab --init bert-base-uncased --add words.txt --out models/mine\n"
        "  bert-jax extend-vocab --init bert-base-uncased --count 1000 --out models/mine my_text/*.txt\n\n"
        "Their embeddings begin as the mean of those of their old pieces. Continue pretraining with\n"
        "`bert-jax prepare --vocab models/mine` and `bert-jax pretrain --init models/mine`.",
        platform="",
    )
    add_model(sub)
    sub.add_argument("--out", required=True, metavar="DIR", help="new folder for the model")
    sub.add_argument("--add", metavar="FILE", help="a text file with a word or ##piece per line")
    sub.add_argument(
        "sources", nargs="*", metavar="SOURCE", help="text to choose pieces from, as for vocab"
    )
    sub.number("--count", 1000, "pieces to choose from the text")
    sub.number("--min-frequency", 2, "minimum occurrences of a piece")


def _extend_vocab(options) -> None:
    if bool(options.add) == bool(options.sources):
        raise UserError("give either --add FILE with words, or text to choose word pieces from")
    if options.count < 1:
        raise UserError(f"--count {options.count}: it must be 1 or more")

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


def add_export(verbs: Verbs) -> None:
    """Add `bert-jax export`."""
    sub = verbs.add(
        "export",
        _export,
        "export a model to Hugging Face transformers",
        "  bert-jax export --workdir runs/mini --out mini-hf\n"
        "  bert-jax export --workdir runs/mini --out mini-fill-mask --heads masked_lm\n"
        "  bert-jax export --workdir runs/mini --out mini-steps --checkpoint all --license mit --language en\n"
        "  bert-jax export --workdir runs/mini --push my-name/mini --private\n\n"
        "--checkpoint all writes every checkpoint of a run, to a folder step_N each. With --push they become\n"
        "branches step_N, and the best one main.",
        platform="",
    )
    add_model(sub)
    sub.add_argument(
        "--out", metavar="DIR", help="new folder for the files (may be left out with --push)"
    )
    sub.add_argument(
        "--push",
        metavar="OWNER/MODEL",
        help="also push the files to this model on the Hugging Face Hub, which is created if necessary; "
        "log in first with `hf auth login`",
    )
    sub.flag("--private", "with --push: the model is private")
    sub.add_argument("--revision", metavar="BRANCH", help="branch for --push (default main)")
    sub.add_argument(
        "--heads",
        default="all",
        choices=("all", "masked_lm", "none"),
        help="all (default), masked_lm for BertForMaskedLM, or none for BertModel: transformers "
        "warns about weights that the class it loads does not use",
    )
    sub.add_argument("--license", help="license in the model card, such as apache-2.0")
    sub.repeatable("--language", "CODE", "language in the model card, such as en")


def _export(options) -> None:
    if not options.out and not options.push:
        raise UserError("give --out DIR, --push OWNER/MODEL, or both")
    for option in ("private", "revision"):
        if getattr(options, option) and not options.push:
            raise UserError(f"--{option} is for --push, which is missing")
    if options.revision and options.checkpoint == "all":
        raise UserError(
            "--revision is for one checkpoint: those of --checkpoint all go to branches step_N"
        )

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
        steps = export_all(options.init, out, options.heads, card, options.push or "")
        folders = {f"step_{step}": pathlib.Path(out, f"step_{step}") for step in steps}
        result = ", ".join(folders)
        if options.push:
            folders["main"] = folders[f"step_{open_model(options.init).step}"]
        return folders, result
    path, branch = options.push or "PATH", options.revision or "main"
    revisions = [options.revision] if options.revision else []
    settings = export(
        options.init, out, options.checkpoint, options.heads, None, card, path, revisions
    )
    name = settings["architectures"][0]
    path = options.push or out
    argument = f', revision="{branch}"' if options.revision else ""
    result = f'{name}; load it with transformers.{name}.from_pretrained("{path}"{argument})'
    return {branch: pathlib.Path(out)}, result
