"""Recognise samples and data sets again by digests of their values."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.data.dataset import Dataset, Split

Digests = NDArray[np.uint64]
"""Digests of samples [n], 8 bytes each, which tell a hundred million samples apart. They are no secret: whoever has a
sample can tell whether it is among them."""


def digests(samples: NDArray[np.float32]) -> Digests:
    """Return the digests of samples [n, ...], scaled but not normalised; equal values have equal digests."""
    found = [hashlib.blake2b(np.ascontiguousarray(sample).tobytes(), digest_size=8).digest() for sample in samples]
    return np.frombuffer(b"".join(found), np.uint64)


def sample_digest(dataset: Dataset) -> str:
    """Return the SHA-256 of all samples and labels of a data set, and of the names of its classes."""
    total = hashlib.sha256(repr((dataset.num_classes, dataset.classes)).encode())
    for split in (dataset.train, dataset.test):
        _add(total, split)
    return total.hexdigest()


def data_digest(dataset: Dataset) -> str:
    """Return the SHA-256 of a data set as a machine reads it: of its samples, and of how they are normalised.

    The statistics of equal samples can differ in their last bits between processors.
    """
    return hashlib.sha256(repr((sample_digest(dataset), dataset.mean, dataset.std)).encode()).hexdigest()


def _add(total: "hashlib._Hash", split: Split) -> None:
    for array in (split.images, split.labels, split.clients, split.groups, split.weights, split.targets):
        if array is not None:
            total.update(repr((array.dtype, array.shape)).encode())
            total.update(np.ascontiguousarray(array).data)
