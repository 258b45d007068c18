"""Fetch replies from Flower within size limits, so that no node can end a run or fill the server's memory.

Replies are untrusted input: they may have many gigabytes, a hundred thousand arrays, parts that never arrive, or bytes
that cannot be decoded. Flower's grid loads all parts of a reply before it returns the reply, and an error in one part
ends the server app. This module counts the parts while they arrive.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import WARNING
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import Error as ProtobufError

from hyperfl_flwr.flower.grid import is_http_grid, replaced_client
from hyperfl_flwr.flower.log import log
from hyperfl_flwr.flower.messages import set_origin
from hyperfl_flwr.flower.objects import chunk_ids, is_array, is_array_chunk
from hyperfl_flwr.protocol.packing import num_arrays
from hyperfl_flwr.protocol.sizes import content_bytes

if TYPE_CHECKING:
    from hyperfl_flwr.flower.grid import (
        ConfirmMessageReceivedRequest,
        ConfirmMessageReceivedResponse,
        ObjectTree,
        PullAppMessagesRequest,
        PullAppMessagesResponse,
        PullObjectRequest,
        PullObjectResponse,
        RuntimeHttpClient,
    )

Result = TypeVar("Result")

RETRY_SECONDS = 60.0
"""Time to repeat a request that the SuperLink answers with a server error, in seconds. For example, its database is
locked while it stores a message with very many objects."""

RETRY_PAUSE_SECONDS = 2.0
"""Pause before such a request is repeated, in seconds."""

SMALL_BYTES, SMALL_OBJECTS = 16_000_000, 500
"""Allowance for the content of a reply other than the parameters: bytes and number of objects."""

RECORD_BYTES = 4_000_000
"""Limit in bytes on a reply without the bytes of its arrays (numbers, texts); in memory they take 30 times as much."""

MOST_RECORDS = 20
"""Maximum number of records of a reply; the largest reply of this project has six."""

PARTS_BYTES = 1_000_000
"""Minimum size in bytes of the objects into which Flower divides an array; its default is 5 MB."""

_UNDECODABLE = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError, ProtobufError
)  # fmt: skip


class RefusedReplyError(Exception):
    """A node's reply was refused; the message gives the reason."""


class LateReplyError(RefusedReplyError):
    """Parts of a node's reply were still missing at the end of the wait."""


class SuperLinkError(Exception):
    """The SuperLink answered the request for a reply with a server error."""


@dataclass(frozen=True, kw_only=True)
class ReplyLimits:
    """Limits on the size of a reply.

    Attributes:
        num_bytes: Maximum size of all its objects in bytes.
        num_objects: Maximum number of its objects (records, and parts of the packed arrays).
        num_arrays: Maximum number of its arrays.
    """

    num_bytes: int = SMALL_BYTES
    num_objects: int = SMALL_OBJECTS
    num_arrays: int = SMALL_OBJECTS

    @classmethod
    def to(cls, content: RecordDict, more_bytes: int = 0, more_arrays: int = 0) -> "ReplyLimits":
        """Return the limits of a reply to a message: eight times the bytes of the message, plus an allowance.

        Args:
            content: The message's content.
            more_bytes: Bytes of arrays that the message asks for without holding arrays of their size.
            more_arrays: Number of these arrays.

        An honest reply has the arrays of the message, summed in float64 (twice the bytes), and small records. Sums
        beyond the usual range come as additional levels (`hyperfl_flwr.protocol.reproducible_sum`) of the same size;
        the limit allows three of them.
        """
        size = content_bytes([content]) + more_bytes
        return cls(
            num_bytes=SMALL_BYTES + 8 * size,
            num_objects=SMALL_OBJECTS + 4 * size // PARTS_BYTES,
            num_arrays=SMALL_OBJECTS + 4 * (more_arrays + _num_arrays(content)),
        )


def fetch(grid: Grid, message_id: str, limits: ReplyLimits, end: float) -> list[Message]:
    """Return the reply to a message, if it has arrived.

    Args:
        grid: Flower's grid.
        message_id: The message's id.
        limits: Limits on the size of the reply.
        end: Time by which all parts of the reply must have arrived, on the clock of `time.monotonic`.

    Returns:
        A list with the reply, or an empty list.

    Raises:
        RefusedReplyError: If the reply exceeds the limits, or cannot be decoded.
        LateReplyError: If parts of the reply are missing at the end.
        SuperLinkError: If the SuperLink failed; the reply may be lost.
    """
    if not is_http_grid(grid):  # a simulation, where all nodes run this project's code
        return list(grid.pull_messages([message_id]))
    try:
        with replaced_client(grid, lambda client: _CheckingClient(client, limits, end)) as client:
            replies = list(grid.pull_messages([message_id]))
        for reply in replies:
            client.correct(reply)
            _refuse_many_names(reply, limits)
        return replies
    except httpx.HTTPStatusError as error:
        if error.response.is_server_error:
            raise SuperLinkError(
                f"the SuperLink failed to deliver the reply (HTTP status {error.response.status_code})"
            ) from error
        raise
    except _UNDECODABLE as error:
        raise RefusedReplyError(f"its reply cannot be decoded ({type(error).__name__})") from error


def _refuse_many_names(reply: Message, limits: ReplyLimits) -> None:
    """Check the number of records, which may share one object that counts only once, and of their arrays."""
    if not reply.has_content():
        return
    if len(reply.content) > MOST_RECORDS:
        raise RefusedReplyError(f"its reply has {len(reply.content)} records, at most {MOST_RECORDS} are accepted")
    if (number := _num_arrays(reply.content)) > limits.num_arrays:
        raise RefusedReplyError(f"its reply names {number} arrays, at most {limits.num_arrays} are accepted")


def _num_arrays(content: RecordDict) -> int:
    return sum(num_arrays(record) for record in content.values() if isinstance(record, ArrayRecord))


def repeated(request: Callable[[], Result]) -> Result:
    """Return the result of a request to the SuperLink, repeated while the SuperLink answers with a server error.

    Raises:
        httpx.HTTPStatusError: If it still answers with an error after `RETRY_SECONDS`.
    """
    end = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            return request()
        except httpx.HTTPStatusError as error:
            if not error.response.is_server_error or time.monotonic() > end:
                raise
            log(WARNING, "The SuperLink answers with %s; trying again.", error.response.status_code)
            time.sleep(RETRY_PAUSE_SECONDS)


class _CheckingClient:
    """Proxy of Flower's SuperLink client that enforces limits on fetched replies and forwards all other calls.

    The SuperLink delivers every message that a node addresses to the server app, and trusts the node's statement of
    the sender. This class drops messages that do not reply to the requested message.

    Args:
        client: Flower's client.
        limits: Limits on the size of a reply.
        end: Time by which all parts must have arrived, on the clock of `time.monotonic`.
    """

    def __init__(self, client: "RuntimeHttpClient", limits: ReplyLimits, end: float) -> None:
        self._client = client
        self._limits = limits
        self._end = end
        self._sizes: dict[str, int] = {}
        self._records: dict[str, bytes] = {}  # without the bytes of arrays, so that Flower has the only copy of those
        self._num_bytes = self._record_bytes = 0
        self._origin: tuple[str, int] = ("", 0)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._client, name)

    def PullMessages(self, request: "PullAppMessagesRequest") -> "PullAppMessagesResponse":  # noqa: N802 - Flower's name
        """Return replies without their objects; refuses a reply with too many objects."""
        response = self._client.PullMessages(request)
        pairs = zip(response.messages_list, response.message_object_trees, strict=True)
        kept = [pair for pair in pairs if pair[0].metadata.reply_to_message_id in request.message_ids]
        for message, tree in kept:
            self._origin = (message.metadata.reply_to_message_id, message.metadata.src_node_id)
            if _exceeds(tree, self._limits.num_objects):
                raise RefusedReplyError(f"its reply has more than {self._limits.num_objects} records or parts")
        return type(response)(
            messages_list=[message for message, _ in kept], message_object_trees=[tree for _, tree in kept]
        )

    def PullObject(self, request: "PullObjectRequest") -> "PullObjectResponse":  # noqa: N802 - Flower's name
        """Return one object, and count it.

        Several threads call this at the same time, so a reply may exceed the limit by the objects in transfer.
        """
        response = self._client.PullObject(request)
        if time.monotonic() > self._end and not response.object_available:
            raise LateReplyError("parts of its reply did not arrive in time")
        content = response.object_content
        self._sizes[request.object_id] = len(content)
        self._num_bytes += len(content)
        if not is_array_chunk(content):
            self._records[request.object_id] = content
            self._record_bytes += len(content)
        if self._num_bytes > self._limits.num_bytes or self._record_bytes > RECORD_BYTES:
            raise RefusedReplyError(f"its reply is larger than {self._limits.num_bytes / 1e6:.0f} MB")
        return response

    def ConfirmMessageReceived(  # noqa: N802 - Flower's name
        self, request: "ConfirmMessageReceivedRequest"
    ) -> "ConfirmMessageReceivedResponse":
        """Check the size of the arrays before Flower assembles them; an array may name the same part many times."""
        arrays = (content for content in self._records.values() if is_array(content))
        if sum(map(self._array_bytes, arrays)) > self._limits.num_bytes:
            raise RefusedReplyError(f"its arrays are larger than {self._limits.num_bytes / 1e6:.0f} MB")
        return self._client.ConfirmMessageReceived(request)

    def _array_bytes(self, content: bytes) -> int:
        return sum(self._sizes[chunk] for chunk in chunk_ids(content))

    def correct(self, reply: Message) -> None:
        """Set sender and message id of a reply to the SuperLink's values; the node may have set false ones."""
        set_origin(reply, *self._origin)


def _exceeds(tree: "ObjectTree", most: int) -> bool:
    """Return True if a tree has more than `most` nodes; not recursive, since an attacker can make it deep."""
    found, waiting = 0, [tree]
    while waiting:
        node = waiting.pop()
        found += 1
        if found > most:
            return True
        waiting.extend(node.children)
    return False
