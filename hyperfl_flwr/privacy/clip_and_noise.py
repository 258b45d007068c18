"""Clip a client's upload, and add Gaussian noise to it or to a sum of uploads.

The change that a client uploads is clipped to a norm C, and every coordinate gets independent noise of standard
deviation z C (McMahan, Ramage, Talwar, Zhang: "Learning Differentially Private Recurrent Language Models", ICLR 2018).
Small noise multipliers z, which defeat the attacks of this project at little cost, are not a meaningful guarantee of
differential privacy.

The sum of a floating-point number and floating-point noise gives away low-order bits of the number (Mironov: "On
Significance of the Least Significant Bits for Differential Privacy", CCS 2012). So values and noise v + x are released
on a grid of width g, as g (rint(v / g) + rint(x / g)), which depends on v through the integers rint(v / g) only. With
k = rint(v / g), k + rint(x / g) = rint(k + x / g): the release is the Gaussian mechanism on the vector g k, rounded
afterwards, and rounding is post-processing. There is one Gaussian in it, not a sum of rounded ones. Rounding v moves it
by at most g sqrt(P) / 2, for P coordinates, which `sensitivity` adds to C. The Gaussian itself has the 53 bits
of a float64, and is no larger than 8.7 standard deviations, which the stated guarantee neglects.
"""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 2**20
"""Number of noise values to generate at a time."""

_ATTEMPTS = 24
"""Number of attempts to shorten a change before it is dropped."""

Array = NDArray[Any]


def protect(
    received: Sequence[Array], trained: Sequence[Array], *, clip_norm: float, noise_multiplier: float
) -> list[Array]:
    """Return the protected arrays that a client uploads instead of its trained ones: new arrays of the same types.

    Without noise, the change that is uploaded has a norm of at most C, after the rounding to the arrays' types. With
    noise, every coordinate of the change gets noise of the standard deviation z `sensitivity`, slightly above z C, on a
    grid, see the module.

    Args:
        received: The shared arrays as received.
        trained: The same arrays after local training.
        clip_norm: Largest Euclidean norm C of the change over all arrays; above 0.
        noise_multiplier: Noise multiplier z, at least 0; 0 adds no noise.

    Raises:
        ValueError: If `clip_norm` is not positive or `noise_multiplier` is negative.
    """
    if clip_norm <= 0 or noise_multiplier < 0:
        raise ValueError(
            f"clip_norm must be above 0 and noise_multiplier at least 0, got {clip_norm} and {noise_multiplier}"
        )
    changes = [np.subtract(after, before, dtype=np.float64) for before, after in zip(received, trained, strict=True)]
    norm = _norm_bound(changes)
    if norm <= clip_norm and not noise_multiplier:
        return [after.copy() for after in trained]
    if norm > clip_norm:
        for change in changes:
            change *= clip_norm / norm
    if not noise_multiplier:
        return _rounded_within(received, changes, clip_norm)
    grid = grid_for(noise_multiplier * clip_norm, clip_norm)
    std = noise_multiplier * sensitivity(clip_norm, [(change.size, grid / 2) for change in changes])
    return [
        (before + noisy_on_grid(change, std, grid)).astype(before.dtype)
        for before, change in zip(received, changes, strict=True)
    ]


def _rounded_within(received: Sequence[Array], changes: Sequence[Array], clip_norm: float) -> list[Array]:
    """Return `received` plus `changes` in its types; shortens the changes until what is left has the norm."""
    factor = 1.0
    for attempt in range(_ATTEMPTS + 1):
        arrays = [(old + factor * change).astype(old.dtype) for old, change in zip(received, changes, strict=True)]
        moved = [np.subtract(new, old, dtype=np.float64) for old, new in zip(received, arrays, strict=True)]
        if (norm := _norm_bound(moved)) <= clip_norm:
            break
        # Where the types are too coarse for the norm, nothing is left in the end: the last factor is 0.
        factor *= clip_norm / norm * (1 - 2.0 ** (attempt + 1 - _ATTEMPTS))
    return arrays


def _norm_bound(changes: Sequence[Array]) -> float:
    """Return the joint norm of arrays, at least: float64 rounds each of the P terms by at most 2^-53 of the sum."""
    # One norm over all arrays together: clipping each array separately would allow a larger total change.
    square = sum(float(np.vdot(change, change)) for change in changes)
    return math.sqrt(square * (1 + 2.0**-52 * (sum(change.size for change in changes) + 8)))


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


def noisy_on_grid(values: Array, std: float, grid: float) -> NDArray[np.float64]:
    """Return values with Gaussian noise of a standard deviation, as multiples of the grid; see the module."""
    noisy = np.rint(values / grid)
    noisy += np.rint(gaussian(values.size, std).reshape(values.shape) / grid)
    noisy *= grid
    return noisy


def gaussian(size: int, std: float) -> NDArray[np.float64]:
    """Draw independent Gaussian values [size] from the operating system's random numbers (Box and Muller 1958).

    They do not depend on a seed: an attacker who knows a run's seed must not be able to subtract the noise.

    Args:
        size: Number of values.
        std: Standard deviation.
    """
    values = np.empty(size)
    for start in range(0, size, CHUNK):
        count = min(CHUNK, size - start)
        half = (count + 1) // 2
        # The upper 53 bits of each 64-bit integer, the precision of a float64.
        radius, angle = np.frombuffer(os.urandom(16 * half), np.uint64).reshape(2, half) >> np.uint64(11)
        lengths = std * np.sqrt(-2 * np.log((radius + 0.5) * 2.0**-53))  # + 0.5 avoids log(0)
        angles = 2 * np.pi * 2.0**-53 * angle
        pairs = np.concatenate([lengths * np.cos(angles), lengths * np.sin(angles)])
        values[start : start + count] = pairs[:count]
    return values
