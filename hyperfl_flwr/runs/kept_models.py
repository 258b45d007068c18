"""The records of the models that a run keeps: those of the last round, or the best ones by validation data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from hyperfl_flwr.core.tasks import task_of
from hyperfl_flwr.runs.run_directory import Record
from hyperfl_flwr.runs.validation import best_record, chooses_state


@dataclass(frozen=True, kw_only=True)
class KeptModels:
    """The records of the models that a run keeps.

    Attributes:
        kind: Kind of the clients' models: `personalized` in the last round, or `kept`, the best ones.
        lines: Kind of the lines of metrics.jsonl about each client.
        means: The line with the means over the clients; empty if there is none yet.
        aggregate: The same of the global state.
        rows: The lines about each client.
        aggregate_rows: The lines about each client with the global state.
    """

    kind: str
    lines: str
    means: Record
    aggregate: Record
    rows: Sequence[Record]
    aggregate_rows: Sequence[Record]

    @classmethod
    def of(cls, settings: Mapping[str, Any], records: Sequence[Record], last: int) -> Self:
        """Find the records.

        Args:
            settings: Settings of the run.
            records: Lines of metrics.jsonl.
            last: The last finished round.
        """

        def newest(kind: str) -> Record:
            found = [record for record in records if record["kind"] == kind and record["round"] == last]
            return found[-1] if found else {}

        is_best = settings.get("keep") == "best" and bool(newest("kept"))  # until the end, it is not known
        kind, lines = ("kept", "client-kept") if is_best else ("personalized", "client")
        chooses = is_best and chooses_state(settings)
        aggregate = best_record(records, task_of(settings), "aggregate") if chooses else newest("aggregate")

        def rows(kind: str, of_round: int | None) -> list[Record]:
            return [record for record in records if record["kind"] == kind and record["round"] == of_round]

        return cls(
            kind=kind,
            lines=lines,
            means=newest("kept" if is_best else "train"),
            aggregate=aggregate,
            rows=rows(lines, last),
            aggregate_rows=rows("client-aggregate", aggregate.get("round")),
        )

    def clients(self, num_clients: int) -> "ClientNumbers":
        """Return the numbers of each client's model of a run."""
        return ClientNumbers(self.kind, self.rows, num_clients)

    def clients_with_state(self, num_clients: int) -> "ClientNumbers":
        """Return the numbers of each client of a run with the global state."""
        return ClientNumbers("aggregate", self.aggregate_rows, num_clients)


class ClientNumbers:
    """The numbers of each client with a kept model.

    Args:
        kind: Kind of the models.
        rows: The lines about each client.
        num_clients: Number of clients of the run.
    """

    def __init__(self, kind: str, rows: Sequence[Record], num_clients: int) -> None:
        self._kind, self._clients = kind, range(num_clients)
        self._found = {record["client"]: record for record in rows}

    def numbers(self, name: str, *, of_kind: bool = True) -> list[float | None]:
        """Return a number of each client; None for a client that failed, or has none.

        Args:
            name: Its name in metrics.jsonl, without the kind of model.
            of_kind: Whether it is of the model, and not of the client's data.
        """
        key = f"{self._kind}_{name}" if of_kind else name
        return [self._found.get(client, {}).get(key) for client in self._clients]
