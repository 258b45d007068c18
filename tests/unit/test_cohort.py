"""Training a node's clients: their sums, their results, and the failures of single clients."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hyperfl_flwr.node.array_sums import PlainSum
from hyperfl_flwr.node.cohort import (
    CohortResult,
    Job,
    Received,
    SequentialTrainer,
    Trainer,
    train_cohort,
)
from hyperfl_flwr.node.trained import Failed, Trained
from hyperfl_flwr.protocol.arrays import diverged
from hyperfl_flwr.protocol.hosting import clients_of_node
from hyperfl_flwr.protocol.messages import ClientResult, Failure, Reduction, Request


class Member:
    """A client that adds its id to the received arrays, or returns them as they are; client 9 fails."""

    def __init__(self, client: int, *, returns_input: bool = False) -> None:
        self.client = client
        self.returns_input = returns_input

    def keys(self) -> list[str]:
        return ["a/x", "b/x", "c/x"]

    def fit(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> Any:
        if self.client == 9:
            raise ValueError("two\nlines")
        arrays = parameters if self.returns_input else [value + np.float32(self.client) for value in parameters]
        return arrays, 10 * self.client, {"loss": 0.5, "text": "not a number"}

    def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> Any:
        raise NotImplementedError


def summed(
    trainer: Trainer, request: Request, given: Received, *, send_details: bool = False
) -> tuple[CohortResult, PlainSum]:
    """Train clients and return their results and the sum of their arrays."""
    total = PlainSum(given.shared, REDUCTIONS, request)
    return train_cohort(trainer, request, given, total, send_details=send_details), total


REDUCTIONS = {"a": Reduction.MEAN_BY_EXAMPLES, "b": Reduction.MEAN, "c": Reduction.SUM}


def received() -> dict[str, NDArray[Any]]:
    return {key: np.array([1.0, -2.0], np.float32) for key in ("a/x", "b/x", "c/x")}


def request_for(*clients: int) -> Request:
    zeros = [0] * len(clients)
    return Request(round=1, experiment="", run_directory="", clients=clients, versions=zeros, kept_versions=zeros)


def test_a_node_sums_what_its_clients_share() -> None:
    """Clients 1 and 2 return x + 1 and x + 2 with 10 and 20 samples and are summed; client 9 fails and is left out.

    By hand, for x = (1, -2): a is 10 (x + 1) + 20 (x + 2) = 30 x + 50; b and c are (x + 1) + (x + 2) = 2 x + 3.
    """
    given = received()
    result, total = summed(SequentialTrainer(Member), request_for(1, 2, 9), Received(shared=given))
    np.testing.assert_array_equal(total.arrays["a/x"], [80, -10])
    np.testing.assert_array_equal(total.arrays["b/x"], [5, -1])
    np.testing.assert_array_equal(total.arrays["c/x"], [5, -1])
    assert result.num_examples == 30
    assert result.results == [
        ClientResult(client=client, num_examples=10 * client, metrics={"loss": 0.5}) for client in (1, 2)
    ]
    assert result.failures == [Failure(client=9, reason="ValueError, see the node's log", details="")]
    for key, value in received().items():
        np.testing.assert_array_equal(given[key], value)


class AtOnce:
    """Trains all clients together, as a vectorised trainer does, by stacking the results of `SequentialTrainer`."""

    def train(self, jobs: Sequence[Job], received: Received) -> Iterator[Trained | Failed]:
        parts = list(SequentialTrainer(Member).train(jobs, received))
        trained = [part for part in parts if isinstance(part, Trained)]
        yield Trained(
            clients=[part.clients[0] for part in trained],
            stacked={key: np.concatenate([part.stacked[key] for part in trained]) for key in received.shared},
            num_examples=[part.num_examples[0] for part in trained],
            metrics=[part.metrics[0] for part in trained],
        )
        yield from (part for part in parts if isinstance(part, Failed))


def test_clients_that_are_trained_together() -> None:
    """The result equals that of one-by-one training, bit for bit; only a client with a non-finite row is left out."""
    request = request_for(1, 2, 3, 9)
    together, one_sum = summed(AtOnce(), request, Received(shared=received()))
    apart, other_sum = summed(SequentialTrainer(Member), request, Received(shared=received()))
    assert {key: value.tobytes() for key, value in one_sum.arrays.items()} == {
        key: value.tobytes() for key, value in other_sum.arrays.items()
    }
    assert (together.num_examples, together.results) == (apart.num_examples, apart.results)
    assert [failure.client for failure in together.failures] == [9]

    class Broken(AtOnce):
        def train(self, jobs: Sequence[Job], received: Received) -> Iterator[Trained | Failed]:
            part, *failed = super().train(jobs, received)
            assert isinstance(part, Trained)
            part.stacked["b/x"][1] = np.nan
            yield part
            yield from failed

    broken, broken_sum = summed(Broken(), request, Received(shared=received()), send_details=True)
    assert [(failure.client, failure.reason) for failure in broken.failures] == [
        (2, f"FloatingPointError: {diverged('b/x')}"),
        (9, "ValueError: two lines"),
    ]
    np.testing.assert_array_equal(broken_sum.arrays["b/x"], [6, 0])  # (x + 1) + (x + 3)


def test_one_client_s_arrays_leave_as_they_are() -> None:
    """The arrays of client 2, alone or with one that fails, are sent in float32; with client 1, sums are in float64."""
    for clients, dtype in (((2,), np.float32), ((2, 9), np.float32), ((1, 2), np.float64)):
        _, total = summed(SequentialTrainer(Member), request_for(*clients), Received(shared=received()))
        assert {value.dtype for value in total.arrays.values()} == {np.dtype(dtype)}
        assert total.outliers == {}
        if dtype is np.float32:
            for key, value in received().items():
                np.testing.assert_array_equal(total.arrays[key], value + np.float32(2), strict=True)


def test_numbers_that_are_far_too_large_are_added_apart() -> None:
    """Client 2's arrays, a million times x + 2, are summed separately from client 1's x + 1.

    By hand, for x = (1, -2): b is 3e6 < 2^22, and a, weighted with 20 samples, is 6e7 > 2^25. Level 1 ends at 2^25:
    received values are below 2^2, weights are assumed to be below 2^1, the headroom is 2^6, and a level adds 2^16.
    """

    class Diverging(Member):
        def fit(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> Any:
            arrays, *others = super().fit(parameters, config)
            return [array * np.float32(1e6 if self.client == 2 else 1) for array in arrays], *others

    _, total = summed(SequentialTrainer(Diverging), request_for(1, 2), Received(shared=received()))
    assert total.arrays["b/x"].tolist() == [2, -1]
    assert {level: sorted(arrays) for level, arrays in total.outliers.items()} == {1: ["b/x", "c/x"], 2: ["a/x"]}
    assert total.outliers[1]["b/x"].tolist() == [3e6, 0]
    assert total.outliers[2]["a/x"].tolist() == [6e7, 0]


def test_per_client_groups_are_not_summed() -> None:
    """Clients 1 and 2 receive separate values of c/x, 5 and 7, and return 6 and 9; a and b are summed as usual."""
    given = received()
    del given["c/x"]
    per_client = {client: {"c/x": np.array([value], np.float32)} for client, value in ((1, 5.0), (2, 7.0), (9, 0.0))}
    result, total = summed(
        SequentialTrainer(Member), request_for(1, 2, 9), Received(shared=given, per_client=per_client)
    )
    assert {client: arrays["c/x"].tolist() for client, arrays in result.per_client.items()} == {1: [6.0], 2: [9.0]}
    assert sorted(total.arrays) == ["a/x", "b/x"]
    np.testing.assert_array_equal(total.arrays["b/x"], [5, -1])
    assert [failure.client for failure in result.failures] == [9]


def test_tracebacks_leave_the_node_only_if_they_may() -> None:
    failed = [
        summed(SequentialTrainer(Member), request_for(9), Received(shared=received()), send_details=allowed)[0]
        .failures[0]
        .details
        for allowed in (True, False)
    ]
    assert "Traceback" in failed[0]
    assert failed[1] == ""


def test_what_was_received_is_not_changed_by_a_client_that_returns_it() -> None:
    """The received arrays keep their values; the sums are (10 + 20) x for a, and 2 x for b and c, with x = (1, -2)."""
    given = received()

    def make(client: int) -> Member:
        return Member(client, returns_input=True)

    sums = summed(SequentialTrainer(make), request_for(1, 2), Received(shared=given))[1].arrays
    for key, value in received().items():
        np.testing.assert_array_equal(given[key], value)
    np.testing.assert_array_equal(sums["a/x"], [30, -60])
    np.testing.assert_array_equal(sums["b/x"], [2, -4])


@pytest.mark.parametrize(
    ("partition", "num_nodes", "expected"), [(0, 2, [0, 2, 4]), (1, 2, [1, 3]), (4, 5, [4]), (5, 7, [])]
)
def test_clients_of_a_node(partition: int, num_nodes: int, expected: list[int]) -> None:
    """Node p of P hosts p, p + P, p + 2P, ... of five clients."""
    assert clients_of_node(partition, num_nodes, 5) == expected
