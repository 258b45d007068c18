"""Encode clients' parameters as integers, so that sums modulo 2^32 are exact, and decode sums.

An array x of a group that is averaged is sent as its change v = x - x_received, one of a group that is summed as v = x.
It is encoded in a range that follows from what all nodes received: R = range * max(max |x_received|, 0.05). With the
weight w, in [0, 1], of a client

    q = rint(clip(w v / R, -w, w) 2^f),    f = 31 - ceil(log2(N + 1)),

for N clients in the step, so that the sum of N clients is below 2^31 in magnitude. Each client is rounded for itself:
the sum is an exact integer, the same for any number of nodes. Elements outside of the range are saturated, and the
number of them is part of the sum, so the server learns how many in all, but not of which client.

With noise on the sum, the range of all arrays is the clipping norm, and the integers leave room for the noise, see
`hyperfl_flwr.protocol.secure_sums.noise`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.protocol.arrays import BLOCK, SharedArrays, blocks
from hyperfl_flwr.protocol.messages import Reduction, group_of
from hyperfl_flwr.protocol.secure_sums.noise import SumNoise
from hyperfl_flwr.protocol.usual_sizes import GRADIENTS, LARGE_SIZE, USUAL_SIZE

FEWEST_BITS = 8
"""Least number f of fractional bits; with fewer, too many clients take part."""


def is_running_statistic(key: str) -> bool:
    """Return whether an array is a running statistic of BatchNorm."""
    return key.endswith(("running_mean", "running_var"))


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Fixed-point encoding of the arrays of a step; equal on all nodes and on the server.

    Args:
        received: The arrays that all clients of the step received and send back, float32 or float64.
        reductions: Reduction of each shared group; each must be summed.
        num_clients: Number N of clients in the step.
        max_examples: Number of training samples with the weight 1, where samples are weights.
        range: Range of an array's change, relative to the array that was received.
        least_range: Least range of an array's change, in the units of the array.
        noise: Noise that the nodes add to the sum; None for none.
        num_nodes: Number n of nodes in the step; only used with noise.

    Raises:
        ValueError: If an array is not of floats or not finite, a group is not summed, or there are too many clients;
            with noise also if clients have different weights.
    """

    received: SharedArrays
    reductions: Mapping[str, Reduction]
    num_clients: int
    max_examples: int
    range: float
    least_range: float = 0.0
    noise: SumNoise | None = None
    num_nodes: int = 1

    def __post_init__(self) -> None:
        """Check that the arrays can be encoded."""
        if self.num_clients < 1 or self.bits < FEWEST_BITS:
            raise ValueError(f"a sum has 1 to {2 ** (31 - FEWEST_BITS) - 1} clients, got {self.num_clients}")
        for key, value in self.received.items():
            if value.dtype.kind != "f":
                raise ValueError(f"{key} has type {value.dtype}; only floating point arrays can be summed")
            if not self._reduction(key).is_summed:
                raise ValueError(f"{key} is sent to the server for each client alone, so it cannot be summed")
            if self.noise and self._reduction(key) is not Reduction.MEAN:
                raise ValueError(f"{key} is no mean with equal weights, so noise on the sum does not protect clients")
            if not math.isfinite(self.magnitudes[key]):
                raise ValueError(f"{key} is not finite")

    @property
    def bits(self) -> int:
        """Number f of fractional bits."""
        return 31 - self.num_clients.bit_length()

    @property
    def size(self) -> int:
        """Number P of elements of all arrays."""
        return sum(value.size for value in self.received.values())

    @cached_property
    def magnitudes(self) -> Mapping[str, float]:
        """Largest magnitude of each received array; NaN or infinite if it is not finite."""
        # Two passes without copies, unlike np.abs(value).max().
        return {
            key: max(-float(value.min(initial=0.0)), float(value.max(initial=0.0)))
            for key, value in self.received.items()
        }

    @cached_property
    def largest(self) -> float:
        """Largest magnitude of an encoded element: 2^f, or with noise s C."""
        return self.noise.largest(self.num_clients, self.num_nodes) if self.noise else 2.0**self.bits

    def new_sum(self) -> NDArray[np.uint32]:
        """Return a vector of zeros [P]."""
        return np.zeros(self.size, np.uint32)

    def add(self, total: NDArray[np.uint32], arrays: SharedArrays, num_examples: int) -> int:
        """Add one client's encoded arrays to a sum, in place.

        Args:
            total: The sum so far [P].
            arrays: The client's arrays after training: finite, with the names and shapes of the received ones.
            num_examples: Number of the client's training samples.

        Returns:
            Number of elements that were saturated.
        """
        return self._combine(np.add, total, arrays, num_examples)

    def remove(self, total: NDArray[np.uint32], arrays: SharedArrays, num_examples: int) -> None:
        """Take a client's encoded arrays out of a sum again, in place; arguments as for `add`."""
        self._combine(np.subtract, total, arrays, num_examples)

    def cut_off(self, arrays: SharedArrays) -> dict[str, int]:
        """Return the number of elements of each of a client's arrays that `add` cuts off."""
        found = {}
        for key, received in self.received.items():
            change = np.asarray(arrays[key], np.float64)
            if self._reduction(key) is not Reduction.SUM:
                change = change - received
            found[key] = int(np.count_nonzero(np.abs(change) > self._ranges[key]))
        return found

    def _combine(self, operation: np.ufunc, total: NDArray[np.uint32], arrays: SharedArrays, num_examples: int) -> int:
        saturated = 0
        buffer, integers = np.empty(BLOCK), np.empty(BLOCK, np.int32)
        for key, sums in self._parts(total):
            reduction, received = self._reduction(key), self.received[key].reshape(-1)
            weight = self.weight(reduction, num_examples)
            limit = weight * self.largest
            scale = limit / self._ranges[key]
            for part, block in blocks(arrays[key]):
                terms, rounded = buffer[: block.size], integers[: block.size]
                terms[:] = block
                if reduction is not Reduction.SUM:
                    terms -= received[part]
                terms *= scale
                if max(-terms.min(), terms.max()) > limit:
                    saturated += int(np.count_nonzero(np.abs(terms) > limit))
                    np.clip(terms, -limit, limit, out=terms)
                np.rint(terms, out=terms)
                rounded[:] = terms
                operation(sums[part], rounded.view(np.uint32), out=sums[part])
        return saturated

    def decode(self, total: NDArray[np.uint32], num_clients: int, num_examples: int) -> SharedArrays:
        """Return the reduced arrays of a sum, in the types of the received ones.

        Args:
            total: The opened sum [P].
            num_clients: Number of clients in it, above 0.
            num_examples: Sum over them of their training samples, each at most `max_examples`.

        Raises:
            ValueError: If samples are weights, and so many clients cannot have this number of samples.
        """
        found: SharedArrays = {}
        buffer = np.empty(BLOCK)
        for key, sums in self._parts(total):
            reduction, received = self._reduction(key), self.received[key]
            factor = self.unit(key) * self._divided(reduction, num_clients, num_examples)
            mean = np.empty(received.size, received.dtype)
            for part, block in blocks(sums.view(np.int32)):
                values = np.multiply(block, factor, out=buffer[: block.size])
                if reduction is not Reduction.SUM:
                    values += received.reshape(-1)[part]
                mean[part] = values
            found[key] = mean.reshape(received.shape)
        return found

    def unit(self, key: str) -> float:
        """Return what one unit of the encoding is in an array; a client's elements are rounded by up to half of it."""
        return self._ranges[key] * (1.0 / self.largest)

    def weight(self, reduction: Reduction, num_examples: int) -> float:
        """Return the weight of a client, in [0, 1]."""
        if reduction is Reduction.MEAN_BY_EXAMPLES:
            return min(num_examples, self.max_examples) / self.max_examples
        return 1.0

    def _divided(self, reduction: Reduction, num_clients: int, num_examples: int) -> float:
        if reduction is Reduction.MEAN_BY_EXAMPLES:
            if not 0 < num_examples <= num_clients * self.max_examples:
                raise ValueError("the number of samples in the opened sum is impossible")
            return self.max_examples / num_examples
        return 1.0 / num_clients if reduction is Reduction.MEAN else 1.0

    def _reduction(self, key: str) -> Reduction:
        return self.reductions[group_of(key)]

    @cached_property
    def _ranges(self) -> dict[str, float]:
        """Range R of each array; with noise the clipping norm."""
        if self.noise:
            return dict.fromkeys(self.received, self.noise.clip_norm)
        found = {}
        for key in self.received:
            is_large = is_running_statistic(key) or group_of(key) in GRADIENTS
            least = LARGE_SIZE if is_large else USUAL_SIZE
            found[key] = max(self.range * max(self.magnitudes[key], least), self.least_range)
        return found

    def _parts(self, total: NDArray[np.uint32]) -> Iterator[tuple[str, NDArray[np.uint32]]]:
        """Yield the part of a vector that belongs to each array; the arrays are in the order of their names."""
        first = 0
        for key in sorted(self.received):
            yield key, total[first : first + self.received[key].size]
            first += self.received[key].size
