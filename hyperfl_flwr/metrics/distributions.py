"""How far apart two distributions over classes are."""

import math

import numpy as np
from numpy.typing import ArrayLike


def total_variation(p: ArrayLike, q: ArrayLike) -> float:
    """Return half the sum over the classes of |p_k - q_k|, in [0, 1]; p and q are shares [K]."""
    return float(np.abs(np.subtract(p, q, dtype=np.float64)).sum() / 2)


def rank_correlation(p: ArrayLike, q: ArrayLike) -> float:
    """Return Spearman's correlation of two vectors [K], equal numbers sharing their rank; NaN where one is constant."""
    if np.ptp(p) == 0 or np.ptp(q) == 0:
        return math.nan
    from scipy.stats import spearmanr  # deferred: takes half a second, and few commands need it

    return float(spearmanr(p, q).statistic)
