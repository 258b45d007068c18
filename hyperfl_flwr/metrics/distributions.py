"""Compare two distributions over classes."""

import math

import numpy as np
from numpy.typing import ArrayLike


def total_variation(p: ArrayLike, q: ArrayLike) -> float:
    """Return the total variation distance in [0, 1] of shares p and q [K]: half the sum over classes of |p_k - q_k|."""
    return float(np.abs(np.subtract(p, q, dtype=np.float64)).sum() / 2)


def rank_correlation(p: ArrayLike, q: ArrayLike) -> float:
    """Return Spearman's rank correlation of two vectors [K], with equal ranks for ties; NaN if a vector is constant."""
    if np.ptp(p) == 0 or np.ptp(q) == 0:
        return math.nan
    from scipy.stats import spearmanr  # deferred: takes half a second, and few commands need it

    return float(spearmanr(p, q).statistic)
