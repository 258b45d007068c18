"""A-distance between clients, from linear classifiers that learn to distinguish two clients' samples.

Ben-David, Blitzer, Crammer, Pereira: "Analysis of Representations for Domain Adaptation", NIPS 2006: the distance of
two distributions is 2 (1 - 2 err), where err is the error of the best classifier that separates samples of one from
samples of the other. "Inference-Time Personalized Federated Learning" (under review at ICLR 2022), section 6.2 (3c),
uses it to find the training client that is nearest to a novel one. Both clients send the server gradients of linear
classifiers over their samples, without noise. A gradient is a weighted sum of the samples, with weights that the
classifiers determine: a server that chooses the classifiers can compute single samples from the answers.

Here the classifier of a pair is a logistic regression, learned by gradient descent from zero:

    p(side 1 | x) = sigmoid(w . x / sqrt(D) + b),    step: (w, b) -= rate (g_0 + g_1) / 2,

where g_s is the mean gradient of the loss over the samples of side s, so that both sides have the same weight for any
numbers of samples. Features are divided by sqrt(D): |x|^2 / D is about 1 for standardised features, so that one rate
suits any D. A client has one classifier per opponent; they form one matrix [M, D + 1], with b in the last column.

With more features than samples a linear classifier eventually separates any two sets of samples, even of the same
distribution. `split` therefore divides a client's samples: gradients come from one half, errors from the other.
"""

import math

import numpy as np
import torch
from torch import Tensor


def split(samples: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Divide a client's samples at random into a half for the gradients and a half for the errors.

    Args:
        samples: The samples [n, ...].
        rng: Source of the random order.

    Returns:
        Two tensors [h, D] and [n - h, D] with h = (n + 1) // 2; a single sample serves as both.
    """
    flat = samples.flatten(1)
    if len(flat) == 1:
        return flat, flat
    order = torch.from_numpy(rng.permutation(len(flat))).to(flat.device)
    half = (len(flat) + 1) // 2
    return flat[order[:half]], flat[order[half:]]


def gradients(classifiers: Tensor, samples: Tensor, sides: Tensor) -> Tensor:
    """Return the mean gradients of logistic losses over one client's samples.

    Args:
        classifiers: One row per opponent, [M, D + 1].
        samples: The client's samples [n, D], n at least 1.
        sides: The client's side of each classifier, 0 or 1, [M].

    Returns:
        [M, D + 1]: the gradient of the mean over the samples of -log p(side | x), in nats.
    """
    features = _features(samples)
    residuals = torch.sigmoid(features @ classifiers.T) - sides.to(features)
    return residuals.T @ features / len(features)


def errors(classifiers: Tensor, samples: Tensor, sides: Tensor) -> Tensor:
    """Count one client's samples that classifiers assign to the opponent.

    Args:
        classifiers: One row per opponent, [M, D + 1].
        samples: The client's samples [n, D].
        sides: The client's side of each classifier, 0 or 1, [M].

    Returns:
        Numbers of errors [M], int64, in 0..n. A sample on the boundary counts for side 0.
    """
    scores = _features(samples) @ classifiers.T
    return ((scores > 0) != sides.bool()).sum(0)


def a_distance(error_0: float, error_1: float) -> float:
    """Return 2 (1 - 2 err), where err is the mean of both sides' error rates in [0, 1].

    Returns:
        2 if the classifier makes no error, 0 if it is as good as chance, below 0 if it is worse.
    """
    return 2 * (1 - (error_0 + error_1))


def _features(samples: Tensor) -> Tensor:
    """Return samples / sqrt(D) with a column of ones, [n, D + 1]."""
    ones = torch.ones(len(samples), 1, dtype=samples.dtype, device=samples.device)
    return torch.cat([samples / math.sqrt(samples.shape[1]), ones], 1)
