"""A training or evaluation of which the server sees each node's sums and each client's numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import RecordDict

from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.reproducible_sum import ReproducibleSum
from hyperfl_flwr.server.handshake import Node
from strategies.engine import client_privacy
from strategies.engine.context import ServerContext
from strategies.engine.node_means import NodeMeans
from strategies.engine.observations import record_observation
from strategies.engine.replies import read_report, read_training
from strategies.engine.reply_bounds import Bounds, refuse_impossible_numbers, refuse_unasked
from strategies.engine.round_outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """Result of a step.

    Attributes:
        means: The reduced shared groups, keyed `group/name`; empty after an evaluation, or if no client finished.
        per_client: The arrays of each client that finished that are not summed.
        num_examples: Number of samples of the clients that finished.
    """

    means: SharedArrays = field(default_factory=dict)
    per_client: Mapping[int, SharedArrays] = field(default_factory=dict)
    num_examples: int = 0


class PlainStep:
    """The server's side of one step.

    Args:
        context: The strategy's context.
        server_round: The federated round.
        trains: Whether the step is a training; otherwise it is an evaluation.
        received: The arrays that all clients of the step are sent, of groups that are summed.
        per_client: The arrays that each client is sent and sends back alone.
        rounding: Arguments of `ReproducibleSum` for the clients of the step.
        num_nodes: Number of nodes that are asked.

    Attributes:
        crowd: Least number of clients in what the server sees.
    """

    crowd = 1

    def __init__(
        self,
        context: ServerContext,
        server_round: int,
        *,
        trains: bool,
        received: SharedArrays,
        per_client: Mapping[int, SharedArrays],
        rounding: Mapping[str, int],
        num_nodes: int,
    ) -> None:
        self._context, self._round, self._trains = context, server_round, trains
        self._received, self._per_client_sent = received, per_client
        self._total = ReproducibleSum(received, context.reductions, **rounding)
        self._nodes: NodeMeans | None = None
        if trains and context.config.robust.is_robust:
            self._nodes = NodeMeans(context.config.robust, received, context.reductions, rounding, num_nodes)
        self._per_client: dict[int, SharedArrays] = {}
        self._score = TASKS[context.config.task].score
        self._bounds = Bounds(
            max_ratio=0.0 if client_privacy.adds_noise(context) else context.config.max_update_ratio,
            num_examples=context.federation.num_examples,
            shared=received,
            per_client=per_client,
            reductions=context.reductions,
            noise=client_privacy.noise_of_means(context.config),
            score=self._score,
        )

    def records(self) -> RecordDict:
        """Return what a message of the step holds in addition to the usual records: nothing."""
        return RecordDict()

    def add(
        self, node: Node, content: RecordDict, clients: Sequence[int], outcome: Outcome, *, is_deployed: bool
    ) -> None:
        """Add a node's reply.

        Args:
            node: The node.
            content: Content of its reply.
            clients: Ids of the clients that the message was about, ascending.
            outcome: Receives the report.
            is_deployed: Whether the run is a deployment.

        Raises:
            ValueError: If the reply is invalid; nothing is added.
        """
        if not self._trains:
            report = read_report(content, clients)
            refuse_impossible_numbers(report, {}, required=f"aggregate-{self._score}")
            refuse_unasked(report, self._context.config)
            outcome.add(node.id, report, is_deployed=is_deployed)
            return
        reply = read_training(content, clients, self._received, self._per_client_sent)
        self._bounds.check(reply)
        refuse_unasked(reply.report, self._context.config)
        if client_privacy.adds_noise(self._context):
            # Not `max-update-ratio`: whether a reply counts must not depend on what honest clients have learnt.
            reply.refuse_large(self._total, self._context.config.privacy.clip_norm)
        outcome.add(node.id, reply.report, is_deployed=is_deployed)
        if self._context.config.audit.covers(clients[0], self._round) and reply.report.results:
            received = self._received | dict(self._per_client_sent.get(clients[0], {}))
            record_observation(reply, received, self._round, Path(self._context.run_directory))
        self._per_client |= reply.per_client
        if self._nodes is None:
            reply.add_to(self._total)
        else:
            self._nodes.add(node, reply)

    def close(self, outcome: Outcome) -> Reduced:
        """Divide the sums once; the result is bitwise independent of which node hosts which client.

        With `privacy.noise = server`, the noise is added before. With a robust rule (`robust.reduction`), each node
        counts as one, and the hosting has an effect; if too few have replied, no client has finished.
        """
        if self._nodes is not None:
            return self._reduced_by_node(self._nodes, outcome)
        num_examples = sum(result.num_examples for result in outcome.results)
        return Reduced(
            means=self._means(num_examples, len(outcome.results)),
            per_client=dict(sorted(self._per_client.items())),
            num_examples=num_examples,
        )

    def _reduced_by_node(self, nodes: NodeMeans, outcome: Outcome) -> Reduced:
        if not outcome.finished:
            return Reduced()
        try:
            means, outcome.node_shares = nodes.reduced()
        except ValueError as error:
            outcome.fail_finished(str(error))
            return Reduced()
        return Reduced(means=means, num_examples=sum(result.num_examples for result in outcome.results))

    def _means(self, num_examples: int, num_clients: int) -> SharedArrays:
        if not (num_clients and self._trains and client_privacy.adds_noise(self._context)):
            return self._total.take_mean(num_examples, num_clients)
        client_privacy.record(self._context, self._round, num_clients)
        privacy = self._context.config.privacy
        roundings = {key: self._total.rounding(key, privacy.clip_norm) for key in self._received}
        changes = self._total.take_changes(num_clients)
        return client_privacy.noisy_means(privacy, self._received, changes, roundings, num_clients)
