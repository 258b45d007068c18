"""Mask a node's vectors, release shares of their masks, and open the sum of all nodes.

Double masking: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017. Node
i adds to its vectors a mask of its own, generated from a secret b_i, and for every other node j a common mask,
generated from u_ij, with opposite signs on both sides. It sends them with shares of b_i and of every u_ij for all
nodes. When the server has all uploads that arrive, the nodes release their shares: of b_i for a node that has uploaded,
and of u_ij between such a node and one that has not. So there is no message before the training and one after it.
No secret outlives the step.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

from hyperfl_flwr.protocol.secure_sums.field import (
    ELEMENT_BYTES,
    combine,
    from_bytes,
    random_element,
    split,
    to_bytes,
    weights_at_zero,
)
from hyperfl_flwr.protocol.secure_sums.header import Header
from hyperfl_flwr.protocol.secure_sums.keys import agree, box_key, numbers_key, pair_secret, vector_key
from hyperfl_flwr.protocol.secure_sums.streams import add_stream

ID_BYTES = 16
"""Length of the identity of an upload, in bytes."""

_NONCE = bytes(12)
"""Nonce of every box; its key is derived from the upload's identity, and used once."""

TAG_BYTES = 16
"""Bytes by which a box is longer than its shares."""


class UnmaskError(ValueError):
    """A sum that cannot be opened: too few answers, or masks that do not cancel."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A header with its transcript.

    Attributes:
        header: The header.
        transcript: T, the SHA-256 of its bytes.
    """

    header: Header
    transcript: bytes

    @property
    def partitions(self) -> list[int]:
        """Numbers of the nodes, ascending."""
        return [node.partition for node in self.header.nodes]


@dataclass(frozen=True, kw_only=True, eq=False)
class Upload:
    """Masked vectors of one node.

    Attributes:
        id: Random identity [16].
        vector: Masked sum of its clients' encoded parameters, uint32 [P]; empty in an evaluation.
        numbers: Masked counts and metric sums, uint64 [K].
        boxes: Encrypted shares, by the number of the node that can open them.
    """

    id: bytes
    vector: NDArray[np.uint32]
    numbers: NDArray[np.uint64]
    boxes: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class Release:
    """A node's answer to UNMASK.

    Attributes:
        shares: For each node i that uploaded, by ascending number: the share of b_i, then of u_ij for each node j that
            did not upload, ascending, all encoded.
        bad: Numbers of the nodes with a box that does not open, or holds no shares; they have none here.
    """

    shares: Mapping[int, Sequence[bytes]]
    bad: Sequence[int] = ()


def position(partition: int) -> int:
    """Return the position at which a node holds its shares."""
    return partition + 1


def box_bytes(num_nodes: int) -> int:
    """Return the length of a box in a step of n nodes, in bytes: the shares of b_i and of n - 1 pair secrets."""
    return ELEMENT_BYTES * num_nodes + TAG_BYTES


def mask(
    vector: NDArray[np.uint32], numbers: NDArray[np.uint64], step: Step, partition: int, key: X25519PrivateKey
) -> Upload:
    """Mask a node's vectors in place, and share the secrets of the masks.

    Args:
        vector: Encoded parameters [P], contiguous.
        numbers: Encoded counts and metric sums [K], contiguous.
        step: The step; the receiver has checked it.
        partition: Number of the node.
        key: Its private key of the session.

    Raises:
        ValueError: If another node's public key is invalid.
    """
    upload = secrets.token_bytes(ID_BYTES)  # a message that is sent twice gets two uploads with unrelated masks
    holders = [position(other) for other in step.partitions]
    shared = {node.partition: agree(key, node.key) for node in step.header.nodes}
    mine = random_element()
    _add_masks(vector, numbers, mine, 1)
    parts = [split(mine, step.header.threshold, holders)]
    for other in step.partitions:
        if other != partition:
            pair = pair_secret(shared[other], step.transcript, partition, other)
            _add_masks(vector, numbers, pair, _sign(partition, other))
            parts.append(split(pair, step.header.threshold, holders))
    boxes = {}
    for holder in step.partitions:
        content = b"".join(to_bytes(part[position(holder)]) for part in parts)
        box = ChaCha20Poly1305(box_key(shared[holder], step.transcript, partition, holder, upload))
        boxes[holder] = box.encrypt(_NONCE, content, step.transcript)
    return Upload(id=upload, vector=vector, numbers=numbers, boxes=boxes)


def release(
    step: Step, partition: int, key: X25519PrivateKey, uploads: Mapping[int, bytes], boxes: Mapping[int, bytes]
) -> Release:
    """Open a node's boxes and return the shares that open the sum.

    The caller has checked the question, see `hyperfl_flwr.node.secure_sums`: a node must answer once in a step.

    Args:
        step: The step.
        partition: Number of the node.
        key: Its private key of the session.
        uploads: Identity of the upload of each node that uploaded, by number.
        boxes: Boxes of these nodes for this one; others are ignored.
    """
    gone = [other for other in step.partitions if other not in uploads]
    shares, bad = {}, []
    for sender in sorted(uploads):
        row = step.header.row(sender)
        if sender not in boxes or row is None:
            continue
        box = ChaCha20Poly1305(box_key(agree(key, row.key), step.transcript, sender, partition, uploads[sender]))
        try:
            content = box.decrypt(_NONCE, boxes[sender], step.transcript)
            found = [content[first : first + ELEMENT_BYTES] for first in range(0, len(content), ELEMENT_BYTES)]
            for share in found:
                from_bytes(share)
            others = [other for other in step.partitions if other != sender]
            pairs = dict(zip(others, found[1:], strict=True))
        except (InvalidTag, ValueError):
            bad.append(sender)
            continue
        shares[sender] = [found[0], *(pairs[other] for other in gone)]
    return Release(shares=shares, bad=bad)


@dataclass(kw_only=True)
class Opening:
    """The server's side of a step: adds uploads as they arrive, and opens their sum.

    Args:
        step: The step.
        size: Length P of the vector.
        num_numbers: Length K of the numbers.

    Attributes:
        uploads: Identity of each node's upload, by number.
    """

    step: Step
    size: int
    num_numbers: int
    uploads: dict[int, bytes] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Begin with sums of zero."""
        self._vector = np.zeros(self.size, np.uint32)
        self._numbers = np.zeros(self.num_numbers, np.uint64)
        self._boxes: dict[int, Mapping[int, bytes]] = {}

    def add(self, partition: int, upload: Upload) -> None:
        """Add a node's upload; a node has one.

        Raises:
            ValueError: If it does not fit the step, or the node has uploaded before; the sums are unchanged.
        """
        if partition in self.uploads or self.step.header.row(partition) is None:
            raise ValueError(f"node {partition} has uploaded before, or is not in this step")
        if len(upload.id) != ID_BYTES or upload.id in self.uploads.values():
            raise ValueError("the identity of the upload is invalid")
        if upload.vector.shape != self._vector.shape or upload.vector.dtype != np.uint32:
            raise ValueError(f"the masked vector must be uint32 [{self.size}], got {upload.vector.dtype}")
        if upload.numbers.shape != self._numbers.shape or upload.numbers.dtype != np.uint64:
            raise ValueError(f"the masked numbers must be uint64 [{self.num_numbers}], got {upload.numbers.dtype}")
        length = box_bytes(len(self.step.partitions))
        if list(upload.boxes) != self.step.partitions or any(len(box) != length for box in upload.boxes.values()):
            raise ValueError(f"there must be one box of {length} bytes for each node")
        np.add(self._vector, upload.vector, out=self._vector)
        np.add(self._numbers, upload.numbers, out=self._numbers)
        self.uploads[partition] = upload.id
        self._boxes[partition] = upload.boxes

    @property
    def can_open(self) -> bool:
        """Whether enough nodes have uploaded; otherwise nobody may be asked for shares."""
        return len(self.uploads) >= self.step.header.threshold

    def boxes_for(self, holder: int) -> dict[int, bytes]:
        """Return the boxes that a node can open, by the number of the node that sent them."""
        return {sender: boxes[holder] for sender, boxes in sorted(self._boxes.items())}

    def check_release(self, answer: Release) -> None:
        """Check that an answer has a share of every secret that is needed.

        Raises:
            ValueError: If it lacks one, or one is not an element of the field.
        """
        if sorted(answer.shares) != sorted(self.uploads):
            raise ValueError(f"the answer lacks shares; boxes that do not open: {list(answer.bad) or 'none'}")
        length = 1 + len(self.step.partitions) - len(self.uploads)
        for found in answer.shares.values():
            if len(found) != length:
                raise ValueError(f"there must be {length} shares for each node, got {len(found)}")
            for share in found:
                from_bytes(share)

    def open(self, answers: Mapping[int, Release]) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """Return the sums of the vectors and of the numbers; they can be opened once.

        Args:
            answers: Complete answers (`check_release`), by the number of the node; the first t are used.

        Raises:
            UnmaskError: If there are too few answers.
        """
        threshold = self.step.header.threshold
        if len(answers) < threshold:
            raise UnmaskError(f"{len(answers)} nodes answered, {threshold} are needed to open the sum")
        used = {position(holder): answer for holder, answer in list(answers.items())[:threshold]}
        weights = weights_at_zero(used)
        gone = [other for other in self.step.partitions if other not in self.uploads]
        for sender in self.uploads:
            for place, other in enumerate([sender, *gone]):
                shares = {holder: from_bytes(answer.shares[sender][place]) for holder, answer in used.items()}
                sign = 1 if other == sender else _sign(sender, other)
                _add_masks(self._vector, self._numbers, combine(shares, weights), -sign)
        return self._vector, self._numbers


def _sign(mine: int, other: int) -> int:
    """Return the sign with which a node adds the mask that it has in common with another one."""
    return 1 if other > mine else -1


def _add_masks(vector: NDArray[np.uint32], numbers: NDArray[np.uint64], secret: int, sign: int) -> None:
    add_stream(vector, vector_key(secret), sign)
    add_stream(numbers, numbers_key(secret), sign)
