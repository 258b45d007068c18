"""Randomise numbers by staircase randomised response, a mechanism of local differential privacy.

Varun, Feng, Wang, Sural, Hong: "Towards Accurate and Stronger Local Differential Privacy for Federated Learning with
Staircase Randomized Response", CODASPY 2024. A number is rounded to a grid of D = 2 r 10^p + 1 points with the spacing
10^-p and the centre c, and is replaced by a point of the grid. The points are ordered by their distance from the number
and divided into m groups of g_j = g_1 + (j - 1) d points. Each point of group j has the probability

    a_j = a_min (e^epsilon - (j - 1) (e^epsilon - 1) / (m - 1)),
    a_min = (m - 1) / ((m - 1) D e^epsilon - (e^epsilon - 1) sum_j (j - 1) g_j),

so that the probabilities of a result for any two numbers differ by a factor of e^epsilon at most. That is epsilon for
ONE number: all numbers of a client together have epsilon times their number. Numbers beyond c - r and c + r count as
the nearest end of the grid. The expected result for a number away from c is nearer to c than the number.

Here all probabilities are integers over a common total, and a result is chosen by one uniform integer below it, from
the operating system's random numbers. So the factor holds exactly: nothing rounds after the number has been rounded to
the grid, and a result has the bits of its point alone. Of two points at the same distance the lower one is first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.noise.gaussian_noise import CHUNK, random_bytes

Bits = Callable[[int], NDArray[np.uint64]]
"""Function that returns the given number of independent uniform 64-bit integers."""

LARGEST_EPSILON = 20.0
"""Largest epsilon of a number for which integer probabilities keep the ratio of the real ones to 1 / 2000."""

MOST_POINTS = 2**20
"""Largest number of points of a grid."""

_TOTAL = 2.0**60
"""Upper bound of the sum of the integer probabilities; at most one of 16 uniform integers is rejected."""


@dataclass(frozen=True, kw_only=True)
class Staircase:
    """The mechanism for one number.

    Attributes:
        epsilon: Bound of the logarithm of the ratio of two probabilities of a result; above 0, at most 20.
        radius: Distance r of the ends of the grid from its centre, above 0; rounded to a multiple of 10^-p.
        centre: Centre c of the grid.
        precision: Number p of decimal places of the grid's spacing, from 0 to 12.
        groups: Number m of groups, at least 2.
        growth: Number d of points by which each group is larger than the one before, at least 0.

    Raises:
        ValueError: If a number is out of range, the grid has fewer points than groups or too many, or a group is empty.
    """

    epsilon: float
    radius: float
    centre: float = 0.0
    precision: int = 4
    groups: int = 10
    growth: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.epsilon <= LARGEST_EPSILON and math.isfinite(self.centre) and 0 <= self.precision <= 12):
            raise ValueError(
                f"epsilon must be above 0 and at most {LARGEST_EPSILON:g}, the centre finite and the precision from 0 "
                f"to 12, got {self.epsilon}, {self.centre} and {self.precision}"
            )
        if not 0 < self.radius * 10.0**self.precision < MOST_POINTS / 2 or self.half < 1:
            raise ValueError(
                f"the grid must have at least 3 and at most {MOST_POINTS} points, got the radius {self.radius} with "
                f"{self.precision} decimal places"
            )
        if self.groups < 2 or self.growth < 0 or min(self.group_sizes) < 1:
            raise ValueError(
                f"{self.groups} groups, each {self.growth} points larger than the one before, cannot divide "
                f"{self.size} points; at least 2 groups are needed, and each needs at least one point"
            )

    @property
    def half(self) -> int:
        """Number of points on either side of the centre."""
        return round(self.radius * 10.0**self.precision)

    @property
    def size(self) -> int:
        """Number D of points."""
        return 2 * self.half + 1

    @cached_property
    def group_sizes(self) -> NDArray[np.int64]:
        """Number of points of each group [m]; the sizes are rounded so that they add up to D."""
        first = self.size / self.groups - (self.groups - 1) * self.growth / 2
        counts = np.arange(1, self.groups)
        ends = np.rint(counts * first + self.growth * counts * (counts - 1) / 2)
        return np.diff(np.concatenate([[0.0], ends, [float(self.size)]])).astype(np.int64)

    @cached_property
    def shares(self) -> NDArray[np.int64]:
        """Probability of each point of a group [m], as an integer share of `total`; falls from group to group."""
        least = int(_TOTAL / (self.size * math.exp(self.epsilon)))
        # Rounded down: the ratio of the first to the last is below e^epsilon whatever the error of `exp`.
        rise = int(math.expm1(self.epsilon) * (1 - 2.0**-40) * least)
        steps = self.groups - 1
        return np.array([least + rise * (steps - number) // steps for number in range(self.groups)], np.int64)

    @cached_property
    def total(self) -> int:
        """Sum of the shares of all points."""
        return int(np.dot(self.group_sizes, self.shares))

    def nearest(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the number of the nearest point, from 0 to D - 1, of each value; NaN counts as the centre."""
        scaled = np.rint((np.asarray(values, np.float64) - self.centre) * 10.0**self.precision)
        bounded = np.clip(np.nan_to_num(scaled, nan=0.0, posinf=np.inf, neginf=-np.inf), -self.half, self.half)
        found: NDArray[np.int64] = bounded.astype(np.int64) + self.half
        return found

    def point_at(self, nearest: NDArray[np.int64], place: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the points that have some places, from 0, in the order by distance from `nearest` points."""
        left, right = nearest, self.size - 1 - nearest
        paired = 2 * np.minimum(left, right)
        around = nearest + np.where(place % 2, -(place + 1) // 2, place // 2)
        beyond = np.where(left < right, place, self.size - 1 - place)
        return np.where(place <= paired, around, beyond)

    def places(self, count: int, bits: Bits | None = None) -> NDArray[np.int64]:
        """Return independent random places, from 0, in the order by distance.

        Args:
            count: Number of places.
            bits: Source of random bits, for tests; None for the operating system's.
        """
        drawn = _below(self.total, count, bits or _bits)
        sizes, shares = self.group_sizes, self.shares
        first_place = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        first_share = np.concatenate([[0], np.cumsum(sizes * shares)[:-1]])
        group = np.searchsorted(first_share, drawn, side="right") - 1
        found: NDArray[np.int64] = first_place[group] + (drawn - first_share[group]) // shares[group]
        return found

    def randomise(self, values: NDArray[Any], bits: Bits | None = None) -> NDArray[Any]:
        """Return randomised values: a new array of the same shape and type, of points of the grid alone.

        Args:
            values: Numbers of a floating-point type.
            bits: Source of random bits, for tests; None for the operating system's.

        Raises:
            ValueError: If the numbers are of another type, whose values the grid does not have.
        """
        if values.dtype.kind != "f":
            raise ValueError(f"only floating-point numbers can be randomised, got {values.dtype}")
        flat = values.reshape(-1)
        result = np.empty_like(flat)
        for start in range(0, flat.size, CHUNK):
            part = slice(start, start + CHUNK)
            nearest = self.nearest(flat[part])
            points = self.point_at(nearest, self.places(nearest.size, bits))
            result[part] = self.centre + (points - self.half) / 10.0**self.precision
        return result.reshape(values.shape)


def _below(limit: int, count: int, bits: Bits) -> NDArray[np.int64]:
    """Return independent uniform integers from 0 to `limit` - 1, without bias; `limit` is at most 2^60."""
    accepted = 2**64 // limit * limit
    found = bits(count)
    while (rejected := np.flatnonzero(found > np.uint64(accepted - 1))).size:
        found[rejected] = bits(rejected.size)
    return (found % np.uint64(limit)).astype(np.int64)


def _bits(count: int) -> NDArray[np.uint64]:
    return np.frombuffer(random_bytes(8 * count), np.uint64)
