"""The server's side of the exchange with nodes: messages, replies, one try more for what died, and who is gone."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.flower.grid import is_in_memory_grid
from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.protocol.messages import printable
from hyperfl_flwr.server.fetching import LateReplyError, RefusedReplyError, ReplyLimits, SuperLinkError, fetch, repeated
from hyperfl_flwr.server.in_process_grid import InProcessGrid

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.02, 1.0
"""Pauses between two looks at what has arrived."""

LOOK_SECONDS = 5.0
"""Pause between two looks at which nodes have started again."""

_DIED = {ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE}
"""Errors of a process that ended, as opposed to one that answered with an exception. Flower's simulation reports a dead
Ray actor as `UNKNOWN`, its SuperNodes a dead client app as `CLIENT_APP_CRASHED`."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A message to a node and what came of it.

    Attributes:
        node: The receiver's Flower id.
        content: The reply's content, or None.
        problem: Why there is none.
        died: Whether the process that should have answered ended.
        away: Whether the node is not there (any more).
        refused: Whether there is a reply that was not accepted, for the reason in `problem`.
        is_harmful: Whether that reply would have harmed the server: the node is not to be asked again in this run.
        has_failed: Whether the reply says that the node, of a deployment, could not do what was asked.
        is_deployed: Whether the node is one of a deployment.
    """

    node: int
    content: RecordDict | None = None
    problem: str = ""
    died: bool = False
    away: bool = False
    refused: bool = False
    is_harmful: bool = False
    has_failed: bool = False
    is_deployed: bool = False


def is_simulated(grid: Grid) -> bool:
    """Say whether all nodes are parts of one simulation, which nobody can leave."""
    return is_in_memory_grid(grid) or (isinstance(grid, InProcessGrid) and grid.simulated)


def exchange(grid: Grid, messages: Sequence[Message], timeout: float) -> Iterator[Exchange]:
    """Send messages to nodes and hand on what comes of each, in the order of the messages.

    A reply is fetched when its turn has come and the caller asks for it; until then it stays with Flower. What the
    caller holds does therefore not grow with the number of nodes. A message whose process died, or whose node has
    started again, is sent once more; what it does is idempotent, see `hyperfl_flwr.node.private_state`. (At the first
    death the other replies that are there are fetched too, so that all processes that have died begin again at once.)

    A node of a deployment that is gone, or silent, is away; in a simulation, a silent one has failed.

    Args:
        grid: Flower's grid.
        messages: They are sent at once, with the first request for a reply.
        timeout: Longest wait for all replies, in seconds; a message that is sent again has the same time anew.

    Raises:
        RunFailedError: If a simulation's process died again, or Flower did not take the messages.
    """
    watch = _Watch(grid, timeout)
    watch.pending = [
        _Sent(message=message, name=name, end=time.monotonic() + timeout, limits=ReplyLimits.to(message.content))
        for message, name in zip(messages, _push(grid, messages), strict=True)
    ]
    while watch.pending:
        sent = watch.pending[0]
        answer = sent.answer(watch)
        if answer.died and not sent.again:
            sent.send_again(grid, timeout)
            for later in watch.pending[1:] if watch.simulated else ():  # replies of others stay with Flower
                later.look(grid, timeout)
            answer = sent.answer(watch)
        if answer.died and watch.simulated:
            raise RunFailedError(f"the process of node {answer.node} died twice in a row: {answer.problem}")
        watch.pending.pop(0)
        yield answer
        del answer


@dataclass(kw_only=True)
class _Sent:
    """A message on its way.

    Attributes:
        message: The message.
        name: Its id; None if Flower has refused it, as that to a node that is gone.
        end: When the wait for its reply ends.
        limits: The largest reply to it that is fetched.
        again: Whether it was sent a second time.
        replies: Its reply, if it was fetched before its turn.
        refusal: Why its reply was not fetched.
        is_harmful: Whether the reply would have harmed the server.
        lost: Why its reply may be lost: the SuperLink failed when it was fetched.
    """

    message: Message
    name: str | None
    end: float
    limits: ReplyLimits
    again: bool = False
    replies: list[Message] = field(default_factory=list)
    refusal: str = ""
    is_harmful: bool = False
    lost: str = ""

    def answer(self, watch: "_Watch") -> Exchange:
        """Wait for the reply and give it away."""
        replies, self.replies = self.replies or self._wait(watch), []
        node = self.message.metadata.dst_node_id
        if self.refusal:
            return Exchange(node=node, problem=self.refusal, refused=True, is_harmful=self.is_harmful)
        if self.lost:  # perhaps since another node's message keeps the SuperLink busy
            return Exchange(node=node, problem=self.lost, died=not self.again, away=self.again)
        if self.name is None:
            problem = "the message could not be sent to the node"
            return Exchange(node=node, problem=problem, away=not watch.simulated)
        found = match([self.message], replies)[0]
        if watch.simulated:
            return replace(found, died=found.died or found.away, away=False)
        if not replies:
            return replace(found, away=True)
        has_failed = found.content is None and not found.away
        return replace(found, is_deployed=True, refused=has_failed, has_failed=has_failed)

    def _wait(self, watch: "_Watch") -> list[Message]:
        """Return the reply as soon as it is there; nothing if there is none at the end.

        The pauses are a twentieth of the time waited so far: neither does a short round wait long, nor is a SuperLink
        asked without need.
        """
        began = time.monotonic()
        while self.name is not None and not (replies := self._fetch(watch.grid)):
            if self.refusal or self.lost:
                return []
            now = time.monotonic()
            if now >= self.end:
                return []
            time.sleep(min(max(POLL_SECONDS, (now - began) / 20), LONGEST_POLL_SECONDS, self.end - now))
            watch.look()
        return [] if self.name is None else replies

    def _fetch(self, grid: Grid) -> list[Message]:
        """Return the reply if it is there and can be fetched."""
        if self.name is None or self.refusal or self.lost:
            return []
        try:
            return fetch(grid, self.name, self.limits, self.end)
        except RefusedReplyError as error:
            self.refusal, self.is_harmful = str(error), not isinstance(error, LateReplyError)
        except SuperLinkError as error:
            self.lost = str(error)
        return []

    def send_again(self, grid: Grid, timeout: float) -> None:
        """Send the message a second time."""
        self.message, self.again, self.replies, self.lost = _copy(self.message), True, [], ""
        (self.name,) = _push(grid, [self.message])
        self.end = min(time.monotonic(), self.end) + timeout

    def look(self, grid: Grid, timeout: float) -> None:
        """Send it again if its process has died already: processes that died together are replaced together."""
        if self.again:
            return
        self.replies = self.replies or self._fetch(grid)
        if self.lost or (self.replies and match([self.message], self.replies)[0].died):
            self.send_again(grid, timeout)


class _Watch:
    """Looks now and then whether a SuperNode has started again: what it was sent before is lost, and nobody tells.

    Args:
        grid: Flower's grid.
        timeout: Seconds that a message has that is sent again.
    """

    def __init__(self, grid: Grid, timeout: float) -> None:
        self.grid = grid
        self.simulated = is_simulated(grid)
        self.pending: list[_Sent] = []
        self._timeout = timeout
        self._next = time.monotonic() + LOOK_SECONDS
        self._activated = self._activations()

    def look(self) -> None:
        """Send those messages again whose nodes have started again; not more often than `LOOK_SECONDS` say."""
        if self.simulated or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        now = self._activations()
        for sent in self.pending:
            node = sent.message.metadata.dst_node_id
            restarted = node in now and now[node] != self._activated.get(node, now[node])
            if restarted and sent.name is not None and not sent.again and not sent.replies:
                sent.look(self.grid, self._timeout)
                if not sent.replies and not sent.again and not sent.refusal:
                    sent.send_again(self.grid, self._timeout)
        self._activated |= now

    def _activations(self) -> dict[int, str]:
        """Return when each node that is there has become so."""
        if self.simulated:
            return {}
        return {node.node_id: node.last_activated_at for node in repeated(self.grid.get_nodes)}


def _push(grid: Grid, messages: Sequence[Message]) -> list[str | None]:
    """Send messages; returns their ids, None for one that Flower has refused."""
    names: list[str | None] = list(repeated(lambda: grid.push_messages(messages)))
    if len(names) != len(messages):
        raise RunFailedError(
            f"Flower took {len(names)} of {len(messages)} messages; its log says why: a node may be gone, or the "
            f"messages larger than the SuperLink accepts"
        )
    return names


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
            code = reply.error.code
            away = code == ErrorCode.NODE_UNAVAILABLE
            found.append(Exchange(node=node, problem=problem, died=code in _DIED, away=away))
        else:
            found.append(Exchange(node=node, content=reply.content))
    return found


def _copy(message: Message) -> Message:
    metadata = message.metadata
    return Message(message.content, dst_node_id=metadata.dst_node_id, message_type=metadata.message_type)
