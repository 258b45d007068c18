"""The server's side of the exchange with nodes: messages, replies, and one try more for a node that dies."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from hyperfl_flwr.errors import RunFailedError
from hyperfl_flwr.messages import printable

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.02, 1.0
"""Pauses between two looks at what has arrived."""

_DIED = {ErrorCode.UNKNOWN, ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE}
"""Errors of a process that ended, as opposed to one that answered with an exception. Flower's simulation reports a dead
Ray actor as `UNKNOWN`."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A message to a node and what came of it.

    Attributes:
        node: The receiver's Flower id.
        content: The reply's content, or None.
        problem: Why there is none.
        died: Whether the process that should have answered ended.
    """

    node: int
    content: RecordDict | None = None
    problem: str = ""
    died: bool = False


def exchange(grid: Grid, messages: Sequence[Message], timeout: float) -> Iterator[Exchange]:
    """Send messages to nodes and hand on what comes of each, in the order of the messages.

    A reply is fetched when its turn has come and the caller asks for it; until then it stays with Flower. What the
    caller holds does therefore not grow with the number of nodes. A message whose process died is sent once more; what
    it does is idempotent, see `hyperfl_flwr.state`. (At the first death the other replies that are there are fetched
    too, so that all processes that have died begin again at once.)

    Args:
        grid: Flower's grid.
        messages: They are sent at once, with the first request for a reply.
        timeout: Longest wait for all replies, in seconds; a message that is sent again has the same time anew.

    Raises:
        RunFailedError: If a process died again, or Flower did not take the messages.
    """
    pending = [
        _Sent(message=message, name=name, end=time.monotonic() + timeout)
        for message, name in zip(messages, _push(grid, messages), strict=True)
    ]
    for position, sent in enumerate(pending):
        answer = sent.answer(grid)
        if answer.died and not sent.again:
            sent.send_again(grid, timeout)
            for later in pending[position + 1 :]:
                later.look(grid, timeout)
            answer = sent.answer(grid)
        if answer.died:
            raise RunFailedError(f"the process of node {answer.node} died twice in a row: {answer.problem}")
        yield answer
        del answer


@dataclass(kw_only=True)
class _Sent:
    """A message on its way.

    Attributes:
        message: The message.
        name: Its id; None if Flower has refused it, as that to a node that is gone.
        end: When the wait for its reply ends.
        again: Whether it was sent a second time.
        replies: Its reply, if it was fetched before its turn.
    """

    message: Message
    name: str | None
    end: float
    again: bool = False
    replies: list[Message] = field(default_factory=list)

    def answer(self, grid: Grid) -> Exchange:
        """Wait for the reply and give it away."""
        if self.name is None:
            return Exchange(node=self.message.metadata.dst_node_id, problem="the message could not be sent to the node")
        replies, self.replies = self.replies or _pull(grid, self.name, self.end), []
        return match([self.message], replies)[0]

    def send_again(self, grid: Grid, timeout: float) -> None:
        """Send the message a second time."""
        self.message, self.again, self.replies = _copy(self.message), True, []
        (self.name,) = _push(grid, [self.message])
        self.end = time.monotonic() + timeout

    def look(self, grid: Grid, timeout: float) -> None:
        """Send it again if its process has died already: processes that died together are replaced together."""
        self.replies = [] if self.name is None else list(grid.pull_messages([self.name]))
        if self.replies and match([self.message], self.replies)[0].died:
            self.send_again(grid, timeout)


def _push(grid: Grid, messages: Sequence[Message]) -> list[str | None]:
    """Send messages; returns their ids, None for one that Flower has refused."""
    names: list[str | None] = list(grid.push_messages(messages))
    if len(names) != len(messages):
        raise RunFailedError(
            f"Flower took {len(names)} of {len(messages)} messages; its log says why: a node may be gone, or the "
            f"messages larger than the SuperLink accepts"
        )
    return names


def _pull(grid: Grid, name: str, end: float) -> list[Message]:
    """Return the reply to the message with a name, as soon as it is there; nothing if there is none at the end.

    The pauses are a twentieth of the time waited so far: neither does a short round wait long, nor is a SuperLink asked
    without need.
    """
    began = time.monotonic()
    while not (replies := list(grid.pull_messages([name]))):
        now = time.monotonic()
        if now >= end:
            break
        time.sleep(min(max(POLL_SECONDS, (now - began) / 20), LONGEST_POLL_SECONDS, end - now))
    return replies


def match(messages: Sequence[Message], replies: Iterable[Message]) -> list[Exchange]:
    """Return what came of each message, in the order of the messages.

    A reply belongs to the message whose id it names or, if that one was sent again, to the one to its sender. (An error
    that the SuperLink makes up for a node that is gone names the message, but not the node.)
    """
    replies = list(replies)
    by_message = {reply.metadata.reply_to_message_id: reply for reply in replies}
    by_node = {reply.metadata.src_node_id: reply for reply in replies}
    found = []
    for message in messages:
        node = message.metadata.dst_node_id
        reply = by_message.get(message.metadata.message_id) or by_node.get(node)
        if reply is None:
            found.append(Exchange(node=node, problem="no reply in time"))
        elif reply.has_error():
            # Flower gives the exception's type and text as one string, a dead actor's over many lines.
            problem = printable(reply.error.reason or f"error code {reply.error.code}")
            found.append(Exchange(node=node, problem=problem, died=_died(reply)))
        else:
            found.append(Exchange(node=node, content=reply.content))
    return found


def _copy(message: Message) -> Message:
    metadata = message.metadata
    return Message(message.content, dst_node_id=metadata.dst_node_id, message_type=metadata.message_type)


def _died(reply: Message) -> bool:
    return reply.has_error() and reply.error.code in _DIED
