"""The mean of a round with the server's noise: how much noise there is, and on which grid it lies."""

import numpy as np
import pytest

from hyperfl_flwr.config.privacy import PrivacyConfig
from strategies.engine.client_privacy import noisy_means


def privacy_of(multiplier: float) -> PrivacyConfig:
    return PrivacyConfig.model_validate(
        {"unit": "client", "noise": "server", "clip-norm": 0.5, "noise-multiplier": multiplier}
    )


def test_the_noise_covers_the_rounding_of_the_sum() -> None:
    """By hand: 20,000 elements that move by 0.005 more than the client's change add 0.005 sqrt(20,000) to C = 0.5."""
    received, changes = {"net/x": np.full(20_000, 3.0)}, {"net/x": np.full(20_000, 0.25)}
    means = noisy_means(privacy_of(0.4), received, changes, {"net/x": 0.005}, 10)["net/x"]
    expected = 0.4 * (0.5 + 0.005 * np.sqrt(20_000)) / 10
    assert means.std() == pytest.approx(expected, rel=0.03)
    assert means.mean() == pytest.approx(3.025, abs=6 * expected / np.sqrt(20_000))


def test_sums_of_many_clients_are_on_a_grid_that_is_exact_for_them() -> None:
    """By hand: with hardly any noise, sums up to 2^20 of 2^21 clients are multiples of 2^(21 - 48)."""
    clients, changes = 2**21, np.random.default_rng(0).uniform(-(2**20), 2**20, 1000)
    means = noisy_means(privacy_of(1e-12), {"net/x": np.zeros(1000)}, {"net/x": changes}, {"net/x": 0.0}, clients)
    sums = means["net/x"] * clients
    assert (sums * 2.0**27 == np.rint(sums * 2.0**27)).all()
    assert np.abs(sums - changes).max() < 2.0**-27
