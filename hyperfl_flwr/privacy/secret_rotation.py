"""A secret rotation of what clients share: obfuscation, not encryption.

Q = H D3 H P D2 H D1 with random signs D1, D2, D3, a random permutation P and the orthonormal Walsh-Hadamard transform
H: the fast rotations of Andoni, Indyk, Laarhoven, Razenshteyn and Schmidt, "Practical and Optimal LSH for Angular
Distance", NIPS 2015, with P. A vector of length m is cut for H into pieces whose lengths are the powers of two in m, so
that nothing is padded; P goes across all pieces. O(m log m).

All clients of a run hold one key, the server does not. A linear method such as PRIV-HFL's dual averaging works on mixed
vectors as on others. What it hides is little. Lengths and inner products stay as they are. Vectors that are known in
both forms give Q away: m of them by linear algebra, and simpler rotations fall to a single one. So does any one client,
which has the key.
"""

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hyperfl_flwr.core.errors import ConfigError

SHORTEST_KEY = 16
"""Bytes."""


def read_key(path: Path) -> bytes:
    """Return the content of a node's key file.

    Raises:
        ConfigError: If the file cannot be read, or is shorter than `SHORTEST_KEY`.
    """
    try:
        key = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the mixing-key-file {path} cannot be read: {error.strerror}", public="its mixing-key-file cannot be read"
        ) from None
    if len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"the mixing-key-file {path} must have at least {SHORTEST_KEY} bytes, it has {len(key)}",
            public=f"its mixing-key-file must have at least {SHORTEST_KEY} bytes",
        )
    return key


def run_key(secret: bytes, experiment: str) -> bytes:
    """Return the key of one run, so that two runs with one file have nothing in common."""
    return hashlib.sha256(len(secret).to_bytes(8, "big") + secret + experiment.encode()).digest()


class Mixing:
    """The rotation Q of vectors [m] that a key decides.

    Args:
        key: The run's; the same key and length give the same Q on every machine.
        size: m.

    Raises:
        ValueError: If the key is empty.
    """

    def __init__(self, key: bytes, size: int) -> None:
        if not key:
            raise ValueError("a rotation needs a key")
        self.size = size
        self.pieces = [2**bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
        self.signs = [_signs(key, number, size) for number in range(3)]
        self.order = _permutation(key, size)

    def mix(self, vector: Tensor) -> Tensor:
        """Return Q x [m] in the type and on the device of x [m].

        Raises:
            ValueError: If x has another length.
        """
        self._check(vector)
        first, second, third = self._signs_like(vector)
        found = (second * self._hadamard(first * vector))[self.order.to(vector.device)]
        return self._hadamard(third * self._hadamard(found))

    def unmix(self, vector: Tensor) -> Tensor:
        """Return Q^T x [m], which undoes `mix`.

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
            raise ValueError(f"this rotation is of vectors of length {self.size}, got {tuple(vector.shape)}")

    def _signs_like(self, vector: Tensor) -> list[Tensor]:
        return [signs.to(vector) for signs in self.signs]

    def _hadamard(self, vector: Tensor) -> Tensor:
        return torch.cat([_transform(piece) for piece in torch.split(vector, self.pieces)])


@lru_cache(maxsize=2)
def mixing_of(key: bytes, size: int) -> Mixing:
    """Return the rotation of a key; the last two are kept, since every message builds its clients anew."""
    return Mixing(key, size)


def _transform(vector: Tensor) -> Tensor:
    """Return the orthonormal Walsh-Hadamard transform of a vector whose length is a power of two."""
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
    values = np.frombuffer(_stream(key, "order", 8 * size), "<u8")
    return torch.from_numpy(np.argsort(values, kind="stable"))
