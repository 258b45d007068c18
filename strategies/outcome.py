"""What came of one phase of a round."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hyperfl_flwr.messages import ClientResult, Failure, Report, printable
from hyperfl_flwr.metrics.memory import process_name


@dataclass(kw_only=True)
class Outcome:
    """What came of one phase (training or evaluation) of a round.

    Attributes:
        results: Clients that finished, by ascending id.
        failures: Clients that did not.
        away: Clients whose nodes were found to be gone, by those nodes' Flower ids.
        absent: Clients whose nodes were known to be away before.
        bytes_down: A client's own payload from the server: the arrays of its message.
        bytes_up: A client's own payload to the server.
        bytes_on_wire: Serialised contents of all messages and replies between the server and its nodes.
        processes: Peak memory in bytes of the other processes that ran clients, by machine and process id.
    """

    results: list[ClientResult] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    away: dict[int, list[int]] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    bytes_on_wire: int = 0
    processes: dict[str, int] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        """Add what a node tells about its clients."""
        self.results = sorted([*self.results, *report.results], key=lambda result: result.client)
        self.failures += report.failures
        if report.process != process_name():
            self.processes[report.process] = report.peak_memory

    def refuse(self, clients: Sequence[int], reason: str) -> None:
        """Note that all clients that a node was asked for are left out; the reason may have words of the node's."""
        self.failures += [Failure(client=client, reason=printable(reason)) for client in clients]

    def leave(self, node: int, clients: Sequence[int]) -> None:
        """Note that a node is gone, with all clients that it was asked for."""
        self.away.setdefault(node, []).extend(clients)
