"""Kinds of text files and their detection."""

import codecs
import itertools
import pathlib
import re

from bert_jax.data.compressed import decompressed
from bert_jax.errors import UserError

KINDS = {
    "google": "a sentence per line, blank lines between documents",
    "paragraphs": "a paragraph per line, blank lines between documents",
    "books": "a document per file, in paragraphs or hard-wrapped lines",
    "wikitext": "WikiText: a paragraph per line, documents begin with = Title =",
    "wikiextractor": "WikiExtractor's <doc id= url= title=> ... </doc>",
    "wikiextractor-json": "output of WikiExtractor --json, an article per line",
    "mediawiki": "a MediaWiki XML dump",
    "jsonl": 'a JSON object per line, with a field "text"',
    "parquet": 'Parquet with a column "text"',
    "tfds": "a prepared TensorFlow Datasets corpus, NAME/CONFIG",
    "hf": "a dataset of the Hugging Face Hub or of a folder, NAME[,CONFIG][:SPLIT]",
}

# Longer lines are whole paragraphs; paragraphs of shorter lines end at a blank line.
WRAPPED_CHARACTERS = 120
# A heading of WikiText; the title of a document has one sign.
WIKITEXT_HEADING = re.compile(r"\s*(=(?: =)*) [^=]+ \1\s*")
# The ellipsis and the characters of the Basic Multilingual Plane with the property Sentence_Terminal.
_ENDS = (
    ".!?\u2026"
    "\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965"
    "\u104a\u104b\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5\u1803\u1809\u1944\u1945"
    "\u1aa8-\u1aab\u1b4e\u1b4f\u1b5a\u1b5b\u1b5e\u1b5f\u1b7d-\u1b7f\u1c3b\u1c3c"
    "\u1c7e\u1c7f\u2024\u203c\u203d\u2047-\u2049\u2cf9-\u2cfb\u2e2e\u2e3c\u2e53\u2e54"
    "\u2e60\u2e61\u3002\ua4ff\ua60e\ua60f\ua6f3\ua6f7\ua876\ua877\ua8ce\ua8cf\ua92f"
    "\ua9c8\ua9c9\uaa5d-\uaa5f\uaaf0\uaaf1\uabeb\ufe12\ufe15\ufe16\ufe52\ufe56\ufe57"
    "\uff01\uff0e\uff1f\uff61"
)
_ENDED = re.compile(f"[{_ENDS}]\\W*$")
_TAGGED = re.compile(r"\S+(?:[ \t]+\S+)*[ \t]+(?:O|[BIES]-\S+)\s*|-DOCSTART-.*")
# Size of the beginning of a file that is inspected to detect its kind.
_HEAD_BYTES = 1 << 16


def incomplete_end(data: bytes) -> int:
    """Return the start of an incomplete last UTF-8 character, or the length if it is complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-4:])
    incomplete, _ = decoder.getstate()
    return len(data) - len(incomplete)


def check_is_text(path: pathlib.Path, head: bytes) -> None:
    """Check that a file is UTF-8 text by its beginning, tolerating a few invalid bytes."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(
            f"{path}: UTF-16, not UTF-8 text; convert it, e.g. {_iconv(path, 'UTF-16')}"
        )
    if b"\0" in head:
        at = head.index(b"\0")
        raise UserError(
            f"{path}:{head.count(10, 0, at) + 1}: not a text file (a NUL at byte {at:,}); "
            "exclude it from the source, or unpack it if it is an archive"
        )
    head = head[: incomplete_end(head)]
    invalid = head.decode(errors="replace").count("\ufffd") - head.count("\ufffd".encode())
    if invalid > max(1, len(head) // 100):
        try:
            head.decode()
        except UnicodeDecodeError as error:
            at = error.start
        raise UserError(
            f"{path}:{head.count(10, 0, at) + 1}: not UTF-8 text (from byte {at:,} on, {invalid:,} "
            f"invalid bytes in the first {len(head):,}); convert it, e.g. {_iconv(path, 'LATIN1')}"
        )
    lines = [line for line in head.decode(errors="replace").splitlines()[:500] if line.strip()]
    if len(lines) > 20 and sum(map(bool, map(_TAGGED.fullmatch, lines))) > 0.9 * len(lines):
        raise UserError(
            f"{path}: a word per line with its label (CoNLL columns), not prose; fine-tune on it with "
            "configs/tagging.py, or exclude it from the source"
        )


def _iconv(path: pathlib.Path, encoding: str) -> str:
    """Return a command that converts a file, compressed or not, to UTF-8."""
    cat = {".gz": "zcat", ".bz2": "bzcat", ".xz": "xzcat", ".zst": "zstdcat"}.get(path.suffix)
    if cat is None:
        return f"iconv -f {encoding} -t UTF-8 {path}"
    return f"{cat} {path} | iconv -f {encoding} -t UTF-8 > {path.with_suffix('')}"


def head_of(path: pathlib.Path) -> bytes:
    """Return the beginning of a file, decompressed."""
    with decompressed(path) as stream:
        return stream.read(_HEAD_BYTES)


def marked_kind(path: pathlib.Path, head: bytes) -> str | None:
    """Detect the kind of a file by markers in its first bytes; None for plain text."""
    if head.startswith(b"PAR1"):
        return "parquet"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if b"<mediawiki" in start[:1000]:
        return "mediawiki"
    if start.startswith(b"<doc "):
        return "wikiextractor"
    if start.startswith(b"<?xml"):
        raise UserError(
            f"{path}: XML but not a MediaWiki dump (no <mediawiki> element at its start); "
            "convert it to text first"
        )
    if re.match(rb'\[\s*[{"]', start):
        return "jsonl"  # to be refused with its reason
    if start.startswith(b"{"):
        fields = re.findall(rb'"(\w+)"\s*:', start.split(b"\n")[0])
        return "wikiextractor-json" if {b"url", b"title"} <= set(fields) else "jsonl"
    return None


def kind_of_text(head: str) -> str:
    """Distinguish plain text: "google", "paragraphs", "wikitext" or "books".

    Lines of "google" are sentences, those of "paragraphs" and "wikitext" have several. If lines break
    within sentences, or most stand alone between blank lines, these are no ends of documents, and
    the text is "books".
    """
    import sentencex

    blocks = [block.split("\n") for block in re.split(r"\n\s*\n", head.replace("\r", ""))]
    lines = [line.strip() for block in blocks for line in block if line.strip()][:500]
    if not lines:
        return "google"
    # Wrapped lines end anywhere, and the first word of the next line would not have fit.
    width = max(map(len, lines))
    inner = [pair for block in blocks for pair in itertools.pairwise(block)]
    wrapped = sum(
        len(line) + len(after.split(" ")[0]) >= width - 8 and not _ENDED.search(line)
        for line, after in inner
    )
    if 40 <= width <= WRAPPED_CHARACTERS and wrapped > 0.3 * len(inner):
        return "books"
    # Otherwise lines are sentences or paragraphs. Sentence splitters disagree in a few percent.
    multiple = sum(len(sentencex.segment("en", line)) > 1 for line in lines)
    if multiple <= 0.15 * len(lines):
        return "google"
    if any(map(WIKITEXT_HEADING.fullmatch, lines)):
        return "wikitext"
    sizes = [count for block in blocks if (count := sum(bool(line.strip()) for line in block))]
    ended = sum(bool(_ENDED.search(line)) for line in lines)
    in_documents = len(sizes) > 2 and sum(sizes) >= 2 * len(sizes) and ended > 0.85 * len(lines)
    return "paragraphs" if in_documents else "books"
