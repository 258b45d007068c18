"""Fetches nodes' replies from Flower within limits, so that one node cannot end a run or fill the server's memory.

A node may answer with anything: many gigabytes, a hundred thousand arrays, parts that never arrive, bytes that cannot
be decoded. Flower's grid loads all parts of a reply before it returns the reply, and an error in one of them ends the
server app. Here the parts are counted while they arrive.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging import WARNING
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log
from google.protobuf.message import Error as ProtobufError

from hyperfl_flwr.sizes import content_bytes

if TYPE_CHECKING:
    from flwr.superlink.grid import HttpGrid

Result = TypeVar("Result")

RETRY_SECONDS = 60.0
"""How long a request is repeated that the SuperLink answers with a server error. Its database is locked, for example,
while it stores a message of very many objects."""

RETRY_PAUSE_SECONDS = 2.0

SMALL_BYTES, SMALL_OBJECTS = 16_000_000, 500
"""Room for what a reply holds beside parameters: numbers of each client, texts of failures."""

PARTS_BYTES = 1_000_000
"""Flower divides an array into objects of at least this size; its default is 5 MB."""

_UNDECODABLE = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError, ProtobufError
)  # fmt: skip


class RefusedReplyError(Exception):
    """A node's reply is not fetched, for the reason that the text gives."""


class SuperLinkError(Exception):
    """The SuperLink has answered the request for a reply with a server error."""


@dataclass(frozen=True, kw_only=True)
class ReplyLimits:
    """The largest reply that is fetched.

    Attributes:
        num_bytes: Bytes of all its objects.
        num_objects: Number of its objects (records, arrays, and parts of large arrays).
    """

    num_bytes: int = SMALL_BYTES
    num_objects: int = SMALL_OBJECTS

    @classmethod
    def to(cls, content: RecordDict) -> "ReplyLimits":
        """Return the limits of a reply to a message: eight times the bytes that the message holds, and some room.

        An honest reply has the arrays of the message, summed in float64 (twice the bytes), and small records. Sums
        beyond the usual range come in records of their own (`hyperfl_flwr.reproducible_sum`), of which three fit.
        """
        size = content_bytes([content])
        arrays = sum(len(record) for record in content.values() if isinstance(record, ArrayRecord))
        num_objects = 2 * arrays + size // PARTS_BYTES  # an array is one object, its bytes at least another
        return cls(num_bytes=SMALL_BYTES + 8 * size, num_objects=SMALL_OBJECTS + 4 * num_objects)


def fetch(grid: Grid, message_id: str, limits: ReplyLimits, end: float) -> list[Message]:
    """Return the reply to a message, if it is there.

    Args:
        grid: Flower's grid.
        message_id: The message's id.
        limits: The largest reply to fetch.
        end: When all parts of the reply must have arrived, on the clock of `time.monotonic`.

    Returns:
        The reply, or nothing.

    Raises:
        RefusedReplyError: If it exceeds the limits, its parts do not arrive, or it cannot be decoded.
        SuperLinkError: If the SuperLink has failed; the reply may be lost.
    """
    from flwr.superlink.grid import HttpGrid  # deferred: takes half a second, and processes of nodes need it not

    if not isinstance(grid, HttpGrid):  # of a simulation, whose nodes run this project's code
        return list(grid.pull_messages([message_id]))
    try:
        with _limited(grid, limits, end):
            return list(grid.pull_messages([message_id]))
    except httpx.HTTPStatusError as error:
        if error.response.is_server_error:
            raise SuperLinkError(f"the SuperLink failed to hand it out ({error.response.status_code})") from error
        raise
    except _UNDECODABLE as error:
        raise RefusedReplyError(f"its reply cannot be decoded ({type(error).__name__})") from error


def repeated(request: Callable[[], Result]) -> Result:
    """Return the result of a request to the SuperLink, repeated while the SuperLink answers with a server error.

    Raises:
        httpx.HTTPStatusError: If it still does after `RETRY_SECONDS`.
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


@contextlib.contextmanager
def _limited(grid: "HttpGrid", limits: ReplyLimits, end: float) -> Iterator[None]:
    """Count what a grid fetches."""
    client = grid._runtime_client
    grid._client = _CountingClient(client, limits, end)  # type: ignore[assignment]
    try:
        yield
    finally:
        grid._client = client


class _CountingClient:
    """A SuperLink's client that refuses to fetch more than the limits allow; all else it hands on.

    Args:
        client: Flower's client.
        limits: The largest reply to fetch.
        end: When all parts must have arrived.
    """

    def __init__(self, client: Any, limits: ReplyLimits, end: float) -> None:  # noqa: ANN401 - a private class
        self._client = client
        self._limits = limits
        self._end = end
        self._received = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._client, name)

    def PullMessages(self, request: Any) -> Any:  # noqa: ANN401, N802 - Flower's name
        """Return messages without their objects, unless these are too many."""
        response = self._client.PullMessages(request)
        for tree in response.message_object_trees:
            if _exceeds(tree, self._limits.num_objects):
                raise RefusedReplyError(f"its reply has more than {self._limits.num_objects} arrays or parts of them")
        return response

    def PullObject(self, request: Any) -> Any:  # noqa: ANN401, N802 - Flower's name
        """Return one object; several threads call this at the same time, so the limit may be passed by two objects."""
        if time.monotonic() > self._end:
            raise RefusedReplyError("parts of its reply did not arrive within round-timeout")
        response = self._client.PullObject(request)
        self._received += len(response.object_content)
        if self._received > self._limits.num_bytes:
            raise RefusedReplyError(f"its reply is larger than {self._limits.num_bytes / 1e6:.0f} MB")
        return response


def _exceeds(tree: Any, most: int) -> bool:  # noqa: ANN401 - a message of protobuf
    """Return whether a tree has more than some number of nodes; not recursive, since it may be deep."""
    found, waiting = 0, [tree]
    while waiting:
        node = waiting.pop()
        found += 1
        if found > most:
            return True
        waiting.extend(node.children)
    return False
