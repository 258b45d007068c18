"""Query clients about their data, with one message to each node that hosts some of them."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from hyperfl_flwr.node.private_state import INITIAL
from hyperfl_flwr.protocol.arrays import SharedArrays, num_bytes, per_client_key
from hyperfl_flwr.protocol.messages import (
    ARRAYS,
    CONFIG,
    PER_CLIENT_ARRAYS,
    Failure,
    Request,
    printable,
)
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.queries import DESCRIBE, DESCRIPTOR, QUESTION, QuerySpec
from hyperfl_flwr.protocol.sizes import content_bytes
from hyperfl_flwr.server.exchange import exchange
from hyperfl_flwr.server.fetching import ReplyLimits
from strategies.engine.context import ServerContext
from strategies.engine.replies import read_answers
from strategies.engine.round_outcome import Refused

LARGEST_DESCRIPTOR = 1e4
"""Largest magnitude of a descriptor's numbers.

Honest ones are of a linear layer on standardised units, about 1 in size. With numbers of 1e25 one client would make the
hypernetwork that is tuned on them infinite.
"""


@dataclass(frozen=True, kw_only=True)
class Query:
    """A query to some clients.

    Attributes:
        kind: The message type, see `hyperfl_flwr.protocol.queries`.
        clients: Ids of the clients.
        expected: Names, shapes and types of the arrays in each client's answer; empty if answers hold no arrays.
        shared: Arrays that are sent to all clients.
        per_client: Arrays that are sent to single clients, by client; empty if there are none.
        question: The data that the query is about.
        records: Further records that are sent to each node.
        largest: Largest magnitude of a number in an answer's arrays.
    """

    kind: str
    clients: Collection[int]
    expected: Mapping[int, SharedArrays]
    shared: ArrayRecord = field(default_factory=ArrayRecord)
    per_client: Mapping[int, SharedArrays] = field(default_factory=dict)
    question: QuerySpec = field(default_factory=QuerySpec)
    records: Mapping[str, ConfigRecord] = field(default_factory=dict)
    largest: float = math.inf


@dataclass(kw_only=True)
class Answers:
    """Answers and failures of a query.

    Attributes:
        arrays: Arrays of each client that has answered.
        num_examples: Number of samples that each client's answer is about.
        failures: Clients without an answer, with reasons.
        refused: Refused replies by the node's Flower id.
        away: Clients of nodes that are gone, by the node's Flower id.
        bytes_on_wire: Serialised size of the messages and replies, in bytes.
    """

    arrays: dict[int, SharedArrays] = field(default_factory=dict)
    num_examples: dict[int, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    refused: dict[int, Refused] = field(default_factory=dict)
    away: dict[int, list[int]] = field(default_factory=dict)
    bytes_on_wire: int = 0


def ask(grid: Grid, context: ServerContext, server_round: int, query: Query) -> Answers:
    """Send a query and collect the answers.

    Args:
        grid: Flower's grid.
        context: Nodes and settings of the run.
        server_round: The current round.
        query: The query to send.

    Raises:
        RunFailedError: If a node's process died twice in a row.
    """
    messages, sent_clients = [], []
    for message, clients in _messages(context, server_round, query):
        messages.append(message)
        sent_clients.append(clients)
    found = Answers(bytes_on_wire=content_bytes(message.content for message in messages))
    limits = [_limits(message, clients, query) for message, clients in zip(messages, sent_clients, strict=True)]
    exchanges = exchange(grid, messages, context.config.round_timeout, limits=limits)
    for answer, clients in zip(exchanges, sent_clients, strict=True):
        try:
            if answer.content is None:
                raise ValueError(answer.problem)
            found.bytes_on_wire += content_bytes([answer.content])
            report, per_client = read_answers(answer.content, clients, query.expected)
            _refuse_large(per_client, query.largest)
        except ValueError as error:
            if answer.away:
                found.away[answer.node] = clients
            elif answer.refused or answer.content is not None:
                found.refused[answer.node] = Refused.of(answer, clients, str(error))
            found.failures += [Failure(client=client, reason=printable(str(error))) for client in clients]
            continue
        found.arrays |= per_client
        found.num_examples |= {result.client: result.num_examples for result in report.results}
        found.failures += report.failures
    found.arrays = dict(sorted(found.arrays.items()))  # independent of the nodes and their order
    found.failures.sort(key=lambda failure: failure.client)
    return found


def _refuse_large(per_client: Mapping[int, SharedArrays], largest: float) -> None:
    """Refuse answers with numbers that honest clients cannot have.

    Raises:
        ValueError: If there are such numbers; the message names the client.
    """
    for client, arrays in per_client.items():
        for key, value in arrays.items():
            if (np.abs(value) > largest).any():
                raise ValueError(f"{key} of client {client} has numbers beyond {largest:g}")


def _limits(message: Message, clients: Collection[int], query: Query) -> ReplyLimits:
    """Return the limits of a reply, which may hold more than the message: what the query expects of each client."""
    expected = [query.expected[client] for client in clients if client in query.expected]
    return ReplyLimits.to(message.content, sum(map(num_bytes, expected)), sum(map(len, expected)))


def _messages(context: ServerContext, server_round: int, query: Query) -> Iterator[tuple[Message, list[int]]]:
    """Yield a message for each node that hosts some of the clients, and the ids of these clients."""
    for node in context.federation.nodes:
        if clients := [client for client in node.clients if client in query.clients]:
            request = Request(
                round=server_round,
                experiment=context.experiment,
                run_directory=context.run_directory,
                clients=clients,
                versions=[INITIAL] * len(clients),
                kept_versions=[INITIAL] * len(clients),
            )
            content = RecordDict({ARRAYS: query.shared, CONFIG: request.to_record()})
            content[QUESTION] = query.question.to_record()
            for name, record in query.records.items():
                content[name] = record
            if query.per_client:
                per_client = {
                    per_client_key(client, key): value
                    for client in clients
                    for key, value in query.per_client[client].items()
                }
                content[PER_CLIENT_ARRAYS] = pack_arrays(per_client)
            yield Message(content, dst_node_id=node.id, message_type=query.kind), clients


def descriptors_of(clients: Collection[int], encoder: ArrayRecord, dimension: int, question: QuerySpec) -> Query:
    """Return the query for clients' descriptors.

    Args:
        clients: Ids of the clients.
        encoder: The encoder's parameters, keyed `encoder/name`.
        dimension: Length d of a descriptor.
        question: The data that the descriptors are computed from.
    """
    expected: SharedArrays = {DESCRIPTOR: np.zeros((1, dimension), np.float32)}
    return Query(
        kind=DESCRIBE,
        clients=clients,
        expected=dict.fromkeys(clients, expected),
        shared=encoder,
        question=question,
        largest=LARGEST_DESCRIPTOR,
    )
