"""A training or evaluation for which nothing is sent."""

from collections.abc import Sequence

from flwr.app import RecordDict

from hyperfl_flwr.server.handshake import Node
from strategies.engine.plain_step import Reduced
from strategies.engine.round_outcome import Outcome


class UnsentStep:
    """A step without messages, because too few nodes are there for a sum.

    Args:
        problem: What is wrong.
        clients: Ids of the clients that were to take part.
    """

    crowd = 0

    def __init__(self, problem: str, clients: Sequence[int] = ()) -> None:
        self._problem, self._clients = problem, clients

    def records(self) -> RecordDict:
        """Return no records: nothing is sent."""
        return RecordDict()

    def add(
        self, node: Node, content: RecordDict, clients: Sequence[int], outcome: Outcome, *, is_deployed: bool
    ) -> None:
        """Refuse a reply; raises ValueError."""
        raise ValueError("no message was sent")

    def close(self, outcome: Outcome) -> Reduced:
        """Record that no client takes part."""
        outcome.fail(self._clients, self._problem)
        return Reduced()
