"""SQuAD: the answer to a question as a span of a text, seen through windows (run_squad.py).

A text longer than a sequence is seen through overlapping windows, `[CLS] question [SEP] window
[SEP]` each; an example is a window. Unlike run_squad.py, which looks for the predicted words in the
text again (get_final_text) and where it fails takes everything up to the next spaces, the tokenizer
remembers which characters each token came from: what is predicted is always a slice of the text.
"""

import collections
import copy
import dataclasses
import json
import pathlib
import unicodedata
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax import files
from bert_jax.config import TaskConfig
from bert_jax.data.examples import NO_EXAMPLE, Examples
from bert_jax.data.wordpiece import Vocabulary
from bert_jax.errors import UserError
from bert_jax.tasks import squad_score
from bert_jax.tasks.problem import Logits
from bert_jax.tasks.squad_score import Question

_RELEASES = {"squad1": "v1.1", "squad2": "v2.0"}
_WHITESPACE = " \t\r\n\u202f"  # what run_squad.py takes for the ends of words


class Candidate(NamedTuple):
    """A possible answer; the text is "" for "cannot be answered"."""

    text: str
    start_logit: float
    end_logit: float


class Prediction(NamedTuple):
    """What is predicted for a question.

    Attributes:
        answer: the best one that is a span; "" where no span is allowed.
        n_best: the best first, all different; for 2.0 with "" among them.
        null_odds: the score of "" minus that of `answer`; None for 1.1.
    """

    answer: str
    n_best: list[Candidate]
    null_odds: float | None


@dataclasses.dataclass
class _Windows:
    """What leads from the E windows of a split back to its Q questions.

    Attributes:
        questions: in the order of the windows.
        labelled: whether there are answers.
        spans: of each question, where in the context its tokens begin and end; [n, 2].
        question: of each window; [E].
        at: where in the sequence the window's part of the context begins; [E].
        first: which token of the context that is; [E].
        own: the range of the context's tokens that no other window sees more around; [E, 2].
    """

    questions: list[Question]
    labelled: bool
    spans: list[np.ndarray]
    question: np.ndarray
    at: np.ndarray
    first: np.ndarray
    own: np.ndarray


class Squad:
    """Questions on texts, SQuAD 1.1 or 2.0.

    Attributes:
        unanswerable: whether "" is a possible prediction (2.0).
        null_threshold: with odds of no answer above it, "" is predicted; 0 until it is `tuned`.
    """

    head, labels, objective, best_by = "span", ("start", "end"), "class", "f1"

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
            config: name "squad1" or "squad2", or "" where the answers decide whether there is
                always one; with `data` a folder of train-v1.1.json, dev-v1.1.json (v2.0), or the
                files one by one.
            vocabulary: of the model.
            splits: those wanted; None for all there are.
            labels: of a fine-tuned model, always the same; with them only training data must have
                answers.
            new: a file to predict on; the only split then is "new".

        Raises:
            UserError: no such file or split; not SQuAD's layout; sequences too short.
        """
        if config.tokens < config.question_tokens + 4:
            raise UserError(
                f"config.task.tokens={config.tokens} leaves no room for a text beside a question "
                f"of {config.question_tokens}; raise it or lower config.task.question_tokens"
            )
        for name in ("stride_tokens", "question_tokens", "answer_tokens", "n_best"):
            if getattr(config, name) < 1:
                raise UserError(f"config.task.{name}={getattr(config, name)} must be at least 1")
        self.config, self.report, self.null_threshold = config, [], 0.0
        paths = {"new": pathlib.Path(new)} if new else _paths(config, splits)
        questions = {}
        for split, path in paths.items():
            questions[split] = squad_score.read(path)
            if split == "train" or (split == "dev" and not labels):
                version = 1 if config.name == "squad1" else None
                squad_score.require_answers(questions[split], path, version)
        known = [q for split in questions if split in ("train", "dev") for q in questions[split]]
        self.unanswerable = config.name == "squad2" or (
            config.name == "" and any(question.answers == () for question in known)
        )
        self.splits: dict[str, Examples] = {}
        self._windows: dict[str, _Windows] = {}
        for split in questions:
            self.splits[split], self._windows[split] = self._read(
                split, questions[split], vocabulary
            )

    def _read(
        self, split: str, questions: list[Question], vocabulary: Vocabulary
    ) -> tuple[Examples, _Windows]:
        config = self.config
        sep = np.array([vocabulary.sep_id], np.int32)
        contexts = {}
        distinct = list(dict.fromkeys(question.context for question in questions))
        for text, found in zip(distinct, vocabulary.encode_all(distinct), strict=True):
            spans = np.array(found.offsets, np.int32).reshape(-1, 2)
            contexts[text] = np.array(found.ids, np.int32), spans
        asked = vocabulary.encode_all([question.text for question in questions])
        golds = [question.answers[0].text if question.answers else "" for question in questions]
        gold_ids = vocabulary.encode_all(golds)
        # An empty list of answers says something only where others are not empty.
        given = [question.answers for question in questions]
        labelled = None not in given and (any if self.unanswerable else all)(given)

        windows = collections.defaultdict(list)
        tokens, a_length, targets = [], [], []
        cut, lost, several = 0, [], 0
        for question, asked_, gold in zip(questions, asked, gold_ids, strict=True):
            asked_ids = asked_.ids
            ids, spans = contexts[question.context]
            answer = None
            if labelled and question.answers:
                several += len(question.answers) > 1
                answer = _find(question, ids, spans, gold.ids)
                if answer is None:
                    lost.append(question.id)
                    if split == "train":
                        continue
            cut += len(asked_ids) > config.question_tokens
            asked_ids = asked_ids[: config.question_tokens]
            head = np.array([vocabulary.cls_id, *asked_ids, vocabulary.sep_id], np.int32)
            starts, ends, own = _slide(
                len(ids), config.tokens - len(head) - 1, config.stride_tokens
            )
            for start, end in zip(starts, ends, strict=True):
                tokens.append(np.concatenate([head, ids[start:end], sep]))
                a_length.append(len(head))
                target = (NO_EXAMPLE, NO_EXAMPLE)
                if answer and start <= answer[0] and answer[1] < end:
                    target = tuple(place - start + len(head) for place in answer)
                elif answer or (labelled and not question.answers):
                    target = (0, 0)  # [CLS]
                targets.append(target)
                windows["question"].append(len(windows["questions"]))
                windows["at"].append(len(head))
                windows["first"].append(start)
            windows["own"].extend(own)
            windows["questions"].append(question)
            windows["spans"].append(spans)
        if not tokens:
            raise UserError(f"config.task.{split}: no question has its answer where it says it is")

        note = self.report.append
        note(f"{split}: {len(windows['questions']):,} questions, {len(tokens):,} windows")
        if cut:
            note(f"{split}: {cut:,} questions cut to {config.question_tokens} tokens")
        if split == "train" and several:
            note(f"{split}: {several:,} questions have several answers; the first is learned")
        if lost:
            what = "dropped" if split == "train" else "kept, without a loss"
            note(
                f"{split}: {len(lost):,} questions {what}, for their answer is not where it is said "
                f"to be in the context (the first: {lost[0]!r})"
            )
        examples = Examples(tokens, a_length, {"label": np.array(targets, np.int32)})
        return examples, _Windows(
            questions=windows["questions"],
            labelled=bool(labelled),
            spans=windows["spans"],
            question=np.array(windows["question"]),
            at=np.array(windows["at"]),
            first=np.array(windows["first"]),
            own=np.array(windows["own"]),
        )

    def predict(self, split: str, logits: Logits) -> dict[str, Prediction]:
        """The n-best answers to each question, by its id (run_squad.py, write_predictions)."""
        windows, most = self._windows[split], self.config.n_best
        found = _candidates(windows, logits, most, self.config.answer_tokens)
        score = found["start_logit"] + found["end_logit"]
        whose = windows.question[found["window"]]
        edges = np.searchsorted(whose, np.arange(len(windows.questions) + 1))
        begin = windows.first[found["window"]] - windows.at[found["window"]]
        first, last = begin + found["start"], begin + found["end"]
        null = np.array([each[0] for each in logits], np.float64).reshape(-1, 2)
        seen_by = np.searchsorted(windows.question, np.arange(len(windows.questions) + 1))

        predictions = {}
        for i, question in enumerate(windows.questions):
            low, high = edges[i], edges[i + 1]
            order = low + np.argsort(-score[low:high], kind="stable")
            entries: dict[str, Candidate] = {}
            spans = zip(first[order].tolist(), last[order].tolist(), strict=True)
            for j, (from_token, to_token) in zip(order.tolist(), spans, strict=True):
                text = _text(question.context, windows.spans[i], from_token, to_token)
                if text not in entries:
                    start, end = float(found["start_logit"][j]), float(found["end_logit"][j])
                    entries[text] = Candidate(text, start, end)
                    if len(entries) == most:
                        break
            n_best, odds = list(entries.values()), None
            best = n_best[0] if n_best else Candidate("", 0.0, 0.0)
            if self.unanswerable:
                of_windows = null[seen_by[i] : seen_by[i + 1]]
                least = of_windows[of_windows.sum(1).argmin()]
                silence = Candidate("", float(least[0]), float(least[1]))
                odds = sum(silence[1:]) - sum(best[1:])
                place = sum(sum(c[1:]) >= sum(silence[1:]) for c in n_best)
                n_best.insert(place, silence)
                # As there: past the n-th it is still shown, otherwise it counts as one of n.
                n_best = n_best if place == most else n_best[:most]
            predictions[question.id] = Prediction(best.text, n_best or [best], odds)
        return predictions

    def tuned(self, dev: dict[str, float]) -> "Squad":
        """The same with what was found best on the dev set (`score`): the threshold, if any."""
        if "best_f1_thresh" not in dev:
            return self
        copied = copy.copy(self)
        copied.unanswerable, copied.null_threshold = True, dev["best_f1_thresh"]
        return copied

    def _texts(self, predictions: dict[str, Prediction]) -> dict[str, str]:
        """What goes into a prediction file."""
        return {
            name: ""
            if found.null_odds is not None and found.null_odds > self.null_threshold
            else found.answer
            for name, found in predictions.items()
        }

    def score(self, split: str, logits: Logits) -> dict[str, float]:
        """The official scores of the split, 0 to 100, as `squad_score.score` gives them.

        For 2.0 also the best thresholds (Devlin et al., section 4.3), searched over answers that
        no threshold has yet replaced by "". Nothing for a split without answers.
        """
        windows = self._windows[split]
        if not windows.labelled:
            return {}
        predictions = self.predict(split, logits)
        version = 2 if self.unanswerable else 1
        result = squad_score.score(windows.questions, self._texts(predictions), version)
        if self.unanswerable:
            result |= squad_score.best_thresholds(
                windows.questions,
                {name: found.answer for name, found in predictions.items()},
                {name: found.null_odds for name, found in predictions.items()},
            )
        return result

    def write(self, split: str, logits: Logits, folder: pathlib.Path) -> None:
        """Writes to a folder

        predictions.json: {id: text}, as the leaderboard takes it.
        nbest_predictions.json: {id: [{text, probability, start_logit, end_logit}]}.
        For 2.0 null_odds.json, {id: number}, and answers.json, {id: text}: predictions before any
        threshold. evaluate-v2.0.py finds with these two the thresholds that `score` finds.
        """
        predictions = self.predict(split, logits)
        n_best = {}
        for name, found in predictions.items():
            score = np.array([c.start_logit + c.end_logit for c in found.n_best])
            weight = np.exp(score - score.max())
            n_best[name] = [
                {"text": c.text, "probability": p, "start_logit": c[1], "end_logit": c[2]}
                for c, p in zip(found.n_best, (weight / weight.sum()).tolist(), strict=True)
            ]
        with files.one_line_errors(f"cannot write {folder}"):
            files.write_json(folder / "predictions.json", self._texts(predictions))
            lines = (f"{json.dumps(name)}: {json.dumps(n_best[name])}" for name in n_best)
            files.write(folder / "nbest_predictions.json", "{\n" + ",\n".join(lines) + "\n}\n")
            if self.unanswerable:
                odds = {name: found.null_odds for name, found in predictions.items()}
                files.write_json(folder / "null_odds.json", odds)
                answers = {name: found.answer for name, found in predictions.items()}
                files.write_json(folder / "answers.json", answers)


def _paths(config: TaskConfig, splits: Collection[str] | None) -> dict[str, pathlib.Path]:
    """The file of each split wanted."""
    if config.data == "tfds":
        raise UserError(
            "config.task.data=tfds: SQuAD is read from its own JSON files; name their folder, or "
            "set config.task.train and config.task.dev"
        )
    paths = {}
    for split in ("train", "dev", "test"):
        if getattr(config, split):
            paths[split] = pathlib.Path(getattr(config, split))
        elif config.data and config.name in _RELEASES:
            name = f"{split}-{_RELEASES[config.name]}.json"
            for path in (pathlib.Path(config.data) / f"{name}{end}" for end in ("", ".gz")):
                if path.exists():
                    paths.setdefault(split, path)
    for split in splits if splits is not None else ():
        if split not in paths:
            raise UserError(
                f"no file for the split {split!r}: set config.task.{split}, or config.task.name "
                "and config.task.data to a folder that holds, e.g., dev-v1.1.json"
            )
    if not paths:
        raise UserError(
            "nothing to read: set config.task.train and config.task.dev to SQuAD's JSON files, or "
            "config.task.name and config.task.data to a folder that holds, e.g., train-v1.1.json"
        )
    return {s: path for s, path in paths.items() if splits is None or s in splits}


def _find(
    question: Question, ids: np.ndarray, spans: np.ndarray, answer_ids: Sequence[int]
) -> tuple[int, int] | None:
    """First and last token of the answer within its context; None where it is not there.

    The words between spaces that hold it, and among their tokens, if they occur, the answer's own:
    "1895" within "(1895-1943)." but all of "Japanese" for "Japan" (_improve_answer_span).
    """
    text, start = question.answers[0]
    stripped = text.lstrip()
    begin = start + len(text) - len(stripped)
    end = begin + len(stripped.rstrip())
    context = question.context
    if not 0 <= begin < end <= len(context):
        return None
    while begin > 0 and context[begin - 1] not in _WHITESPACE:
        begin -= 1
    while end < len(context) and context[end] not in _WHITESPACE:
        end += 1
    if " ".join(text.split()) not in " ".join(context[begin:end].split()):
        return None
    first, beyond = np.searchsorted(spans[:, 0], (begin, end)).tolist()
    if first == beyond:
        return None
    n = len(answer_ids)
    for i in range(first, beyond - n + 1 if n else first):
        if np.array_equal(ids[i : i + n], answer_ids):
            return i, i + n - 1
    return first, beyond - 1


def _slide(n: int, room: int, stride: int) -> tuple[list[int], list[int], np.ndarray]:
    """Windows of at most `room` of `n` tokens that begin `stride` apart.

    Returns:
        Where they begin and end, and the range of tokens [W, 2] of which each window sees most: of
        a token in several, the one with the most on its poorer side (_check_is_max_context).
    """
    starts, ends = [0], [min(room, n)]
    while ends[-1] < n:
        starts.append(starts[-1] + min(room, stride))
        ends.append(min(starts[-1] + room, n))
    if len(starts) == 1:
        return starts, ends, np.array([[0, n]])
    begin, last = np.array(starts)[:, None], np.array(ends)[:, None] - 1
    place = np.arange(n)
    context = np.minimum(place - begin, last - place) + 0.01 * (last + 1 - begin)
    context[(place < begin) | (place > last)] = -1
    # Later windows win later tokens, so that each window's are next to each other.
    return (
        starts,
        ends,
        np.searchsorted(context.argmax(0), np.arange(len(starts))[:, None] + [0, 1]),
    )


def _candidates(
    windows: _Windows, logits: Logits, n_best: int, answer_tokens: int
) -> dict[str, np.ndarray]:
    """All allowed pairs of one of the best starts and one of the best ends of a window.

    Returns:
        window, start, end (places in its sequence), start_logit, end_logit, an array [N] each;
        ordered by window, then as in run_squad.py, for the first of equal ones wins.
    """
    parts = []
    for base in range(0, len(logits), 1024):
        some = logits[base : base + 1024]
        lengths = np.array([len(each) for each in some])
        scores = np.full((len(some), lengths.max(), 2), -np.inf)
        for i, each in enumerate(some):
            scores[i, : len(each)] = each
        order = np.argsort(-scores, axis=1, kind="stable")[:, :n_best]  # [w, k, 2]
        best = np.take_along_axis(scores, order, 1)
        where = slice(base, base + len(some))
        at = windows.at[where, None]
        start, end = order[..., 0], order[..., 1]
        own = windows.own[where] + (at - windows.first[where, None])
        starts = (start >= own[:, :1]) & (start < own[:, 1:])
        ends = (end >= at) & (end < lengths[:, None] - 1)
        length = end[:, None, :] - start[:, :, None] + 1
        allowed = starts[:, :, None] & ends[:, None, :] & (length > 0) & (length <= answer_tokens)
        w, s, e = np.nonzero(allowed)
        parts.append((base + w, start[w, s], end[w, e], best[w, s, 0], best[w, e, 1]))
    names = ("window", "start", "end", "start_logit", "end_logit")
    if not parts:
        return {name: np.zeros(0, np.int64) for name in names}
    return dict(zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=True))


def _text(context: str, spans: np.ndarray, first: int, last: int) -> str:
    """The characters of a span of tokens."""
    begin, end = int(spans[first, 0]), int(spans[last, 1])
    # An accent that the vocabulary strips is no part of a token, but of the letter before it.
    while end < len(context) and unicodedata.category(context[end]) == "Mn":
        end += 1
    return context[begin:end]
