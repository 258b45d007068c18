"""Read the labels of custom samples, if there are any."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.tasks import CLASSIFICATION, MULTI_LABEL, Task
from hyperfl_flwr.data.dataset import IntArray, Targets
from hyperfl_flwr.data.sources.csv_header import LABEL
from hyperfl_flwr.data.sources.csv_table import SUFFIX, class_numbers_of, read_table, target_columns_of
from hyperfl_flwr.data.sources.npz import read_labels, read_targets
from hyperfl_flwr.data.unlabelled import Unlabelled


def labels_of(
    path: Path, found: Unlabelled, classes: Sequence[str], task: Task = CLASSIFICATION
) -> tuple[IntArray | Targets | None, str]:
    """Return the labels [n] or [n, K] of samples (None without labels), and a note for the user (may be empty).

    Args:
        path: A folder of images, with folders that may be named after classes, or an `.npz` file, which may have the
            key `labels`, or a CSV file, which may have the column `label`.
        found: The samples read from it.
        classes: Names of the classes, labels or targets 0..K-1.
        task: What is predicted.

    Raises:
        DataError: If the labels in a file are not those of the task.
    """
    if task is not CLASSIFICATION:
        return _targets_of(path, found, classes, task), ""
    if path.suffix == SUFFIX:
        table = read_table(path)
        return (class_numbers_of(path, table, classes) if LABEL in table.columns else None), ""
    if not path.is_dir():
        labels = read_labels(path, len(found))
        if labels is not None and labels.max() >= len(classes):
            raise DataError(
                f"{path}: labels must be 0 to {len(classes) - 1}, got {labels.max()}; renumber or drop them"
            )
        return labels, ""
    tops = [name.partition("/")[0] if "/" in name else "" for name in found.names]
    if all(top in classes for top in tops):
        return np.array([classes.index(top) for top in tops], dtype=np.int64), ""
    unknown = next(top for top in tops if top not in classes)
    if any(tops):
        return (
            None,
            f"the folders in {path} are not read as labels: {unknown or 'the folder itself'} is not a class",
        )
    return None, ""


def _targets_of(path: Path, found: Unlabelled, names: Sequence[str], task: Task) -> Targets | None:
    if path.is_dir():
        return None
    if path.suffix == SUFFIX:
        table = read_table(path)
        if not table.outputs:
            return None
        columns = target_columns_of(path, table, names, task)
        return columns.astype(bool) if task is MULTI_LABEL else columns.astype(np.float64)
    labels = read_targets(path, len(found), task)
    if labels is not None and labels.shape[1] != len(names):
        raise DataError(
            f"{path}: labels must have {len(names)} columns, {', '.join(names)}, got {labels.shape[1]}; fix or drop "
            f"them"
        )
    return labels
