"""The partitions compared with Flower's partitioners, where both implement the same."""

import socket

import datasets
import numpy as np
import pytest
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, NaturalIdPartitioner, ShardPartitioner

from hyperfl_flwr.data.partition import registry as partitions

SAMPLES = 400


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Let a test that uses the network fail."""

    def refuse(*_args):
        raise AssertionError("these tests need no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def labels():
    return np.random.default_rng(3).integers(0, 10, SAMPLES)


@pytest.fixture(scope="module")
def clients():
    return np.concatenate([np.arange(7), np.random.default_rng(4).integers(0, 7, SAMPLES - 7)])


def reference(partitioner, labels, clients):
    """Return the positions that a partitioner of Flower gives to every client."""
    partitioner.dataset = datasets.Dataset.from_dict(
        {"position": list(range(len(labels))), "label": labels.tolist(), "client": clients.tolist()}
    )
    return [np.array(partitioner.load_partition(client)["position"]) for client in range(partitioner.num_partitions)]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, np.sort(other))


def test_natural_is_that_of_flower(labels, clients):
    theirs = reference(NaturalIdPartitioner(partition_by="client"), labels, clients)
    assert_same(partitions.natural(clients, np.random.default_rng(0), num_clients=7), theirs)


@pytest.mark.parametrize("num_clients", [1, 6, 7, 20])
def test_iid_has_the_sizes_of_flower(labels, clients, num_clients):
    """Only the sizes are equal: Flower's partitioner does not shuffle, and gives the remainder to the first clients."""
    theirs = reference(IidPartitioner(num_partitions=num_clients), labels, clients)
    ours = partitions.iid(labels, np.random.default_rng(0), num_clients=num_clients)
    assert sorted(map(len, ours)) == sorted(map(len, theirs))


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # datasets on a newer pyarrow
@pytest.mark.parametrize(("num_clients", "shards_per_client"), [(20, 2), (10, 5), (4, 1)])
def test_shards_are_those_of_flower(labels, clients, num_clients, shards_per_client):
    """If the shards divide the samples evenly, equal seeds give equal draws of shards."""
    partitioner = ShardPartitioner(
        num_partitions=num_clients, partition_by="label", num_shards_per_partition=shards_per_client, seed=11
    )
    theirs = reference(partitioner, labels, clients)
    ours = partitions.shards(
        labels, np.random.default_rng(11), num_clients=num_clients, shards_per_client=shards_per_client
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize(("num_clients", "alpha"), [(5, 0.5), (10, 1.0), (8, 100.0)])
def test_dirichlet_per_label_is_that_of_flower(labels, clients, num_clients, alpha):
    """The same algorithm and generator give equal partitions."""
    partitioner = DirichletPartitioner(
        num_partitions=num_clients, partition_by="label", alpha=alpha, min_partition_size=3, seed=5
    )
    theirs = reference(partitioner, labels, clients)
    ours = partitions.dirichlet_per_label(
        labels, np.random.default_rng(5), num_clients=num_clients, alpha=alpha, min_samples=3
    )
    assert_same(ours, theirs)


@pytest.mark.filterwarnings("ignore:The specified min_partition_size:UserWarning")
def test_dirichlet_per_label_tries_again_like_flower(labels, clients):
    """If the first draw misses the smallest size, both draw again with the generator's next numbers."""
    partitioner = DirichletPartitioner(
        num_partitions=10, partition_by="label", alpha=0.5, min_partition_size=15, seed=0
    )
    theirs = reference(partitioner, labels, clients)
    first = partitions.dirichlet_per_label(labels, np.random.default_rng(0), num_clients=10, alpha=0.5, min_samples=1)
    assert min(map(len, first)) < 15
    ours = partitions.dirichlet_per_label(labels, np.random.default_rng(0), num_clients=10, alpha=0.5, min_samples=15)
    assert_same(ours, theirs)
