"""The analytic Gaussian mechanism: the least noise that gives (epsilon, delta)-differential privacy, for any epsilon.

Balle and Wang: "Improving the Gaussian Mechanism for Differential Privacy: Analytical Calibration and Optimal
Denoising", ICML 2018, theorem 8. A vector whose Euclidean sensitivity is S, plus independent noise of standard
deviation sigma on every coordinate, is (epsilon, delta)-private if and only if, with m = S / sigma,

    Phi(m/2 - epsilon/m) - e^epsilon Phi(-m/2 - epsilon/m) <= delta.

The number of coordinates does not matter. The classical sigma = S sqrt(2 ln(1.25/delta)) / epsilon is proven for
epsilon below 1 only and is larger there. At large epsilon it is too small: it then does not keep its promise.

How it is solved: with x = epsilon/m - m/2 and y = epsilon/m + m/2 the left side is phi(x) (R(x) - R(y)), where
R(t) = Phi(-t) / phi(t) is Mills' ratio, since e^epsilon phi(y) = phi(x). So e^epsilon is never formed. The unknown is
x, from which y^2 = x^2 + 2 epsilon and m = y - x follow.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, log_ndtr, ndtri

MARGIN = 1e-9
"""By which part sigma is enlarged, so that rounding, here or in the sensitivity, never makes the noise too small."""

NODES, WEIGHTS = np.polynomial.legendre.leggauss(16)
"""Gauss and Legendre's rule on [-1, 1]."""


def smallest_sigma(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the smallest standard deviation of Gaussian noise that is (epsilon, delta)-private.

    Args:
        epsilon: Bound of the privacy loss; above 0.
        delta: Probability by which the bound may fail; strictly between 0 and 1.
        sensitivity: Largest Euclidean distance S between the values of two neighbouring datasets; above 0. Sigma has
            its unit and is proportional to it.

    Raises:
        ValueError: If an argument is outside its range or not finite.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite: {epsilon}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, both excluded: {delta}")
    if not 0 < sensitivity < math.inf:
        raise ValueError(f"the sensitivity must be positive and finite: {sensitivity}")
    from scipy.optimize import brentq  # deferred: takes a third of a second, and few processes of a node need it

    wanted = math.log(delta)

    def excess(x: float) -> float:
        return _log_delta(x, epsilon) - wanted

    upper = -float(ndtri(delta))  # delta is below Phi(-x)
    step = 1.0
    while excess(upper - step) < 0:
        step *= 2
    if excess(upper) < 0:  # at an enormous epsilon the two are equal
        precision = 1e-14 * min(1.0, math.sqrt(2 * epsilon))  # m is wrong by the part dx / y, and y^2 >= 2 epsilon
        upper = brentq(excess, upper - step, upper, xtol=precision, maxiter=1000)
    return sensitivity / _shift(upper, epsilon)[1] * (1 + MARGIN)


def _shift(x: float, epsilon: float) -> tuple[float, float]:
    """Return y and m = S / sigma for x = epsilon/m - m/2, without a difference of close numbers."""
    y = math.hypot(x, math.sqrt(2) * math.sqrt(epsilon))
    return y, 2 * (epsilon / (y + x)) if x > 0 else y - x


def _log_delta(x: float, epsilon: float) -> float:
    """Return the logarithm of the smallest delta at x; it falls with x."""
    y, m = _shift(x, epsilon)
    log_density = -x * x / 2 - math.log(2 * math.pi) / 2
    if m < 1:  # the two ratios are close, R' = t R - 1 is integrated between them
        t = x + m * (NODES + 1) / 2
        difference = m / 2 * float(WEIGHTS @ (1 - t * _mills_ratio(t)))
        return log_density + math.log(difference) if difference > 0 else -math.inf
    log_tail = float(log_ndtr(-x))
    return log_tail + math.log1p(-math.exp(log_density - log_tail) * float(_mills_ratio(np.array(y))))


def _mills_ratio(t: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Phi(-t) / phi(t), for a t above -1."""
    ratio: NDArray[np.float64] = math.sqrt(math.pi / 2) * erfcx(t / math.sqrt(2))
    return ratio
