"""Add Gaussian noise to values on a grid, so that what is released depends on integers only.

The sum of a floating-point number and floating-point noise gives away low-order bits of the number (Mironov: "On
Significance of the Least Significant Bits for Differential Privacy", CCS 2012). So values and noise v + x are released
on a grid of width g, as g (rint(v / g) + rint(x / g)), which depends on v through the integers rint(v / g) only. With
k = rint(v / g), k + rint(x / g) = rint(k + x / g): the release is the Gaussian mechanism on the vector g k, rounded
afterwards, and rounding is post-processing. There is one Gaussian in it, not a sum of rounded ones. Rounding v moves it
by at most g sqrt(P) / 2, for P coordinates, which `sensitivity` adds to C. The Gaussian itself has the 53 bits
of a float64, and is no larger than 8.7 standard deviations, which the stated guarantee neglects.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.noise.gaussian_noise import gaussian


def grid_for(std: float, largest: float) -> float:
    """Return the width of a grid for noise: the power of two at or below 2^-24 of the noise.

    Args:
        std: Standard deviation of the noise.
        largest: Largest magnitude of the values; the grid is so wide that all multiples are exact in float64.
    """
    return 2.0 ** max(math.frexp(std)[1] - 1 - 24, math.frexp(largest)[1] - 48)


def sensitivity(clip_norm: float, roundings: Iterable[tuple[int, float]]) -> float:
    """Return by how much, at most, one client with a change of at most C moves a vector that is rounded to a grid.

    Args:
        clip_norm: The norm C.
        roundings: For each array its number of elements, and the largest effect of rounding on how an element moves:
            g / 2 where the vector is the client's own, g where it is a sum, which is rounded with the client and
            without.
    """
    return clip_norm + math.sqrt(sum(size * rounding**2 for size, rounding in roundings))


def noisy_on_grid(values: NDArray[Any], std: float, grid: float) -> NDArray[np.float64]:
    """Return values with Gaussian noise of a standard deviation, as multiples of the grid; see the module."""
    noisy = np.rint(values / grid)
    noisy += np.rint(gaussian(values.size, std).reshape(values.shape) / grid)
    noisy *= grid
    noisy += 0.0  # -0.0 becomes 0.0: the sign of a zero would show the sign of a value that is rounded to 0
    return noisy
