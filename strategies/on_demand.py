"""IT-PFL-HN's server makes models on demand, for clients that it has never trained.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, section 4. Each novel node is sent the
encoder, answers with a descriptor, and is sent the model that the tuned hypernetwork makes of it. All that comes from
a node are that descriptor and two numbers of samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hyperfl_flwr.arrays import SharedArrays, num_bytes, pack_arrays, unpack_arrays
from hyperfl_flwr.errors import RunFailedError
from hyperfl_flwr.grid import Node, exchange, greet
from hyperfl_flwr.messages import ARRAYS, DESCRIBE, NOVEL, PERSONALIZE, RECIPE, Report, content_bytes
from hyperfl_flwr.models.recipe import Recipe
from strategies.describing import DESCRIPTOR
from strategies.it_pfl import ITPFL
from strategies.replies import read_descriptions, read_report


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
        bytes_on_wire: Serialised contents of the messages and replies.
    """

    client: int
    descriptor: NDArray[np.float32]
    num_examples: int
    bytes_up: int
    bytes_encoder: int
    bytes_model: int
    bytes_on_wire: int

    def seen(self) -> str:
        """Return in words what the server saw of the client."""
        return (
            f"the server saw one vector of {len(self.descriptor)} numbers ({self.bytes_up} bytes), made of "
            f"{self.num_examples} samples; it sent the encoder ({self.bytes_encoder} bytes) and the model "
            f"({self.bytes_model} bytes)"
        )


def model_of(strategy: ITPFL, descriptor: NDArray[np.float32]) -> SharedArrays:
    """Return the model h(g(D)) of a descriptor [d], keyed `model/name`."""
    (tensors,) = strategy.server.generate([0], torch.tensor(descriptor)[None]).values()
    return {f"{strategy.group}/{name}": value.numpy() for name, value in tensors.items()}


def serve(grid: Grid, strategy: ITPFL, encoder: ArrayRecord, recipe: Recipe, timeout: float) -> list[Served]:
    """Make a model for each novel node of a grid.

    Args:
        grid: Flower's grid.
        strategy: With a tuned hypernetwork.
        encoder: Its parameters, keyed `encoder/name`.
        recipe: What its models take.
        timeout: Longest wait for all nodes, and for the replies of each step, in seconds.

    Raises:
        RunFailedError: If there is no novel node, or one could not be served; others have been, then.
    """
    nodes = [node for node in greet(grid, timeout) if node.properties.get(NOVEL)]
    if not nodes:
        raise RunFailedError(
            "no node is a novel client; start a SuperNode with novel-data='/path' novel-output='/path' in --node-config"
        )
    exchanges = _Exchanges(grid, nodes, recipe, timeout)
    found = exchanges.descriptors(encoder)
    models = {node: pack_arrays(model_of(strategy, row)) for node, (row, _) in found.items()}
    exchanges.send_models(models)
    exchanges.raise_problems()
    return [
        Served(
            client=node.clients[0],
            descriptor=found[node.id][0],
            num_examples=found[node.id][1],
            bytes_up=found[node.id][0].nbytes,
            bytes_encoder=num_bytes(unpack_arrays(encoder)),
            bytes_model=num_bytes(unpack_arrays(models[node.id])),
            bytes_on_wire=exchanges.bytes_on_wire[node.id],
        )
        for node in nodes
    ]


class _Exchanges:
    """What is exchanged with novel nodes; by a node's id, also why one gets no more messages."""

    def __init__(self, grid: Grid, nodes: Sequence[Node], recipe: Recipe, timeout: float) -> None:
        self.grid, self.nodes, self.recipe, self.timeout = grid, nodes, recipe, timeout
        self.bytes_on_wire = dict.fromkeys((node.id for node in nodes), 0)
        self.problems: dict[int, str] = {}

    def descriptors(self, encoder: ArrayRecord) -> dict[int, tuple[NDArray[np.float32], int]]:
        """Return the descriptor [d] that each node makes with an encoder, and the number of its samples."""
        expected = {DESCRIPTOR: np.zeros((1, self.recipe.descriptor_length), np.float32)}
        found: dict[int, tuple[NDArray[np.float32], int]] = {}

        def read(node: Node, content: RecordDict) -> None:
            report, own = read_descriptions(content, node.clients, expected)
            _refuse_failures(report)
            found[node.id] = own[node.clients[0]][DESCRIPTOR][0], report.results[0].num_examples

        self._ask(DESCRIBE, {node.id: encoder for node in self.nodes}, read)
        return found

    def send_models(self, models: Mapping[int, ArrayRecord]) -> None:
        """Send nodes their models."""
        self._ask(PERSONALIZE, models, lambda node, content: _refuse_failures(read_report(content, node.clients)))

    def raise_problems(self) -> None:
        """Raise a `RunFailedError` that names the nodes without a model, if there are any."""
        if self.problems:
            texts = [
                f"node {node.partition}: {self.problems[node.id]}" for node in self.nodes if node.id in self.problems
            ]
            raise RunFailedError(f"{len(texts)} of {len(self.nodes)} novel clients got no model; {'; '.join(texts)}")

    def _ask(self, kind: str, arrays: Mapping[int, ArrayRecord], read: Callable[[Node, RecordDict], None]) -> None:
        asked = [node for node in self.nodes if node.id in arrays]
        contents = [RecordDict({ARRAYS: arrays[node.id], RECIPE: ConfigRecord(self.recipe.values())}) for node in asked]
        messages = [
            Message(content, dst_node_id=node.id, message_type=kind)
            for node, content in zip(asked, contents, strict=True)
        ]
        for node, content, answer in zip(asked, contents, exchange(self.grid, messages, self.timeout), strict=True):
            try:
                if answer.content is None:
                    raise ValueError(answer.problem)
                self.bytes_on_wire[node.id] += content_bytes([content, answer.content])
                read(node, answer.content)
            except ValueError as error:
                self.problems[node.id] = str(error)


def _refuse_failures(report: Report) -> None:
    for failure in report.failures:
        raise ValueError(failure.reason)
