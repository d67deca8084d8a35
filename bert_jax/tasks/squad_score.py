"""SQuAD's files and its official scores (evaluate-v1.1.py, evaluate-v2.0.py).

The two differ in what no answer means. 1.1 knows none: a missing prediction counts as wrong, and F1
is 0 where nothing is left of an answer but articles and punctuation. 2.0 takes "" for "cannot be
answered" and can look for the threshold that decides so best.
"""

import collections
import json
import pathlib
import re
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data.compressed import DATA_BYTES, damage, decompressed, whole
from bert_jax.errors import UserError

# What evaluate-v2.0.py takes where it is given no other: odds above it mean "no answer".
OFFICIAL_THRESHOLD = 1.0
_LARGEST = sys.float_info.max  # JSON may hold whole numbers of any size


class Answer(NamedTuple):
    """What somebody took for the answer.

    Attributes:
        text: as it stands in the context.
        start: at which of its characters.
    """

    text: str
    start: int


class Question(NamedTuple):
    """A question about a text.

    Attributes:
        id: its name in prediction files.
        text: the question.
        context: the text.
        answers: none for what cannot be answered (2.0); None where the file does not say.
    """

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...] | None


def read(path: str | pathlib.Path) -> list[Question]:
    """The questions of a SQuAD file, 1.1 or 2.0, compressed or not, with answers or without.

    Raises:
        UserError: not such a file; names the question, or the place of one without a name.
    """
    questions: dict[str, Question] = {}
    for i, article in enumerate(_get(_json(path), "data", list, str(path))):
        paragraphs = _get(article, "paragraphs", list, f"{path}: data[{i}]")
        for j, paragraph in enumerate(paragraphs):
            place = f"{path}: data[{i}].paragraphs[{j}]"
            context = _whole(_get(paragraph, "context", str, place))
            for k, found in enumerate(_get(paragraph, "qas", list, place)):
                name = _whole(_get(found, "id", str, f"{place}.qas[{k}]"))
                if name in questions:
                    raise UserError(
                        f"{path}: two questions are called {name!r}; predictions need different ids"
                    )
                where = f"{path}: question {name!r}"
                text = _whole(_get(found, "question", str, where))
                questions[name] = Question(name, text, context, _answers(found, where))
    if not questions:
        raise UserError(f"{path}: no questions in it; {_LAYOUT}")
    return list(questions.values())


_LAYOUT = (
    "SQuAD's JSON is data > paragraphs > context and qas > id, question, answers > text, "
    "answer_start"
)
_KINDS = {list: "list", str: "text", int: "whole number"}


def _get(holder: Any, key: str, kind: type, where: str) -> Any:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        raise UserError(f"{where}: {key!r} is missing or no {_KINDS[kind]}; {_LAYOUT}")
    return value


def _whole(text: str) -> str:
    """The text with "?" for half characters, which JSON may hold and no tokenizer takes."""
    return text.encode(errors="replace").decode()


def _answers(found: dict, where: str) -> tuple[Answer, ...] | None:
    if "answers" not in found:
        return () if found.get("is_impossible") is True else None
    answers = tuple(
        Answer(_whole(_get(a, "text", str, where)), _get(a, "answer_start", int, where))
        for a in _get(found, "answers", list, where)
    )
    if answers and found.get("is_impossible") is True:
        raise UserError(f"{where} is_impossible and has answers; it must be one or the other")
    return answers


def _json(path: str | pathlib.Path) -> Any:
    path = pathlib.Path(path)
    with damage(path), decompressed(path) as stream:
        data = whole(stream, path, DATA_BYTES)
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg}); mend it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start:,}); convert it") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); mend it") from None


def normalize_answer(text: str) -> str:
    """Lower case without ASCII punctuation, articles and additional space; as both scorers."""
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def compare(gold: str, predicted: str, version: int) -> tuple[float, float]:
    """Exact match and F1 of the words of two answers, both 0 to 1; `version` is 1 or 2."""
    gold, predicted = normalize_answer(gold), normalize_answer(predicted)
    exact = float(gold == predicted)
    ours, theirs = predicted.split(), gold.split()
    if not ours or not theirs:
        return exact, exact if version == 2 else 0.0
    same = sum((collections.Counter(ours) & collections.Counter(theirs)).values())
    if not same:
        return exact, 0.0
    precision, recall = same / len(ours), same / len(theirs)
    return exact, 2 * precision * recall / (precision + recall)


def _each(
    questions: Sequence[Question], predictions: Mapping[str, str], version: int
) -> np.ndarray:
    """Exact match and F1 of every question, the best over its answers; [Q, 2]."""
    found = np.zeros((len(questions), 2))
    for i, question in enumerate(questions):
        predicted = predictions.get(question.id)
        if predicted is None:
            continue
        gold = {answer.text for answer in question.answers or ()}
        if version == 2:
            gold = {text for text in gold if normalize_answer(text)} or {""}
        found[i] = np.max([compare(text, predicted, version) for text in gold], axis=0)
    return found


def score(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    version: int,
    null_odds: Mapping[str, float] | None = None,
    threshold: float = OFFICIAL_THRESHOLD,
) -> dict[str, float]:
    """The official scores, 0 to 100.

    Args:
        questions: with their answers.
        predictions: by the question's id. Of a question without one, 1.1 says it is wrong; 2.0's
            scorer stops there, and here it is wrong too.
        version: 1 or 2.
        null_odds: 2.0: how much more likely it is that there is no answer, by id.
        threshold: odds above it make the prediction "".

    Returns:
        exact (1.1's exact_match), f1, total and missing; for 2.0 the same of the questions with
        and without answers (HasAns_…, NoAns_…), and with `null_odds` what `best_thresholds` gives.
    """
    found = _each(questions, predictions, version)
    missing = np.array([question.id not in predictions for question in questions])
    answerable = np.array([bool(question.answers) for question in questions])
    if null_odds is not None:
        odds = np.array([null_odds[question.id] for question in questions])
        silent = (odds > threshold) & ~missing
        found[silent] = ~answerable[silent, None]
    result = {**_means(found), "missing": float(missing.sum())}
    if version == 2:
        for name, which in (("HasAns", answerable), ("NoAns", ~answerable)):
            if which.any():
                result |= {f"{name}_{key}": v for key, v in _means(found[which]).items()}
        if null_odds is not None:
            result |= best_thresholds(questions, predictions, null_odds)
    return result


def _means(found: np.ndarray) -> dict[str, float]:
    # Summed one after the other, as the scorers do, so that the last digit is theirs too.
    exact, f1 = (100.0 * sum(column) / len(found) for column in found.T.tolist())
    return {"exact": exact, "f1": f1, "total": float(len(found))}


def best_thresholds(
    questions: Sequence[Question], answers: Mapping[str, str], null_odds: Mapping[str, float]
) -> dict[str, float]:
    """best_exact, best_f1 and the thresholds for them, as evaluate-v2.0.py searches them.

    Args:
        questions: with their answers.
        answers: the best answer to every question whether it can be answered or not; one that is
            "" already stays so at any threshold.
        null_odds: as `score` takes them.
    """
    found = _each(questions, answers, 2)
    place = {question.id: i for i, question in enumerate(questions) if question.id in answers}
    order = sorted((name for name in null_odds if name in place), key=null_odds.__getitem__)
    at = [place[name] for name in order]
    answerable = np.array([bool(questions[i].answers) for i in at], bool)
    spoils = np.array([bool(answers[name]) for name in order], bool)
    without = float(sum(not question.answers for question in questions))
    result = {}
    for column, name in enumerate(("exact", "f1")):
        # From no answers at all, one after the other is let through; ties one at a time, as there.
        gains = np.where(answerable, found[at, column], -1.0 * spoils)
        totals = np.cumsum([without, *gains])
        best = int(totals.argmax())
        result[f"best_{name}"] = 100.0 * float(totals[best]) / len(questions)
        result[f"best_{name}_thresh"] = float(null_odds[order[best - 1]]) if best else 0.0
    return result


def read_predictions(path: str | pathlib.Path) -> dict[str, str]:
    """A prediction file: the text of the answer by the question's id.

    Raises:
        UserError: not such a file; names the question.
    """
    return _by_id(path, "a text", lambda value: isinstance(value, str))


def read_null_odds(path: str | pathlib.Path) -> dict[str, float]:
    """A file of odds (or probabilities) that there is no answer, by the question's id.

    Raises:
        UserError: not such a file; names the question.
    """
    found = _by_id(path, "a number", lambda v: isinstance(v, int | float) and abs(v) < _LARGEST)
    return {name: float(value) for name, value in found.items()}


def _by_id(path: str | pathlib.Path, kind: str, fits: Callable[[Any], bool]) -> dict:
    found = _json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path}: a {type(found).__name__}, not an object with {kind} for every id")
    for name, value in found.items():
        if not fits(value):
            raise UserError(f"{path}: question {name!r} has {str(value)[:50]!r}, not {kind}")
    return found


def score_file(
    data: str | pathlib.Path,
    predictions: str | pathlib.Path,
    version: int,
    null_odds: str | pathlib.Path | None = None,
) -> dict[str, float]:
    """`score` of files in the leaderboard's formats.

    Args:
        data: the questions with their answers.
        predictions: {id: text}.
        version: 1 or 2.
        null_odds: {id: number}, for 2.0.

    Raises:
        UserError: not such files, or not of the same questions.
    """
    questions, predicted = read(data), read_predictions(predictions)
    require_answers(questions, data, version)
    if not any(question.id in predicted for question in questions):
        raise UserError(f"{predictions} has no prediction for any question of {data}")
    odds = None
    if null_odds is not None:
        if version == 1:
            raise UserError(f"{null_odds}: SQuAD 1.1 has no odds of no answer; leave it out")
        odds = read_null_odds(null_odds)
        for question in questions:
            if question.id not in odds:
                raise UserError(f"{null_odds}: nothing for question {question.id!r}")
    return score(questions, predicted, version, odds)


def require_answers(
    questions: Sequence[Question], path: str | pathlib.Path, version: int | None
) -> None:
    """Refuses what cannot be scored or learned from; version None allows both.

    Raises:
        UserError: a question without answers; names it.
    """
    for question in questions:
        if question.answers is None:
            raise UserError(f"{path}: question {question.id!r} has no 'answers'")
        if version == 1 and not question.answers:
            raise UserError(
                f"{path}: question {question.id!r} has no answer, which SQuAD 1.1 does not know; "
                "take squad2"
            )
