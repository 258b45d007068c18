"""Mean over each node's clients in a round, and their reduction by a robust rule (`robust.reduction`)."""

from collections.abc import Mapping

from hyperfl_flwr.config.robust import RobustConfig
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.protocol.reproducible_sum import ReproducibleSum
from hyperfl_flwr.server.handshake import Node
from hyperfl_flwr.training.robust_rules import robust_mean
from strategies.engine.replies import TrainingReply


class NodeMeans:
    """Mean parameters of each node that has replied; all of them are in memory until the end of the round.

    Args:
        robust: The settings of the rule.
        received: The arrays that all clients received, of groups that are averaged.
        reductions: Reduction of each shared group.
        rounding: Arguments of `ReproducibleSum` for the clients of the round.
        num_asked: Number of nodes that are asked in the round.
    """

    def __init__(
        self,
        robust: RobustConfig,
        received: SharedArrays,
        reductions: Mapping[str, Reduction],
        rounding: Mapping[str, int],
        num_asked: int,
    ) -> None:
        self._robust, self._received, self._num_asked = robust, received, num_asked
        self._reductions, self._rounding = reductions, rounding
        self._means: dict[int, SharedArrays] = {}
        self._current: tuple[int, _NodeMean] | None = None

    def add(self, node: Node, reply: TrainingReply) -> None:
        """Add a reply of a node; those of one node, of which some are of audited clients, come one after another."""
        if not reply.report.results:
            return
        if self._current is None or self._current[0] != node.partition:
            self._close()
            self._current = node.partition, _NodeMean(self._received, self._reductions, self._rounding)
        self._current[1].add(reply)

    def _close(self) -> None:
        if self._current is not None:
            number, mean = self._current
            self._means[number], self._current = mean.take(), None

    def reduced(self) -> tuple[SharedArrays, Mapping[int, float]]:
        """Return the reduced arrays, and how much each node counts, see `RobustMean.shares`; empty if none is known.

        The nodes are in the order of their numbers, so that neither the order of their replies nor Flower's ids have an
        effect.

        Raises:
            ValueError: If so few nodes have replied that the rule would not hold.
        """
        self._close()
        found, robust = len(self._means), self._robust
        if found < (fewest := robust.fewest_nodes(self._num_asked)):
            raise ValueError(
                f"robust.reduction = {robust.reduction} needs {fewest} nodes, if "
                f"{robust.byzantine_of(self._num_asked)} of {self._num_asked} may be malicious (robust.byzantine), and "
                f"{found} replied with a client that finished"
            )
        numbers = sorted(self._means)
        result = robust_mean(
            robust.reduction,
            self._received,
            [self._means[number] for number in numbers],
            robust.byzantine_of(self._num_asked),
            None if robust.norm_bound == "auto" else robust.norm_bound,
        )
        self._means = {}
        return result.arrays, {} if result.shares is None else dict(zip(numbers, result.shares.tolist(), strict=True))


class _NodeMean:
    """Mean over one node's clients: of a single one its own arrays, otherwise their exact sum, divided once."""

    def __init__(
        self, received: SharedArrays, reductions: Mapping[str, Reduction], rounding: Mapping[str, int]
    ) -> None:
        self._total = ReproducibleSum(received, reductions, **rounding)
        self._waiting: list[TrainingReply] = []
        self._num_clients = self._num_examples = 0

    def add(self, reply: TrainingReply) -> None:
        self._waiting.append(reply)
        self._num_clients += len(reply.report.results)
        self._num_examples += reply.num_examples
        while self._num_clients > 1 and self._waiting:
            self._waiting.pop(0).add_to(self._total)

    def take(self) -> SharedArrays:
        if self._waiting:
            return self._waiting[0].arrays
        return self._total.take_mean(self._num_examples, self._num_clients)
