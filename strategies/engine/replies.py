"""Parse and validate nodes' replies (untrusted input); an invalid reply is refused with a reason."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from hyperfl_flwr.protocol.arrays import SharedArrays, by_number, layout_problem, not_finite
from hyperfl_flwr.protocol.messages import (
    ARRAYS,
    CLIENTS,
    OUTLIER_SUMS,
    PER_CLIENT_ARRAYS,
    WEIGHTS,
    Report,
    printable,
    record_of,
    weights_record,
)
from hyperfl_flwr.protocol.packing import unpack_arrays
from hyperfl_flwr.protocol.reproducible_sum import MOST_LEVELS, Levels, ReproducibleSum
from strategies.engine.round_records import DEVIATION, ERROR, OF_THE_SERVER

MOST_METRICS = 100
"""Largest number of different metrics in a report."""

LARGEST_METRIC = 1e100
"""Largest magnitude of a metric, so that sums over all clients are finite; plus infinity is also allowed (a loss)."""

RESERVED_NAMES = frozenset(name.replace("_", "-") for name in OF_THE_SERVER)
"""Names that metrics cannot have, as the lines of metrics.jsonl use them."""

RESERVED_ENDS = tuple(end.replace("_", "-") for end in (ERROR, DEVIATION))
"""Ends of names that metrics cannot have, since the server computes these numbers."""


@dataclass(frozen=True, kw_only=True)
class TrainingReply:
    """A node's reply to a TRAIN message.

    Attributes:
        report: Results and failures of the node's clients.
        arrays: The shared arrays of the only client that finished, or weighted sums over several clients; empty if
            none finished.
        outliers: Parts of the sums, by level, with the terms that are too large for `arrays`.
        per_client: The arrays of each client that finished that are not summed, by client.
    """

    report: Report
    arrays: SharedArrays
    outliers: Levels = field(default_factory=dict)
    per_client: Mapping[int, SharedArrays] = field(default_factory=dict)

    @property
    def is_sum(self) -> bool:
        """Whether `arrays` are weighted sums over several clients."""
        return len(self.report.results) > 1

    @property
    def num_examples(self) -> int:
        """Number of training samples of the clients that finished."""
        return sum(result.num_examples for result in self.report.results)

    def refuse_large(self, total: ReproducibleSum, clip_norm: float) -> None:
        """Refuse arrays that are impossible if each client's change has a norm of at most `clip_norm`.

        Args:
            total: The sum to which the arrays would be added.
            clip_norm: The clipping norm.

        Raises:
            ValueError: If the arrays are impossible.
        """
        sums = {0: self.arrays} | self.outliers if self.is_sum else total.levels_of(self.arrays, self.num_examples)
        total.refuse_large(sums, len(self.report.results), clip_norm)

    def add_to(self, total: ReproducibleSum) -> None:
        """Add the shared arrays to the sum over other replies."""
        if self.is_sum:
            total.merge({0: self.arrays} | self.outliers)
        else:
            total.add(self.arrays, self.num_examples)


def read_report(content: RecordDict, requested: Sequence[int]) -> Report:
    """Parse and validate the report in a reply.

    Args:
        content: The reply's content.
        requested: Ids of the clients that the message was about, ascending.

    Raises:
        ValueError: If there is no valid report, or it is about other clients.
    """
    report = Report.from_record(record_of(content, CLIENTS, ConfigRecord))
    reported = sorted([result.client for result in report.results] + [failure.client for failure in report.failures])
    if reported != list(requested):
        raise ValueError(f"the reply is about the clients {reported}, but the message was about {list(requested)}")
    _check_metrics(report)
    return report


def _check_metrics(report: Report) -> None:
    """Refuse metrics that cannot be recorded: too many, with invalid names, or too large to add up.

    Raises:
        ValueError: If there are such metrics; the message names one.
    """
    found = {name: value for result in report.results for name, value in result.metrics.items()}
    if len(found) > MOST_METRICS:
        raise ValueError(f"the reply has {len(found)} metrics, more than {MOST_METRICS}")
    if bad := [name for name in found if not _is_metric_name(name)]:
        raise ValueError(f"a metric cannot have the name {bad[0]!r}")
    for result in report.results:
        for name, value in result.metrics.items():
            if not (abs(value) <= LARGEST_METRIC or value == math.inf):
                raise ValueError(f"the {name} of client {result.client} cannot be {value:g}")


def _is_metric_name(name: str) -> bool:
    is_reserved = name in RESERVED_NAMES or name.endswith(RESERVED_ENDS)
    return not is_reserved and bool(re.fullmatch("[a-z][a-z0-9-]{0,99}", name))


def read_training(
    content: RecordDict, requested: Sequence[int], shared: SharedArrays, per_client: Mapping[int, SharedArrays]
) -> TrainingReply:
    """Parse and validate a reply to a TRAIN message.

    Args:
        content: The reply's content.
        requested: Ids of the clients that the message was about, ascending.
        shared: The arrays that all clients received, of summed groups; a client's arrays must have their names, shapes
            and types.
        per_client: The arrays that each client received and sends back alone, likewise; empty if there are none.

    Raises:
        ValueError: If anything is missing, has a wrong name, shape or type, or is not finite.
    """
    report = read_report(content, requested)
    clients = sorted(result.client for result in report.results)
    num_examples = sum(result.num_examples for result in report.results)
    weights = weights_record(num_examples, len(clients))
    # The weights follow from the report: a node cannot choose its weight in the mean separately.
    if (received := dict(record_of(content, WEIGHTS, MetricRecord))) != dict(weights):
        raise ValueError(f"the weights {received} must be {dict(weights)}")
    arrays = _unpack(record_of(content, ARRAYS, ArrayRecord))
    if not clients:
        return TrainingReply(report=report, arrays={})
    if not per_client and PER_CLIENT_ARRAYS in content:
        raise ValueError("the reply has arrays of single clients, of which the method has none")
    outliers: Levels = {}
    if len(clients) == 1:
        _check(arrays, shared)
    else:
        _check_sums(arrays, shared, num_examples)
        outliers = _read_outliers(content, shared, num_examples)
    return TrainingReply(
        report=report,
        arrays=arrays,
        outliers=outliers,
        per_client=_read_per_client(content, clients, per_client) if per_client else {},
    )


def _read_outliers(content: RecordDict, shared: SharedArrays, num_examples: int) -> Levels:
    if OUTLIER_SUMS not in content:
        return {}
    found = by_number(_unpack(record_of(content, OUTLIER_SUMS, ArrayRecord)))
    for level, arrays in found.items():
        if not 0 < level <= MOST_LEVELS:
            raise ValueError(f"levels of sums must be 1 to {MOST_LEVELS}, got {level}")
        _check_sums(arrays, {key: value for key, value in shared.items() if key in arrays}, num_examples)
    return found


def _check_sums(sums: SharedArrays, shared: SharedArrays, num_examples: int) -> None:
    """Refuse sums that have another layout, or that are too large for the number of samples.

    Raises:
        ValueError: If an array is invalid; the message names it.
    """
    if problem := layout_problem({key: np.broadcast_to(0.0, value.shape) for key, value in shared.items()}, sums):
        raise ValueError(problem)
    for key, value in sums.items():
        limit = num_examples * float(np.finfo(shared[key].dtype).max)  # bounds the sum for any weights
        if not _is_within(value.reshape(-1), limit):
            raise ValueError(f"{key} is not finite, or too large for a sum of finite {shared[key].dtype} values")


def _is_within(flat: NDArray[Any], limit: float) -> bool:
    """Return whether all elements are finite, and their magnitudes at most `limit`, which may be infinite."""
    # The sum of squares nearly always suffices and is much faster than comparing all elements.
    with np.errstate(over="ignore", invalid="ignore"):
        square = np.dot(flat, flat)
        if np.isfinite(square) and square <= limit * limit:
            return True
        return bool(np.isfinite(flat).all() and (np.abs(flat) <= limit).all())


def read_answers(
    content: RecordDict, requested: Sequence[int], expected: Mapping[int, SharedArrays]
) -> tuple[Report, Mapping[int, SharedArrays]]:
    """Parse and validate a reply to a query: the report, and each client's arrays.

    Args:
        content: The reply's content.
        requested: Ids of the clients that the query was about, ascending.
        expected: Names, shapes and types of each client's arrays; empty if answers hold no arrays.

    Raises:
        ValueError: If anything is missing, has a wrong name, shape or type, or is not finite.
    """
    report = read_report(content, requested)
    clients = sorted(result.client for result in report.results)
    return report, _read_per_client(content, clients, expected) if clients and expected else {}


def _read_per_client(
    content: RecordDict, clients: Sequence[int], per_client: Mapping[int, SharedArrays]
) -> Mapping[int, SharedArrays]:
    expected = {client: per_client[client] for client in clients}
    found = by_number(_unpack(record_of(content, PER_CLIENT_ARRAYS, ArrayRecord)))
    if sorted(found) != list(clients):
        raise ValueError(f"the reply has arrays of the clients {sorted(found)}, expected {list(clients)}")
    for client, arrays in found.items():
        _check(arrays, expected[client])
    return found


def _unpack(record: ArrayRecord) -> SharedArrays:
    try:
        return unpack_arrays(record)
    except ValueError as error:
        raise ValueError(f"the reply's arrays cannot be read: {printable(str(error))}") from None


def _check(arrays: SharedArrays, expected: SharedArrays) -> None:
    if problem := layout_problem(expected, arrays):
        raise ValueError(problem)
    if key := not_finite(arrays):
        raise ValueError(f"{key} is not finite")
