"""Records of secure sums in messages: the session, a step's header, a node's upload, and the question for shares.

With `secagg.enabled`, the handshake's request holds the session, and its reply the node's key (`KEY`, `SIGNATURE` in
the properties). TRAIN and EVALUATE hold the header in `SECURE`, besides the records of a plain message. The reply holds
only `SECURE` and, after training, `MASKED`: a node's masked sums, its shares in boxes, and which clients finished.
`UNMASK` is the one additional message of a step. It needs neither arrays nor data.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from numpy.typing import NDArray

from hyperfl_flwr.protocol.messages import record_of
from hyperfl_flwr.protocol.packing import names_in, pack_arrays, unpack_arrays
from hyperfl_flwr.protocol.secure_sums.field import ELEMENT_BYTES
from hyperfl_flwr.protocol.secure_sums.header import Header, transcript_of
from hyperfl_flwr.protocol.secure_sums.masks import Release, Step, Upload

UNMASK = "query.unmask"
"""Message type of the question for shares."""

SECURE, MASKED = "secure", "masked"
"""Names of the records: of bytes and ids, and of the masked vector."""

KEY, SIGNATURE = "secure-key", "secure-signature"
"""Handshake properties: the node's public key of the session, and its identity's signature of that key."""

VECTOR = "sum/masked"
"""Key of the masked vector, uint32 [P]."""

_IN_REPLY = {"transcript", "finished", "failed", "upload", "numbers", "holders", "boxes"}
_IN_RELEASE = {"question", "senders", "shares", "bad"}


def handshake_request(session: str) -> RecordDict:
    """Return the content of the handshake's request: the session, or nothing if sums are not secure."""
    return RecordDict({SECURE: ConfigRecord({"session": session})} if session else {})


def session_in(content: RecordDict) -> str:
    """Return the session of the handshake's request; empty if sums are not secure.

    Raises:
        ValueError: If it is not 32 hexadecimal digits: it becomes part of a path on the node's disk.
    """
    if SECURE not in content:
        return ""
    session = record_of(content, SECURE, ConfigRecord).get("session")
    if not (isinstance(session, str) and len(session) == 32 and not set(session) - set("0123456789abcdef")):
        raise ValueError("the session must be 32 hexadecimal digits")
    return session


def header_record(header: bytes) -> ConfigRecord:
    """Pack the header of a TRAIN or EVALUATE message."""
    return ConfigRecord({"header": header})


def step_in(content: RecordDict) -> Step:
    """Return the step of a TRAIN, EVALUATE or UNMASK message.

    Raises:
        ValueError: If there is no valid header.
    """
    data = record_of(content, SECURE, ConfigRecord).get("header")
    if not isinstance(data, bytes):
        raise ValueError("the message holds no header")
    return Step(header=Header.from_bytes(data), transcript=transcript_of(data))


@dataclass(frozen=True, kw_only=True, eq=False)
class SecureReply:
    """A node's reply in a secure step.

    Attributes:
        transcript: T of the step that the node has accepted.
        finished: Ids of the clients in the sums.
        failed: Ids of the other clients; a reason stays on the node.
        upload: The masked sums; None if no client finished, so that there is nothing to add.
    """

    transcript: bytes
    finished: Sequence[int]
    failed: Sequence[int]
    upload: Upload | None

    def to_content(self) -> RecordDict:
        """Pack into the content of a reply."""
        values: dict[str, Any] = {"transcript": self.transcript}
        values |= {"finished": list(self.finished), "failed": list(self.failed)}
        content = RecordDict()
        if self.upload is not None:
            values |= {"upload": self.upload.id, "numbers": self.upload.numbers.astype("<u8").tobytes()}
            values |= {"holders": list(self.upload.boxes), "boxes": list(self.upload.boxes.values())}
            if self.upload.vector.size:
                content[MASKED] = pack_arrays({VECTOR: self.upload.vector})
        content[SECURE] = _record(values)
        return content

    @classmethod
    def of(cls, content: RecordDict) -> "SecureReply":
        """Unpack a reply (untrusted input).

        Raises:
            ValueError: If it does not have the format of `to_content`.
        """
        values = _Values(record_of(content, SECURE, ConfigRecord))
        upload = None
        if values.has("upload"):
            numbers = values.blob("numbers")
            if len(numbers) % 8:
                raise ValueError("the masked numbers must be uint64")
            boxes = _by_node(values.counts("holders"), values.blobs("boxes"))
            vector: NDArray[np.uint32] = np.zeros(0, np.uint32)
            if MASKED in content:
                vector = _vector(record_of(content, MASKED, ArrayRecord))
            found = np.frombuffer(numbers, "<u8").astype(np.uint64)
            upload = Upload(id=values.blob("upload"), vector=vector, numbers=found, boxes=boxes)
        return cls(
            transcript=values.blob("transcript"),
            finished=values.counts("finished"),
            failed=values.counts("failed"),
            upload=upload,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class UnmaskRequest:
    """Question for the shares that open a step's sum.

    Attributes:
        header: Bytes of the step's header.
        uploads: Identity of each node's upload, by number: the nodes whose sum is opened.
        boxes: Boxes of these nodes for the receiver.
    """

    header: bytes
    uploads: Mapping[int, bytes]
    boxes: Mapping[int, bytes]

    @property
    def digest(self) -> bytes:
        """Digest of what is asked [32]: the step and the uploads. Equal questions may be answered again."""
        uploads = [[number, upload.hex()] for number, upload in sorted(self.uploads.items())]
        question = json.dumps([transcript_of(self.header).hex(), uploads], separators=(",", ":"))
        return hashlib.sha256(question.encode()).digest()

    def to_record(self) -> ConfigRecord:
        """Pack into a record."""
        return _record(
            {
                "header": self.header,
                "nodes": list(self.uploads),
                "uploads": list(self.uploads.values()),
                "senders": list(self.boxes),
                "boxes": list(self.boxes.values()),
            }
        )

    @classmethod
    def of(cls, content: RecordDict) -> "UnmaskRequest":
        """Unpack a question (untrusted input).

        Raises:
            ValueError: If it does not have the format of `to_record`, or names a node twice.
        """
        values = _Values(record_of(content, SECURE, ConfigRecord))
        return cls(
            header=values.blob("header"),
            uploads=_by_node(values.counts("nodes"), values.blobs("uploads")),
            boxes=_by_node(values.counts("senders"), values.blobs("boxes")),
        )


def release_content(answer: Release, digest: bytes) -> RecordDict:
    """Pack a node's shares.

    Args:
        answer: The shares.
        digest: Digest of the question.
    """
    shares = [b"".join(found) for found in answer.shares.values()]
    values = {"question": digest, "senders": list(answer.shares), "shares": shares, "bad": list(answer.bad)}
    return RecordDict({SECURE: _record(values)})


def release_of(content: RecordDict, digest: bytes) -> Release:
    """Unpack a node's shares (untrusted input).

    Raises:
        ValueError: If they do not have the format of `release_content`, or answer another question.
    """
    values = _Values(record_of(content, SECURE, ConfigRecord))
    if values.blob("question") != digest:
        raise ValueError("the shares are an answer to another question")
    shares = _by_node(values.counts("senders"), values.blobs("shares"))
    return Release(shares={number: _parts(found) for number, found in shares.items()}, bad=values.counts("bad"))


def unmasked_parts(kind: str, content: RecordDict) -> list[str]:
    """Return the names of what a reply in a secure step must not contain; the last check before it leaves the node.

    Args:
        kind: Type of the message.
        content: The reply to it.
    """
    allowed = {SECURE: _IN_RELEASE if kind == UNMASK else _IN_REPLY}
    if kind == MessageType.TRAIN:
        allowed[MASKED] = {VECTOR}
    found = []
    for name, record in content.items():
        if name not in allowed:
            found += [f"{name}/{key}" for key in names_in(record)] or [name]
        elif isinstance(record, ArrayRecord):
            vectors = unpack_arrays(record).items()
            found += [
                f"{name}/{key}" for key, array in vectors if key not in allowed[name] or not _may_be_masked(array)
            ]
        else:
            found += [f"{name}/{key}" for key in record if key not in allowed[name]]
    return sorted(found)


def _may_be_masked(array: NDArray[Any]) -> bool:
    return array.dtype == np.dtype(np.uint32) and array.ndim == 1


def _parts(data: bytes) -> list[bytes]:
    if len(data) % ELEMENT_BYTES:
        raise ValueError(f"shares have {ELEMENT_BYTES} bytes each")
    return [data[first : first + ELEMENT_BYTES] for first in range(0, len(data), ELEMENT_BYTES)]


def _by_node(numbers: Sequence[int], values: Sequence[bytes]) -> dict[int, bytes]:
    if len(set(numbers)) != len(numbers) or len(numbers) != len(values):
        raise ValueError("each node must be named once, with one value")
    return dict(zip(numbers, values, strict=True))


def _vector(record: ArrayRecord) -> NDArray[np.uint32]:
    arrays = unpack_arrays(record)
    if list(arrays) != [VECTOR]:
        raise ValueError("the reply must hold one masked vector")
    return arrays[VECTOR]


def _record(values: Mapping[str, Any]) -> ConfigRecord:
    # Flower cannot count the bytes of an empty list.
    return ConfigRecord({key: value for key, value in values.items() if not isinstance(value, list) or value})


class _Values:
    """Typed access to the values of an untrusted record; missing lists are empty."""

    def __init__(self, record: ConfigRecord) -> None:
        self._values = dict(record)

    def has(self, key: str) -> bool:
        return key in self._values

    def blob(self, key: str) -> bytes:
        value = self._values.get(key)
        if not isinstance(value, bytes):
            raise ValueError(f"the record must have {key}, bytes")
        return value

    def blobs(self, key: str) -> list[bytes]:
        found = self._list(key)
        if not all(isinstance(each, bytes) for each in found):
            raise ValueError(f"{key} must be bytes")
        return found

    def counts(self, key: str) -> list[int]:
        found = self._list(key)
        if not all(type(each) is int and 0 <= each < 2**40 for each in found):
            raise ValueError(f"{key} must be whole numbers from 0 on")
        return found

    def _list(self, key: str) -> list[Any]:
        value = self._values.get(key, [])
        if not isinstance(value, list):
            raise ValueError(f"{key} must be a list")
        return value
