"""In-memory form of a data set: images or feature vectors with labels, for training and for testing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.tasks import CLASSIFICATION, Task

IntArray = npt.NDArray[np.int64]
ImageArray = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
Targets = npt.NDArray[np.bool_] | npt.NDArray[np.float64]
"""What is predicted of each sample [n, K], unless it is a class: whether it has each label, or a number each."""

TEST_FRACTION = 0.25
_CHUNK = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Samples with their labels.

    Attributes:
        images: [n, C, H, W], uint8 in 0..255 or float32 in [0, 1]; float32 may hold NaN. Or feature vectors [n, D],
            float32, finite.
        labels: [n], the class of each sample in 0..K-1; with `targets` its stratum, see `hyperfl_flwr.data.strata`.
        clients: [n], in 0..N-1, the client of each sample; None if the data set has no client ids.
        groups: [n], the group of each sample, such as a patient, numbered as in the other part; None without groups.
        weights: [n], finite and at least 0, the weight of each training sample; None if all have the same.
        targets: [n, K], for another task than classification; None for classification.
    """

    images: ImageArray
    labels: IntArray
    clients: IntArray | None = None
    groups: IntArray | None = None
    weights: npt.NDArray[np.float64] | None = None
    targets: Targets | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def chosen(self, indices: IntArray) -> "Split":
        """Return some of the samples."""
        return Split(
            images=self.images[indices],
            labels=self.labels[indices],
            clients=None if self.clients is None else self.clients[indices],
            groups=None if self.groups is None else self.groups[indices],
            weights=None if self.weights is None else self.weights[indices],
            targets=None if self.targets is None else self.targets[indices],
        )

    def scaled(self, indices: IntArray) -> npt.NDArray[np.float32]:
        """Return the chosen images as a new array, float32 [n, C, H, W] in [0, 1], or feature vectors [n, D]."""
        chosen = self.images[indices]
        scale = 255.0 if chosen.dtype == np.uint8 else 1.0
        return np.asarray(chosen, dtype=np.float32) / np.float32(scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A data set with everything that training on it needs.

    Attributes:
        name: Name as given to `load_dataset`.
        num_classes: Number K of classes, of labels or of targets, by `task`.
        input_shape: Shape of a sample: (C, H, W), or (D,) for feature vectors.
        train: The training data.
        test: The test data; shares no sample with `train`.
        mean: Mean per channel of images scaled to [0, 1], or per feature.
        std: Standard deviation per channel of images scaled to [0, 1], or per feature.
        augment: True if training uses random crops and flips (see `augmentation.Augmentation`).
        train_samples: Recommended number of training samples per client; None for no limit.
        test_samples: Recommended number of test samples per client; None for no limit.
        client_ids: The id of each client 0..N-1 in `clients`; None without client ids.
        classes: Names of the classes, labels or targets 0..K-1; None if they are unknown.
        own_statistics: True if `mean` and `std` are those of a single owner's samples, so that each of them moves all
            normalised samples.
        notes: What their user should know about the data, as sentences.
        task: What is predicted.
        target_mean: Mean of each target, of which networks predict the standardised values; empty for other tasks than
            regression.
        target_std: Standard deviation of each target, above 0; empty as `target_mean`.
        features: Names of the features [D]; empty if they have none.
    """

    name: str
    num_classes: int
    input_shape: tuple[int, ...]
    train: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool
    train_samples: int | None
    test_samples: int | None
    client_ids: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    own_statistics: bool = False
    notes: tuple[str, ...] = ()
    task: Task = CLASSIFICATION
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def num_strata(self) -> int:
        """Number of classes, or of strata with another task, into which `Split.labels` divide the samples."""
        if self.task is CLASSIFICATION:
            return self.num_classes
        return 1 + max(int(split.labels.max(initial=0)) for split in (self.train, self.test))


def split_train_test(groups: IntArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Divide samples 75/25 into training and test, within every group.

    Args:
        groups: [n], the group (class or client) of each sample.
        rng: Source of the choice.

    Returns:
        Sorted indices of the training and of the test samples. The test data get a quarter of each group, rounded half
        to even: at least one of two or more samples, and none of a single sample.
    """
    test: list[IntArray] = []
    for positions in positions_by_group(groups):
        members = rng.permutation(positions)
        count = max(round(TEST_FRACTION * len(members)), int(len(members) > 1))
        test.append(members[:count])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(groups)), chosen), chosen


def positions_by_group(groups: IntArray) -> list[IntArray]:
    """Return the ascending positions of the samples of each group, in one pass over all samples.

    Args:
        groups: The group (class or client) of each sample [n].

    Returns:
        The positions of each group that occurs, by ascending group.
    """
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order])) + 1
    return np.split(order, starts) if len(order) else []


def channel_statistics(images: ImageArray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute the mean and standard deviation per channel, or per feature, ignoring NaN.

    Args:
        images: [n, C, H, W], uint8 or float32 in [0, 1]; or feature vectors [n, D].

    Returns:
        Mean and standard deviation of the images scaled to [0, 1], or of the features. A channel or feature without
        spread (less than a millionth of its root mean square), or with NaN only, gets the standard deviation 1, so
        that normalisation only shifts it.
    """
    channels, others = images.shape[1], (0, *range(2, images.ndim))
    count, total, square = np.zeros(channels), np.zeros(channels), np.zeros(channels)
    for start in range(0, len(images), _CHUNK):  # in chunks, since a float64 copy of all images may not fit into memory
        chunk = images[start : start + _CHUNK].astype(np.float64)
        count += np.sum(~np.isnan(chunk), axis=others)
        total += np.nansum(chunk, axis=others)
        square += np.nansum(chunk * chunk, axis=others)
    scale = 255.0 if images.dtype == np.uint8 else 1.0
    mean = total / np.maximum(count, 1)
    squared = square / np.maximum(count, 1)
    std = np.sqrt(np.maximum(squared - mean**2, 0.0))
    return _floats(mean / scale), _floats(np.where(std > 1e-6 * np.sqrt(squared), std / scale, 1.0))


def _floats(values: Sequence[float] | npt.NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
