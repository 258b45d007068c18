"""IT-PFL-HN's server makes models on demand, for clients that it has never trained.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, section 4. Each novel node is sent the
encoder, answers with a descriptor, and is sent the model that the tuned hypernetwork makes of it. All that comes from
a node are that descriptor and two numbers of samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.models.model_spec import Recipe
from hyperfl_flwr.protocol.arrays import num_bytes, unpack_arrays
from hyperfl_flwr.protocol.messages import Failure
from hyperfl_flwr.protocol.queries import DESCRIPTOR, PERSONALIZE, RECIPE, Question
from hyperfl_flwr.server.federation import Federation, greet
from hyperfl_flwr.server.handshake import Node
from strategies.engine.query_clients import Query, ask, descriptors_of
from strategies.it_pfl import ITPFL


@dataclass(frozen=True, kw_only=True)
class Served:
    """What passed between the server and one novel client.

    Attributes:
        client: Its number.
        descriptor: The vector [d] that the server was sent.
        num_examples: Of how many samples it was made.
        bytes_up: Size of the descriptor.
        bytes_encoder: Size of the encoder that it was sent.
        bytes_model: Size of the model that it was sent.
    """

    client: int
    descriptor: NDArray[np.float32]
    num_examples: int
    bytes_up: int
    bytes_encoder: int
    bytes_model: int

    def seen(self) -> str:
        """Return in words what the server saw of the client."""
        return (
            f"the server saw one vector of {len(self.descriptor)} numbers ({self.bytes_up} bytes), made of "
            f"{self.num_examples} samples; it sent the encoder ({self.bytes_encoder} bytes) and the model "
            f"({self.bytes_model} bytes)"
        )


def serve(grid: Grid, strategy: ITPFL, encoder: ArrayRecord, recipe: Recipe, timeout: float) -> list[Served]:
    """Make a model for each novel node of a grid.

    Args:
        grid: Flower's grid.
        strategy: With a tuned hypernetwork.
        encoder: Its parameters, keyed `encoder/name`.
        recipe: What its models take.
        timeout: Longest wait for all nodes, in seconds.

    Raises:
        RunFailedError: If novel nodes are missing, or one could not be served; others have been, then.
    """
    setting = replace(strategy.setting, federation=Federation(_novel_nodes(grid, timeout)))
    clients = [client for node in setting.federation.nodes for client in node.clients]
    records = {RECIPE: ConfigRecord(recipe.values())}
    query = descriptors_of(clients, encoder, recipe.descriptor_length, Question())
    described = ask(grid, setting, strategy.progress.round, replace(query, records=records))
    rows = {client: arrays[DESCRIPTOR] for client, arrays in described.arrays.items()}
    models = {
        client: {key: value[0] for key, value in arrays.items()} for client, arrays in strategy.models_of(rows).items()
    }
    query = Query(kind=PERSONALIZE, clients=list(models), expected={}, own=models, records=records)
    personalized = ask(grid, setting, strategy.progress.round, query)
    _refuse_failures([*described.failures, *personalized.failures], len(clients))
    return [
        Served(
            client=client,
            descriptor=row[0],
            num_examples=described.num_examples[client],
            bytes_up=row.nbytes,
            bytes_encoder=num_bytes(unpack_arrays(encoder)),
            bytes_model=num_bytes(models[client]),
        )
        for client, row in rows.items()
    ]


def _novel_nodes(grid: Grid, timeout: float) -> list[Node]:
    """Wait for all novel nodes; each has its number as its only client."""
    nodes = greet(grid, timeout, novel=True)
    numbers = [node.partition for node in nodes]
    if len(set(numbers)) < len(numbers):
        raise RunFailedError(f"novel nodes have the numbers {numbers}; give each a partition-id of its own")
    if liars := [node.partition for node in nodes if list(node.clients) != [node.partition]]:
        raise RunFailedError(f"the novel nodes {liars} name other clients than themselves")
    return nodes


def _refuse_failures(failures: Sequence[Failure], number: int) -> None:
    if failures:
        texts = [f"client {failure.client}: {failure.reason}" for failure in failures]
        raise RunFailedError(f"{len(texts)} of {number} novel clients got no model; {'; '.join(texts)}")
