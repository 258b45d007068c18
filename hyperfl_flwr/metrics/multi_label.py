"""Scores of predictions of several labels: for each of K labels whether a sample has it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.tasks import MULTI_LABEL, Task
from hyperfl_flwr.metrics.classification import area_under_roc, ratio
from hyperfl_flwr.metrics.intervals import Interval, of_mean
from hyperfl_flwr.metrics.scores import Scores, mean_of_known


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelScores(Scores):
    """Predictions of K labels for n samples, and what they are worth.

    All numbers but the losses are shares in [0, 1], NaN where they are not defined. The definitions are those of
    scikit-learn for each label; a mean over labels is over those that it is defined for.

    Attributes:
        labels: Whether each sample has each label, bool [n, K].
        probabilities: The sigmoid of the model's outputs [n, K]; a label is predicted above 0.5.
        loss: Sum over the samples of the mean binary cross-entropy over the labels, in nats.
    """

    task: ClassVar[Task] = MULTI_LABEL

    labels: NDArray[np.bool_]
    probabilities: NDArray[np.floating]
    loss: float

    @property
    def predicted(self) -> NDArray[np.bool_]:
        """Whether each label is predicted [n, K]."""
        return self.probabilities > 0.5

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each answer is right [n, K]; one that is not a number is wrong."""
        found: NDArray[np.bool_] = (self.predicted == self.labels) & ~np.isnan(self.probabilities)
        return found

    @property
    def accuracy(self) -> float:
        """Share of right answers among those for all samples and labels."""
        return float(self.right.mean()) if self.total else float("nan")

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the accuracy, by Student's distribution over samples; None with fewer than two."""
        if self.total < 2:
            return None
        shares = self.right.mean(axis=1)
        found = of_mean(float(shares.mean()), float(shares.std(ddof=1)), self.total)
        return None if found is None else (max(0.0, found[0]), min(1.0, found[1]))

    @property
    def sensitivities(self) -> NDArray[np.float64]:
        """Share of the samples with a label for which it is predicted [K]; NaN for a label of no sample."""
        return ratio((self.labels & self.right).sum(axis=0), self.labels.sum(axis=0))

    @property
    def specificities(self) -> NDArray[np.float64]:
        """Share of the samples without a label for which it is not predicted [K]; NaN for a label of all samples."""
        return ratio((~self.labels & self.right).sum(axis=0), (~self.labels).sum(axis=0))

    @property
    def balanced_accuracy(self) -> float:
        """Mean over the labels of the mean of sensitivity and specificity: 0.5 for one that always says the same."""
        both = np.stack((self.sensitivities, self.specificities), axis=1)
        return mean_of_known(np.array([mean_of_known(row) for row in both]))

    @property
    def macro_f1(self) -> float:
        """Mean of F1 = 2 TP / (2 TP + FP + FN) over the labels that samples or predictions have."""
        hits = (self.labels & self.predicted).sum(axis=0)
        return mean_of_known(ratio(2 * hits, self.labels.sum(axis=0) + self.predicted.sum(axis=0)))

    @property
    def areas(self) -> NDArray[np.float64]:
        """Area under the ROC curve of each label [K]; NaN for a label that all samples or none have."""
        columns = zip(self.labels.T, self.probabilities.T, strict=True)
        return np.array([area_under_roc(positive, values) for positive, values in columns])

    @property
    def auc(self) -> float:
        """Mean area under the ROC curves of the labels that some samples have and others do not."""
        return mean_of_known(self.areas)

    def details(self, target_std: Sequence[float] = ()) -> list[list[float]]:
        """Return samples, sensitivity, specificity and AUC of each label, see `Scores.details`."""
        columns = (self.labels.sum(axis=0), self.sensitivities, self.specificities, self.areas)
        rows: list[list[float]] = np.stack([np.asarray(each, np.float64) for each in columns], axis=1).tolist()
        return rows

    @property
    def majority_share(self) -> float:
        """Accuracy of a model that says of every label what is true of most samples."""
        if not self.total:
            return float("nan")
        shares = self.labels.mean(axis=0)
        return float(np.maximum(shares, 1 - shares).mean())
