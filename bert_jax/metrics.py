"""Metrics of labels and numbers, as the benchmarks' own scorers compute them; in 0 to 1.

What cannot be told is 0, as scikit-learn has it: a correlation with something constant, the F1 of a
label that neither occurs nor is predicted.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

LOWER_IS_BETTER = ("mean_squared_error",)


def classification(
    truth: Int[np.ndarray, " E"], predicted: Int[np.ndarray, " E"], classes: int
) -> dict[str, float]:
    """Accuracy, the mean F1 of the classes that occur, Matthews' correlation (any number of classes).

    Of two classes also the F1 of the second, which GLUE's MRPC and QQP report.
    """
    from sklearn import metrics

    varied = np.ptp(truth) > 0 and np.ptp(predicted) > 0
    found = {
        "accuracy": metrics.accuracy_score(truth, predicted),
        "macro_f1": metrics.f1_score(truth, predicted, average="macro", zero_division=0),
        "matthews": metrics.matthews_corrcoef(truth, predicted) if varied else 0.0,
    }
    if classes == 2:
        found["f1"] = metrics.f1_score(truth, predicted, pos_label=1, zero_division=0)
    return {name: float(value) for name, value in found.items()}


def regression(
    truth: Float[np.ndarray, " E"], predicted: Float[np.ndarray, " E"]
) -> dict[str, float]:
    """Pearson's and Spearman's correlation and the mean squared error."""
    from scipy import stats

    truth, predicted = truth.astype(np.float64), predicted.astype(np.float64)
    found = {"pearson": 0.0, "spearman": 0.0}
    if np.ptp(truth) > 0 and np.ptp(predicted) > 0:
        found["pearson"] = stats.pearsonr(truth, predicted).statistic
        found["spearman"] = stats.spearmanr(truth, predicted).statistic
    found["mean_squared_error"] = np.mean((truth - predicted) ** 2)
    return {name: float(value) for name, value in found.items()}


def several_labels(
    truth: Bool[np.ndarray, "E C"], predicted: Bool[np.ndarray, "E C"]
) -> dict[str, float]:
    """F1 over all labels of all examples, its mean over labels, and how many examples are all right."""
    from sklearn import metrics

    scores = {
        "micro_f1": metrics.f1_score(truth, predicted, average="micro", zero_division=0),
        "macro_f1": metrics.f1_score(truth, predicted, average="macro", zero_division=0),
        "exact_match": (truth == predicted).all(1).mean(),
    }
    return {name: float(value) for name, value in scores.items()}
