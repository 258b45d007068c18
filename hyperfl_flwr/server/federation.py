"""Find the nodes of a run and their clients, and check that their data agree.

In a simulation, a node that refuses or does not fit ends the run. In a deployment it is left out and the other nodes
continue, see `hyperfl_flwr.server.roster`.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO

from flwr.app import Message
from flwr.serverapp import Grid

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.flower.log import log
from hyperfl_flwr.models.pretrained.names import is_pretrained
from hyperfl_flwr.models.provenance import method_hash, network_hash
from hyperfl_flwr.protocol.hosting import clients_of_node
from hyperfl_flwr.protocol.messages import HELLO, printable
from hyperfl_flwr.protocol.queries import COLUMNS, NOVEL
from hyperfl_flwr.protocol.secure_sums.messages import KEY, handshake_request
from hyperfl_flwr.server.excerpts import excerpts
from hyperfl_flwr.server.exchange import POLL_SECONDS, exchange
from hyperfl_flwr.server.handshake import Node, Refusal, parse_handshake_reply

TERMS = {
    "num-nodes": "num-partitions",
    "input-shape": "input-shape",
    "num-classes": "num-classes",
    "classes": "classes",
    COLUMNS: "hash of the names and the order of the CSV columns",
    "model": "source of the network, or weights of its body (target)",
    "method": "source of the method (method)",
}
"""Properties in which all nodes must agree, with the names for their owners; a missing property fits any value."""

USUAL_NUM_EXAMPLES = 1024
"""Assumed number of training samples of the largest client if no node reports its numbers."""


@dataclass(frozen=True)
class Federation:
    """The connected nodes of a run, in the order of their numbers."""

    nodes: Sequence[Node]

    @property
    def clients(self) -> list[int]:
        """The clients that these nodes host, ascending."""
        return sorted(client for node in self.nodes for client in node.clients)

    @property
    def num_examples(self) -> Mapping[int, int]:
        """Number of training samples of each client, as reported by the nodes; without clients of silent nodes."""
        return {client: count for node in self.nodes for client, count in node.num_examples.items()}

    @property
    def max_num_examples(self) -> int:
        """Number of training samples of the largest client; `USUAL_NUM_EXAMPLES` if no node reports its numbers."""
        return max(self.num_examples.values(), default=USUAL_NUM_EXAMPLES)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape (channels, height, width) of the clients' images, or (D,) of their feature vectors."""
        return tuple(self.nodes[0].properties["input-shape"])

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return int(self.nodes[0].properties["num-classes"])

    @property
    def num_nodes(self) -> int:
        """Number P of all nodes of the federation, including those that are away."""
        return int(self.nodes[0].properties["num-nodes"])

    def number_of(self, node: int) -> int:
        """Return the number of the node with the given Flower id."""
        return next(host.partition for host in self.nodes if host.id == node)

    def label_counts(self) -> dict[str, dict[int, list[int]]]:
        """Return the number of samples of each class [K], or of all [1] with another task, by split and client.

        Empty if the nodes do not report label counts, as in a deployment.
        """
        counts: dict[str, dict[int, list[int]]] = {}
        for node in self.nodes:
            for split in ("train", "test"):
                flat = list(node.properties.get(f"{split}-label-counts", ()))
                # A record cannot hold a table: the node sends the rows of its clients one after another.
                for row, client in enumerate(node.clients if flat else ()):
                    width = len(flat) // len(node.clients)
                    row_counts = flat[row * width : (row + 1) * width]
                    counts.setdefault(split, {})[client] = row_counts
        return counts


def handshake(grid: Grid, num_clients: int, timeout: float, session: str = "") -> Federation:
    """Wait for all nodes except novel ones, and check that they host all clients and agree on their data.

    Args:
        grid: Flower's grid.
        num_clients: Number of clients N; together, the nodes must host each of 0 .. N-1 exactly once.
        timeout: Longest wait in seconds.
        session: Identity of this process for secure sums; empty without them.

    Raises:
        RunFailedError: If a node refuses, a node is missing after `timeout`, no node hosts a client, two nodes claim
            the same client, or the nodes' data differ in shape or number of classes.
    """
    return _agreed(request_handshakes(grid, timeout, session=session), num_clients)


def request_handshakes(grid: Grid, timeout: float, *, novel: bool = False, session: str = "") -> list[Node]:
    """Wait for all nodes of one kind and return them in the order of their numbers.

    In a simulation the server starts before all nodes are registered. It learns the expected number of nodes from the
    first reply.

    Args:
        grid: Flower's grid.
        timeout: Longest wait in seconds.
        novel: True to wait for novel nodes, which receive models on demand; False to wait for the other nodes.
        session: Identity of this process for secure sums; empty without them.

    Raises:
        RunFailedError: If nodes are missing after `timeout` or, unless `novel`, if a node refuses.
    """
    end = time.monotonic() + timeout
    nodes: dict[int, Node] = {}
    others: set[int] = set()
    while True:
        new = [node for node in grid.get_node_ids() if node not in nodes and node not in others]
        messages = [Message(handshake_request(session), dst_node_id=node, message_type=HELLO) for node in new]
        for answer in exchange(grid, messages, timeout):
            parsed = parse_handshake_reply(answer, needs_key=bool(session))
            if isinstance(parsed, Node):
                nodes[answer.node] = parsed
            elif novel:
                log(INFO, "%s", parsed)
                others.add(answer.node)
            else:
                raise RunFailedError(f"node {answer.node} cannot take part: {parsed.reason}")
        meant = [node for node in nodes.values() if bool(node.properties.get(NOVEL)) == novel]
        expected = max((int(node.properties["num-nodes"]) for node in meant), default=None)
        if expected is not None and len(meant) >= expected:
            return sorted(meant, key=lambda node: node.partition)
        if time.monotonic() > end:
            raise RunFailedError(
                f"only {len(meant)} of {expected or 'an unknown number of'} {'novel ' * novel}nodes replied within "
                f"node-timeout = {timeout:g} s; start the missing ones or raise node-timeout"
            )
        time.sleep(POLL_SECONDS)


def _agreed(nodes: Sequence[Node], num_clients: int) -> Federation:
    hosts: dict[int, int] = {}
    for node in nodes:
        for client in node.clients:
            if client in hosts:
                raise RunFailedError(
                    f"nodes {hosts[client]} and {node.partition} both claim client {client}; give each node a "
                    f"different partition-id"
                )
            hosts[client] = node.partition
    if missing := sorted(set(range(num_clients)) - set(hosts)):
        raise RunFailedError(
            f"no node hosts the clients {missing} of {num_clients}; check partition-id and num-partitions"
        )
    for key in ("input-shape", "num-classes"):
        values = {str(node.properties[key]) for node in nodes}
        if len(values) > 1:
            found = ", ".join(sorted(values))
            raise RunFailedError(f"the nodes' data must not differ in {key}, got {found}; correct those that differ")
    return Federation(nodes)


@dataclass(kw_only=True)
class Agreement:
    """Common properties of the nodes of a deployment, and the nodes that have them.

    Attributes:
        terms: The required values, by the keys of `TERMS`.
        known: Those of them about which the nodes did not decide.
        split: Properties without a majority value: name -> value -> numbers of the nodes.
        accepted: Nodes that fit, by number.
        refused: Refusals of the nodes that do not fit.
    """

    terms: Mapping[str, str]
    known: Mapping[str, str] = field(default_factory=dict)
    split: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    accepted: dict[int, Node] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)

    def sides(self) -> str:
        """Return a text for people: the properties without a majority value, with the nodes of each value."""
        return "; ".join(
            f"{name} is "
            + " but ".join(
                f"{shown} on nodes {listed(held)}"
                for shown, held in zip(excerpts(list(values)), values.values(), strict=True)
            )
            for name, values in self.split.items()
        )


def listed(numbers: Iterable[int]) -> str:
    """Return numbers of nodes or clients as a text for people."""
    return " ".join(map(str, numbers))


def agree(
    nodes: Sequence[Node], num_clients: int, terms: Mapping[str, str] | None, known: Mapping[str, str]
) -> Agreement:
    """Determine which nodes fit together.

    Args:
        nodes: Nodes that have replied; if two have the same number, the first is accepted.
        num_clients: Number of clients N.
        terms: The required values, if already decided; None to take the value of most nodes for each property.
        known: Required values of the run's settings, or of its rounds before; the nodes do not decide about these.
    """
    found = Agreement(terms={**(terms or {}), **known}, known=known)
    for key in TERMS:
        if key in found.terms:
            continue
        holders: dict[str, list[int]] = {}
        for node in nodes:
            if key in node.properties:
                holders.setdefault(_text(node, key), []).append(node.partition)
        ranked = Counter({value: len(numbers) for value, numbers in holders.items()}).most_common(2)
        # In a tie there is no majority, and the first node to reply must not decide.
        if terms is None and len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
            found.split[TERMS[key]] = holders
        elif ranked:
            found.terms = {**found.terms, key: ranked[0][0]}
    for node in nodes:
        if reason := _misfit(node, found, num_clients):
            found.refused.append(Refusal(id=node.id, number=node.partition, reason=reason))
        else:
            found.accepted[node.partition] = node
    return found


def _text(node: Node, key: str, *, is_recorded: bool = False) -> str:
    """Return a property in full, as two long lists of classes may differ in the last one; or as manifests have it."""
    value = node.properties[key]
    return str(list(map(printable, value)) if is_recorded and key == "classes" else value)


def _misfit(node: Node, found: Agreement, num_clients: int) -> str:
    """Return the reason why a node does not fit; empty if it fits."""
    for key, value in found.terms.items():
        is_known = key in found.known
        if key in node.properties and (own := _text(node, key, is_recorded=is_known)) != value:
            shown, others = excerpts([own, value])
            return f"its {TERMS[key]} is {shown}, but the {'run has' if is_known else 'other nodes have'} {others}"
    if not 0 <= node.partition < int(found.terms.get("num-nodes", node.properties["num-nodes"])):
        return f"its partition-id {node.partition} is not in the range from 0 to num-partitions - 1"
    if node.partition in found.accepted:
        return f"another one is node {node.partition}, too; correct the number (partition-id) of one"
    # The nodes refuse a step in which a key occurs twice, so a copied key would end all steps.
    keys = {other.properties.get(KEY): number for number, other in found.accepted.items()}
    if node.properties.get(KEY, "") in keys:
        number = keys[node.properties[KEY]]
        return f"it has the same key for secure sums as node {number}; give each node another state-dir"
    num_nodes = int(found.terms.get("num-nodes", node.properties["num-nodes"]))
    if node.clients != (expected := clients_of_node(node.partition, num_nodes, num_clients)):
        return printable(f"it claims the clients {node.clients}; node {node.partition} of {num_nodes} hosts {expected}")
    return ""


def refuse_other_sources(federation: Federation, method: str, target: str, weights: str) -> None:
    """Check that all nodes have the same sources of method and network, or weights of its body, as the server.

    Args:
        federation: The nodes.
        method: Value of the setting `method`.
        target: Value of the setting `target`.
        weights: Value of the setting `lpm.weights` of the server.

    Raises:
        RunFailedError: If some have others; the message names them.
        ConfigError: If the server cannot load the weights.
    """
    for key, name, own in (("model", target, network_hash(target, weights)), ("method", method, method_hash(method))):
        others = [node.partition for node in federation.nodes if node.properties.get(key, own) != own]
        if others and is_pretrained(name):
            raise RunFailedError(
                f"the nodes {others} have other weights of {target} than the server; their owners must give the same "
                f"file, as lpm-weights in the node config"
            )
        if others:
            raise RunFailedError(
                f"the nodes {others} have another source of {name} than the server; install the same version on all "
                f"machines, or start the run from the folder with the source, so that the app bundle includes it"
            )
