"""Strata of samples without classes, by which partitions make clients differ and test data are drawn.

With classification, the strata are the classes.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.tasks import MULTI_LABEL, Task
from hyperfl_flwr.data.dataset import IntArray, Targets

BINS = 10
"""Number of strata of numbers."""


def strata_of(task: Task, parts: Sequence[Targets]) -> list[IntArray]:
    """Return the stratum of each sample.

    Args:
        task: `MULTI_LABEL` or `REGRESSION`.
        parts: Targets [n, K] of the parts of a data set, such as training and test data, of which there is a sample.

    Returns:
        The strata [n] of each part. Of labels: 0 for a sample without any, else 1 plus the label that the fewest
        samples have among those of the sample, so that samples with a rare label are in one stratum. Of numbers: tenths
        of the samples by the mean of their standardised targets.
    """
    whole = np.concatenate(list(parts))
    found = _rarest(whole.astype(bool)) if task is MULTI_LABEL else _tenths(whole.astype(np.float64))
    return np.split(found, np.cumsum([len(part) for part in parts])[:-1])


def _rarest(labels: npt.NDArray[np.bool_]) -> IntArray:
    ranks = np.empty(labels.shape[1], np.int64)
    ranks[np.argsort(labels.sum(axis=0), kind="stable")] = np.arange(labels.shape[1])
    ranked = np.where(labels, ranks, labels.shape[1])
    found: IntArray = np.where(labels.any(axis=1), 1 + ranked.argmin(axis=1), 0).astype(np.int64)
    return found


def _tenths(targets: npt.NDArray[np.float64]) -> IntArray:
    std = targets.std(axis=0)
    values = ((targets - targets.mean(axis=0)) / np.where(std > 0, std, 1.0)).mean(axis=1)
    edges = np.quantile(values, np.arange(1, BINS) / BINS)
    found: IntArray = np.searchsorted(edges, values, side="right").astype(np.int64)
    return found
