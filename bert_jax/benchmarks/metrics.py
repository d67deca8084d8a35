"""Classification and regression metrics as the benchmarks' official scorers compute them.

Scores are not percentages. Undefined ones are 0, as in scikit-learn: a correlation with a constant,
or the F1 of a label that neither occurs nor is predicted.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

LOWER_IS_BETTER = ("mean_squared_error",)


def classification(
    truth: Int[np.ndarray, " E"], predicted: Int[np.ndarray, " E"], classes: int
) -> dict[str, float]:
    """Return accuracy, macro F1 and Matthews correlation.

    Macro F1 averages over the classes that occur in labels or predictions. With two classes, also
    return the F1 of the second, which GLUE's MRPC and QQP report.
    """
    from sklearn import metrics

    is_defined = np.ptp(truth) > 0 and np.ptp(predicted) > 0
    scores = {
        "accuracy": metrics.accuracy_score(truth, predicted),
        "macro_f1": metrics.f1_score(truth, predicted, average="macro", zero_division=0),
        "matthews": metrics.matthews_corrcoef(truth, predicted) if is_defined else 0.0,
    }
    if classes == 2:
        scores["f1"] = metrics.f1_score(truth, predicted, pos_label=1, zero_division=0)
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


def multilabel_metrics(
    truth: Bool[np.ndarray, "E C"], predicted: Bool[np.ndarray, "E C"]
) -> dict[str, float]:
    """Return multilabel metrics: micro F1, macro F1 and the fraction of exact matches."""
    from sklearn import metrics

    scores = {
        "micro_f1": metrics.f1_score(truth, predicted, average="micro", zero_division=0),
        "macro_f1": metrics.f1_score(truth, predicted, average="macro", zero_division=0),
        "exact_match": (truth == predicted).all(1).mean(),
    }
    return {name: float(value) for name, value in scores.items()}
