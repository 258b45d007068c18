"""Bitwise reproducible weighted sums over clients, independent of their order and of their grouping into nodes.

Floating-point addition rounds, so a sum depends on the order of its terms, and therefore on how clients are divided
among nodes. Here no addition rounds. Each term, a weight times a number, is first rounded to a multiple of a power of
two, the grid. The grid is so coarse that float64 holds all partial sums exactly ("pre-rounding": Demmel and Nguyen,
"Parallel Reproducible Summation", IEEE Transactions on Computers 64(7), 2015). With at most 2^n terms, each below 2^e,
the grid is 2^(e + n - 53): all partial sums are multiples of it and at most 2^53 times as large.

Nodes and server compute e independently, from values that all of them have: the array that the server has sent, and the
largest weight. Terms beyond 2^e are rare: they come from a client that diverges, or from running statistics in the
first round. They are summed separately, in levels. Level l > 0 holds the terms below 2^(e + l * STEP_BITS) that are in
no lower level, on a separate grid. So the sums of all levels are exact. The levels are added once, in ascending order,
when the mean is computed.
"""

import copy
import math
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.protocol.arrays import BLOCK, BlockArray, MatrixTotal, SharedArrays, Uploads, blocks
from hyperfl_flwr.protocol.messages import Reduction, group_of

HEADROOM_BITS = 6
"""Headroom of level 0: it holds numbers up to 2^6 times as large as the largest number in the received array."""

STEP_BITS = 16
"""Range of one level, in binary orders of magnitude."""

LEAST_EXPONENT = -4
"""Lower bound of the exponent of a received array: smaller numbers, zeros for example, count as 2^-4."""

MOST_LEVELS = 12
"""Upper bound of the levels: no product of a float32 and an int64 needs a higher one."""

_MANTISSA_BITS = 53

Part = slice | tuple[slice, slice]
"""Part of a flat array, or columns of a matrix."""

Levels = dict[int, SharedArrays]
"""Sums by level, in float64; level 0 has all arrays, the other levels only arrays with such large terms."""


class ReproducibleSum:
    """Weighted sum over all or some clients of a round.

    Args:
        received: The shared arrays that all clients of the round received.
        reductions: Reduction of each shared group, which determines the weights.
        num_clients: Number of clients in the round, on all nodes together; at most this many may be added.
        max_num_examples: Approximate number of training samples of the largest client; the terms of larger clients may
            need another level.

    Attributes:
        levels: The sums so far, up to date after `collect`; empty at the start.
        matrix_totals: What adds matrices to the sums of level 0, until `collect`.
    """

    def __init__(
        self, received: SharedArrays, reductions: Mapping[str, Reduction], *, num_clients: int, max_num_examples: int
    ) -> None:
        self.levels: Levels = {}
        self.matrix_totals: dict[str, MatrixTotal] = {}
        self._received = received
        self._reductions = reductions
        self._max_num_examples = max_num_examples
        self._carry_bits = num_clients.bit_length()
        self._exponents: dict[str, int] = {}
        self._terms = np.empty(BLOCK)

    def add(self, arrays: Uploads, num_examples: int) -> None:
        """Add one client's arrays, multiplied by its weights.

        Args:
            arrays: Finite arrays with the names and shapes of the received ones.
            num_examples: Number of the client's training samples.
        """
        for key, value in arrays.items():
            self._level(0, key)
            weight = self._reductions[group_of(key)].weight(num_examples)
            if isinstance(value, np.ndarray):
                for part, block in blocks(value):
                    self._add_block(key, part, block, weight)
            else:
                self._add_columns(key, value, weight)

    def _add_columns(self, key: str, value: BlockArray, weight: float) -> None:
        """Add a matrix block by block; the sums are those of the formed matrix."""
        if value.bound * weight < 2.0 ** self.exponent(key):
            if key not in self.matrix_totals:
                self.matrix_totals[key] = value.new_total(self._level(0, key).reshape(value.shape))
            grid = self._grid(key, 0)
            self.matrix_totals[key].add(value, weight / grid, grid)
            return
        for columns, block in value.columns():
            self._add_block(key, (slice(None), columns), block, weight)

    def levels_of(self, arrays: SharedArrays, num_examples: int) -> Levels:
        """Return the sums that one client alone would have, without adding it; see `add`."""
        alone = copy.copy(self)
        alone.levels, alone.matrix_totals = {}, {}
        alone.add(arrays, num_examples)
        alone.collect()
        return alone.levels

    def collect(self) -> None:
        """Bring the sums of level 0 up to date; exact, as all sums of level 0."""
        while self.matrix_totals:
            _, total = self.matrix_totals.popitem()
            total.finish()

    def merge(self, levels: Mapping[int, SharedArrays]) -> None:
        """Add the sums over other clients of the same round; exact, so the order of merges has no effect."""
        for level, arrays in levels.items():
            for key, value in arrays.items():
                total = self._level(level, key)
                np.add(total, value.reshape(-1), out=total)

    def take_mean(self, num_examples: int, num_clients: int) -> SharedArrays:
        """Return the sums divided according to the reductions, rounded once to the received types.

        Each sum is removed before the next one is divided, so that the peak memory is that of the sums.

        Args:
            num_examples: Number of training samples of all added clients.
            num_clients: Number of added clients.
        """
        means: SharedArrays = {}
        for key in list(self.levels.get(0, {})):
            total = self._take_total(key)
            divisor = self._reductions[group_of(key)].divisor(num_examples, num_clients)
            means[key] = np.empty(self._received[key].shape, self._received[key].dtype)
            with np.errstate(over="ignore"):  # a sum of float32 numbers may overflow float32
                for (_, mean), (_, block) in zip(blocks(means[key]), blocks(total), strict=True):
                    mean[:] = block / divisor
        return means

    def take_changes(self, num_clients: int) -> SharedArrays:
        """Return the sums of the clients' changes in float64, of groups in which all clients have the weight 1.

        Args:
            num_clients: Number of added clients.
        """
        changes: SharedArrays = {}
        for key in list(self.levels.get(0, {})):
            total = self._take_total(key)
            for (_, part), (_, block) in zip(blocks(total), blocks(self._received[key]), strict=True):
                np.subtract(part, np.multiply(block, num_clients, dtype=np.float64), out=part)
            changes[key] = total.reshape(self._received[key].shape)
        return changes

    def rounding(self, key: str, change: float) -> float:
        """Return how far a client of weight 1 can move an element of `take_changes`, more than by its own change.

        With and without the client, the levels, the total and the difference are rounded: each of these by at most two
        units of the highest level's grid, and the client's own term by half of one.

        This holds for sums of any origin that `refuse_large` accepts.

        Args:
            key: The array.
            change: Largest magnitude of an element's change.
        """
        return 16 * self._grid(key, self._highest_level(key, change))

    def refuse_large(self, levels: Mapping[int, SharedArrays], num_clients: int, change: float) -> None:
        """Refuse sums that no clients of weight 1 can have, if none changes an array by more than some norm.

        What remains is exact in float64 together with all other such sums: of magnitudes that the levels hold, and on
        their grids. Larger terms, or terms between two points of a grid, would round away other clients' changes, or
        carry them over to a whole unit of a large sum.

        Args:
            levels: Sums by level, as for `merge`.
            num_clients: Number of clients in them.
            change: Largest Euclidean norm of a client's change, over all arrays.

        Raises:
            ValueError: If there are such sums.
        """
        square, slack = 0.0, 0.0
        for key in self._received:
            highest = self._highest_level(key, change)
            total = np.multiply(self._received[key].reshape(-1), -num_clients, dtype=np.float64)
            for level in sorted(level for level, arrays in levels.items() if key in arrays):
                value, grid = levels[level][key].reshape(-1), self._grid(key, level)
                if level > highest:
                    raise ValueError(f"its sum of {key} has terms that clipped changes cannot have (level {level})")
                if _largest(value) > num_clients * 2.0 ** (self.exponent(key) + level * STEP_BITS):
                    raise ValueError(f"its sum of {key} is too large for level {level} of {num_clients} clients")
                if not np.array_equal(np.rint(value / grid) * grid, value):
                    raise ValueError(f"its sum of {key} is not on the grid of level {level}")
                np.add(total, value, out=total)
            square += float(np.dot(total, total))
            slack += total.size * (num_clients * self._grid(key, highest)) ** 2
        largest = num_clients * change
        if not math.sqrt(square) <= largest * (1 + 2.0**-20) + math.sqrt(slack):
            raise ValueError(
                f"its {num_clients} clients have changed by a norm of {math.sqrt(square):.3g} in sum, more than "
                f"{num_clients} times privacy.clip-norm = {change:g}"
            )

    def _highest_level(self, key: str, change: float) -> int:
        """Return the highest level that terms of weight 1 need, of which none differs by more from what was sent."""
        largest = np.array([_largest(self._received[key]) + change])
        return int(_levels_of(largest, self.exponent(key))[0])

    def _take_total(self, key: str) -> NDArray[np.float64]:
        """Remove the sums of an array, and return their total."""
        self.collect()
        # Only these additions round; the ascending order of the levels makes the result reproducible.
        total, *others = [self.levels[level].pop(key) for level in sorted(self.levels) if key in self.levels[level]]
        for other in others:
            np.add(total, other, out=total)
        return total

    def sums(self, level: int) -> SharedArrays:
        """Return the sums of a level in the received shapes, as views."""
        self.collect()
        return {key: value.reshape(self._received[key].shape) for key, value in self.levels.get(level, {}).items()}

    def _level(self, level: int, key: str) -> NDArray[np.float64]:
        """Return the flat sums of an array in a level; creates zeros if there are none yet."""
        arrays = self.levels.setdefault(level, {})
        if key not in arrays:
            arrays[key] = zeros_in_pages(self._received[key].size)
        return arrays[key]

    def exponent(self, key: str) -> int:
        """Return e, where the usual terms of an array are below 2^e."""
        if key not in self._exponents:
            weight = self._reductions[group_of(key)].weight(self._max_num_examples)
            received = max(_largest(self._received[key]), 2.0 ** (LEAST_EXPONENT - 1))
            self._exponents[key] = _exponent_of(received) + _exponent_of(weight) + HEADROOM_BITS
        return self._exponents[key]

    def _add_block(self, key: str, part: Part, block: NDArray[Any], weight: float) -> None:
        exponent = self.exponent(key)
        if _largest(block) * weight < 2.0**exponent:
            self._put(0, key, part, block, weight)
            return
        levels = _levels_of(np.multiply(block, weight, dtype=np.float64), exponent)
        for level in np.unique(levels).tolist():
            self._put(level, key, part, np.where(levels == level, block, block.dtype.type(0)), weight)

    def _put(self, level: int, key: str, part: Part, block: NDArray[Any], weight: float) -> None:
        """Round the terms of a block to the grid of a level and add them to a part of the flat or shaped sums."""
        # Dividing by the grid, rounding to an integer and multiplying back is exact: the grid is a power of two.
        grid = self._grid(key, level)
        if block.size > self._terms.size:
            self._terms = np.empty(block.size)
        terms = np.multiply(block, weight / grid, out=self._terms[: block.size].reshape(block.shape), dtype=np.float64)
        np.rint(terms, out=terms)
        terms *= grid
        flat = self._level(level, key)
        sums = flat[part] if block.ndim == 1 else flat.reshape(self._received[key].shape)[part]
        np.add(sums, terms, out=sums)

    def _grid(self, key: str, level: int) -> float:
        """Return the width of the grid to which the terms of a level are rounded."""
        return 2.0 ** (self.exponent(key) + level * STEP_BITS + self._carry_bits - _MANTISSA_BITS)


def zeros_in_pages(size: int) -> NDArray[np.float64]:
    """Return zeros; large arrays use separate memory pages, which return to the system when the array is freed."""
    return np.frombuffer(mmap.mmap(-1, 8 * size), np.float64) if size > BLOCK else np.zeros(size)


def _largest(array: NDArray[Any]) -> float:
    """Return the largest magnitude of an array; 0 for an empty one."""
    return max(float(array.max()), -float(array.min())) if array.size else 0.0


def _exponent_of(number: float) -> int:
    """Return the least k with |number| < 2^k; 0 for 0."""
    return int(np.frexp(number)[1])


def _levels_of(terms: NDArray[np.float64], exponent: int) -> NDArray[np.integer[Any]]:
    """Return the level of each term: 0 below 2^exponent, and one more for each `STEP_BITS` above it, rounded up.

    Zeros are in level 0, since the exponent is positive.
    """
    exponents = np.frexp(terms)[1]
    # Minus the floor of the negated quotient is the ceiling.
    levels: NDArray[np.integer[Any]] = np.maximum(0, -((exponent - exponents) // STEP_BITS))
    return levels
