"""Send messages to nodes and collect their replies; retry once after a crash, and detect nodes that have left."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.flower.grid import is_in_memory_grid
from hyperfl_flwr.flower.messages import ErrorCode, error_text
from hyperfl_flwr.protocol.messages import printable
from hyperfl_flwr.server.fetching import LateReplyError, RefusedReplyError, ReplyLimits, SuperLinkError, fetch, repeated
from hyperfl_flwr.server.in_process_grid import InProcessGrid

POLL_SECONDS, DEPLOYED_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.02, 0.1, 1.0
"""Shortest pause between two polls for a reply in a simulation and in a deployment, where each poll costs the SuperLink
0.01 s of processor time, and the longest pause, in seconds."""

CHECK_SECONDS, PARTS_SECONDS = 5.0, 30.0
"""Pause between two checks for restarted nodes, and longest wait of `first_replies` for a part, in seconds."""

_DIED = {ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE}
"""Error codes of a process that ended, as opposed to a process that replied with an exception: Flower's simulation
reports a dead Ray actor as `UNKNOWN`, its SuperNodes report a dead client app as `CLIENT_APP_CRASHED`."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Reply of a node to one message, or the reason why there is none.

    Attributes:
        node: Flower's id of the receiver.
        content: Content of the reply; None without an accepted reply.
        problem: Reason why `content` is None.
        died: True if the process that should have replied ended.
        away: True if the node is not connected (any more).
        refused: True if a reply was not accepted, for the reason in `problem`.
        is_harmful: True if that reply would have harmed the server; the node must not be asked again in this run.
        has_failed: True if the node of a deployment replied that it could not do what the message asked.
        is_deployed: True if the node belongs to a deployment.
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
    """Return True if all nodes belong to one simulation, where no node can join or leave."""
    return is_in_memory_grid(grid) or (isinstance(grid, InProcessGrid) and grid.simulated)


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    timeout: float,
    before_resending: Callable[[], None] | None = None,
    limits: Sequence[ReplyLimits] = (),
) -> Iterator[Exchange]:
    """Send messages to nodes and yield the result of each, in the order of the messages.

    A reply is fetched only when the caller requests it, in its turn; until then it stays with Flower. So the caller's
    memory does not grow with the number of nodes. If the process that handles a message dies, or its node restarts, the
    message is sent a second time: it starts from the same private state, but noise is drawn again. (In a simulation,
    the first death makes the server fetch all other available replies too, so that all dead processes restart at once.)
    A node of a deployment that is gone, or does not reply, is away; in a simulation, a node without a reply has failed.

    Args:
        grid: Flower's grid.
        messages: Messages to send, all at once, when the caller requests the first result.
        timeout: Longest wait for all replies, in seconds; a message that is sent again gets the same time again.
        before_resending: Called before a message is sent a second time; none is sent a third time.
        limits: Limits of the reply to each message; empty for those of `ReplyLimits.to`.

    Raises:
        RunFailedError: If a process of a simulation died twice, or Flower did not accept the messages.
    """
    watch = _Watch(grid, timeout, before_resending)
    watch.pending = _send(grid, messages, timeout, limits)
    while watch.pending:
        sent = watch.pending[0]
        answer = sent.answer(watch)
        if answer.died and not sent.is_resent:
            sent.send_again(watch)
            for later in watch.pending[1:] if watch.simulated else ():  # in a deployment, replies stay with Flower
                later.resend_if_dead(watch)
            answer = sent.answer(watch)
        if answer.died and watch.simulated:
            raise RunFailedError(f"the process of node {answer.node} died twice in a row: {answer.problem}")
        watch.pending.pop(0)
        yield answer
        del answer  # frees the reply's arrays before the next reply is fetched


def first_replies(grid: Grid, messages: Sequence[Message], timeout: float) -> Iterator[Exchange]:
    """Send messages to nodes and yield each result as soon as there is one, in any order.

    A caller that needs only some of the replies stops; later replies stay with Flower, unread. Else as `exchange`.
    """
    watch = _Watch(grid, timeout)
    watch.pending = _send(grid, messages, timeout)
    began = time.monotonic()
    while watch.pending:
        for sent in list(watch.pending):
            if not sent.is_done(grid):
                continue
            answer = sent.answer(watch)
            if answer.died and not sent.is_resent:
                sent.send_again(watch)
                continue
            watch.pending.remove(sent)
            yield answer
        if watch.pending:
            time.sleep(watch.pause(time.monotonic() - began))
            watch.resend_to_restarted()


def _send(grid: Grid, messages: Sequence[Message], timeout: float, limits: Sequence[ReplyLimits] = ()) -> list["_Sent"]:
    limits = limits or [ReplyLimits.to(message.content) for message in messages]
    return [
        _Sent(message=message, name=name, end=time.monotonic() + timeout, limits=limit)
        for message, name, limit in zip(messages, _push(grid, messages), limits, strict=True)
    ]


@dataclass(kw_only=True)
class _Sent:
    """A sent message that waits for its reply.

    Attributes:
        message: The message.
        name: Flower's id of the message; None if Flower refused it, for example because the node has left.
        end: End of the wait for the reply, on the clock of `time.monotonic`.
        limits: Limits on the size of the reply.
        is_resent: True if the message was sent a second time.
        replies: The reply, if it was fetched before its turn; else empty.
        refusal: Reason why the reply was refused; else empty.
        is_harmful: True if the reply would have harmed the server.
        loss: Reason why the reply may be lost (the SuperLink failed during the fetch); else empty.
    """

    message: Message
    name: str | None
    end: float
    limits: ReplyLimits
    is_resent: bool = False
    replies: list[Message] = field(default_factory=list)
    refusal: str = ""
    is_harmful: bool = False
    loss: str = ""

    def answer(self, watch: "_Watch") -> Exchange:
        """Wait for the reply and return the result; keeps no reference to the reply."""
        node, replies = self.message.metadata.dst_node_id, self.replies or self._wait(watch)
        self.replies = []
        if self.refusal:
            return Exchange(node=node, problem=self.refusal, refused=True, is_harmful=self.is_harmful)
        if self.loss:  # one more try: a message of another node may have kept the SuperLink busy
            return Exchange(node=node, problem=self.loss, died=not self.is_resent, away=self.is_resent)
        if self.name is None:
            return Exchange(node=node, problem="the message could not be sent to the node", away=not watch.simulated)
        found = match([self.message], replies)[0]
        if watch.simulated:
            return replace(found, died=found.died or found.away, away=False)
        if not replies:
            return replace(found, away=True)
        failed = found.content is None and not found.away
        return replace(found, is_deployed=True, refused=failed, has_failed=failed)

    def is_done(self, grid: Grid) -> bool:
        """Return True if there is a reply, or if there will be none; waits only for parts of a reply."""
        self.replies = self.replies or self._fetch(grid, min(self.end, time.monotonic() + PARTS_SECONDS))
        return bool(self.replies or self.refusal or self.loss or self.name is None or time.monotonic() >= self.end)

    def _wait(self, watch: "_Watch") -> list[Message]:
        """Return the reply as soon as it has arrived; an empty list if none has arrived at the end."""
        began = time.monotonic()
        while self.name is not None and not (replies := self._fetch(watch.grid)):
            now = time.monotonic()
            if self.refusal or self.loss or now >= self.end:
                return []
            time.sleep(min(watch.pause(now - began), self.end - now))
            watch.resend_to_restarted()
        return [] if self.name is None else replies

    def _fetch(self, grid: Grid, end: float | None = None) -> list[Message]:
        """Return the reply if it has arrived and can be fetched; else an empty list."""
        if self.name is None or self.refusal or self.loss:
            return []
        try:
            return fetch(grid, self.name, self.limits, self.end if end is None else end)
        except RefusedReplyError as error:
            self.refusal, self.is_harmful = str(error), not isinstance(error, LateReplyError)
        except SuperLinkError as error:
            self.loss = str(error)
        return []

    def send_again(self, watch: "_Watch") -> None:
        """Send the message a second time."""
        if watch.before_resending:
            watch.before_resending()
        self.message, self.is_resent, self.replies, self.loss = _copy(self.message), True, [], ""
        (self.name,) = _push(watch.grid, [self.message])
        self.end = min(time.monotonic(), self.end) + watch.timeout

    def resend_if_dead(self, watch: "_Watch") -> None:
        """Send the message again if its process has already died, so that dead processes are replaced together."""
        if self.is_resent:
            return
        self.replies = self.replies or self._fetch(watch.grid)
        if self.loss or (self.replies and match([self.message], self.replies)[0].died):
            self.send_again(watch)


class _Watch:
    """Detect restarted SuperNodes by polling: earlier messages to them are lost, and Flower does not report it.

    Its arguments are those of `exchange`.
    """

    def __init__(self, grid: Grid, timeout: float, before_resending: Callable[[], None] | None = None) -> None:
        self.grid, self.timeout, self.before_resending = grid, timeout, before_resending
        self.simulated = is_simulated(grid)
        self.pending: list[_Sent] = []
        self._next = time.monotonic() + CHECK_SECONDS
        self._activated = self._activations()

    def pause(self, waited: float) -> float:
        """Return the time until the next poll for a reply: a twentieth of the time waited so far, within its limits."""
        shortest = POLL_SECONDS if self.simulated else DEPLOYED_POLL_SECONDS
        return min(max(shortest, waited / 20), LONGEST_POLL_SECONDS)

    def resend_to_restarted(self) -> None:
        """Send messages again to nodes that have restarted; checks at most once in `CHECK_SECONDS`."""
        if self.simulated or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + CHECK_SECONDS
        now = self._activations()
        for sent in self.pending:
            node = sent.message.metadata.dst_node_id
            restarted = node in now and now[node] != self._activated.get(node, now[node])
            if restarted and sent.name is not None and not sent.is_resent and not sent.replies:
                sent.resend_if_dead(self)  # the reply may have arrived before the restart
                if not sent.replies and not sent.is_resent and not sent.refusal:
                    sent.send_again(self)
        self._activated |= now

    def _activations(self) -> dict[int, str]:
        """Return the time of the last activation of each connected node, by Flower's id."""
        nodes = [] if self.simulated else repeated(self.grid.get_nodes)
        return {node.node_id: node.last_activated_at for node in nodes}


def _push(grid: Grid, messages: Sequence[Message]) -> list[str | None]:
    """Send messages and return their ids, with None for each message that Flower refused."""
    names: list[str | None] = list(repeated(lambda: grid.push_messages(messages)))
    if len(names) != len(messages):
        raise RunFailedError(
            f"Flower accepted {len(names)} of {len(messages)} messages; see its log for the reason: a node may have "
            f"left, or the messages may be larger than the SuperLink accepts"
        )
    return names


def match(messages: Sequence[Message], replies: Iterable[Message]) -> list[Exchange]:
    """Return the result of each message, in the order of the messages.

    A reply belongs to the message with the id that it names or, if that message was sent again, to the message to its
    sender. (An error that the SuperLink creates for a node that has left names the message, but not the node.)
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
            code = reply.error.code
            problem = printable(error_text(reply.error.reason or f"error code {code}"))
            is_away = code == ErrorCode.NODE_UNAVAILABLE
            found.append(Exchange(node=node, problem=problem, died=code in _DIED, away=is_away))
        else:
            found.append(Exchange(node=node, content=reply.content))
    return found


def _copy(message: Message) -> Message:
    metadata = message.metadata
    return Message(message.content, dst_node_id=metadata.dst_node_id, message_type=metadata.message_type)
