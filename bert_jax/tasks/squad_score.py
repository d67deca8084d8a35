"""SQuAD's files and official metrics (evaluate-v1.1.py, evaluate-v2.0.py).

The two versions treat missing answers differently. In 1.1 a missing prediction is wrong, and F1 is
0 if normalization leaves nothing of an answer. In 2.0 "" means "unanswerable", and the best
threshold for predicting it can be searched.
"""

import collections
import json
import pathlib
import re
import string
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data.compressed import DATA_BYTES, damage_errors, decompressed, whole
from bert_jax.errors import UserError

_MAX_FLOAT = sys.float_info.max  # JSON integers can be larger


class Answer(NamedTuple):
    """A gold answer.

    Attributes:
        text: text of the answer in the context.
        start: offset of its first character in the context.
    """

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context.

    Attributes:
        id: its id in prediction files.
        text: the question.
        context: the text that may contain the answer.
        answers: gold answers; () if unanswerable (2.0), None if the file has no answers.
    """

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...] | None


def read(path: str | pathlib.Path) -> list[Question]:
    """Read a SQuAD file, 1.1 or 2.0, compressed or not, with or without answers."""
    questions: dict[str, Question] = {}
    for i, article in enumerate(_get(_json(path), "data", list, str(path))):
        paragraphs = _get(article, "paragraphs", list, f"{path}: data[{i}]")
        for j, paragraph in enumerate(paragraphs):
            position = f"{path}: data[{i}].paragraphs[{j}]"
            context = _valid_unicode(_get(paragraph, "context", str, position))
            for k, entry in enumerate(_get(paragraph, "qas", list, position)):
                name = _valid_unicode(_get(entry, "id", str, f"{position}.qas[{k}]"))
                if name in questions:
                    raise UserError(f"{path}: duplicate question id {name!r}: ids must be unique")
                where = f"{path}: question {name!r}"
                text = _valid_unicode(_get(entry, "question", str, where))
                questions[name] = Question(name, text, context, _answers(entry, where))
    if not questions:
        raise UserError(f"{path}: no questions; {_LAYOUT}")
    return list(questions.values())


_LAYOUT = (
    "the layout is data > paragraphs > context and qas > id, question, answers > text, answer_start"
)
_KINDS = {list: "a list", str: "text", int: "a whole number"}


def _get(holder: Any, key: str, kind: type, where: str) -> Any:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        raise UserError(f"{where}: {key!r} is missing or not {_KINDS[kind]}; {_LAYOUT}")
    return value


def _valid_unicode(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and tokenizers reject, with "?"."""
    return text.encode(errors="replace").decode()


def _answers(entry: dict, where: str) -> tuple[Answer, ...] | None:
    if "answers" not in entry:
        return () if entry.get("is_impossible") is True else None
    answers = tuple(
        Answer(_valid_unicode(_get(a, "text", str, where)), _get(a, "answer_start", int, where))
        for a in _get(entry, "answers", list, where)
    )
    if answers and entry.get("is_impossible") is True:
        raise UserError(f"{where}: is_impossible is true but there are answers: remove one of them")
    return answers


def _json(path: str | pathlib.Path) -> Any:
    path = pathlib.Path(path)
    with damage_errors(path), decompressed(path) as stream:
        data = whole(stream, path, DATA_BYTES)
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg}): correct it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start:,}): convert it") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}): correct it") from None


def normalize_answer(text: str) -> str:
    """Lowercase and remove ASCII punctuation, articles and extra space, as both scorers do."""
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def compare(gold: str, predicted: str, version: int) -> tuple[float, float]:
    """Return exact match and token F1 of two answers, 0 to 1; `version` is 1 or 2."""
    gold, predicted = normalize_answer(gold), normalize_answer(predicted)
    exact = float(gold == predicted)
    pred_words, gold_words = predicted.split(), gold.split()
    if not pred_words or not gold_words:
        return exact, exact if version == 2 else 0.0
    num_same = sum((collections.Counter(pred_words) & collections.Counter(gold_words)).values())
    if not num_same:
        return exact, 0.0
    precision, recall = num_same / len(pred_words), num_same / len(gold_words)
    return exact, 2 * precision * recall / (precision + recall)


def _question_scores(
    questions: Sequence[Question], predictions: Mapping[str, str], version: int
) -> np.ndarray:
    """Return exact match and F1 of each question, the maximum over its answers; [Q, 2]."""
    scores = np.zeros((len(questions), 2))
    for i, question in enumerate(questions):
        predicted = predictions.get(question.id)
        if predicted is None:
            continue
        gold = {answer.text for answer in question.answers or ()}
        if version == 2:
            gold = {text for text in gold if normalize_answer(text)} or {""}
        scores[i] = np.max([compare(text, predicted, version) for text in gold], axis=0)
    return scores


def score(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    version: int,
    null_odds: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """Compute the official metrics, 0 to 100.

    Args:
        questions: questions with their answers.
        predictions: predicted text by question id. A missing prediction is wrong, as in 1.1's
            scorer; 2.0's scorer raises an error.
        version: 1 or 2.
        null_odds: for 2.0, odds that there is no answer, by question id.
        threshold: odds above it make the prediction ""; evaluate-v2.0.py's default is 1.

    Returns:
        exact (1.1's exact_match), f1, total and missing. For 2.0 also the metrics of questions with
        and without answers (HasAns_…, NoAns_…) and, with `null_odds`, those of `best_thresholds`.
    """
    scores = _question_scores(questions, predictions, version)
    missing = np.array([question.id not in predictions for question in questions])
    answerable = np.array([bool(question.answers) for question in questions])
    if null_odds is not None:
        odds = np.array([null_odds[question.id] for question in questions])
        no_answer = (odds > threshold) & ~missing
        scores[no_answer] = ~answerable[no_answer, None]
    result = {**_means(scores), "missing": float(missing.sum())}
    if version == 2:
        for name, mask in (("HasAns", answerable), ("NoAns", ~answerable)):
            if mask.any():
                result |= {f"{name}_{key}": v for key, v in _means(scores[mask]).items()}
        if null_odds is not None:
            result |= best_thresholds(questions, predictions, null_odds)
    return result


def _means(scores: np.ndarray) -> dict[str, float]:
    # Summed in order, as in the official scorers, to agree with them to the last digit.
    exact, f1 = (100.0 * sum(column) / len(scores) for column in scores.T.tolist())
    return {"exact": exact, "f1": f1, "total": float(len(scores))}


def best_thresholds(
    questions: Sequence[Question], answers: Mapping[str, str], null_odds: Mapping[str, float]
) -> dict[str, float]:
    """Return best_exact, best_f1 and their thresholds, searched as in evaluate-v2.0.py.

    Args:
        questions: questions with their answers.
        answers: the best answer to each question, assuming that it is answerable; "" stays "" at
            any threshold.
        null_odds: as in `score`.
    """
    scores = _question_scores(questions, answers, 2)
    index = {question.id: i for i, question in enumerate(questions) if question.id in answers}
    order = sorted((name for name in null_odds if name in index), key=null_odds.__getitem__)
    indices = [index[name] for name in order]
    answerable = np.array([bool(questions[i].answers) for i in indices], bool)
    nonempty = np.array([bool(answers[name]) for name in order], bool)
    num_unanswerable = float(sum(not question.answers for question in questions))
    result = {}
    for column, name in enumerate(("exact", "f1")):
        # Starting without answers, accept one after the other; ties one at a time, as there.
        gains = np.where(answerable, scores[indices, column], -1.0 * nonempty)
        totals = np.cumsum([num_unanswerable, *gains])
        best = int(totals.argmax())
        result[f"best_{name}"] = 100.0 * float(totals[best]) / len(questions)
        result[f"best_{name}_thresh"] = float(null_odds[order[best - 1]]) if best else 0.0
    return result


def _by_id(path: str | pathlib.Path, expected: str, *kinds: type) -> dict[str, Any]:
    """Read a JSON object with a text or a finite number by question id."""
    values = _json(path)
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: a {type(values).__name__}, not an object with {expected} for every id"
        )
    for name, value in values.items():
        is_valid = isinstance(value, kinds)
        if not is_valid or (float in kinds and not abs(value) < _MAX_FLOAT):
            raise UserError(
                f"{path}: question {name!r} has {str(value)[:50]!r}, expected {expected}"
            )
    return values


def score_file(
    data: str | pathlib.Path,
    predictions: str | pathlib.Path,
    version: int,
    null_odds: str | pathlib.Path | None = None,
) -> dict[str, float]:
    """Compute `score` of files in the formats of the leaderboard, {id: text} and {id: number}."""
    questions, predicted = read(data), _by_id(predictions, "a text", str)
    require_answers(questions, data, version)
    if not any(question.id in predicted for question in questions):
        raise UserError(f"{predictions} has no prediction for any question of {data}")
    odds = None
    if null_odds is not None:
        values = _by_id(null_odds, "a number", int, float)
        odds = {name: float(value) for name, value in values.items()}
        for question in questions:
            if question.id not in odds:
                raise UserError(f"{null_odds}: no value for question {question.id!r}")
    return score(questions, predicted, version, odds)


def require_answers(
    questions: Sequence[Question], path: str | pathlib.Path, version: int | None
) -> None:
    """Check that questions have answers; version None allows unanswerable ones."""
    for question in questions:
        if question.answers is None:
            raise UserError(f"{path}: question {question.id!r} has no 'answers'")
        if version == 1 and not question.answers:
            raise UserError(
                f"{path}: question {question.id!r} has no answer, which SQuAD 1.1 does not allow: "
                "use squad2"
            )
