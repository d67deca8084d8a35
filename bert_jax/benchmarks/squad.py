"""SQuAD: extractive question answering over windows of a context (run_squad.py).

A context longer than a sequence is split into overlapping windows, `[CLS] question [SEP] window
[SEP]` each; an example is a window. run_squad.py searches for the predicted words in the context
(get_final_text) and, if that fails, extends them to the next spaces. Here the tokenizer keeps the
character offsets of each token, so predictions are always slices of the context.
"""

import collections
import copy
import dataclasses
import json
import pathlib
import unicodedata
from typing import NamedTuple

import numpy as np

from bert_jax import files
from bert_jax.benchmarks import squad_score
from bert_jax.benchmarks.base import Logits
from bert_jax.benchmarks.squad_score import Question
from bert_jax.benchmarks.tables import existing
from bert_jax.config import TaskConfig
from bert_jax.data.examples import NO_EXAMPLE, Examples
from bert_jax.data.vocabulary import TokenizerVocabulary
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError

_RELEASES = {"squad1": "v1.1", "squad2": "v2.0"}
_WHITESPACE = " \t\r\n\u202f"  # separates words in run_squad.py


class Candidate(NamedTuple):
    """A possible answer; the text is "" for "unanswerable"."""

    text: str
    start_logit: float
    end_logit: float


class Prediction(NamedTuple):
    """The prediction for a question.

    Attributes:
        answer: text of the best span; "" if no span is allowed.
        n_best: distinct candidates, best first; for 2.0 including "".
        null_odds: score of "" minus that of `answer`; None for 1.1.
    """

    answer: str
    n_best: list[Candidate]
    null_odds: float | None


@dataclasses.dataclass
class _Windows:
    """Mapping from the E windows of a split to its Q questions.

    Attributes:
        questions: questions in the order of the windows.
        labeled: whether the questions have answers.
        spans: for each question, character offsets of its context's tokens; [n, 2].
        question: index of each window's question; [E].
        offset: position in the sequence at which the window's part of the context begins; [E].
        first: index of the first context token in the window; [E].
        max_context: range of context tokens with their maximum context in this window; [E, 2].
    """

    questions: list[Question]
    labeled: bool
    spans: list[np.ndarray]
    question: np.ndarray
    offset: np.ndarray
    first: np.ndarray
    max_context: np.ndarray


class Squad:
    """A question answering `FinetuneDataset`, SQuAD 1.1 or 2.0.

    Attributes:
        unanswerable: whether "" is a possible prediction (2.0).
        null_threshold: null odds above it predict ""; 0 unless set by `tuned`.
    """

    head, labels, objective, best_by = "span", ("start", "end"), "class", "f1"

    def __init__(
        self,
        config: TaskConfig,
        vocabulary: Vocabulary,
        training: bool = True,
        labels: tuple[str, ...] = (),
        new: str = "",
    ):
        """Read and tokenize the data.

        Args:
            config: the task. `name` is "squad1", "squad2" or "", in which case the data decide
                whether questions can be unanswerable. `data` is a folder with train-v1.1.json and
                dev-v1.1.json (or v2.0); `train`, `dev` and `test` name single files.
            vocabulary: the model's vocabulary.
            training: whether to read the training data, which an evaluation does not need.
            labels: labels of a fine-tuned model, with which only training data need answers.
            new: a file to predict on, as the only split, "new".
        """
        # Besides the question, at least one token of the context, [CLS] and the separators.
        if config.tokens < config.question_tokens + 3 + len(vocabulary.separator_ids):
            raise UserError(
                f"config.task.tokens={config.tokens} leaves no room for a context beside a "
                f"question of {config.question_tokens} tokens: raise it, or lower "
                "config.task.question_tokens"
            )
        for name in ("stride_tokens", "question_tokens", "answer_tokens", "n_best"):
            if getattr(config, name) < 1:
                raise UserError(f"config.task.{name}={getattr(config, name)} must be at least 1")
        self.config, self.report, self.null_threshold = config, [], 0.0
        paths = {"new": pathlib.Path(new)} if new else _paths(config)
        if not training and config.name:  # without a name, the training data can decide the version
            paths.pop("train", None)
        questions = {}
        for split, path in paths.items():
            questions[split] = squad_score.read(path)
            if split == "train" or (split == "dev" and not labels):
                version = 1 if config.name == "squad1" else None
                squad_score.require_answers(questions[split], path, version)
        labeled_questions = [
            q for split in questions if split in ("train", "dev") for q in questions[split]
        ]
        self.unanswerable = config.name == "squad2" or (
            config.name == "" and any(question.answers == () for question in labeled_questions)
        )
        self.splits: dict[str, Examples] = {}
        self._windows: dict[str, _Windows] = {}
        for split in questions:
            if training or split != "train":
                self.splits[split], self._windows[split] = self._read(
                    split, questions[split], vocabulary
                )

    def _read(
        self, split: str, questions: list[Question], vocabulary: Vocabulary
    ) -> tuple[Examples, _Windows]:
        config = self.config
        sep = np.array([vocabulary.sep_id], np.int32)
        distinct = list(dict.fromkeys(question.context for question in questions))
        contexts = dict(zip(distinct, vocabulary.encode_all(distinct), strict=True))
        encoded_questions = vocabulary.encode_all([question.text for question in questions])
        golds = [question.answers[0].text if question.answers else "" for question in questions]
        # Other tokenizers than BERT's have different ids for the same word after a space and without.
        gold_ids = (
            [None] * len(golds)
            if isinstance(vocabulary, TokenizerVocabulary)
            else [encoded.ids for encoded in vocabulary.encode_words(golds)]
        )
        # Without unanswerable questions, or if all lists of new or test data are empty, an empty list
        # means that the answers are not known.
        answers = [question.answers for question in questions]
        may_be_empty = self.unanswerable and (split in ("train", "dev") or any(answers))
        labeled = None not in answers and (may_be_empty or all(answers))

        windows = collections.defaultdict(list)
        tokens, a_length, targets = [], [], []
        num_truncated, dropped, num_multiple = 0, [], 0
        for question, encoded, gold in zip(questions, encoded_questions, gold_ids, strict=True):
            question_ids = encoded.ids
            ids, spans = contexts[question.context]
            answer = None
            if labeled and question.answers:
                num_multiple += len(question.answers) > 1
                answer = _find(question, ids, spans, gold)
                if answer is None:
                    dropped.append(question.id)
                    if split == "train":
                        continue
            num_truncated += len(question_ids) > config.question_tokens
            question_ids = question_ids[: config.question_tokens]
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
                windows["question"].append(len(windows["questions"]))
                windows["offset"].append(len(head))
                windows["first"].append(start)
            windows["max_context"].extend(max_context)
            windows["questions"].append(question)
            windows["spans"].append(spans)
        if not tokens:
            raise UserError(
                f"config.task.{split}: no question has its answer at answer_start: check the file"
            )

        note = self.report.append
        note(f"{split}: {len(windows['questions']):,} questions, {len(tokens):,} windows")
        if num_truncated:
            note(f"{split}: {num_truncated:,} questions cut to {config.question_tokens} tokens")
        if split == "train" and num_multiple:
            note(f"{split}: {num_multiple:,} questions have several answers; the first is used")
        if dropped:
            action = "dropped" if split == "train" else "kept without a loss"
            note(
                f"{split}: {len(dropped):,} questions {action}: their context does not have the "
                f"answer at answer_start (first: {dropped[0]!r})"
            )
        examples = Examples(tokens, a_length, {"label": np.array(targets, np.int32)})
        return examples, _Windows(
            questions=windows["questions"],
            labeled=labeled,
            spans=windows["spans"],
            question=np.array(windows["question"]),
            offset=np.array(windows["offset"]),
            first=np.array(windows["first"]),
            max_context=np.array(windows["max_context"]),
        )

    def predict(self, split: str, logits: Logits) -> dict[str, Prediction]:
        """Return the n-best answers by question id (run_squad.py, write_predictions)."""
        windows, n_best_size = self._windows[split], self.config.n_best
        candidates = _candidates(windows, logits, n_best_size, self.config.answer_tokens)
        score = candidates["start_logit"] + candidates["end_logit"]
        question_index = windows.question[candidates["window"]]
        edges = np.searchsorted(question_index, np.arange(len(windows.questions) + 1))
        begin = windows.first[candidates["window"]] - windows.offset[candidates["window"]]
        first, last = begin + candidates["start"], begin + candidates["end"]
        null = np.array([x[0] for x in logits], np.float64).reshape(-1, 2)
        window_edges = np.searchsorted(windows.question, np.arange(len(windows.questions) + 1))

        predictions = {}
        for i, question in enumerate(windows.questions):
            low, high = edges[i], edges[i + 1]
            order = low + np.argsort(-score[low:high], kind="stable")
            entries: dict[str, Candidate] = {}
            spans = zip(first[order].tolist(), last[order].tolist(), strict=True)
            for j, (from_token, to_token) in zip(order.tolist(), spans, strict=True):
                text = _text(question.context, windows.spans[i], from_token, to_token)
                if text not in entries:
                    start, end = (
                        float(candidates["start_logit"][j]),
                        float(candidates["end_logit"][j]),
                    )
                    entries[text] = Candidate(text, start, end)
                    if len(entries) == n_best_size:
                        break
            n_best, odds = list(entries.values()), None
            best = n_best[0] if n_best else Candidate("", 0.0, 0.0)
            if self.unanswerable:
                question_null = null[window_edges[i] : window_edges[i + 1]]
                min_null = question_null[question_null.sum(1).argmin()]
                no_answer = Candidate("", float(min_null[0]), float(min_null[1]))
                odds = sum(no_answer[1:]) - sum(best[1:])
                rank = sum(sum(c[1:]) >= sum(no_answer[1:]) for c in n_best)
                n_best.insert(rank, no_answer)
                # As in run_squad.py, "" is added to the n best if it ranks after them, and
                # otherwise counts as one of them.
                n_best = n_best if rank == n_best_size else n_best[:n_best_size]
            predictions[question.id] = Prediction(best.text, n_best or [best], odds)
        return predictions

    def tuned(self, dev: dict[str, float]) -> "Squad":
        """Return a copy with the threshold tuned on dev (in the result of `score`), if any."""
        if "best_f1_thresh" not in dev:
            return self
        copied = copy.copy(self)
        copied.unanswerable, copied.null_threshold = True, dev["best_f1_thresh"]
        return copied

    def _texts(self, predictions: dict[str, Prediction]) -> dict[str, str]:
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
        windows = self._windows[split]
        if not windows.labeled:
            return {}
        predictions = self.predict(split, logits)
        version = 2 if self.unanswerable else 1
        result = squad_score.score(windows.questions, self._texts(predictions), version)
        if self.unanswerable:
            result |= squad_score.best_thresholds(
                windows.questions,
                {name: prediction.answer for name, prediction in predictions.items()},
                {name: prediction.null_odds or 0.0 for name, prediction in predictions.items()},
            )
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
            score = np.array([c.start_logit + c.end_logit for c in prediction.n_best])
            exps = np.exp(score - score.max())
            n_best[name] = [
                {"text": c.text, "probability": p, "start_logit": c[1], "end_logit": c[2]}
                for c, p in zip(prediction.n_best, (exps / exps.sum()).tolist(), strict=True)
            ]
        with files.one_line_errors(f"cannot write {folder}"):
            files.write_json(folder / "predictions.json", self._texts(predictions))
            lines = (f"{json.dumps(name)}: {json.dumps(n_best[name])}" for name in n_best)
            files.write(folder / "nbest_predictions.json", "{\n" + ",\n".join(lines) + "\n}\n")
            if self.unanswerable:
                odds = {
                    name: prediction.null_odds or 0.0 for name, prediction in predictions.items()
                }
                files.write_json(folder / "null_odds.json", odds)
                answers = {name: prediction.answer for name, prediction in predictions.items()}
                files.write_json(folder / "answers.json", answers)


def _paths(config: TaskConfig) -> dict[str, pathlib.Path]:
    """Return the path of each split that has a file."""
    if config.data == "tfds":
        raise UserError(
            "config.task.data=tfds: SQuAD is read from JSON files; set config.task.data to their "
            "folder, or config.task.train and config.task.dev"
        )
    paths = {}
    for split in ("train", "dev", "test"):
        if getattr(config, split):
            paths[split] = pathlib.Path(getattr(config, split))
        elif config.data and config.name in _RELEASES:
            name = f"{split}-{_RELEASES[config.name]}.json"
            if path := existing(pathlib.Path(config.data) / name):
                paths[split] = pathlib.Path(path)
    if not paths:
        raise UserError(
            "no data: set config.task.train and config.task.dev to SQuAD's JSON files, or "
            "config.task.name and config.task.data to a folder with, e.g., train-v1.1.json"
        )
    return paths


def _find(
    question: Question, ids: np.ndarray, spans: np.ndarray, answer_ids: np.ndarray | None
) -> tuple[int, int] | None:
    """Return the answer's first and last token in the context, or None if it is not there.

    Without `answer_ids`, the tokens that contain its characters. With them, the span is that of the answer's tokens if they occur in the whitespace-separated words that
    contain the answer, else all of these words: "1895" in "(1895-1943).", but all of "Japanese" for
    "Japan" (_improve_answer_span).
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
    # The best window never decreases along the tokens, so each window's tokens are contiguous.
    return (
        starts,
        ends,
        np.searchsorted(context.argmax(0), np.arange(len(starts))[:, None] + [0, 1]),
    )


def _candidates(
    windows: _Windows, logits: Logits, n_best: int, answer_tokens: int
) -> dict[str, np.ndarray]:
    """Return all allowed pairs of one of the best starts and one of the best ends of a window.

    Returns:
        window, start, end (positions in its sequence), start_logit, end_logit, an array [N] each;
        ordered by window and then as in run_squad.py, where the first of equal candidates wins.
    """
    parts = []
    for base in range(0, len(logits), 1024):
        chunk = logits[base : base + 1024]
        lengths = np.array([len(x) for x in chunk])
        scores = np.full((len(chunk), lengths.max(), 2), -np.inf)
        for i, x in enumerate(chunk):
            scores[i, : len(x)] = x
        order = np.argsort(-scores, axis=1, kind="stable")[:, :n_best]  # [w, k, 2]
        best = np.take_along_axis(scores, order, 1)
        where = slice(base, base + len(chunk))
        offset = windows.offset[where, None]
        start, end = order[..., 0], order[..., 1]
        max_context = windows.max_context[where] + (offset - windows.first[where, None])
        starts = (start >= max_context[:, :1]) & (start < max_context[:, 1:])
        ends = (end >= offset) & (end < lengths[:, None] - 1)
        length = end[:, None, :] - start[:, :, None] + 1
        allowed = starts[:, :, None] & ends[:, None, :] & (length > 0) & (length <= answer_tokens)
        w, s, e = np.nonzero(allowed)
        parts.append((base + w, start[w, s], end[w, e], best[w, s, 0], best[w, e, 1]))
    names = ("window", "start", "end", "start_logit", "end_logit")
    if not parts:
        return {name: np.zeros(0, np.int64) for name in names}
    return dict(zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=True))


def _text(context: str, spans: np.ndarray, first: int, last: int) -> str:
    """Return the text of a span of tokens."""
    begin, end = int(spans[first, 0]), int(spans[last, 1])
    # Accents that the tokenizer strips belong to no token; keep them with the letter before.
    while end < len(context) and unicodedata.category(context[end]) == "Mn":
        end += 1
    return context[begin:end]
