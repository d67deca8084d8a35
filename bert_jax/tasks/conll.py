"""Token classification: named entities, parts of speech or any labels in CoNLL columns.

A word's label is trained and predicted at its first word piece (Devlin et al., section 5.3). Every
word is labeled in exactly one sequence; sentences that are too long are split into several.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from bert_jax.config.schema import TaskConfig
from bert_jax.data import tables, texts
from bert_jax.data.examples import NO_EXAMPLE, Examples
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.storage import files
from bert_jax.tasks import conll_score
from bert_jax.tasks.base import NEW, FinetuneDataset, Logits, Prediction, Text
from bert_jax.tasks.tables import find_files, probabilities, read_labels

# File names of the splits in a folder of CoNLL files.
_NAMES = {
    "train": ("train.txt", "train.conll", "train.jsonl", "eng.train"),
    "dev": ("valid.txt", "dev.txt", "dev.conll", "valid.jsonl", "dev.jsonl", "eng.testa"),
    "test": ("test.txt", "test.conll", "test.jsonl", "eng.testb"),
}


@dataclasses.dataclass
class _Sentences:
    """Mapping from the sequences of a split to its sentences.

    Attributes:
        words: words of each sentence.
        tags: gold labels of each sentence; None if unknown.
        positions: for each sequence, the positions of the first pieces of the words labeled in it.
            Concatenated over sequences, these are all words in order.
    """

    words: list[list[str]]
    tags: list[list[str]] | None
    positions: list[np.ndarray]


class TokenClassification(FinetuneDataset):
    """A token classification dataset: one label per word.

    `config.text_a` and `label` can be column numbers, from 1; by default words are in the first and
    labels in the last column. `config.data` is a folder with, e.g., train.txt, valid.txt and test.txt.
    Labels are those of the model, `config.labels` or those of the training data, completed to, e.g.,
    B-type and I-type for every type. New data in "-", .txt, .jsonl and .parquet are one text per line,
    with words separated by spaces. Other files are read by `conll_score.read`, and so are a .jsonl with
    "tokens" and a .txt in which every line is a word, alone or followed by a known label.

    Attributes:
        tagging: how labels mark entities; None if they label single words.
    """

    head = "token"

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        training: bool = True,
        labels: tuple[str, ...] = (),
        new: str | Sequence[Text] = "",
    ):
        self.config, self.report = config, []
        self._word = _column(config.text_a, "text_a", "text", 0)
        self._tag = _column(config.label, "label", "label", -1)
        paths = {} if new else find_files(config, config.data, _NAMES)
        known = labels or (read_labels(config.labels) if config.labels else ())
        if not known and "train" not in paths:
            raise UserError(
                "the labels are unknown: set config.task.train, or list them in config.task.labels"
            )
        read = {
            split: conll_score.read(path)
            for split, path in paths.items()
            if training or split != "train" or not known
        }
        for split, sentences in read.items():
            labeled = split == "train" or (split == "dev" and not labels)
            self._require_columns(paths[split], sentences, 2 if labeled else 1)
        self.labels: tuple[str, ...] = known or _label_set(
            tag for sentence in read["train"] for tag in sentence.column(self._tag)
        )
        if len(self.labels) < 2:
            raise UserError(
                f"{paths.get('train')}: every word has the tag {''.join(self.labels)!r}: check the last "
                "column, or set config.task.label to the number of the tag column"
            )
        self.tagging = conll_score.find_tagging(self.labels)
        self.best_by = "f1" if self.tagging else "accuracy"
        self.splits = {}
        self._sentences: dict[str, _Sentences] = {}
        for split, sentences in read.items():
            if split == "train" and not training:
                continue
            tags = self._tags(split, paths[split], sentences)
            words = [sentence.column(self._word) for sentence in sentences]
            documents = [sentence.document for sentence in sentences]
            if config.document_context and documents[-1] == 0:
                self.report.append(
                    f"{split}: no {conll_score.DOCUMENT} lines: the file is read as one document"
                )
            self._add(split, vocabulary, words, tags, documents)
        if new:
            lines = list(self._new_words(new))
            if isinstance(new, str) and not any(words for _, words in lines):
                raise UserError(f"{new}: no words: expected sentences, one per line")
            words, documents = [words for _, words in lines], [document for document, _ in lines]
            self._add(NEW, vocabulary, words, None, documents)

    def _require_columns(
        self, path: str, sentences: Sequence[conll_score.Sentence], min_columns: int
    ) -> None:
        num_columns = len(sentences[0].rows[0])
        required = max(self._word + 1, self._tag + 1, min_columns)
        if num_columns < required:
            raise UserError(
                f"{path}:{sentences[0].line}: {num_columns} columns, expected at least {required}: "
                "a word and its tag, separated by a tab or spaces"
            )

    def _tags(
        self, split: str, path: str, sentences: Sequence[conll_score.Sentence]
    ) -> list[list[str]] | None:
        """Return each sentence's labels, IOB1 as BIO; None if the file has none."""
        if len(sentences[0].rows[0]) == 1:
            return None
        if self.tagging:
            self.tagging.check(path, sentences, self._tag)
        known, result, num_converted = set(self.labels), [], 0
        for sentence in sentences:
            file_tags = sentence.column(self._tag)
            tags = list(file_tags)
            # IOB1 has B- only between neighbors of the same type
            if self.tagging and self.tagging.letters == "BI":
                for kind, begin, _ in self.tagging.entities(file_tags):
                    tags[begin] = self.tagging.tag("B", kind)
            num_converted += tags != file_tags
            for i, tag in enumerate(tags):
                if tag not in known:
                    raise UserError(
                        f"{path}:{sentence.line_of(i)}: unknown label {tag!r}, not one of "
                        f"{', '.join(self.labels)[:200]}; correct it, or list all labels in "
                        "config.task.labels"
                    )
            result.append(tags)
        if num_converted:
            self.report.append(
                f"{split}: {num_converted:,} sentences with entities beginning with I- (IOB1), "
                "converted to B-"
            )
        return result

    def _new_words(self, source: str | Sequence[Text]) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of the document, and the words, of each text, line or sentence.

        A text, or a line of text, is a document of its own.
        """
        if not isinstance(source, str):
            for number, text in enumerate(source):
                if not isinstance(text, str):
                    raise UserError(f"text {number} is a pair: tagging takes single texts")
                yield number, text.split()
            return
        kind = tables.kind_of(source)
        is_text = source == tables.STANDARD_INPUT or kind in (".txt", ".jsonl", ".parquet")
        if kind == ".txt" and self._holds_columns(source):
            self.report.append(f"new: {source} is read as columns: every line is one word")
            is_text = False
        if kind == ".jsonl":
            first = next(tables.read(source, []), None)
            is_text = first is None or "tokens" not in first.fields
        if is_text:
            for number, (text, _) in enumerate(texts.read(source, self.config.text_a).texts):
                yield number, text.split()
        else:
            for sentence in conll_score.read(source):
                if self._word >= len(sentence.rows[0]):
                    raise UserError(
                        f"{source}:{sentence.line}: no column {self._word + 1} for words"
                    )
                yield sentence.document, sentence.column(self._word)

    def _holds_columns(self, path: str) -> bool:
        """Whether a .txt file holds columns, as training files of that name do, and not texts.

        Every line is then a single word, or ends in a known label.
        """
        try:
            sentences = conll_score.read(path)
        except UserError:  # the number of columns varies
            return False
        if len(sentences[0].rows[0]) == 1:
            return any(len(sentence.rows) > 1 for sentence in sentences)
        return all(set(self.labels).issuperset(sentence.column(-1)) for sentence in sentences)

    def _add(
        self,
        split: str,
        vocabulary: Vocabulary,
        words: list[list[str]],
        tags: list[list[str]] | None,
        documents: Sequence[int],
    ) -> None:
        """Split sentences into sequences and add them as a split."""
        max_pieces = self.config.tokens - 2
        pieces, num_cut, num_unknown = _pieces(vocabulary, words, max_pieces)
        index = {label: i for i, label in enumerate(self.labels)}
        tokens, targets, positions, num_split = [], [], [], 0
        # Context that a sequence may include around its words: the document, or the sentence.
        scope_ids = documents if self.config.document_context else range(len(words))
        for _, group in itertools.groupby(range(len(words)), scope_ids.__getitem__):
            scope = list(group)
            scope_words = [pieces[word] for i in scope for word in words[i]]
            begin = np.cumsum([0, *map(len, scope_words)])
            flat = np.array([piece for word in scope_words for piece in word], np.int32)
            first = 0
            for i in scope:
                chunks = _chunks([len(pieces[word]) for word in words[i]], max_pieces)
                num_split += len(chunks) > 1
                sentence_tags = iter(tags[i] if tags else ())
                for n in chunks:
                    low, high = _surround(begin, first, first + n, max_pieces)
                    sequence = [vocabulary.cls_id, *flat[low:high], vocabulary.sep_id]
                    position = begin[first : first + n] - low + 1
                    target = np.full(len(sequence), NO_EXAMPLE, np.int32)
                    if tags is not None:
                        target[position] = [
                            index[tag] for tag in itertools.islice(sentence_tags, n)
                        ]
                    tokens.append(np.array(sequence, np.int32))
                    targets.append(target)
                    positions.append(position)
                    first += n
        notes = {
            f"sentences of {sum(map(len, words)):,} words": len(words),
            f"sentences longer than {max_pieces:,} word pieces split": num_split,
            "words longer than that truncated": num_cut,
            "words without any valid character read as [UNK]": num_unknown,
        }
        self.report += [f"{split}: {n:,} {note}" for note, n in notes.items() if n]
        self.splits[split] = Examples(
            tokens, [len(sequence) for sequence in tokens], token_targets={"label": targets}
        )
        self._sentences[split] = _Sentences(words, tags, positions)

    def predict(self, split: str, logits: Logits) -> list[np.ndarray]:
        """Return the label probabilities of each sentence's words, an array [n, C] per sentence."""
        sentences = self._sentences[split]
        word_logits = [x[position] for x, position in zip(logits, sentences.positions, strict=True)]
        scores = np.concatenate([np.zeros((0, len(self.labels))), *word_logits])
        edges = np.cumsum([len(words) for words in sentences.words])[:-1]
        return np.split(probabilities(scores), edges)

    def predicted(self, probs: list[np.ndarray]) -> list[list[str]]:
        """Return the labels of each sentence's words, given the result of `predict`."""
        return [[self.labels[i] for i in word_probs.argmax(1)] for word_probs in probs]

    def predictions(self, split: str, logits: Logits) -> list[Prediction]:
        """Return the labels of each sentence's words."""
        predicted = self.predicted(self.predict(split, logits))
        return [Prediction(tuple(labels), {}) for labels in predicted]

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """Return `conll_score.score` of the split; empty if its labels are unknown."""
        gold = self._sentences[split].tags
        if gold is None:
            return {}
        predicted = self.predicted(self.predict(split, logits))
        return conll_score.score(gold, predicted, self.tagging)

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Write prediction files to a folder.

        predictions.conll: word, gold label if known, predicted label; the format of conlleval.
        probabilities.jsonl: one line per sentence: words, predicted labels, probabilities by label.
        per_type.tsv: `conll_score.table`, if labels are known.
        """
        sentences = self._sentences[split]
        probs = self.predict(split, logits)
        predicted = self.predicted(probs)
        columns = [sentences.words, *([sentences.tags] if sentences.tags else []), predicted]
        # conlleval separates columns by spaces; tabs are needed if words contain spaces.
        delimiter = "\t" if any(" " in word for words in sentences.words for word in words) else " "
        blocks = (
            "".join(delimiter.join(row) + "\n" for row in zip(*sentence, strict=True))
            for sentence in zip(*columns, strict=True)
        )
        lines = []
        for words, tags, word_probs in zip(sentences.words, predicted, probs, strict=True):
            by_label = dict(zip(self.labels, word_probs.T.round(6).tolist(), strict=True))
            line = {"words": words, "predicted": tags, "probabilities": by_label}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        files.write(folder / "predictions.conll", "\n".join(blocks))
        files.write(folder / "probabilities.jsonl", "".join(lines))
        if sentences.tags is not None:
            counts = conll_score.count(sentences.tags, predicted, self.tagging)
            files.write(folder / "per_type.tsv", conll_score.table(counts))


def _column(value: str, field: str, default: str, default_column: int) -> int:
    """Return the column index that a config field names."""
    if value == default:
        return default_column
    if value.isdecimal() and int(value) > 0:
        return int(value) - 1
    raise UserError(
        f"config.task.{field}={value!r}: columns of CoNLL files are numbered; use 1 for the first"
    )


def _label_set(tags: Iterator[str]) -> tuple[str, ...]:
    """Return all possible labels in a fixed order: all letters for every entity type."""
    known = set(tags)
    if not (tagging := conll_score.find_tagging(known)):
        return tuple(sorted(known))
    parsed = [tagging.parse(tag) for tag in known - {conll_score.OUTSIDE}]
    kinds = sorted({pair[1] for pair in parsed if pair})
    labels = (tagging.tag(letter, kind) for kind in kinds for letter in tagging.letters)
    return (conll_score.OUTSIDE, *labels)


def _pieces(
    vocabulary: Vocabulary, words: list[list[str]], max_pieces: int
) -> tuple[dict[str, list[int]], int, int]:
    """Tokenize each word to at least one and at most `max_pieces` ids.

    Returns:
        Ids by word, the number of truncated words, and the number of words without pieces.
    """
    distinct = list(dict.fromkeys(word for sentence in words for word in sentence))
    pieces, cut, unknown = {}, set(), set()
    for word, encoded in zip(distinct, vocabulary.encode_words(distinct), strict=True):
        if len(encoded.ids) > max_pieces:
            cut.add(word)
        elif not len(encoded.ids):
            unknown.add(word)
        pieces[word] = encoded.ids[:max_pieces].tolist() or [vocabulary.unk_id]
    flat = [word for sentence in words for word in sentence]
    return pieces, sum(word in cut for word in flat), sum(word in unknown for word in flat)


def _chunks(lengths: Sequence[int], max_pieces: int) -> list[int]:
    """Return the number of words per sequence: few sequences of similar length."""
    total = sum(lengths)
    if total <= max_pieces:
        return [len(lengths)] if lengths else []
    target_size = -(-total // -(-total // max_pieces))
    chunks, size = [0], 0
    for length in lengths:
        if chunks[-1] and size + length > target_size:
            chunks.append(0)
            size = 0
        chunks[-1] += 1
        size += length
    return chunks


def _surround(begin: np.ndarray, first: int, end: int, max_pieces: int) -> tuple[int, int]:
    """Return the range of pieces to show: words `first` to `end` and whole words around them.

    Both sides get the same number of pieces; what one side cannot fill goes to the other. `begin` has
    the offset of each word's first piece, and the end of the last word.
    """
    low, high, total = int(begin[first]), int(begin[end]), int(begin[-1])
    spare = max_pieces - (high - low)
    left = min(low, max(spare // 2, spare - (total - high)))
    right = min(total - high, spare - left)
    low = int(begin[np.searchsorted(begin, low - left)])
    high = int(begin[np.searchsorted(begin, high + right, side="right") - 1])
    return low, high
