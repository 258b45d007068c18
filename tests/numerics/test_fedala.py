"""FedALA: the weights of the mixture against autograd, and the rounds that are FedAvg's, bit for bit."""

import pytest
import torch
from members import client, initial_model
from plain import random_samples
from torch import nn
from torch.nn import functional

from clients.fedala import FedALAClient
from clients.fedavg import FedAvgClient
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics
from hyperfl_flwr.training.fedala import MOST_PASSES, STEADY, Mixture, learn_weights

SGD = {"batch-size": 7, "local-epochs": 1, "momentum": 0.5, "weight-decay": 0.02}


def mixture_of(network, names, seed=0):
    """Return a mixture of some parameters between two random models."""
    torch.manual_seed(seed)
    parameters = [network.get_parameter(name) for name in names]
    last, received = ([torch.randn_like(value) for value in parameters] for _ in range(2))
    weights = [torch.ones_like(value) for value in parameters]
    return Mixture(parameters=parameters, last=last, received=received, weights=weights)


@pytest.mark.usefixtures("float64")
def test_a_pass_is_clipped_gradient_descent_on_the_weights():
    """Three batches equal autograd with respect to W through t + (x - t) W; some weights meet either bound."""
    network, data = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 3)), random_samples(9, (1, 2, 2), 3)
    mixture, names, rate = mixture_of(network, ["2.weight", "2.bias"]), ["2.weight", "2.bias"], 1.5
    parts = [(data.train_images[i : i + 3], data.train_labels[i : i + 3]) for i in (0, 3, 6)]
    weights = [weight.clone() for weight in mixture.weights]
    for images, labels in parts:
        leaves = [weight.clone().requires_grad_() for weight in weights]
        values = {
            name: last + (received - last) * leaf
            for name, last, received, leaf in zip(names, mixture.last, mixture.received, leaves, strict=True)
        }
        loss = functional.cross_entropy(torch.func.functional_call(network, values, (images,)), labels)
        steps = torch.autograd.grad(loss, leaves)
        weights = [(weight - rate * step).clamp(0, 1) for weight, step in zip(weights, steps, strict=True)]
    below = network.get_parameter("1.weight").clone()
    assert learn_weights(network, mixture, parts, rate, until_steady=False) == 1
    for found, expected in zip(mixture.weights, weights, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for name, last, received, weight in zip(names, mixture.last, mixture.received, weights, strict=True):
        torch.testing.assert_close(network.get_parameter(name).detach(), last + (received - last) * weight)
    assert torch.equal(network.get_parameter("1.weight"), below)
    every = torch.cat([weight.flatten() for weight in weights])
    assert 0 < float(((every > 0) & (every < 1)).double().mean()) < 1


def test_passes_are_repeated_until_the_loss_is_steady():
    """With rate 0 the loss is constant, which eleven passes show; a loss that jumps is given up in the end."""
    network, data = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), random_samples(6, (1, 2, 2), 3)
    one = [(data.train_images.float(), data.train_labels)]
    mixture = mixture_of(network, ["1.weight"])
    assert learn_weights(network, mixture, one, 0.0, until_steady=True) == STEADY + 1
    calls = iter(range(10**6))
    jumping = lambda images: network(images) * (1 + 50 * (next(calls) % 2))  # noqa: E731
    assert learn_weights(jumping, mixture, one, 0.0, until_steady=True) == MOST_PASSES


def both(folder, changes, number, target="cnn"):
    """Return the arrays of FedAvg's and of FedALA's client after some rounds, in which each is sent FedAvg's uploads.

    FedALA's client would otherwise be sent its own last model, between which and itself there is nothing to mix.
    """
    fedavg, fedala = (
        client(kind, folder / kind.__name__, SGD | changes, target) for kind in (FedAvgClient, FedALAClient)
    )
    sent = [value.numpy() + 0.1 * value.numpy() for value in initial_model(fedavg).values()]
    found = []
    for last in range(number):
        keys = {"round": last + 1, "version": last, "kept-version": 0}
        uploads = [exact(dict(zip(member.keys(), member.fit([v.copy() for v in sent], keys)[0], strict=True)))
                   for member in (fedavg, fedala)]  # fmt: skip
        found.append(uploads)
        sent = [value * 0.9 for value in sent]
    return found, dict(fedala.context.state.load(number))


@pytest.mark.parametrize("target", ["cnn", "own_networks:with_batchnorm", "own_networks:build"])
def test_with_rate_0_it_is_fedavg(target, tmp_path):
    found, stored = both(tmp_path, {"fedala.rate": 0.0}, 3, target)
    assert all(one == other for one, other in found)
    assert (stored["weights/theta"] == 1).all()


def test_the_first_round_is_fedavgs_and_the_others_are_not(tmp_path):
    """From the second round on the classifier's start moves; the client's last model is its upload."""
    found, stored = both(tmp_path, {}, 2)
    assert found[0][0] == found[0][1]
    assert found[1][0] != found[1][1]
    weights = stored["weights/theta"]
    assert weights.shape == (10 * (found[1][1]["model/classifier.weight"][1][1] + 1),)
    assert (weights < 1).any()
    assert ((weights >= 0) & (weights <= 1)).all()
    last = {key.replace("personal/", "model/"): value for key, value in stored.items() if key != "weights/theta"}
    assert exact(last) == found[1][1]


def test_later_rounds_take_one_pass(tmp_path, monkeypatch):
    """Only the client's first mixture is learned until the loss is steady, also if some weights are 1 after it."""
    asked = []

    def learned(*arguments, until_steady):
        asked.append(until_steady)
        return learn_weights(*arguments, until_steady=until_steady)

    monkeypatch.setattr("clients.fedala.learn_weights", learned)
    _, stored = both(tmp_path, {}, 3)
    assert asked == [True, False]
    assert 0 < (stored["weights/theta"] == 1).sum() < stored["weights/theta"].size


def test_more_layers_are_mixed_if_asked(tmp_path):
    """The last two layers have the weights of the linear layer below the classifier, too."""
    sizes = [
        both(tmp_path / str(layers), {"fedala.layers": layers}, 1)[1]["weights/theta"].size for layers in (1, 2, 99)
    ]
    member = client(FedALAClient, tmp_path / "member", {})
    numbers = {name: value.numel() for name, value in member.model.named_parameters()}
    layers = list(numbers.values())
    assert sizes == [sum(layers[-2:]), sum(layers[-4:]), sum(layers)]


def test_a_federation_with_rate_0_is_fedavgs(federate):
    """Three of five clients in each round; aggregate and personalized metrics are equal, too."""
    plan = {"target": "mlp", "learning-rate": 0.1, "fraction_train": 0.6, "num_rounds": 3}
    fedavg, still, moving = (
        federate("fedavg", **plan),
        *(federate("fedala", **plan, **{"fedala.rate": rate}) for rate in (0.0, 1.0)),
    )
    assert exact(last_checkpoint(fedavg)[0]) == exact(last_checkpoint(still)[0]) != exact(last_checkpoint(moving)[0])
    assert metrics(fedavg) == metrics(still)
