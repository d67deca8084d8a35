"""SQuAD: extractive question answering over windows of a context (run_squad.py).

A context longer than a sequence is split into overlapping windows, `[CLS] question [SEP] window
[SEP]` each; an example is a window. run_squad.py searches for the predicted words in the context
(get_final_text) and, if that fails, extends them to the next spaces. Here the tokenizer keeps the
character offsets of each token, so predictions are always slices of the context.
"""

import copy
import itertools
import json
import pathlib
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from bert_jax.config.schema import TaskConfig
from bert_jax.data.examples import NO_EXAMPLE, Examples
from bert_jax.data.vocabulary import Vocabulary
from bert_jax.errors import UserError
from bert_jax.storage import files
from bert_jax.tasks import squad_score
from bert_jax.tasks.base import NEW, FinetuneDataset, Logits, Prediction, Text
from bert_jax.tasks.squad_score import Question
from bert_jax.tasks.tables import find_files, probabilities

_RELEASES = {"squad1": "v1.1", "squad2": "v2.0"}
_WHITESPACE = " \t\r\n\u202f"  # separates words in run_squad.py


class Candidate(NamedTuple):
    """A possible answer; the text is "" for "unanswerable"."""

    text: str
    start_logit: float
    end_logit: float


class QuestionPrediction(NamedTuple):
    """The prediction for a question.

    Attributes:
        answer: text of the best span; "" if no span is allowed.
        n_best: distinct candidates, best first; for 2.0 including "".
        null_odds: score of "" minus that of `answer`; None for 1.1.
    """

    answer: str
    n_best: list[Candidate]
    null_odds: float | None


class _Asked(NamedTuple):
    """A question and its W windows, which are examples that follow each other.

    Attributes:
        question: the question.
        spans: character offsets of the context's tokens; [n, 2].
        offset: position in each sequence at which its part of the context begins.
        first: index of the first context token of each window; W.
        max_context: range of context tokens with their maximum context in each window; [W, 2].
    """

    question: Question
    spans: np.ndarray
    offset: int
    first: list[int]
    max_context: np.ndarray


class Squad(FinetuneDataset):
    """A question answering dataset, SQuAD 1.1 or 2.0.

    Without `config.name` the data decide whether questions can be unanswerable. `config.data` is a
    folder with train-v1.1.json and dev-v1.1.json (or v2.0).

    Attributes:
        unanswerable: whether "" is a possible prediction (2.0).
        null_threshold: null odds above it predict ""; 0 unless set by `tuned`.
    """

    head, labels, best_by = "span", ("start", "end"), "f1"

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        training: bool = True,
        labels: tuple[str, ...] = (),
        new: str | Sequence[Text] = "",
    ):
        # Besides the question, at least one token of the context, [CLS] and the separators.
        if config.tokens < config.question_tokens + 3 + len(vocabulary.separator_ids):
            raise UserError(
                f"config.task.tokens={config.tokens} leaves no room for a context beside a "
                f"question of {config.question_tokens} tokens: raise it, or lower "
                "config.task.question_tokens"
            )
        self.config, self.report, self.null_threshold = config, [], 0.0
        release = _RELEASES.get(config.name)
        names = {x: (f"{x}-{release}.json",) if release else () for x in ("train", "dev", "test")}
        paths = {} if new else find_files(config, config.data, names)
        if not training and config.name:  # without a name, the training data can decide the version
            paths.pop("train", None)
        questions = {NEW: _new_questions(new)} if new else {}
        for split, path in paths.items():
            questions[split] = squad_score.read(path)
            if split == "train" or (split == "dev" and not labels):
                version = 1 if config.name == "squad1" else None
                squad_score.require_answers(questions[split], path, version)
        labeled = [q for split in ("train", "dev") for q in questions.get(split, ())]
        self.unanswerable = config.name == "squad2" or (
            config.name == "" and any(question.answers == () for question in labeled)
        )
        self.splits = {}
        self._asked: dict[str, list[_Asked]] = {}
        self._labeled: dict[str, bool] = {}  # by split, whether its questions have answers
        for split in questions:
            if training or split != "train":
                self._read(split, questions[split], vocabulary)

    def _read(self, split: str, questions: list[Question], vocabulary: Vocabulary) -> None:
        config = self.config
        sep = np.array([vocabulary.sep_id], np.int32)
        distinct = list(dict.fromkeys(question.context for question in questions))
        contexts = dict(zip(distinct, vocabulary.encode_all(distinct), strict=True))
        encoded_questions = vocabulary.encode_all([question.text for question in questions])
        golds = [question.answers[0].text if question.answers else "" for question in questions]
        # Other tokenizers than BERT's have different ids for the same word after a space and without.
        gold_ids = (
            [None] * len(golds)
            if not vocabulary.is_wordpiece
            else [encoded.ids for encoded in vocabulary.encode_words(golds)]
        )
        # Without unanswerable questions, or if all lists of new or test data are empty, an empty list
        # means that the answers are not known.
        answers = [question.answers for question in questions]
        may_be_empty = self.unanswerable and (split in ("train", "dev") or any(answers))
        labeled = None not in answers and (may_be_empty or all(answers))

        asked, tokens, a_length, targets = [], [], [], []
        num_truncated, dropped, num_multiple = 0, [], 0
        for question, encoded, gold in zip(questions, encoded_questions, gold_ids, strict=True):
            ids, spans = contexts[question.context]
            answer = None
            if labeled and question.answers:
                num_multiple += len(question.answers) > 1
                answer = _find(question, ids, spans, gold)
                if answer is None:
                    dropped.append(question.id)
                    if split == "train":
                        continue
            num_truncated += len(encoded.ids) > config.question_tokens
            question_ids = encoded.ids[: config.question_tokens]
            head = np.array([vocabulary.cls_id, *question_ids, *vocabulary.separator_ids], np.int32)
            starts, ends, max_context = _slide(
                len(ids), config.tokens - len(head) - 1, config.stride_tokens
            )
            for start, end in zip(starts, ends, strict=True):
                tokens.append(np.concatenate([head, ids[start:end], sep]))
                a_length.append(len(head))
                target = (NO_EXAMPLE, NO_EXAMPLE)
                if answer and start <= answer[0] and answer[1] < end:
                    target = tuple(index - start + len(head) for index in answer)
                elif answer or (labeled and not question.answers):
                    target = (0, 0)  # [CLS]
                targets.append(target)
            asked.append(_Asked(question, spans, len(head), starts, max_context))
        if not tokens:
            raise UserError(
                f"config.task.{split}: no question has its answer at answer_start: check the file"
            )

        is_train = split == "train"
        action = "dropped" if is_train else "kept without a loss"
        notes = {
            f"questions, {len(tokens):,} windows": len(asked),
            f"questions cut to {config.question_tokens} tokens": num_truncated,
            "questions have several answers; the first is used": is_train and num_multiple,
            f"questions {action}: their context does not have the answer at answer_start (first: "
            f"{next(iter(dropped), '')!r})": len(dropped),
        }
        self.report += [f"{split}: {n:,} {note}" for note, n in notes.items() if n]
        self.splits[split] = Examples(tokens, a_length, {"label": np.array(targets, np.int32)})
        self._asked[split], self._labeled[split] = asked, labeled

    def predict(self, split: str, logits: Logits) -> dict[str, QuestionPrediction]:
        """Return the n-best answers by question id (run_squad.py, write_predictions)."""
        n_best_size, predictions, remaining = self.config.n_best, {}, iter(logits)
        for asked in self._asked[split]:
            question, windows = asked.question, []
            for i, scores in enumerate(itertools.islice(remaining, len(asked.first))):
                windows.append(self._candidates(asked, i, np.asarray(scores, np.float64)))
            candidates, nulls = map(np.concatenate, zip(*windows, strict=True))
            order = np.argsort(-candidates[:, 2:].sum(1), kind="stable")
            entries: dict[str, Candidate] = {}
            for first, last, start, end in candidates[order].tolist():
                text = _text(question.context, asked.spans, int(first), int(last))
                entries.setdefault(text, Candidate(text, start, end))
                if len(entries) == n_best_size:
                    break
            n_best, odds = list(entries.values()), None
            best = n_best[0] if n_best else Candidate("", 0.0, 0.0)
            if self.unanswerable:
                no_answer = Candidate("", *nulls[nulls.sum(1).argmin()].tolist())
                odds = sum(no_answer[1:]) - sum(best[1:])
                rank = sum(sum(c[1:]) >= sum(no_answer[1:]) for c in n_best)
                n_best.insert(rank, no_answer)
                # As in run_squad.py, "" is added to the n best if it ranks after them, and
                # otherwise counts as one of them.
                n_best = n_best if rank == n_best_size else n_best[:n_best_size]
            predictions[question.id] = QuestionPrediction(best.text, n_best or [best], odds)
        return predictions

    def _candidates(
        self, asked: _Asked, window: int, scores: Float[np.ndarray, "T 2"]
    ) -> tuple[Float[np.ndarray, "N 4"], Float[np.ndarray, "1 2"]]:
        """Return all allowed pairs of one of the best starts and one of the best ends of a window.

        Returns:
            First and last token in the context, and their logits, in the order of run_squad.py, where
            the first of equal candidates wins; and the logits of [CLS], which mean "unanswerable".
        """
        first, (low, high) = asked.first[window], asked.max_context[window]
        order = np.argsort(-scores, axis=0, kind="stable")[: self.config.n_best]
        best = np.take_along_axis(scores, order, 0)
        start, end = (order - asked.offset + first).T
        starts = (start >= low) & (start < high)
        ends = (end >= first) & (order[:, 1] < len(scores) - 1)
        length = end - start[:, None] + 1
        allowed = starts[:, None] & ends & (length > 0) & (length <= self.config.answer_tokens)
        s, e = np.nonzero(allowed)
        return np.stack([start[s], end[e], best[s, 0], best[e, 1]], 1), scores[:1]

    def predictions(self, split: str, logits: Logits) -> list[Prediction]:
        """Return the answers."""
        return [Prediction(x, {}) for x in self.texts(self.predict(split, logits)).values()]

    def tuned(self, dev: Mapping[str, float]) -> "Squad":
        """Return a copy with the threshold tuned on dev (in the result of `score`), if any."""
        if "best_f1_thresh" not in dev:
            return self
        copied = copy.copy(self)
        copied.unanswerable, copied.null_threshold = True, dev["best_f1_thresh"]
        return copied

    def texts(self, predictions: dict[str, QuestionPrediction]) -> dict[str, str]:
        """Return the predicted texts with the threshold applied, as for a prediction file."""
        return {
            name: ""
            if prediction.null_odds is not None and prediction.null_odds > self.null_threshold
            else prediction.answer
            for name, prediction in predictions.items()
        }

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """Return the official metrics of the split, 0 to 100, as in `squad_score.score`.

        For 2.0 also the best thresholds (Devlin et al., section 4.3), searched over answers to
        which no threshold was applied. Empty for a split without answers.
        """
        if not self._labeled[split]:
            return {}
        predictions = self.predict(split, logits)
        questions = [asked.question for asked in self._asked[split]]
        version = 2 if self.unanswerable else 1
        result = squad_score.score(questions, self.texts(predictions), version)
        if self.unanswerable:
            result |= squad_score.best_thresholds(questions, *_without_threshold(predictions))
        return result

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Write prediction files to a folder.

        predictions.json: {id: text}, the format of the leaderboard.
        nbest_predictions.json: {id: [{text, probability, start_logit, end_logit}]}.
        For 2.0 null_odds.json, {id: number}, and answers.json, {id: text}: predictions before the
        threshold. From these two evaluate-v2.0.py finds the same thresholds as `score`.
        """
        predictions = self.predict(split, logits)
        n_best = {}
        for name, prediction in predictions.items():
            scores = np.array([[c.start_logit + c.end_logit for c in prediction.n_best]])
            n_best[name] = [
                {"text": c.text, "probability": p, "start_logit": c[1], "end_logit": c[2]}
                for c, p in zip(prediction.n_best, probabilities(scores)[0].tolist(), strict=True)
            ]
        files.write_json(folder / "predictions.json", self.texts(predictions))
        lines = (f"{json.dumps(name)}: {json.dumps(n_best[name])}" for name in n_best)
        files.write(folder / "nbest_predictions.json", "{\n" + ",\n".join(lines) + "\n}\n")
        if self.unanswerable:
            answers, odds = _without_threshold(predictions)
            files.write_json(folder / "null_odds.json", odds)
            files.write_json(folder / "answers.json", answers)


def _new_questions(source: str | Sequence[Text]) -> list[Question]:
    """Return the questions of a file, or of pairs of a question and a context."""
    if isinstance(source, str):
        return squad_score.read(source)
    for i, text in enumerate(source):
        if isinstance(text, str):
            raise UserError(f"text {i} is no pair: pass pairs of a question and a context")
    return [Question(str(i), text[0], text[1], None) for i, text in enumerate(source)]


def _without_threshold(
    predictions: dict[str, QuestionPrediction],
) -> tuple[dict[str, str], dict[str, float]]:
    """Return the best answers and the null odds."""
    answers = {name: prediction.answer for name, prediction in predictions.items()}
    return answers, {name: prediction.null_odds or 0.0 for name, prediction in predictions.items()}


def _find(
    question: Question, ids: np.ndarray, spans: np.ndarray, answer_ids: np.ndarray | None
) -> tuple[int, int] | None:
    """Return the answer's first and last token in the context, or None if it is not there.

    Without `answer_ids`, return the tokens that overlap the answer's characters. With them, return the
    answer's tokens if the whitespace-separated words that contain the answer have these tokens, else all
    tokens of these words: "1895" in "(1895-1943).", but all of "Japanese" for "Japan"
    (_improve_answer_span).
    """
    assert question.answers
    text, start = question.answers[0]
    stripped = text.lstrip()
    answer_start = begin = start + len(text) - len(stripped)
    answer_end = end = begin + len(stripped.rstrip())
    context = question.context
    if not 0 <= begin < end <= len(context):
        return None
    while begin > 0 and context[begin - 1] not in _WHITESPACE:
        begin -= 1
    while end < len(context) and context[end] not in _WHITESPACE:
        end += 1
    if " ".join(text.split()) not in " ".join(context[begin:end].split()):
        return None
    if answer_ids is None:
        tokens = np.flatnonzero((spans[:, 0] < answer_end) & (spans[:, 1] > answer_start))
        return (int(tokens[0]), int(tokens[-1])) if len(tokens) else None
    first, end_token = np.searchsorted(spans[:, 0], (begin, end)).tolist()
    if first == end_token:
        return None
    n = len(answer_ids)
    matches = [
        i
        for i in range(first, end_token - n + 1 if n else first)
        if np.array_equal(ids[i : i + n], answer_ids)
    ]
    if not matches:
        return first, end_token - 1
    # Tokens may be equal where characters are not, such as two [UNK].
    i = next((i for i in matches if spans[i, 0] == answer_start), matches[0])
    return i, i + n - 1


def _slide(n: int, max_tokens: int, stride: int) -> tuple[list[int], list[int], np.ndarray]:
    """Split `n` tokens into windows of at most `max_tokens` that begin `stride` apart.

    Returns:
        Where the windows begin and end, and the range of tokens [W, 2] with their maximum context
        in each: the window in which the smaller side of a token's context is largest
        (_check_is_max_context).
    """
    starts, ends = [0], [min(max_tokens, n)]
    while ends[-1] < n:
        starts.append(starts[-1] + min(max_tokens, stride))
        ends.append(min(starts[-1] + max_tokens, n))
    if len(starts) == 1:
        return starts, ends, np.array([[0, n]])
    begin, last = np.array(starts)[:, None], np.array(ends)[:, None] - 1
    position = np.arange(n)
    context = np.minimum(position - begin, last - position) + 0.01 * (last + 1 - begin)
    context[(position < begin) | (position > last)] = -1
    # The index of the best window does not decrease with the position, so each window's tokens are contiguous.
    return (
        starts,
        ends,
        np.searchsorted(context.argmax(0), np.arange(len(starts))[:, None] + [0, 1]),
    )


def _text(context: str, spans: np.ndarray, first: int, last: int) -> str:
    """Return the text of a span of tokens."""
    begin, end = int(spans[first, 0]), int(spans[last, 1])
    # Accents that the tokenizer strips belong to no token; keep them with the letter before.
    while end < len(context) and unicodedata.category(context[end]) == "Mn":
        end += 1
    return context[begin:end]
