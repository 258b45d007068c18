"""Replace the replies of a simulation's malicious nodes, before the strategy reads them.

The nodes themselves are honest: their replies hold what their clients have trained. The attacks that forge replies need
what no node of a deployment has, the other malicious nodes' changes or the honest nodes' mean, and so are computed
here. Clients and methods know nothing of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from numpy.typing import NDArray

from hyperfl_flwr.config.adversary import AdversaryConfig
from hyperfl_flwr.node.array_sums import PlainSum
from hyperfl_flwr.protocol.arrays import BLOCK, SharedArrays, by_number, select
from hyperfl_flwr.protocol.messages import (
    ARRAYS,
    CLIENTS,
    LABEL_COUNTS,
    OUTLIER_SUMS,
    PER_CLIENT_ARRAYS,
    Reduction,
    Report,
    Request,
    group_of,
    record_of,
)
from hyperfl_flwr.protocol.packing import pack_arrays, pack_by_number, unpack_arrays
from hyperfl_flwr.protocol.reproducible_sum import ReproducibleSum
from hyperfl_flwr.protocol.update_norms import holds_changes
from hyperfl_flwr.server.exchange import Exchange
from strategies.engine.context import ServerContext
from strategies.engine.forged_changes import forged_changes
from strategies.engine.replies import TrainingReply, read_training


def with_forgeries(
    context: ServerContext, messages: Sequence[Message], exchanges: Iterable[Exchange]
) -> Iterator[Exchange]:
    """Yield the results of a step's messages, with what malicious nodes send in the place of their honest replies.

    What a malicious node reports about its clients is left out, so that all metrics are of honest nodes' clients. If
    changes are forged, the replies of the step are all in memory at once; otherwise one at a time.

    Args:
        context: The strategy's context.
        messages: The messages, for training or evaluation.
        exchanges: The result of each message, in this order.
    """
    adversary, federation = context.config.adversary, context.federation
    if adversary.attack == "none" or not federation.nodes:
        yield from exchanges
        return
    numbers = adversary.malicious_nodes(context.config.seed, federation.num_nodes)
    malicious = {node.id for node in federation.nodes if node.partition in numbers}
    if not malicious:
        yield from exchanges
        return
    if adversary.forges and messages and messages[0].metadata.message_type == MessageType.TRAIN:
        found = list(exchanges)
        steps = [_Step.of(context, *each, malicious) for each in zip(messages, found, strict=True)]
        senders = forged_nodes(context, [step for step in steps if step is not None])
        exchanges = [
            each if step is None else step.exchange(senders[each.node]) for each, step in zip(found, steps, strict=True)
        ]
    for answer in exchanges:
        yield _without_metrics(answer) if answer.node in malicious else answer


def _without_metrics(answer: Exchange) -> Exchange:
    """Return a node's result without its clients' metrics."""
    if answer.content is None:
        return answer
    report = Report.from_record(record_of(answer.content, CLIENTS, ConfigRecord))
    silent = replace(report, results=[replace(each, metrics={}) for each in report.results])
    return replace(answer, content=RecordDict({**answer.content, CLIENTS: silent.to_record()}))


@dataclass(kw_only=True)
class Sender:
    """What a node, or a client whose arrays are sent alone, has trained.

    Attributes:
        is_malicious: Whether its node is malicious.
        start: What it was sent, by key; zeros for a group that holds changes, see `start_of`.
        arrays: What it has trained, by key, of the same shapes: of a node the mean over its clients. Forged arrays
            replace those of a malicious node.
        weights: Its weight in the mean, by key.
    """

    is_malicious: bool
    start: SharedArrays
    arrays: SharedArrays
    weights: Mapping[str, float]


def start_of(key: str, sent: NDArray[Any], reductions: Mapping[str, Reduction]) -> NDArray[Any]:
    """Return the array from which a change is counted: what was sent, or zeros where clients send changes."""
    return np.zeros_like(sent) if holds_changes(group_of(key), reductions) else sent


def forged_nodes(context: ServerContext, steps: Sequence["_Step"]) -> Mapping[int, Sender]:
    """Return all nodes of a step by Flower id, with the forged arrays of the malicious ones.

    The attack is computed over all nodes and, for arrays that clients send alone, over all clients; the clients' arrays
    are replaced in place. A node whose audited clients answer in separate messages counts as one sender, so that an
    audit does not change the attack.
    """
    replies: dict[int, list[_Step]] = {}
    for step in steps:
        replies.setdefault(step.answer.node, []).append(step)
    nodes = {node: _node_sender(context, mine) for node, mine in replies.items()}
    for senders in (list(nodes.values()), [each for step in steps for each in step.alone.values()]):
        kinds = {(key, value.shape) for sender in senders for key, value in sender.arrays.items()}
        for key, shape in sorted(kinds):
            if key != LABEL_COUNTS:  # others would be refused
                # In some methods clients have different networks.
                alike = [each for each in senders if key in each.arrays and each.arrays[key].shape == shape]
                forge_arrays(context.config.adversary, key, alike)
    return nodes


def forge_arrays(adversary: AdversaryConfig, key: str, senders: Sequence[Sender]) -> None:
    """Replace the arrays with a key of the malicious senders; those of one key have the same shape."""
    malicious = np.array([sender.is_malicious for sender in senders])
    if not malicious.any():
        return
    weights = np.array([sender.weights[key] for sender in senders])
    forgers = [sender for sender in senders if sender.is_malicious]
    forged = [np.empty(sender.arrays[key].shape, sender.arrays[key].dtype) for sender in forgers]
    for first in range(0, forged[0].size, BLOCK):
        part = slice(first, first + BLOCK)
        starts = np.stack([sender.start[key].reshape(-1)[part] for sender in senders]).astype(np.float64)
        changes = np.stack([sender.arrays[key].reshape(-1)[part] for sender in senders]) - starts
        values = forged_changes(adversary.attack, adversary.scale, changes, weights, malicious)
        with np.errstate(over="ignore"):  # such a reply is refused
            for array, value in zip(forged, starts[malicious] + values, strict=True):
                array.reshape(-1)[part] = value
    for sender, array in zip(forgers, forged, strict=True):
        sender.arrays[key] = array


@dataclass(kw_only=True)
class _Step:
    """A node's reply to a TRAIN message, taken apart.

    Attributes:
        context: The strategy's context.
        request: What the node was asked for.
        received: The summed groups that its clients were sent.
        answer: The honest result.
        reply: The same, read.
        is_malicious: Whether the node is malicious.
        alone: Its clients that send arrays alone, by id.
    """

    context: ServerContext
    request: Request
    received: SharedArrays
    answer: Exchange
    reply: TrainingReply
    is_malicious: bool
    alone: Mapping[int, Sender]

    @classmethod
    def of(cls, context: ServerContext, message: Message, answer: Exchange, malicious: set[int]) -> "_Step | None":
        """Take a reply apart; None if no client has finished, or the reply is invalid, which the strategy reports."""
        if answer.content is None:
            return None
        request = Request.of(message.content)
        sent = unpack_arrays(record_of(message.content, ARRAYS, ArrayRecord))
        received = select(sent, context.reductions, lambda each: each.is_summed)
        alone = _sent_alone(message, select(sent, context.reductions, lambda each: each is Reduction.EACH))
        try:
            reply = read_training(answer.content, request.clients, received, alone)
        except ValueError:
            return None
        if not reply.report.results:
            return None
        is_malicious = answer.node in malicious
        senders = {
            client: Sender(
                is_malicious=is_malicious,
                start={key: start_of(key, alone[client][key], context.reductions) for key in arrays},
                arrays=dict(arrays),
                weights=dict.fromkeys(arrays, 1.0),
            )
            for client, arrays in reply.per_client.items()
        }
        return cls(
            context=context,
            request=request,
            received=received,
            answer=answer,
            reply=reply,
            is_malicious=is_malicious,
            alone=senders,
        )

    def exchange(self, node: Sender) -> Exchange:
        """Return the result with the node's arrays; an honest node's is unchanged."""
        if not self.is_malicious:
            return self.answer
        total = PlainSum(self.received, self.context.reductions, self.request)
        for result in self.reply.report.results:  # as if each client had trained the node's mean
            total.add(node.arrays, result.num_examples)
        content = {name: value for name, value in (self.answer.content or {}).items() if name != OUTLIER_SUMS}
        content[ARRAYS] = pack_arrays(total.arrays)
        if outliers := total.outliers:
            content[OUTLIER_SUMS] = pack_by_number(outliers)
        if self.alone:
            content[PER_CLIENT_ARRAYS] = pack_by_number({client: each.arrays for client, each in self.alone.items()})
        return replace(self.answer, content=RecordDict(content))


def _sent_alone(message: Message, each: SharedArrays) -> Mapping[int, SharedArrays]:
    """Return the arrays that each client of a message is sent and sends back alone; empty if there are none."""
    clients, found = Request.of(message.content).clients, dict[int, SharedArrays]()
    if PER_CLIENT_ARRAYS in message.content:
        found = by_number(unpack_arrays(record_of(message.content, PER_CLIENT_ARRAYS, ArrayRecord)))
    return {client: {**each, **found.get(client, {})} for client in clients} if each or found else {}


def _node_sender(context: ServerContext, steps: Sequence[_Step]) -> Sender:
    """Return a node with the means over its clients, as the server would compute them of its replies alone."""
    first, reductions = steps[0], context.reductions
    number = sum(len(step.reply.report.results) for step in steps)
    num_examples = sum(step.reply.num_examples for step in steps)
    is_sum = {key: reductions[group_of(key)] is Reduction.SUM for key in first.received}
    means = dict(first.reply.arrays)
    if number > 1:
        rounding = {"num_clients": first.request.num_clients, "max_num_examples": first.request.max_num_examples}
        averaged = {name: Reduction.MEAN if each is Reduction.SUM else each for name, each in reductions.items()}
        total = ReproducibleSum(first.received, averaged, **rounding)
        for step in steps:
            step.reply.add_to(total)
        means = total.take_mean(num_examples, number)
    divisors = {key: reductions[group_of(key)].divisor(num_examples, number) for key in first.received}
    weights = {key: float(number) if is_sum[key] else divisor for key, divisor in divisors.items()}
    return Sender(
        is_malicious=first.is_malicious,
        start={key: start_of(key, value, reductions) for key, value in first.received.items()},
        arrays=means,
        # Under a robust rule each node counts as one.
        weights=dict.fromkeys(weights, 1.0) if context.config.robust.is_robust else weights,
    )
