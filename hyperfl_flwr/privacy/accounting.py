"""Privacy accounting: noise for a budget, and the budget that noise spends.

The mechanisms of this project and how they are composed:

- Noisy steps on Poisson batches (record level): privacy loss distributions of the sampled Gaussian mechanism
  (Koskela, Jälkö, Honkela, AISTATS 2020), by `dp_accounting`, whose discretisation is pessimistic.
- Gaussian noise on a sum (client level): R releases with the noise multiplier z are one release with z / sqrt(R), of
  which `gaussian_mechanism` knows the exact epsilon.
- Discrete Gaussian noise in a secure sum (client level): R releases satisfy zero-concentrated privacy with
  rho = R / (2 z^2) (Canonne, Kamath, Steinke, NeurIPS 2020, theorem 4; Kairouz, Liu, Steinke, ICML 2021, for sums),
  which `dp_accounting` converts to epsilon. Together with noisy steps, both are composed as Rényi privacy.

Two data sets are neighbours if they differ in one record, which is present in one and has no effect in the other
("zero-out"): the number of records n is the same and public, and sample rate, number of steps and noise follow from it.
The accountants' dominating pairs for a record added or removed are those of this relation. For whole clients, one
client contributes in one run and nothing in the other; the number of clients is public.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from hyperfl_flwr.privacy.gaussian_mechanism import smallest_epsilon, smallest_sigma

Noise = Literal["local", "server", "sum"]
"""Where noise of the client level is added, see `PrivacyConfig.noise`."""

Mechanism = Literal["sampled-gaussian", "gaussian", "discrete-gaussian"]
"""Gaussian noise on Poisson batches, on a vector or a sum, or discrete in a secure sum."""

LARGEST_EPSILON = 500.0
"""Epsilons above it are reported as infinite: they promise nothing, and e^epsilon soon exceeds floating point."""

_INTERVAL = 1e-3
"""Discretisation of the privacy losses for an epsilon of at most 30 and noise multipliers of at least 0.3: a finer one
changes epsilon by less than a thousandth. It grows with epsilon, and as the losses of a step do, with 1 / z^2."""

_LEAST_NOISE = 1e-3
"""Noise multipliers below it count as no noise."""

_PRECISION = 1e-4
"""Relative precision of a noise multiplier; it is rounded up."""

_LARGEST_EXPONENT = 700.0
"""Of e in floating point, rounded down."""

_FACTOR = 1.02
"""First step of the search for a noise multiplier, up or down; squared with each further step."""


class NoisyStep(NamedTuple):
    """One application of a mechanism.

    Attributes:
        mechanism: The mechanism.
        noise_multiplier: Standard deviation of the noise in units of the sensitivity, at least 0.
        sample_rate: Probability q with which a record is in a batch, in (0, 1]; 1 for the other mechanisms.
    """

    mechanism: Mechanism
    noise_multiplier: float
    sample_rate: float = 1.0


def composed_epsilon(steps: Mapping[NoisyStep, int], delta: float) -> float:
    """Return the epsilon of all steps together.

    Args:
        steps: How many times each step was taken, at least 0.
        delta: Probability with which the bound may fail, strictly between 0 and 1.

    Returns:
        The epsilon; infinite if a step has no noise, or above `LARGEST_EPSILON`.

    Raises:
        ValueError: If an argument is outside its range.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must be above 0 and below 1, got {delta}")
    for step, count in steps.items():
        _check(step, count)
    taken = tuple(sorted((step, count) for step, count in steps.items() if count))
    epsilon = _composed(taken, delta) if taken else 0.0
    return epsilon if epsilon <= LARGEST_EPSILON else math.inf


def record_epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return the epsilon of noisy steps on Poisson batches.

    Args:
        noise_multiplier: Standard deviation of the noise on a step's sum of gradients, in units of the clipping norm.
        sample_rate: Probability q with which a record is in a batch, in (0, 1].
        steps: Number of steps, at least 0.
        delta: Probability with which the bound may fail, strictly between 0 and 1.

    Raises:
        ValueError: If an argument is outside its range.
    """
    return composed_epsilon({NoisyStep("sampled-gaussian", noise_multiplier, sample_rate): steps}, delta)


def central_limit_epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return about the epsilon of noisy steps on Poisson batches, by the central limit of their composition.

    The steps are nearly mu-GDP with mu = q sqrt(T (e^(1/z^2) - 1)) for many steps (Bu, Dong, Long, Su, Harvard Data
    Science Review 2020, corollary 4), which is how PriFedSync (Zheng et al., AISTATS 2021) accounts. It can be below
    the true epsilon, so it is no bound. Arguments and errors are those of `record_epsilon`.
    """
    _check(NoisyStep("sampled-gaussian", noise_multiplier, sample_rate), steps)
    if not steps:
        return 0.0
    if noise_multiplier < _LEAST_NOISE:
        return math.inf
    losses = min(1 / noise_multiplier**2, _LARGEST_EXPONENT)
    return smallest_epsilon(1 / (sample_rate * math.sqrt(steps * math.expm1(losses))), delta, 1.0)


@lru_cache(maxsize=1024)
def record_noise(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Return the smallest noise multiplier for a budget, up to a relative error of 1e-4; see `record_epsilon`.

    Args:
        epsilon: The budget; above 0, at most `LARGEST_EPSILON`.
        delta: Probability with which the bound may fail, strictly between 0 and 1.
        sample_rate: Probability q with which a record is in a batch, in (0, 1].
        steps: Number of steps, at least 1.

    Raises:
        ValueError: If an argument is outside its range.
    """
    _check_budget(epsilon, "steps", steps)
    _check(NoisyStep("sampled-gaussian", 1.0, sample_rate), steps)
    # Where to search: at the noise of which the central limit spends epsilon, see `_scale`.
    single = 1 / (smallest_sigma(epsilon, delta, 1.0) * sample_rate)
    limit = 1 / math.sqrt(math.log1p(single**2 / steps))
    return _smallest_noise(lambda z: record_epsilon(z, sample_rate, steps, delta), epsilon, limit)


def client_epsilon(noise_multiplier: float, rounds: int, delta: float, noise: Noise) -> float:
    """Return the epsilon of noise on the sums of some rounds, for whole clients.

    Args:
        noise_multiplier: Standard deviation z of the noise on the sum, in units of the clipping norm; at least 0.
        rounds: Number of releases, at least 0.
        delta: Probability with which the bound may fail, strictly between 0 and 1.
        noise: Where the noise is added; `sum` adds discrete Gaussians, which are accounted by zero-concentrated
            privacy.

    Returns:
        The epsilon; infinite without noise.

    Raises:
        ValueError: If an argument is outside its range.
    """
    mechanism: Mechanism = "discrete-gaussian" if noise == "sum" else "gaussian"
    return composed_epsilon({NoisyStep(mechanism, noise_multiplier): rounds}, delta)


@lru_cache(maxsize=1024)
def client_noise(epsilon: float, delta: float, rounds: int, noise: Noise) -> float:
    """Return the smallest noise multiplier for a budget over some rounds; see `client_epsilon`.

    Args:
        epsilon: The budget; above 0, at most `LARGEST_EPSILON`.
        delta: Probability with which the bound may fail, strictly between 0 and 1.
        rounds: Number of releases, at least 1.
        noise: Where the noise is added.

    Raises:
        ValueError: If an argument is outside its range.
    """
    _check_budget(epsilon, "rounds", rounds)
    exact = smallest_sigma(epsilon, delta, 1.0) * math.sqrt(rounds)
    if noise != "sum":
        return exact
    return _smallest_noise(lambda z: client_epsilon(z, rounds, delta, noise), epsilon, exact)


def _check(step: NoisyStep, count: int) -> None:
    if not 0 <= step.noise_multiplier < math.inf:
        raise ValueError(f"the noise multiplier must be at least 0 and finite, got {step.noise_multiplier}")
    if not 0 < step.sample_rate <= 1:
        raise ValueError(f"the sample rate must be above 0 and at most 1, got {step.sample_rate}")
    if count < 0:
        raise ValueError(f"the number of steps must be at least 0, got {count}")


def _check_budget(epsilon: float, name: str, count: int) -> None:
    if not 0 < epsilon <= LARGEST_EPSILON:
        raise ValueError(f"epsilon must be above 0 and at most {LARGEST_EPSILON:g}, got {epsilon}")
    if count < 1:
        raise ValueError(f"the number of {name} must be at least 1, got {count}")


@lru_cache(maxsize=1024)
def _composed(taken: tuple[tuple[NoisyStep, int], ...], delta: float) -> float:
    """Return the epsilon of steps that were taken at least once; see `composed_epsilon`."""
    sampled = [(step, count) for step, count in taken if step.sample_rate < 1]
    whole = [(step, count) for step, count in taken if step.sample_rate == 1]
    if any(step.noise_multiplier < _LEAST_NOISE for step, _ in taken):
        return math.inf
    precision = sum(count / step.noise_multiplier**2 for step, count in whole)  # Gaussians add their 1 / z^2
    discrete = any(step.mechanism == "discrete-gaussian" for step, _ in whole)
    if not sampled and not discrete:
        return smallest_epsilon(1 / math.sqrt(precision), delta, 1.0)

    import dp_accounting  # deferred, as its accountants below: takes seconds

    accountant: dp_accounting.PrivacyAccountant
    if discrete:
        from dp_accounting.rdp import RdpAccountant

        accountant = RdpAccountant()
        accountant.compose(dp_accounting.ZCDpEvent(precision / 2))
    else:
        from dp_accounting.pld import PLDAccountant

        scale, least = _scale(taken, delta), min(step.noise_multiplier for step, _ in sampled)
        if scale > 2 * LARGEST_EPSILON:
            return math.inf
        interval = _INTERVAL * max(1, scale / 30, (0.3 / least) ** 2)
        accountant = PLDAccountant(value_discretization_interval=interval)
        if precision:
            accountant.compose(dp_accounting.GaussianDpEvent(1 / math.sqrt(precision)))
    for step, count in sampled:
        noise = dp_accounting.GaussianDpEvent(step.noise_multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(step.sample_rate, noise), count)
    # Where epsilon is beyond 700, dp-accounting divides by a mass near the smallest float64; it returns infinity then.
    with np.errstate(over="ignore"):
        return float(accountant.get_epsilon(delta))


def _scale(taken: Iterable[tuple[NoisyStep, int]], delta: float) -> float:
    """Return about the epsilon of steps: the smaller one of their central limit and of the steps on all records.

    The central limit of the composition (Bu, Dong, Long, Su, Harvard Data Science Review 2020, corollary 4) is one
    Gaussian mechanism with 1 / sigma^2 = sum of q^2 (e^(1/z^2) - 1); with little noise it is far too large.
    """
    limit = whole = 0.0
    for step, count in taken:
        losses = 1 / step.noise_multiplier**2
        limit += count * step.sample_rate**2 * math.expm1(min(losses, _LARGEST_EXPONENT))
        whole += count * losses
    return smallest_epsilon(1 / math.sqrt(min(limit, whole)), delta, 1.0)


def _smallest_noise(spent: Callable[[float], float], epsilon: float, near: float) -> float:
    """Return the smallest noise multiplier that spends at most epsilon, searched from a value near it.

    The epsilon that noise spends falls nearly as a power of the noise: few evaluations suffice on logarithmic axes.
    """
    from scipy.optimize import brentq  # deferred: takes a third of a second

    def excess(log_noise: float) -> float:
        found = min(spent(math.exp(log_noise)), LARGEST_EPSILON * 2)
        return math.log(found / epsilon) if found else -math.inf

    low = high = math.log(near)
    step = math.log(_FACTOR)
    if excess(low) > 0:
        while excess(high := high + step) > 0:
            low, step = high, 2 * step
    else:
        while excess(low := low - step) <= 0:
            high, step = low, 2 * step
    found = math.exp(float(brentq(lambda x: max(excess(x), -1.0), low, high, xtol=_PRECISION / 4)))
    while spent(found) > epsilon:  # the root may lie on either side
        found *= 1 + _PRECISION / 4
    return found
