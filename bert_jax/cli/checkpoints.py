"""Somebody else's checkpoints to ours, and ours to somebody else's."""

from bert_jax.cli.common import Verbs, add_case, add_model


def add_import(verbs: Verbs) -> None:
    """`bert-jax import`."""
    sub = verbs.add(
        "import",
        _import,
        "make somebody else's checkpoint one of ours",
        "  bert-jax import bert-base-uncased --out models/base\n"
        "  bert-jax import uncased_L-12_H-768_A-12.zip --out models/google\n"
        "  bert-jax import all-MiniLM-L6-v2/ --out models/minilm",
    )
    sub.add_argument(
        "source",
        metavar="SOURCE",
        help="a Hugging Face folder or name on its hub; a TensorFlow 1 release of Google's, as a "
        "folder or zip",
    )
    sub.add_argument("--out", required=True, metavar="DIR", help="new folder for the checkpoint")
    sub.add_argument("--revision", help="branch, tag or commit on the hub")
    sub.add_argument("--vocab", metavar="FILE", help="a vocab.txt instead of the source's own")
    add_case(sub)
    sub.add_argument(
        "--allow-missing",
        action="append",
        default=[],
        choices=("pooler", "masked_lm", "next_sentence", "head", "tokens", "added_tokens"),
        help="go on without a part that the source says it has, with fewer tokens than embeddings, "
        "or without finding added tokens in texts; may be repeated",
    )
    sub.add_argument(
        "--allow-unexpected",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out tensors or modules of such names (* stands for anything); may be repeated",
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


def add_export(verbs: Verbs) -> None:
    """`bert-jax export`."""
    sub = verbs.add(
        "export",
        _export,
        "write a model for Hugging Face's transformers",
        "  bert-jax export --workdir runs/mini --out mini-hf\n"
        "  bert-jax export --workdir runs/mini --out mini-fill-mask --heads masked_lm",
    )
    add_model(sub)
    sub.add_argument("--out", required=True, metavar="FOLDER", help="new folder for the files")
    sub.add_argument(
        "--heads",
        default="all",
        choices=("all", "masked_lm", "none"),
        help="all (default), or those of a BertForMaskedLM or of a BertModel alone: transformers "
        "lists weights that the class it loads has no place for",
    )


def _export(options) -> None:
    from bert_jax import device

    device.start("")

    from bert_jax.convert.export import export

    settings = export(options.init, options.out, options.checkpoint, options.heads)
    name = settings["architectures"][0]
    print(f'{options.out}: {name}; transformers.{name}.from_pretrained("{options.out}") loads it')
