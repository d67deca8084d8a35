"""Commands that turn text into vocabularies and rows."""

import functools
import inspect

from bert_jax.cli.common import add_case, argument, choice, flag, number, option, verb
from bert_jax.errors import UserError

_SOURCES = option(
    "sources",
    "SOURCE",
    "text: a file, folder or glob, optionally as KIND:… (google, paragraphs, books, wikitext, "
    "wikiextractor, wikiextractor-json, mediawiki, jsonl, parquet, tfds:NAME/CONFIG, "
    "hf:NAME,CONFIG:SPLIT) and with "
    "…@WEIGHT; plain, .gz, .bz2, .xz or .zst",
    nargs="+",
)


@verb(
    _SOURCES,
    option("--out", "DIR", "output folder for the vocabulary", required=True),
    choice(
        "--kind",
        "wordpiece bpe unigram",
        "WordPiece as in BERT, byte-level BPE as in RoBERTa and ModernBERT, or unigram as in ALBERT",
    ),
    number("--size", 30522, "number of tokens"),
    flag("--cased", "keep case and accents"),
    number("--min-frequency", 2, "minimum occurrences of a piece"),
    flag("--force", "replace a vocabulary, or write to a folder that contains other files"),
)
def _vocab(options) -> None:
    """Train a vocabulary on text.

    bert-jax vocab --out vocab --size 16384 books:novels/ 'wiki/*.gz'
    bert-jax vocab --out vocab --size 50000 --kind bpe --cased 'wiki/*.gz'
    """
    from bert_jax.data import subwords, wordpiece

    is_wordpiece = options.kind == "wordpiece"
    train = wordpiece.train if is_wordpiece else functools.partial(subwords.train, options.kind)
    vocabulary = train(
        options.sources,
        options.out,
        size=options.size,
        lowercase=not options.cased,
        min_frequency=options.min_frequency,
        force=options.force,
    )
    print(f"{options.out}: a vocabulary of {len(vocabulary):,} word pieces")


@verb(
    _SOURCES,
    option(
        "--vocab",
        "DIR",
        "a vocab.txt or its folder, or any model whose vocabulary to use",
        required=True,
    ),
    option("--out", "DIR", "output folder for the rows", required=True),
    number("--tokens", 128, "T, tokens per row"),
    number("--sequences", 1, "maximum sequences packed into a row"),
    choice(
        "--pairs",
        "nsp none full-sentences doc-sentences",
        "sentence pairs (nsp), single segments (none), or whole sentences as in RoBERTa, across documents "
        "(full-sentences) or not (doc-sentences)",
    ),
    number("--passes", 1, "passes over the text; sentence pairs are resampled in each"),
    number("--seed", 0, "random seed"),
    number("--heldout-fraction", 0.01, "fraction of tokens to hold out, in whole documents"),
    argument(
        "--short-fraction",
        type=float,
        help="documents with shorter sequences (default 0.1; with whole sentences 0)",
    ),
    add_case,
    argument("--language", default="en", help="language of the sentence splitter (default en)"),
    argument("--workers", type=int, default=None, help="processes (default: all cores)"),
    flag("--force", "replace rows made with other settings"),
)
def _prepare(options) -> None:
    """Turn text into shards of rows.

    bert-jax prepare --vocab vocab --out rows128 --tokens 128 --sequences 4 'wiki/*.gz'
    """
    from bert_jax.convert import source
    from bert_jax.data import prepare

    names = inspect.signature(prepare.prepare).parameters
    settings = {name: getattr(options, name) for name in names}
    settings["vocab"] = source.open_vocabulary(options.vocab, options.lowercase)
    prepare.prepare(**settings)


@verb(
    option("folder", "DIR", "folder of rows"),
    choice("--split", "train heldout", "rows to show"),
    option("--show", "N", "number of rows to show (default: at most 2)", type=int),
    number("--index", 0, "first row"),
    number("--seed", 0, "seed of the masks"),
    platform="cpu",
)
def _rows(options) -> None:
    """Describe a folder of rows, and show some of them as text.

    bert-jax rows rows128
    bert-jax rows rows128 --split heldout --show 3 --index 100
    """
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
