"""Records, reductions, and checks of arrays."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

from hyperfl_flwr.protocol.arrays import by_number, layout_problem, not_finite, per_client_key
from hyperfl_flwr.protocol.messages import (
    ClientResult,
    Failure,
    Reduction,
    Report,
    Request,
    group_of,
    record_of,
    weights_record,
)
from hyperfl_flwr.protocol.sizes import content_bytes

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
    """It must be 16 hexadecimal digits, since nodes create a folder of that name."""
    record = REQUEST.to_record()
    record["experiment"] = experiment
    with pytest.raises(ValueError, match="16 hexadecimal digits"):
        Request.from_record(record)


def test_a_report_survives_the_wire() -> None:
    """A metric that only one client has is missing for the other, not NaN."""
    report = Report(
        results=[
            ClientResult(client=1, num_examples=7, metrics={"personalized-accuracy": 0.5}),
            ClientResult(client=4, num_examples=9, metrics={"personalized-accuracy": 0.25, "train-loss": 2.0}),
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


def test_names_and_weights() -> None:
    assert group_of("hypernetwork/hidden.weight") == "hypernetwork"
    assert dict(weights_record(16, 2)) == {"num-examples": 16, "num-clients": 2}


def test_content_bytes_adds_the_records_of_all_messages() -> None:
    """Two messages with three equal records have three times Flower's own count of one."""
    record = REQUEST.to_record()
    one, two = RecordDict({"a": record}), RecordDict({"a": record, "b": record})
    assert content_bytes([one, two]) == 3 * record.count_bytes()


def test_what_flower_does_not_count_is_counted() -> None:
    """A node may send an empty text or list, of which only the key is counted."""
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
    """For two clients with 3 and 5 samples, the weights n_i are divided by 8, ones by 2, and ones by 1."""
    assert [reduction.weight(count) for count in (3, 5)] == weights
    assert reduction.divisor(8, 2) == divisor


def test_keys_of_own_arrays() -> None:
    """Keys CLIENT/GROUP/NAME are written and read again; a key that does not begin with a client is refused."""
    arrays = {per_client_key(client, "c/x"): np.array([client]) for client in (3, 10)}
    assert {client: list(each) for client, each in by_number(arrays).items()} == {3: ["c/x"], 10: ["c/x"]}
    with pytest.raises(ValueError, match="must have keys NUMBER/GROUP/NAME, got 'c/x'"):
        by_number({"c/x": np.zeros(1)})
    for number in ("03", "\u0663"):  # the digit three in another script
        with pytest.raises(ValueError, match="must have keys NUMBER/GROUP/NAME"):
            by_number({"3/c/x": np.zeros(1), f"{number}/c/x": np.ones(1)})


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
    """A single bad value at the end of the second of two arrays is found."""
    good, array = np.ones((3, 2), dtype), np.ones((3, 2), dtype)
    assert not_finite({"good": good, "bad": array}) is None
    array[-1, -1] = bad
    assert not_finite({"good": good, "bad": array}) == "bad"


def test_not_finite_takes_large_numbers_integers_and_nothing_for_finite() -> None:
    """Large numbers are finite, although their float32 sum overflows; infinities of both signs do not cancel out."""
    large = np.full(100, np.finfo(np.float32).max)
    assert not_finite({"large": large, "integers": np.arange(3), "nothing": np.zeros(0, np.float32)}) is None
    assert not_finite({"both": np.array([np.inf, -np.inf], np.float32)}) == "both"
