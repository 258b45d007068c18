"""Analytic Gaussian mechanism: compute the least noise for (epsilon, delta)-differential privacy, and its inverse.

Balle and Wang: "Improving the Gaussian Mechanism for Differential Privacy: Analytical Calibration and Optimal
Denoising", ICML 2018, theorem 8. A vector with Euclidean sensitivity S, plus independent noise of standard deviation
sigma on every coordinate, is (epsilon, delta)-private if and only if, with m = S / sigma,

    Phi(m/2 - epsilon/m) - e^epsilon Phi(-m/2 - epsilon/m) <= delta.

The number of coordinates does not matter. The classical sigma = S sqrt(2 ln(1.25/delta)) / epsilon is proven only for
epsilon below 1, where it is larger. At large epsilon it is too small and does not give the stated guarantee.

Solution: with x = epsilon/m - m/2 and y = epsilon/m + m/2 the left side is phi(x) (R(x) - R(y)), where
R(t) = Phi(-t) / phi(t) is Mills' ratio, since e^epsilon phi(y) = phi(x). So e^epsilon, which could overflow, is never
computed. The unknown is x. For a given epsilon, y^2 = x^2 + 2 epsilon and m = y - x follow from it; for a given m,
y = x + m and epsilon = m (x + m/2).
"""

import math

import numpy as np
from numpy.typing import NDArray

MARGIN = 1e-9
"""Relative increase of sigma and of epsilon: rounding never makes the noise too small, or the privacy loss."""

_STEP = 1e-13
"""Precision of x when epsilon is computed."""

NODES, WEIGHTS = np.polynomial.legendre.leggauss(16)
"""Nodes and weights of Gauss-Legendre quadrature on [-1, 1]."""


def smallest_sigma(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the smallest standard deviation of Gaussian noise that gives (epsilon, delta)-privacy.

    Args:
        epsilon: Bound on the privacy loss; above 0.
        delta: Probability with which the bound may fail; strictly between 0 and 1.
        sensitivity: Largest Euclidean distance S between the values of two neighbouring datasets; above 0. Sigma has
            the same unit and is proportional to it.

    Raises:
        ValueError: If an argument is outside its range or not finite.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be above 0 and below 1, got {delta}")
    if not 0 < sensitivity < math.inf:
        raise ValueError(f"the sensitivity must be positive and finite, got {sensitivity}")
    from scipy.optimize import brentq  # deferred: takes a third of a second, and few processes need it
    from scipy.special import ndtri

    log_delta = math.log(delta)

    def excess(x: float) -> float:
        return _log_delta(x, *_shift(x, epsilon)) - log_delta

    upper = -float(ndtri(delta))  # delta is below Phi(-x), so the solution is below this x
    step = 1.0  # doubled until the interval from upper - step to upper contains the solution
    while excess(upper - step) < 0:
        step *= 2
    if excess(upper) < 0:  # at an enormous epsilon the solution equals the upper end
        precision = 1e-14 * min(1.0, math.sqrt(2 * epsilon))  # relative error of m: dx / y, and y^2 >= 2 epsilon
        upper = brentq(excess, upper - step, upper, xtol=precision, maxiter=1000)
    return sensitivity / _shift(upper, epsilon)[1] * (1 + MARGIN)


def smallest_epsilon(sigma: float, delta: float, sensitivity: float) -> float:
    """Return the smallest epsilon for which Gaussian noise gives (epsilon, delta)-privacy: `smallest_sigma` inverted.

    Args:
        sigma: Standard deviation of the noise; above 0.
        delta: Probability with which the bound may fail; strictly between 0 and 1.
        sensitivity: Largest Euclidean distance S between the values of two neighbouring datasets, in the unit of
            sigma; above 0.

    Returns:
        Epsilon, at least 0; infinite if it exceeds the range of floating point.

    Raises:
        ValueError: If an argument is outside its range or not finite.
    """
    if not 0 < sigma < math.inf:
        raise ValueError(f"sigma must be positive and finite, got {sigma}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be above 0 and below 1, got {delta}")
    if not 0 < sensitivity < math.inf:
        raise ValueError(f"the sensitivity must be positive and finite, got {sensitivity}")
    from scipy.optimize import brentq  # deferred, as above
    from scipy.special import ndtri

    log_delta, m = math.log(delta), sensitivity / sigma
    if m == 0 or not m * m < math.inf:
        return 0.0 if m == 0 else math.inf

    def excess(x: float) -> float:
        return _log_delta(x, x + m, m) - log_delta

    lower, upper = -m / 2, -float(ndtri(delta))  # at the lower end epsilon is 0; delta is below Phi(-x)
    if excess(lower) <= 0:
        return 0.0
    if excess(upper) < 0:
        upper = brentq(excess, lower, upper, xtol=_STEP, maxiter=1000)
    return m * (upper + _STEP + m / 2) * (1 + MARGIN)


def _shift(x: float, epsilon: float) -> tuple[float, float]:
    """Return y and m = S / sigma for x = epsilon/m - m/2, without cancellation (a difference of close numbers)."""
    y = math.hypot(x, math.sqrt(2) * math.sqrt(epsilon))
    return y, 2 * (epsilon / (y + x)) if x > 0 else y - x


def _log_delta(x: float, y: float, m: float) -> float:
    """Return the logarithm of the smallest delta at x, y = x + m and m; it decreases with x."""
    log_density = -x * x / 2 - math.log(2 * math.pi) / 2
    if m < 1:  # the two ratios are close: integrate R' = t R - 1 between them instead of subtracting
        t = x + m * (NODES + 1) / 2
        difference = m / 2 * float(WEIGHTS @ (1 - t * _mills_ratio(t)))
        return log_density + math.log(difference) if difference > 0 else -math.inf
    from scipy.special import log_ndtr  # deferred, as above

    log_tail = float(log_ndtr(-x))
    return log_tail + math.log1p(-math.exp(log_density - log_tail) * float(_mills_ratio(np.array(y))))


def _mills_ratio(t: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Mills' ratio Phi(-t) / phi(t), for t above -1."""
    from scipy.special import erfcx  # deferred, as above

    ratio: NDArray[np.float64] = math.sqrt(math.pi / 2) * erfcx(t / math.sqrt(2))
    return ratio
