"""Score whether samples were trained on, from a model's confidence in them: loss threshold and likelihood ratio.

The loss threshold (Yeom, Giacomelli, Fredrikson, Jha: "Privacy Risk in Machine Learning", CSF 2018) calls samples with
a small loss members. It cannot tell a sample that is easy from one that was trained on.

The likelihood ratio, LiRA (Carlini et al.: "Membership Inference Attacks From First Principles", IEEE S&P 2022),
compares with shadow models, of which some were trained on the sample and the others were not. The confidence p in a
sample's label is scaled to

    phi = log(p / (1 - p)),

which is about Gaussian over trainings. With the mean over the shadow models of each sample, and a variance for all
samples together, as the paper does with few shadow models, the score of a sample is

    log N(phi; mean_in, variance_in) - log N(phi; mean_out, variance_out).

Several queries, here the models of several rounds, are taken as independent, and their scores are added.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Confidences = NDArray[np.float64]
"""Scaled confidences phi."""

LEAST_VARIANCE = 1e-12
"""Lower limit of a variance. A round that all trainings begin with has the same confidences in all of them."""


def scaled_confidences(logits: Tensor, labels: Tensor) -> Confidences:
    """Return log(p / (1 - p)) [n] of the softmax p of each sample's label.

    It is the logit of the label minus the logarithm of the sum of the others' exponentials, which neither overflows nor
    loses confidences near 1.

    Args:
        logits: [n, K], with K at least 2.
        labels: [n], classes in 0..K-1.
    """
    chosen = labels[:, None]
    logits = logits.double()
    others = logits.scatter(1, chosen, -torch.inf)
    found = logits.gather(1, chosen)[:, 0] - torch.logsumexp(others, dim=1)
    return np.asarray(found.numpy(), np.float64)


def loss_scores(confidences: Confidences) -> Confidences:
    """Return the score of the loss threshold: minus the cross entropy, log p = -log(1 + exp(-phi)), of each sample.

    Args:
        confidences: Scaled confidences, of any shape.
    """
    return -np.logaddexp(0.0, -confidences)


def likelihood_ratios(observed: Confidences, shadows: Confidences, trained_on: NDArray[np.bool_]) -> Confidences:
    """Return the score [n] of the likelihood ratio of each sample, large for members.

    Args:
        observed: Scaled confidences [q, n] of the attacked model, for q queries.
        shadows: Those of m shadow models [m, q, n].
        trained_on: Whether each shadow model was trained on each sample [m, n].

    Raises:
        ValueError: If a sample is in fewer than two of the shadow models, or not in fewer than two.
    """
    members = trained_on.sum(axis=0)
    if min(members.min(), (len(trained_on) - members).min()) < 2:
        raise ValueError(f"each sample must be in, and not in, at least 2 of the {len(trained_on)} shadow models")
    return _log_density(observed, shadows, trained_on) - _log_density(observed, shadows, ~trained_on)


def _log_density(observed: Confidences, shadows: Confidences, chosen: NDArray[np.bool_]) -> Confidences:
    """Return the log density [n], without constants, of Gaussians fitted to the chosen shadow models [m, n]."""
    weights = chosen[:, None, :]
    number = weights.sum(axis=0)
    means = np.where(weights, shadows, 0.0).sum(axis=0) / number
    squares = (np.where(weights, shadows - means, 0.0) ** 2).sum(axis=(0, 2))
    # A mean for each sample is fitted: each takes one degree of freedom.
    variances = np.maximum(squares / (number - 1).sum(axis=1), LEAST_VARIANCE)[:, None]
    found: Confidences = -((observed - means) ** 2 / (2 * variances) + 0.5 * np.log(variances)).sum(axis=0)
    return found
