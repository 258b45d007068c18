"""A-distance classifiers between clients: gradients against autograd, distances against closed forms."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from hyperfl_flwr.training.a_distance import a_distance, errors, gradients, split


def learned(zero, one, *, rounds=20, rate=3.0):
    """Return the classifier [1, D + 1] of samples [n, D] and [m, D], trained with the module's documented steps."""
    sides = torch.tensor([0]), torch.tensor([1])
    classifier = torch.zeros(1, zero.shape[1] + 1)
    for _ in range(rounds):
        both = [gradients(classifier, each, side) for each, side in zip((zero, one), sides, strict=True)]
        classifier = classifier - rate * (both[0] + both[1]) / 2
    return classifier


def distance(zero, one, rng):
    """Return the A-distance of two samples, trained on one half of each and measured on the other."""
    (zero, held_zero), (one, held_one) = split(zero, rng), split(one, rng)
    classifier = learned(zero, one)
    rates = [
        int(errors(classifier, held, torch.tensor([side]))) / len(held)
        for side, held in enumerate((held_zero, held_one))
    ]
    return a_distance(*rates)


def test_gradients_are_those_of_autograd(float64):
    """They equal autograd's for five opponents, with this client on either side and weights far from zero."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(9, 7, generator=generator)
    classifiers = (3 * torch.randn(5, 8, generator=generator)).requires_grad_()
    sides = torch.tensor([0, 1, 1, 0, 1])
    scores = samples @ classifiers[:, :7].T / 7**0.5 + classifiers[:, 7]
    loss = functional.binary_cross_entropy_with_logits(scores, sides.expand(9, 5).double(), reduction="none")
    loss.mean(0).sum().backward()
    torch.testing.assert_close(gradients(classifiers.detach(), samples, sides), classifiers.grad)


def test_errors_are_counted_by_hand(float64):
    """With D = 1 and boundaries 0 and 2, samples -1, 1, 2, 3 have sides 0, 1, 1, 1 and 0, 0, 0, 1.

    Sample 2 lies on the second boundary.
    """
    samples, classifiers = torch.tensor([[-1.0], [1.0], [2.0], [3.0]]), torch.tensor([[1.0, 0.0], [1.0, -2.0]])
    assert errors(classifiers, samples, torch.tensor([0, 0])).tolist() == [3, 1]
    assert errors(classifiers, samples, torch.tensor([1, 1])).tolist() == [1, 3]
    assert errors(classifiers, samples, torch.tensor([1, 0])).tolist() == [1, 1]


def test_both_sides_weigh_the_same():
    """From zero, one step moves along side 1's mean minus side 0's, for any sizes, and leaves the bias at 0."""
    rng = torch.Generator().manual_seed(0)
    zero, one = torch.randn(1000, 4, generator=rng), torch.randn(3, 4, generator=rng) + 1
    wanted = 3 * (one.mean(0) - zero.mean(0)) / 4 / 4**0.5
    torch.testing.assert_close(learned(zero, one, rounds=1)[0], torch.cat([wanted, torch.zeros(1)]))


def test_separate_gaussians_are_2_apart_and_equal_ones_0():
    """With 100 features and 80 training samples per client: 2 if separated, about 0 if equally distributed."""
    rng = np.random.default_rng(0)
    zero, same, other = (torch.from_numpy(rng.normal(size=(160, 100))).float() for _ in range(3))
    other[:, 0] += 12
    assert distance(zero, other, rng) == 2.0
    equal = [
        distance(*(torch.from_numpy(rng.normal(size=(160, 100))).float() for _ in range(2)), rng) for _ in range(20)
    ]
    assert abs(np.mean(equal)) < 0.1  # each has the standard deviation 2 / sqrt(160) = 0.16, their mean 0.035
    everything = learned(zero, same, rounds=200)
    learned_by_heart = [int(errors(everything, each, torch.tensor([side]))) for side, each in enumerate((zero, same))]
    assert a_distance(*(count / 160 for count in learned_by_heart)) > 1  # so errors must be counted on held-out samples


def test_the_distance_of_gaussians_is_that_of_the_best_boundary():
    """With means 2 s apart (s = 1) in one of four features, the error is Phi(-s)."""
    rng = np.random.default_rng(1)
    zero, one = (torch.from_numpy(rng.normal(size=(20_000, 4))).float() for _ in range(2))
    one[:, 0] += 2.0
    assert distance(zero, one, rng) == pytest.approx(2 * (1 - 2 * 0.158655), abs=0.04)


def test_distance_is_two_for_no_error_and_zero_for_chance():
    assert [a_distance(0, 0), a_distance(0.5, 0.5), a_distance(0, 1), a_distance(0.2, 0.1)] == [2, 0, 0, 1.4]


@pytest.mark.parametrize(("count", "learning", "counted"), [(7, 4, 3), (8, 4, 4), (1, 1, 1)])
def test_samples_are_divided_in_halves(count, learning, counted):
    """Every sample is in one of the halves, as a vector; a single sample is in both."""
    samples = torch.arange(6.0 * count).reshape(count, 1, 2, 3)
    halves = split(samples, np.random.default_rng(0))
    assert [half.shape for half in halves] == [(learning, 6), (counted, 6)]
    rows = {tuple(row) for half in halves for row in half.tolist()}
    assert rows == {tuple(row) for row in samples.reshape(count, 6).tolist()}
