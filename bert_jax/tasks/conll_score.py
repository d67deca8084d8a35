"""Files of tagged words, and the metrics of conlleval and seqeval.

Entities are tagged in BIO (O, B at the beginning of an entity, I inside it), IOBES (also E at the end,
S for a single word) or BILOU (L and U instead). In BIO, as in conlleval, an I that does not continue an
entity of its type also begins one (IOB1); in the others, as in seqeval's strict mode, only complete
entities count. An entity is correct only if its words and its type are. Metrics are 0 to 1.
"""

import collections
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bert_jax.data import tables
from bert_jax.errors import UserError

OUTSIDE = "O"
DOCUMENT = "-DOCSTART-"
# By the letters of a scheme (BIO, IOBES, BILOU), those of an entity.
_ENTITIES = {"BI": re.compile("BI*"), "BIES": re.compile("BI*E|S"), "BILU": re.compile("BI*L|U")}
_STYLES = ("{letter}-{kind}", "{letter}_{kind}", "{kind}-{letter}", "{letter}")


class Sentence(NamedTuple):
    """Words of a file between empty lines, or those of a line of JSON.

    Attributes:
        line: line number of its first word in the file.
        document: number of -DOCSTART- lines before it.
        rows: columns of each word, the same number for all words of a file.
        step: 1 if each word has a line of its own, else 0.
    """

    line: int
    document: int
    rows: list[list[str]]
    step: int = 1

    def line_of(self, word: int) -> int:
        """Return the line number of a word."""
        return self.line + word * self.step

    def column(self, number: int) -> list[str]:
        """Return one column of all words."""
        return [row[number] for row in self.rows]


def read(path: str | pathlib.Path) -> list[Sentence]:
    """Read the sentences of a file with one word per line, in columns separated by tabs or spaces.

    A line that begins with "#" before the first word of a sentence is a comment, unless it has the
    columns of other lines: the same separator, as many, and after a "#" alone a last one that occurs.

    A .jsonl or .json file has a sentence per line: {"tokens": […], "ner_tags": […]}, or only tokens.
    """
    is_json = tables.kind_of(path) in (".jsonl", ".json")
    sentences: list[Sentence] = []
    document, first, rows = 0, None, None
    for number, row in _json_rows(path) if is_json else _column_rows(path):
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
            sentences.append(Sentence(number, document, rows, step=not is_json))
        rows.append(row)
    if not sentences:
        raise UserError(f"{path}: no words: expected one per line, with its tag as last column")
    return sentences


def _column_rows(path: str | pathlib.Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and columns of each line but comments; none between sentences."""
    lines = [line.rstrip(" \t\r") for line in tables.file_lines(pathlib.Path(path))]
    rows = [x.split("\t") if "\t" in x else [cell for cell in x.split(" ") if cell] for x in lines]
    forms, tags = set(), {OUTSIDE}
    for line, row in zip(lines, rows, strict=True):
        if row and row[0] != DOCUMENT and not line.startswith("#"):
            forms.add(("\t" in line, len(row)))
            tags.add(row[-1])
    between = True
    for number, (line, row) in enumerate(zip(lines, rows, strict=True), 1):
        other_form = forms and ("\t" in line, len(row)) not in forms
        other_tag = len(row) > 1 and row[0] == "#" and row[-1] not in tags
        if between and line.startswith("#") and (other_form or other_tag):
            continue
        between = not row or row[0] == DOCUMENT
        yield number, row


def _json_rows(path: str | pathlib.Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and columns of each word of JSON lines; none after a sentence."""
    for where, fields in tables.read(path, [], ["tokens"], kind=".jsonl"):
        columns = [fields[name] for name in ("tokens", "ner_tags") if fields.get(name) is not None]
        if not all(isinstance(column, list) for column in columns) or not all(
            isinstance(cell, str) and cell.strip() and not set("\t\n\r\0") & set(cell)
            for cell in itertools.chain(*columns)
        ):
            raise UserError(
                f"{where}: expected lists of words and tags, not numbers, empty or with line breaks: "
                '{"tokens": ["in", "Paris"], "ner_tags": ["O", "B-LOC"]}'
            )
        if len({len(column) for column in columns}) > 1:
            raise UserError(f"{where}: {len(columns[0])} tokens but {len(columns[1])} ner_tags")
        number = int(where.rpartition(":")[2])
        for row in zip(*columns, strict=True):
            yield number, [cell.encode(errors="replace").decode() for cell in row]
        yield number, []


class Tagging(NamedTuple):
    """How tags mark entities.

    Attributes:
        letters: of a scheme's tags besides O: "BI" (BIO), "BIES" (IOBES) or "BILU" (BILOU).
        style: format of a tag, given its letter and the type ("kind") of the entity.
    """

    letters: str = "BI"
    style: str = _STYLES[0]

    def parse(self, tag: str) -> tuple[str, str] | None:
        """Return the letter and type of a tag; the type of O is "". None for a tag of another kind."""
        if tag == OUTSIDE:
            return OUTSIDE, ""
        pattern = self.style.format(letter=f"(?P<letter>[{self.letters}])", kind="(?P<kind>.+)")
        match = re.fullmatch(pattern, tag)
        return match and (match["letter"], match.groupdict().get("kind", "_"))

    def tag(self, letter: str, kind: str) -> str:
        """Return the tag that `parse` reads."""
        return self.style.format(letter=letter, kind=kind)

    def check(self, path: str | pathlib.Path, sentences: Sequence[Sentence], column: int) -> None:
        """Refuse a file with other tags."""
        for sentence in sentences:
            for i, tag in enumerate(sentence.column(column)):
                if not self.parse(tag):
                    expected = " ".join(self.tag(letter, "type") for letter in self.letters)
                    raise UserError(
                        f"{path}:{sentence.line_of(i)}: the tag {tag!r} is not one of "
                        f"{OUTSIDE} {expected}, as other tags are: correct it"
                    )

    def entities(self, tags: Sequence[str]) -> list[tuple[str, int, int]]:
        """Return (type, first word, word after the last) of each entity of a sentence."""
        parsed = [self.parse(tag) or (OUTSIDE, "") for tag in tags]
        letters, previous = "", None
        for letter, kind in parsed:
            if letter in "IEL" and kind != previous:  # continues no entity
                letter = "B" if self.letters == "BI" else OUTSIDE
            letters += letter
            previous = kind
        found = _ENTITIES[self.letters].finditer(letters)
        return [(parsed[match.start()][1], *match.span()) for match in found]


def find_tagging(tags: Iterable[str]) -> Tagging | None:
    """Return how tags mark entities; None if they label single words, e.g. with parts of speech.

    Most tags must be "B-type" and the like, for an error to name the others; all in other styles.
    """
    tags = set(tags) - {OUTSIDE}
    best, most = None, 0
    for letters, style in itertools.product(_ENTITIES, _STYLES):
        tagging = Tagging(letters, style)
        parsed = [pair for pair in map(tagging.parse, tags) if pair]
        required = (len(tags) + 1 + (letters != "BI")) // 2 if style == _STYLES[0] else len(tags)
        # In IOBES and BILOU, every type with B has E or L; else these are mistakes in a file of BIO.
        begun, ended = ({kind for x, kind in parsed if x == y} for y in ("B", letters[-2]))
        # S, E, L or U alone are plain labels.
        is_named = style != _STYLES[-1] or any(letter in "BI" for letter, _ in parsed)
        if len(parsed) >= required and len(parsed) > most and begun == ended and is_named:
            best, most = tagging, len(parsed)
    return best


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
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], tagging: Tagging | None
) -> dict[str, Counts]:
    """Count by entity type, or by label if `tagging` is None, in alphabetical order."""
    totals = [collections.Counter() for _ in range(3)]
    for a, b in zip(gold, predicted, strict=True):
        spans = [
            set(tagging.entities(tags) if tagging else zip(tags, range(len(tags)), strict=True))
            for tags in (a, b)
        ]
        for total, counted in zip(totals, (*spans, spans[0] & spans[1]), strict=True):
            total.update(span[0] for span in counted)
    return {
        kind: Counts(*(total[kind] for total in totals)) for kind in sorted(totals[0] + totals[1])
    }


def score(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], tagging: Tagging | None
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
    if tagging:
        counts = count(gold, predicted, tagging)
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
    # Of the gold tags: predictions may have tags by mistake. Gold tags may all be O.
    gold_tags, predicted_tags = (
        {tag for tags in some for tag in tags} for some in (gold, predicted)
    )
    tagging = find_tagging(gold_tags) or find_tagging(gold_tags | predicted_tags)
    if tagging:
        for path, source, column in sources:
            tagging.check(path, source, column)
    return score(gold, predicted, tagging)


def _require_same_words(
    path: str | pathlib.Path,
    sentences: Sequence[Sentence],
    other_path: str | pathlib.Path,
    other_sentences: Sequence[Sentence],
) -> None:
    lines, other_lines = (
        [(s.line_of(i), word) for s in file for i, word in enumerate([*s.column(0), ""])]
        for file in (sentences, other_sentences)
    )
    pairs = itertools.zip_longest(lines, other_lines, fillvalue=("end", ""))
    for (line, word), (other_line, other) in pairs:
        if word != other:
            raise UserError(
                f"{other_path}:{other_line}: the word {other[:50]!r}, but {path}:{line} has "
                f"{word[:50]!r} ('' after a sentence): both files must hold the same words"
            )
