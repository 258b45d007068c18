"""Scores of predicted numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.tasks import REGRESSION, Task
from hyperfl_flwr.metrics.intervals import Interval
from hyperfl_flwr.metrics.scores import Scores


@dataclass(frozen=True, kw_only=True, eq=False)
class NumberScores(Scores):
    """Predictions of K numbers for n samples, and what they are worth.

    Attributes:
        labels: The true numbers [n, K].
        predicted: The predicted numbers [n, K].
        loss: Sum over the samples of the mean squared error over the targets.
    """

    task: ClassVar[Task] = REGRESSION

    labels: NDArray[np.floating]
    predicted: NDArray[np.floating]
    loss: float

    @property
    def determinations(self) -> NDArray[np.float64]:
        """R² of each target [K]: 1 minus the squared errors by the squared deviations of the true numbers.

        0 for a model that says the mean of these samples. As in scikit-learn, a target that is the same in all samples
        has 1 if it is predicted exactly, and 0 otherwise. Predictions that are not finite have minus infinity.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            errors = ((self.predicted - self.labels) ** 2).sum(axis=0)
        spread = ((self.labels - self.labels.mean(axis=0)) ** 2).sum(axis=0) if self.total else errors
        found = np.where(errors == 0, 1.0, 0.0)
        differ = (self.labels != self.labels[:1]).any(axis=0)  # the mean of equal numbers may be rounded to another one
        np.divide(spread - errors, spread, out=found, where=differ & (spread > 0))
        return np.where(np.isfinite(errors), found, -np.inf)

    @property
    def r2(self) -> float:
        """Mean R² over the targets, at least -1: a client with similar numbers must not decide a mean over clients."""
        return max(self.task.lowest, float(self.determinations.mean())) if self.total else float("nan")

    @property
    def mse(self) -> float:
        """Mean squared error over samples and targets; infinite if a prediction is not finite, NaN without samples."""
        return float("inf") if np.isnan(self.loss) else self.mean_loss

    @property
    def rmse(self) -> float:
        """Mean over the targets of the root of the mean squared error; infinite if a prediction is not finite."""
        return self._mean(np.sqrt(((self.predicted - self.labels) ** 2).mean(axis=0)))

    @property
    def mae(self) -> float:
        """Mean over the targets of the mean absolute error; infinite if a prediction is not finite."""
        return self._mean(np.abs(self.predicted - self.labels).mean(axis=0))

    def details(self, target_std: Sequence[float] = ()) -> list[list[float]]:
        """Return R² and the errors of each target, see `Scores.details`."""
        errors = (self.predicted - self.labels) * (np.array(target_std) if target_std else 1.0)
        columns = (self.determinations, np.sqrt((errors**2).mean(axis=0)), np.abs(errors).mean(axis=0))
        rows: list[list[float]] = np.stack(columns, axis=1).tolist()
        return rows

    @property
    def interval(self) -> Interval | None:
        """None: no interval of R² is computed."""
        return None

    def _mean(self, errors: NDArray[np.floating]) -> float:
        if not self.total:
            return float("nan")
        return float(errors.mean()) if np.isfinite(errors).all() else float("inf")
