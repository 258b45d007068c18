"""Rotate clients' shared vectors with a secret rotation: obfuscation, not encryption.

Q = H D3 H P D2 H D1 with random signs D1, D2, D3, a random permutation P and the orthonormal Walsh-Hadamard transform
H: the fast rotations of Andoni, Indyk, Laarhoven, Razenshteyn and Schmidt, "Practical and Optimal LSH for Angular
Distance", NIPS 2015, with P added. For H, a vector of length m is divided into pieces, with the powers of two in m as
lengths, so that no padding is needed; P permutes across all pieces. The cost is O(m log m).

All clients of a run have the same key; the server does not have it. A linear method such as PRIV-HFL's dual averaging
works on rotated vectors as on the original ones. The rotation hides little. Lengths and inner products do not change.
Vectors that are known in both forms reveal Q: m of them by linear algebra, and simpler rotations need only one. Any
single client, which has the key, can reveal Q, too.
"""

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hyperfl_flwr.core.errors import ConfigError

SHORTEST_KEY = 16
"""Minimum length of a key file in bytes."""


def read_key(path: Path) -> bytes:
    """Return the content of a node's key file.

    Raises:
        ConfigError: If the file cannot be read, or is shorter than `SHORTEST_KEY`.
    """
    try:
        key = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the mixing-key-file {path} cannot be read: {error.strerror}; check its path and permissions",
            public="its mixing-key-file cannot be read",
        ) from None
    if len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"the mixing-key-file {path} must have at least {SHORTEST_KEY} bytes, got {len(key)}",
            public=f"its mixing-key-file must have at least {SHORTEST_KEY} bytes",
        )
    return key


def run_key(secret: bytes, experiment: str) -> bytes:
    """Return the key of one run, derived from the key file so that two runs have independent rotations."""
    # The length prefix makes the concatenation of secret and experiment unambiguous.
    return hashlib.sha256(len(secret).to_bytes(8, "big") + secret + experiment.encode()).digest()


class Mixing:
    """The rotation Q of vectors [m], determined by a key.

    Args:
        key: The run's key; the same key and length give the same Q on every machine.
        size: Length m of the vectors.

    Raises:
        ValueError: If the key is empty.
    """

    def __init__(self, key: bytes, size: int) -> None:
        if not key:
            raise ValueError("the key of a rotation must not be empty")
        self.size = size
        # Powers of two from the largest down: the binary digits of m.
        self.pieces = [2**bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
        self.signs = [_signs(key, number, size) for number in range(3)]
        self.order = _permutation(key, size)

    def mix(self, vector: Tensor) -> Tensor:
        """Return Q x [m] for x = `vector` [m], with its type and device.

        Raises:
            ValueError: If x has another length.
        """
        self._check(vector)
        first, second, third = self._signs_like(vector)
        found = (second * self._hadamard(first * vector))[self.order.to(vector.device)]
        return self._hadamard(third * self._hadamard(found))

    def unmix(self, vector: Tensor) -> Tensor:
        """Return Q^T x [m] for x = `vector` [m], the inverse of `mix`.

        Raises:
            ValueError: If x has another length.
        """
        self._check(vector)
        first, second, third = self._signs_like(vector)
        back = torch.empty_like(vector)
        back[self.order.to(vector.device)] = self._hadamard(third * self._hadamard(vector))
        return first * self._hadamard(second * back)

    def _check(self, vector: Tensor) -> None:
        if vector.shape != (self.size,):
            raise ValueError(f"the vector must have the shape ({self.size},), got {tuple(vector.shape)}")

    def _signs_like(self, vector: Tensor) -> list[Tensor]:
        return [signs.to(vector) for signs in self.signs]

    def _hadamard(self, vector: Tensor) -> Tensor:
        return torch.cat([_transform(piece) for piece in torch.split(vector, self.pieces)])


@lru_cache(maxsize=2)
def mixing_of(key: bytes, size: int) -> Mixing:
    """Return the rotation of a key; caches the last two, since every message builds its clients again."""
    return Mixing(key, size)


def _transform(vector: Tensor) -> Tensor:
    """Return the orthonormal Walsh-Hadamard transform of a vector; its length must be a power of two."""
    width = 1
    while width < len(vector):
        pairs = vector.view(-1, 2, width)
        vector = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], dim=1).flatten()
        width *= 2
    scaled: Tensor = vector * len(vector) ** -0.5
    return scaled


def _stream(key: bytes, label: str, length: int) -> bytes:
    return hashlib.shake_256(label.encode() + b"\0" + key).digest(length)


def _signs(key: bytes, number: int, size: int) -> Tensor:
    bits = np.unpackbits(np.frombuffer(_stream(key, f"signs-{number}", -(-size // 8)), np.uint8))[:size]
    return torch.from_numpy(1 - 2 * bits.astype(np.int8))


def _permutation(key: bytes, size: int) -> Tensor:
    # Sorting random 64-bit numbers; "<u8" fixes the byte order, so that all machines get the same permutation.
    values = np.frombuffer(_stream(key, "order", 8 * size), "<u8")
    return torch.from_numpy(np.argsort(values, kind="stable"))
