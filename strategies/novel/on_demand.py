"""Generate models on demand for novel clients, on IT-PFL-HN's server.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, section 4. Each novel node receives the
encoder, answers with a descriptor, and receives the model that the tuned hypernetwork generates from it. A node sends
only this descriptor and two numbers of samples.
"""

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
from hyperfl_flwr.server.federation import Federation, greet
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
    context = replace(strategy.context, federation=Federation(novel_nodes(grid, timeout, joins=False)))
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
    refuse_failures([*described.failures, *personalized.failures], len(clients))
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


def novel_nodes(grid: Grid, timeout: float, *, joins: bool) -> list[Node]:
    """Wait for all novel nodes of a kind, and check that the only client of each has the node's number.

    Args:
        grid: Flower's grid.
        timeout: Longest wait in seconds.
        joins: True for nodes that join a finished run, False for those that receive models on demand.

    Raises:
        RunFailedError: If nodes are missing, or have wrong numbers.
    """
    found = greet(grid, timeout, novel=True)
    nodes = [node for node in found if bool(node.properties.get(JOINS)) == joins]
    numbers = [node.partition for node in nodes]
    if len(set(numbers)) < len(numbers):
        raise RunFailedError(f"novel nodes have the numbers {numbers}; give each a different partition-id")
    if liars := [node.partition for node in nodes if list(node.clients) != [node.partition]]:
        raise RunFailedError(
            f"the novel nodes {liars} report other clients than their own; start novel nodes of this version"
        )
    return nodes


def refuse_failures(failures: Sequence[Failure], number: int) -> None:
    """Raise a RunFailedError that names the novel clients, out of a number of them, that got no model."""
    if failures:
        texts = [f"client {failure.client}: {failure.reason}" for failure in failures]
        raise RunFailedError(f"{len(texts)} of {number} novel clients got no model; {'; '.join(texts)}")
