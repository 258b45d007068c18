"""Steps of secure sums for tests: headers, keys and uploads of a few nodes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from hyperfl_flwr.protocol.secure_sums.header import Header, NodeRow, Phase, transcript_of
from hyperfl_flwr.protocol.secure_sums.keys import public_of
from hyperfl_flwr.protocol.secure_sums.masks import Opening, Release, Step, Upload, mask, release


def private_key(partition: int) -> X25519PrivateKey:
    """Return the key of a node, the same in every test."""
    return X25519PrivateKey.from_private_bytes(hashlib.sha256(f"node {partition}".encode()).digest())


def header_of(partitions: Sequence[int], threshold: int, number: int = 1, phase: Phase = "train") -> Header:
    """Return the header of a step with two clients on each node."""
    return Header(
        session="0123456789abcdef" * 2,
        experiment="fedcba9876543210",
        round=number,
        phase=phase,
        nodes=tuple(
            NodeRow(
                partition=one,
                key=public_of(private_key(one)),
                signature="",
                clients=(2 * one, 2 * one + 1),
                versions=(number - 1, 0),
            )
            for one in partitions
        ),
        threshold=threshold,
        max_examples=1000,
        metrics=("train-loss", "personalized-accuracy"),
        squares=False,
        settings="5e" * 32,
        arrays="a5" * 32,
    )


def step_of(header: Header) -> Step:
    """Return the step that nodes derive from a header's bytes."""
    return Step(header=header, transcript=transcript_of(header.to_bytes()))


@dataclass
class Nodes:
    """Nodes with random vectors.

    Attributes:
        step: The step that they take part in.
        size: Length of each vector.
        vectors: What each node masks, uint32 [size].
        numbers: What each node masks, uint64 [3].
    """

    step: Step
    size: int = 40
    vectors: dict[int, NDArray[np.uint32]] = field(init=False)
    numbers: dict[int, NDArray[np.uint64]] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        self.vectors = {one: rng.integers(0, 2**32, self.size, dtype=np.uint32) for one in self.step.partitions}
        self.numbers = {one: rng.integers(0, 2**64, 3, dtype=np.uint64) for one in self.step.partitions}

    def upload(self, partition: int) -> Upload:
        """Return a new upload of a node."""
        vector, numbers = self.vectors[partition].copy(), self.numbers[partition].copy()
        return mask(vector, numbers, self.step, partition, private_key(partition))

    def opening(self, partitions: Sequence[int]) -> Opening:
        """Return the server's side after the uploads of some nodes."""
        opening = Opening(step=self.step, size=self.size, num_numbers=3)
        for one in partitions:
            opening.add(one, self.upload(one))
        return opening

    def release(self, holder: int, opening: Opening) -> Release:
        """Return a node's answer to the server's question."""
        return release(self.step, holder, private_key(holder), opening.uploads, opening.boxes_for(holder))

    def sums(self, partitions: Sequence[int]) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """Return the sums of what some nodes mask, computed with Python's integers."""
        vectors = [sum(int(self.vectors[one][k]) for one in partitions) % 2**32 for k in range(self.size)]
        numbers = [sum(int(self.numbers[one][k]) for one in partitions) % 2**64 for k in range(3)]
        return np.array(vectors, np.uint32), np.array(numbers, np.uint64)
