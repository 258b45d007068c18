"""HyperFL's local round against algorithm 1, written out with explicit gradients and optimiser."""

import numpy as np
import pytest
import torch
from plain import CLASSIFIER, HYPERNETWORK, HyperFLRound, Sgd, cross_entropy, leaves, random_samples
from torch import nn
from torch.nn import functional

from hyperfl_flwr.models.hypernetwork import Hypernetwork
from hyperfl_flwr.training.hyperfl import HyperFLModel, HyperFLRates, train_hyperfl
from hyperfl_flwr.training.local_sgd import Epochs

IMAGE, NUM_CLASSES, BATCH = (1, 6, 6), 3, 5
SHAPES = {"conv.weight": (2, 1, 3, 3), "conv.bias": (2,), "fc.weight": (4, 8), "fc.bias": (4,)}
SAME = {"rtol": 0, "atol": 1e-12}


def features(images, values):
    """Return features [B, 4] of a tiny network: conv 3x3, 2x2 pooling, linear, LeakyReLU after both."""
    hidden = functional.conv2d(images, values["conv.weight"], values["conv.bias"])
    hidden = functional.leaky_relu(functional.max_pool2d(hidden, 2), 0.01).flatten(1)
    return functional.leaky_relu(hidden @ values["fc.weight"].T + values["fc.bias"], 0.01)


class Tiny(nn.Sequential):
    """The same network as a module."""

    def __init__(self):
        super().__init__()
        self.add_module("conv", nn.Conv2d(1, 2, 3))
        self.add_module("pool", nn.MaxPool2d(2))
        self.add_module("act1", nn.LeakyReLU(0.01))
        self.add_module("flatten", nn.Flatten())
        self.add_module("fc", nn.Linear(8, 4))
        self.add_module("act2", nn.LeakyReLU(0.01))


def start_values():
    """Return values of all groups, large enough that both clips and both activations matter."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "hidden.weight": (6, 5),
        "hidden.bias": (6,),
        "head_weight": (6, 56),
        "head_bias": (56,),
        "v": (5,),
        "classifier.weight": (NUM_CLASSES, 4),
        "classifier.bias": (NUM_CLASSES,),
    }
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for name, shape in shapes.items()}


def build(values, frozen=False):
    """Return the project's model with the given values."""
    extractor, classifier = Tiny(), nn.Linear(4, NUM_CLASSES)
    hypernetwork = Hypernetwork(extractor, embedding_dim=5, hidden_width=6)
    hypernetwork.load_state_dict({name: values[name].clone() for name in HYPERNETWORK}, assign=True)
    classifier.load_state_dict({name.partition(".")[2]: values[name].clone() for name in CLASSIFIER}, assign=True)
    return HyperFLModel(
        extractor=extractor,
        classifier=classifier,
        hypernetwork=hypernetwork,
        embedding=nn.Parameter(values["v"].clone()),
        frozen=frozen,
    )


def values_of(model):
    values = {name: value.detach() for name, value in model.hypernetwork.named_parameters()}
    values |= {f"classifier.{name}": value.detach() for name, value in model.classifier.named_parameters()}
    return values | {"v": model.embedding.detach()}


def reference(**changes):
    settings = {
        "momentum": 0.5,
        "weight_decay": 0.03,
        "clip": float("inf"),
        "classifier_rate": 0.2,
        "hypernetwork_rate": 0.05,
        "embedding_rate": 0.07,
    }
    return HyperFLRound(features=features, shapes=SHAPES, **settings | changes)


def rates_of(expected, factored=True):
    return HyperFLRates(
        classifier=expected.classifier_rate,
        hypernetwork=expected.hypernetwork_rate,
        embedding=expected.embedding_rate,
        clip_norm=0.0 if np.isinf(expected.clip) else expected.clip,
        factored=factored,
    )


def epochs_of(expected, num):
    return Epochs(epochs=num, batch_size=BATCH, momentum=expected.momentum, weight_decay=expected.weight_decay)


def local_round(expected, num_epochs, *, num=13, frozen=False, factored=True):
    """Run the project's round, and the reference on the same batches; return (values, reference values, data, loss)."""
    data, values = random_samples(num, IMAGE, NUM_CLASSES), start_values()
    model = build(values, frozen)
    rates, rng = rates_of(expected, factored), np.random.default_rng(3)
    loss = train_hyperfl(model, data, epochs_of(expected, num_epochs), rates, rng)
    in_step1 = -(-num // BATCH)
    assert len(data.seen) == in_step1 * (1 + num_epochs)
    wanted = expected.run(values, data, data.seen[:in_step1], data.seen[in_step1:], frozen=frozen)
    return values_of(model), wanted, data, loss


@pytest.mark.parametrize("clip", [float("inf"), 50.0, 0.4, 0.05])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.5, 0.03)])
@pytest.mark.parametrize("factored", [True, False])
def test_round_is_algorithm_1(clip, momentum, weight_decay, factored):
    """Three epochs in float64 equal the reference with torch.autograd.grad and b <- m b + clip(g) + w p.

    The last batch is smaller than the others.
    """
    expected = reference(clip=clip, momentum=momentum, weight_decay=weight_decay)
    got, wanted, _, _ = local_round(expected, 3, factored=factored)
    for name, value in start_values().items():
        torch.testing.assert_close(got[name], wanted[name], **SAME, msg=lambda text, name=name: f"{name}: {text}")
        assert not torch.equal(got[name], value), name


def test_the_clips_of_the_test_above_act():
    """At the start both gradients are longer than 0.05 and shorter than 50, by autograd."""
    data, values, expected = random_samples(13, IMAGE, NUM_CLASSES), start_values(), reference()
    values = leaves(values, [*HYPERNETWORK, "v"])
    loss = expected.loss(values, data.train_images, data.train_labels)
    gradients = torch.autograd.grad(loss, [values[name] for name in (*HYPERNETWORK, "v")])
    of_hypernetwork = float(torch.cat([gradient.flatten() for gradient in gradients[:-1]]).norm())
    of_embedding = float(gradients[-1].norm())
    assert 0.4 < of_hypernetwork < 50
    assert 0.05 < of_embedding < 50


def test_step_1_changes_the_classifier_alone():
    """Without epochs of step 2, the classifier equals the reference's and everything else keeps its bits."""
    got, wanted, _, loss = local_round(reference(), 0)
    assert np.isnan(loss)
    for name, value in start_values().items():
        if name in CLASSIFIER:
            assert not torch.equal(got[name], value)
            torch.testing.assert_close(got[name], wanted[name], **SAME)
        else:
            assert torch.equal(got[name], value), name


def test_step_2_leaves_the_classifier_alone():
    """After a whole round the classifier has the bits it had after step 1; all else has moved."""
    after_step1, after_round = local_round(reference(), 0)[0], local_round(reference(), 2)[0]
    for name, value in start_values().items():
        if name in CLASSIFIER:
            assert torch.equal(after_round[name], after_step1[name])
        else:
            assert not torch.equal(after_round[name], value), name


def test_reported_loss_is_the_mean_over_samples_of_the_last_epoch():
    """The loss of each batch before its step, by the reference, weighted with 5, 5 and 3 of 13 samples."""
    expected = reference()
    _, _, data, loss = local_round(expected, 2)
    total = 0.0
    for number in range(3):
        before = expected.run(start_values(), data, data.seen[:3], data.seen[3 : 6 + number])
        images, labels = next(data.batches([data.seen[6 + number]]))
        total += len(labels) * float(expected.loss(before, images, labels))
    assert loss == pytest.approx(total / 13, rel=1e-12)


def test_frozen_embedding_and_first_layer_stay():
    """With `common-frozen`, v, W1 and b1 keep their bits, so z is constant; the heads equal the reference's."""
    got, wanted, _, _ = local_round(reference(clip=0.4), 3, frozen=True)
    values = start_values()
    for name in ("v", "hidden.weight", "hidden.bias"):
        assert torch.equal(got[name], values[name])
    for name in ("head_weight", "head_bias", *CLASSIFIER):
        assert not torch.equal(got[name], values[name])
        torch.testing.assert_close(got[name], wanted[name], **SAME)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.0, 0.3), (0.5, 0.3)])
def test_frozen_hyperfl_is_sgd_on_theta(momentum, weight_decay):
    """With z fixed, theta = H z + c has rate eta (1 + |z|^2), decay lambda / (1 + |z|^2), same momentum; no clip.

    From H <- H - eta (z g^T + lambda H) and c <- c - eta (g + lambda c). Twelve steps, SGD on the extractor's own
    tensors; the classifier is that after step 1.
    """
    expected = reference(momentum=momentum, weight_decay=weight_decay)
    got, _, data, _ = local_round(expected, 4, frozen=True)
    start = start_values()
    z = (start["hidden.weight"] @ start["v"] + start["hidden.bias"]).clamp(min=0)
    factor = 1 + float(z @ z)
    assert factor > 1.5
    optimiser = Sgd(expected.hypernetwork_rate * factor, momentum=momentum, weight_decay=weight_decay / factor)
    values, begin = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        values[name] = expected.theta(start)[begin : begin + size].reshape(shape)
        begin += size
    for images, labels in data.batches(data.seen[3:]):
        values = leaves(values, list(SHAPES))
        logits = features(images, values) @ got["classifier.weight"].T + got["classifier.bias"]
        values = optimiser.step(values, cross_entropy(logits, labels), list(SHAPES))
    assert len(data.seen) == 15
    wanted = torch.cat([values[name].flatten() for name in SHAPES])
    assert (wanted - expected.theta(start)).abs().max() > 1e-2
    torch.testing.assert_close(expected.theta(got), wanted, rtol=0, atol=1e-10)
