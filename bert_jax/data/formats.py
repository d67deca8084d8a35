"""The kinds of text files, and how they are told apart."""

import itertools
import pathlib
import re

from bert_jax.data.compressed import decompressed
from bert_jax.errors import UserError

KINDS = {
    "google": "a sentence a line, a blank line between documents",
    "books": "a document a file, in paragraphs or hard-wrapped lines",
    "wikiextractor": "WikiExtractor's <doc id= url= title=> ... </doc>",
    "wikiextractor-json": "WikiExtractor's --json, an article a line",
    "mediawiki": "a MediaWiki XML dump",
    "jsonl": 'a JSON object a line, with a field "text"',
    "parquet": 'Parquet with a column "text"',
    "tfds": "a prepared TensorFlow Datasets corpus, NAME/CONFIG",
}

# A line longer than any page is wide is a whole paragraph; shorter ones run on until a blank line.
WRAPPED_CHARACTERS = 120
# What is looked at to tell a file's kind, and whether it is text at all.
_HEAD_BYTES = 1 << 16


def incomplete_end(data: bytes) -> int:
    """Where the last character begins if its bytes are not all there, else the length."""
    for back in range(1, min(4, len(data)) + 1):
        lead = data[-back]
        if lead & 0xC0 != 0x80:  # not a continuation byte
            width = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return len(data) - back if width > back else len(data)
    return len(data)


def check_is_text(path: pathlib.Path, head: bytes) -> None:
    """Refuses what is not UTF-8 text, judging by its beginning; a stray byte is forgiven."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(
            f"{path}: is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 {path}"
        )
    if b"\0" in head:
        at = head.index(b"\0")
        raise UserError(
            f"{path}:{head.count(10, 0, at) + 1}: not a text file (a NUL at byte {at:,}); "
            "leave it out of the source, or unpack it if it is an archive"
        )
    head = head[: incomplete_end(head)]
    bad = head.decode(errors="replace").count("\ufffd") - head.count("\ufffd".encode())
    if bad > max(1, len(head) // 100):
        try:
            head.decode()
        except UnicodeDecodeError as error:
            at = error.start
        raise UserError(
            f"{path}:{head.count(10, 0, at) + 1}: not UTF-8 text (from byte {at:,} on, {bad:,} bad "
            f"bytes in the first {len(head):,}); convert it, e.g. iconv -f LATIN1 -t UTF-8 {path}"
        )


def head_of(path: pathlib.Path) -> bytes:
    """The beginning of a file, decompressed."""
    with decompressed(path) as stream:
        return stream.read(_HEAD_BYTES)


def marked_kind(path: pathlib.Path, head: bytes) -> str | None:
    """The kind of a file whose first bytes tell; None for plain text."""
    if head.startswith(b"PAR1"):
        return "parquet"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if b"<mediawiki" in start[:1000]:
        return "mediawiki"
    if start.startswith(b"<doc "):
        return "wikiextractor"
    if start.startswith(b"<?xml"):
        raise UserError(
            f"{path} is XML but no MediaWiki dump (no <mediawiki> element at its start); "
            "convert it to text first"
        )
    if start.startswith(b"{"):
        fields = re.findall(rb'"(\w+)"\s*:', start.split(b"\n")[0])
        return "wikiextractor-json" if {b"url", b"title"} <= set(fields) else "jsonl"
    return None


def kind_of_text(head: str) -> str:
    """Tells a sentence a line ("google") from hard-wrapped lines or paragraphs ("books")."""
    import sentencex

    blocks = [block.split("\n") for block in re.split(r"\n\s*\n", head.replace("\r", ""))]
    lines = [line.strip() for block in blocks for line in block if line.strip()][:500]
    if not lines:
        return "google"
    # In wrapped text lines end anywhere, and the next line's first word would not have fitted.
    width = max(map(len, lines))
    inner = [pair for block in blocks for pair in itertools.pairwise(block)]
    wrapped = sum(
        len(line) + len(after.split(" ")[0]) >= width - 8 and not re.search(r"[.!?]\W*$", line)
        for line, after in inner
    )
    if 40 <= width <= WRAPPED_CHARACTERS and wrapped > 0.3 * len(inner):
        return "books"
    # Otherwise lines are sentences or paragraphs. Splitters disagree on a few sentences in a hundred.
    several = sum(len(sentencex.segment("en", line)) > 1 for line in lines)
    return "books" if several > 0.15 * len(lines) else "google"
