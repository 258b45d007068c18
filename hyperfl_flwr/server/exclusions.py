"""Exclude nodes of a deployment from some rounds after a refused reply.

A node that sends false or unusable replies costs the other nodes time. It is excluded for a number of rounds that
doubles each time. A node with a reply that would have harmed the server is excluded for the rest of the run. A node
that only failed is asked once more before it is excluded.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Reason and duration of a node's exclusion.

    Attributes:
        node: The node's number.
        round: The round of the refused reply.
        until: The last round of the exclusion; None for the rest of the run.
        times: Number of refused replies of the node, including this one.
        reason: Reason why the reply was refused.
    """

    node: int
    round: int
    until: int | None
    times: int
    reason: str

    def covers(self, server_round: int) -> bool:
        """Return True if the node is excluded from a round."""
        return self.until is None or server_round <= self.until

    def __str__(self) -> str:
        end = "in this run" if self.until is None else f"until round {self.until + 1}"
        return f"node {self.node} is not asked again {end}: {self.reason}"


class Exclusions:
    """The exclusions of a run.

    Args:
        rounds: Number of rounds to exclude a node after its first refused reply; 0 asks it again in the next round.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._last: dict[int, Exclusion] = {}

    def __iter__(self) -> Iterator[Exclusion]:
        """Yield the last exclusion of each node; a first failure is not an exclusion."""
        yield from (exclusion for exclusion in self._last.values() if exclusion.covers(exclusion.round))

    def add(
        self,
        node: int,
        number: int,
        server_round: int,
        reason: str,
        *,
        for_good: bool = False,
        is_failure: bool = False,
    ) -> Exclusion | None:
        """Exclude a node.

        Args:
            node: Flower's id of the node.
            number: The node's number.
            server_round: The round of the refused reply.
            reason: Reason why it was refused.
            for_good: True to exclude the node for the rest of the run.
            is_failure: True if the node only failed; after its first failure it is asked again in the next round.

        Returns:
            The exclusion; None if the node is asked again in the next round.
        """
        if not self._rounds and not for_good:
            return None
        times = self._last[node].times + 1 if node in self._last else 1
        is_warning = is_failure and times == 1
        # A warning is recorded to count it, but ends before its own round, so that it covers none.
        until = None if for_good else server_round + (-1 if is_warning else self._rounds * 2 ** (times - 1))
        self._last[node] = Exclusion(node=number, round=server_round, until=until, times=times, reason=reason)
        return None if is_warning else self._last[node]

    def cover(self, node: int, server_round: int) -> bool:
        """Return True if the node with this Flower id is excluded from a round."""
        return node in self._last and self._last[node].covers(server_round)
