"""The server's side of the exchange with nodes: who is there, who hosts whom, and one try more for a node that dies."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from hyperfl_flwr.errors import RunFailedError
from hyperfl_flwr.messages import HELLO, PROPERTIES, printable, record_of
from hyperfl_flwr.queries import NOVEL

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.02, 1.0
"""Pauses between two looks at what has arrived."""

_DIED = {ErrorCode.UNKNOWN, ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE}
"""Errors of a process that ended, as opposed to one that answered with an exception. Flower's simulation reports a dead
Ray actor as `UNKNOWN`."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node's answer to the handshake.

    Attributes:
        id: Flower's node id; random in every run.
        partition: The node's number, 0 .. num_nodes - 1.
        clients: The clients it hosts, ascending; may be empty.
        properties: All that it told.
    """

    id: int
    partition: int
    clients: Sequence[int]
    properties: Mapping[str, Any]


@dataclass(frozen=True)
class Federation:
    """The nodes of a run, in the order of their numbers."""

    nodes: Sequence[Node]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape (channels, height, width) of the clients' images, or (D,) of their feature vectors."""
        return tuple(self.nodes[0].properties["input-shape"])

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return int(self.nodes[0].properties["num-classes"])

    def label_counts(self) -> dict[str, dict[int, list[int]]]:
        """Return samples per class of each client, for `train` and `test`; empty where nodes do not tell."""
        counts: dict[str, dict[int, list[int]]] = {}
        for node in self.nodes:
            for split in ("train", "test"):
                flat = list(node.properties.get(f"{split}-label-counts", ()))
                for row, client in enumerate(node.clients if flat else ()):
                    row_counts = flat[row * self.num_classes : (row + 1) * self.num_classes]
                    counts.setdefault(split, {})[client] = row_counts
        return counts


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


def handshake(grid: Grid, num_clients: int, timeout: float) -> Federation:
    """Wait for all nodes but novel ones and learn which clients each hosts.

    Args:
        grid: Flower's grid.
        num_clients: Number of clients N; the nodes together must host 0 .. N-1, each once.
        timeout: Longest wait in seconds.

    Raises:
        RunFailedError: If a node refuses, a client is missing after `timeout`, or two nodes claim the same one.
    """
    return _agreed(greet(grid, timeout), num_clients)


def greet(grid: Grid, timeout: float, *, novel: bool = False) -> list[Node]:
    """Wait for all nodes of one kind and return them in the order of their numbers.

    In a simulation the server starts before all nodes are registered, and nobody tells it how many there will be: the
    first node's answer does.

    Args:
        grid: Flower's grid.
        timeout: Longest wait in seconds.
        novel: Whether those are meant that take models on demand, or the others.

    Raises:
        RunFailedError: If a node refuses, or not all are there after `timeout`.
    """
    end = time.monotonic() + timeout
    nodes: dict[int, Node] = {}
    while True:
        new = [node for node in grid.get_node_ids() if node not in nodes]
        messages = [Message(RecordDict(), dst_node_id=node, message_type=HELLO) for node in new]
        for answer in exchange(grid, messages, timeout):
            nodes[answer.node] = _introduce(answer)
        meant = [node for node in nodes.values() if bool(node.properties.get(NOVEL)) == novel]
        expected = max((int(node.properties["num-nodes"]) for node in meant), default=None)
        if expected is not None and len(meant) >= expected:
            return sorted(meant, key=lambda node: node.partition)
        if time.monotonic() > end:
            raise RunFailedError(
                f"only {len(meant)} of {expected or 'an unknown number of'} {'novel ' * novel}nodes answered within "
                f"node-timeout = {timeout:g} s; start the missing ones or raise node-timeout"
            )
        time.sleep(POLL_SECONDS)


def _introduce(answer: Exchange) -> Node:
    if answer.content is None:
        raise RunFailedError(f"node {answer.node} cannot take part: {answer.problem}")
    properties: dict[str, Any] = dict(record_of(answer.content, PROPERTIES, ConfigRecord))
    return Node(
        id=answer.node,
        partition=int(properties["partition"]),
        clients=list(properties["clients"]),
        properties=properties,
    )


def _agreed(nodes: Sequence[Node], num_clients: int) -> Federation:
    hosts: dict[int, int] = {}
    for node in nodes:
        for client in node.clients:
            if client in hosts:
                raise RunFailedError(
                    f"nodes {hosts[client]} and {node.partition} both claim client {client}; give each node its own "
                    f"partition-id"
                )
            hosts[client] = node.partition
    if missing := sorted(set(range(num_clients)) - set(hosts)):
        raise RunFailedError(
            f"no node hosts the clients {missing} of {num_clients}; check partition-id and num-partitions"
        )
    for key in ("input-shape", "num-classes"):
        values = {str(node.properties[key]) for node in nodes}
        if len(values) > 1:
            raise RunFailedError(f"the nodes' data differ in {key}: {', '.join(sorted(values))}")
    return Federation(nodes)


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
