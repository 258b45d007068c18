"""Load a data set and divide it among the clients of a federation.

`load_federated_data` assigns training and test samples to clients, as a function of its settings alone.
`FederatedData.client` creates the tensors of one client and keeps some: for all clients, positions fit into memory, but
images may not.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hyperfl_flwr.core.target_scale import standardised
from hyperfl_flwr.core.tasks import CLASSIFICATION, REGRESSION
from hyperfl_flwr.data.augmentation import Augmentation
from hyperfl_flwr.data.client_data import ClientData
from hyperfl_flwr.data.dataset import Dataset, IntArray, Split
from hyperfl_flwr.data.digests import Digests, digests
from hyperfl_flwr.data.fewer_samples import drawn, most_samples
from hyperfl_flwr.data.partition.allocation import class_counts, reuse_report
from hyperfl_flwr.data.partition.assign import DataSettings, assign, limited, refuse_copies, split_validation
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sample_weights import EQUAL, Weighting, Weights

__all__ = ["ClientData", "DataSettings", "FederatedData", "load_federated_data", "load_local_data", "normalised"]

CACHED_BYTES = 1 << 27
"""Most bytes of clients' tensors that a `FederatedData` keeps; images of 28x28 of about 40 clients with 600 samples."""


CHUNK = 1000
"""Number of samples of which digests are computed at a time."""


class FederatedData:
    """Assignment of the samples of a data set to the clients of a federation.

    Attributes:
        dataset: The data set.
        partition: Name of the partition in use: ``natural`` for a data set with client ids, ``own`` for the data of a
            single client, otherwise that of the settings.
        num_clients: Number of clients N.
        reuse: ``{"train": ..., "test": ...}``, plain numbers and lists for a manifest, see `reuse_report`.
    """

    def __init__(
        self,
        *,
        dataset: Dataset,
        partition: str,
        train: Sequence[IntArray],
        test: Sequence[IntArray],
        validation: Sequence[IntArray] = (),
        weighting: Weighting = EQUAL,
    ) -> None:
        """Store a finished partition.

        Args:
            dataset: The data set.
            partition: Name of the partition.
            train: Positions in ``dataset.train`` of each client's training samples.
            test: Positions in ``dataset.test`` of each client's test samples.
            validation: Positions in ``dataset.train`` of each client's validation samples; empty without them.
            weighting: How training samples are weighted.
        """
        self.dataset = dataset
        self.partition = partition
        self.num_clients = len(train)
        self._train = tuple(train)
        self._test = tuple(test)
        self._validation = tuple(validation)
        self._weighting = weighting
        self._digests: dict[int, Digests] = {}
        self._clients: OrderedDict[tuple[int, str], ClientData] = OrderedDict()
        for indices in (*self._train, *self._test, *self._validation):
            indices.flags.writeable = False  # all callers that load the same settings share these arrays
        self.reuse = {
            "train": reuse_report(train, dataset.train.labels, dataset.num_strata),
            "test": reuse_report(test, dataset.test.labels, dataset.num_strata),
        }

    def train_indices(self, client: int) -> IntArray:
        """Return the sorted positions in ``dataset.train`` of one client's training samples."""
        return self._train[self._checked(client)]

    def test_indices(self, client: int) -> IntArray:
        """Return the sorted positions in ``dataset.test`` of one client's test samples."""
        return self._test[self._checked(client)]

    def validation_indices(self, client: int) -> IntArray | None:
        """Return the sorted positions in ``dataset.train`` of one client's validation samples; None without them."""
        return self._validation[self._checked(client)] if self._validation else None

    def train_digests(self, client: int) -> Digests:
        """Return the digests of one client's training samples, computed once."""
        if client not in self._digests:
            indices = self.train_indices(client)
            chunks = np.array_split(indices, len(indices) // CHUNK + 1)  # scaled images take four times the memory
            self._digests[client] = np.concatenate([digests(self.dataset.train.scaled(chunk)) for chunk in chunks])
        return self._digests[client]

    def train_weights(self, client: int) -> Weights | None:
        """Return the weights of one client's training samples [n], see `Weighting.of_client`."""
        return self._weighting.of_client(self.dataset.train, self.train_indices(client), self.dataset.num_classes)

    def label_counts(self) -> tuple[IntArray, IntArray]:
        """Return the numbers of training and of test samples of each client and class, both [N, K].

        With another task than classification they are the numbers of all samples, both [N, 1].
        """
        dataset = self.dataset
        if dataset.task is not CLASSIFICATION:
            train, test = (np.array([[len(each)] for each in part]) for part in (self._train, self._test))
            return train, test
        return (
            class_counts(self._train, dataset.train.labels, dataset.num_classes),
            class_counts(self._test, dataset.test.labels, dataset.num_classes),
        )

    def client(self, client: int, device: torch.device | str = "cpu") -> ClientData:
        """Return one client's tensors; those of the clients that were asked for last are kept, up to `CACHED_BYTES`.

        Args:
            client: The client's id, in 0..N-1.
            device: The device of the tensors.

        Returns:
            Tensors that must not be changed.

        Raises:
            IndexError: If there is no such client.
        """
        key = client, str(device)
        data = self._clients.pop(key, None) or self._new_client(client).to(device)
        self._clients[key] = data
        while sum(each.num_bytes for each in self._clients.values()) > CACHED_BYTES:
            self._clients.popitem(last=False)
        return data

    def _new_client(self, client: int) -> ClientData:
        """Create one client's tensors on the CPU."""
        train_images, train_labels = self._tensors(self.dataset.train, self.train_indices(client))
        test_images, test_labels = self._tensors(self.dataset.test, self.test_indices(client))
        held_back = self.validation_indices(client)
        black = tuple(-mean / std for mean, std in zip(self.dataset.mean, self.dataset.std, strict=True))
        return ClientData(
            train_images=train_images,
            train_labels=train_labels,
            test_images=test_images,
            test_labels=test_labels,
            augmentation=Augmentation(pad_value=black) if self.dataset.augment else None,
            num_classes=self.dataset.num_classes,
            validation=None if held_back is None else self._tensors(self.dataset.train, held_back),
            train_weights=self.train_weights(client),
        )

    @cached_property
    def global_test(self) -> tuple[Tensor, Tensor]:
        """All test images of the data set, normalised, float32 [n, C, H, W], and their labels [n]; cached."""
        return self._tensors(self.dataset.test, np.arange(len(self.dataset.test)))

    def _tensors(self, split: Split, indices: IntArray) -> tuple[Tensor, Tensor]:
        images = normalised(split.scaled(indices), self.dataset.mean, self.dataset.std)
        return images, labels_tensor(split, indices, self.dataset)

    def _checked(self, client: int) -> int:
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client must be in 0..{self.num_clients - 1}, got {client}")
        return client


def labels_tensor(split: Split, indices: IntArray, dataset: Dataset) -> Tensor:
    """Return what networks are to predict of some samples, see `hyperfl_flwr.models.losses`.

    Args:
        split: The samples, a part of the data set.
        indices: Positions [m] in it.
        dataset: The data set.
    """
    if split.targets is None:
        return torch.tensor(split.labels[indices])
    chosen = split.targets[indices]
    if dataset.task is REGRESSION:
        return torch.tensor(standardised(chosen.astype(np.float64), (dataset.target_mean, dataset.target_std)))
    return torch.tensor(chosen)


def load_federated_data(settings: DataSettings) -> FederatedData:
    """Load a data set and divide it among the clients; equal settings return the same object within a process.

    Args:
        settings: See `DataSettings`.

    Returns:
        The federation's data, the same in every process and on every machine with the same files.

    Raises:
        DataError: If the data set cannot be loaded or is too small for the federation.
    """
    root = Path(settings.data_root) if settings.data_root else None
    return _partitioned(settings, load_dataset(settings.dataset, root, settings.sample_format), most_samples())


def load_local_data(settings: DataSettings, client: int) -> FederatedData:
    """Load the data of a single client; equal arguments return the same object within a process.

    Args:
        settings: `dataset` names the client's data; the partition has no effect. Sizes per client are upper limits.
        client: The client's id, in 0..N-1.

    Returns:
        Data of N clients, where all other clients have no samples.

    Raises:
        DataError: If the data cannot be loaded.
    """
    root = Path(settings.data_root) if settings.data_root else None
    return _local(settings, client, load_dataset(settings.dataset, root, settings.sample_format))


@lru_cache(maxsize=8)
def _local(settings: DataSettings, client: int, dataset: Dataset) -> FederatedData:
    settings.weighting.check(dataset.train, dataset.num_classes)
    train = limited(settings, len(dataset.train), settings.train_samples, "train")
    test = limited(settings, len(dataset.test), settings.test_samples, "test")
    divided = _divided(settings, dataset, {client: train}, {client: test})
    parts = {
        part: [found.get(each, np.arange(0)) for each in range(settings.num_clients)] if found else ()
        for part, found in divided.items()
    }
    return FederatedData(
        dataset=with_settings(settings, dataset), partition="own", weighting=settings.weighting, **parts
    )


def _divided(
    settings: DataSettings, dataset: Dataset, train: Mapping[int, IntArray], test: Mapping[int, IntArray]
) -> dict[Literal["train", "test", "validation"], Mapping[int, IntArray]]:
    """Return the positions of the parts of the data by client, after validation samples have been held back."""
    if not settings.validation_fraction:
        return {"train": train, "test": test}
    divided = split_validation(settings, train, dataset.train)
    trained, held_back = ({client: parts[side] for client, parts in divided.items()} for side in (0, 1))
    if settings.keeps_test:
        return {"train": trained, "test": test, "validation": held_back}
    return {"train": trained, "test": held_back}


def with_settings(settings: DataSettings, dataset: Dataset) -> Dataset:
    """Return the data set as the settings use it: without augmentation, or with validation instead of test data."""
    if settings.augmentation == "none":
        dataset = replace(dataset, augment=False)
    if settings.validation_fraction and not settings.keeps_test:
        # The validation samples are held back from the training data, so test positions refer to those.
        dataset = replace(dataset, test=dataset.train)
    return dataset


@lru_cache(maxsize=8)
def _partitioned(settings: DataSettings, dataset: Dataset, most: int) -> FederatedData:
    settings.weighting.check(dataset.train, dataset.num_classes)
    name, train, test = assign(settings, dataset)
    divided = _divided(settings, dataset, dict(enumerate(train)), dict(enumerate(test)))
    if settings.distinct:
        refuse_copies(divided["train"])
    parts = {part: list(found.values()) for part, found in divided.items()}
    parts["train"] = drawn(parts["train"], most, settings.seed)
    return FederatedData(
        dataset=with_settings(settings, dataset), partition=name, weighting=settings.weighting, **parts
    )


def normalised(samples: npt.NDArray[np.float32], mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalise samples for a model.

    Args:
        samples: Images [n, C, H, W] scaled to [0, 1], or feature vectors [n, D]; overwritten.
        mean: Mean per channel or feature.
        std: Standard deviation per channel or feature.

    Returns:
        (samples - mean) / std as a new tensor.
    """
    samples -= _per_channel(mean, samples.ndim)
    samples /= _per_channel(std, samples.ndim)
    # A copy, in memory that torch has aligned: the rounding of vectorised kernels may depend on the alignment.
    return torch.tensor(samples)


def _per_channel(values: tuple[float, ...], ndim: int) -> npt.NDArray[np.float32]:
    """Return values per channel or feature as an array that broadcasts with samples of `ndim` dimensions."""
    return np.array(values, dtype=np.float32).reshape(-1, *[1] * (ndim - 2))
