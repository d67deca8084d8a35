"""Read the pages of MediaWiki dumps, and extract plain text from their markup."""

import html
import io
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator
from xml.parsers import expat

from bert_jax.errors import UserError, missing

_BLOCK_BYTES = 1 << 20
# Expat parses a tag again from its start for every block that it spans.
_XML_TAG_BYTES = 4 << 20

# Elements without prose. Regular expressions remove them before parsing, as their content often is
# not wiki markup.
_NON_PROSE = (
    r"ref|math|chem|gallery|timeline|syntaxhighlight|source|score|imagemap|code|pre|graph|"
    r"hiero|mapframe|maplink|templatestyles|section|references"
)
_MARKUP = [
    (re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL), ""),
    (re.compile(rf"<({_NON_PROSE})\b[^<>]*/>", re.IGNORECASE), ""),
    (re.compile(rf"<({_NON_PROSE})\b[^<>]*>.*?</\1\s*>", re.IGNORECASE | re.DOTALL), ""),
    (re.compile(r"__[A-Z]+__"), ""),
]
_LEFTOVERS = [
    (re.compile(r"''+"), ""),
    (re.compile(r"[\u00a0\u2009\u202f\u200b]"), " "),
    (re.compile(r"\(\s*[,;:\s\u2013-]*\s*\)|\[\s*\]"), ""),  # left by templates in brackets
    (re.compile(r"([(\[])[\s,;]+"), r"\1"),
    (re.compile(r"[\s,;]+([)\]])"), r"\1"),
    (re.compile(r"[ \t]+([,.;:!?])(?=\s|$)", re.MULTILINE), r"\1"),
    (re.compile(r",(\s*[,.])+"), ","),
    (re.compile(r"[ \t]+"), " "),
]
# Bounded repetitions: without bounds, the time is quadratic in the length of a line.
_NON_PROSE_LINE = re.compile(
    r"^[|!]|\[\[|\]\]|\{\{|\}\}|\{\||\|\}|</?\w{1,50}\b[^>]{0,999}>|thumb\||\b\w{1,50}=\S{1,999}\|"
)
# Links that are not shown where they stand: files, categories, articles in other languages.
_HIDDEN_LINK = re.compile(r"[^\W\d][^\s:]*:\S")
# Links to sister projects, which are part of the sentence.
_SISTER_LINK = re.compile(
    r"(wikt|wiktionary|w|wikipedia|s|wikisource|q|wikiquote|b|wikibooks|n|wikinews|v|wikiversity|"
    r"voy|wikivoyage|c|commons|d|wikidata|m|meta|species|wikispecies|mw):",
    re.IGNORECASE,
)
# Longer words are [UNK], whatever their rest is (`max_input_chars_per_word` of WordPiece is 100).
_LONG_WORD = re.compile(r"(\w{200})\w+")


def pages(
    path: pathlib.Path,
    stream: io.BufferedIOBase,
    max_characters: int,
    warn: Callable[[int], None],
) -> Iterator[tuple[int, str]]:
    """Yield (line number, markup) of the articles of an XML dump.

    A page longer than `max_characters` is split, and `warn` called with its line.
    """
    # Use Expat rather than a tree builder to hold one page at a time and know line numbers.
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    finished: list[tuple[int, str]] = []
    fields: dict[str, list[str]] = {}
    open_elements: list[str] = []
    start = size = 0

    def begin(name, attributes):
        nonlocal start, size
        name = name.rpartition(" ")[2]
        open_elements.append(name)
        if name == "page":
            start = parser.CurrentLineNumber
            fields.clear()
        if name == "text":
            size = 0
        fields[name] = []  # a later revision replaces an earlier one

    def characters(text):
        nonlocal size
        name = open_elements[-1] if open_elements else ""
        if name == "text":
            size += len(text)
        if name in ("ns", "text"):
            fields[name].append(text)
        if size > max_characters:
            warn(start)
            finish_page()
            fields["text"], size = [], 0

    def finish_page():
        article = "".join(fields.get("ns", "0")).strip() in ("", "0")
        text = "".join(fields.get("text", ""))
        if article and "redirect" not in fields and text.strip():
            finished.append((start, text))

    def end(name):
        open_elements.pop()
        if name.rpartition(" ")[2] == "page":
            finish_page()

    def refuse(*_):
        raise UserError(
            f"{path}:{parser.CurrentLineNumber}: a document type declaration, which "
            "MediaWiki dumps do not have and which could expand without bound; remove it"
        )

    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = characters, refuse
    try:
        read = 0
        while block := stream.read(_BLOCK_BYTES):
            parser.Parse(block)
            read += len(block)
            if read - parser.CurrentByteIndex > _XML_TAG_BYTES:
                raise UserError(
                    f"{path}:{parser.CurrentLineNumber}: a tag longer than {_XML_TAG_BYTES:,} "
                    "bytes, which MediaWiki dumps do not have; remove it"
                )
            yield from finished
            finished.clear()
        parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise UserError(
            f"{path}:{error.lineno}: not well-formed XML "
            f"({expat.errors.messages[error.code]}); the file may be truncated; copy or "
            "download it again"
        ) from None


def plain_text(markup: str) -> str:
    """Return the prose of a wiki page, one paragraph per line.

    Lists, tables and headings are removed, as in the paper (section 3.1: "we extract only the
    text passages and ignore lists, tables, and headers").
    """
    try:
        import mwparserfromhell
    except ImportError:
        raise missing("MediaWiki dumps need mwparserfromhell", "wiki") from None

    markup = _LONG_WORD.sub(r"\1", markup)
    for pattern, replacement in _MARKUP:
        markup = pattern.sub(replacement, markup)
    text = html.unescape(_render(mwparserfromhell.parse(markup)))
    for pattern, replacement in _LEFTOVERS:
        text = pattern.sub(replacement, text)
    lines = [line.strip() for line in text.split("\n")]
    kept = [line if not _NON_PROSE_LINE.search(line) else "" for line in lines]
    # A blank line ends a paragraph; a single line break does not.
    groups = itertools.groupby(kept, key=bool)
    text = "\n".join(" ".join(group) for has_text, group in groups if has_text)
    return text.encode(errors="replace").decode()  # entities may stand for lone surrogates


def _render(code) -> str:
    from mwparserfromhell import nodes

    parts: list[str] = []
    in_list = False
    for node in code.nodes:
        if isinstance(node, nodes.Text):
            text = str(node)
            if in_list:  # a list item ends with its line
                _, newline, text = text.partition("\n")
                in_list = not newline
                text = newline + text
        elif isinstance(node, nodes.Tag) and node.wiki_markup in ("*", "#", ";", ":"):
            in_list, text = True, ""
        elif in_list:
            text = ""
        else:
            text = _render_node(node, nodes)
        parts.append(text)
    return "".join(parts)


def _render_node(node, nodes) -> str:
    if isinstance(node, nodes.Wikilink):
        title = str(node.title).strip()
        # A leading colon marks an ordinary link.
        if _HIDDEN_LINK.match(title) and not _SISTER_LINK.match(title):
            return ""
        return _render(node.text) if node.text is not None else title.lstrip(":")
    if isinstance(node, nodes.ExternalLink):
        return _render(node.title) if node.title is not None else ""
    if isinstance(node, nodes.HTMLEntity):
        return node.normalize()
    if isinstance(node, nodes.Tag):
        name = str(node.tag).strip().lower()
        if name == "br":
            return " "
        if name in ("b", "i", "em", "strong", "small", "big", "sub", "sup", "span", "u", "abbr",
                    "nowiki", "blockquote", "p", "div", "q", "cite", "poem", "center"):  # fmt: skip
            return _render(node.contents) if node.contents is not None else ""
        return ""
    if isinstance(node, nodes.Template):
        return _render_template(node)
    return ""  # headings, comments, template arguments


def _render_template(template) -> str:
    """Render the few templates that stand for words in a sentence."""
    name = str(template.name).strip().lower()
    values = [_render(p.value).strip() for p in template.params if not p.showkey]
    if not values:
        return {"'": "'", "'s": "'s", "spaced ndash": " \u2013 ", "snd": " \u2013 ", "-": ""}.get(
            name, ""
        )
    if name in ("convert", "cvt"):  # {{convert|7|to|10|kg|lb}}: two numbers, or one
        is_range = len(values) > 3 and not re.search(r"\d", values[1]) and values[2][:1].isdigit()
        return " ".join(values[: 4 if is_range else 2])
    if name in ("lang", "transl", "transliteration"):
        return values[-1]
    if name in ("nowrap", "nobr", "small", "nihongo", "abbr", "quote", "linktext", "ill", "as of"):
        return f"As of {values[0]}" if name == "as of" else values[0]
    return ""
