"""Assign samples to clients according to a federation's settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.dataset import Dataset, IntArray, Split
from hyperfl_flwr.data.grouped_split import split_groups
from hyperfl_flwr.data.partition import registry as partitions
from hyperfl_flwr.data.partition.allocation import class_counts
from hyperfl_flwr.data.sample_format import UNCHANGED, SampleFormat
from hyperfl_flwr.data.sample_weights import EQUAL, Weighting

TOO_FEW = "data.validation-fraction leaves it too few samples or groups for training or for validation"
"""What a server learns of a node whose samples cannot be divided: not whether they or their groups are too few."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """All settings that determine which client holds which sample, and what training needs to know of it.

    Attributes:
        dataset: Name of the data set for `load_dataset`.
        data_root: Folder of the data sets; "" for the default.
        num_clients: Total number of clients N, including novel ones.
        partition: A name from `PARTITIONS`. A data set with client ids always has the partition `natural`.
        seed: Seed of the partition.
        train_samples: Number of training samples per client, or "auto".
        test_samples: Number of test samples per client, or "auto".
        iid_fraction: Share of uniform data in [0, 1] (similarity).
        dirichlet_alpha: Concentration, > 0 (dirichlet, dirichlet-per-label).
        shards_per_client: Number of shards per client, at least 1 (shards).
        augmentation: "auto" to augment if the data set is used with augmentation, "none" for no augmentation.
        validation_fraction: Share in [0, 1) of each client's training samples that is held back for validation.
        keeps_test: Whether the test samples stay, and are not replaced by the validation samples.
        novel_clients: Number of novel clients, which are the last ones and not trained. In the partition natural, they
            are drawn among the data set's clients; in the other partitions all clients are alike.
        sample_format: Agreed classes, shape and normalisation of samples.
        weighting: How training samples are weighted.
        distinct: Whether each training sample of a client must be there once only: noise for single records is for
            records that are in a batch once.
    """

    dataset: str
    data_root: str
    num_clients: int
    partition: str
    seed: int
    train_samples: int | Literal["auto"]
    test_samples: int | Literal["auto"]
    iid_fraction: float
    dirichlet_alpha: float
    shards_per_client: int
    augmentation: Literal["auto", "none"]
    validation_fraction: float
    keeps_test: bool = False
    novel_clients: int = 0
    sample_format: SampleFormat = UNCHANGED
    weighting: Weighting = EQUAL
    distinct: bool = False

    def __post_init__(self) -> None:
        if self.partition not in partitions.PARTITIONS:
            raise DataError(f"data.partition must be one of {', '.join(partitions.PARTITIONS)}, got {self.partition!r}")
        if not 0.0 <= self.iid_fraction <= 1.0:
            raise DataError(f"data.iid-fraction must be between 0 and 1, got {self.iid_fraction}")
        if not 0.0 < self.dirichlet_alpha < float("inf"):
            raise DataError(f"data.dirichlet-alpha must be a number above 0, got {self.dirichlet_alpha}")
        if not 0.0 <= self.validation_fraction < 1.0:
            raise DataError(f"data.validation-fraction must be at least 0 and below 1, got {self.validation_fraction}")
        counts = {
            "num-clients": self.num_clients,
            "data.shards-per-client": self.shards_per_client,
            "data.train-samples": 1 if self.train_samples == "auto" else self.train_samples,
            "data.test-samples": 1 if self.test_samples == "auto" else self.test_samples,
        }
        for key, value in counts.items():
            if value < 1:
                raise DataError(f"{key} must be at least 1, got {value}")


def assign(settings: DataSettings, dataset: Dataset) -> tuple[str, list[IntArray], list[IntArray]]:
    """Assign the samples of a data set to the clients.

    Args:
        settings: See `DataSettings`.
        dataset: The data set of the settings.

    Returns:
        The name of the partition in use, and for each client the sorted positions in ``dataset.train`` and in
        ``dataset.test``.

    Raises:
        DataError: If the data set is too small for the federation, or does not fit the partition.
    """
    name = settings.partition if dataset.train.clients is None else "natural"
    train = _train_partition(name, settings, dataset)
    empty = [client for client, indices in enumerate(train) if len(indices) == 0]
    if empty:
        raise DataError(f"every client must have training samples, but client {empty[0]} has none; lower num-clients")
    rng = numpy_generator(settings.seed, "partition", name, "test")
    samples = None if settings.test_samples == "auto" else settings.test_samples
    if name == "natural" and dataset.test.clients is not None:
        clients = _numbered(dataset.test.clients, settings)
        test = partitions.natural(clients, rng, num_clients=settings.num_clients, samples=samples)
    else:
        cap = dataset.test_samples if name in partitions.EQUAL_SIZES else None
        counts = class_counts(train, dataset.train.labels, dataset.num_strata)
        test = partitions.match_class_shares(counts, dataset.test.labels, rng, samples=samples, cap=cap)
    return name, train, test


def split_validation(
    settings: DataSettings, train: Mapping[int, IntArray], data: Split
) -> dict[int, tuple[IntArray, IntArray]]:
    """Divide clients' training samples into training and validation samples.

    Where the samples have groups, such as patients, a group is on the same side at all clients. Where samples are used
    more than once, each is on the same side wherever it is used.

    Args:
        settings: Settings with the share of validation samples. Where no sample is used twice and there are no groups,
            their number is rounded half to even. Of clients that the data set defines, and of an owner's data, at least
            1 is held back, and 1 is not: a server that chooses the share must not learn at which one it is refused.
        train: Positions of each client's training samples, by client.
        data: The training data.

    Returns:
        Sorted positions of the training samples and of the validation samples of each client.

    Raises:
        DataError: If a client would have no training samples or no validation samples.
    """
    drawn = np.concatenate(list(train.values()))
    used = np.unique(drawn)
    if data.groups is not None:
        held = used[_held_groups(settings, data, used)]
        reason = "its samples are divided by whole groups (data.group-by); give each client more groups"
    elif len(used) < len(drawn):
        held = used[_divided(settings, data, used, used)]
        reason = "samples that are used more than once are held back wherever they are used; give it more samples"
    else:
        # The sizes of natural clients and of owners' data are given: a small one has a validation sample, too.
        is_given = data.clients is not None or settings.sample_format.has_owner
        return {client: _held_back(settings, client, indices, is_given) for client, indices in train.items()}
    of_validation = np.zeros(len(data), dtype=bool)
    of_validation[held] = True
    found = {}
    for client, indices in train.items():
        found[client] = indices[~of_validation[indices]], indices[of_validation[indices]]
        if not all(map(len, found[client])):
            raise DataError(
                f"data.validation-fraction must leave every client training and validation samples, but client "
                f"{client} would have {len(found[client][0])} and {len(found[client][1])}, since {reason}, or set the "
                f"fraction to 0",
                public=TOO_FEW,
            )
    return found


def _divided(settings: DataSettings, data: Split, used: IntArray, groups: IntArray) -> IntArray:
    """Return which of the used samples are held back for validation: whole groups, about the share of each class."""
    strata = data.labels if data.clients is None else data.clients
    rng = numpy_generator(settings.seed, "validation")
    return split_groups(strata[used], groups, settings.validation_fraction, rng)[1]


def _held_groups(settings: DataSettings, data: Split, used: IntArray) -> IntArray:
    """Return which of the used samples are held back where samples have groups; refuses a single group."""
    assert data.groups is not None
    groups = data.groups[used]
    if len(np.unique(groups)) < 2:
        raise DataError(
            "data.validation-fraction needs training samples of 2 or more groups, but all are of the same; set it to 0",
            public=TOO_FEW,
        )
    held = _divided(settings, data, used, groups)
    if len(np.unique(groups[held])) < 2:
        # A server that chooses the fraction must not have a single patient evaluated.
        raise DataError(
            f"data.validation-fraction = {settings.validation_fraction} holds back a single group (data.group-by); "
            f"choose a larger fraction, or 0",
            public=TOO_FEW,
        )
    return held


def _held_back(settings: DataSettings, client: int, indices: IntArray, is_given: bool) -> tuple[IntArray, IntArray]:
    """Divide one client's training samples without groups; where their number is given, neither part is empty."""
    count = round(settings.validation_fraction * len(indices))
    if is_given:
        count = max(1, min(count, len(indices) - 1))
    if not 0 < count < len(indices):
        raise DataError(
            f"data.validation-fraction must leave every client training and validation samples, but "
            f"{settings.validation_fraction} makes {count} of the {len(indices)} training samples of client {client} "
            f"validation samples; choose another fraction, or leave out clients with a single sample",
            public=TOO_FEW,
        )
    # A separate generator per client: its validation samples do not depend on those of other clients.
    order = numpy_generator(settings.seed, "validation", client).permutation(indices)
    return np.sort(order[count:]), np.sort(order[:count])


def limited(settings: DataSettings, count: int, samples: int | Literal["auto"], part: str) -> IntArray:
    """Return sorted positions of the samples that a client with separate data uses: all, or a random subset."""
    if samples == "auto" or samples >= count:
        return np.arange(count)
    return np.sort(numpy_generator(settings.seed, "partition", "own", part).permutation(count)[:samples])


def _train_partition(name: str, settings: DataSettings, dataset: Dataset) -> list[IntArray]:
    labels, num_clients, num_classes = dataset.train.labels, settings.num_clients, dataset.num_strata
    samples = None if settings.train_samples == "auto" else settings.train_samples
    cap, alpha = dataset.train_samples, settings.dirichlet_alpha
    rng = numpy_generator(settings.seed, "partition", name, "train")
    if name == "natural":
        clients = _natural_clients(settings, dataset)
        return partitions.natural(clients, rng, num_clients=num_clients, samples=samples)
    if name == "iid":
        return partitions.iid(labels, rng, num_clients=num_clients, samples=samples, cap=cap)
    if name == "shards":
        count = settings.shards_per_client
        return partitions.shards(labels, rng, num_clients=num_clients, shards_per_client=count, samples=samples)
    if name == "dirichlet-per-label":
        return partitions.dirichlet_per_label(labels, rng, num_clients=num_clients, alpha=alpha, samples=samples)
    if name == "dirichlet":
        return partitions.dirichlet(
            labels, rng, num_classes=num_classes, num_clients=num_clients, alpha=alpha, samples=samples, cap=cap
        )
    return partitions.similarity(
        labels,
        rng,
        num_classes=num_classes,
        num_clients=num_clients,
        iid_fraction=settings.iid_fraction,
        samples=samples,
        cap=cap,
    )


def _natural_clients(settings: DataSettings, dataset: Dataset) -> IntArray:
    """Return the client of each training image [n], with one client of the federation per client id."""
    if dataset.train.clients is None:
        raise DataError(
            f"data.partition natural needs a data set with client ids, but {dataset.name} has none; "
            "use omniglot, or an npz: or csv: file with client ids, or choose another partition"
        )
    count = int(dataset.train.clients.max()) + 1
    novel = settings.novel_clients
    if settings.num_clients != count:
        names = "num-clients + novel.clients" if novel else "num-clients"
        advice = f"set num-clients to {count - novel}" if count > novel else f"lower novel.clients = {novel}"
        raise DataError(
            f"{names} must be the number of client ids in {dataset.name}, which is {count}, "
            f"got {settings.num_clients}; {advice}"
        )
    return _numbered(dataset.train.clients, settings)


def _numbered(clients: IntArray, settings: DataSettings) -> IntArray:
    """Return the clients of a data set renumbered for the federation, so that the novel ones come last.

    Args:
        clients: The client of each sample in the data set's numbering, in 0..N-1.
        settings: Settings for N clients; their seed draws the novel ones.
    """
    if not settings.novel_clients:
        return clients
    order = np.arange(settings.num_clients)
    rng = numpy_generator(settings.seed, "partition", "novel")
    novel = np.sort(rng.choice(order, settings.novel_clients, replace=False))
    numbers = np.empty_like(order)  # the inverse permutation: new number by old number
    numbers[np.concatenate([np.setdiff1d(order, novel), novel])] = order
    return numbers[clients]


def refuse_copies(train: Mapping[int, IntArray]) -> None:
    """Refuse a partition in which a client trains on copies of a sample, each of which would add to a record's effect.

    Raises:
        DataError: If there is such a client.
    """
    for client, indices in train.items():
        distinct = len(np.unique(indices))
        if distinct < len(indices):
            text = (
                f"data.train-samples must be small enough that no client holds a training sample more than once where "
                f"noise protects single records (dp.epsilon, novel.epsilons), since the copies of a record together "
                f"have more effect than the noise hides; client {client} has {distinct} different samples among its "
                f"{len(indices)}; set data.train-samples=auto, or less"
            )
            raise DataError(text, public=text)
