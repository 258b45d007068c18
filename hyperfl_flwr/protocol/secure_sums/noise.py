"""Add noise to a secure sum as shares of its nodes, so that nobody, the server included, sees the sum with less.

A client's change v, of a norm of at most C over all arrays, is encoded as q = rint(s v), with one scale s for all
arrays. With P elements the norm of q is at most C_q = s C + sqrt(P) / 2. Each of the n nodes adds independent discrete
Gaussians of the standard deviation z C_q / sqrt(G) to its vector. Every sum that can be opened has at least G shares
that an attacker does not know (`unknown_nodes` in `hyperfl_flwr.protocol.secure_sums.thresholds`), of the standard
deviation z C_q together, whoever has dropped out.

A sum of discrete Gaussians is nearly one: with standard deviations of at least 1000, their divergence is below
exp(-10^6) (Kairouz, Liu, Steinke: "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation", ICML 2021). So a round satisfies zero-concentrated privacy with rho = 1 / (2 z^2). The sum modulo 2^32,
and the mean, are post-processing.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.noise.discrete_gaussian import discrete_gaussian
from hyperfl_flwr.protocol.arrays import SharedArrays, blocks

LEAST_STD = 1000.0
"""Smallest standard deviation of a node's share, in units of the encoding."""

DEVIATIONS = 8
"""Number of standard deviations of the noise that fit beside the largest sum of changes."""

CHUNK = 1 << 20
"""Number of elements for which noise is drawn at a time."""

TOLERANCE = 1e-9
"""Relative tolerance of a client's norm, which is measured in float64."""

MOST_ROUNDING = 1.1
"""Largest factor by which the rounding to integers may raise the sensitivity; with more, the sum could overflow."""

_ROUNDING = 0.5 + 2.0**-20
"""Largest difference between s v in float64, of which the magnitude is below 2^31, and its rounded value."""


@dataclass(frozen=True, kw_only=True)
class SumNoise:
    """Noise on the sum of a step's changes.

    Attributes:
        clip_norm: Largest norm C of a client's change, over all arrays.
        multiplier: Standard deviation z of the noise on the sum, in units of C.
    """

    clip_norm: float
    multiplier: float

    def largest(self, num_clients: int, num_nodes: int) -> float:
        """Return s C, the largest magnitude of an encoded element, for which no sum reaches 2^31.

        Args:
            num_clients: Number N of clients in the step.
            num_nodes: Number n of nodes in the step.
        """
        deviations = DEVIATIONS * self.multiplier * math.sqrt(num_nodes)
        return (2.0**31 - 2 * num_clients) / (num_clients + deviations)  # each client is rounded by up to a half

    def share(self, largest: float, size: int, unknown: int) -> float:
        """Return the standard deviation of a node's share, in units of the encoding.

        Args:
            largest: The result of `largest`.
            size: Number P of elements of all arrays.
            unknown: Number G of shares in any sum that can be opened which an attacker does not know, above 0.

        Raises:
            ValueError: If the integers are too coarse for the noise.
        """
        sensitivity = largest * (1 + TOLERANCE) + _ROUNDING * math.sqrt(size)
        share = self.multiplier * sensitivity / math.sqrt(unknown)
        if share < LEAST_STD:
            raise ValueError(
                f"privacy.noise-multiplier = {self.multiplier:g} is too small for noise=sum: a node's share of the "
                f"noise must have a standard deviation of {LEAST_STD:g} units of the sum, got {share:.3g}; raise it"
            )
        if sensitivity > MOST_ROUNDING * largest:
            raise ValueError(
                f"privacy.noise-multiplier = {self.multiplier:g} is too large for noise=sum with {size} parameters: "
                f"the sums have 32 bits, of which the noise leaves too few for the changes; lower it"
            )
        return share

    def refuse_long(self, arrays: SharedArrays, received: SharedArrays) -> None:
        """Refuse a client's arrays of which the change is longer than the clipping norm.

        Args:
            arrays: The client's arrays after training.
            received: The arrays that it received.

        Raises:
            ValueError: Naming both norms.
        """
        square = 0.0
        for key, value in arrays.items():
            before = received[key].reshape(-1)
            for part, block in blocks(value):
                change = np.subtract(block, before[part], dtype=np.float64)
                square += float(np.dot(change, change))
        if not math.sqrt(square) <= self.clip_norm * (1 + TOLERANCE):
            raise ValueError(
                f"the change of a client must have a norm of at most privacy.clip-norm = {self.clip_norm:g}, got "
                f"{math.sqrt(square):g}"
            )


def add_noise(vector: NDArray[np.uint32], std: float) -> None:
    """Add independent discrete Gaussians to a vector in place, modulo 2^32.

    Args:
        vector: The vector [P].
        std: Standard deviation, see `discrete_gaussian`.
    """
    for first in range(0, vector.size, CHUNK):
        part = vector[first : first + CHUNK]
        np.add(part, discrete_gaussian(part.size, std).astype(np.uint32), out=part)  # wraps
