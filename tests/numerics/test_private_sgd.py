"""Noisy steps: batches, clipping, noise and its distribution, and what a private classifier tells about records."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from hyperfl_flwr.core.noise.gaussian_noise import CHUNK, gaussian_tensor
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.augmentation import Augmentation
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training import private_sgd
from hyperfl_flwr.training.fedrep import FedRepRates, train_centaur
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet
from hyperfl_flwr.training.per_example import PerExampleGradients
from hyperfl_flwr.training.private_sgd import (
    Companion,
    StepNoise,
    poisson_batches,
    sample_rate,
    train_private_epochs,
)

RARE = 1e-11
"""Probability with which a test of a distribution may fail, for each of its bounds."""

NOWHERE = np.random.default_rng(0)


@dataclass
class Data:
    """Training samples of a client."""

    train_images: Tensor
    train_labels: Tensor
    augmentation: Augmentation | None = None
    train_weights: NDArray[np.float64] | None = None


def random_data(number, shape=(1, 8, 8), classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Data(torch.randn((number, *shape), generator=generator), torch.arange(number) % classes)


def model(seed=0):
    network = build_target("mlp", (1, 8, 8), 5)
    network.load_state_dict(initial_state(network, torch_generator(seed, "model")), assign=True)
    return network


def flat(parameters):
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_noise_is_gaussian(dtype):
    """Mean, variance, fourth moment, shape (Kolmogorov-Smirnov) and independence of 2^20 + 3 values."""
    size = CHUNK + 3
    values = gaussian_tensor(size, 2.0, dtype)
    assert values.dtype == dtype
    z = values.double().numpy() / 2
    wide = -stats.norm.ppf(RARE)
    assert abs(z.mean()) * math.sqrt(size) < wide
    assert stats.chi2.ppf(RARE, size) < np.square(z).sum() < stats.chi2.isf(RARE, size)
    assert abs(np.power(z, 4).mean() - 3) < wide * math.sqrt(96 / size)
    assert stats.kstest(z, "norm").pvalue > RARE
    half = size // 2
    for one, other in ((z[:-1], z[1:]), (z[:half], z[half : 2 * half])):
        assert abs(one @ other) / math.sqrt(len(one)) < wide
    assert len(np.unique(z)) > (0.8 if dtype == torch.float32 else 0.9999) * size
    assert not np.array_equal(z, gaussian_tensor(size, 2.0, dtype).double().numpy() / 2)


def test_a_poisson_batch_has_each_sample_independently():
    """Sizes are binomial, each sample is drawn equally often, and none twice in a batch."""
    data = random_data(600)
    data.train_images[:, 0, 0, 0] = torch.arange(600.0)
    passes, rate = 200, sample_rate(600, 50)
    assert rate == 1 / 12
    sizes, counts = [], np.zeros(600)
    for _ in range(passes):
        for images, labels in poisson_batches(data, 50, NOWHERE):
            rows = images[:, 0, 0, 0].long()
            assert torch.equal(labels, rows % 5)
            sizes.append(len(rows))
            counts[rows] += 1  # a sample that was drawn twice would count once
            assert len(rows.unique()) == len(rows)
    assert len(sizes) == 12 * passes
    total = stats.binom(600 * len(sizes), rate)
    assert total.ppf(RARE) <= sum(sizes) <= total.isf(RARE)
    each = stats.binom(len(sizes), rate)
    assert each.ppf(RARE / 600) <= counts.min()
    assert counts.max() <= each.isf(RARE / 600)
    # The sum of squared deviations; its own standard deviation is sqrt(2 N) in units of the variance, about.
    spread = np.square(np.array(sizes) - 600 * rate).sum() / (600 * rate * (1 - rate))
    assert abs(spread - len(sizes)) < 8 * math.sqrt(2 * len(sizes))


@pytest.mark.parametrize("batch_size", [7, 50])
def test_a_batch_of_all_samples(batch_size):
    data = random_data(7)
    assert sample_rate(7, batch_size) == 1
    (batch,) = poisson_batches(data, batch_size, NOWHERE)
    assert torch.equal(batch[0], data.train_images)


def test_augmentation_changes_each_sample_by_itself():
    data = random_data(30, shape=(1, 28, 28))
    data.augmentation = Augmentation(pad_value=(0.0,))
    images = torch.cat([images for images, _ in poisson_batches(data, 10, np.random.default_rng())])
    assert images.shape[1:] == (1, 28, 28)
    moved = [not (image == data.train_images).flatten(1).all(1).any() for image in images]
    assert sum(moved) > len(images) / 2


def test_without_noise_a_step_is_the_formula():
    """Clip, sum, divide by the expected size, force and pull, weight decay, momentum: over two sets with two rates."""
    data, network = random_data(6), model()
    parameters = list(network.parameters())
    sets = [
        ParameterSet(
            parameters=list(network.extractor.parameters()), learning_rate=0.3, pull=0.7, weight_decay=0.1,
            anchor=[torch.full_like(parameter, 0.2) for parameter in network.extractor.parameters()],
        ),
        ParameterSet(
            parameters=list(network.classifier.parameters()), learning_rate=0.2, clip_norm=1e-9,
            force=[torch.full_like(parameter, 0.05) for parameter in network.classifier.parameters()],
        ),
    ]  # fmt: skip
    by_hand = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    buffers = [torch.zeros_like(parameter) for parameter in parameters]
    clip_norm, names = 0.8, [name for name, _ in network.named_parameters()]
    for _ in range(3):
        sums = [torch.zeros_like(parameter) for parameter in by_hand]
        for image, label in zip(data.train_images, data.train_labels, strict=True):
            logits = torch.func.functional_call(network, dict(zip(names, by_hand, strict=True)), (image[None],))
            gradients = torch.autograd.grad(functional.cross_entropy(logits, label[None]), by_hand)
            norm = float(flat(gradients).norm())
            assert norm > clip_norm
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient * clip_norm / norm
        with torch.no_grad():
            for number, (parameter, total, buffer) in enumerate(zip(by_hand, sums, buffers, strict=True)):
                in_body = number < len(parameters) - 2
                gradient = total / 6 + (0.7 * (parameter - 0.2) if in_body else 0.05)
                gradient += (0.1 if in_body else 0.01) * parameter
                buffer.mul_(0.5).add_(gradient)
                parameter -= (0.3 if in_body else 0.2) * buffer
    epochs = Epochs(epochs=3, batch_size=6, momentum=0.5, weight_decay=0.01)
    result = train_private_epochs(network, sets, data, epochs, StepNoise(clip_norm=clip_norm, noise_multiplier=0.0))
    assert result.steps == 3
    assert math.isfinite(result.loss)
    torch.testing.assert_close(flat(parameters), flat(by_hand), rtol=0, atol=2e-6)


def test_a_step_divides_by_the_expected_size_of_a_batch():
    """With 40 equal samples and batches of 10 expected, a step moves by rate g |S| / 10 for the size |S| drawn."""
    data = Data(torch.ones(40, 1, 8, 8), torch.zeros(40, dtype=torch.int64))
    moved = set()
    for _ in range(8):
        network = model()
        part = ParameterSet(parameters=list(network.parameters()), learning_rate=1e-4)
        before = flat(part.parameters)
        loss = functional.cross_entropy(network(data.train_images), data.train_labels)
        gradient = flat(torch.autograd.grad(loss, part.parameters))
        epochs = Epochs(epochs=1, batch_size=10, steps=1)
        train_private_epochs(network, [part], data, epochs, StepNoise(clip_norm=1e6, noise_multiplier=0.0))
        size = float((before - flat(part.parameters)) @ gradient / gradient.square().sum()) / 1e-4 * 10
        assert size == pytest.approx(round(size), abs=0.05)
        moved.add(round(size))
    assert len(moved) > 1  # all eight sizes are equal with a probability below 1e-5
    assert all(0 <= size <= 40 for size in moved)


def test_a_client_with_fewer_samples_than_a_batch_divides_by_the_batch_size():
    """The divisor is public whatever n is: the mean gradient of 4 samples moves a quarter as far with batches of 16."""
    data = random_data(4)
    moved = []
    for batch_size in (4, 16):
        network = model()
        part = ParameterSet(parameters=list(network.parameters()), learning_rate=0.1)
        before = flat(part.parameters)
        noise = StepNoise(clip_norm=0.5, noise_multiplier=0.0)
        train_private_epochs(network, [part], data, Epochs(epochs=1, batch_size=batch_size), noise)
        moved.append(before - flat(part.parameters))
    torch.testing.assert_close(moved[0], 4 * moved[1], rtol=1e-3, atol=1e-7)


class Blind(nn.Module):
    """A linear layer without bias on zeros: its gradients are zero, so that a step is noise alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 300, bias=False), nn.Linear(300, 5, bias=False)
        for layer in (self.one, self.other):
            nn.init.zeros_(layer.weight)

    def forward(self, images):
        return self.other(self.one(images.flatten(1)))


@pytest.mark.parametrize("number", [12, 1])
def test_the_noise_of_a_step_has_the_stated_deviation(number):
    """Sigma C / B in every coordinate of all sets, with the mean 0; also where batches are mostly empty."""
    data = Data(torch.zeros(number, 1, 8, 8), torch.zeros(number, dtype=torch.int64))
    network, sigma, clip_norm = Blind(), 1.7, 0.3
    sets = [ParameterSet(parameters=[layer.weight], learning_rate=1.0) for layer in (network.one, network.other)]
    epochs = Epochs(epochs=1, batch_size=1, steps=1)
    noise = StepNoise(clip_norm=clip_norm, noise_multiplier=sigma)
    train_private_epochs(network, sets, data, epochs, noise)
    z = flat(network.parameters()).double() / (sigma * clip_norm)  # B = 1
    size = len(z)
    assert size == 64 * 300 + 300 * 5
    assert stats.chi2.ppf(RARE, size) < float(z.square().sum()) < stats.chi2.isf(RARE, size)
    assert abs(float(z.sum())) / math.sqrt(size) < -stats.norm.ppf(RARE)


def test_two_equal_trainings_differ():
    """Neither the noise nor the batches follow from a seed."""
    found = []
    for sigma in (0.0, 0.0, 1.0, 1.0):
        network = model()
        part = ParameterSet(parameters=list(network.parameters()), learning_rate=0.1)
        epochs = Epochs(epochs=2, batch_size=10)
        train_private_epochs(network, [part], random_data(60), epochs, StepNoise(clip_norm=1.0, noise_multiplier=sigma))
        found.append(flat(part.parameters))
    assert len({tuple(each[:100].tolist()) for each in found}) == 4


def test_a_sample_that_is_not_finite_changes_nothing():
    """Neither the parameters nor the loss become NaN."""
    data, network = random_data(10), model()
    data.train_images[3] = math.inf
    part = ParameterSet(parameters=list(network.parameters()), learning_rate=0.1)
    noise = StepNoise(clip_norm=1.0, noise_multiplier=1.0)
    result = train_private_epochs(network, [part], data, Epochs(epochs=2, batch_size=10), noise)
    assert math.isfinite(result.loss)
    assert flat(part.parameters).isfinite().all()


def test_batches_that_are_all_empty(monkeypatch):
    """They are steps all the same, and the loss is that of all samples."""
    monkeypatch.setattr(private_sgd.os, "urandom", lambda size: b"\xff" * size)
    data, network = random_data(10), model()
    part = ParameterSet(parameters=list(network.parameters()), learning_rate=0.1, weight_decay=0.5)
    before = flat(part.parameters)
    noise = StepNoise(clip_norm=1.0, noise_multiplier=0.0)
    result = train_private_epochs(network, [part], data, Epochs(epochs=1, batch_size=5), noise)
    assert result.steps == 2
    with torch.no_grad():
        assert result.loss == pytest.approx(
            float(functional.cross_entropy(network(data.train_images), data.train_labels))
        )
    torch.testing.assert_close(flat(part.parameters), before * (1 - 0.1 * 0.5) ** 2)


class Sum(nn.Module):
    """A network with a second classifier that is added to its own, as in PPSGD."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.offset = model(), nn.Linear(200, 5)
        for parameter in self.offset.parameters():
            nn.init.zeros_(parameter)

    def forward(self, images):
        features = self.model.extractor(images)
        return self.model.classifier(features) + self.offset(features)


@pytest.mark.parametrize("noised", [True, False])
def test_a_companion_takes_the_noisy_or_the_plain_gradient(noised):
    """After one step of rate 1: the classifier's own change, or the unclipped gradient of the batch."""
    data, network = random_data(9), Sum()
    classifier, offset = list(network.model.classifier.parameters()), list(network.offset.parameters())
    before = flat(classifier)
    loss = functional.cross_entropy(network(data.train_images), data.train_labels)
    plain = flat(torch.autograd.grad(loss, classifier))
    part = ParameterSet(parameters=list(network.model.parameters()), learning_rate=1.0)
    companion = Companion(part=ParameterSet(parameters=offset, learning_rate=1.0), like=classifier if noised else None)
    noise = StepNoise(clip_norm=0.01, noise_multiplier=2.0)
    train_private_epochs(network, [part], data, Epochs(epochs=1, batch_size=9), noise, [companion])
    expected = flat(classifier) - before if noised else -plain
    torch.testing.assert_close(flat(offset), expected, rtol=0, atol=1e-6)
    assert float((expected + plain).norm()) > (1e-3 if noised else -1)


RATES = FedRepRates(classifier=0.5, extractor=0.1)
NOISE = StepNoise(clip_norm=0.5, noise_multiplier=1.0)


def centaur_round(network, data, *, noised_head):
    rng = np.random.default_rng(0)
    return train_centaur(network, data, Epochs(epochs=1, batch_size=20), RATES, NOISE, rng, noised_head=noised_head)


def clipped_gradient(network, data, row):
    """Return one sample's clipped gradient of the extractor."""
    parameters = list(network.extractor.parameters())
    network.extractor.requires_grad_(True)
    examples = PerExampleGradients(network, parameters, data.train_images[:1])
    one = slice(row, row + 1)
    return flat(examples.clipped_sums(data.train_images[one], data.train_labels[one], NOISE.clip_norm).sums)


def test_a_published_head_carries_one_record_into_the_gradients_of_others():
    """Record 0 moves, and the clipped gradient of record 1 changes in the second round.

    Both clients receive the same extractor. The change of all records' gradients together exceeds the clipping norm
    several times, which is the sensitivity for which the noise is computed.
    """
    data, moved = random_data(40), random_data(40)
    moved.train_images[0] = 100 * torch.ones(1, 8, 8)
    heads = []
    for each in (data, moved):
        network = model()
        result = centaur_round(network, each, noised_head=False)
        assert result.steps == 2
        heads.append(network.classifier.state_dict())
    received, sums = model(seed=1), []
    for head in heads:
        received.classifier.load_state_dict(head)
        sums.append([clipped_gradient(received, data, row) for row in range(1, 40)])
    other = float((sums[0][0] - sums[1][0]).norm())
    assert other > 0.1 * NOISE.clip_norm
    assert float((sum(sums[0]) - sum(sums[1])).norm()) > 2 * NOISE.clip_norm


@pytest.mark.parametrize("noised_head", [True, False])
def test_with_a_noised_head_all_state_follows_from_the_noisy_gradients(noised_head, monkeypatch):
    """Replaying the noisy gradients, without any data, gives extractor and classifier after two rounds.

    With a published head it gives the extractor only: what the next gradients depend on is not in the noisy steps.
    """
    released = []
    original = private_sgd._noised

    def recording(sums, noise):
        found = original(sums, noise)
        released.append([each.clone() for each in found])
        return found

    monkeypatch.setattr(private_sgd, "_noised", recording)
    network, replayed = model(), model()
    for _ in range(2):
        centaur_round(network, random_data(40), noised_head=noised_head)
    assert len(released) == 4
    parts = [*replayed.extractor.parameters(), *replayed.classifier.parameters()]
    rates = [RATES.extractor] * 4 + [RATES.classifier] * 2
    with torch.no_grad():
        for gradients in released:
            assert len(gradients) == (6 if noised_head else 4)
            for parameter, gradient, rate in zip(parts, gradients, rates, strict=False):
                parameter -= rate * gradient / 20
    torch.testing.assert_close(flat(replayed.extractor.parameters()), flat(network.extractor.parameters()))
    distance = float((flat(replayed.classifier.parameters()) - flat(network.classifier.parameters())).norm())
    assert (distance < 1e-5) == noised_head


@pytest.mark.parametrize(
    ("clip_norm", "noise_multiplier"), [(0.0, 1.0), (9e-7, 1.0), (1.1e6, 1.0), (1.0, -1.0), (math.nan, 1.0)]
)
def test_impossible_noise_is_refused(clip_norm, noise_multiplier):
    with pytest.raises(ValueError, match=r"clip_norm must be from 1e-06 to 1e\+06, and noise_multiplier at least 0"):
        StepNoise(clip_norm=clip_norm, noise_multiplier=noise_multiplier)
