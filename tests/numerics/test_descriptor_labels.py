"""Class shares estimated from a model and compared with the truth; expected values by hand and by scipy."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from hyperfl_flwr.attacks.descriptor_labels import BATCH, expected_shares, paired_fit, swapped_fit
from hyperfl_flwr.metrics.distributions import rank_correlation, total_variation
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import build_target

TRUTH = np.array([0.5, 0.3, 0.2, 0.0])


def linear() -> Target:
    """Return a target without hidden layers: logits W x + b of 2 pixels and 2 classes."""
    return Target(nn.Flatten(), nn.Linear(2, 2))


def test_a_model_that_expects_its_classes_gives_them_away() -> None:
    """With zero weights and biases ln p, softmax is p for any image; a share of 0 becomes e^-40."""
    target = build_target("mlp", (1, 4, 4), 4).eval()
    parameters = {name: np.zeros(value.shape, np.float32) for name, value in target.named_parameters()}
    parameters["classifier.bias"] = np.log(np.maximum(TRUTH, math.exp(-40))).astype(np.float32)
    found = expected_shares(target, parameters, torch.randn(7, 1, 4, 4))
    np.testing.assert_allclose(found, TRUTH, rtol=0, atol=1e-7)
    fit = paired_fit([found], [TRUTH])
    assert fit.total_variation[0] < 1e-6
    assert fit.rank_correlation == pytest.approx((1.0,))


def test_predictions_are_averaged_over_all_images() -> None:
    """Logits (a, 0) give sigmoid(a): BATCH images have a = ln 3 (3/4) and one has a = -ln 3 (1/4)."""
    weights = {
        "classifier.weight": np.array([[1.0, 0.0], [0.0, 0.0]], np.float32),
        "classifier.bias": np.zeros(2, np.float32),
    }
    images = torch.full((BATCH + 1, 1, 1, 2), math.log(3.0))
    images[-1] *= -1
    first = (0.75 * BATCH + 0.25) / (BATCH + 1)
    np.testing.assert_allclose(expected_shares(linear(), weights, images), [first, 1 - first], rtol=0, atol=1e-7)


def test_the_control_takes_the_others_estimates() -> None:
    """Three clients of one class each, exact estimates: distance 0 and rank 1 for the own, 1 and -1/2 for the others'.

    Spearman's of (1, 0, 0) and (0, 1, 0): ranks (3, 1.5, 1.5) and (1.5, 3, 1.5), covariance -0.75/3, variances 1.5/3.
    """
    exact = list(np.eye(3))
    own, swapped = paired_fit(exact, exact), swapped_fit(exact, exact)
    assert (own.total_variation, own.rank_correlation) == ((0.0,) * 3, pytest.approx((1.0,) * 3))
    assert swapped.total_variation == (1.0,) * 3
    assert swapped.rank_correlation == pytest.approx((-0.5,) * 3)
    wrong_one = [exact[0], exact[0], exact[2]]
    assert paired_fit(wrong_one, exact).total_variation == (0.0, 1.0, 0.0)
    assert swapped_fit(wrong_one, exact).total_variation == (0.5, 1.0, 1.0)


def test_distances_of_distributions() -> None:
    """Half of |0.5 - 0.25| + |0.3 - 0.25| + |0.2 - 0.25| + 0.25 is 0.3; ranks of a constant vector are NaN."""
    uniform = np.full(4, 0.25)
    assert total_variation(TRUTH, uniform) == pytest.approx(0.3)
    assert math.isnan(rank_correlation(TRUTH, uniform))
    assert rank_correlation([1, 2, 3], [9, 8, 7]) == pytest.approx(-1.0)
