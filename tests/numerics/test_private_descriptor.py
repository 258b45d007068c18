"""The private mean of unit vectors: its sensitivity, its noise and its errors."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from hyperfl_flwr.privacy.gaussian_mechanism import smallest_sigma
from hyperfl_flwr.privacy.private_mean import private_unit_mean, unit_mean, unit_mean_sensitivity

FEATURES = np.array([[3.0, 4.0], [0.0, -2.0], [1e-200, 0.0], [0.0, 0.0]])
"""The unit vectors are (0.6, 0.8), (0, -1), (1, 0) and, for the row of zeros, zero."""


def test_rows_are_averaged_as_unit_vectors_and_zeros_stay_zero():
    """This also holds where squares underflow or overflow, and from float32; the input is not changed."""
    before = FEATURES.copy()
    np.testing.assert_allclose(unit_mean(FEATURES), [1.6 / 4, -0.2 / 4], rtol=1e-15)
    np.testing.assert_array_equal(FEATURES, before)
    np.testing.assert_allclose(unit_mean([[3e200, 4e200], [5e-324, 0.0]]), [0.8, 0.4], rtol=1e-15)
    np.testing.assert_allclose(unit_mean(np.float32([[3e30, 4e30]])), [0.6, 0.8], rtol=1e-7)
    np.testing.assert_array_equal(unit_mean(np.zeros((3, 2))), [0.0, 0.0])


@pytest.mark.parametrize("samples", [1, 2, 7, 3000])
def test_opposite_unit_vectors_attain_the_sensitivity(samples):
    """Replacing one sample by an opposite one moves the mean by exactly 2 / n."""
    features = np.random.default_rng(samples).normal(size=(samples, 5))
    neighbour = features.copy()
    neighbour[0] *= -3.0
    moved = np.linalg.norm(unit_mean(features) - unit_mean(neighbour))
    assert moved == pytest.approx(unit_mean_sensitivity(samples), rel=1e-9)
    assert unit_mean_sensitivity(samples) == pytest.approx(2 / samples)


def test_no_replacement_found_by_search_moves_the_mean_further():
    """Random ascent over datasets and the sample that replaces their last, at any scale and with zeros.

    It comes near the bound, so it would have found a larger move.
    """
    rng = np.random.default_rng(0)
    reached = []
    for _ in range(20):
        samples, width = int(rng.integers(1, 6)), int(rng.integers(2, 5))
        scales = 10.0 ** rng.uniform(-290, 290, size=(samples + 1, 1)) * (rng.random((samples + 1, 1)) > 0.2)
        rows = rng.normal(size=(samples + 1, width)) * scales
        best = move(rows)
        for _ in range(200):
            size = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1e-290)
            tried = rows + rng.normal(size=rows.shape) * size * rng.choice([0.01, 0.1, 1.0])
            if (moved := move(tried)) >= best:
                best, rows = moved, tried
        reached.append(best / unit_mean_sensitivity(samples))
    assert max(reached) <= 1 + 1e-12
    assert min(reached) > 0.95


def move(rows: np.ndarray) -> float:
    """Return how far the mean of all rows but the last moves if the last of them is replaced by that row."""
    return float(np.linalg.norm(unit_mean(rows[:-1]) - unit_mean(np.delete(rows, -2, axis=0))))


def test_noise_has_the_mechanisms_size_and_mean_zero_on_every_coordinate():
    """A Kolmogorov-Smirnov test of 200,000 coordinates of the mean of 4 samples, with sensitivity 2 / 4."""
    features = np.random.default_rng(0).normal(size=(4, 200_000))
    noise = private_unit_mean(features, 1.5, 1e-5) - unit_mean(features)
    sigma = smallest_sigma(1.5, 1e-5, 0.5)
    assert noise.std() == pytest.approx(sigma, rel=0.01)
    assert stats.kstest(noise, "norm", args=(0, sigma)).pvalue > 1e-4


def test_no_seed_repeats_the_noise():
    draws = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        draws.append(private_unit_mean(FEATURES, 1.0, 1e-5))
    assert draws[0].shape == (2,)
    assert (draws[0] != draws[1]).all()


def test_two_neighbours_differ_in_distribution_by_delta():
    """Draws for samples (1, 0) and (-1, 0), counted in the half plane where the first is e^epsilon times as likely.

    There P - e^epsilon Q is delta, within five standard errors.
    """
    epsilon, delta, draws = 0.5, 0.5, 3000
    edge = epsilon * smallest_sigma(epsilon, delta, 2.0) ** 2 / 2
    one, other = (
        np.mean([private_unit_mean([[sign, 0.0]], epsilon, delta)[0] > edge for _ in range(draws)]) for sign in (1, -1)
    )
    error = math.sqrt((one * (1 - one) + math.exp(2 * epsilon) * other * (1 - other)) / draws)
    assert one - math.exp(epsilon) * other == pytest.approx(delta, abs=5 * error)
    assert 5 * error < 0.2 * delta


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (np.zeros((0, 3)), "non-empty matrix"),
        (np.zeros((3, 0)), "non-empty matrix"),
        (np.ones(3), "non-empty matrix"),
        ([[1.0, math.nan]], "finite"),
        ([[1.0, 2.0], [math.inf, 0.0]], "finite"),
    ],
)
def test_unfit_features_are_refused(features, message):
    with pytest.raises(ValueError, match=message):
        private_unit_mean(features, 1.0, 1e-5)


def test_impossible_privacy_and_no_samples_are_refused():
    with pytest.raises(ValueError, match="epsilon must be positive"):
        private_unit_mean(FEATURES, 0.0, 1e-5)
    with pytest.raises(ValueError, match="delta must be above 0"):
        private_unit_mean(FEATURES, 1.0, 1.0)
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        unit_mean_sensitivity(0)
