"""Verbs that import and export checkpoints."""

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
        choices=("pooler", "masked_lm", "next_sentence", "head", "tokens", "added_tokens"),
        help="import even if this part of the source is missing, if there are fewer tokens than "
        "embeddings, or without support for added tokens; may be repeated",
    )
    sub.add_argument(
        "--allow-unexpected",
        action="append",
        default=[],
        metavar="PATTERN",
        help="skip tensors or modules whose names match (* is a wildcard); may be repeated",
    )


def _import(options) -> None:
    from bert_jax import device

    device.start("")

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
    print(f"{options.out}: {source.describe(imported)}")


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
    )
    add_model(sub)
    sub.add_argument("--out", required=True, metavar="DIR", help="new folder for the model")
    sub.add_argument("--add", metavar="FILE", help="a text file with a word or ##piece per line")
    sub.add_argument(
        "sources", nargs="*", metavar="SOURCE", help="text to choose pieces from, as for vocab"
    )
    sub.add_argument(
        "--count", type=int, default=1000, help="pieces to choose from the text (default 1000)"
    )
    sub.add_argument(
        "--min-frequency", type=int, default=2, help="minimum occurrences of a piece (default 2)"
    )


def _extend_vocab(options) -> None:
    if bool(options.add) == bool(options.sources):
        raise UserError("give either --add FILE with words, or text to choose word pieces from")
    if options.count < 1:
        raise UserError(f"--count {options.count}: it must be 1 or more")

    from bert_jax import device

    device.start("")

    from bert_jax.convert import source
    from bert_jax.convert.extend import extend_vocabulary
    from bert_jax.data import new_pieces

    def choose(vocabulary):
        if options.add:
            return new_pieces.of_file(vocabulary, options.add)
        return new_pieces.of_corpus(
            vocabulary, options.sources, options.count, options.min_frequency
        )

    imported = extend_vocabulary(options.init, options.out, choose, options.checkpoint)
    print(f"{options.out}: {source.describe(imported)}")


def add_export(verbs: Verbs) -> None:
    """Add `bert-jax export`."""
    sub = verbs.add(
        "export",
        _export,
        "export a model to Hugging Face transformers",
        "  bert-jax export --workdir runs/mini --out mini-hf\n"
        "  bert-jax export --workdir runs/mini --out mini-fill-mask --heads masked_lm\n"
        "  bert-jax export --workdir runs/mini --out mini-steps --checkpoint all --license mit --language en\n\n"
        "--checkpoint all writes every checkpoint of a run, to a folder step_N each.",
    )
    add_model(sub)
    sub.add_argument("--out", required=True, metavar="FOLDER", help="new folder for the files")
    sub.add_argument(
        "--heads",
        default="all",
        choices=("all", "masked_lm", "none"),
        help="all (default), masked_lm for BertForMaskedLM, or none for BertModel: transformers "
        "warns about weights that the class it loads does not use",
    )
    sub.add_argument("--license", help="license in the model card, such as apache-2.0")
    sub.add_argument(
        "--language",
        action="append",
        default=[],
        metavar="CODE",
        help="language in the model card, such as en; may be repeated",
    )


def _export(options) -> None:
    from bert_jax import device

    device.start("")

    from bert_jax.convert.export import export, export_all

    card = {name: value for name in ("license", "language") if (value := getattr(options, name))}
    if options.checkpoint == "all":
        steps = export_all(options.init, options.out, options.heads, card)
        print(f"{options.out}: {', '.join(f'step_{step}' for step in steps)}")
        return
    settings = export(options.init, options.out, options.checkpoint, options.heads, card=card)
    name = settings["architectures"][0]
    print(
        f'{options.out}: {name}; load it with transformers.{name}.from_pretrained("{options.out}")'
    )
