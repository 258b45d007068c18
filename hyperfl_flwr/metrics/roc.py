"""Measure how well a score separates positives from negatives: ROC curve, area below it, true positives at a rate."""

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]


def curve(positive: Scores, negative: Scores) -> tuple[Scores, Scores]:
    """Return the ROC curve: the rates of false and of true positives for each threshold, from the strictest on.

    Args:
        positive: Scores [p] of the positives, without NaN; large ones count as positive.
        negative: Scores [n] of the negatives, without NaN.

    Returns:
        False and true positive rates [t + 1], ascending from 0 to 1, for the t different scores as thresholds.

    Raises:
        ValueError: If there are no positives or no negatives.
    """
    if not len(positive) or not len(negative):
        raise ValueError(f"a ROC curve needs positives and negatives, got {len(positive)} and {len(negative)}")
    thresholds = np.unique(np.concatenate([positive, negative]))[::-1]
    rates = (
        np.concatenate([[0], len(scores) - np.searchsorted(np.sort(scores), thresholds)]) / len(scores)
        for scores in (negative, positive)
    )
    false, true = rates
    return false, true


def area(positive: Scores, negative: Scores) -> float:
    """Return the area below the ROC curve: the chance that a positive has a larger score than a negative.

    Equal scores count half. 0.5 is guessing.

    Raises:
        ValueError: If there are no positives or no negatives.
    """
    false, true = curve(positive, negative)
    return float(np.trapezoid(true, false))


def threshold_at(negative: Scores, rate: float) -> float:
    """Return the smallest score above which at most a share of the negatives lies.

    Args:
        negative: Scores [n] of the negatives, without NaN.
        rate: Largest rate of false positives, in [1 / n, 1).

    Raises:
        ValueError: If the rate is outside its range; below 1 / n no number of false positives attains it.
    """
    allowed = int(rate * len(negative) + 1e-9)
    if not 1 <= allowed < len(negative):
        raise ValueError(f"a rate of {rate:g} needs at least 1 of the negatives and not all, got {len(negative)}")
    return float(np.sort(negative)[-allowed - 1])
