"""Weighted sums over clients whose bits depend neither on the order nor on the grouping of the clients.

Floating-point addition rounds, so that a sum depends on its order, and so on the number of nodes that the clients are
divided among. Here no addition rounds. Each term, a weight times a number, is first rounded to a multiple of a power of
two, the grid, which is so coarse that float64 holds all partial sums exactly ("pre-rounding": Demmel and Nguyen,
"Parallel Reproducible Summation", IEEE Transactions on Computers 64(7), 2015). With at most 2^n terms, each below 2^e,
the grid is 2^(e + n - 53): all partial sums are multiples of it and at most 2^53 times as large.

The nodes and the server find e alone, of what all of them hold: the array that the server has sent, and the largest
weight. Terms beyond 2^e are rare, a client that diverges, or running statistics in the first round. They are added up
apart, in levels: level l > 0 holds the terms below 2^(e + l * STEP_BITS) that are in no lower level, on a grid of its
own. So the sums of all levels are exact, and the levels are added in their order, once, when the mean is made.
"""

import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.protocol.arrays import BLOCK, SharedArrays, blocks
from hyperfl_flwr.protocol.messages import Reduction, group_of

HEADROOM_BITS = 6
"""A client's numbers stay in level 0 while they are at most 2^6 times as large as the largest in the received array."""

STEP_BITS = 16
"""Binary orders of magnitude from one level to the next."""

LEAST_EXPONENT = -4
"""A received array counts as one with numbers of 2^-4 where they are smaller, zeros for example."""

MOST_LEVELS = 12
"""Level that no product of a float32 and an int64 exceeds."""

_MANTISSA_BITS = 53

Levels = dict[int, SharedArrays]
"""Sums by level, each in float64; level 0 has all arrays, the others those that need them."""


class ReproducibleSum:
    """A weighted sum over the clients of a round, or over some of them.

    Args:
        received: The shared arrays that all clients of the round received.
        reductions: How each shared group is reduced, which decides about the weights.
        num_clients: Number of clients N that are asked in the round, on all nodes together; no more may be added.
        max_num_examples: Training samples of the largest client, about: larger ones need a level more.

    Attributes:
        levels: The sums so far; empty at the start.
    """

    def __init__(
        self,
        received: SharedArrays,
        reductions: Mapping[str, Reduction],
        *,
        num_clients: int,
        max_num_examples: int,
    ) -> None:
        self.levels: Levels = {}
        self._received = received
        self._reductions = reductions
        self._max_num_examples = max_num_examples
        self._carry_bits = num_clients.bit_length()
        self._exponents: dict[str, int] = {}
        self._terms = np.empty(BLOCK)

    def add(self, arrays: SharedArrays, num_examples: int) -> None:
        """Add one client's arrays times its weights.

        Args:
            arrays: Finite arrays with the received ones' names and shapes.
            num_examples: Its training samples.
        """
        for key, value in arrays.items():
            self._level(0, key)
            weight = self._reductions[group_of(key)].weight(num_examples)
            for part, block in blocks(value):
                self._add_block(key, part, block, weight)

    def merge(self, levels: Mapping[int, SharedArrays]) -> None:
        """Add the sums over other clients of the same round."""
        for level, arrays in levels.items():
            for key, value in arrays.items():
                mine = self._level(level, key)
                np.add(mine, value.reshape(-1), out=mine)

    def take_mean(self, num_examples: int, num_clients: int) -> SharedArrays:
        """Return the sums divided as the reductions say, rounded once to the type that was received.

        The sums are given up one by one, so that no more memory is needed than for them.

        Args:
            num_examples: Training samples of all clients that were added.
            num_clients: Their number.
        """
        means: SharedArrays = {}
        for key in list(self.levels.get(0, {})):
            total, *others = [self.levels[level].pop(key) for level in sorted(self.levels) if key in self.levels[level]]
            for other in others:
                np.add(total, other, out=total)
            divisor = self._reductions[group_of(key)].divisor(num_examples, num_clients)
            means[key] = np.empty(self._received[key].shape, self._received[key].dtype)
            with np.errstate(over="ignore"):  # a sum of float32 may be too large for one
                for (_, mean), (_, block) in zip(blocks(means[key]), blocks(total), strict=True):
                    mean[:] = block / divisor
        return means

    def sums(self, level: int) -> SharedArrays:
        """Return the sums of a level in the shapes that were received, as views."""
        return {key: value.reshape(self._received[key].shape) for key, value in self.levels.get(level, {}).items()}

    def _level(self, level: int, key: str) -> NDArray[np.float64]:
        """Return the flat sums of an array in a level; zeros if there are none yet."""
        arrays = self.levels.setdefault(level, {})
        if key not in arrays:
            arrays[key] = zeros_in_pages(self._received[key].size)
        return arrays[key]

    def exponent(self, key: str) -> int:
        """Return e, such that usual terms of an array are below 2^e."""
        if key not in self._exponents:
            weight = self._reductions[group_of(key)].weight(self._max_num_examples)
            received = max(_largest(self._received[key]), 2.0 ** (LEAST_EXPONENT - 1))
            self._exponents[key] = _exponent_of(received) + _exponent_of(weight) + HEADROOM_BITS
        return self._exponents[key]

    def _add_block(self, key: str, part: slice, block: NDArray[Any], weight: float) -> None:
        exponent = self.exponent(key)
        if _largest(block) * weight < 2.0**exponent:
            self._put(0, key, part, block, weight)
            return
        levels = _levels_of(np.multiply(block, weight, dtype=np.float64), exponent)
        for level in np.unique(levels).tolist():
            self._put(level, key, part, np.where(levels == level, block, block.dtype.type(0)), weight)

    def _put(self, level: int, key: str, part: slice, block: NDArray[Any], weight: float) -> None:
        """Round the terms of a block to the grid of a level and add them."""
        grid = 2.0 ** (self.exponent(key) + level * STEP_BITS + self._carry_bits - _MANTISSA_BITS)
        terms = np.multiply(block, weight / grid, out=self._terms[: block.size], dtype=np.float64)
        np.rint(terms, out=terms)
        terms *= grid
        sums = self._level(level, key)[part]
        np.add(sums, terms, out=sums)


def zeros_in_pages(size: int) -> NDArray[np.float64]:
    """Return zeros; many are in memory pages of their own, which go back to the system when the array is not needed."""
    return np.frombuffer(mmap.mmap(-1, 8 * size), np.float64) if size > BLOCK else np.zeros(size)


def _largest(array: NDArray[Any]) -> float:
    """Return the largest magnitude of an array; 0 of an empty one."""
    return max(float(array.max()), -float(array.min())) if array.size else 0.0


def _exponent_of(number: float) -> int:
    """Return the least k with |number| < 2^k; 0 for 0."""
    return int(np.frexp(number)[1])


def _levels_of(terms: NDArray[np.float64], exponent: int) -> NDArray[np.integer[Any]]:
    """Return each term's level: 0 below 2^exponent, and one more for each `STEP_BITS` beyond, rounded up.

    Zeros are in level 0, since the exponent is positive.
    """
    exponents = np.frexp(terms)[1]
    levels: NDArray[np.integer[Any]] = np.maximum(0, -((exponent - exponents) // STEP_BITS))
    return levels
