"""What the scores of all tasks have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.tasks import Task
from hyperfl_flwr.metrics.intervals import Interval


class Scores(ABC):
    """Predictions for n labelled samples, and what they are worth.

    Each name in `task` is an attribute: the main score and the others.

    Attributes:
        task: What is predicted.
        labels: What is true of each sample [n] or [n, K].
        loss: Sum of the samples' losses, see `hyperfl_flwr.models.losses`.
    """

    task: ClassVar[Task]
    labels: NDArray[Any]
    loss: float

    @property
    def total(self) -> int:
        """Number of samples n."""
        return len(self.labels)

    @property
    def mean_loss(self) -> float:
        """Mean loss of a sample; NaN without samples."""
        return self.loss / self.total if self.total else float("nan")

    @property
    def score(self) -> float:
        """The main score of the task; NaN without samples."""
        return self.value(self.task.score)

    @property
    @abstractmethod
    def interval(self) -> Interval | None:
        """95 % interval of the main score over samples of the same kind; None if it is not known."""

    @abstractmethod
    def details(self, target_std: Sequence[float] = ()) -> list[list[float]]:
        """Return what is known of single classes, labels or targets; it stays on the client.

        Args:
            target_std: Standard deviation of each target of a regression, in which errors are measured.

        Returns:
            Of classes the kinds of predictions that occur, as true class, predicted class and number of samples. Of
            labels a row each: samples with it, sensitivity, specificity, AUC. Of targets a row each: R², and root mean
            square and mean absolute error in the unit of the target. NaN for what is not defined.
        """

    def value(self, name: str) -> float:
        """Return one of the scores by its name in records; NaN if it is not defined for these samples."""
        return float(getattr(self, name))


def mean_of_known(values: NDArray[np.float64]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
