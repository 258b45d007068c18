"""Reads nodes' replies, which come from machines that are not ours: whatever does not fit is refused with a reason."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from hyperfl_flwr.protocol.arrays import SharedArrays, layout_problem, not_finite, unpack_arrays
from hyperfl_flwr.protocol.messages import (
    ARRAYS,
    CLIENTS,
    OUTLIER_SUMS,
    OWN_ARRAYS,
    WEIGHTS,
    Report,
    by_number,
    printable,
    record_of,
    weights_record,
)
from hyperfl_flwr.protocol.reproducible_sum import MOST_LEVELS, Levels, ReproducibleSum

MOST_METRICS = 100
"""Names of metrics that a report may have."""

LARGEST_METRIC = 1e100
"""Sums of such numbers over all clients are finite. A loss may be infinite, nothing may be minus infinite."""

TAKEN = frozenset({"kind", "round", "phase", "client", "clients", "failed", "away", "num-examples"})
"""What the lines of metrics.jsonl tell themselves."""


@dataclass(frozen=True, kw_only=True)
class TrainingReply:
    """A node's answer to a TRAIN message.

    Attributes:
        report: Its clients' numbers.
        arrays: The shared arrays of the one client that finished, or their weighted sums over several; empty if none
            did.
        outliers: By level, what the sums lack of terms that are too large for them.
        own: The per-client groups of each client that finished.
    """

    report: Report
    arrays: SharedArrays
    outliers: Levels = field(default_factory=dict)
    own: Mapping[int, SharedArrays] = field(default_factory=dict)

    @property
    def is_sum(self) -> bool:
        """Whether `arrays` are sums."""
        return len(self.report.results) > 1

    @property
    def num_examples(self) -> int:
        """Training samples of the clients that finished."""
        return sum(result.num_examples for result in self.report.results)

    def add_to(self, total: ReproducibleSum) -> None:
        """Add the shared arrays to those of other replies."""
        if self.is_sum:
            total.merge({0: self.arrays} | self.outliers)
        else:
            total.add(self.arrays, self.num_examples)


def read_report(content: RecordDict, asked: Sequence[int]) -> Report:
    """Return the report in a reply.

    Raises:
        ValueError: If there is none, or it is not about the clients that the node was asked for.
    """
    report = Report.from_record(record_of(content, CLIENTS, ConfigRecord))
    told = sorted([result.client for result in report.results] + [failure.client for failure in report.failures])
    if told != list(asked):
        raise ValueError(f"the reply is about the clients {told}, asked were {list(asked)}")
    _check_metrics(report)
    return report


def _check_metrics(report: Report) -> None:
    """Refuse metrics that could not be recorded: too many, with other names than ours have, or too large to be added.

    Raises:
        ValueError: Naming one.
    """
    found = {name: value for result in report.results for name, value in result.metrics.items()}
    if len(found) > MOST_METRICS:
        raise ValueError(f"the reply has {len(found)} metrics, more than {MOST_METRICS}")
    if strange := [name for name in found if name in TAKEN or not re.fullmatch("[a-z][a-z0-9-]{0,99}", name)]:
        raise ValueError(f"a metric cannot be called {strange[0]!r}")
    for result in report.results:
        for name, value in result.metrics.items():
            if not (abs(value) <= LARGEST_METRIC or value == math.inf):
                raise ValueError(f"the {name} of client {result.client} cannot be {value:g}")


def read_training(
    content: RecordDict, asked: Sequence[int], shared: SharedArrays, own: Mapping[int, SharedArrays]
) -> TrainingReply:
    """Return a reply to a TRAIN message.

    Args:
        content: The reply's.
        asked: The clients that the node was asked for, ascending.
        shared: What all clients were sent: names, shapes and types that a client's arrays must have.
        own: The same for what each client was sent alone; empty where no group is per client.

    Raises:
        ValueError: If anything is missing, does not fit, or is not finite.
    """
    report = read_report(content, asked)
    clients = sorted(result.client for result in report.results)
    num_examples = sum(result.num_examples for result in report.results)
    weights = weights_record(num_examples, len(clients))
    if (got := dict(record_of(content, WEIGHTS, MetricRecord))) != dict(weights):
        raise ValueError(f"the weights {got} must be {dict(weights)}")
    arrays = _unpack(record_of(content, ARRAYS, ArrayRecord))
    if not clients:
        return TrainingReply(report=report, arrays={})
    outliers: Levels = {}
    if len(clients) == 1:
        _check(arrays, shared)
    else:
        _check_sums(arrays, shared, num_examples)
        outliers = _read_outliers(content, shared, num_examples)
    return TrainingReply(
        report=report, arrays=arrays, outliers=outliers, own=_read_own(content, clients, own) if own else {}
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
    """Refuse sums that have another layout, or that so many samples' clients cannot have.

    Raises:
        ValueError: Naming an array.
    """
    if problem := layout_problem({key: np.broadcast_to(0.0, value.shape) for key, value in shared.items()}, sums):
        raise ValueError(problem)
    for key, value in sums.items():
        limit = num_examples * float(np.finfo(shared[key].dtype).max)  # of the weights, whichever they are
        if not _is_within(value.reshape(-1), limit):
            raise ValueError(f"{key} is not finite, or larger than a sum of finite {shared[key].dtype} can be")


def _is_within(flat: NDArray[Any], limit: float) -> bool:
    """Return whether the magnitudes of all elements are at most `limit`; mostly the sum of their squares shows it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.dot(flat, flat) <= limit * limit) or bool((np.abs(flat) <= limit).all())


def read_answers(
    content: RecordDict, asked: Sequence[int], expected: Mapping[int, SharedArrays]
) -> tuple[Report, Mapping[int, SharedArrays]]:
    """Return the report and each client's arrays in an answer to a query.

    Args:
        content: The reply's.
        asked: The clients that the node was asked for, ascending.
        expected: Names, shapes and types of each client's arrays; empty where none are wanted.

    Raises:
        ValueError: If anything is missing, does not fit, or is not finite.
    """
    report = read_report(content, asked)
    clients = sorted(result.client for result in report.results)
    return report, _read_own(content, clients, expected) if clients and expected else {}


def _read_own(
    content: RecordDict, clients: Sequence[int], own: Mapping[int, SharedArrays]
) -> Mapping[int, SharedArrays]:
    expected = {client: own[client] for client in clients}
    found = by_number(_unpack(record_of(content, OWN_ARRAYS, ArrayRecord)))
    if sorted(found) != list(clients):
        raise ValueError(f"the reply has arrays of the clients {sorted(found)}, expected {list(clients)}")
    for client, arrays in found.items():
        _check(arrays, expected[client])
    return found


def _unpack(record: ArrayRecord) -> SharedArrays:
    try:
        return unpack_arrays(record)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the reply's arrays cannot be read: {printable(str(error))}") from None


def _check(arrays: SharedArrays, expected: SharedArrays) -> None:
    if problem := layout_problem(expected, arrays):
        raise ValueError(problem)
    if key := not_finite(arrays):
        raise ValueError(f"{key} is not finite")
