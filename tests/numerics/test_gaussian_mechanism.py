"""The analytic Gaussian mechanism, checked with the definition of differential privacy."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import erfinv
from scipy.stats import norm

from hyperfl_flwr.privacy.gaussian_mechanism import smallest_sigma

EPSILONS = [1e-3, 0.1, 0.3, 0.9, 1.0, 3.0, 10.0, 50.0]
DELTAS = [1e-12, 1e-5, 1e-2, 0.5]


def spent_delta(epsilon: float, sigma: float, sensitivity: float) -> float:
    """Return the integral of max(0, p - e^epsilon q), p and q the densities of N(S, sigma^2) and N(0, sigma^2).

    The privacy loss ln(p / q) rises with the value, so the integral starts where it is epsilon.
    """
    p, q = norm(sensitivity, sigma), norm(0.0, sigma)

    def loss(value: float) -> float:
        return float(p.logpdf(value) - q.logpdf(value))

    def integrand(value: float) -> float:
        return float(p.pdf(value) * max(0.0, -math.expm1(epsilon - loss(value))))

    reach = 10 * (sensitivity + epsilon * sigma**2 / sensitivity)
    start = brentq(lambda value: loss(value) - epsilon, -reach, reach, xtol=1e-15, rtol=1e-15)
    ends = [start + width * sigma for width in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)]
    return sum(float(quad(integrand, low, high, epsabs=0.0, epsrel=1e-9)[0]) for low, high in pairwise(ends))


def classical_sigma(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return Dwork and Roth's sigma (Algorithmic Foundations of DP, 2014, theorem A.1), for epsilon below 1."""
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


@pytest.mark.parametrize(("epsilon", "delta"), list(product(EPSILONS, DELTAS)))
def test_sigma_spends_delta_and_no_more(epsilon, delta):
    """The integral of the definition gives delta, and more than delta for a sigma smaller by 1e-4."""
    sigma = smallest_sigma(epsilon, delta, 2.0)
    assert spent_delta(epsilon, sigma, 2.0) == pytest.approx(delta, rel=1e-6)
    assert spent_delta(epsilon, sigma * (1 - 1e-4), 2.0) > delta * (1 + 1e-6)


def test_the_classical_formula_is_larger_below_one_and_breaks_its_promise_at_ten():
    for epsilon, delta in product([1e-3, 0.1, 0.3, 0.9, 0.99], [1e-12, 1e-5, 1e-2]):
        assert smallest_sigma(epsilon, delta, 1.0) < classical_sigma(epsilon, delta, 1.0)
    for epsilon, delta in product([10.0, 50.0], [1e-5, 1e-2]):
        too_small = classical_sigma(epsilon, delta, 1.0)
        assert smallest_sigma(epsilon, delta, 1.0) > too_small
        assert spent_delta(epsilon, too_small, 1.0) > 1.3 * delta


def test_sigma_falls_with_epsilon_and_delta_and_is_proportional_to_the_sensitivity():
    for delta in DELTAS:
        sigmas = [smallest_sigma(epsilon, delta, 1.0) for epsilon in EPSILONS]
        assert all(one > next_one for one, next_one in pairwise(sigmas))
    for epsilon in EPSILONS:
        sigmas = [smallest_sigma(epsilon, delta, 1.0) for delta in DELTAS]
        assert all(one > next_one for one, next_one in pairwise(sigmas))
        for sensitivity in (1e-6, 2 / 3000, 2.0, 1e6):
            expected = sensitivity * smallest_sigma(epsilon, 1e-5, 1.0)
            assert smallest_sigma(epsilon, 1e-5, sensitivity) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("delta", [1e-300, 1e-12, 0.3, 1 - 1e-9])
def test_limits_of_no_and_of_boundless_epsilon(delta):
    """At epsilon 0, delta is the total variation erf(m / sqrt(8)); for a large one it is Phi(m/2 - epsilon/m)."""
    assert smallest_sigma(1e-320, delta, 1.0) == pytest.approx(1 / (math.sqrt(8) * erfinv(delta)), rel=2e-9)
    quantile = norm.isf(delta)
    for epsilon in (1e12, 1e100, 1e307):
        m = math.hypot(quantile, math.sqrt(2 * epsilon)) - quantile
        assert smallest_sigma(epsilon, delta, 1.0) == pytest.approx(1 / m, rel=2e-6)


def test_sigma_is_smooth_where_its_way_of_computation_changes():
    """At m = 1 (sigma = S), where an integral replaces the difference of tails, sigma has no jump."""
    epsilon = brentq(lambda value: smallest_sigma(value, 1e-5, 1.0) - 1.0, 1.0, 10.0, xtol=1e-12)
    around = np.array([smallest_sigma(epsilon + step, 1e-5, 1.0) for step in (-2e-6, -1e-6, 1e-6, 2e-6)])
    outside, middle = around[[0, 3]], around[[1, 2]]
    assert abs((outside[0] - outside[1]) / 2 - (middle[0] - middle[1])) < 1e-11


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_epsilon_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon must be positive and finite"):
        smallest_sigma(epsilon, 1e-5, 1.0)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_an_impossible_delta_is_refused(delta):
    with pytest.raises(ValueError, match="delta must be above 0 and below 1"):
        smallest_sigma(1.0, delta, 1.0)


@pytest.mark.parametrize("sensitivity", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_sensitivity_is_refused(sensitivity):
    with pytest.raises(ValueError, match="sensitivity must be positive and finite"):
        smallest_sigma(1.0, 1e-5, sensitivity)
