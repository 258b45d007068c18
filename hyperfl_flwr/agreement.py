"""Which nodes there are, whom each hosts, and whether their data agree."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from hyperfl_flwr.errors import RunFailedError
from hyperfl_flwr.grid import POLL_SECONDS, Exchange, exchange
from hyperfl_flwr.messages import HELLO, PROPERTIES, record_of
from hyperfl_flwr.queries import NOVEL


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
