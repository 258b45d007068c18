"""Derive independent random number generators from a seed and a purpose, such as (purpose, client, round).

No code below the apps uses a global random number generator, and no generator state is stored. Each use of random
numbers names its purpose. The same seed and purpose give the same numbers on every machine.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def seed_for(seed: int, *path: str | int) -> int:
    """Derive an independent seed for one purpose.

    Args:
        seed: The run's (or the data's) seed.
        *path: Purpose of the random numbers, for example ``("batches", client, round)``.

    Returns:
        An integer in [0, 2**63), equal on every platform and Python version.
    """
    text = repr((int(seed), *path)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def numpy_generator(seed: int, *path: str | int) -> np.random.Generator:
    """Return a numpy generator for one purpose, see `seed_for`."""
    return np.random.default_rng(seed_for(seed, *path))


def torch_generator(seed: int, *path: str | int) -> "torch.Generator":
    """Return a CPU torch generator for one purpose, see `seed_for`."""
    import torch  # deferred: data sets, which settings are checked against, are described without it

    return torch.Generator().manual_seed(seed_for(seed, *path))
