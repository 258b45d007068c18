"""Privacy accounting: noise for a budget, and the budget that noise spends.

The mechanisms of this project and how they are composed:

- Noisy steps on Poisson batches (record level): privacy loss distributions of the sampled Gaussian mechanism
  (Koskela, Jälkö, Honkela, AISTATS 2020), by `dp_accounting`, whose discretisation is pessimistic.
- Gaussian noise on a sum (client level): R releases with the noise multiplier z are one release with z / sqrt(R), of
  which `gaussian_mechanism` knows the exact epsilon.
- Discrete Gaussian noise in a secure sum (client level): R releases satisfy zero-concentrated privacy with
  rho = R / (2 z^2) (Canonne, Kamath, Steinke, NeurIPS 2020, theorem 4; Kairouz, Liu, Steinke, ICML 2021, for sums),
  which `dp_accounting` converts to epsilon.

Two data sets are neighbours if one has a record, or a client, that the other lacks.
"""

import math
from functools import lru_cache
from typing import Literal

from hyperfl_flwr.privacy.gaussian_mechanism import smallest_sigma

Noise = Literal["local", "server", "sum"]
"""Where noise of the client level is added, see `PrivacyConfig.noise`."""

LARGEST_EPSILON = 1e4
"""Epsilons above it are reported as infinite: they promise nothing."""

_INTERVAL = 1e-3
"""Discretisation of the privacy losses; a finer one changes epsilon by less than a thousandth."""

_PRECISION = 1e-4
"""Relative precision of a noise multiplier; it is rounded up."""


@lru_cache(maxsize=1024)
def record_epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return the epsilon of noisy steps on Poisson batches.

    Args:
        noise_multiplier: Standard deviation of the noise on a step's sum of gradients, in units of the clipping norm.
        sample_rate: Probability q with which a record is in a batch, in (0, 1].
        steps: Number of steps, at least 0.
        delta: Probability with which the bound may fail.
    """
    if steps == 0:
        return 0.0
    import dp_accounting  # deferred: takes seconds
    from dp_accounting.pld import PLDAccountant

    step = dp_accounting.GaussianDpEvent(noise_multiplier)
    accountant = PLDAccountant(value_discretization_interval=_INTERVAL)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(sample_rate, step) if sample_rate < 1 else step, steps)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=1024)
def record_noise(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Return the smallest noise multiplier for a budget, up to a relative error of 1e-4; see `record_epsilon`."""
    low, high = 0.0, 1.0
    while record_epsilon(high, sample_rate, steps, delta) > epsilon:
        low, high = high, 2 * high
    low = low or 0.1
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if record_epsilon(middle, sample_rate, steps, delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


def client_epsilon(noise_multiplier: float, rounds: int, delta: float, noise: Noise) -> float:
    """Return the epsilon of noise on the sums of some rounds, for whole clients.

    Args:
        noise_multiplier: Standard deviation z of the noise on the sum, in units of the clipping norm.
        rounds: Number of releases, at least 0.
        delta: Probability with which the bound may fail.
        noise: Where the noise is added; `sum` adds discrete Gaussians, which are accounted by zero-concentrated
            privacy.

    Returns:
        The epsilon; infinite without noise.
    """
    if rounds == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    if noise == "sum":
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant

        accountant = RdpAccountant()
        accountant.compose(dp_accounting.ZCDpEvent(rounds / (2 * noise_multiplier**2)))
        return float(accountant.get_epsilon(delta))
    return _gaussian_epsilon(noise_multiplier / math.sqrt(rounds), delta)


def client_noise(epsilon: float, delta: float, rounds: int, noise: Noise) -> float:
    """Return the smallest noise multiplier for a budget over some rounds; see `client_epsilon`."""
    if noise != "sum":
        return smallest_sigma(epsilon, delta, 1.0) * math.sqrt(rounds)
    low, high = 0.0, 1.0
    while client_epsilon(high, rounds, delta, noise) > epsilon:
        low, high = high, 2 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if client_epsilon(middle, rounds, delta, noise) > epsilon:
            low = middle
        else:
            high = middle
    return high


def _gaussian_epsilon(sigma: float, delta: float) -> float:
    """Return the epsilon of Gaussian noise with the standard deviation sigma, for the sensitivity 1."""
    low, high = 0.0, 1.0
    while smallest_sigma(high, delta, 1.0) > sigma:
        low, high = high, 2 * high
        if high > LARGEST_EPSILON:
            return math.inf
    while high - low > _PRECISION / 100 * high:
        middle = (low + high) / 2
        if smallest_sigma(middle, delta, 1.0) > sigma:
            low = middle
        else:
            high = middle
    return high
