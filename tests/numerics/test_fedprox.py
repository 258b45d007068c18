"""FedProx: the pull of a step, closed forms of its fixed point, and its special cases."""

import math

import numpy as np
import pytest
import torch
from federations import small_settings, trained
from members import client, initial_model, rounds
from plain import random_samples

from clients.fedavg import FedAvgClient
from clients.fedprox import FedProxClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, train_epochs


def descend(part, loss, steps, *, momentum=0.0, weight_decay=0.0):
    """Take SGD steps of the project along the gradient of `loss`."""
    epochs = Epochs(epochs=1, batch_size=3, steps=steps, momentum=momentum, weight_decay=weight_decay)
    data = random_samples(3, (1, 1, 1), 2)

    def objective(images, labels):
        return loss(), None

    train_epochs(lambda images: images, [part], data, epochs, np.random.default_rng(0), objective)


@pytest.mark.usefixtures("float64")
def test_a_step_is_gradient_clip_force_and_pull_decay_momentum():
    """Three steps on 5/2 |y - b|^2 equal the formula; the clip is active, and clipping the pull too would differ."""
    goal, force, anchor = torch.tensor([3.0, -4.0]), torch.tensor([0.3, 0.2]), torch.tensor([-1.0, 2.0])
    rate, clip, mu, decay, momentum = 0.1, 2.0, 0.7, 0.05, 0.6

    def clipped(gradient):
        return gradient * min(1.0, clip / (float(gradient.norm()) + 1e-6))

    def by_hand(direction):
        y, buffer = torch.tensor([1.0, 1.0]), torch.zeros(2)
        for _ in range(3):
            buffer = momentum * buffer + direction(y)
            y = y - rate * buffer
        return y

    y = torch.tensor([1.0, 1.0], requires_grad=True)
    part = ParameterSet(
        parameters=[y], learning_rate=rate, clip_norm=clip, force=[force], pull=mu, anchor=[anchor.clone()]
    )
    descend(part, lambda: 2.5 * (y - goal).square().sum(), 3, momentum=momentum, weight_decay=decay)
    expected = by_hand(lambda y: clipped(5 * (y - goal)) + force + mu * (y - anchor) + decay * y)
    torch.testing.assert_close(y.detach(), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(part.anchor[0], anchor, rtol=0, atol=0)
    before_the_clip = by_hand(lambda y: clipped(5 * (y - goal) + mu * (y - anchor)) + force + decay * y)
    assert float((before_the_clip - expected).norm()) > 0.1


A, B, P = np.array([1.0, 2.0, 5.0]), np.array([4.0, -2.0, 3.0]), np.array([0.2, 0.5, 0.3])
"""Curvatures a_i, minima b_i and shares p_i of three clients with f_i = a_i/2 (y - b_i)^2."""


def toy_round(x, mu, rate, steps):
    """Return the mean of the three clients' models after one round from x."""
    trained = []
    for curvature, minimum in zip(A, B, strict=True):
        y = torch.tensor([x], requires_grad=True)
        part = ParameterSet(parameters=[y], learning_rate=rate, pull=mu, anchor=[torch.tensor([x])])
        descend(part, lambda y=y, a=curvature, b=minimum: (a / 2 * (y - b).square()).sum(), steps)
        trained.append(float(y.detach()))
    return float(P @ trained)


def fixed_point(mu, rate, steps=5):
    """Return the x that a round leaves unchanged: a round of quadratic losses is affine in x."""
    at_zero, at_one = (toy_round(x, mu, rate, steps) for x in (0.0, 1.0))
    found = at_zero / (1 - (at_one - at_zero))
    assert toy_round(found, mu, rate, steps) == pytest.approx(found, rel=1e-12)
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mu", [0.0, 0.5, 3.0])
def test_the_fixed_point_of_quadratic_losses(mu):
    """It is the mean of b_i with weights p_i (1 - rho_i) a_i / (a_i + mu), rho_i = (1 - eta (a_i + mu))^K."""
    rate, steps = 0.05, 5
    found = fixed_point(mu, rate, steps)
    weights = P * (1 - (1 - rate * (A + mu)) ** steps) * A / (A + mu)
    assert found == pytest.approx(weights @ B / weights.sum(), rel=1e-11)
    if mu:
        assert abs(found - fixed_point(0.0, rate, steps)) > 1e-3


@pytest.mark.usefixtures("float64")
def test_a_strong_pull_leads_to_the_optimum_of_the_mean_loss():
    """The weights tend to p_i a_i as mu grows (rate 0.5 / mu): the error falls with 1 / mu, while FedAvg's remains."""
    optimum = (P * A) @ B / (P @ A)
    errors = [abs(fixed_point(mu, 0.5 / mu) - optimum) for mu in (20.0, 200.0, 2000.0)]
    assert errors[1] < 0.15 * errors[0]
    assert errors[2] < 0.15 * errors[1]
    assert errors[2] < 2e-3
    assert abs(fixed_point(0.0, 0.05) - optimum) > 0.02


def fitted(kind, folder, changes, target="cnn"):
    """Return the model's arrays after one round."""
    member = client(kind, folder, changes, target)
    found, _ = rounds(member, initial_model(member))
    return {key.removeprefix("model/"): value for key, value in found.items()}


@pytest.mark.parametrize("target", ["cnn", "own_networks:with_batchnorm"])
def test_a_round_is_sgd_on_the_loss_with_the_proximal_term(target, tmp_path):
    """Six full-batch steps equal SGD on f(y) + mu/2 |y - x|^2 over the parameters; running statistics are those of y.

    In float32: 2e-6. The result differs from FedAvg's, so the anchors are copies and not the trained tensors.
    """
    mu, changes = 2.0, {"batch-size": 30, "local-epochs": 6, "momentum": 0.5, "weight-decay": 0.02}
    found = fitted(FedProxClient, tmp_path, changes | {"fedprox.mu": mu}, target)
    member = client(FedAvgClient, tmp_path, changes, target)
    values = initial_model(member)
    model, data = member.model, member.context.data
    model.load_state_dict({name: value.clone() for name, value in values.items()}, assign=True)
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.02)
    for _ in range(6):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data.train_images), data.train_labels)
        far = sum((parameter - values[name]).square().sum() for name, parameter in model.named_parameters())
        (loss + mu / 2 * far).backward()
        optimiser.step()
    assert set(found) == set(model.state_dict())
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=0, atol=2e-6, err_msg=name)
    free = fitted(FedAvgClient, tmp_path, changes, target)
    moved = {name: math.dist(found[name].ravel(), free[name].ravel()) for name in found}
    assert min(moved[name] for name, _ in model.named_parameters()) > 1e-4


@pytest.mark.parametrize(
    ("mu", "steps"),
    [(0.0, 6), pytest.param(5.0, 1, id="in one step y is x")],
)
def test_rounds_that_are_fedavgs_bit_for_bit(mu, steps, tmp_path):
    """This holds with mu = 0, and in a single step, at whose start nothing has moved."""
    changes = {"batch-size": 30, "local-epochs": steps, "momentum": 0.5, "weight-decay": 0.02}
    target = "own_networks:with_batchnorm"
    found = fitted(FedProxClient, tmp_path, changes | {"fedprox.mu": mu}, target)
    assert exact(found) == exact(fitted(FedAvgClient, tmp_path, changes, target))


def test_a_federation_without_a_pull_is_fedavgs_bit_for_bit(tmp_path):
    """Four rounds with three of five clients each; with mu = 1 the model differs."""
    runs = {}
    for method, mu in (("fedavg", 0.01), ("fedprox", 0.0), ("fedprox", 1.0)):
        settings = {"method": method, "fedprox.mu": mu, "fraction-train": 0.6, "num-rounds": 4, "local-epochs": 2}
        runs[method, mu] = trained(small_settings(**settings, output=str(tmp_path / f"{method}-{mu}")))
    (one, progress), (two, other) = (last_checkpoint(runs[key]) for key in (("fedavg", 0.01), ("fedprox", 0.0)))
    assert (exact(one), progress) == (exact(two), other)
    assert metrics(runs["fedavg", 0.01]) == metrics(runs["fedprox", 0.0])
    pulled, _ = last_checkpoint(runs["fedprox", 1.0])
    assert exact(pulled) != exact(two)


def test_a_negative_mu_is_refused():
    with pytest.raises(ConfigError, match=r"fedprox\.mu must be greater than or equal to 0; got -0\.1"):
        RunConfig.from_flat(default_settings() | {"fedprox.mu": -0.1})
