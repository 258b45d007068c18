"""Add key streams to vectors of integers: the masks of secure sums.

A stream is ChaCha20's (RFC 8439, section 2.4) under a key that is used once, with nonce and counter 0; its bytes are
read as little-endian integers. Sums are modulo 2^32 or 2^64, by the vector's type.
"""

import sys

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

Vector = NDArray[np.uint32] | NDArray[np.uint64]
"""Integers to add streams to."""

CHUNK_BYTES = 1 << 18
"""Bytes of a stream that are generated at a time, so that they stay in the processor's cache."""

_NONCE = bytes(16)
"""The counter, 32 bits, and the nonce, 96 bits, as `cryptography` expects them."""

_LONGEST = 64 << 32
"""Length of a stream under one key and nonce, in bytes: a block has 64, and the counter 32 bits."""


def add_stream(vector: Vector, key: bytes, sign: int) -> None:
    """Add a key's stream to a vector in place, or subtract it.

    Args:
        vector: Contiguous uint32 or uint64 [n] of at most 2^38 bytes.
        key: 32 bytes that are used for this stream only.
        sign: 1 to add, -1 to subtract.

    Raises:
        ValueError: If the vector is of another kind, or too long.
    """
    if vector.dtype not in (np.uint32, np.uint64) or vector.ndim != 1 or not vector.flags.c_contiguous:
        raise ValueError(f"streams are added to contiguous vectors of uint32 or uint64, got {vector.dtype}")
    if vector.nbytes > _LONGEST:
        raise ValueError(f"a vector must have at most {_LONGEST} bytes, got {vector.nbytes}")
    if not vector.size:
        return
    encryptor = Cipher(ChaCha20(key, _NONCE), mode=None).encryptor()
    operation = np.add if sign == 1 else np.subtract
    size = min(CHUNK_BYTES, vector.nbytes)
    zeros, stream = bytes(size), bytearray(size)
    numbers = np.frombuffer(stream, vector.dtype)
    for first in range(0, vector.size, numbers.size):
        part = vector[first : first + numbers.size]
        encryptor.update_into(zeros[: part.nbytes] if part.size < numbers.size else zeros, stream)
        mask = numbers[: part.size]
        operation(part, mask.byteswap() if sys.byteorder == "big" else mask, out=part)
