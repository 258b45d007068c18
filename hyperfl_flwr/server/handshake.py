"""Parse and validate a node's handshake reply (untrusted input)."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord

from hyperfl_flwr.core.packages.versions import differing
from hyperfl_flwr.protocol.hosting import MOST_NODES
from hyperfl_flwr.protocol.messages import DATA_VERSION, NUM_EXAMPLES, PROPERTIES, printable, record_of
from hyperfl_flwr.protocol.queries import COLUMNS, CROSS_SITE, NOVEL, PROBLEM, WITHHOLDS_METRICS
from hyperfl_flwr.protocol.secure_sums.keys import is_key
from hyperfl_flwr.protocol.secure_sums.messages import KEY, SIGNATURE
from hyperfl_flwr.server.exchange import Exchange

MOST_EXAMPLES = 10**9
"""Largest number of training samples of a client, more than a node can hold.

The largest number sets the precision of the sums: with 2^60 all that clients with a thousand samples send is rounded
to 0.
"""


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # isinstance would accept bool


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "num-nodes": lambda value: _is_count(value) and 0 < value <= MOST_NODES,
    "input-shape": lambda value: _are_counts(value) and len(value) in (1, 3) and 0 not in value,
    "num-classes": lambda value: _is_count(value) and value > 0,
    "clients": lambda value: _are_counts(value) and len(set(value)) == len(value),
    NUM_EXAMPLES: lambda value: _are_counts(value) and all(0 < count <= MOST_EXAMPLES for count in value),
    "classes": _are_texts,
    "partitioned-by": _is_text,
    "owners-data": lambda value: type(value) is bool,
    "device": _is_text,
    "versions": _are_texts,
    "model": _is_text,
    "method": _is_text,
    "data-reuse": _is_text,
    "threads": _is_count,
    CROSS_SITE: lambda value: type(value) is bool,
    WITHHOLDS_METRICS: lambda value: type(value) is bool,
    COLUMNS: lambda value: _is_text(value) and bool(re.fullmatch("[0-9a-f]{64}", value)),
    DATA_VERSION: lambda value: _is_text(value) and bool(re.fullmatch("[0-9a-f]{64}", value)),
    "augmentation": _is_text,
    "normalisation": _is_text,
    "target-scale": _is_text,
    "train-label-counts": _are_counts,
    "test-label-counts": _are_counts,
    KEY: lambda value: _is_text(value) and bool(re.fullmatch("[0-9a-f]{64}", value)) and is_key(value),
    SIGNATURE: lambda value: _is_text(value) and bool(re.fullmatch("([0-9a-f]{2}){0,128}", value)),
}
"""Check of each property's type and range."""

_NEEDED = ("num-nodes", "clients", "input-shape", "num-classes", "partitioned-by", "owners-data", "device")
_NEEDED_OF_NOVEL = ("num-nodes", "clients")
_KEYS = (KEY, SIGNATURE)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node with a valid handshake reply.

    Attributes:
        id: Flower's node id; random in every run.
        partition: The node's number, 0 .. num_nodes - 1.
        clients: The clients that it hosts, ascending; may be empty.
        properties: All properties in the reply.
    """

    id: int
    partition: int
    clients: Sequence[int]
    properties: Mapping[str, Any]

    @property
    def num_examples(self) -> Mapping[int, int]:
        """Number of training samples of each client; empty if the node does not report them."""
        counts = self.properties.get(NUM_EXAMPLES)
        return {} if counts is None else dict(zip(self.clients, counts, strict=True))

    @property
    def remarks(self) -> list[str]:
        """What the operator should know about the node, a sentence each."""
        remarks = []
        there = dict(text.split(" ", 1) for text in self.properties.get("versions", ()) if " " in text)
        if other := ", ".join(f"{name} {printable(version)} (here {own})" for name, version, own in differing(there)):
            remarks.append(f"node {self.partition} runs {other}: results may differ")
        if self.withholds_metrics:
            remarks.append(
                f"node {self.partition} sends no metrics, since its owner has set max-epsilon; secure sums with it "
                f"contain none"
            )
        return remarks

    @property
    def withholds_metrics(self) -> bool:
        """Whether the node takes part in no secure sum of metrics."""
        return bool(self.properties.get(WITHHOLDS_METRICS))


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Reason why a node does not take part.

    Attributes:
        id: Flower's node id.
        number: The node's number; None if its reply does not have one.
        reason: The reason, as one line.
    """

    id: int
    number: int | None
    reason: str

    def __str__(self) -> str:
        name = f"node {self.number}" if self.number is not None else f"the node with Flower's id {self.id}"
        return f"{name} is refused: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Bystander:
    """A node of the deployment that is not one of the run's, because its number is too large.

    Attributes:
        id: Flower's node id.
        number: The node's number, at least the run's number of nodes.
    """

    id: int
    number: int

    def __str__(self) -> str:
        return f"node {self.number} takes no part in this run"


Answer = Node | Refusal | Bystander


def number_of(answer: Answer) -> int | None:
    """Return the number of the node that has answered the handshake; None if the answer does not have one."""
    return answer.partition if isinstance(answer, Node) else answer.number


def placed(answer: Node | Refusal, num_nodes: int | None) -> Answer:
    """Return the answer to the handshake, or the bystander that has sent it, whatever else it says.

    Args:
        answer: The answer.
        num_nodes: Number of nodes of the run; None if the nodes decide about it, so that none is a bystander.
    """
    number = number_of(answer)
    if num_nodes is None or number is None or number < num_nodes:
        return answer
    return Bystander(id=answer.id, number=number)


def parse_handshake_reply(answer: Exchange, *, needs_key: bool = False, refused: str = "") -> Node | Refusal:
    """Return the node that replied to the handshake, or the reason why it does not take part.

    Args:
        answer: The reply.
        needs_key: Whether it must have a public key, for secure sums.
        refused: Name of a property that it must not have; empty for none.
    """
    if answer.content is None:
        return Refusal(id=answer.node, number=None, reason=answer.problem)
    try:
        properties: dict[str, Any] = dict(record_of(answer.content, PROPERTIES, ConfigRecord))
        number = int(properties["partition"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return Refusal(id=answer.node, number=None, reason=f"its handshake cannot be read: {printable(str(error))}")
    if PROBLEM in properties:
        return Refusal(id=answer.node, number=number, reason=printable(str(properties[PROBLEM])))
    if refused and refused in properties:
        return Refusal(id=answer.node, number=number, reason=f"its handshake must not have {refused} in this run")
    if reason := _problem(properties, needs_key=needs_key):
        return Refusal(id=answer.node, number=number, reason=reason)
    return Node(id=answer.node, partition=number, clients=sorted(properties["clients"]), properties=properties)


def _problem(properties: Mapping[str, Any], *, needs_key: bool) -> str:
    """Return which properties are missing or have a wrong type or range; empty if all are valid."""
    is_novel = properties.get(NOVEL)
    # In a plain run the numbers of samples are the weights in the mean, so that no training node may hide its own.
    also_needed = _KEYS if needs_key else () if is_novel else (NUM_EXAMPLES,)
    needed = (*(_NEEDED_OF_NOVEL if is_novel else _NEEDED), *also_needed)
    if missing := [key for key in needed if key not in properties]:
        return f"its handshake lacks {', '.join(missing)}"
    # `printable` also limits the length: the value is untrusted and goes to the log.
    wrong = (key for key, is_right in KINDS.items() if key in properties and not is_right(properties[key]))
    if problem := next((printable(f"its {key} is invalid, got {properties[key]!r}") for key in wrong), ""):
        return problem
    number, expected = len(properties.get(NUM_EXAMPLES, properties["clients"])), len(properties["clients"])
    return "" if number == expected else f"its num-examples has {number} numbers for {expected} clients"


def share_text(nodes: Iterable[Node], number: int) -> str:
    """Return a node's number of training samples and its share of all, after a comma; empty if none are known."""
    counts = {node.partition: sum(node.num_examples.values()) for node in nodes}
    total = sum(counts.values())
    return f", {counts[number]} training samples ({counts[number] / total:.0%} of all)" if total else ""
