"""Labels for words: entities, parts of speech, anything in CoNLL's columns.

A word's label is learned and predicted at its first word piece (Devlin et al., section 5.3). Every
word of the files is seen exactly once with a label: sentences longer than a sequence go over several.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from bert_jax import files
from bert_jax.config import TaskConfig
from bert_jax.data import compressed, texts
from bert_jax.data.examples import NO_EXAMPLE, Examples
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.tasks import conll_score
from bert_jax.tasks.classification import read_labels
from bert_jax.tasks.problem import Logits

# What a folder of CoNLL's files calls its splits.
_NAMES = {
    "train": ("train.txt", "train.conll", "eng.train"),
    "dev": ("valid.txt", "dev.txt", "dev.conll", "eng.testa"),
    "test": ("test.txt", "test.conll", "eng.testb"),
}


@dataclasses.dataclass
class _Sentences:
    """What leads from the sequences of a split back to its sentences.

    Attributes:
        words: of each sentence.
        tags: their right labels; None where nobody knows.
        places: of each sequence, where those of its words begin that are labelled there; over all
            sequences they are all words, in order.
    """

    words: list[list[str]]
    tags: list[list[str]] | None
    places: list[np.ndarray]


class Tagging:
    """Words with a label each.

    Attributes:
        of_entities: whether labels mark entities (O, B-type, I-type) and not single words.
    """

    head, objective = "token", "class"

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        splits: Collection[str] | None = None,
        labels: tuple[str, ...] = (),
        new: str = "",
    ):
        """Reads and tokenizes.

        Args:
            config: text_a and label may be the numbers of the columns, 1 the first; otherwise the
                word is in the first and its label in the last. With `data` a folder of, e.g.,
                train.txt, valid.txt and test.txt, or the files one by one.
            vocabulary: of the model.
            splits: those wanted; None for all there are.
            labels: of a fine-tuned model; with them only training data must have tags. () for
                `config.labels`, or those of the training data, to which belong both B-type and
                I-type of every type.
            new: a file to predict on; the only split then is "new". "-", .txt, .jsonl and .parquet
                hold a text a line, words between spaces; any other, columns.

        Raises:
            UserError: no such file or split; rows that are no words with tags; a tag that is not
                BIO among such that are, or that training does not know.
        """
        if config.tokens < 3:
            raise UserError(
                f"config.task.tokens={config.tokens} leaves no room for words; raise it"
            )
        self.config, self.report = config, []
        self._word = _column(config.text_a, "text_a", "text", 0)
        self._tag = _column(config.label, "label", "label", -1)
        paths = {} if new else _paths(config)
        for split in splits if splits is not None and not new else ():
            if split not in paths:
                raise UserError(
                    f"no file for the split {split!r}: set config.task.{split} or config.task.data"
                )
        known = labels or (read_labels(config.labels) if config.labels else ())
        if not known and "train" not in paths:
            raise UserError(
                "which labels are there? Set config.task.train, or config.task.labels to name them"
            )
        wanted = [split for split in paths if splits is None or split in splits]
        read = {
            split: conll_score.read(paths[split])
            for split in paths
            if split in wanted or (split == "train" and not known)
        }
        for split, sentences in read.items():
            must = split == "train" or (split == "dev" and not labels)
            self._require_columns(paths[split], sentences, 2 if must else 1)
        self.labels = known or _labels_of(
            tag for sentence in read["train"] for tag in sentence.column(self._tag)
        )
        self.of_entities = conll_score.are_entities(self.labels)
        self.best_by = "f1" if self.of_entities else "accuracy"
        self.splits: dict[str, Examples] = {}
        self._sentences: dict[str, _Sentences] = {}
        for split in wanted:
            sentences = read[split]
            tags = self._tags(split, paths[split], sentences)
            words = [sentence.column(self._word) for sentence in sentences]
            documents = [sentence.document for sentence in sentences]
            if config.document_context and documents[-1] == 0:
                self.report.append(
                    f"{split}: no {conll_score.DOCUMENT} between sentences: the file is one document"
                )
            self._add(split, vocabulary, words, tags, documents)
        if new:
            words = list(self._new_words(new))
            self._add("new", vocabulary, words, None, [0] * len(words))

    def _require_columns(
        self, path: pathlib.Path, sentences: Sequence[conll_score.Sentence], least: int
    ) -> None:
        have = len(sentences[0].rows[0])
        need = max(self._word + 1, self._tag + 1, least)
        if have < need:
            raise UserError(
                f"{path}:{sentences[0].line}: {have} columns, expected at least {need}: a word and "
                "its tag between tabs or spaces"
            )

    def _tags(
        self, split: str, path: pathlib.Path, sentences: Sequence[conll_score.Sentence]
    ) -> list[list[str]] | None:
        """The labels of each sentence, those of entities as BIO; None where there are none."""
        if len(sentences[0].rows[0]) == 1:
            return None
        if self.of_entities:
            conll_score.require_bio(path, sentences, self._tag)
        known, result, moved = set(self.labels), [], 0
        for sentence in sentences:
            given = sentence.column(self._tag)
            tags = list(given)
            if self.of_entities:  # IOB1 has B- only between neighbors of the same type
                for kind, begin, _ in conll_score.entities(given):
                    tags[begin] = f"B-{kind}"
            moved += tags != given
            for i, tag in enumerate(tags):
                if tag not in known:
                    raise UserError(
                        f"{path}:{sentence.line + i}: the label {tag!r} is none of those learned "
                        f"({', '.join(self.labels)[:200]}); mend it, or name all in "
                        "config.task.labels"
                    )
            result.append(tags)
        if moved:
            self.report.append(
                f"{split}: in {moved:,} sentences entities began with I- (IOB1), read as B-"
            )
        return result

    def _new_words(self, source: str) -> Iterator[list[str]]:
        """The words of each line or sentence."""
        path = pathlib.Path(source)
        suffixes = [s.lower() for s in path.suffixes if s.lower() not in compressed.SUFFIXES]
        if source == "-" or (suffixes and suffixes[-1] in (".txt", ".jsonl", ".parquet")):
            for text, _ in texts.read(source, self.config.text_a).texts:
                yield text.split()
        else:
            for sentence in conll_score.read(path):
                if self._word >= len(sentence.rows[0]):
                    raise UserError(f"{path}:{sentence.line}: no column {self._word + 1} for words")
                yield sentence.column(self._word)

    def _add(
        self,
        split: str,
        vocabulary: Vocabulary,
        words: list[list[str]],
        tags: list[list[str]] | None,
        documents: Sequence[int],
    ) -> None:
        """Makes sequences of sentences."""
        room = self.config.tokens - 2
        pieces, cut, unknown = _pieces(vocabulary, words, room)
        index = {label: i for i, label in enumerate(self.labels)}
        tokens, targets, places, several = [], [], [], 0
        # What a sequence may show around the words it is about: the document, or the sentence.
        if self.config.document_context:
            scopes = [
                [i for i, _ in some]
                for _, some in itertools.groupby(enumerate(documents), lambda each: each[1])
            ]
        else:
            scopes = [[i] for i in range(len(words))]
        for scope in scopes:
            around = [pieces[word] for i in scope for word in words[i]]
            begin = np.cumsum([0, *map(len, around)])
            flat = np.array([piece for word in around for piece in word], np.int32)
            done = 0
            for i in scope:
                chunks = _chunks([len(pieces[word]) for word in words[i]], room)
                several += len(chunks) > 1
                at = 0
                for n in chunks:
                    low, high = _surround(begin, done + at, done + at + n, room)
                    sequence = [vocabulary.cls_id, *flat[low:high], vocabulary.sep_id]
                    place = begin[done + at : done + at + n] - low + 1
                    target = np.full(len(sequence), NO_EXAMPLE, np.int32)
                    if tags is not None:
                        target[place] = [index[tag] for tag in tags[i][at : at + n]]
                    tokens.append(np.array(sequence, np.int32))
                    targets.append(target)
                    places.append(place)
                    at += n
                done += len(words[i])
        note = self.report.append
        note(f"{split}: {len(words):,} sentences of {sum(map(len, words)):,} words")
        if several:
            note(f"{split}: {several:,} sentences too long for {room:,} word pieces were divided")
        if cut:
            note(f"{split}: {cut:,} words longer than that lost their end")
        if unknown:
            note(f"{split}: {unknown:,} words without a character that counts read as [UNK]")
        self.splits[split] = Examples(
            tokens, [len(sequence) for sequence in tokens], token_targets={"label": targets}
        )
        self._sentences[split] = _Sentences(words, tags, places)

    def predict(self, split: str, logits: Logits) -> list[np.ndarray]:
        """The probabilities of the labels of each sentence's words; an array [n, C] each."""
        sentences = self._sentences[split]
        own = [each[place] for each, place in zip(logits, sentences.places, strict=True)]
        scores = np.concatenate([np.zeros((0, len(self.labels))), *own])
        weight = np.exp(scores - scores.max(1, keepdims=True))
        edges = np.cumsum([len(words) for words in sentences.words])[:-1]
        return np.split(weight / weight.sum(1, keepdims=True), edges)

    def _predicted_tags(self, probabilities: list[np.ndarray]) -> list[list[str]]:
        return [[self.labels[i] for i in each.argmax(1)] for each in probabilities]

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """`conll_score.score` of the split; nothing where its labels are not known."""
        gold = self._sentences[split].tags
        if gold is None:
            return {}
        predicted = self._predicted_tags(self.predict(split, logits))
        return conll_score.score(gold, predicted, self.of_entities)

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Writes to a folder

        predictions.conll: the word, its label if known, the predicted one; as conlleval reads them.
        probabilities.jsonl: a line a sentence: words, predicted, and by label its probabilities.
        per_type.tsv: `conll_score.table`, where labels are known.
        """
        sentences = self._sentences[split]
        probabilities = self.predict(split, logits)
        predicted = self._predicted_tags(probabilities)
        columns = [sentences.words, *([sentences.tags] if sentences.tags else []), predicted]
        # As conlleval wants it, unless words themselves hold spaces.
        between = "\t" if any(" " in word for words in sentences.words for word in words) else " "
        blocks = (
            "".join(between.join(row) + "\n" for row in zip(*sentence, strict=True))
            for sentence in zip(*columns, strict=True)
        )
        lines = []
        for words, tags, each in zip(sentences.words, predicted, probabilities, strict=True):
            shares = dict(zip(self.labels, each.T.round(6).tolist(), strict=True))
            lines.append({"words": words, "predicted": tags, "probabilities": shares})
        with files.one_line_errors(f"cannot write {folder}"):
            files.write(folder / "predictions.conll", "\n".join(blocks))
            files.write(
                folder / "probabilities.jsonl",
                "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines),
            )
            if sentences.tags is not None:
                counts = conll_score.count(sentences.tags, predicted, self.of_entities)
                files.write(folder / "per_type.tsv", conll_score.table(counts))


def _column(value: str, field: str, default: str, otherwise: int) -> int:
    """Which column a field of the configuration means."""
    if value == default:
        return otherwise
    if value.isdecimal() and int(value) > 0:
        return int(value) - 1
    raise UserError(
        f"config.task.{field}={value!r}: columns of CoNLL files have numbers, 1 the first"
    )


def _paths(config: TaskConfig) -> dict[str, pathlib.Path]:
    """The file of each split there is."""
    if config.data == "tfds":
        raise UserError("config.task.data=tfds: tagging reads files of columns; name their folder")
    paths = {}
    for split, names in _NAMES.items():
        if getattr(config, split):
            paths[split] = pathlib.Path(getattr(config, split))
        elif config.data:
            found = [
                path
                for name in names
                for path in (pathlib.Path(config.data) / f"{name}{end}" for end in ("", ".gz"))
                if path.exists()
            ]
            if found:
                paths[split] = found[0]
    if not paths:
        raise UserError(
            "nothing to read: set config.task.train and config.task.dev to files of columns, or "
            "config.task.data to a folder that holds, e.g., train.txt and valid.txt"
        )
    return paths


def _labels_of(tags: Iterator[str]) -> tuple[str, ...]:
    """All that tags can be, in a fixed order."""
    known = set(tags)
    if not conll_score.are_entities(known):
        return tuple(sorted(known))
    kinds = sorted({tag.partition("-")[2] for tag in known if "-" in tag})
    return (conll_score.OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI"))


def _pieces(
    vocabulary: Vocabulary, words: list[list[str]], most: int
) -> tuple[dict[str, list[int]], int, int]:
    """At least one and at most `most` ids of each word.

    Returns:
        They, and how many words were cut and how many had no pieces at all.
    """
    distinct = list(dict.fromkeys(word for some in words for word in some))
    pieces, cut, unknown = {}, set(), set()
    for word, found in zip(distinct, vocabulary.encode_all(distinct), strict=True):
        if len(found.ids) > most:
            cut.add(word)
        elif not found.ids:
            unknown.add(word)
        pieces[word] = found.ids[:most] or [vocabulary.unk_id]
    flat = [word for some in words for word in some]
    return pieces, sum(word in cut for word in flat), sum(word in unknown for word in flat)


def _chunks(lengths: Sequence[int], room: int) -> list[int]:
    """How many words go into each sequence: few sequences, of about one length."""
    total = sum(lengths)
    if total <= room:
        return [len(lengths)] if lengths else []
    most = -(-total // -(-total // room))
    chunks, size = [0], 0
    for length in lengths:
        if chunks[-1] and size + length > most:
            chunks.append(0)
            size = 0
        chunks[-1] += 1
        size += length
    return chunks


def _surround(begin: np.ndarray, first: int, beyond: int, room: int) -> tuple[int, int]:
    """The pieces to show of a scope: words `first` to `beyond`, and whole words on both sides.

    Both sides get as many, or what one has too few of goes to the other.

    Args:
        begin: where each word begins, and where the last one ends.
        first: word.
        beyond: the word after the last one.
        room: most pieces.
    """
    low, high, end = int(begin[first]), int(begin[beyond]), int(begin[-1])
    spare = room - (high - low)
    left = min(low, max(spare // 2, spare - (end - high)))
    right = min(end - high, spare - left)
    low = int(begin[np.searchsorted(begin, low - left)])
    high = int(begin[np.searchsorted(begin, high + right, side="right") - 1])
    return low, high
