"""CoNLL's files of columns, and the scores of its conlleval.

A tag is O, or B-type where an entity begins and I-type where it goes on. As in conlleval, an I- that
follows nothing of its type begins an entity too (IOB1), and an entity counts only where its words
and its type are all right. Shares are 0 to 1 here, not 0 to 100.
"""

import collections
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bert_jax.data.compressed import DATA_BYTES, damage, decompressed, whole
from bert_jax.errors import UserError

OUTSIDE = "O"
DOCUMENT = "-DOCSTART-"
_BIO = re.compile(r"O|[BI]-.+")
_OTHER_SCHEMES = re.compile(r"[BIESLUM]-.+")


class Sentence(NamedTuple):
    """Words of a file between empty lines.

    Attributes:
        line: the first one's in the file.
        document: how many -DOCSTART- lines stand before.
        rows: the columns of each word; all of a file have equally many.
    """

    line: int
    document: int
    rows: list[list[str]]

    def column(self, number: int) -> list[str]:
        """One column of all words."""
        return [row[number] for row in self.rows]


def read(path: str | pathlib.Path) -> list[Sentence]:
    """The sentences of a file: a word a line, columns between tabs or else spaces.

    Raises:
        UserError: not such a file; names the line.
    """
    path = pathlib.Path(path)
    with damage(path), decompressed(path) as stream:
        data = whole(stream, path, DATA_BYTES)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: not UTF-8 text; convert it, e.g. with iconv -t UTF-8"
        ) from None
    sentences: list[Sentence] = []
    document, first, rows = 0, None, None
    for number, line in enumerate(text.split("\n"), 1):  # other line ends may be words
        line = line.rstrip(" \t\r")
        row = line.split("\t") if "\t" in line else [cell for cell in line.split(" ") if cell]
        if not row or row[0] == DOCUMENT:
            document += bool(row)
            rows = None
            continue
        if "\0" in line or "" in row:
            raise UserError(
                f"{path}:{number}: an empty column or a NUL; expected a word and its columns"
            )
        if first is None:
            first = number, len(row)
        if len(row) != first[1]:
            raise UserError(
                f"{path}:{number}: {len(row)} columns where line {first[0]} has {first[1]}; every "
                "word needs the same"
            )
        if rows is None:
            rows = []
            sentences.append(Sentence(number, document, rows))
        rows.append(row)
    if not sentences:
        raise UserError(f"{path}: no words in it; expected one a line, with its tag as last column")
    return sentences


def are_entities(tags: Iterable[str]) -> bool:
    """Whether tags mark entities; otherwise each is a label of its own, such as a part of speech."""
    return any(_OTHER_SCHEMES.fullmatch(tag) for tag in tags)


def require_bio(path: str | pathlib.Path, sentences: Sequence[Sentence], column: int) -> None:
    """Refuses tags other than O, B-type and I-type.

    Raises:
        UserError: such a tag; names the line.
    """
    for sentence in sentences:
        for i, tag in enumerate(sentence.column(column)):
            if not _BIO.fullmatch(tag):
                raise UserError(
                    f"{path}:{sentence.line + i}: the tag {tag!r} is not BIO; expected O, B-type "
                    "where an entity begins or I-type where it goes on"
                )


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Type, first word and the one after the last of each entity of a sentence."""
    found, begin, kind = [], 0, None
    for i, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, now = tag.partition("-")
        if kind is not None and (prefix != "I" or now != kind):
            found.append((kind, begin, i))
            kind = None
        if prefix != OUTSIDE and kind is None:
            begin, kind = i, now
    return found


class Counts(NamedTuple):
    """Of entities, or of words where labels are plain.

    Attributes:
        gold: there are.
        found: were predicted.
        correct: both.
    """

    gold: int
    found: int
    correct: int

    @property
    def precision(self) -> float:
        return self.correct / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        return self.correct / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        both = self.gold + self.found
        return 2 * self.correct / both if both else 0.0


def count(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], of_entities: bool
) -> dict[str, Counts]:
    """`Counts` by type of entity, or by label, in alphabetical order."""
    totals = [collections.Counter() for _ in range(3)]
    for a, b in zip(gold, predicted, strict=True):
        spans = [
            set(entities(tags) if of_entities else zip(tags, range(len(tags)), strict=True))
            for tags in (a, b)
        ]
        for total, some in zip(totals, (*spans, spans[0] & spans[1]), strict=True):
            total.update(span[0] for span in some)
    return {
        kind: Counts(*(total[kind] for total in totals)) for kind in sorted(totals[0] + totals[1])
    }


def score(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], of_entities: bool
) -> dict[str, float]:
    """The scores of the tags of sentences, 0 to 1.

    Returns:
        accuracy, of words; and of entities precision, recall, f1 and the f1_… of each type.
    """
    words = sum(map(len, gold))
    same = sum(
        x == y for a, b in zip(gold, predicted, strict=True) for x, y in zip(a, b, strict=True)
    )
    result = {"accuracy": same / words if words else 0.0}
    if of_entities:
        counts = count(gold, predicted, True)
        whole = overall(counts)
        result |= {"precision": whole.precision, "recall": whole.recall, "f1": whole.f1}
        result |= {f"f1_{kind}": some.f1 for kind, some in counts.items()}
    return result


def overall(counts: dict[str, Counts]) -> Counts:
    """The sums over all types."""
    return Counts(*(sum(some[i] for some in counts.values()) for i in range(3)))


def table(counts: dict[str, Counts]) -> str:
    """Tab-separated: a line a type and one for all, with shares of 0 to 1."""
    lines = ["type\tprecision\trecall\tf1\tgold\tfound\tcorrect"]
    for kind, some in {**counts, "all": overall(counts)}.items():
        shares = f"{some.precision:.4f}\t{some.recall:.4f}\t{some.f1:.4f}"
        lines.append(f"{kind}\t{shares}\t{some.gold}\t{some.found}\t{some.correct}")
    return "\n".join(lines) + "\n"


def score_file(
    data: str | pathlib.Path, predictions: str | pathlib.Path | None = None
) -> dict[str, float]:
    """`score` of files.

    Args:
        data: words, first column, and their right tags, last column. Without `predictions`, or
            where both are one file, the last column is what was predicted and the one before it
            what is right, as conlleval reads.
        predictions: the same words and, last column, what was predicted.

    Raises:
        UserError: not such files, or not the same words; names the line.
    """
    sentences = read(data)
    if predictions is None or pathlib.Path(predictions) == pathlib.Path(data):
        if len(sentences[0].rows[0]) < 3:
            raise UserError(
                f"{data}:{sentences[0].line}: {len(sentences[0].rows[0])} columns; expected a word, "
                "its tag and the predicted tag, or a second file with the predictions"
            )
        both = ((data, sentences, -2), (data, sentences, -1))
    else:
        others = read(predictions)
        _require_same_words(data, sentences, predictions, others)
        both = ((data, sentences, -1), (predictions, others, -1))
        for path, some, _ in both:
            if len(some[0].rows[0]) < 2:
                raise UserError(f"{path}:{some[0].line}: one column; expected a word and its tag")
    gold, predicted = ([s.column(column) for s in some] for _, some, column in both)
    of_entities = are_entities(tag for tags in (*gold, *predicted) for tag in tags)
    if of_entities:
        for path, some, column in both:
            require_bio(path, some, column)
    return score(gold, predicted, of_entities)


def _require_same_words(
    path: str | pathlib.Path,
    sentences: Sequence[Sentence],
    other_path: str | pathlib.Path,
    others: Sequence[Sentence],
) -> None:
    for ours, theirs in zip(sentences, others, strict=False):
        for i, (a, b) in enumerate(zip(ours.rows, theirs.rows, strict=False)):
            if a[0] != b[0]:
                raise UserError(
                    f"{other_path}:{theirs.line + i}: the word {b[0][:50]!r} where {path}:"
                    f"{ours.line + i} has {a[0][:50]!r}; both must hold the same words"
                )
        if len(ours.rows) != len(theirs.rows):
            raise UserError(
                f"{other_path}:{theirs.line}: a sentence of {len(theirs.rows)} words where {path}:"
                f"{ours.line} has one of {len(ours.rows)}; both must hold the same words"
            )
    if len(sentences) != len(others):
        raise UserError(
            f"{other_path}: {len(others):,} sentences where {path} has {len(sentences):,}; both "
            "must hold the same words"
        )
