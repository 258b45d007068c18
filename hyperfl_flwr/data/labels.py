"""The labels of somebody's own samples, where the samples come with any."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.dataset import IntArray
from hyperfl_flwr.data.sources.npz import read_labels
from hyperfl_flwr.data.unlabelled import Unlabelled


def labels_of(path: Path, found: Unlabelled, classes: Sequence[str]) -> tuple[IntArray | None, str]:
    """Return the labels [n] of samples, and what there is to say of them.

    Args:
        path: A folder of images, whose folders may be named as classes, or an `.npz` file, which may hold `labels`.
        found: What was read from it.
        classes: Names of the classes 0..K-1.

    Raises:
        DataError: If labels in a file are no classes.
    """
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
    strange = next(top for top in tops if top not in classes)
    if any(tops):
        return None, f"the folders in {path} are no labels, since {strange or 'the folder itself'} is no class"
    return None, ""
