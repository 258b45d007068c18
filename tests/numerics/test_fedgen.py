"""FedGen: the generator's loss and steps, the clients' terms, and rounds that are FedAvg's."""

import math

import numpy as np
import pytest
import torch
from plain import random_samples
from torch import nn
from torch.nn import functional

from clients.engine.context import ClientContext
from clients.fedavg import FedAvgClient
from clients.fedgen import FedGenClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.optimisers import Adam
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.models.feature_generator import NOISE_DIM, FeatureGenerator
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.training.ensemble import Ensemble
from hyperfl_flwr.training.fedgen import (
    GeneratedTerms,
    GeneratorSteps,
    class_weights,
    decayed,
    diversity_loss,
    generator_loss,
    train_generator,
)

FEATURES, CLASSES, HEADS, BATCH = 6, 4, 3, 8
COUNTS = [[10.0, 0.0, 5.0, 0.0], [30.0, 0.0, 5.0, 7.0], [0.0, 0.0, 10.0, 1.0]]


def generator():
    found = FeatureGenerator(FEATURES, CLASSES, 5)
    found.load_state_dict(initial_state(found, torch_generator(0, "generator")), assign=True)
    return found.requires_grad_(True)


def heads():
    """Return the values of three linear classifiers, as weights [S, K, F] and biases [S, K], and their ensemble."""
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(HEADS, CLASSES, FEATURES)), rng.normal(size=(HEADS, CLASSES))
    models = [{"weight": w, "bias": b} for w, b in zip(weight, bias, strict=True)]
    return torch.tensor(weight), torch.tensor(bias), Ensemble(network=nn.Linear(FEATURES, CLASSES), models=models)


def test_a_client_s_weight_is_its_share_of_a_class():
    """By hand: of class 0 clients 0 and 1 have 10 and 30 of 40 samples; no client has class 1."""
    weights = class_weights(torch.tensor(COUNTS))
    expected = [[0.25, 0, 0.25, 0], [0.75, 0, 0.25, 0.875], [0, 0, 0.5, 0.125]]
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=0, atol=1e-7)


@pytest.mark.usefixtures("float64")
def test_the_diversity_loss_is_that_of_the_definition():
    noise, outputs = torch.randn(5, 3), torch.randn(5, 2, 2)
    total = 0.0
    for i in range(5):
        for j in range(5):
            of_noise = float((noise[i] - noise[j]).square().mean())
            total += of_noise * float((outputs[i] - outputs[j]).abs().mean())
    assert float(diversity_loss(noise, outputs)) == pytest.approx(math.exp(-total / 25), rel=1e-13)
    assert float(diversity_loss(noise, torch.ones(5, 7))) == 1


@pytest.mark.usefixtures("float64")
def test_the_generator_s_gradient_on_linear_heads():
    """The gradient of the loss by its features is sum_k w_ky (softmax(h_k) - one-hot) W_k / B, by hand."""
    weight, bias, ensemble = heads()
    weights = class_weights(torch.tensor(COUNTS))
    labels, noise = torch.tensor([0, 2, 3, 2, 0, 3, 2, 2]), torch.randn(BATCH, NOISE_DIM)
    network = generator().eval()
    features = network(noise, labels).detach()
    expected = torch.zeros(BATCH, FEATURES)
    for k in range(HEADS):
        error = functional.softmax(features @ weight[k].T + bias[k], dim=1) - functional.one_hot(labels, CLASSES)
        expected += weights[k][labels][:, None] * error @ weight[k] / BATCH
    network.zero_grad()
    generator_loss(network, ensemble, weights, noise, labels, 0.0).backward()
    found = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad()
    network(noise, labels).backward(expected)
    for one, parameter in zip(found, network.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=0, atol=1e-14)


@pytest.mark.usefixtures("float64")
def test_labels_of_classes_that_no_client_has_are_not_drawn(monkeypatch):
    """Class 1 is never drawn; training lowers the loss on new noise, and updates BatchNorm's statistics."""
    _, _, ensemble = heads()
    counts, network = torch.tensor(COUNTS), generator()
    drawn = []
    forward = FeatureGenerator.forward
    monkeypatch.setattr(
        FeatureGenerator, "forward", lambda self, noise, labels: drawn.append(labels) or forward(self, noise, labels)
    )
    noise, labels = torch.randn(90, NOISE_DIM), torch.tensor([0, 2, 3] * 30)

    @torch.no_grad()
    def loss():
        return float(generator_loss(network.eval(), ensemble, class_weights(counts), noise, labels, 0.0))

    before = loss()
    drawn.clear()
    optimiser = Adam(network.parameters(), lr=0.01)
    settings = GeneratorSteps(steps=60, batch_size=32, diversity=1.0)
    train_generator(network, optimiser, ensemble, counts, settings, torch_generator(0, "steps"))
    assert set(torch.cat(drawn).tolist()) == {0, 2, 3}
    assert len(drawn) == 60
    assert not torch.equal(network.body[1].running_var, torch.ones(5))
    assert loss() < 0.5 * before


@pytest.mark.usefixtures("float64")
def test_the_terms_are_those_of_the_definition():
    """Both terms by hand, with the same draws; the classifier has a gradient from the first term alone."""
    network, classifier = generator().eval(), nn.Linear(FEATURES, CLASSES)
    logits, labels = torch.randn(5, CLASSES, requires_grad=True), torch.tensor([0, 1, 2, 3, 3])
    terms = GeneratedTerms(
        generator=network, classifier=classifier, generated=0.3, latent=0.7, batch_size=BATCH,
        rng=torch_generator(0, "terms"),
    )  # fmt: skip
    found = terms.of(logits, labels)
    rng = torch_generator(0, "terms")
    drawn = torch.randint(CLASSES, (BATCH,), generator=rng)
    of_drawn = functional.cross_entropy(classifier(network(torch.randn(BATCH, NOISE_DIM, generator=rng), drawn)), drawn)
    goal = functional.softmax(classifier(network(torch.randn(5, NOISE_DIM, generator=rng), labels)), dim=1).detach()
    divergence = (goal * (goal.log() - functional.log_softmax(logits, dim=1))).sum(dim=1).mean()
    torch.testing.assert_close(found, 0.3 * of_drawn + 0.7 * divergence, rtol=0, atol=1e-14)
    found.backward()
    expected = torch.autograd.grad(0.3 * of_drawn, list(classifier.parameters()))
    for parameter, gradient in zip(classifier.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-14)
    assert all(parameter.grad is None for parameter in network.parameters())
    assert logits.grad is not None


def test_weights_and_rates_fall_from_round_to_round():
    assert [decayed(10.0, 0.5, number) for number in (1, 2, 3)] == [10.0, 5.0, 2.5]


SHAPE = (1, 8, 8)


def fitted(kind, folder, *, server_round=2, **changes):
    """Return the arrays of a client's reply after a round from the same received values, by key."""
    train, test = random_samples(30, SHAPE, 10), random_samples(7, SHAPE, 10, seed=1)
    data = ClientData(
        train_images=train.train_images.float(), train_labels=train.train_labels, test_images=test.train_images.float(),
        test_labels=test.train_labels, augmentation=None, num_classes=10,
    )  # fmt: skip
    settings = {"device": "cpu", "learning-rate": 0.1, "local-epochs": 2, "batch-size": 10}
    config = RunConfig.from_flat(default_settings() | settings | changes)
    state = PrivateState(folder, "experiment", 0)
    member = kind(
        ClientContext(config=config, client=0, data=data, device=torch.device("cpu"), state=state, round=server_round)
    )
    received = []
    for group in member.exchanged_groups():
        values = initial_state(member.groups[group], torch_generator(0, group))
        received += [value.numpy().copy() for value in values.values()]
    arrays, _, _ = member.fit(received, {"round": server_round, "version": 0, "kept-version": 0})
    keys = [key for key in member.keys() if key.partition("/")[0] in member.uploaded_groups()]  # noqa: SIM118 - no dict
    return dict(zip(keys, arrays, strict=True)), data


NO_TERMS = {"fedgen.generated-weight": 0.0, "fedgen.latent-weight": 0.0}


@pytest.mark.parametrize(
    ("server_round", "changes", "is_fedavg"),
    [
        (1, {}, True),
        (2, NO_TERMS, True),
        (2, {}, False),
        (2, {"fedgen.latent-weight": 0.0}, False),
        (2, {"fedgen.generated-weight": 0.0}, False),
    ],
)
def test_without_terms_a_round_is_fedavg_s_bit_for_bit(server_round, changes, is_fedavg, tmp_path):
    """This holds in the first round, and with both weights 0; the classifier and the label counts come alone."""
    found, data = fitted(FedGenClient, tmp_path, server_round=server_round, **changes)
    expected, _ = fitted(FedAvgClient, tmp_path, server_round=server_round)
    assert all(np.array_equal(found[key], value) for key, value in expected.items()) == is_fedavg
    assert set(found) - set(expected) == {"classifier/weight", "classifier/bias", "labels/counts"}
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(found[f"classifier/{name}"], found[f"model/classifier.{name}"])
    np.testing.assert_array_equal(found["labels/counts"], np.bincount(data.train_labels, minlength=10))
