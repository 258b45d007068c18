"""pFedMe: closed forms of both models on a quadratic loss, the algorithm written out, and the server's step."""

import numpy as np
import pytest
import torch
from plain import cross_entropy, random_samples
from rounds import Rounds
from torch.func import functional_call

from hyperfl_flwr.training.local_sgd import Epochs
from hyperfl_flwr.training.pfedme import ProximalSteps, train_pfedme


@pytest.fixture(autouse=True)
def double(float64):
    """Compute in float64."""


class Numbers(torch.nn.Module):
    """Three parameters, which start at 1."""

    def __init__(self):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.ones(3))


A, B = torch.tensor([[0.5, 1.0, 4.0], [3.0, -2.0, 0.5]], dtype=torch.float64)
PULL, ETA = 2.0, 0.1


def trained(loss, inner_steps, batches=1, momentum=0.0, rate=0.1):
    """Return theta and w after some batches of a loss that does not depend on the samples."""
    network = Numbers()
    w = [network.theta.detach().clone()]
    steps = ProximalSteps(learning_rate=rate, pull=PULL, inner_steps=inner_steps, model_learning_rate=ETA)
    epochs = Epochs(epochs=1, batch_size=3, steps=batches, momentum=momentum)
    data = random_samples(3, (1, 1, 1), 2)
    train_pfedme(network, w, data, epochs, steps, np.random.default_rng(0), lambda *_: (loss(network.theta), None))
    return network.theta.detach(), w[0]


def test_many_inner_steps_descend_the_moreau_envelope():
    """The model theta is (a b + lambda w) / (a + lambda); w steps by eta along the gradient of the envelope."""
    theta, w = trained(lambda theta: (A * (theta - B).square()).sum() / 2, inner_steps=400)
    start = torch.ones(3)
    torch.testing.assert_close(theta, (A * B + PULL * start) / (A + PULL), rtol=0, atol=1e-12)
    torch.testing.assert_close(w, start - ETA * A * PULL / (A + PULL) * (start - B), rtol=0, atol=1e-12)


def test_the_common_model_ends_at_the_minimum():
    """Where w = b, theta is there, too."""
    theta, w = trained(lambda theta: (A * (theta - B).square()).sum() / 2, inner_steps=5, batches=400, momentum=0.3)
    torch.testing.assert_close(w, B, rtol=0, atol=1e-5)
    torch.testing.assert_close(theta, B, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("inner_steps", "momentum"), [(1, 0.0), (5, 0.0), (5, 0.6)])
def test_the_effective_rate_is_that_of_a_constant_gradient(inner_steps, momentum):
    gradient = torch.tensor([1.0, -2.0, 0.5])
    _, w = trained(lambda theta: (gradient * theta).sum(), inner_steps, momentum=momentum)
    steps = ProximalSteps(learning_rate=0.1, pull=PULL, inner_steps=inner_steps, model_learning_rate=ETA)
    rate = steps.effective_rate(Epochs(epochs=1, batch_size=3, momentum=momentum))
    torch.testing.assert_close(w, torch.ones(3) - rate * gradient, rtol=0, atol=1e-15)
    if inner_steps == 1:
        assert rate == pytest.approx(ETA * PULL * 0.1)


SETTINGS = {
    "batch-size": 5, "local-epochs": 2, "learning-rate": 0.1, "momentum": 0.5, "weight-decay": 0.01,
    "pfedme.pull": 3.0, "pfedme.inner-steps": 3, "pfedme.model-learning-rate": 0.2,
}  # fmt: skip


def test_a_client_runs_the_algorithm(tmp_path, monkeypatch):
    """Two epochs of three batches, by autograd: theta continues from batch to batch, with momentum and weight decay."""
    data = random_samples(15, (1, 2, 2), 3)
    rounds = Rounds("pfedme", tmp_path, monkeypatch, [data], 3, 6, SETTINGS)
    member = rounds.member(0)
    target = rounds.strategy.new_target()
    keys = {"round": 1, "version": 0, "kept-version": 0}
    arrays, _, _ = member.fit([rounds.sent[key].copy() for key in member.keys()], keys)  # noqa: SIM118
    w = {key.partition("/")[2]: torch.tensor(value) for key, value in rounds.sent.items()}
    theta, buffers = {name: value.clone() for name, value in w.items()}, {name: torch.zeros(()) for name in w}
    for index in data.seen:
        images, labels = data.train_images[index], data.train_labels[index]
        for _ in range(3):
            leaves = {name: value.clone().requires_grad_(True) for name, value in theta.items()}
            loss = cross_entropy(functional_call(target, leaves, (images,)), labels)
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            for name, gradient in zip(leaves, gradients, strict=True):
                step = gradient + 3.0 * (theta[name] - w[name]) + 0.01 * theta[name]
                buffers[name] = 0.5 * buffers[name] + step
                theta[name] = theta[name] - 0.1 * buffers[name]
        w = {name: value - 0.2 * 3.0 * (value - theta[name]) for name, value in w.items()}
    assert len(data.seen) == 6
    for found, own, name in zip(arrays, member.target_state().values(), w, strict=True):
        np.testing.assert_allclose(found, w[name].numpy(), rtol=0, atol=1e-13)
        np.testing.assert_allclose(own.numpy(), theta[name].numpy(), rtol=0, atol=1e-13)
        assert np.abs(found - own.numpy()).max() > 1e-3


def test_the_server_moves_by_its_rate(tmp_path, monkeypatch):
    """The next model is (1 - beta) x + beta mean y with equal weights, whatever the clients' sizes."""
    data = [random_samples(size, (1, 2, 2), 3, seed=size) for size in (5, 15)]
    rounds = Rounds("pfedme", tmp_path, monkeypatch, data, 3, 6, SETTINGS | {"pfedme.server-rate": 1.5})
    start = rounds.model()
    mean = np.mean([rounds.model(upload) for upload in rounds.round([0, 1]).values()], axis=0)
    np.testing.assert_allclose(rounds.model(), -0.5 * start + 1.5 * mean, rtol=0, atol=1e-15)
