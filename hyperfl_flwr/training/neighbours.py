"""Classify samples by their nearest training samples, and mix that with a network's probabilities (kNN-Per)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


class Neighbours:
    """Class probabilities from the labels of the nearest stored samples.

    Marfoq, Neglia, Kameni, Vidal: "Personalized Federated Learning through Local Memorization", ICML 2022, section 3: a
    neighbour at the distance d has the weight exp(-d^2 / F), and the weights of the k nearest ones are scaled to sum 1.

    Args:
        features: Features [n, F] of the stored samples, n at least 1.
        labels: Their labels [n], int64.
        num_classes: Number of classes K.
        number: Number k of neighbours; all samples if there are fewer.
    """

    def __init__(self, features: Tensor, labels: Tensor, num_classes: int, number: int) -> None:
        self._features, self._number = features, min(number, len(labels))
        self._classes = functional.one_hot(labels, num_classes).to(features.dtype)

    def probabilities(self, features: Tensor) -> Tensor:
        """Return the class probabilities [B, K] of samples with features [B, F]."""
        # Not by matrix products, whose rounding is large between near samples.
        distances = torch.cdist(features, self._features, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = (distances.square() / features.shape[1]).topk(self._number, dim=1, largest=False)
        # A softmax, since all weights of far neighbours would round to 0.
        weights = functional.softmax(-nearest.values, dim=1)
        return (weights.unsqueeze(2) * self._classes[nearest.indices]).sum(dim=1)


def mixed(logits: Tensor, neighbours: Tensor, weight: float) -> Tensor:
    """Return the logarithms [B, K] of weight * softmax(logits) + (1 - weight) * neighbours, as logits.

    Args:
        logits: The network's logits [B, K].
        neighbours: Probabilities [B, K] of `Neighbours`.
        weight: Share of the network, in [0, 1].
    """
    probabilities = weight * functional.softmax(logits, dim=1) + (1 - weight) * neighbours
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()  # finite without any neighbour


def best_weight(logits: Tensor, neighbours: Tensor, labels: Tensor, weights: Sequence[float]) -> float:
    """Return the weight of `mixed` with the most correct predictions; of several, that with the lowest cross-entropy.

    Args:
        logits: The network's logits [B, K] of held-back samples.
        neighbours: Probabilities [B, K] of `Neighbours`.
        labels: Labels [B], int64.
        weights: The weights to choose from.
    """

    def merit(weight: float) -> tuple[int, float]:
        both = mixed(logits, neighbours, weight)
        return int((both.argmax(dim=1) == labels).sum()), -float(functional.cross_entropy(both, labels))

    return max(weights, key=merit)
