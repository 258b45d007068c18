"""Accuracy and loss of a classifier."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class ClassificationSums:
    """Sums over samples; adding two of them gives those of the union.

    Attributes:
        correct: Number of samples whose largest logit is their label's.
        total: Number of samples.
        loss: Sum of the cross-entropies, in nats.
    """

    correct: int = 0
    total: int = 0
    loss: float = 0.0

    def __add__(self, other: "ClassificationSums") -> "ClassificationSums":
        return ClassificationSums(
            correct=self.correct + other.correct, total=self.total + other.total, loss=self.loss + other.loss
        )

    @property
    def accuracy(self) -> float:
        """Share of correct predictions in [0, 1]; NaN without samples."""
        return self.correct / self.total if self.total else float("nan")

    @property
    def mean_loss(self) -> float:
        """Mean cross-entropy in nats; NaN without samples."""
        return self.loss / self.total if self.total else float("nan")


@torch.no_grad()
def evaluate(
    predict: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, *, batch_size: int = 200
) -> ClassificationSums:
    """Evaluate a classifier.

    Args:
        predict: Maps images [B, C, H, W] to logits [B, K].
        images: All images [n, C, H, W].
        labels: Their labels [n], int64.
        batch_size: Images per call; it bounds the memory and does not change the counts.
    """
    sums = ClassificationSums()
    for batch, truth in zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True):
        logits = predict(batch)
        sums += ClassificationSums(
            correct=int((logits.argmax(dim=1) == truth).sum()),
            total=len(truth),
            loss=float(functional.cross_entropy(logits, truth, reduction="sum")),
        )
    return sums
