"""What came of one phase of a round."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from hyperfl_flwr.metrics.memory import process_name
from hyperfl_flwr.protocol.messages import ClientResult, Failure, Report, printable
from hyperfl_flwr.server.exchange import Exchange


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A node's reply that was not accepted.

    Attributes:
        clients: The clients that the node was asked for.
        reason: One line, without the node's number.
        is_harmful: Whether the reply would have harmed the server.
        is_failure: Whether the reply only says that nothing could be done.
    """

    clients: Sequence[int]
    reason: str
    is_harmful: bool = False
    is_failure: bool = False

    @classmethod
    def of(cls, answer: Exchange, clients: Sequence[int], reason: str) -> Self:
        """Describe the reply in an exchange."""
        return cls(clients=clients, reason=reason, is_harmful=answer.is_harmful, is_failure=answer.has_failed)


@dataclass(kw_only=True)
class Outcome:
    """What came of one phase (training or evaluation) of a round.

    Attributes:
        results: Clients that finished, by ascending id.
        failures: Clients that did not, those of refused replies among them.
        refused: Nodes with a reply that was not accepted, by their Flower ids.
        answered: The Flower ids of the nodes with a client that finished.
        away: Clients whose nodes were found to be gone, by those nodes' Flower ids.
        absent: Clients whose nodes were known to be away before.
        bytes_down: A client's own payload from the server: the arrays of its message.
        bytes_up: A client's own payload to the server.
        bytes_on_wire: Serialised contents of all messages and replies between the server and its nodes.
        processes: Peak memory in bytes of the other processes that ran clients, by machine and process id.
    """

    results: list[ClientResult] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    refused: dict[int, Refused] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    away: dict[int, list[int]] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    bytes_on_wire: int = 0
    processes: dict[str, int] = field(default_factory=dict)

    def add(self, node: int, report: Report, *, is_deployed: bool = False) -> None:
        """Add what the node with this Flower id reports of its clients.

        A deployment's node without a client that finished is treated as one with a refused reply.
        """
        if report.results:
            self.answered.add(node)
        elif is_deployed:
            failed = [failure.client for failure in report.failures]
            self.refuse(node, Refused(clients=failed, reason="none of its clients finished", is_failure=True))
        self.results = sorted([*self.results, *report.results], key=lambda result: result.client)
        self.failures += report.failures
        if report.process != process_name():
            self.processes[report.process] = report.peak_memory

    @property
    def blamed(self) -> dict[int, Refused]:
        """The nodes that are to blame for their refused replies.

        Where most replies are refused, the model that was sent is rather to blame, as when the training diverges; only
        those are left that would have harmed the server.
        """
        if len(self.refused) <= max(1, len(self.answered)):
            return self.refused
        return {node: refused for node, refused in self.refused.items() if refused.is_harmful}

    @property
    def num_failures(self) -> int:
        """Number of clients that failed; those of the nodes that are to blame are left out."""
        refused = {client for each in self.blamed.values() for client in each.clients}
        return sum(failure.client not in refused for failure in self.failures)

    def fail(self, clients: Sequence[int], reason: str) -> None:
        """Note that all clients that a node was asked for are left out; the reason may have words of the node's."""
        self.failures += [Failure(client=client, reason=printable(reason)) for client in clients]

    def refuse(self, node: int, refused: Refused) -> None:
        """Note that a reply of the node with this Flower id was not accepted."""
        before = self.refused.get(node, refused)
        clients = sorted({*before.clients, *refused.clients})
        self.refused[node] = Refused(
            clients=clients,
            reason=printable(refused.reason),
            is_harmful=before.is_harmful or refused.is_harmful,
            is_failure=before.is_failure and refused.is_failure,
        )

    def leave(self, node: int, clients: Sequence[int]) -> None:
        """Note that a node is gone, with all clients that it was asked for."""
        self.away.setdefault(node, []).extend(clients)
