"""Clip a client's upload, and add Gaussian noise to it or to a sum of uploads.

The change that a client uploads is clipped to a norm C, and every coordinate gets independent noise of standard
deviation z C (McMahan, Ramage, Talwar, Zhang: "Learning Differentially Private Recurrent Language Models", ICLR 2018).
Small noise multipliers z, which defeat the attacks of this project at little cost, are not a meaningful guarantee of
differential privacy.

Values with noise are multiples of a grid, so that no low-order bits give the change away
(`hyperfl_flwr.core.noise.grid_noise`).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.noise.grid_noise import grid_for, noisy_on_grid, sensitivity

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
