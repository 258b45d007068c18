"""Scores of a classifier: one of K classes for each sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.tasks import CLASSIFICATION, NO_CLASS, Task
from hyperfl_flwr.metrics.intervals import Interval, of_share
from hyperfl_flwr.metrics.scores import Scores, mean_of_known


def predicted_classes(largest: NDArray[np.integer], probabilities: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the classes that a model predicts [n], so that outputs which are not numbers count as wrong.

    Args:
        largest: Class with the largest output [n]; without meaning where one is not a number.
        probabilities: Softmax of the outputs [n, K].
    """
    return np.where(np.isnan(probabilities).any(axis=1), NO_CLASS, largest)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassScores(Scores):
    """Predictions for n labelled samples in K classes, and what they are worth.

    All numbers but the losses are shares in [0, 1], NaN where they are not defined. The definitions are those of
    scikit-learn; a mean over classes is over those that it is defined for.

    Attributes:
        labels: True class of each sample, int64 [n].
        predicted: Class with the largest logit, int64 [n]; `NO_CLASS` where a logit is not a number.
        probabilities: The model's softmax [n, K].
        loss: Sum of the cross-entropies, in nats.
    """

    task: ClassVar[Task] = CLASSIFICATION

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    probabilities: NDArray[np.floating]
    loss: float

    @property
    def correct(self) -> int:
        """Number of correctly classified samples."""
        return int((self.labels == self.predicted).sum())

    @property
    def accuracy(self) -> float:
        """Share of correctly classified samples."""
        return self.correct / self.total if self.total else float("nan")

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the accuracy over samples of the same kind; None without samples."""
        return of_share(self.correct, self.total)

    @property
    def confusion(self) -> NDArray[np.int64]:
        """The kinds of predictions that occur [m, 3]: true class, predicted class, number of samples; in this order.

        Not a matrix [K, K]: K may be far larger than n.
        """
        cells, counts = np.unique(np.stack((self.labels, self.predicted), axis=1), axis=0, return_counts=True)
        return np.concatenate((cells, counts[:, None]), axis=1)

    def details(self, target_std: Sequence[float] = ()) -> list[list[float]]:
        """Return `confusion`, see `Scores.details`."""
        rows: list[list[float]] = self.confusion.tolist()
        return rows

    @property
    def recalls(self) -> NDArray[np.float64]:
        """Share of correctly classified samples of each class [K]; NaN for a class without samples."""
        hits, samples, _ = self._counts
        return ratio(hits, samples)

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall over the classes that have samples: 1/K for a model that always says the same."""
        return mean_of_known(self.recalls)

    @property
    def macro_f1(self) -> float:
        """Mean over the classes that have samples or predictions of F1 = 2 TP / (2 TP + FP + FN)."""
        hits, samples, predictions = self._counts
        return mean_of_known(ratio(2 * hits, samples + predictions))

    @property
    def auc(self) -> float:
        """Mean area under the ROC curves of one class against the others, over classes with and without samples.

        The area is the probability that a sample of the class has a larger softmax of the class than another sample,
        equal ones counted by half. It is not defined where all samples have the same label.
        """
        areas = [
            area_under_roc(self.labels == number, self.probabilities[:, number]) for number in np.unique(self.labels)
        ]
        return mean_of_known(np.array(areas))

    @property
    def majority_share(self) -> float:
        """Share of the most common class: the accuracy of a model that always says that class."""
        return float(np.bincount(self.labels).max()) / self.total if self.total else float("nan")

    @cached_property
    def _counts(self) -> tuple[NDArray[np.int64], ...]:
        """Numbers of correct predictions, of samples, and of predictions, of each class [K]."""
        right = self.labels[self.labels == self.predicted]
        classes = self.probabilities.shape[1]
        named = self.predicted[self.predicted != NO_CLASS]
        return tuple(np.bincount(values, minlength=classes) for values in (right, self.labels, named))


def area_under_roc(positive: NDArray[np.bool_], values: NDArray[np.floating]) -> float:
    """Return the area under the ROC curve: the probability that a positive sample has a larger value than another.

    Args:
        positive: Whether each sample is positive [n].
        values: Its value [n].

    Returns:
        The area, equal values counted by half; NaN if all samples are of one kind, or a value is NaN.
    """
    ours, others = values[positive], np.sort(values[~positive])
    if not len(ours) or not len(others) or np.isnan(values).any():
        return float("nan")
    below = np.searchsorted(others, ours, "left") + np.searchsorted(others, ours, "right")
    return float(below.mean()) / 2 / len(others)


def ratio(numbers: NDArray[np.int64], totals: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return quotients, NaN where the total is 0."""
    found = np.full(len(numbers), np.nan)
    np.divide(numbers, totals, out=found, where=totals > 0)
    return found
