"""FedDF: the ensemble's logits, the distillation step, the case in which nothing is left to distil, and its data."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.unlabelled_pool import unlabelled_pool
from hyperfl_flwr.training.ensemble import Distillation, Ensemble, distil, distillation_loss

SHAPE, CLASSES, TEACHERS = (6,), 4, 3


def linear() -> nn.Module:
    return nn.Linear(SHAPE[0], CLASSES)


def curved() -> nn.Module:
    return nn.Sequential(nn.Linear(SHAPE[0], 5), nn.Tanh(), nn.Linear(5, CLASSES))


def models(make):
    """Return the values of some networks, by name, and the network of their means."""
    torch.manual_seed(0)
    networks = [make() for _ in range(TEACHERS)]
    states = [{name: value.detach().numpy() for name, value in each.state_dict().items()} for each in networks]
    mean = make()
    mean.load_state_dict({name: torch.tensor(np.mean([each[name] for each in states], axis=0)) for name in states[0]})
    return networks, states, mean


def gradient_norm(make):
    """Return the norm of the distillation loss's gradient at the mean of some models."""
    _, states, mean = models(make)
    samples = torch.randn(50, *SHAPE)
    goal = Ensemble(network=make().to("meta"), models=states).mean_logits(samples)
    distillation_loss(mean(samples), goal).backward()
    return float(torch.cat([parameter.grad.flatten() for parameter in mean.parameters()]).norm())


@pytest.mark.usefixtures("float64")
def test_of_linear_models_nothing_is_left_to_distil():
    """The mean of the logits is the logits of the mean, where the loss has its minimum; with a tanh it is not."""
    assert gradient_norm(linear) < 1e-15
    assert gradient_norm(curved) > 1e-3


def test_of_linear_models_nothing_is_left_in_float32():
    """Only the gradient is 0: Adam divides what rounding leaves by its own size, and takes full steps with it."""
    assert gradient_norm(linear) < 1e-7


@pytest.mark.usefixtures("float64")
def test_an_ensemble_computes_each_model_s_logits():
    """They equal those of the networks, and the gradient of their sum reaches the samples."""
    networks, states, _ = models(curved)
    ensemble = Ensemble(network=curved().to("meta"), models=states)
    samples = torch.randn(7, *SHAPE, requires_grad=True)
    expected = [network(samples) for network in networks]
    for one, other in zip(ensemble.each(samples), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(ensemble.mean_logits(samples), sum(expected) / TEACHERS, rtol=0, atol=1e-15)
    wanted = torch.autograd.grad(sum(map(torch.sum, expected)), samples)[0]
    found = torch.autograd.grad(sum(logits.sum() for logits in ensemble.each(samples)), samples)[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


@pytest.mark.usefixtures("float64")
def test_the_loss_is_that_of_the_definition():
    """KL(p || q) = sum_k p_k (log p_k - log q_k), the mean over the samples; shifted logits do not change it."""
    student, teacher = torch.randn(9, CLASSES), torch.randn(9, CLASSES)
    p, q = functional.softmax(teacher, dim=1), functional.softmax(student, dim=1)
    expected = (p * (p.log() - q.log())).sum(dim=1).mean()
    torch.testing.assert_close(distillation_loss(student + 3, teacher - 5), expected, rtol=0, atol=1e-14)
    assert float(distillation_loss(teacher, teacher)) == pytest.approx(0, abs=1e-15)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_the_steps_are_adam_s_along_half_a_cosine(clip):
    """Four steps of rate 0.1 (1 + cos(pi t / 4)) / 2 equal torch's Adam at these rates, with gradients clipped."""
    _, states, mean = models(curved)
    ensemble = Ensemble(network=curved().to("meta"), models=states)
    batches = [torch.randn(8, *SHAPE) for _ in range(4)]
    expected = curved()
    expected.load_state_dict(mean.state_dict())
    optimiser = torch.optim.Adam(expected.parameters(), lr=0.1)
    for step, samples in enumerate(batches):
        optimiser.param_groups[0]["lr"] = 0.1 * (1 + np.cos(np.pi * step / 4)) / 2
        optimiser.zero_grad()
        distillation_loss(expected(samples), ensemble.mean_logits(samples)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(expected.parameters(), clip)
        optimiser.step()
    remaining = iter(batches)
    distil(mean, ensemble, lambda: next(remaining), Distillation(steps=4, learning_rate=0.1, clip_norm=clip))
    for one, other in zip(mean.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_distillation_brings_the_mean_to_the_ensemble():
    """On samples that it was not trained on, the mean's divergence from the ensemble falls to less than a fifth."""
    _, states, mean = models(curved)
    ensemble = Ensemble(network=curved().to("meta"), models=states)
    samples = torch.randn(500, *SHAPE)

    @torch.no_grad()
    def divergence() -> float:
        return float(distillation_loss(mean(samples), ensemble.mean_logits(samples)))

    before = divergence()
    distil(mean, ensemble, lambda: torch.randn(64, *SHAPE), Distillation(steps=200, learning_rate=0.01, clip_norm=5.0))
    assert divergence() < before / 5


def test_noise_is_standard_normal():
    pool = unlabelled_pool("noise", (2, 30, 30))
    batch = pool.batch(50, np.random.default_rng(0))
    assert batch.shape == (50, 2, 30, 30)
    assert batch.dtype == torch.float32
    assert abs(float(batch.mean())) < 0.02
    assert float(batch.std()) == pytest.approx(1, abs=0.02)
    other = pool.batch(50, np.random.default_rng(1))
    assert not torch.equal(batch, other)


def test_a_data_set_is_normalised_by_its_own_statistics():
    """A large batch of the digits has mean 0 and variance 1, and each sample is one of the training images."""
    pool = unlabelled_pool("digits", (1, 8, 8))
    batch = pool.batch(3000, np.random.default_rng(0))
    assert abs(float(batch.mean())) < 0.02
    assert float(batch.std()) == pytest.approx(1, abs=0.02)
    dataset = load_dataset("digits")
    every = dataset.train.scaled(np.arange(len(dataset.train)))
    one = batch[0] * pool.std[0] + pool.mean[0]
    assert np.abs(every - one.numpy()).max(axis=(1, 2, 3)).min() < 1e-6


def test_a_file_without_labels(tmp_path: Path):
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "some.npz", images=images)
    for name, root in ((f"npz:{tmp_path / 'some.npz'}", None), ("npz:some.npz", tmp_path)):
        pool = unlabelled_pool(name, (1, 8, 8), root)
        batch = pool.batch(5, np.random.default_rng(0))
        pixels = (batch * pool.std[0] + pool.mean[0]) * 255
        for one in pixels[:, 0].numpy():
            assert min(np.abs(one - each).max() for each in images) < 1e-3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cifar100", r"the shape \(1, 8, 8\) of the run's data, but cifar100 has \(3, 32, 32\)"),
        ("nothing", "unlabelled data must be noise or one of digits, .* got 'nothing'"),
        ("npz:PLACE/missing.npz", "must be an existing"),
        ("npz:PLACE/other.npz", "must have the shape 1x8x8"),
    ],
)
def test_data_that_cannot_be_used(name: str, reason: str, tmp_path: Path):
    np.savez(tmp_path / "other.npz", images=np.zeros((4, 9, 9), np.uint8))
    with pytest.raises(DataError, match=reason):
        unlabelled_pool(name.replace("PLACE", str(tmp_path)), (1, 8, 8))
