"""Commands that turn text into vocabularies and rows."""

import inspect

from bert_jax.cli.common import Verbs, add_case
from bert_jax.errors import UserError

_SOURCES = (
    "text: a file, folder or glob, optionally as KIND:… (google, paragraphs, books, wikitext, "
    "wikiextractor, wikiextractor-json, mediawiki, jsonl, parquet, tfds:NAME/CONFIG) and with "
    "…@WEIGHT; plain, .gz, .bz2, .xz or .zst"
)


def add_vocab(verbs: Verbs) -> None:
    """Add `bert-jax vocab`."""
    sub = verbs.add(
        "vocab",
        _vocab,
        "train a WordPiece vocabulary on text",
        "  bert-jax vocab --out vocab --size 16384 books:novels/ 'wiki/*.gz'",
    )
    sub.add_argument("sources", nargs="+", metavar="SOURCE", help=_SOURCES)
    sub.add_argument("--out", required=True, metavar="DIR", help="output folder for vocab.txt")
    sub.number("--size", 30522, "number of tokens")
    sub.flag("--cased", "keep case and accents")
    sub.number("--min-frequency", 2, "minimum occurrences of a piece")
    sub.flag("--force", "write to a folder that contains other files")


def _vocab(options) -> None:
    from bert_jax.data import wordpiece

    vocabulary = wordpiece.train(
        options.sources,
        options.out,
        size=options.size,
        lowercase=not options.cased,
        min_frequency=options.min_frequency,
        force=options.force,
    )
    print(f"{options.out}: a vocabulary of {len(vocabulary):,} word pieces")


def add_prepare(verbs: Verbs) -> None:
    """Add `bert-jax prepare`."""
    sub = verbs.add(
        "prepare",
        _prepare,
        "turn text into shards of rows",
        "  bert-jax prepare --vocab vocab --out rows128 --tokens 128 --sequences 4 'wiki/*.gz'\n"
        "  bert-jax prepare --vocab vocab --out /nfs/rows128 --runner beam --beam runner=FlinkRunner \\\n"
        "    --beam flink_master=flink:8081 '/nfs/wiki/*.gz'",
    )
    sub.add_argument("sources", nargs="+", metavar="SOURCE", help=_SOURCES)
    sub.add_argument(
        "--vocab",
        required=True,
        metavar="DIR",
        help="a vocab.txt or its folder, or a model: a run, an imported checkpoint, "
        "or a Hugging Face folder or name",
    )
    sub.add_argument("--out", required=True, metavar="DIR", help="output folder for the rows")
    sub.number("--tokens", 128, "T, tokens per row")
    sub.number("--sequences", 1, "maximum sequences packed into a row")
    sub.add_argument(
        "--pairs",
        choices=("nsp", "none", "full-sentences", "doc-sentences"),
        default="nsp",
        help="sentence pairs (default), single segments (none), or whole sentences as in RoBERTa, "
        "across documents (full-sentences) or not (doc-sentences)",
    )
    sub.number("--passes", 1, "passes over the text; sentence pairs are resampled in each")
    sub.number("--seed", 0, "random seed")
    sub.number(
        "--heldout-fraction",
        0.01,
        "fraction of tokens to hold out, in whole documents if there are many",
    )
    sub.add_argument(
        "--short-fraction",
        type=float,
        help="fraction of documents with shorter sequences (default 0.1; with whole sentences 0)",
    )
    add_case(sub)
    sub.add_argument(
        "--language", default="en", help="language code for the sentence splitter (default en)"
    )
    sub.add_argument("--workers", type=int, default=None, help="processes (default: all cores)")
    sub.flag("--force", "replace rows made with other settings")
    sub.add_argument(
        "--runner",
        choices=("local", "beam"),
        default="local",
        help="local processes (default) or an Apache Beam pipeline, which writes the same bytes; "
        "its workers must reach the sources and --out by the same paths",
    )
    sub.repeatable("--beam", "NAME=VALUE", "a Beam pipeline option, such as runner=FlinkRunner")


def _prepare(options) -> None:
    from bert_jax.convert import source
    from bert_jax.data import prepare

    paths = (*options.sources, options.vocab, options.out)
    if options.runner == "beam" and (urls := [path for path in paths if "://" in path]):
        raise UserError(f"{urls[0]}: --runner beam takes folders that all of its workers see")
    names = inspect.signature(prepare.prepare).parameters
    settings = {name: getattr(options, name) for name in names}
    settings["vocab"] = source.open_vocabulary(options.vocab, options.lowercase)
    prepare.prepare(**settings)


def add_rows(verbs: Verbs) -> None:
    """Add `bert-jax rows`."""
    sub = verbs.add(
        "rows",
        _rows,
        "describe a folder of rows, and show some of them as text",
        "  bert-jax rows rows128\n  bert-jax rows rows128 --split heldout --show 3 --index 100",
        platform="cpu",
    )
    sub.add_argument("folder", metavar="DIR", help="folder of rows")
    sub.add_argument("--split", choices=("train", "heldout"), default="train", help="default train")
    sub.add_argument("--show", type=int, metavar="N", help="rows to show (default: at most 2)")
    sub.number("--index", 0, "first row")
    sub.number("--seed", 0, "seed of the masks")


def _rows(options) -> None:
    if options.show is not None and options.show < 0:
        raise UserError(f"--show {options.show}: must be at least 0")

    from bert_jax.data.rows import read_manifest
    from bert_jax.tools import show_rows

    for line in show_rows.summary_lines(options.folder):
        print(line)
    count = options.show
    if count is None:  # those that exist, but at least one for --index
        rows = getattr(read_manifest(options.folder), options.split).rows
        count = min(2, max(rows - options.index, int(options.index > 0)))
    indices = range(options.index, options.index + count)
    for line in show_rows.show(options.folder, options.split, indices, options.seed):
        print(line)
