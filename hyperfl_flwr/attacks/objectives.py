"""Distances between a simulated and the observed reply, over all of their parts."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

Parts = Mapping[str, Tensor]
"""The parts of one reply, for example gradients by parameter name."""

Objective = Callable[[Parts, Parts], Tensor]
"""Maps a simulated and the observed reply to a scalar, 0 where they agree."""

_TINY = 1e-20


def cosine_distance(simulated: Parts, observed: Parts) -> Tensor:
    """Return 1 - <s, o> / (|s| |o|), in [0, 2], with all parts as one vector (Geiping et al. 2020, equation 4).

    It ignores the scale, so the factor of gradient clipping does not matter. A sum of one cosine per layer gives small
    layers as much weight as large ones, and its reconstructions are clearly worse.
    """
    inner = _sum((simulated[name] * observed[name]).sum() for name in observed)
    squared = _sum(simulated[name].square().sum() for name in observed) * _sum(
        observed[name].square().sum() for name in observed
    )
    return 1 - inner / (squared + _TINY).sqrt()


def relative_squared_error(simulated: Parts, observed: Parts) -> Tensor:
    """Return |s - o|^2 / |o|^2 (Zhu, Liu, Han 2019, equation 4, divided by the observed norm)."""
    error = _sum((simulated[name] - observed[name]).square().sum() for name in observed)
    return error / (_sum(observed[name].square().sum() for name in observed) + _TINY)


ObjectiveName = Literal["cosine", "squared"]

OBJECTIVES: Mapping[ObjectiveName, Objective] = {"cosine": cosine_distance, "squared": relative_squared_error}
"""Objectives by name."""


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()
