"""Recognise samples again by digests of their values."""

import hashlib

import numpy as np
from numpy.typing import NDArray

Digests = NDArray[np.uint64]
"""Digests of samples [n], 8 bytes each, which tell a hundred million samples apart. They are no secret: whoever has a
sample can tell whether it is among them."""


def digests(samples: NDArray[np.float32]) -> Digests:
    """Return the digests of samples [n, ...], scaled but not normalised; equal values have equal digests."""
    found = [hashlib.blake2b(np.ascontiguousarray(sample).tobytes(), digest_size=8).digest() for sample in samples]
    return np.frombuffer(b"".join(found), np.uint64)
