"""Measure a classifier on labelled samples."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hyperfl_flwr.metrics.intervals import Interval, of_share


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Predictions for n labelled samples in K classes, and what they are worth.

    All numbers but the losses are shares in [0, 1], NaN where they are not defined. The definitions are those of
    scikit-learn; a mean over classes is over those that it is defined for.

    Attributes:
        labels: True class of each sample, int64 [n].
        predicted: Class with the largest logit, int64 [n].
        probabilities: The model's softmax [n, K].
        loss: Sum of the cross-entropies, in nats.
    """

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    probabilities: NDArray[np.floating]
    loss: float

    @property
    def total(self) -> int:
        """Number of samples n."""
        return len(self.labels)

    @property
    def correct(self) -> int:
        """Number of correctly classified samples."""
        return int((self.labels == self.predicted).sum())

    @property
    def accuracy(self) -> float:
        """Share of correctly classified samples."""
        return self.correct / self.total if self.total else float("nan")

    @property
    def accuracy_interval(self) -> Interval | None:
        """95 % interval of the accuracy over samples of the same kind; None without samples."""
        return of_share(self.correct, self.total)

    @property
    def mean_loss(self) -> float:
        """Mean cross-entropy in nats."""
        return self.loss / self.total if self.total else float("nan")

    @property
    def confusion(self) -> NDArray[np.int64]:
        """The kinds of predictions that occur [m, 3]: true class, predicted class, number of samples; in this order.

        Not a matrix [K, K]: K may be far larger than n.
        """
        cells, counts = np.unique(np.stack((self.labels, self.predicted), axis=1), axis=0, return_counts=True)
        return np.concatenate((cells, counts[:, None]), axis=1)

    @property
    def recalls(self) -> NDArray[np.float64]:
        """Share of correctly classified samples of each class [K]; NaN for a class without samples."""
        hits, samples, _ = self._counts
        return _ratio(hits, samples)

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall over the classes that have samples: 1/K for a model that always says the same."""
        return _mean(self.recalls)

    @property
    def macro_f1(self) -> float:
        """Mean over the classes that have samples or predictions of F1 = 2 TP / (2 TP + FP + FN)."""
        hits, samples, predictions = self._counts
        return _mean(_ratio(2 * hits, samples + predictions))

    @property
    def auc(self) -> float:
        """Mean area under the ROC curves of one class against the others, over classes with and without samples.

        The area is the probability that a sample of the class has a larger softmax of the class than another sample,
        equal ones counted by half. It is not defined where all samples have the same label.
        """
        return _mean(np.array([self._area(number) for number in np.unique(self.labels)]))

    @property
    def majority_share(self) -> float:
        """Share of the most common class: the accuracy of a model that always says that class."""
        return float(np.bincount(self.labels).max()) / self.total if self.total else float("nan")

    @cached_property
    def _counts(self) -> tuple[NDArray[np.int64], ...]:
        """Numbers of correct predictions, of samples, and of predictions, of each class [K]."""
        right = self.labels[self.labels == self.predicted]
        classes = self.probabilities.shape[1]
        return tuple(np.bincount(values, minlength=classes) for values in (right, self.labels, self.predicted))

    def _area(self, number: int) -> float:
        of_class, values = self.labels == number, self.probabilities[:, number]
        ours, others = values[of_class], np.sort(values[~of_class])
        if not len(others) or np.isnan(values).any():
            return float("nan")
        below = np.searchsorted(others, ours, "left") + np.searchsorted(others, ours, "right")
        return float(below.mean()) / 2 / len(others)


def _ratio(numbers: NDArray[np.int64], totals: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return quotients, NaN where the total is 0."""
    found = np.full(len(numbers), np.nan)
    np.divide(numbers, totals, out=found, where=totals > 0)
    return found


def _mean(values: NDArray[np.float64]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


@torch.no_grad()
def evaluate(predict: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, *, batch_size: int = 200) -> Scores:
    """Evaluate a classifier.

    Args:
        predict: Function from images [B, C, H, W] to logits [B, K].
        images: All images [n, C, H, W].
        labels: Labels of the images [n], int64.
        batch_size: Number of images per call; it limits the memory and does not change the predictions.
    """
    parts: list[Tensor] = []
    loss = torch.zeros((), dtype=torch.float64, device=images.device)
    for batch, truth in zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True):
        logits = predict(batch)
        loss += functional.cross_entropy(logits, truth, reduction="sum")
        # In float64, which holds classes exactly.
        columns = (truth[:, None], logits.argmax(dim=1, keepdim=True), logits.softmax(dim=1))
        parts.append(torch.cat([column.double() for column in columns], dim=1))
    width = parts[0].shape[1]
    # Read once: the CPU waits for a GPU at each read.
    numbers = torch.cat([*(part.flatten() for part in parts), loss[None]]).cpu().numpy()
    table = numbers[:-1].reshape(-1, width)
    return Scores(
        labels=table[:, 0].astype(np.int64),
        predicted=table[:, 1].astype(np.int64),
        probabilities=table[:, 2:],
        loss=float(numbers[-1]),
    )
