"""Invalid replies of nodes: each is refused with a `ValueError`, because of which only its node is left out."""

from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.protocol.messages import (
    ARRAYS,
    CLIENTS,
    OUTLIER_SUMS,
    WEIGHTS,
    ClientResult,
    Reduction,
    Report,
    weights_record,
)
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.reproducible_sum import MOST_LEVELS, ReproducibleSum
from hyperfl_flwr.protocol.secure_sums.numbers import Tally
from strategies.engine.replies import MOST_METRICS, RESERVED_ENDS, RESERVED_NAMES, read_report, read_training
from strategies.engine.round_outcome import Outcome, Refused
from strategies.engine.round_records import training_records


def content(metrics: dict[str, float], **changes: Any) -> RecordDict:
    """Return the reply of one client, with some values of its record changed."""
    record = Report(results=[ClientResult(client=0, num_examples=7, metrics=metrics)], process="p").to_record()
    for key, value in changes.items():
        record[key.replace("_", "-")] = value
    return RecordDict({CLIENTS: record})


def test_our_metrics_are_taken() -> None:
    """The metrics of our clients are accepted; a loss may be infinite."""
    told = {
        "personalized-accuracy": 0.5,
        "personalized-loss": float("inf"),
        "hidden-active-units": 12.0,
        "seconds": 1.0,
    }
    assert read_report(content(told), [0]).results[0].metrics == told


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"round": 99.0}, "a metric cannot have the name 'round'"),
        ({"kind": 1.0}, "a metric cannot have the name 'kind'"),
        ({"num-examples": 1.0}, "a metric cannot have the name 'num-examples'"),
        ({"failed": 1.0}, "a metric cannot have the name 'failed'"),
        ({"node-shares": 1.0}, "a metric cannot have the name 'node-shares'"),
        ({"drawn-from": 3.0}, "a metric cannot have the name 'drawn-from'"),
        ({"peak-memory-mb": 1.0}, "a metric cannot have the name 'peak-memory-mb'"),
        ({"personalized-accuracy-sem": 0.01}, "a metric cannot have the name 'personalized-accuracy-sem'"),
        ({"personalized-loss-std": 0.01}, "a metric cannot have the name 'personalized-loss-std'"),
        ({"a\x1b[2J": 1.0}, "a metric cannot have the name"),
        ({"": 1.0}, "a metric cannot have the name ''"),
        ({"personalized-loss": -float("inf")}, "the personalized-loss of client 0 cannot be -inf"),
        ({"personalized-loss": 1e308}, r"the personalized-loss of client 0 cannot be 1e\+308"),
        ({f"m{number}": 1.0 for number in range(MOST_METRICS + 1)}, "has 101 metrics, more than 100"),
    ],
)
def test_metrics_that_could_not_be_recorded_are_refused(metrics: dict[str, float], text: str) -> None:
    """A line of metrics.jsonl already has a round, a kind, ...; two numbers of 1e308 have an infinite sum."""
    with pytest.raises(ValueError, match=text):
        read_report(content(metrics), [0])


def test_no_metric_has_the_name_of_a_number_of_the_server() -> None:
    """All names of a round's lines but those of the client's own metrics are reserved, in plain runs and with sums."""
    config = RunConfig.from_flat(
        default_settings("fedavg") | {"fraction-train": 0.5, "num-clients": 4, "last-round": "sampled"}
    )
    told = {"personalized-accuracy": 0.5, "seconds": 1.0}
    plain, secure = Outcome(node_shares={0: 1.0}), Outcome(finished=[0, 1])
    for client in (0, 1):
        plain.add(7, Report(results=[ClientResult(client=client, num_examples=7, metrics=told)], process="p"))
    plain.add(8, Report(results=[ClientResult(client=2, num_examples=7, metrics={})], process="p"))
    secure.tally = Tally(nodes=1, clients=2, examples=14, saturated=0, means={}, stds={})
    written: set[str] = set()
    for outcome in (plain, secure):
        for record in training_records(outcome, config, 1, "embeddings", 1.0, population=4):
            written |= {name.replace("_", "-") for name in record}
    assert {"node-shares", "drawn-from", "measured", "phase", "unmask-seconds", "personalized-accuracy-sem"} <= written
    assert {name for name in written if not name.endswith(RESERVED_ENDS)} - set(told) <= RESERVED_NAMES


@pytest.mark.parametrize("change", [{"peak_memory": float("inf")}, {"seconds": "soon"}, {"process": 1}])
def test_numbers_of_the_process_that_are_none(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not a report|could not convert|process must be a text|seconds must be"):
        read_report(content({}, **change), [0])


def test_a_reason_is_one_line_whatever_a_node_calls_its_arrays() -> None:
    """The reason includes names of arrays, and is written to the log and the terminal."""
    outcome = Outcome()
    outcome.fail([3], "unexpected arrays: a\n2026 INFO all is well\x1b[2J")
    outcome.refuse(7, Refused(clients=[3], reason="unexpected arrays: a\n2026 INFO all is well\x1b[2J"))
    assert outcome.refused[7].reason == "unexpected arrays: a 2026 INFO all is well[2J"
    assert outcome.num_failures == 0
    assert [failure.reason for failure in outcome.failures] == ["unexpected arrays: a 2026 INFO all is well[2J"]


SENT = {"net/a": np.zeros(2, np.float32), "net/b": np.zeros(1, np.float32)}


def training(clients: int, arrays: dict[str, Any], outliers: dict[str, Any] | None = None) -> RecordDict:
    """Return the reply to a TRAIN message for this many clients, with 7 samples each."""
    results = [ClientResult(client=client, num_examples=7, metrics={}) for client in range(clients)]
    content = RecordDict(
        {
            ARRAYS: pack_arrays(arrays),
            WEIGHTS: weights_record(7 * clients, clients),
            CLIENTS: Report(results=results, process="p").to_record(),
        }
    )
    if outliers is not None:
        content[OUTLIER_SUMS] = pack_arrays(outliers)
    return content


def read(clients: int, arrays: dict[str, Any], outliers: dict[str, Any] | None = None) -> list[float]:
    """Return the server's mean by samples of `net/a` from a single reply."""
    reply = read_training(training(clients, arrays, outliers), list(range(clients)), SENT, {})
    rounding = {"num_clients": clients, "max_num_examples": 7}
    total = ReproducibleSum(SENT, {"net": Reduction.MEAN_BY_EXAMPLES}, **rounding)
    reply.add_to(total)
    mean: list[float] = total.take_mean(7 * clients, clients)["net/a"].tolist()
    return mean


def test_one_client_s_arrays_and_several_clients_sums() -> None:
    """By hand: (1, 2) of one client, and sums (14, 28) of 14 samples, have the mean (1, 2); an outlier of 28 adds 2."""
    one = {"net/a": np.array([1, 2], np.float32), "net/b": np.zeros(1, np.float32)}
    sums = {"net/a": np.array([14.0, 28.0]), "net/b": np.zeros(1)}
    assert read(1, one) == [1, 2]
    assert read(2, sums) == [1, 2]
    assert read(2, sums, {"1/net/a": np.array([0.0, 28.0])}) == [1, 4]


@pytest.mark.parametrize(
    ("clients", "change", "text"),
    [
        (1, {"net/a": np.zeros(2)}, "net/a has type float64, expected float32"),
        (2, {"net/a": np.zeros(2, np.float32)}, "net/a has type float32, expected float64"),
        (2, {"net/a": np.zeros(3)}, r"net/a has shape \(3,\), expected \(2,\)"),
        (2, {"net/c": np.zeros(2)}, "unexpected arrays: net/c"),
        (2, {"net/a": np.array([0, np.nan])}, "net/a is not finite, or too large for a sum"),
        (2, {"net/a": np.array([-np.inf, 0])}, "net/a is not finite, or too large for a sum"),
        (
            2,
            {"net/a": np.array([0, 15 * 3.5e38])},
            "net/a is not finite, or too large for a sum of finite float32 values",
        ),
    ],
)
def test_sums_that_are_none(clients: int, change: dict[str, Any], text: str) -> None:
    """Sums of several clients are float64, one client's arrays float32; 14 samples cannot give 15 times the largest."""
    arrays = {key: value.astype(np.float64 if clients > 1 else np.float32) for key, value in SENT.items()}
    with pytest.raises(ValueError, match=text):
        read(clients, arrays | change)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_infinite_sums_of_float64_are_refused(value: float) -> None:
    """14 times the largest float64 is infinite, and no bound; a large finite sum is accepted."""
    sent = {"knowledge/theta": np.zeros(2)}
    for number, fits in ((1e308, True), (value, False)):
        reply = training(2, {"knowledge/theta": np.array([number, 1.0])})
        if fits:
            read_training(reply, [0, 1], sent, {})
        else:
            with pytest.raises(ValueError, match="knowledge/theta is not finite, or too large"):
                read_training(reply, [0, 1], sent, {})


def test_the_largest_sums_are_taken() -> None:
    """A sum of 14 times the largest float32 is accepted, without an overflow; its mean is the largest float32."""
    largest = float(np.finfo(np.float32).max)
    assert read(2, {"net/a": np.array([14 * largest, 0]), "net/b": np.zeros(1)}) == [largest, 0]


@pytest.mark.parametrize(
    ("outliers", "text"),
    [
        ({"0/net/a": np.zeros(2)}, "levels of sums must be 1 to 12, got 0"),
        ({f"{MOST_LEVELS + 1}/net/a": np.zeros(2)}, "levels of sums must be 1 to 12, got 13"),
        ({"net/a": np.zeros(2)}, "must have keys NUMBER/GROUP/NAME"),
        ({"1/net/a": np.zeros(2, np.float32)}, "net/a has type float32, expected float64"),
        ({"1/net/c": np.zeros(2)}, "unexpected arrays: net/c"),
        ({"1/net/b": np.array([np.nan])}, "net/b is not finite"),
    ],
)
def test_outliers_that_are_none(outliers: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read(2, {key: value.astype(np.float64) for key, value in SENT.items()}, outliers)


@pytest.mark.parametrize("reports", [[[0], [1], [2]], [[2, 0], [1]], [[1], [], [0, 2]], [[2, 1, 0]]])
def test_results_are_in_the_order_of_the_clients(reports: list[list[int]]) -> None:
    """Whatever the order of the reports, and of the clients in them."""
    outcome = Outcome()
    for clients in reports:
        results = [ClientResult(client=client, num_examples=1, metrics={}) for client in clients]
        outcome.add(7, Report(results=results, process="a"))
    assert outcome.finished == [result.client for result in outcome.results] == [0, 1, 2]
