"""A training or evaluation of which the server opens only the sum over all nodes' clients."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.protocol.arrays import SharedArrays, select
from hyperfl_flwr.protocol.messages import CONFIG, Reduction, Request
from hyperfl_flwr.protocol.secure_sums.encoding import Encoding
from hyperfl_flwr.protocol.secure_sums.header import Header, NodeRow, Phase, arrays_digest, transcript_of
from hyperfl_flwr.protocol.secure_sums.masks import Opening, Release, Step, UnmaskError
from hyperfl_flwr.protocol.secure_sums.messages import (
    KEY,
    SECURE,
    SIGNATURE,
    UNMASK,
    SecureReply,
    UnmaskRequest,
    header_record,
    release_of,
)
from hyperfl_flwr.protocol.secure_sums.numbers import SQUARES_FROM, NumbersEncoding, Tally
from hyperfl_flwr.protocol.secure_sums.thresholds import crowd, unknown_nodes, usual_colluding
from hyperfl_flwr.protocol.sizes import content_bytes
from hyperfl_flwr.server.exchange import Exchange, first_replies
from hyperfl_flwr.server.handshake import Node
from strategies.engine import client_privacy
from strategies.engine.context import SecureContext, ServerContext
from strategies.engine.observations import record_opening
from strategies.engine.plain_step import Reduced
from strategies.engine.reply_bounds import Bounds, limits_of
from strategies.engine.round_outcome import Outcome, Refused
from strategies.engine.unsent_step import UnsentStep

Ask = Callable[[Sequence[Message]], Iterator[Exchange]]
"""Function that sends messages and yields their results as they arrive."""


def secure_step(
    context: ServerContext,
    grid: Grid,
    received: SharedArrays,
    requests: Sequence[tuple[Node, Request]],
    *,
    trains: bool,
) -> "SecureStep | UnsentStep":
    """Return a training or evaluation of some nodes; `UnsentStep` if they are too few.

    Args:
        context: The strategy's context, with `secure`.
        grid: Flower's grid.
        received: The arrays that all nodes are sent.
        requests: The request to each node.
        trains: Whether the step is a training.

    Raises:
        ValueError: If the context is not for secure sums, or an array cannot be part of one.
    """
    if context.secure is None:
        raise ValueError("the context has no part on secure sums")
    if not requests:
        return UnsentStep("no node that is there has clients")
    ask = partial(first_replies, grid, timeout=context.config.round_timeout)
    try:
        return SecureStep(context, context.secure, ask, "train" if trains else "evaluate", received, requests)
    except ConfigError as error:
        return UnsentStep(str(error), [client for _, request in requests for client in request.clients])


class SecureStep:
    """The server's side of one step.

    Args:
        context: The strategy's context.
        secure: Its part on secure sums.
        ask: Sends messages, and yields the results as they arrive.
        phase: `train` or `evaluate`.
        received: The arrays that all nodes of the step are sent.
        requests: The request to each node of the step, at least one.

    Attributes:
        crowd: Least number of honest clients in a sum that can be opened.

    Raises:
        ConfigError: If there are too few nodes, or too many.
    """

    def __init__(
        self,
        context: ServerContext,
        secure: SecureContext,
        ask: Ask,
        phase: Phase,
        received: SharedArrays,
        requests: Sequence[tuple[Node, Request]],
    ) -> None:
        self._context, self._ask, settings = context, ask, context.config.secagg
        summed = select(received, context.reductions, lambda each: each is not Reduction.DOWN)
        header = _header_of(context, secure, phase, received, requests)
        self.crowd = crowd(len(header.nodes), header.threshold, settings.colluding_of(context.federation.num_nodes))
        self._header = header.to_bytes()
        self._requests = {node.partition: (node, request) for node, request in requests}
        self._finished: dict[int, list[int]] = {}
        self._numbers = NumbersEncoding(metrics=header.metrics, num_clients=header.num_clients, squares=header.squares)
        self._encoding: Encoding | None = None
        if phase == "train":
            self._encoding = Encoding(
                received=summed,
                reductions=context.reductions,
                num_clients=header.num_clients,
                max_examples=header.max_examples,
                range=settings.range,
                least_range=context.config.privacy.least_range,
                noise=context.config.privacy.sum_noise,
                num_nodes=len(header.nodes),
            )
        self._bounds = Bounds(
            max_ratio=context.config.max_update_ratio,
            num_examples={},
            shared=summed,
            per_client={},
            reductions=context.reductions,
            score=TASKS[context.config.task].score,
        )
        self._opening = Opening(
            step=Step(header=header, transcript=transcript_of(self._header)),
            size=self._encoding.size if self._encoding else 0,
            num_numbers=self._numbers.size,
        )

    def records(self) -> RecordDict:
        """Return what a message of the step holds in addition to the records of a plain one."""
        return RecordDict({SECURE: header_record(self._header)})

    def add(
        self, node: Node, content: RecordDict, clients: Sequence[int], outcome: Outcome, *, is_deployed: bool
    ) -> None:
        """Add a node's reply.

        Args:
            node: The node.
            content: Content of its reply.
            clients: Ids of the clients that the message was about, ascending.
            outcome: Records which clients finished.
            is_deployed: Whether the run is a deployment.

        Raises:
            ValueError: If the reply is invalid; nothing is added.
        """
        reply = SecureReply.of(content)
        if reply.transcript != self._opening.step.transcript:
            raise ValueError("its reply belongs to another step")
        if (about := sorted([*reply.finished, *reply.failed])) != list(clients):
            raise ValueError(f"the reply is about the clients {about}, but the message was about {list(clients)}")
        if (reply.upload is None) != (not reply.finished):
            raise ValueError("a reply must have an upload if a client finished, and none otherwise")
        if reply.upload is not None:
            self._opening.add(node.partition, reply.upload)
            self._finished[node.partition] = list(reply.finished)
        outcome.add_counted(node.id, reply.finished, reply.failed, is_deployed=is_deployed)

    def close(self, outcome: Outcome) -> Reduced:
        """Ask the nodes for the shares of the masks, and open the sum; if that fails, no client has finished.

        There is no second attempt: each node answers one question in a step.
        """
        began = time.perf_counter()
        try:
            vector, tally = self._open(outcome)
            means: SharedArrays = {}
            if self._encoding is not None:
                means = self._encoding.decode(vector, tally.clients, tally.examples)
                noise = client_privacy.noise_of_means(self._context.config, len(self._requests), tally.clients)
                replace(self._bounds, noise=noise).check_means(means, tally.clients)
        except ValueError as error:
            outcome.fail_finished(f"the secure sum was not opened: {error}")
            return Reduced()
        outcome.tally, outcome.unmask_seconds = tally, time.perf_counter() - began
        server_round = self._opening.step.header.round
        if self._encoding is not None and self._context.config.audit.covers_round(server_round):
            record_opening(self._encoding.received, means, outcome, server_round, self._context)
        return Reduced(means=means, num_examples=tally.examples)

    def _open(self, outcome: Outcome) -> tuple[NDArray[np.uint32], Tally]:
        """Return the opened vector, and the counts and metrics.

        Raises:
            ValueError: If the sum cannot be opened, or cannot be the sum of what the nodes were asked for.
        """
        threshold = self._opening.step.header.threshold
        if not self._opening.can_open:
            raise UnmaskError(
                f"{len(self._opening.uploads)} of {len(self._requests)} nodes have uploaded, {threshold} are needed"
            )
        messages = [self._question(partition) for partition in self._opening.uploads]
        partitions = {self._requests[partition][0].id: partition for partition in self._opening.uploads}
        if self._encoding is not None and self._encoding.noise:
            client_privacy.record(self._context, self._opening.step.header.round, self.crowd)
        outcome.bytes_on_wire += content_bytes(message.content for message in messages)
        answers: dict[int, Release] = {}
        problems: list[str] = []
        damaged: Counter[int] = Counter()
        for reply in self._ask(messages):
            partition = partitions[reply.node]
            try:
                answers[partition] = self._answer(reply, outcome, damaged)
            except ValueError as error:
                problems.append(f"node {partition}: {error}")
            if len(answers) == threshold:
                break
        try:
            vector, numbers = self._opening.open(answers)
        except UnmaskError as error:
            self._blame(damaged, outcome)
            raise UnmaskError("; ".join([str(error), *problems])) from None
        return vector, self._checked(self._numbers.decode(numbers))

    def _question(self, partition: int) -> Message:
        node, request = self._requests[partition]
        question = UnmaskRequest(
            header=self._header, uploads=self._opening.uploads, boxes=self._opening.boxes_for(partition)
        )
        content = RecordDict({CONFIG: request.to_record(), SECURE: question.to_record()})
        return Message(content, dst_node_id=node.id, message_type=UNMASK)

    def _blame(self, damaged: Mapping[int, int], outcome: Outcome) -> None:
        """Refuse the uploads of which the boxes do not open, if more nodes say so than may collude."""
        colluding = self._context.config.secagg.colluding_of(self._context.federation.num_nodes)
        for partition in [partition for partition, count in damaged.items() if count > colluding]:
            node, request = self._requests[partition]
            outcome.refuse(node.id, Refused(clients=request.clients, reason="its boxes of shares do not open"))

    def _answer(self, reply: Exchange, outcome: Outcome, damaged: Counter[int]) -> Release:
        if reply.content is None:
            raise ValueError(reply.problem)
        outcome.bytes_on_wire += content_bytes([reply.content])
        question = UnmaskRequest(header=self._header, uploads=self._opening.uploads, boxes={})
        answer = release_of(reply.content, question.digest)
        damaged.update(set(answer.bad) & set(self._opening.uploads))
        self._opening.check_release(answer)
        return answer

    def _checked(self, tally: Tally) -> Tally:
        """Return the counts and metrics of an opened sum, unless they show that it is not the sum of the uploads."""
        clients = sum(map(len, self._finished.values()))
        if (tally.nodes, tally.clients) != (len(self._finished), clients):
            raise UnmaskError("the masks do not cancel: a node has uploaded something else")
        for name, mean in tally.means.items():
            if (limits := limits_of(name)) and not limits[0] <= mean <= limits[1]:
                raise UnmaskError(f"the mean {name} is {mean:.3g}: a node has uploaded something else")
        return tally


def _header_of(
    context: ServerContext,
    secure: SecureContext,
    phase: Phase,
    received: SharedArrays,
    requests: Sequence[tuple[Node, Request]],
) -> Header:
    """Return the terms of a step; arguments as for `SecureStep`."""
    settings, num_nodes = context.config.secagg, context.federation.num_nodes
    rows = tuple(
        NodeRow(
            partition=node.partition,
            key=node.properties[KEY],
            signature=node.properties[SIGNATURE],
            clients=tuple(request.clients),
            versions=tuple(request.versions),
        )
        for node, request in sorted(requests, key=lambda pair: pair[0].partition)
    )
    threshold = settings.threshold_of(num_nodes, len(rows))
    is_silent = any(node.withholds_metrics for node, _ in requests)
    # A node's owner may expect more colluding nodes than the run, and refuse what would be too few for that.
    colluding = max(settings.colluding_of(num_nodes), usual_colluding(num_nodes))
    return Header(
        session=secure.session,
        experiment=context.experiment,
        round=requests[0][1].round,
        phase=phase,
        nodes=rows,
        threshold=threshold,
        max_examples=settings.max_examples_of(context.federation.num_examples.values()),
        metrics=() if is_silent else tuple(secure.metric_names(phase, requests[0][1].round)),
        squares=unknown_nodes(len(rows), threshold, colluding) >= SQUARES_FROM,
        settings=secure.settings,
        arrays=arrays_digest(received),
    )
