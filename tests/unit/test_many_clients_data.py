"""The data of many clients are assigned in one pass, with the results of a pass for each client."""

import numpy as np
import pytest

from hyperfl_flwr.data.dataset import positions_by_group, split_train_test
from hyperfl_flwr.data.partition import registry as partitions


@pytest.mark.parametrize("groups", [[2, 0, 2, 5, 0, 2], [3, 3], [1], []])
def test_positions_are_those_of_a_pass_for_each_group(groups: list[int]) -> None:
    found = positions_by_group(np.array(groups, dtype=np.int64))
    expected = [np.flatnonzero(np.array(groups) == group).tolist() for group in sorted(set(groups))]
    assert [positions.tolist() for positions in found] == expected


def test_a_split_is_the_same_as_with_a_pass_for_each_group() -> None:
    """The groups' generator is used in the same order, so that the split of a file stays."""
    groups = np.random.default_rng(0).integers(0, 50, 1000)
    rng, test = np.random.default_rng(1), []
    for group in np.unique(groups):
        members = rng.permutation(np.flatnonzero(groups == group))
        test.append(members[: max(round(0.25 * len(members)), 1)])
    train, held = split_train_test(groups, np.random.default_rng(1))
    np.testing.assert_array_equal(held, np.sort(np.concatenate(test)))
    assert sorted([*train, *held]) == list(range(1000))


def test_natural_clients_keep_their_samples() -> None:
    """Also a client without samples, whose number lies between others."""
    clients = np.array([3, 0, 3, 1, 0])
    found = partitions.natural(clients, np.random.default_rng(0), num_clients=5)
    assert [positions.tolist() for positions in found] == [[1, 4], [3], [], [0, 2], []]


def test_small_clients_get_samples_of_the_first_largest_client() -> None:
    """With shares that never suffice, the result equals that of a search for the largest client before each sample."""
    labels, num_clients, least = np.zeros(60, dtype=np.int64), 10, 6
    rng = np.random.default_rng(3)
    for _ in range(11):  # the tries of the partition
        ends = np.cumsum(rng.dirichlet(np.full(num_clients, 0.01))) * 60
        owned = [piece.tolist() for piece in np.split(np.arange(60), ends.astype(np.int64)[:-1])]
    assert min(map(len, owned)) < least
    for positions in owned:
        while len(positions) < least:
            largest = max(owned, key=len)
            positions.append(largest.pop(int(rng.integers(len(largest)))))
    found = partitions.dirichlet_per_label(
        labels, np.random.default_rng(3), num_clients=num_clients, alpha=0.01, min_samples=least
    )
    assert [positions.tolist() for positions in found] == [sorted(positions) for positions in owned]
