"""Draw Gaussian noise for differential privacy from the operating system's random numbers."""

import os

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 2**20
"""Number of noise values to generate at a time."""


def random_bytes(size: int) -> bytearray:
    """Return unpredictable bytes: the stream of ChaCha20 under a key from the operating system that is used once."""
    from cryptography.hazmat.primitives.ciphers import Cipher  # deferred: few processes need it
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = bytearray(size)
    Cipher(ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor().update_into(bytes(size), stream)
    return stream


def gaussian(size: int, std: float) -> NDArray[np.float64]:
    """Return independent Gaussian values [size] as an array, float64; see `gaussian_tensor`."""
    values: NDArray[np.float64] = gaussian_tensor(size, std, torch.float64).numpy()
    return values


def gaussian_tensor(size: int, std: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw independent Gaussian values [size] from the operating system's random numbers (Box and Muller 1958).

    They do not depend on a seed: an attacker who knows a run's seed must not be able to subtract the noise. Lengths are
    computed in float64 for any type, from 53 random bits, so that the tails reach 8.6 standard deviations. Random bits
    are ChaCha20's (RFC 8439) under a key from the operating system, whose own bits come ten times slower.

    Args:
        size: Number of values.
        std: Standard deviation.
        dtype: Type of the values.
    """
    values = torch.empty(size, dtype=dtype)
    for start in range(0, size, CHUNK):
        part = values[start : start + CHUNK]
        half = (len(part) + 1) // 2
        # The upper 53 bits of each 64-bit integer, the precision of a float64.
        bits = np.frombuffer(random_bytes(16 * half), np.uint64) >> np.uint64(11)
        radius, angle = torch.from_numpy(bits.view(np.int64)).double().reshape(2, half)
        lengths = radius.add_(0.5).mul_(2.0**-53).log_().mul_(-2).sqrt_().mul_(std).to(dtype)  # + 0.5 avoids log(0)
        angles = angle.mul_(2 * np.pi * 2.0**-53).to(dtype)
        part[:half] = lengths * angles.cos()
        part[half:] = (lengths * angles.sin_())[: len(part) - half]
    return values
