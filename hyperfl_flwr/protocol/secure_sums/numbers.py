"""Encode counts and metrics as integers, so that sums modulo 2^64 are exact, and decode sums."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

METRIC_BITS = 12
"""Metrics are rounded to multiples of 2^-12 on the client.

An accuracy is a fraction of a small, often known, number of samples. The exact sum of such fractions has a unique
decomposition, so it would tell each client's accuracy."""

SQUARE_BITS = 8
"""Squares of metrics are summed in units of 2^-8.

Finer ones would show smaller deviations, and single clients: each square is rounded by itself, so that what is cut off
depends on the value as a hash does. Of five unknown clients with test sets of different sizes, the accuracy of the one
with the smallest is then known five times as often as with 2^-8 (`test_finer_squares_would_tell_a_client`)."""

LEAST_VARIANCE = 2.0 ** -(SQUARE_BITS + 1)
"""Largest error of a mean square: a variance below it cannot be told from 0."""

SQUARES_FROM = 10
"""Least number of nodes in a sum that an attacker does not know (`unknown_nodes`) for which squares of metrics are
summed: of fewer clients, both sums tell too much. A node in a sum has at least one client that finished; a server can
make the others fail, by versions of their state that the node does not have."""

LARGEST_METRIC = 2.0**15
"""Largest magnitude of a metric; larger, infinite and missing ones count as this."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts and metrics over all clients of an opened sum.

    Attributes:
        nodes: Number of nodes.
        clients: Number of clients.
        examples: Their training samples, each at most `max_examples`; 0 in an evaluation.
        saturated: Number of elements of their arrays that were saturated.
        means: Mean of each metric over the clients.
        stds: Standard deviation of the metrics, without those below sqrt(`LEAST_VARIANCE`), 0.044, which are not known;
            empty for a step without sums of squares.
    """

    nodes: int
    clients: int
    examples: int
    saturated: int
    means: Mapping[str, float]
    stds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class NumbersEncoding:
    """Encoding of counts and metrics as a vector of uint64: nodes, clients, examples, saturated, and the metrics' sums.

    Args:
        metrics: Names of the metrics.
        num_clients: Number N of clients in the step.
        squares: Whether squares of the metrics are summed, too.
    """

    metrics: Sequence[str]
    num_clients: int
    squares: bool

    @property
    def size(self) -> int:
        """Length K of the vector."""
        return 4 + len(self.metrics) * (1 + self.squares)

    def encode(
        self, clients: Sequence[Mapping[str, float]], *, num_examples: int, saturated: int
    ) -> NDArray[np.uint64]:
        """Return a node's vector.

        Args:
            clients: Metrics of each client that finished.
            num_examples: Sum of their training samples, each at most `max_examples`.
            saturated: Number of saturated elements of their arrays.
        """
        numbers = [1, len(clients), num_examples, saturated]
        rounded = [[_rounded(metrics.get(name, math.inf)) for name in self.metrics] for metrics in clients]
        numbers += [round(sum(column) * 2**METRIC_BITS) for column in zip(*rounded, strict=True)]
        if self.squares:
            squares = [[round(value * value * 2**SQUARE_BITS) for value in row] for row in rounded]
            numbers += [sum(column) for column in zip(*squares, strict=True)]
        return np.array([number % 2**64 for number in numbers], np.uint64)

    def decode(self, total: NDArray[np.uint64]) -> Tally:
        """Return what an opened vector says.

        Raises:
            ValueError: If it cannot be a sum: no client, or counts out of range.
        """
        nodes, clients, examples, saturated, *sums = total.view(np.int64).tolist()
        if not (0 < nodes <= clients <= self.num_clients and examples >= 0 and saturated >= 0):
            raise ValueError("the counts of the opened sum are impossible")
        count = len(self.metrics)
        means = {name: value / 2**METRIC_BITS / clients for name, value in zip(self.metrics, sums[:count], strict=True)}
        squares = sums[count:] if self.squares else [0] * count
        variances = {
            name: square / 2**SQUARE_BITS / clients - means[name] ** 2
            for name, square in zip(self.metrics, squares, strict=True)
        }
        stds = {name: math.sqrt(value) for name, value in variances.items() if value >= LEAST_VARIANCE}
        return Tally(nodes=nodes, clients=clients, examples=examples, saturated=saturated, means=means, stds=stds)


def _rounded(value: float) -> float:
    """Return a metric as it is summed: within the bounds, and a multiple of 2^-12."""
    if math.isnan(value):
        return LARGEST_METRIC
    unit = 2.0**-METRIC_BITS
    return round(max(-LARGEST_METRIC, min(LARGEST_METRIC, value)) / unit) * unit
