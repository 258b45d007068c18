"""Estimate the shares of the classes in a client's training data from the bias gradient of a shared classifier.

For the mean cross-entropy of samples of which the share s_j has label j, the gradient of the last layer's bias is

    dL/db_k = sum_j s_j M_jk        M_jk = mean over the client's samples x of class j of f(x) (softmax(x)_k - [j = k])

where f(x) is the factor by which the gradient of one sample is clipped, 1 without clipping. Counting labels by this
gradient is LLG (Wainakh et al.: "User-Level Label Leakage from Gradients in Federated Learning", PETS 2022), which
estimates the effect of the softmax from auxiliary data. Here M is measured: the server has the network, and labelled
samples of its own of each class. The shares are then the non-negative solution of linear equations, and several rounds
give more equations for the same shares. As the gradients of all steps of a round are known only as their mean, M is
taken between its values before and after the round.

After one step with all of a client's samples, the error is only that of M, and without clipping none for a network that
predicts the same for all samples, as at its start. A network that is nearly always right has nearly no gradient, and
reveals less.

A whole upload that is shortened to a norm has an unknown factor, which the bias cannot tell: the entries of each row of
M sum to 0, so that some shares give no gradient at all, and only its length says how far the shares are from these. The
factor is taken as 1. Then shortened uploads give shares that are too close to these.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Shares = NDArray[np.float64]

SUM_WEIGHT = 10.0
"""Weight of the equation that the shares sum to 1; the gradient's entries are at most 1."""


def class_gradients(logits: Tensor, labels: Tensor, factors: Tensor | None = None) -> Shares:
    """Return M [K, K]: of the samples of each class, the mean gradient of the classifier's bias.

    A class without samples has equal shares of all classes as its softmax, and the mean factor.

    Args:
        logits: [n, K].
        labels: [n], classes in 0..K-1.
        factors: Factors [n] by which the samples' gradients are clipped; None for no clipping.
    """
    classes = logits.shape[1]
    chosen = torch.nn.functional.one_hot(labels, classes).double()
    scale = torch.ones(len(labels), 1, dtype=torch.float64) if factors is None else factors.double()[:, None]
    numbers = chosen.sum(dim=0)[:, None]
    sums = chosen.T @ (scale * (torch.softmax(logits.double(), dim=1) - chosen))
    missing = scale.mean() * (1 / classes - torch.eye(classes, dtype=torch.float64))
    found: Shares = torch.where(numbers > 0, sums / numbers.clamp(min=1), missing).numpy()
    return found


def during_round(before: Shares, after: Shares, steps: int) -> Shares:
    """Return M over the gradients of k steps, which are taken before the first step until before the last one."""
    return before + (after - before) * (steps - 1) / (2 * steps)


def shares_of_bias(gradients: Sequence[Shares], expected: Sequence[Shares]) -> Shares:
    """Return the estimated share [K] of each class, non-negative and of the sum 1.

    Args:
        gradients: Mean gradient of the classifier's bias [K] in each round.
        expected: M [K, K] of the bias in each round.

    Raises:
        ValueError: If there is no round.
    """
    from scipy.optimize import nnls  # deferred: takes a third of a second

    if not len(gradients):
        raise ValueError("the shares of the classes need the bias gradient of at least one round, got none")
    classes = len(gradients[0])
    equations = [each.T for each in expected] + [np.full((1, classes), SUM_WEIGHT)]
    values = [*gradients, np.array([SUM_WEIGHT])]
    weights: Shares = nnls(np.concatenate(equations), np.concatenate(values))[0]
    shares: Shares = weights / weights.sum()
    return shares
