"""The mean and standard deviation by which the targets of a regression are standardised."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LARGEST_TARGET = 1e15
"""Largest magnitude of a target, of a mean of targets and of their standard deviation; its inverse is the smallest
standard deviation. Standardised targets are finite in float32."""

Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each target."""


def scale_of(targets: npt.NDArray[np.float64]) -> Scale:
    """Return the scale of targets [n, K], of which there is at least one sample; a constant target is only shifted."""
    is_constant = targets.max(axis=0) == targets.min(axis=0)
    mean = np.where(is_constant, targets[0], targets.mean(axis=0))
    std = np.maximum(np.where(is_constant, 1.0, targets.std(axis=0)), 1 / LARGEST_TARGET)
    return tuple(mean.tolist()), tuple(std.tolist())


def scale_problem(mean: Sequence[float], std: Sequence[float]) -> str:
    """Return what is wrong with a scale; empty if nothing is."""
    if not all(abs(value) <= LARGEST_TARGET for value in mean):
        return f"the mean must be between -{LARGEST_TARGET:g} and {LARGEST_TARGET:g}"
    if not all(1 / LARGEST_TARGET <= value <= LARGEST_TARGET for value in std):
        return f"the standard deviation must be between {1 / LARGEST_TARGET:g} and {LARGEST_TARGET:g}"
    return ""


def standardised(targets: npt.NDArray[np.float64], scale: Scale) -> npt.NDArray[np.float32]:
    """Return targets [m, K] as networks predict them."""
    mean, std = (np.array(values) for values in scale)
    found: npt.NDArray[np.float32] = ((targets - mean) / std).astype(np.float32)
    return found
