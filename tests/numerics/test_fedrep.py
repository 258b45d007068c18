"""FedRep's local round against autograd with a written-out optimiser, and against HyperFL's."""

import numpy as np
import pytest
import torch
from plain import CLASSIFIER, Sgd, cross_entropy, digits_cnn, leaves, random_samples
from torch import nn

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.hypernetwork import Hypernetwork, common_embedding, initial_hypernetwork
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training.fedrep import FedRepRates, train_fedrep
from hyperfl_flwr.training.hyperfl import HyperFLModel, HyperFLRates, as_fedrep, train_hyperfl
from hyperfl_flwr.training.local_sgd import Epochs

NUM, BATCH = 13, 5
STEPS = 3
"""Steps of one pass; the last batch is smaller."""


def target():
    """Return the 8x8 network in float64."""
    network = build_target("cnn", (1, 8, 8), 10)
    values = ordinary_parameters(network, torch_generator(0, "model"))
    network.load_state_dict({name: value.double() for name, value in values.items()}, assign=True)
    return network


def values_of(network):
    return {name.removeprefix("extractor."): value.detach().clone() for name, value in network.named_parameters()}


def loss_of(values, images, labels):
    logits = digits_cnn(images, values) @ values["classifier.weight"].T + values["classifier.bias"]
    return cross_entropy(logits, labels)


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize(("classifier_epochs", "extractor_epochs"), [(1, 2), (3, 1)])
def test_round_is_algorithm_1(classifier_epochs, extractor_epochs, clip):
    """The classifier is trained with the extractor fixed, then the extractor with the classifier fixed; float64."""
    network, data = target(), random_samples(NUM, (1, 8, 8), 10)
    values, start = values_of(network), values_of(network)
    rates = FedRepRates(classifier=0.1, extractor=0.05, classifier_epochs=classifier_epochs, clip_norm=clip)
    epochs = Epochs(epochs=extractor_epochs, batch_size=BATCH, momentum=0.5, weight_decay=0.03)
    train_fedrep(network.extractor, network.classifier, data, epochs, rates, np.random.default_rng(3))
    assert len(data.seen) == STEPS * (classifier_epochs + extractor_epochs)
    head, body = list(CLASSIFIER), [name for name in values if name not in CLASSIFIER]
    clipped = clip or float("inf")
    for names, optimiser, seen in (
        (head, Sgd(0.1, 0.5, 0.03), data.seen[: STEPS * classifier_epochs]),
        (body, Sgd(0.05, 0.5, 0.03, clipped), data.seen[STEPS * classifier_epochs :]),
    ):
        for images, labels in data.batches(seen):
            values = leaves(values, names)
            values = optimiser.step(values, loss_of(values, images, labels), names)
    for name, value in values_of(network).items():
        torch.testing.assert_close(value, values[name], rtol=1e-10, atol=1e-12)
        assert not torch.equal(value, start[name])


def frozen_hyperfl():
    """Return a network, and HyperFL's model with frozen v that generates its extractor; classifiers equal, float64."""
    network = target()
    hypernetwork = Hypernetwork(network.extractor, embedding_dim=6, hidden_width=16)
    v = common_embedding(6, "hyperfan-bias", 0)
    drawn = initial_hypernetwork(hypernetwork, network.extractor, "hyperfan-bias", v, torch_generator(0, "h"))
    hypernetwork.load_state_dict({name: value.double() for name, value in drawn.items()}, assign=True)
    with torch.no_grad():
        network.extractor.load_state_dict(hypernetwork.split(hypernetwork(v.double()).clone()))
    classifier = nn.Linear(128, 10, dtype=torch.float64)
    classifier.load_state_dict(network.classifier.state_dict())
    model = HyperFLModel(
        extractor=network.extractor, classifier=classifier, hypernetwork=hypernetwork,
        embedding=nn.Parameter(v.double()), frozen=True,
    )  # fmt: skip
    return network, model


def flat_extractor(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.extractor.parameters()])


def theta_of(model):
    with torch.no_grad():
        return model.hypernetwork(model.embedding)


def squared_norm_of(model):
    with torch.no_grad():
        return float(model.hypernetwork.activation(model.embedding).square().sum())


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_hyperfl_with_a_frozen_embedding_is_fedrep_at_a_larger_rate(momentum):
    """With z constant, theta = z H + c moves as under SGD of rate eta (1 + |z|^2): exactly, without clip and decay.

    So HyperFL with `embedding = common-frozen` computes what FedRep does; the classifiers are equal too. Twelve steps
    after step 1, float64.
    """
    (network, model), data = frozen_hyperfl(), random_samples(NUM, (1, 8, 8), 10)
    start, eta, factor = theta_of(model), 0.01, 1 + squared_norm_of(model)
    assert factor > 3
    epochs = Epochs(epochs=4, batch_size=BATCH, momentum=momentum)
    rates = HyperFLRates(classifier=0.1, hypernetwork=eta, embedding=eta, clip_norm=0.0)
    one = train_hyperfl(model, data, epochs, rates, np.random.default_rng(3))
    fedrep = FedRepRates(classifier=0.1, extractor=eta * factor)
    other = train_fedrep(network.extractor, network.classifier, data, epochs, fedrep, np.random.default_rng(3))
    assert one == pytest.approx(other, rel=1e-10)
    assert (flat_extractor(network) - start).abs().max() > 1e-2
    torch.testing.assert_close(theta_of(model), flat_extractor(network), rtol=0, atol=1e-11)
    torch.testing.assert_close(model.classifier.weight, network.classifier.weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("clip", [0.0, 0.02])
def test_the_converted_rates_cover_momentum_clipping_and_decay(clip):
    """`as_fedrep` holds with all of them; a clip of 0.02 is far below the gradients' norms and active in every step."""
    (network, model), data = frozen_hyperfl(), random_samples(NUM, (1, 8, 8), 10)
    start, squared_norm = flat_extractor(network), squared_norm_of(model)
    epochs = Epochs(epochs=4, batch_size=BATCH, momentum=0.5, weight_decay=0.03)
    rates = HyperFLRates(classifier=0.1, hypernetwork=0.01, embedding=0.01, clip_norm=clip)
    train_hyperfl(model, data, epochs, rates, np.random.default_rng(3))
    converted = as_fedrep(rates, 0.03, squared_norm)
    train_fedrep(network.extractor, network.classifier, data, epochs, converted, np.random.default_rng(3))
    moved = float((flat_extractor(network) - start).norm())
    assert moved > 1e-3
    tolerance = 1e-3 if clip else 1e-9  # torch adds 1e-6 to the norm that it clips by
    assert float((theta_of(model) - flat_extractor(network)).norm()) < tolerance * moved
    atol = 1e-6 if clip else 1e-12
    torch.testing.assert_close(model.classifier.weight, network.classifier.weight, rtol=0, atol=atol)
