"""Let clients join a finished run: the server trains an embedding for each, with a constant hypernetwork.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021: a new client under a
fixed hypernetwork. A step is pFedHN's, see `hyperfl_flwr.models.new_embedding`: the server generates and sends the
client's model, the client trains it and returns its change. Neither the hypernetwork nor the embedding is sent.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from hyperfl_flwr.config.joining import inherited
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.protocol.arrays import SharedArrays, num_bytes
from hyperfl_flwr.protocol.messages import Failure, group_of
from hyperfl_flwr.protocol.queries import JOIN, JOINING, RECIPE, JoiningStep
from hyperfl_flwr.server.federation import Federation
from strategies.engine.query_clients import Answers, Query, ask
from strategies.novel.on_demand import novel_nodes, refuse_failures
from strategies.pfedhn import PFedHN


@dataclass(frozen=True, kw_only=True)
class JoinedClient:
    """Record of the exchange between the server and a client that has joined.

    Attributes:
        client: The client's id.
        num_examples: Number of its training samples.
        rounds: Number of steps of its embedding.
        bytes_of_round: Size of its model in bytes, which is sent in either direction in each step.
    """

    client: int
    num_examples: int
    rounds: int
    bytes_of_round: int

    def seen(self) -> str:
        """Return a sentence about what the server received from the client and sent to it."""
        return (
            f"the server received {self.rounds} changes of the client's model ({self.bytes_of_round} bytes each), "
            f"trained on {self.num_examples} samples; it sent {self.rounds + 1} models and kept the hypernetwork"
        )


def join_clients(grid: Grid, strategy: PFedHN, recipe: TargetRecipe, rounds: int, timeout: float) -> list[JoinedClient]:
    """Train an embedding for each joining node of a grid, and let it keep a model.

    Args:
        grid: Flower's grid.
        strategy: Strategy with a trained hypernetwork, which is not changed.
        recipe: Network, input and classes of the clients' models.
        rounds: Number of steps.
        timeout: Longest wait for all nodes, in seconds.

    Raises:
        RunFailedError: If joining nodes are missing, or a client got no model; the other clients have theirs.
    """
    nodes, refused = novel_nodes(grid, timeout, joins=True)
    context = replace(strategy.context, federation=Federation(nodes))
    clients = [client for node in nodes for client in node.clients]
    embeddings = {client: strategy.new_embedding(recipe.target) for client in clients}
    settings = json.dumps(inherited(context.config.flat()))
    failures: list[Failure] = []

    def step(number: int, *, is_last: bool) -> Answers:
        gone = {failure.client for failure in failures}
        models: Mapping[int, SharedArrays] = {
            client: {f"{strategy.group}/{name}": value.numpy() for name, value in embedding.generate().items()}
            for client, embedding in embeddings.items()
            if client not in gone
        }
        records = {
            RECIPE: ConfigRecord(recipe.values()),
            JOINING: JoiningStep(settings=settings, number=number, is_last=is_last).to_record(),
        }
        expected = {} if is_last else models
        query = Query(kind=JOIN, clients=list(models), expected=expected, per_client=models, records=records)
        answers = ask(grid, context, strategy.progress.round, query)
        failures.extend(answers.failures)
        return answers

    for number in range(1, rounds + 1):
        for client, arrays in step(number, is_last=False).arrays.items():
            change = {key.partition("/")[2]: torch.tensor(value) for key, value in arrays.items() if group_of(key)}
            embeddings[client].update(change)
    last = step(rounds + 1, is_last=True)
    # Failures are raised last, so that one node cannot keep the others from their models.
    refuse_failures([*refused, *failures], len(clients) + len(refused))
    size = {
        client: num_bytes({name: value.numpy() for name, value in embeddings[client].generate().items()})
        for client in clients
    }
    return [
        JoinedClient(client=client, num_examples=number, rounds=rounds, bytes_of_round=size[client])
        for client, number in sorted(last.num_examples.items())
    ]
