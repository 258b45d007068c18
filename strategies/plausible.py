"""What a node's numbers can be: a reply that fits in names and shapes may still lie.

These bounds do not find a careful liar, who stays below them. They keep one node's mistake, or crude lie, from deciding
the mean of all: a weight of 10^12 samples, an update a thousand times too long, an accuracy of 7.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.arrays import SharedArrays
from hyperfl_flwr.messages import Reduction, Report, group_of
from strategies.replies import TrainingReply

USUAL_SIZE = 0.05
"""Root mean square of a network's parameters at the start, about: the measure of an update where what was sent is zero,
or smaller."""

BLOCK = 1 << 15
"""Elements that are looked at together: few enough to stay in a processor's cache."""


@dataclass(frozen=True)
class Bounds:
    """What a reply to a TRAIN message must keep within.

    Attributes:
        max_ratio: Longest change of a shared group, in lengths of what was sent; 0 allows any.
        num_examples: Training samples that nodes told at the handshake, by client.
    """

    max_ratio: float
    num_examples: Mapping[int, int]

    def check(
        self,
        reply: TrainingReply,
        shared: SharedArrays,
        own: Mapping[int, SharedArrays],
        reductions: Mapping[str, Reduction],
    ) -> None:
        """Check a reply.

        Args:
            reply: It fits what was sent, see `strategies.replies`.
            shared: What all clients were sent.
            own: What each client was sent alone.
            reductions: By shared group.

        Raises:
            ValueError: Naming the client or the group.
        """
        refuse_impossible_numbers(reply.report, self.num_examples, required="own-accuracy")
        _refuse_long_changes(reply.sums, shared, self.max_ratio, _divisors(reply, reductions))
        for client, arrays in reply.own.items():
            _refuse_long_changes(arrays, own[client], self.max_ratio)


def refuse_impossible_numbers(report: Report, num_examples: Mapping[int, int], required: str = "") -> None:
    """Check a report's accuracies and counts.

    Args:
        report: A node's.
        num_examples: Training samples that nodes told at the handshake, by client; of others anything above 0 may be
            told. Empty where the report is not about training samples.
        required: A metric that every client that finished must have.

    Raises:
        ValueError: Naming the client.
    """
    for result in report.results:
        who = f"client {result.client}"
        told = num_examples.get(result.client)
        if told is not None and result.num_examples != told:
            raise ValueError(f"{who} tells {result.num_examples} training samples, the handshake told {told}")
        if required and required not in result.metrics:
            raise ValueError(f"{who} tells no {required}, or one that is not a number")
        for name, value in result.metrics.items():
            if name.endswith("accuracy") and not 0 <= value <= 1:
                raise ValueError(f"the {name} of {who} must be between 0 and 1, got {value:g}")


def _divisors(reply: TrainingReply, reductions: Mapping[str, Reduction]) -> dict[str, float]:
    """Return what makes a node's sums the means over the clients that are in them, by key."""
    num_clients = len(reply.report.results)
    total = sum(result.num_examples for result in reply.report.results)
    divisors = {}
    for key in reply.sums:
        reduction = reductions[group_of(key)]
        divisors[key] = num_clients if reduction is Reduction.SUM else reduction.divisor(total, num_clients)
    return divisors


def _refuse_long_changes(
    got: SharedArrays, sent: SharedArrays, max_ratio: float, divisors: Mapping[str, float] | None = None
) -> None:
    """Check that arrays, divided by `divisors`, are not far from what was sent, group by group.

    Raises:
        ValueError: Naming the group.
    """
    if not max_ratio:
        return
    changes: dict[str, float] = {}
    lengths: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for key, value in got.items():
        group = group_of(key)
        change, length = _squares(value, sent[key], divisors[key] if divisors else 1.0)
        changes[group] = changes.get(group, 0.0) + change
        lengths[group] = lengths.get(group, 0.0) + length
        sizes[group] = sizes.get(group, 0) + value.size
    for group, change in changes.items():
        reference = max(math.sqrt(lengths[group]), USUAL_SIZE * math.sqrt(sizes[group]))
        ratio = math.sqrt(change) / reference if reference else 0.0
        if not ratio <= max_ratio:
            raise ValueError(
                f"its update of {group} is {ratio:.3g} times as long as what it was sent, more than max-update-ratio = "
                f"{max_ratio:g}"
            )


def _squares(got: NDArray[Any], sent: NDArray[Any], divisor: float) -> tuple[float, float]:
    """Return the squared lengths of `got / divisor - sent` and of `sent`, without a copy of either."""
    change = length = 0.0
    new, old = got.reshape(-1), sent.reshape(-1)
    with np.errstate(over="ignore"):
        for first in range(0, new.size, BLOCK):
            before = old[first : first + BLOCK].astype(np.float64)
            moved = new[first : first + BLOCK].astype(np.float64)
            moved /= divisor
            moved -= before
            change += float(np.dot(moved, moved))
            length += float(np.dot(before, before))
    return change, length
