"""Compute accuracy and loss of a classifier as sums that merge over batches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class ClassificationSums:
    """Sums over samples; adding two objects gives the sums over both sets of samples.

    Attributes:
        correct: Number of correctly classified samples (the label has the largest logit).
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
        predict: Function from images [B, C, H, W] to logits [B, K].
        images: All images [n, C, H, W].
        labels: Labels of the images [n], int64.
        batch_size: Number of images per call; it limits the memory and does not change the counts.
    """
    correct, loss = (torch.zeros((), dtype=torch.float64, device=images.device) for _ in range(2))
    for batch, truth in zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True):
        logits = predict(batch)
        correct += (logits.argmax(dim=1) == truth).sum()
        loss += functional.cross_entropy(logits, truth, reduction="sum")
    # Read once: the CPU waits for a GPU at each read.
    sums = torch.stack((correct, loss)).cpu()
    return ClassificationSums(correct=int(sums[0]), total=len(labels), loss=float(sums[1]))
