"""SCAFFOLD: control variates with momentum, the true optimum of quadratic problems, and its special cases."""

import itertools

import numpy as np
import pytest
import torch
from rounds import Quadratics

from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, new_optimiser
from hyperfl_flwr.training.scaffold import control_change


@pytest.fixture(autouse=True)
def double(float64):
    """Compute in float64."""


HALVES = itertools.cycle([(0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2)])
"""Half of four clients a round."""


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_own_control_variate_becomes_the_mean_gradient(momentum):
    """With a constant gradient g the new c_i = c_i + d is g, whatever c, c_i and the momentum are."""
    gradient, control, own = (torch.randn(5, generator=torch.Generator().manual_seed(k)) for k in range(3))
    received = torch.ones(5)
    y = received.clone().requires_grad_(True)
    epochs = Epochs(epochs=1, batch_size=1, steps=7, momentum=momentum)
    optimiser = new_optimiser([ParameterSet(parameters=[y], learning_rate=0.1)], epochs)
    for _ in range(7):
        y.grad = gradient + control - own
        optimiser.step()
    change = control_change(received, y.detach(), control, 0.1 * epochs.reach(1))
    torch.testing.assert_close(own + change, gradient, rtol=0, atol=1e-13)


def controls(toy):
    """Return c and the mean of all c_i."""
    own = [toy.private(client)["own-control/theta"] for client in toy.versions]
    return toy.sent["control/theta"], np.mean(own, axis=0)


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        ((4, 4, 4, 4), {"momentum": 0.0, "weight-decay": 0.0}),
        ((2, 5, 3, 7), {"momentum": 0.9, "weight-decay": 0.01, "learning-rate": 0.02}),
        ((3, 3, 3, 3), {"momentum": 0.5, "weight-decay": 0.0, "scaffold.server-learning-rate": 0.7}),
    ],
    ids=["plain", "unequal steps, momentum, weight decay", "server's rate"],
)
def test_the_true_optimum_with_half_of_the_clients_a_round(steps, settings, tmp_path, monkeypatch):
    """The model is the minimum of the mean loss, c_i the gradient of f_i there; c is always the mean of all c_i."""
    toy = Quadratics("scaffold", tmp_path, monkeypatch, steps, **settings)
    for number, clients in zip(range(80), HALVES, strict=False):
        toy.round(clients)
        if number < 8:
            np.testing.assert_allclose(*controls(toy), rtol=0, atol=2e-15)
    np.testing.assert_allclose(*controls(toy), rtol=0, atol=1e-14)
    decay = settings["weight-decay"]
    np.testing.assert_allclose(toy.model(), toy.optimum(decay), rtol=0, atol=1e-9)
    for client in toy.versions:
        gradient = toy.a[client] * (toy.model() - toy.b[client]) + decay * toy.model()
        np.testing.assert_allclose(toy.private(client)["own-control/theta"], gradient, rtol=0, atol=1e-8)
    assert np.abs(toy.private(0)["own-control/theta"]).max() > 0.1


def test_fedavg_ends_elsewhere(tmp_path, monkeypatch):
    """The optimum above is out of reach without control variates."""
    toy = Quadratics("fedavg", tmp_path, monkeypatch, momentum=0.0, **{"weight-decay": 0.0})
    for _ in range(30):
        toy.round(range(4))
    assert np.abs(toy.model() - toy.optimum()).max() > 0.02


def test_the_number_of_steps_alone_diverges_with_momentum(tmp_path, monkeypatch):
    """With eta K instead of eta a(K, beta) in the divisor the error grows instead of falling."""
    errors = {}
    for rule in ("reach", "num_steps"):
        with monkeypatch.context() as patch:
            patch.setattr(Epochs, "reach", getattr(Epochs, rule))
            toy = Quadratics(
                "scaffold", tmp_path / rule, patch, (20, 20, 20, 20), momentum=0.9, **{"learning-rate": 0.02}
            )
            for _ in range(15):
                toy.round(range(4))
            errors[rule] = np.abs(toy.model() - toy.optimum(5e-5)).max()
    assert errors["reach"] < 0.05
    assert errors["num_steps"] > 1.0


def test_the_first_round_is_fedavgs_bit_for_bit(tmp_path, monkeypatch):
    """All control variates are 0: every client uploads FedAvg's model; with equal sizes so is the mean."""
    rounds = {}
    for method in ("scaffold", "fedavg"):
        toy = Quadratics(method, tmp_path / method, monkeypatch, momentum=0.5)
        rounds[method] = [toy.model(upload) for upload in toy.round(range(4)).values()], toy.model()
    (uploads, mean), (plain, plain_mean) = rounds.values()
    np.testing.assert_array_equal(uploads, plain)
    np.testing.assert_allclose(mean, plain_mean, rtol=0, atol=1e-15)


def test_one_client_alone_runs_sgd(tmp_path, monkeypatch):
    """With N = 1, c = c_1: the correction vanishes, and three rounds are those of FedAvg up to rounding."""
    models = []
    for method in ("scaffold", "fedavg"):
        toy = Quadratics(method, tmp_path / method, monkeypatch, (4,), momentum=0.5)
        for _ in range(3):
            toy.round([0])
        models.append(toy.model())
        if method == "scaffold":
            assert np.abs(toy.sent["control/theta"]).max() > 0.1
    np.testing.assert_allclose(*models, rtol=0, atol=1e-14)


def test_the_servers_rate_shortens_its_step(tmp_path, monkeypatch):
    """The next model is x + eta_g (mean y - x)."""
    toy = Quadratics("scaffold", tmp_path, monkeypatch, **{"scaffold.server-learning-rate": 0.7})
    start = toy.model()
    mean = np.mean([toy.model(upload) for upload in toy.round(range(4)).values()], axis=0)
    np.testing.assert_allclose(toy.model(), start + 0.7 * (mean - start), rtol=0, atol=1e-15)
