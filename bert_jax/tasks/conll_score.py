"""CoNLL column files, and the metrics of conlleval.

A tag is O, B-type at the beginning of an entity or I-type inside it. As in conlleval, an I- tag
that does not continue an entity of its type also begins one (IOB1), and an entity is correct only
if its words and its type are. Metrics are 0 to 1 here, not 0 to 100.
"""

import collections
import itertools
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bert_jax.data.tables import file_lines
from bert_jax.errors import UserError

OUTSIDE = "O"
DOCUMENT = "-DOCSTART-"
_BIO = re.compile(r"O|[BI]-.+")
_OTHER_SCHEMES = re.compile(r"[BIESLUM]-.+")


class Sentence(NamedTuple):
    """Words of a file between empty lines.

    Attributes:
        line: line number of its first word in the file.
        document: number of -DOCSTART- lines before it.
        rows: columns of each word, the same number for all words of a file.
    """

    line: int
    document: int
    rows: list[list[str]]

    def column(self, number: int) -> list[str]:
        """Return one column of all words."""
        return [row[number] for row in self.rows]


def read(path: str | pathlib.Path) -> list[Sentence]:
    """Read the sentences of a file with one word per line, in columns separated by tabs or spaces."""
    sentences: list[Sentence] = []
    document, first, rows = 0, None, None
    for number, line in enumerate(file_lines(pathlib.Path(path)), 1):
        line = line.rstrip(" \t\r")
        row = line.split("\t") if "\t" in line else [cell for cell in line.split(" ") if cell]
        if not row or row[0] == DOCUMENT:
            document += bool(row)
            rows = None
            continue
        if "" in row:
            raise UserError(f"{path}:{number}: empty column: expected a word and its columns")
        if first is None:
            first = number, len(row)
        if len(row) != first[1]:
            raise UserError(
                f"{path}:{number}: {len(row)} columns, but line {first[0]} has {first[1]}: every "
                "word needs the same number"
            )
        if rows is None:
            rows = []
            sentences.append(Sentence(number, document, rows))
        rows.append(row)
    if not sentences:
        raise UserError(f"{path}: no words: expected one per line, with its tag as last column")
    return sentences


def is_entity_tagging(tags: Iterable[str]) -> bool:
    """Whether tags mark entities rather than label single words, e.g. with parts of speech."""
    return any(_OTHER_SCHEMES.fullmatch(tag) for tag in tags)


def require_bio(path: str | pathlib.Path, sentences: Sequence[Sentence], column: int) -> None:
    """Check that all tags are O, B-type or I-type."""
    for sentence in sentences:
        for i, tag in enumerate(sentence.column(column)):
            if not _BIO.fullmatch(tag):
                raise UserError(
                    f"{path}:{sentence.line + i}: the tag {tag!r} is not BIO: expected O, B-type at "
                    "the beginning of an entity or I-type inside it"
                )


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (type, first word, word after the last) of each entity of a sentence."""
    spans, begin, kind = [], 0, None
    for i, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, tag_kind = tag.partition("-")
        if kind is not None and (prefix != "I" or tag_kind != kind):
            spans.append((kind, begin, i))
            kind = None
        if prefix != OUTSIDE and kind is None:
            begin, kind = i, tag_kind
    return spans


class Counts(NamedTuple):
    """Numbers of entities, or of words if labels do not mark entities.

    Attributes:
        gold: number in the gold labels.
        predicted: number in the predictions.
        correct: number in both.
    """

    gold: int
    predicted: int
    correct: int

    @property
    def precision(self) -> float:
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        return self.correct / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        total = self.gold + self.predicted
        return 2 * self.correct / total if total else 0.0


def count(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], entity_tags: bool
) -> dict[str, Counts]:
    """Count by entity type or label, in alphabetical order."""
    totals = [collections.Counter() for _ in range(3)]
    for a, b in zip(gold, predicted, strict=True):
        spans = [
            set(entities(tags) if entity_tags else zip(tags, range(len(tags)), strict=True))
            for tags in (a, b)
        ]
        for total, counted in zip(totals, (*spans, spans[0] & spans[1]), strict=True):
            total.update(span[0] for span in counted)
    return {
        kind: Counts(*(total[kind] for total in totals)) for kind in sorted(totals[0] + totals[1])
    }


def score(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], entity_tags: bool
) -> dict[str, float]:
    """Compute the metrics of tagged sentences, 0 to 1.

    Returns:
        accuracy of words; for entities also precision, recall, f1 and the f1_… of each type.
    """
    num_words = sum(map(len, gold))
    num_correct = sum(
        x == y for a, b in zip(gold, predicted, strict=True) for x, y in zip(a, b, strict=True)
    )
    result = {"accuracy": num_correct / num_words if num_words else 0.0}
    if entity_tags:
        counts = count(gold, predicted, True)
        total = overall(counts)
        result |= {"precision": total.precision, "recall": total.recall, "f1": total.f1}
        result |= {f"f1_{kind}": type_counts.f1 for kind, type_counts in counts.items()}
    return result


def overall(counts: dict[str, Counts]) -> Counts:
    """Sum the counts of all types."""
    return Counts(*(sum(type_counts[i] for type_counts in counts.values()) for i in range(3)))


def table(counts: dict[str, Counts]) -> str:
    """Format tab-separated metrics, 0 to 1: one line per type and one for all."""
    lines = ["type\tprecision\trecall\tf1\tgold\tfound\tcorrect"]
    for kind, row in {**counts, "all": overall(counts)}.items():
        values = f"{row.precision:.4f}\t{row.recall:.4f}\t{row.f1:.4f}"
        lines.append(f"{kind}\t{values}\t{row.gold}\t{row.predicted}\t{row.correct}")
    return "\n".join(lines) + "\n"


def score_file(
    data: str | pathlib.Path, predictions: str | pathlib.Path | None = None
) -> dict[str, float]:
    """Compute `score` of files.

    Args:
        data: file with words in the first and gold tags in the last column. If `predictions` is
            None or the same file, the last column holds the predictions and the one before it the
            gold tags, as in conlleval.
        predictions: file with the same words, and predictions in the last column.
    """
    sentences = read(data)
    if predictions is None or pathlib.Path(predictions) == pathlib.Path(data):
        sources, num_columns = ((data, sentences, -2), (data, sentences, -1)), 3
    else:
        predicted_sentences = read(predictions)
        _require_same_words(data, sentences, predictions, predicted_sentences)
        sources, num_columns = ((data, sentences, -1), (predictions, predicted_sentences, -1)), 2
    for path, source, _ in sources:
        if len(source[0].rows[0]) < num_columns:
            raise UserError(
                f"{path}:{source[0].line}: {len(source[0].rows[0])} columns: expected a word, its tag "
                "and, without a second file, the predicted tag"
            )
    gold, predicted = ([s.column(column) for s in source] for _, source, column in sources)
    entity_tags = is_entity_tagging(tag for tags in (*gold, *predicted) for tag in tags)
    if entity_tags:
        for path, source, column in sources:
            require_bio(path, source, column)
    return score(gold, predicted, entity_tags)


def _require_same_words(
    path: str | pathlib.Path,
    sentences: Sequence[Sentence],
    other_path: str | pathlib.Path,
    other_sentences: Sequence[Sentence],
) -> None:
    lines, other_lines = (
        [(s.line + i, word) for s in file for i, word in enumerate([*s.column(0), ""])]
        for file in (sentences, other_sentences)
    )
    for (line, word), (other_line, other) in itertools.zip_longest(
        lines, other_lines, fillvalue=("end", "")
    ):
        if word != other:
            raise UserError(
                f"{other_path}:{other_line}: the word {other[:50]!r}, but {path}:{line} has "
                f"{word[:50]!r} ('' after a sentence): both files must hold the same words"
            )
