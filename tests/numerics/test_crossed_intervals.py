"""Intervals over clients and seeds: how often they cover the mean, and what they are in cases that are known."""

import numpy as np
import pytest
from scipy.stats import t

from hyperfl_flwr.metrics.intervals import of_crossed_means, of_jackknife, of_mean, of_weighted_mean
from hyperfl_flwr.results.differences import Scores, interval_over_clients

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


def drawn(clients: int, share: float, seeds: int, of_pairs: float, rng: np.random.Generator) -> tuple[Scores, float]:
    """Return scores of the clients that each seed draws, and the mean of all such clients with these seeds."""
    of_clients, of_seeds = rng.normal(size=clients), rng.normal(size=seeds)
    return {
        (seed, (0, int(client))): of_clients[client] + of_seeds[seed] + np.sqrt(of_pairs) * rng.normal()
        for seed in range(seeds)
        for client in rng.choice(clients, round(share * clients), replace=False)
    }, of_seeds.mean()


def mean_of_seeds(scores: Scores) -> float:
    """Return the mean that a table shows: that of each seed's mean."""
    seeds = {seed for seed, _ in scores}
    return float(np.mean([np.mean([score for place, score in scores.items() if place[0] == seed]) for seed in seeds]))


@pytest.mark.parametrize(("clients", "share"), [(10, 0.3), (20, 0.5), (50, 0.1)])
def test_intervals_of_clients_in_unequal_numbers_of_seeds(clients: int, share: float) -> None:
    """They are around the mean of the seeds' means, and cover that of all clients: within 2 points of 94 to 98 %."""
    rng = np.random.default_rng(clients)
    for seeds, of_pairs in ((2, 0.5), (3, 0.0), (3, 2.0), (5, 0.5)):
        covered = 0
        for _ in range(TRIALS):
            scores, mean = drawn(clients, share, seeds, of_pairs, rng)
            ends = interval_over_clients(scores)
            assert ends is not None
            assert sum(ends) / 2 == pytest.approx(mean_of_seeds(scores))
            covered += ends[0] <= mean <= ends[1]
        assert 0.92 <= covered / TRIALS <= 0.995


def test_intervals_of_clients_in_equal_numbers_of_seeds_are_student_s() -> None:
    """Of the clients' means: the same clients with each seed, or those of another division of the data with each."""
    values = np.random.default_rng(0).normal(size=(3, 6))
    places = [(seed, client) for seed in range(3) for client in range(6)]
    same = interval_over_clients({(seed, (0, client)): values[seed, client] for seed, client in places})
    other = interval_over_clients({(seed, (seed, client)): values[seed, client] for seed, client in places})
    for found, of_clients in ((same, values.mean(0)), (other, values.ravel())):
        expected = of_mean(float(of_clients.mean()), float(of_clients.std(ddof=1)), len(of_clients))
        assert found == pytest.approx(expected, rel=1e-9)
    assert interval_over_clients({(seed, (0, 0)): 1.0 for seed in range(3)}) is None


def test_each_seed_counts_as_much_also_one_with_fewer_clients() -> None:
    """Means 2 and 5 of the seeds; the first client is in both."""
    scores = {(0, (0, 0)): 1.0, (0, (0, 1)): 3.0, (1, (0, 0)): 5.0}
    ends = interval_over_clients(scores)
    assert ends is not None
    assert sum(ends) / 2 == pytest.approx(3.5)


def test_the_variance_of_a_weighted_mean() -> None:
    """Mean 0.5 * 1 + 0.25 * (2 + 4) = 2; variance (0.5 * 1)^2 / 0.5 + (0.25 * 2)^2 / 0.75 = 5/6; 8/3 - 1 freedoms."""
    margin = t.ppf(0.975, 8 / 3 - 1) * np.sqrt(5 / 6)
    assert of_weighted_mean([1.0, 2.0, 4.0], [0.5, 0.25, 0.25]) == pytest.approx((2 - margin, 2 + margin))


def test_the_jackknife_s_variance_is_around_the_mean_of_its_parts() -> None:
    """By hand: parts 1 and 3 have the variance 1/2 (1 + 1) = 1, whatever the number itself is."""
    margin = t.ppf(0.975, 1)
    assert of_jackknife(10.0, [1.0, 3.0]) == pytest.approx((10 - margin, 10 + margin))
    assert of_jackknife(10.0, [1.0]) is None
