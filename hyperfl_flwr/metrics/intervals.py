"""Compute 95 % confidence intervals of accuracies and of rates."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95

Interval = tuple[float, float]
"""Lower and upper end."""


def of_share(count: int, total: int) -> Interval | None:
    """Return Wilson's interval of a share: what other samples of the same kind would give (Wilson, 1927).

    It also holds for few samples, and for shares of 0 and 1.

    Args:
        count: Number of samples that count, in 0..total.
        total: Number of samples n.

    Returns:
        The interval within [0, 1]; None without samples.
    """
    if not total:
        return None
    share, z = count / total, NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = share + z * z / (2 * total)
    margin = z * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    scale = 1 + z * z / total
    return max(0.0, (middle - margin) / scale), min(1.0, (middle + margin) / scale)


def of_mean(mean: float, deviation: float, number: int) -> Interval | None:
    """Return Student's interval of a mean over clients: what other clients of the same kind would give.

    Args:
        mean: The mean.
        deviation: Standard deviation of the values, divided by n - 1.
        number: Number of values n.

    Returns:
        The interval, which may exceed the range of the values; None with fewer than two values.
    """
    from scipy.special import stdtrit  # only where it is used: every process that trains imports this package

    if number < 2:
        return None
    margin = float(stdtrit(number - 1, (1 + CONFIDENCE) / 2)) * deviation / math.sqrt(number)
    return mean - margin, mean + margin


def of_weighted_mean(values: Sequence[float], weights: Sequence[float]) -> Interval | None:
    """Return the interval of a weighted mean over clients: what other clients of the same kind would give.

    Weights say how often a client was drawn, and do not depend on its value. A squared residual (v - m)^2 is divided by
    1 - w, the part of the client's variance that is left in it (HC2; MacKinnon and White, 1985), and the degrees of
    freedom are one less than Kish's effective number 1 / sum w^2 (1965). With equal weights this is `of_mean`. The
    intervals cover 94 to 98 % of the means (`tests/numerics/test_crossed_intervals.py`).

    Args:
        values: A value v of each client.
        weights: Their weights w > 0, of sum 1.

    Returns:
        The interval, which may exceed the range of the values; None with fewer than two values.
    """
    from scipy.special import stdtrit  # only where it is used: every process that trains imports this package

    if len(values) < 2:
        return None
    pairs = list(zip(values, weights, strict=True))
    mean = math.fsum(weight * value for value, weight in pairs)
    variance = math.fsum((weight * (value - mean)) ** 2 / (1 - weight) for value, weight in pairs)
    freedom = 1 / math.fsum(weight**2 for weight in weights) - 1
    margin = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)
    return mean - margin, mean + margin


def of_crossed_means(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return intervals of means over clients and seeds: what other clients of the same kind and other seeds would give.

    Clients of one federation are trained together: what a seed changes, it changes for all of them. If they counted as
    independent, the interval would be far too narrow, however many clients there are. Here clients and seeds are two
    crossed samples. The variance of the mean is the sum of those of the means of the clients and of the seeds
    (two-way clusters; Cameron, Gelbach and Miller, 2011). The part that both contain is not subtracted: what varies
    between single pairs counts twice, and the variance is on average not too small. Its degrees of freedom are
    Satterthwaite's (1946). A bootstrap would resample two or three seeds, which are too few.

    With one seed this is `of_mean` over the clients, which does not cover other seeds. With normal effects the
    intervals cover 94 to 98 % of the means where clients or single pairs vary most. Where seeds vary most, they cover
    88 % with two seeds, 92 % with three and 94 % with five (`tests/numerics/test_crossed_intervals.py`).

    Args:
        values: [..., S, C], for S seeds and C clients; NaN where a client has no value with a seed. Clients may have
            one seed each, where every seed divides the data anew; what they vary in then counts twice, too.

    Returns:
        The lower and upper ends, [...]; NaN with fewer than two clients.
    """
    from scipy.special import stdtrit  # only where it is used: every process that trains imports this package

    known = ~np.isnan(values)
    number = known.sum((-2, -1))
    mean = np.nansum(values, (-2, -1)) / number
    residuals = np.where(known, values - mean[..., None, None], 0.0)
    variances, freedoms = [], []
    for axis in (-2, -1):  # sums over the seeds: clusters of one client each; then those of one seed each
        clusters = known.any(axis).sum(-1)
        freedoms.append(clusters - 1)
        scale = clusters / np.maximum(freedoms[-1], 1)  # one cluster has no residual
        variances.append(scale * (residuals.sum(axis) ** 2).sum(-1) / number**2)
    variance = variances[0] + variances[1]
    parts = sum(part**2 / np.maximum(freedom, 1) for part, freedom in zip(variances, freedoms, strict=True))
    freedom = np.where(parts > 0, variance**2 / np.where(parts > 0, parts, 1.0), 1.0)
    margin = np.where(freedoms[0] > 0, stdtrit(freedom, (1 + CONFIDENCE) / 2) * np.sqrt(variance), np.nan)
    return mean - margin, mean + margin


def of_jackknife(value: float, without: Sequence[float]) -> Interval | None:
    """Return the jackknife interval of a number that is computed from n independent parts (Tukey, 1958).

    It also holds if the number is no mean over the parts. The estimated variance is on average not too small (Efron and
    Stein, 1981).

    Args:
        value: The number from all parts.
        without: The number without each of the n parts in turn.

    Returns:
        The interval, which may exceed the range of the number; None with fewer than two parts.
    """
    from scipy.special import stdtrit  # only where it is used: every process that trains imports this package

    number = len(without)
    if number < 2:
        return None
    middle = sum(without) / number
    error = math.sqrt((number - 1) / number * sum((each - middle) ** 2 for each in without))
    margin = float(stdtrit(number - 1, (1 + CONFIDENCE) / 2)) * error
    return value - margin, value + margin
