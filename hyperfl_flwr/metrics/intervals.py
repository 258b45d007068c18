"""Compute 95 % confidence intervals of accuracies and of rates."""

import math
from collections.abc import Sequence
from statistics import NormalDist

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
