"""Sanity bounds on the counts, metrics and update norms that nodes report.

A reply with valid names and shapes may still be wrong. The bounds do not detect a careful attacker, who stays within
them. They prevent one node's mistake or crude manipulation from dominating the mean over all clients: a weight of 10^12
samples, an update a thousand times too long, an accuracy of 7.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.protocol.arrays import SharedArrays, blocks
from hyperfl_flwr.protocol.messages import Reduction, Report, group_of
from strategies.engine.replies import TrainingReply

USUAL_SIZE = 0.05
"""Approximate root mean square of a network's initial parameters.

An update is measured relative to it if the parameters that were sent are smaller, for example zero.
"""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds on the replies to a round's TRAIN messages.

    Attributes:
        max_ratio: Largest norm of a group's change, relative to the norm of the group that was sent; 0 for no bound.
        num_examples: Number of training samples that nodes announced in the handshake, by client.
        shared: The arrays that all clients received.
        per_client: The arrays that each client received alone, by client.
        reductions: Reduction of each shared group.
    """

    max_ratio: float
    num_examples: Mapping[int, int]
    shared: SharedArrays
    per_client: Mapping[int, SharedArrays]
    reductions: Mapping[str, Reduction]

    def check(self, reply: TrainingReply) -> None:
        """Check a reply that has the right layout, see `strategies.engine.replies`.

        Raises:
            ValueError: If a number is out of bounds; the message names the client or the group.
        """
        refuse_impossible_numbers(reply.report, self.num_examples, required="personalized-accuracy")
        if not self.max_ratio:
            return
        if reply.arrays:
            divisors = _divisors(reply, self.reductions)
            self._refuse_long(_changes(_with_outliers(reply), self.shared, divisors), self._measures)
        for client, arrays in reply.per_client.items():
            sent = self.per_client[client]
            self._refuse_long(_changes(arrays, sent), _measures_of(sent))

    def check_means(self, means: SharedArrays, num_clients: int) -> None:
        """Check the opened means of a secure sum, of which single replies cannot be checked.

        Raises:
            ValueError: If a group is out of bounds; the message names the group.
        """
        if self.max_ratio:
            sums = {key: self.reductions[group_of(key)] is Reduction.SUM for key in means}
            divisors = {key: float(num_clients) if is_sum else 1.0 for key, is_sum in sums.items()}
            self._refuse_long(_changes(means, self.shared, divisors), self._measures)

    @cached_property
    def _measures(self) -> Mapping[str, float]:
        """The reference norms of the shared groups, computed once for all replies."""
        return _measures_of(self.shared)

    def _refuse_long(self, changes: Mapping[str, float], measures: Mapping[str, float]) -> None:
        for group, change in changes.items():
            ratio = change / measures[group] if measures[group] else 0.0
            if not ratio <= self.max_ratio:  # also refuses NaN
                raise ValueError(
                    f"its update of {group} has {ratio:.3g} times the norm of the values that it received, more than "
                    f"max-update-ratio = {self.max_ratio:g}"
                )


def refuse_impossible_numbers(report: Report, num_examples: Mapping[int, int], required: str = "") -> None:
    """Check a report's accuracies and counts.

    Args:
        report: A node's report.
        num_examples: Number of training samples that nodes announced in the handshake, by client; other clients may
            report any number above 0. Empty if the report is not about training samples.
        required: Name of a metric that every client that finished must have; empty for none.

    Raises:
        ValueError: If a number is impossible; the message names the client.
    """
    for result in report.results:
        client = f"client {result.client}"
        announced = num_examples.get(result.client)
        if announced is not None and result.num_examples != announced:
            raise ValueError(f"{client} reports {result.num_examples} training samples but announced {announced}")
        if required and required not in result.metrics:
            raise ValueError(f"{client} reports no {required}, or one that is not a number")
        for name, value in result.metrics.items():
            if name.endswith("accuracy") and not 0 <= value <= 1:
                raise ValueError(f"the {name} of {client} must be between 0 and 1, got {value:g}")


def _divisors(reply: TrainingReply, reductions: Mapping[str, Reduction]) -> dict[str, float]:
    """Return the divisors, by key, that turn a node's arrays into means over its clients."""
    if not reply.is_sum:
        return dict.fromkeys(reply.arrays, 1.0)
    num_clients = len(reply.report.results)
    divisors = {}
    for key in reply.arrays:
        # The server does not divide SUM groups, but the bound is on the mean change of one client.
        reduction = reductions[group_of(key)]
        divisors[key] = (
            num_clients if reduction is Reduction.SUM else reduction.divisor(reply.num_examples, num_clients)
        )
    return divisors


def _with_outliers(reply: TrainingReply) -> SharedArrays:
    """Return a node's arrays with all levels added; only arrays with several levels are copied."""
    arrays = dict(reply.arrays)
    for sums in reply.outliers.values():
        arrays |= {key: arrays[key] + value for key, value in sums.items()}
    return arrays


def _changes(
    received: SharedArrays, sent: SharedArrays, divisors: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the norm of each group's change: of the arrays, divided by `divisors`, minus those that were sent."""
    squares: dict[str, float] = {}
    for key, value in received.items():
        square = _squared_change(value, sent[key], divisors[key] if divisors else 1.0)
        squares[group_of(key)] = squares.get(group_of(key), 0.0) + square
    return {group: math.sqrt(square) for group, square in squares.items()}


def _measures_of(sent: SharedArrays) -> dict[str, float]:
    """Return the reference norm of each group: that of the arrays that were sent, at least that of `USUAL_SIZE`."""
    squares: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for key, value in sent.items():
        group = group_of(key)
        parts = (block.astype(np.float64) for _, block in blocks(value))
        squares[group] = squares.get(group, 0.0) + sum(float(np.dot(part, part)) for part in parts)
        sizes[group] = sizes.get(group, 0) + value.size
    return {group: max(math.sqrt(squares[group]), USUAL_SIZE * math.sqrt(sizes[group])) for group in squares}


def _squared_change(received: NDArray[Any], sent: NDArray[Any], divisor: float) -> float:
    """Return the squared norm of `received / divisor - sent`, block by block and so without copies of the arrays.

    Each block is summed in the precision of the array that was sent, which is three times as fast as float64; a block
    that overflows is summed again in float64.
    """
    change, dtype = 0.0, np.result_type(sent, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for (_, new), (_, old) in zip(blocks(received), blocks(sent), strict=True):
            square = _dot_of_change(new.astype(dtype, copy=False), old, dtype.type(divisor))
            if not math.isfinite(square):
                square = _dot_of_change(new.astype(np.float64), old, np.float64(divisor))
            change += square
    return change


def _dot_of_change(new: NDArray[Any], old: NDArray[Any], divisor: np.floating[Any]) -> float:
    change = new / divisor
    change -= old
    return float(np.dot(change, change))
