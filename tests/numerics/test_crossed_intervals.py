"""Intervals over clients and seeds: how often they cover the mean, and what they are in cases that are known."""

import numpy as np
import pytest
from scipy.stats import t

from hyperfl_flwr.metrics.intervals import of_crossed_means, of_mean

TRIALS = 1500


def coverage(seeds: int, clients: int, of_seeds: float, of_pairs: float, rng: np.random.Generator) -> float:
    """Return the share of intervals that contain the mean, 0; variances are in those of a client's effect."""
    values = (
        rng.normal(size=(TRIALS, 1, clients))
        + np.sqrt(of_seeds) * rng.normal(size=(TRIALS, seeds, 1))
        + np.sqrt(of_pairs) * rng.normal(size=(TRIALS, seeds, clients))
    )
    low, high = of_crossed_means(values)
    return float(((low <= 0) & (high >= 0)).mean())


@pytest.mark.parametrize("clients", [5, 20])
def test_the_interval_covers_the_mean_as_often_as_its_docstring_says(clients: int) -> None:
    """The shares are within 2 points, about three standard errors, of the bounds."""
    rng = np.random.default_rng(clients)
    for seeds in (1, 2, 3, 5):
        for of_pairs in (0.0, 0.5, 2.0):
            assert 0.93 <= coverage(seeds, clients, 0.0, of_pairs, rng) <= 0.995
    for seeds, least in ((2, 0.88), (3, 0.92), (5, 0.94)):
        for of_seeds in (0.01, 0.1, 1.0):
            assert coverage(seeds, clients, of_seeds, 0.5, rng) >= least - 0.02


def test_clients_of_one_federation_are_not_independent() -> None:
    """What a seed changes for all clients must widen the interval; Student's over the clients covers a third."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(500, 3, 1)) + rng.normal(size=(500, 1, 100))
    over_clients = [of_mean(each.mean(), each.mean(0).std(ddof=1), 100) for each in values]
    assert np.mean([ends is not None and ends[0] <= 0 <= ends[1] for ends in over_clients]) < 0.4
    low, high = of_crossed_means(values)
    assert np.mean((low <= 0) & (high >= 0)) > 0.88


def test_one_seed_is_student_s_interval_over_the_clients() -> None:
    values = np.random.default_rng(0).normal(size=7)
    expected = of_mean(float(values.mean()), float(values.std(ddof=1)), 7)
    assert of_crossed_means(values[None]) == pytest.approx(expected)
    missing = np.append(values, np.nan)
    assert of_crossed_means(missing[None]) == pytest.approx(expected)


def test_the_variance_is_that_of_both_samples() -> None:
    """With all values known, it is the sum of the squared standard errors of the means of the clients and the seeds."""
    values = np.random.default_rng(0).normal(size=(3, 6)) + np.arange(3)[:, None]
    parts = [values.mean(0).var(ddof=1) / 6, values.mean(1).var(ddof=1) / 3]
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 5 + parts[1] ** 2 / 2)
    margin = t.ppf(0.975, freedom) * np.sqrt(sum(parts))
    assert of_crossed_means(values) == pytest.approx((values.mean() - margin, values.mean() + margin))


def test_equal_values_have_an_interval_of_no_width_and_one_client_has_none() -> None:
    assert of_crossed_means(np.full((2, 3), 0.25)) == (0.25, 0.25)
    assert np.isnan(of_crossed_means(np.array([[1.0], [2.0]]))).all()
