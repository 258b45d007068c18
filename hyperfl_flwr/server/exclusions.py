"""Nodes of a deployment that are not asked for some rounds, since a reply of theirs was refused.

A node that lies or sends replies that nobody can use costs the others time. It is left out for a number of rounds that
doubles each time; one whose reply would have harmed the server is left out for the rest of the run. One that only fails
is asked once more first.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Why and how long a node is not asked.

    Attributes:
        node: The node's number.
        round: The round of the reply.
        until: The last round in which it is not asked; None is the run's last.
        times: How often replies of the node were refused, this one included.
        reason: Why the reply was refused.
    """

    node: int
    round: int
    until: int | None
    times: int
    reason: str

    def covers(self, server_round: int) -> bool:
        """Return whether the node is not asked in a round."""
        return self.until is None or server_round <= self.until

    def __str__(self) -> str:
        end = "in this run" if self.until is None else f"until round {self.until + 1}"
        return f"node {self.node} is not asked again {end}: {self.reason}"


class Exclusions:
    """The exclusions of a run.

    Args:
        rounds: For how many rounds a node is not asked after its first refused reply; 0 asks it in the next round.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._last: dict[int, Exclusion] = {}

    def __iter__(self) -> Iterator[Exclusion]:
        """Yield the last exclusion of each node that had one; a first failure is none."""
        yield from (each for each in self._last.values() if each.covers(each.round))

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
            reason: Why it was refused.
            for_good: Whether for the rest of the run.
            is_failure: Whether the node has only failed; the first time, it is asked again in the next round.

        Returns:
            The exclusion; None if the node is asked again in the next round.
        """
        if not self._rounds and not for_good:
            return None
        times = self._last[node].times + 1 if node in self._last else 1
        is_warning = is_failure and times == 1
        until = None if for_good else server_round + (-1 if is_warning else self._rounds * 2 ** (times - 1))
        self._last[node] = Exclusion(node=number, round=server_round, until=until, times=times, reason=reason)
        return None if is_warning else self._last[node]

    def cover(self, node: int, server_round: int) -> bool:
        """Return whether the node with this Flower id is not asked in a round."""
        return node in self._last and self._last[node].covers(server_round)
