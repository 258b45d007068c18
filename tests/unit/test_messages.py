"""Records, reductions, and checks of arrays."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from numpy.typing import NDArray

from hyperfl_flwr.arrays import layout_problem, not_finite, pack_arrays, unpack_arrays
from hyperfl_flwr.cohort import Failed, Job, OneByOne, Received, Trained, clients_of_node, train_cohort
from hyperfl_flwr.messages import (
    ClientResult,
    Failure,
    Reduction,
    Report,
    Request,
    by_number,
    group_of,
    own_key,
    record_of,
    weights_record,
)
from hyperfl_flwr.sizes import content_bytes

REQUEST = Request(
    round=3,
    experiment="0123456789abcdef",
    run_directory="/runs/a",
    clients=[1, 4],
    versions=[2, 0],
    kept_versions=[1, 0],
    num_clients=7,
    max_num_examples=600,
)


def on_the_wire(record: ConfigRecord) -> ConfigRecord:
    """Send a record through Flower's protocol buffers."""
    content = recorddict_from_proto(recorddict_to_proto(RecordDict({"record": record})))
    return record_of(content, "record", ConfigRecord)


def test_a_request_survives_the_wire() -> None:
    assert Request.from_record(on_the_wire(REQUEST.to_record())) == REQUEST


@pytest.mark.parametrize("experiment", ["", "ab", "../0123456789abcd", "0123456789abcdeF", "0123456789abcdef\n"])
def test_an_experiment_that_could_be_a_path_is_refused(experiment: str) -> None:
    """It must be 16 hexadecimal digits, since nodes make a folder of that name."""
    record = REQUEST.to_record()
    record["experiment"] = experiment
    with pytest.raises(ValueError, match="16 hexadecimal digits"):
        Request.from_record(record)


def test_a_report_survives_the_wire() -> None:
    """A metric that only one client has is missing for the other, not NaN."""
    report = Report(
        results=[
            ClientResult(client=1, num_examples=7, metrics={"own-accuracy": 0.5}),
            ClientResult(client=4, num_examples=9, metrics={"own-accuracy": 0.25, "train-loss": 2.0}),
        ],
        failures=[Failure(client=6, reason="ValueError: no", details="Traceback\n ...")],
        process="host:1",
        peak_memory=2**40,
        seconds=1.5,
    )
    assert Report.from_record(on_the_wire(report.to_record())) == report


def test_an_empty_report_survives_the_wire_and_can_be_counted() -> None:
    record = Report(process="host:1").to_record()
    assert record.count_bytes() > 0
    assert Report.from_record(on_the_wire(record)) == Report(results=[], failures=[], process="host:1")


def test_a_report_whose_columns_differ_in_length_is_refused() -> None:
    record = Report(results=[ClientResult(client=1, num_examples=7, metrics={})]).to_record()
    record["client"] = [1, 2]
    with pytest.raises(ValueError, match="zip"):
        Report.from_record(record)


@pytest.mark.parametrize(
    "value", [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(3, np.int64), np.zeros((0, 2))]
)
def test_arrays_are_packed_and_unpacked_unchanged(value: NDArray[Any]) -> None:
    back = unpack_arrays(pack_arrays({"group/name": value}))["group/name"]
    assert back.dtype == value.dtype
    np.testing.assert_array_equal(back, value, strict=True)


def test_names_and_weights() -> None:
    assert group_of("hypernetwork/hidden.weight") == "hypernetwork"
    assert dict(weights_record(16, 2)) == {"num-examples": 16, "num-clients": 2}


def test_content_bytes_adds_the_records_of_all_messages() -> None:
    """Flower's own count of one record, three times."""
    record = REQUEST.to_record()
    one, two = RecordDict({"a": record}), RecordDict({"a": record, "b": record})
    assert content_bytes([one, two]) == 3 * record.count_bytes()


def test_what_flower_does_not_count_is_counted() -> None:
    """A node may send an empty text or list, of which there is only the key."""
    assert content_bytes([RecordDict({"a": ConfigRecord({"text": "", "list": [], "bytes": b""})})]) == 4 + 4 + 5


@pytest.mark.parametrize(
    ("reduction", "weights", "divisor"),
    [
        (Reduction.MEAN_BY_EXAMPLES, [3.0, 5.0], 8.0),
        (Reduction.MEAN, [1.0, 1.0], 2.0),
        (Reduction.SUM, [1.0, 1.0], 1.0),
    ],
)
def test_weights_and_divisors(reduction: Reduction, weights: list[float], divisor: float) -> None:
    """Two clients of 3 and 5 samples: weights n_i over 8, ones over 2, ones over 1."""
    assert [reduction.weight(count) for count in (3, 5)] == weights
    assert reduction.divisor(8, 2) == divisor


class Member:
    """A client that adds its id to what it received, or returns just that."""

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


REDUCTIONS = {"a": Reduction.MEAN_BY_EXAMPLES, "b": Reduction.MEAN, "c": Reduction.SUM}


def received() -> dict[str, NDArray[Any]]:
    return {key: np.array([1.0, -2.0], np.float32) for key in ("a/x", "b/x", "c/x")}


def request_for(*clients: int) -> Request:
    zeros = [0] * len(clients)
    return Request(round=1, experiment="", run_directory="", clients=clients, versions=zeros, kept_versions=zeros)


def test_a_node_sums_what_its_clients_share() -> None:
    """By hand: clients 1 and 2 return x + 1 and x + 2 with 10 and 20 samples; client 9 fails and counts nowhere.

    a: 10 (x + 1) + 20 (x + 2) = 30 x + 50; b and c: (x + 1) + (x + 2) = 2 x + 3, for x = (1, -2).
    """
    given = received()
    result = train_cohort(
        OneByOne(Member), request_for(1, 2, 9), Received(shared=given), REDUCTIONS, send_details=False
    )
    np.testing.assert_array_equal(result.arrays["a/x"], [80, -10])
    np.testing.assert_array_equal(result.arrays["b/x"], [5, -1])
    np.testing.assert_array_equal(result.arrays["c/x"], [5, -1])
    assert result.num_examples == 30
    assert result.results == [
        ClientResult(client=client, num_examples=10 * client, metrics={"loss": 0.5}) for client in (1, 2)
    ]
    assert result.failures == [Failure(client=9, reason="ValueError, see the node's log", details="")]
    for key, value in received().items():
        np.testing.assert_array_equal(given[key], value)


class AtOnce:
    """Trains all clients together: what a vectorised trainer returns, from `OneByOne`'s results."""

    def train(self, jobs: Sequence[Job], received: Received) -> Iterator[Trained | Failed]:
        parts = list(OneByOne(Member).train(jobs, received))
        trained = [part for part in parts if isinstance(part, Trained)]
        yield Trained(
            clients=[part.clients[0] for part in trained],
            stacked={key: np.concatenate([part.stacked[key] for part in trained]) for key in received.shared},
            num_examples=[part.num_examples[0] for part in trained],
            metrics=[part.metrics[0] for part in trained],
        )
        yield from (part for part in parts if isinstance(part, Failed))


def test_clients_that_are_trained_together() -> None:
    """The same result as one by one, bit for bit; a client whose row is not finite is left out alone."""
    request = request_for(1, 2, 3, 9)
    together = train_cohort(AtOnce(), request, Received(shared=received()), REDUCTIONS, send_details=True)
    apart = train_cohort(OneByOne(Member), request, Received(shared=received()), REDUCTIONS, send_details=True)
    assert {key: value.tobytes() for key, value in together.arrays.items()} == {
        key: value.tobytes() for key, value in apart.arrays.items()
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

    broken = train_cohort(Broken(), request, Received(shared=received()), REDUCTIONS, send_details=True)
    assert [(failure.client, failure.reason) for failure in broken.failures] == [
        (2, "FloatingPointError: b/x is not finite after training"),
        (9, "ValueError: two lines"),
    ]
    np.testing.assert_array_equal(broken.arrays["b/x"], [6, 0])  # (x + 1) + (x + 3)


def test_per_client_groups_are_not_summed() -> None:
    """Clients 1 and 2 get c/x of their own, 5 and 7, and return it + 1 and + 2; a and b are summed as ever."""
    given = received()
    del given["c/x"]
    own = {client: {"c/x": np.array([value], np.float32)} for client, value in ((1, 5.0), (2, 7.0), (9, 0.0))}
    reductions = REDUCTIONS | {"c": Reduction.PER_CLIENT}
    result = train_cohort(
        OneByOne(Member), request_for(1, 2, 9), Received(shared=given, own=own), reductions, send_details=True
    )
    assert {client: arrays["c/x"].tolist() for client, arrays in result.own.items()} == {1: [6.0], 2: [9.0]}
    assert sorted(result.arrays) == ["a/x", "b/x"]
    np.testing.assert_array_equal(result.arrays["b/x"], [5, -1])
    assert [failure.client for failure in result.failures] == [9]


def test_keys_of_own_arrays() -> None:
    """CLIENT/GROUP/NAME there and back; what does not begin with a client is refused."""
    arrays = {own_key(client, "c/x"): np.array([client]) for client in (3, 10)}
    assert {client: list(each) for client, each in by_number(arrays).items()} == {3: ["c/x"], 10: ["c/x"]}
    with pytest.raises(ValueError, match="must have keys NUMBER/GROUP/NAME, got 'c/x'"):
        by_number({"c/x": np.zeros(1)})


def test_tracebacks_leave_the_node_only_if_they_may() -> None:
    failed = [
        train_cohort(OneByOne(Member), request_for(9), Received(shared=received()), REDUCTIONS, send_details=allowed)
        .failures[0]
        .details
        for allowed in (True, False)
    ]
    assert "Traceback" in failed[0]
    assert failed[1] == ""


def test_what_was_received_is_not_changed_by_a_client_that_returns_it() -> None:
    """A frozen group comes back as it was: a: (10 + 20) x, b and c: 2 x, for x = (1, -2)."""
    given = received()

    def make(client: int) -> Member:
        return Member(client, returns_input=True)

    sums = train_cohort(
        OneByOne(make), request_for(1, 2), Received(shared=given), REDUCTIONS, send_details=False
    ).arrays
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


def test_layout_problem_names_the_difference() -> None:
    x = np.zeros((2, 3), np.float32)
    assert layout_problem({"a": x}, {"a": x + 1}) is None
    assert layout_problem({}, {}) is None
    assert layout_problem({"a": x, "b": x}, {"a": x}) == "arrays are missing: b"
    assert layout_problem({"a": x}, {"a": x, "c": x}) == "unexpected arrays: c"
    assert layout_problem({"a": x}, {"a": x.T}) == "a has shape (3, 2), expected (2, 3)"
    assert layout_problem({"a": x}, {"a": x.astype(np.float64)}) == "a has type float64, expected float32"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_not_finite_finds_a_single_bad_value(bad: float, dtype: type[np.generic]) -> None:
    """One value at the end of the second of two arrays."""
    good, array = np.ones((3, 2), dtype), np.ones((3, 2), dtype)
    assert not_finite({"good": good, "bad": array}) is None
    array[-1, -1] = bad
    assert not_finite({"good": good, "bad": array}) == "bad"


def test_not_finite_takes_large_numbers_integers_and_nothing_for_finite() -> None:
    """A float32 sum of these would overflow; two infinities of both signs do not cancel out."""
    large = np.full(100, np.finfo(np.float32).max)
    assert not_finite({"large": large, "integers": np.arange(3), "nothing": np.zeros(0, np.float32)}) is None
    assert not_finite({"both": np.array([np.inf, -np.inf], np.float32)}) == "both"
