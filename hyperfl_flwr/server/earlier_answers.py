"""What the nodes of a run have announced about themselves before: a node that comes back must not be another one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hyperfl_flwr.server.handshake import Node, Refusal


@dataclass(kw_only=True)
class EarlierAnswers:
    """The nodes' numbers and their clients' numbers of training samples, as they were announced first.

    Numbers of samples are the clients' weights in means: a node that comes back with others would change its weight. A
    node is known by Flower's id. Under another id it is another node, whose answers say nothing against it: one that
    took a number without right must not keep out the one that has it.

    Attributes:
        numbers: Number of a node by Flower's id.
        samples: Numbers of training samples by Flower's id and client.
    """

    numbers: dict[int, int] = field(default_factory=dict)
    samples: dict[int, Mapping[int, int]] = field(default_factory=dict)

    def refusals(self, nodes: Iterable[Node]) -> list[Refusal]:
        """Return refusals of those nodes whose answers do not fit what was announced before."""
        return [
            Refusal(id=node.id, number=node.partition, reason=problem)
            for node in nodes
            if (problem := self._problem(node))
        ]

    def _problem(self, node: Node) -> str:
        if (number := self.numbers.get(node.id, node.partition)) != node.partition:
            return f"it took part as node {number} before; restore that partition-id"
        first = self.samples.get(node.id, {})
        for client, count in node.num_examples.items():
            if (before := first.get(client, count)) != count:
                return (
                    f"it announced {before} training samples of client {client} before, and {count} now; restore its "
                    f"data, or begin another run"
                )
        return ""

    def note(self, nodes: Iterable[Node]) -> None:
        """Remember the answers of nodes that take part."""
        for node in nodes:
            self.numbers[node.id] = node.partition
            self.samples.setdefault(node.id, dict(node.num_examples))

    def differs(self, node: Node) -> bool:
        """Return whether a node with another id has announced other numbers of samples of this one's clients."""
        others = [first for number, first in self.samples.items() if number != node.id]
        return any(first.get(client, count) != count for first in others for client, count in node.num_examples.items())
