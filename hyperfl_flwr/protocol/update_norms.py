"""Measure how far parameters have changed, relative to those that were sent, for `max-update-ratio`.

The server measures each node's mean change. With secure sums it sees the mean over all nodes only, so each node
measures its own clients.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.protocol.arrays import SharedArrays, blocks
from hyperfl_flwr.protocol.messages import Reduction, group_of
from hyperfl_flwr.protocol.usual_sizes import GRADIENT_SIZE, GRADIENTS, GRADIENTS_AS_MEANS, USUAL_SIZE

CHANGES = frozenset({Reduction.SUM, Reduction.PER_CLIENT})
"""Reductions of groups in which clients send changes themselves.

Sums are of changes, since an absent client counts as zero, and a generated array of one client alone comes back as the
change with which the server trains its generator.
"""

TOO_LONG = "more than max-update-ratio"
"""Text of the reason of an update that was refused for its length."""


def holds_changes(group: str, reductions: Mapping[str, Reduction]) -> bool:
    """Return whether clients send changes in a group, or gradients, and not the values that they have changed."""
    return reductions[group] in CHANGES or group in GRADIENTS_AS_MEANS


def norms_of_change(
    received: SharedArrays,
    sent: SharedArrays,
    reductions: Mapping[str, Reduction],
    divisors: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the L2 norm of each group's change.

    That is the norm of the arrays, divided by `divisors`, minus those that were sent, or of the quotients themselves in
    groups that hold changes.

    Args:
        received: Arrays after training, or sums of them, by `group/name`.
        sent: Arrays before training, with the same names and shapes.
        reductions: Reduction of each group.
        divisors: Divisor of each array; None to divide none.
    """
    squares: dict[str, float] = {}
    for key, value in received.items():
        start = None if holds_changes(group_of(key), reductions) else sent[key]
        square = _squared_change(value, start, divisors[key] if divisors else 1.0)
        squares[group_of(key)] = squares.get(group_of(key), 0.0) + square
    return {group: math.sqrt(square) for group, square in squares.items()}


def reference_norms(sent: SharedArrays) -> dict[str, float]:
    """Return the reference norm of each group: that of the arrays that were sent, at least that of their usual size."""
    squares: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for key, value in sent.items():
        group = group_of(key)
        parts = (block.astype(np.float64) for _, block in blocks(value))
        squares[group] = squares.get(group, 0.0) + sum(float(np.dot(part, part)) for part in parts)
        sizes[group] = sizes.get(group, 0) + value.size
    usual = {group: GRADIENT_SIZE if group in GRADIENTS else USUAL_SIZE for group in squares}
    return {group: max(math.sqrt(squares[group]), usual[group] * math.sqrt(sizes[group])) for group in squares}


def noise_norms(sent: SharedArrays, std: float) -> dict[str, float]:
    """Return the usual norm of each group's noise, a tenth added.

    Args:
        sent: The arrays that were sent.
        std: Standard deviation of the noise on each element of a change.
    """
    sizes: dict[str, int] = {}
    for key, value in sent.items():
        sizes[group_of(key)] = sizes.get(group_of(key), 0) + value.size
    return {group: 1.1 * std * math.sqrt(size) for group, size in sizes.items()}


def refuse_long(
    changes: Mapping[str, float],
    references: Mapping[str, float],
    max_ratio: float,
    noise: Mapping[str, float] | None = None,
) -> None:
    """Refuse an update of which a group has changed by more than `max-update-ratio`.

    Args:
        changes: Norm of each group's change, see `norms_of_change`.
        references: Reference norm of each group, see `reference_norms`.
        max_ratio: Largest allowed ratio.
        noise: Norm of the noise in each group, which does not count, see `noise_norms`; None for no noise.

    Raises:
        ValueError: Naming the group.
    """
    for group, norm in changes.items():
        change = norm - noise[group] if noise else norm
        ratio = change / references[group] if references[group] else 0.0
        if not ratio <= max_ratio:  # also refuses NaN
            raise ValueError(
                f"its update of {group} has {ratio:.3g} times the norm of the values that it received, {TOO_LONG} = "
                f"{max_ratio:g}"
            )


def _squared_change(received: NDArray[Any], sent: NDArray[Any] | None, divisor: float) -> float:
    """Return the squared norm of `received / divisor - sent`, block by block and so without copies of the arrays.

    Without `sent`, nothing is subtracted. Each block is summed in the precision of the arrays, which is three times as
    fast as float64; a block that overflows is summed again in float64.
    """
    change, dtype = 0.0, np.result_type(received if sent is None else sent, np.float32)
    olds = itertools.repeat(None) if sent is None else (old for _, old in blocks(sent))
    with np.errstate(over="ignore", invalid="ignore"):
        for (_, new), old in zip(blocks(received), olds, strict=False):
            square = _dot_of_change(new.astype(dtype, copy=False), old, dtype.type(divisor))
            if not math.isfinite(square):
                square = _dot_of_change(new.astype(np.float64), old, np.float64(divisor))
            change += square
    return change


def _dot_of_change(new: NDArray[Any], old: NDArray[Any] | None, divisor: np.floating[Any]) -> float:
    change = new / divisor
    if old is not None:
        change -= old
    return float(np.dot(change, change))
