"""Classification and regression metrics as the benchmarks' official scorers compute them.

Scores are not percentages. Undefined ones are 0, as in scikit-learn: a correlation with a constant,
or the F1 of a label that neither occurs nor is predicted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

LOWER_IS_BETTER = ("mean_squared_error",)


def classification(
    truth: Int[np.ndarray, " E"], predicted: Int[np.ndarray, " E"], classes: int
) -> dict[str, float]:
    """Return accuracy, macro F1 and Matthews correlation (for several classes, Gorodkin 2004).

    Macro F1 averages over the classes that occur in labels or predictions. With two classes, also
    return the F1 of the second, which GLUE's MRPC and QQP report.
    """
    true, guessed, correct = (
        np.bincount(labels, minlength=classes).astype(np.float64)
        for labels in (truth, predicted, truth[truth == predicted])
    )
    total = len(truth)
    f1 = _f1(correct, true + guessed)
    spread = np.sqrt((total**2 - true @ true) * (total**2 - guessed @ guessed))
    scores = {
        "accuracy": correct.sum() / total,
        "macro_f1": f1[true + guessed > 0].mean(),
        "matthews": (total * correct.sum() - true @ guessed) / spread if spread else 0.0,
    }
    if classes == 2:
        scores["f1"] = f1[1]
    return {name: float(value) for name, value in scores.items()}


def regression(
    truth: Float[np.ndarray, " E"], predicted: Float[np.ndarray, " E"]
) -> dict[str, float]:
    """Return Pearson and Spearman correlation, and mean squared error."""
    from scipy import stats

    truth, predicted = truth.astype(np.float64), predicted.astype(np.float64)
    scores = {"pearson": 0.0, "spearman": 0.0}
    if np.ptp(truth) > 0 and np.ptp(predicted) > 0:
        scores["pearson"] = stats.pearsonr(truth, predicted).statistic
        scores["spearman"] = stats.spearmanr(truth, predicted).statistic
    scores["mean_squared_error"] = float(np.mean((truth - predicted) ** 2))
    return {name: float(value) for name, value in scores.items()}


def retrieval(
    ranked: Sequence[Int[np.ndarray, " _"]], relevant: Sequence[Mapping[int, float]]
) -> dict[str, float]:
    """Return means over queries: nDCG and reciprocal rank at 10, recall at 1, 10 and 100.

    The gain of a document is its grade, as in trec_eval and BEIR (not 2**grade - 1).

    Args:
        ranked: for each query the documents, best first; the first 100 suffice.
        relevant: for each query the grades, above 0, of its relevant documents. All metrics of a query
            without any are 0, as in trec_eval.
    """
    names = ["ndcg_at_10", "mrr_at_10", "recall_at_1", "recall_at_10", "recall_at_100"]
    discounts = 1 / np.log2(np.arange(2, 12))
    rows = []
    for documents, grades in zip(ranked, relevant, strict=True):
        gains = np.array([grades.get(int(i), 0.0) for i in documents[:100]], np.float64)
        ideal = np.sort(np.array(list(grades.values()), np.float64))[::-1][:10]
        first = np.flatnonzero(gains[:10])[:1]
        rows.append(
            [
                gains[:10] @ discounts[: len(gains[:10])] / (ideal @ discounts[: len(ideal)] or 1),
                1 / (first[0] + 1) if len(first) else 0.0,
                *(np.count_nonzero(gains[:k]) / max(len(grades), 1) for k in (1, 10, 100)),
            ]
        )
    return dict(zip(names, np.mean(rows, 0).tolist(), strict=True))


def multilabel_metrics(
    truth: Bool[np.ndarray, "E C"], predicted: Bool[np.ndarray, "E C"]
) -> dict[str, float]:
    """Return multilabel metrics: micro F1, macro F1 and the fraction of exact matches."""
    correct, total = (truth & predicted).sum(0), truth.sum(0) + predicted.sum(0)
    scores = {
        "micro_f1": _f1(correct.sum(), total.sum()),
        "macro_f1": _f1(correct, total).mean(),
        "exact_match": (truth == predicted).all(1).mean(),
    }
    return {name: float(value) for name, value in scores.items()}


def _f1(correct: Any, total: Any) -> Any:
    """Return F1 given the numbers of true positives, and of labels and predictions together."""
    return 2 * correct / np.maximum(total, 1)
