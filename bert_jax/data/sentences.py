"""Split raw documents into sentences: remove markup, join wrapped lines, find the ends of sentences."""

import functools
import html
import itertools
import re
from collections.abc import Callable, Iterator

from bert_jax.data.corpus import RawDocument
from bert_jax.data.formats import WRAPPED_CHARACTERS
from bert_jax.data.mediawiki import plain_text

# Far beyond the T tokens of any row; longer ones are text without punctuation.
SENTENCE_CHARACTERS = 10_000
_QUOTE = re.compile("[\"'\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb]")
_SENTENCE_END = re.compile(r"[.!?\u2026]\W*\s\W*\w")


def split_sentences(document: RawDocument, language: str = "en") -> list[str]:
    """Return the sentences of a document in order, without markup, none empty or with line breaks.

    Google's format is already split and is left as is. Sentences longer than
    `SENTENCE_CHARACTERS` are split between words.

    Args:
        document: a document from `corpus.read`.
        language: language code of two or three lowercase letters for the sentence splitter.
    """
    text = document.text
    if document.kind == "google":
        segments = text.split("\n")
    else:
        import sentencex

        if document.kind == "mediawiki":
            text = plain_text(text)
        elif document.kind.startswith("wikiextractor") and "&" in text:
            text = html.unescape(text)  # some versions escape, others do not
        paragraphs = _paragraphs(text) if document.kind == "books" else text.split("\n")
        segment = functools.partial(sentencex.segment, language)
        segments = itertools.chain.from_iterable(
            _split_speech(part, segment) for paragraph in paragraphs for part in segment(paragraph)
        )
    return [
        part for segment in segments for part in _split_long_sentence(" ".join(segment.split()))
    ]


def _split_speech(text: str, segment: Callable[[str], list[str]]) -> Iterator[str]:
    """Split what `segment` keeps together between two quotation marks or apostrophes.

    A verb after a quotation stays with its last sentence: ['"Wait.', 'It is he!" said Tom.'].
    """
    parts = []
    if _QUOTE.search(text) and _SENTENCE_END.search(text):
        parts = segment(_QUOTE.sub(" ", text))
    if sum(map(len, parts)) != len(text):
        parts = [text]
    start = offset = 0
    for part in parts[:-1]:
        end, offset = offset + len(part.rstrip()), offset + len(part)
        if not _QUOTE.match(text, end):  # a quotation ends here
            opening = _QUOTE.search(text, end, offset)
            cut = opening.start() if opening else offset
            yield text[start:cut]
            start = cut
    yield text[start:]


def _split_long_sentence(sentence: str) -> Iterator[str]:
    while len(sentence) > SENTENCE_CHARACTERS:
        space = sentence.rfind(" ", 1, SENTENCE_CHARACTERS)
        end = space if space > 0 else SENTENCE_CHARACTERS
        yield sentence[:end]
        sentence = sentence[end:].lstrip()
    if sentence:
        yield sentence


def _paragraphs(text: str) -> Iterator[str]:
    """Join consecutive lines that may be wrapped; others are paragraphs."""
    lines = map(str.strip, text.split("\n"))
    for is_wrapped, group in itertools.groupby(
        lines, lambda line: 0 < len(line) <= WRAPPED_CHARACTERS
    ):
        if is_wrapped:
            yield " ".join(group)
        else:
            yield from filter(None, group)
