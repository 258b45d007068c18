"""Unlabelled samples that a server has: noise, a public data set without its labels, or a file or folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.dataset import ImageArray, Split, channel_statistics
from hyperfl_flwr.data.federated_data import normalised
from hyperfl_flwr.data.registry import DATASETS, load_dataset
from hyperfl_flwr.data.sample_format import is_local_data, located
from hyperfl_flwr.data.unlabelled import read_unlabelled

NOISE = "noise"
"""Name of independent standard normal numbers, in the units of normalised samples."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnlabelledPool:
    """Samples to draw batches from.

    Attributes:
        shape: Shape of a sample: (C, H, W), or (D,) of feature vectors.
        images: The samples [n, *shape], uint8 or float32 in [0, 1]; None for noise. Shared; must not be written to.
        mean: Mean per channel or feature, with which samples are normalised; empty for noise.
        std: Standard deviation per channel or feature.
    """

    shape: tuple[int, ...]
    images: ImageArray | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def batch(self, size: int, rng: np.random.Generator) -> Tensor:
        """Return a random batch [size, *shape], float32, normalised; samples are drawn with replacement."""
        if self.images is None:
            return torch.from_numpy(rng.standard_normal((size, *self.shape), dtype=np.float32))
        rows: npt.NDArray[np.int64] = rng.integers(len(self.images), size=size)
        split = Split(images=self.images, labels=np.zeros(len(self.images), np.int64))
        return normalised(split.scaled(rows), self.mean, self.std)


def unlabelled_pool(name: str, input_shape: Sequence[int], data_root: Path | None = None) -> UnlabelledPool:
    """Return the pool that a setting names.

    Samples are normalised by their own mean and standard deviation, since a server need not know those of the clients.

    Args:
        name: `noise`, a name of `DATASETS` (its training samples), `npz:PATH` or `folder:PATH`, of which no labels are
            read. A relative PATH is looked up in `data_root`.
        input_shape: Required shape of a sample.
        data_root: Folder of the data sets; None for `hyperfl_flwr.data.registry.default_data_root`.

    Raises:
        DataError: If there is no such data set, or its samples have another shape.
    """
    shape = tuple(input_shape)
    if name == NOISE:
        return UnlabelledPool(shape=shape)
    if is_local_data(name):
        images: ImageArray = read_unlabelled(located(name, data_root), shape).samples
    else:
        if name not in DATASETS:
            raise DataError(f"unlabelled data must be {NOISE} or one of {', '.join(DATASETS)}, got {name!r}")
        expected = DATASETS[name].input_shape
        if expected is not None and expected != shape:
            raise DataError(
                f"unlabelled samples must have the shape {shape} of the run's data, but {name} has {expected}; choose "
                f"noise or another data set"
            )
        images = load_dataset(name, data_root).train.images
    mean, std = channel_statistics(images)
    return UnlabelledPool(shape=shape, images=images, mean=mean, std=std)
