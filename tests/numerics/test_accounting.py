"""Accounting: known answers, the definition of the single mechanisms, and what must hold for any arguments."""

import math
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.privacy.accounting import (
    LARGEST_EPSILON,
    NoisyStep,
    client_epsilon,
    client_noise,
    composed_epsilon,
    record_epsilon,
    record_noise,
)
from hyperfl_flwr.privacy.gaussian_mechanism import smallest_epsilon, smallest_sigma

DELTA = 1e-5

NOISE = st.floats(0.4, 20)
RATE = st.floats(1e-3, 1)
STEPS = st.integers(1, 5000)


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "expected"), [(1, 1, 1, 4.377), (1, 0.01, 1000, 1.83), (2.367, 50 / 600, 600, 4.0)]
)
def test_known_epsilons_of_records(noise: float, rate: float, steps: int, expected: float) -> None:
    """Computed independently: by the analytic Gaussian mechanism, and by opacus' PRV accountant (1.84)."""
    assert record_epsilon(noise, rate, steps, DELTA) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("steps", "expected"), [(300, 1.778), (600, 2.367), (1200, 3.24), (12000, 9.92)])
def test_known_noise_of_records(steps: int, expected: float) -> None:
    assert record_noise(4, DELTA, 50 / 600, steps) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("noise", "server", "in_sum"), [(1, 17.86, 19.05), (2, 7.51, 8.08), (3, 4.65, 5.02), (5, 2.59, 2.81)]
)
def test_known_epsilons_of_clients(noise: float, server: float, in_sum: float) -> None:
    assert client_epsilon(noise, 10, DELTA, "server") == pytest.approx(server, abs=0.005)
    assert client_epsilon(noise, 10, DELTA, "local") == client_epsilon(noise, 10, DELTA, "server")
    assert client_epsilon(noise, 10, DELTA, "sum") == pytest.approx(in_sum, abs=0.005)


@pytest.mark.parametrize(("rounds", "expected"), [(10, 3.42), (20, 4.83), (50, 7.64), (200, 15.29)])
def test_known_noise_of_clients(rounds: int, expected: float) -> None:
    assert client_noise(4, DELTA, rounds, "server") == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("epsilon", [0.5, 4.0, 50.0])
@pytest.mark.parametrize("rate", [1.0, 0.1, 0.001])
def test_noise_is_the_least_that_suffices(epsilon: float, rate: float) -> None:
    noise = record_noise(epsilon, DELTA, rate, 200)
    assert record_epsilon(noise, rate, 200, DELTA) <= epsilon < record_epsilon(noise * (1 - 1e-3), rate, 200, DELTA)
    summed = client_noise(epsilon, DELTA, 7, "sum")
    assert client_epsilon(summed, 7, DELTA, "sum") <= epsilon < client_epsilon(summed * (1 - 1e-3), 7, DELTA, "sum")


@settings(max_examples=30, deadline=None)
@given(noise=NOISE, rate=RATE, steps=STEPS)
@example(noise=1.0, rate=0.9375, steps=1279)  # beyond the largest epsilon
def test_epsilon_falls_with_noise_and_rises_with_rate_and_steps(noise: float, rate: float, steps: int) -> None:
    """The discretisation may add a thousandth."""
    epsilon = record_epsilon(noise, rate, steps, DELTA)
    more = 1e-3 * (1 + min(epsilon, LARGEST_EPSILON))
    assert record_epsilon(1.1 * noise, rate, steps, DELTA) <= epsilon + more
    assert record_epsilon(noise, 0.9 * rate, steps, DELTA) <= epsilon + more
    assert record_epsilon(noise, rate, steps // 2, DELTA) <= epsilon + more
    assert record_epsilon(noise, 1.0, steps, DELTA) >= epsilon - more  # sampling amplifies


@settings(max_examples=50, deadline=None)
@given(noise=st.floats(0.05, 50), rounds=st.integers(1, 1000))
def test_discrete_noise_costs_more_and_rounds_more(noise: float, rounds: int) -> None:
    exact = client_epsilon(noise, rounds, DELTA, "server")
    assert client_epsilon(noise, rounds, DELTA, "sum") >= exact
    assert client_epsilon(noise, rounds + 1, DELTA, "server") >= exact
    assert client_epsilon(1.1 * noise, rounds, DELTA, "server") <= exact


def test_runs_are_composed() -> None:
    """One run of 600 steps is two of 300; Gaussians add 1 / z^2; a second mechanism costs more than the first alone."""
    sampled, whole, discrete = (
        NoisyStep("sampled-gaussian", 2.0, 0.1), NoisyStep("gaussian", 3.0), NoisyStep("discrete-gaussian", 3.0)
    )  # fmt: skip
    other = NoisyStep("sampled-gaussian", 2.0 + 1e-12, 0.1)
    together = composed_epsilon({sampled: 600}, DELTA)
    assert composed_epsilon({sampled: 300, other: 300}, DELTA) == pytest.approx(together, rel=1e-3)
    apart = {whole: 9, NoisyStep("gaussian", 1.0): 1}
    one = composed_epsilon({NoisyStep("gaussian", math.sqrt(0.5)): 1}, DELTA)
    assert composed_epsilon(apart, DELTA) == pytest.approx(one, rel=1e-12)
    mixed = composed_epsilon({sampled: 600, whole: 2}, DELTA)
    assert together < mixed < composed_epsilon({sampled: 600, discrete: 2}, DELTA)
    assert mixed < together + composed_epsilon({whole: 2}, DELTA)


def test_a_gaussian_is_a_step_on_all_records() -> None:
    """With sample rate 1 the mechanisms are the same, and the exact epsilon is used."""
    exact = smallest_epsilon(2 / math.sqrt(5), DELTA, 1.0)
    assert record_epsilon(2, 1, 5, DELTA) == client_epsilon(2, 5, DELTA, "server") == pytest.approx(exact, rel=1e-12)
    nearly = record_epsilon(2, 1 - 1e-9, 5, DELTA)
    assert exact < nearly < exact * 1.01


def test_epsilon_is_0_without_releases_and_infinite_without_noise() -> None:
    assert record_epsilon(1, 0.1, 0, DELTA) == client_epsilon(0, 0, DELTA, "sum") == composed_epsilon({}, DELTA) == 0
    for rate in (1, 0.1):
        assert record_epsilon(0, rate, 1, DELTA) == math.inf
    for noise, rate, steps in ((1e-3, 1e-4, 1), (0.03, 0.01, 1000), (1.0, 0.5, 5000), (0.03, 0.5, 1), (1e-200, 1, 1)):
        assert record_epsilon(noise, rate, steps, DELTA) == math.inf  # above the largest that is reported
    assert 300 < record_epsilon(0.04, 0.01, 1, DELTA) < LARGEST_EPSILON
    assert client_epsilon(0, 1, DELTA, "local") == client_epsilon(0, 1, DELTA, "sum") == math.inf
    assert client_epsilon(1e-2, 1, DELTA, "server") == math.inf


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: record_epsilon(-1, 0.1, 1, DELTA), "noise multiplier must be at least 0"),
        (lambda: record_epsilon(math.nan, 0.1, 1, DELTA), "noise multiplier must be at least 0"),
        (lambda: record_epsilon(math.inf, 0.1, 1, DELTA), "finite, got inf"),
        (lambda: record_epsilon(1, 0, 1, DELTA), "sample rate must be above 0 and at most 1, got 0"),
        (lambda: record_epsilon(1, 1.1, 1, DELTA), "sample rate must be above 0 and at most 1, got 1.1"),
        (lambda: record_epsilon(1, 0.1, -1, DELTA), "number of steps must be at least 0, got -1"),
        (lambda: record_epsilon(1, 0.1, 1, 0), "delta must be above 0 and below 1, got 0"),
        (lambda: client_epsilon(1, 1, 1.0, "sum"), "delta must be above 0 and below 1, got 1.0"),
        (lambda: record_noise(0, DELTA, 0.1, 1), "epsilon must be above 0 and at most 500, got 0"),
        (lambda: record_noise(math.inf, DELTA, 0.1, 1), "epsilon must be above 0 and at most 500, got inf"),
        (lambda: record_noise(1, DELTA, 0.1, 0), "number of steps must be at least 1, got 0"),
        (lambda: record_noise(1, DELTA, 1.5, 1), "sample rate must be above 0 and at most 1, got 1.5"),
        (lambda: client_noise(1, DELTA, 0, "sum"), "number of rounds must be at least 1, got 0"),
        (lambda: client_noise(1, 2.0, 1, "sum"), "delta must be above 0 and below 1, got 2.0"),
        (lambda: smallest_epsilon(0, DELTA, 1), "sigma must be positive and finite, got 0"),
        (lambda: smallest_epsilon(1, 1, 1), "delta must be above 0 and below 1, got 1"),
        (lambda: smallest_epsilon(1, DELTA, math.inf), "sensitivity must be positive and finite, got inf"),
    ],
)
def test_wrong_arguments_are_refused(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()


@settings(max_examples=200, deadline=None)
@given(epsilon=st.floats(1e-3, 1e6), delta=st.floats(1e-15, 0.1), sensitivity=st.floats(1e-6, 1e6))
def test_epsilon_inverts_sigma(epsilon: float, delta: float, sensitivity: float) -> None:
    sigma = smallest_sigma(epsilon, delta, sensitivity)
    assert smallest_epsilon(sigma, delta, sensitivity) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
def test_epsilon_is_never_too_small(delta: float) -> None:
    """Noise for the epsilon that is returned is not more than the noise that was given."""
    sigmas = [0.01 * 1.5**n for n in range(25)]
    epsilons = [smallest_epsilon(sigma, delta, 1.0) for sigma in sigmas]
    for sigma, epsilon in zip(sigmas, epsilons, strict=True):
        if epsilon:
            assert smallest_sigma(epsilon, delta, 1.0) <= sigma * (1 + 1e-8)
        else:  # the noise hides everything: the total variation erf(1 / (sqrt(8) sigma)) is below delta
            assert math.erf(1 / (math.sqrt(8) * sigma)) <= delta
    assert all(one >= next_one for one, next_one in pairwise(epsilons))
    assert smallest_epsilon(1e-200, delta, 1.0) == math.inf
    assert smallest_epsilon(1e300, delta, 1e-300) == 0


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [("dp.epsilon", LARGEST_EPSILON, "500"), ("dp.delta", 0.1, "0.1"), ("privacy.delta", 0.1, "0.1")],
)
def test_settings_that_cannot_be_accounted_are_refused(key: str, value: float, limit: str) -> None:
    """The largest budget of a run is the largest that is computed; more fails before anything is trained."""
    RunConfig.from_flat(default_settings() | {key: value})
    with pytest.raises(ConfigError, match=f"{key} must be less than or equal to {limit}"):
        RunConfig.from_flat(default_settings() | {key: 1.001 * value})
