"""Generate models on demand for novel clients, on IT-PFL-HN's server.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, section 4. Each novel node receives the
encoder, answers with a descriptor, and receives the model that the tuned hypernetwork generates from it. A node sends
only this descriptor and two numbers of samples.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.models.model_spec import Recipe
from hyperfl_flwr.protocol.arrays import num_bytes
from hyperfl_flwr.protocol.messages import Failure
from hyperfl_flwr.protocol.packing import unpack_arrays
from hyperfl_flwr.protocol.queries import DESCRIPTOR, JOINS, PERSONALIZE, RECIPE, QuerySpec
from hyperfl_flwr.server.federation import Federation, request_handshakes
from hyperfl_flwr.server.handshake import Node
from strategies.engine.query_clients import Query, ask, descriptors_of
from strategies.it_pfl import ITPFL


@dataclass(frozen=True, kw_only=True)
class PersonalizedModel:
    """Record of the exchange between the server and one novel client.

    Attributes:
        client: The client's id.
        descriptor: The vector [d] that the server received.
        num_examples: Number of samples that the descriptor is computed from.
        bytes_up: Size of the descriptor in bytes.
        bytes_encoder: Size of the encoder that the client received, in bytes.
        bytes_model: Size of the model that the client received, in bytes.
    """

    client: int
    descriptor: NDArray[np.float32]
    num_examples: int
    bytes_up: int
    bytes_encoder: int
    bytes_model: int

    def seen(self) -> str:
        """Return a sentence about what the server received from the client and sent to it."""
        return (
            f"the server received one vector of {len(self.descriptor)} numbers ({self.bytes_up} bytes), computed from "
            f"{self.num_examples} samples; it sent the encoder ({self.bytes_encoder} bytes) and the model "
            f"({self.bytes_model} bytes)"
        )


def serve(grid: Grid, strategy: ITPFL, encoder: ArrayRecord, recipe: Recipe, timeout: float) -> list[PersonalizedModel]:
    """Generate and send a model for each novel node of a grid.

    Args:
        grid: Flower's grid.
        strategy: Strategy with a tuned hypernetwork.
        encoder: The encoder's parameters, keyed `encoder/name`.
        recipe: Specification of the run's models.
        timeout: Longest wait for all nodes, in seconds.

    Raises:
        RunFailedError: If novel nodes are missing, or a node could not be served; the other nodes have their models.
    """
    # The federation of the training nodes is replaced: only novel nodes receive queries here.
    nodes, refused = novel_nodes(grid, timeout, joins=False)
    context = replace(strategy.context, federation=Federation(nodes))
    clients = [client for node in context.federation.nodes for client in node.clients]
    records = {RECIPE: ConfigRecord(recipe.values())}
    query = descriptors_of(clients, encoder, recipe.descriptor_length, QuerySpec())
    described = ask(grid, context, strategy.progress.round, replace(query, records=records))
    rows = {client: arrays[DESCRIPTOR] for client, arrays in described.arrays.items()}
    models = {
        client: {key: value[0] for key, value in arrays.items()} for client, arrays in strategy.models_of(rows).items()
    }
    query = Query(kind=PERSONALIZE, clients=list(models), expected={}, per_client=models, records=records)
    personalized = ask(grid, context, strategy.progress.round, query)
    # Failures are raised last, so that one node cannot keep the others from their models.
    refuse_failures([*refused, *described.failures, *personalized.failures], len(clients) + len(refused))
    return [
        PersonalizedModel(
            client=client,
            descriptor=row[0],
            num_examples=described.num_examples[client],
            bytes_up=row.nbytes,
            bytes_encoder=num_bytes(unpack_arrays(encoder)),
            bytes_model=num_bytes(models[client]),
        )
        for client, row in rows.items()
    ]


def novel_nodes(grid: Grid, timeout: float, *, joins: bool) -> tuple[list[Node], list[Failure]]:
    """Wait for all novel nodes of a kind, and find those that can be served.

    A node is left out if its only client does not have its number, or if another node has the same number: it would
    receive the other one's model.

    Args:
        grid: Flower's grid.
        timeout: Longest wait in seconds.
        joins: True for nodes that join a finished run, False for those that receive models on demand.

    Returns:
        The nodes to serve, and a failure for each of the others, which may have the number of one that is served.

    Raises:
        RunFailedError: If nodes are missing.
    """
    found = request_handshakes(grid, timeout, novel=True)
    nodes = [node for node in found if bool(node.properties.get(JOINS)) == joins]
    uses = Counter(node.partition for node in nodes if list(node.clients) == [node.partition])
    problems = {
        node.id: "its node reports other clients than its own; start a novel node of this version"
        if list(node.clients) != [node.partition]
        else f"{uses[node.partition]} novel nodes have this number; give each a different partition-id"
        for node in nodes
        if list(node.clients) != [node.partition] or uses[node.partition] > 1
    }
    failures = [Failure(client=node.partition, reason=problems[node.id]) for node in nodes if node.id in problems]
    return [node for node in nodes if node.id not in problems], failures


def refuse_failures(failures: Sequence[Failure], number: int) -> None:
    """Raise a RunFailedError that names the novel clients, out of a number of them, that got no model."""
    if failures:
        texts = [f"client {failure.client}: {failure.reason}" for failure in failures]
        raise RunFailedError(f"{len(texts)} of {number} novel clients got no model; {'; '.join(texts)}")
