"""Results, failures and byte counts of one train or evaluate phase of a round."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from hyperfl_flwr.core.process_memory import process_name
from hyperfl_flwr.protocol.messages import ClientResult, Failure, Report, printable
from hyperfl_flwr.protocol.secure_sums.numbers import Tally
from hyperfl_flwr.server.exchange import Exchange


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A node's reply that was not accepted.

    Attributes:
        clients: Ids of the clients that the message was about.
        reason: Reason in one line, without the node's number.
        is_harmful: Whether the reply would have harmed the server.
        is_failure: Whether the reply only reports a failure of the node or of all its clients.
    """

    clients: Sequence[int]
    reason: str
    is_harmful: bool = False
    is_failure: bool = False

    @classmethod
    def of(cls, answer: Exchange, clients: Sequence[int], reason: str) -> Self:
        """Build the description of an exchange's refused reply."""
        return cls(clients=clients, reason=reason, is_harmful=answer.is_harmful, is_failure=answer.has_failed)


@dataclass(kw_only=True)
class Outcome:
    """Results and failures of one phase (training or evaluation) of a round.

    Attributes:
        finished: Ids of the clients that finished, ascending.
        results: Results of each of them, by ascending id; empty with secure sums.
        tally: With secure sums, counts and metrics over all of them; None before the sum is opened.
        unmask_seconds: With secure sums, seconds from the last reply until the sum was open.
        failures: Failures of the other clients, including those of refused replies.
        refused: Refused replies by the node's Flower id.
        answered: Flower ids of the nodes with a client that finished.
        away: Clients of nodes that turned out to be gone, by the node's Flower id.
        absent: Clients of nodes that were known to be away before the phase.
        bytes_down: Payload that one client receives from the server, in bytes: the arrays of its message.
        bytes_up: Payload that one client sends to the server, in bytes.
        bytes_on_wire: Serialised size of all messages and replies between the server and its nodes, in bytes.
        processes: Peak memory in bytes of the other processes that ran clients, by machine and process id.
        node_shares: How much each node counts in a robust reduction, by its number, 1 for an equal share; empty without
            one, and where it decides about each parameter by itself.
    """

    finished: list[int] = field(default_factory=list)
    results: list[ClientResult] = field(default_factory=list)
    tally: Tally | None = None
    unmask_seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    refused: dict[int, Refused] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    away: dict[int, list[int]] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    bytes_on_wire: int = 0
    processes: dict[str, int] = field(default_factory=dict)
    node_shares: Mapping[int, float] = field(default_factory=dict)

    def add(self, node: int, report: Report, *, is_deployed: bool = False) -> None:
        """Add the report of a node.

        A deployment's node without a client that finished is treated as one with a refused reply.

        Args:
            node: The node's Flower id.
            report: The node's report on its clients.
            is_deployed: Whether the run is a deployment.
        """
        if report.results:
            self.answered.add(node)
        elif is_deployed:
            failed = [failure.client for failure in report.failures]
            self.refuse(node, Refused(clients=failed, reason="none of its clients finished", is_failure=True))
        added = sorted(report.results, key=lambda result: result.client)
        in_order = not (self.finished and added) or self.finished[-1] < added[0].client
        self.results += added
        self.finished += [result.client for result in added]
        if not in_order:  # with one client on each node, nodes answer in the order of their clients
            self.results.sort(key=lambda result: result.client)
            self.finished.sort()
        self.failures += report.failures
        if report.process != process_name():
            self.processes[report.process] = report.peak_memory

    def add_counted(
        self, node: int, finished: Sequence[int], failed: Sequence[int], *, is_deployed: bool = False
    ) -> None:
        """Add a node's reply with secure sums, which says only which clients finished; otherwise as `add`."""
        if finished:
            self.answered.add(node)
        elif is_deployed:
            self.refuse(node, Refused(clients=failed, reason="none of its clients finished", is_failure=True))
        self.finished = sorted([*self.finished, *finished])
        self.fail(failed, "it did not finish; the log of its node says why")

    def fail_finished(self, reason: str) -> None:
        """Record that the uploads of the clients that finished could not be reduced, so that they do not count."""
        self.fail(self.finished, reason)
        self.finished, self.results = [], []

    def means(self) -> dict[str, float]:
        """Return the unweighted mean over clients of each metric; a client without a metric is left out of its mean."""
        if self.tally is not None:
            return dict(self.tally.means)
        found: dict[str, list[float]] = {}
        for result in self.results:
            for name, value in result.metrics.items():
                found.setdefault(name, []).append(value)
        return {name: statistics.fmean(values) for name, values in sorted(found.items())}

    @property
    def measured(self) -> int:
        """Number of clients that finished and whose numbers are known: not those of malicious nodes in a simulation."""
        if self.tally is not None:
            return self.tally.clients if self.tally.means else 0
        return sum(bool(result.metrics) for result in self.results)

    @property
    def blamed(self) -> dict[int, Refused]:
        """The refused replies that are the nodes' fault, by the node's Flower id.

        If most replies are refused, the cause is more likely the model that was sent, for example when the training
        diverges. Then only replies that would have harmed the server are included.
        """
        # A single refused reply is the node's fault even if no other node has answered.
        if len(self.refused) <= max(1, len(self.answered)):
            return self.refused
        return {node: refused for node, refused in self.refused.items() if refused.is_harmful}

    @property
    def num_failures(self) -> int:
        """Number of clients that failed, without the clients of nodes that are to blame."""
        refused = {client for refusal in self.blamed.values() for client in refusal.clients}
        return sum(failure.client not in refused for failure in self.failures)

    def fail(self, clients: Sequence[int], reason: str) -> None:
        """Record that all clients of a message failed; the reason may contain text from the node (untrusted)."""
        self.failures += [Failure(client=client, reason=printable(reason)) for client in clients]

    def refuse(self, node: int, refused: Refused) -> None:
        """Record that a reply of the node with this Flower id was refused."""
        # Of several refusals the worst counts: harmful if any is, a mere failure only if all are.
        before = self.refused.get(node, refused)
        clients = sorted({*before.clients, *refused.clients})
        self.refused[node] = Refused(
            clients=clients,
            reason=printable(refused.reason),
            is_harmful=before.is_harmful or refused.is_harmful,
            is_failure=before.is_failure and refused.is_failure,
        )

    def add_away(self, node: int, clients: Sequence[int]) -> None:
        """Record that a node is gone, with all clients of its message."""
        self.away.setdefault(node, []).extend(clients)
