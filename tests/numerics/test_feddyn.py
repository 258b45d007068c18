"""FedDyn: the true optimum of quadratic problems, the corrections there, and its special cases."""

import itertools

import numpy as np
import pytest
from rounds import Quadratics


@pytest.fixture(autouse=True)
def double(float64):
    """Compute in float64."""


def corrections(toy):
    """Return h and the mean of all h_i."""
    own = [toy.private(client)["own-correction/theta"] for client in toy.versions]
    return toy.model(toy.strategy.remembered), np.mean(own, axis=0)


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        ((4, 4, 4, 4), {"momentum": 0.0}),
        ((2, 5, 3, 7), {"momentum": 0.5}),
    ],
    ids=["plain", "unequal steps, momentum"],
)
def test_the_true_optimum_with_half_of_the_clients_a_round(steps, settings, tmp_path, monkeypatch):
    """The model is the minimum of the mean loss, h_i the gradient of f_i there; h is always the mean of all h_i.

    There h = 0, so that x is the mean of the models that were received, too.
    """
    alpha = 1.0
    toy = Quadratics("feddyn", tmp_path, monkeypatch, steps, **settings, **{"weight-decay": 0.0, "feddyn.alpha": alpha})
    halves = itertools.cycle([(0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2)])
    for number, clients in zip(range(100), halves, strict=False):
        uploads = toy.round(clients)
        if number < 8:
            np.testing.assert_allclose(*corrections(toy), rtol=0, atol=2e-15)
        assert number or np.abs(corrections(toy)[0]).max() > 0.1
    np.testing.assert_allclose(*corrections(toy), rtol=0, atol=1e-14)
    np.testing.assert_allclose(toy.model(), toy.optimum(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.mean([toy.model(each) for each in uploads.values()], axis=0), toy.model(), atol=1e-6)
    for client in toy.versions:
        gradient = toy.a[client] * (toy.model() - toy.b[client])
        np.testing.assert_allclose(toy.private(client)["own-correction/theta"], gradient, rtol=0, atol=1e-5)


def test_the_first_round_is_fedproxs_and_the_server_goes_further(tmp_path, monkeypatch):
    """With h_i = 0 each client uploads FedProx's model with mu = alpha; with all clients x = mean y + (mean y - x)."""
    settings = {"feddyn.alpha": 0.7, "fedprox.mu": 0.7, "momentum": 0.5}
    toy = Quadratics("feddyn", tmp_path / "feddyn", monkeypatch, **settings)
    start = toy.model()
    uploads = [toy.model(upload) for upload in toy.round(range(4)).values()]
    plain = Quadratics("fedprox", tmp_path / "fedprox", monkeypatch, **settings)
    np.testing.assert_array_equal(uploads, [plain.model(upload) for upload in plain.round(range(4)).values()])
    mean = np.mean(uploads, axis=0)
    np.testing.assert_allclose(toy.model(), mean + (mean - start), rtol=0, atol=1e-14)


def test_an_absent_client_counts_in_the_servers_correction(tmp_path, monkeypatch):
    """The correction h steps by alpha |S| / N of the mean change of the |S| clients that took part."""
    toy = Quadratics("feddyn", tmp_path, monkeypatch, **{"feddyn.alpha": 0.3})
    start = toy.model()
    uploads = toy.round([2])
    change = toy.model(uploads[2]) - start
    np.testing.assert_allclose(corrections(toy)[0], -0.3 / 4 * change, rtol=0, atol=1e-15)
    np.testing.assert_allclose(toy.model(), toy.model(uploads[2]) + change / 4, rtol=0, atol=1e-14)
