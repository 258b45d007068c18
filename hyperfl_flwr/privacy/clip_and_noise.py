"""Clip a client's upload and add Gaussian noise, inside the node and before any sum.

The change that a client uploads is clipped to a norm C, and every coordinate gets independent noise of standard
deviation sigma C (McMahan, Ramage, Talwar, Zhang: "Learning Differentially Private Recurrent Language Models", ICLR
2018; here each client adds the noise). Small noise multipliers, which defeat the attacks of this project at little
cost, are not a meaningful guarantee of differential privacy. And noise that is rounded to floating point does not give
a strict guarantee (Mironov, CCS 2012).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.gaussian_noise import gaussian

Array = NDArray[Any]


def protect(
    received: Sequence[Array], trained: Sequence[Array], *, clip_norm: float, noise_multiplier: float
) -> list[Array]:
    """Return the protected arrays that a client uploads instead of its trained ones: new arrays of the same types.

    Args:
        received: The shared arrays as received.
        trained: The same arrays after local training.
        clip_norm: Largest Euclidean norm C of the change over all arrays; above 0.
        noise_multiplier: Noise multiplier sigma, at least 0; 0 adds no noise.

    Raises:
        ValueError: If `clip_norm` is not positive or `noise_multiplier` is negative.
    """
    if clip_norm <= 0 or noise_multiplier < 0:
        raise ValueError(
            f"clip_norm must be above 0 and noise_multiplier at least 0, got {clip_norm} and {noise_multiplier}"
        )
    # One norm over all arrays together: clipping each array separately would allow a larger total change.
    changes = [np.subtract(after, before, dtype=np.float64) for before, after in zip(received, trained, strict=True)]
    norm = math.sqrt(sum(float(np.vdot(change, change)) for change in changes))
    scale = min(1.0, clip_norm / norm) if norm else 1.0
    uploaded = []
    for before, change in zip(received, changes, strict=True):
        change *= scale
        if noise_multiplier:
            change += gaussian(change.size, noise_multiplier * clip_norm).reshape(change.shape)
        uploaded.append((before + change).astype(before.dtype))
    return uploaded
