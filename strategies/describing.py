"""Asks clients for the descriptors that an encoder makes of their data."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from hyperfl_flwr.arrays import SharedArrays
from hyperfl_flwr.grid import exchange
from hyperfl_flwr.messages import ARRAYS, CONFIG, DESCRIBE, Failure, Request, content_bytes
from hyperfl_flwr.state import INITIAL
from strategies.base import Setting
from strategies.replies import read_descriptions

DESCRIPTOR = "embedding/weight"
"""Key of a client's descriptor [1, d]: what its model is generated of comes and goes under the same name."""


@dataclass(kw_only=True)
class Descriptions:
    """What came of asking.

    Attributes:
        descriptors: [1, d] of each client that has answered.
        failures: The others.
        bytes_on_wire: Serialised contents of the messages and replies.
    """

    descriptors: dict[int, SharedArrays] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    bytes_on_wire: int = 0


def ask_for_descriptors(
    grid: Grid, setting: Setting, server_round: int, encoder: ArrayRecord, clients: Collection[int], dimension: int
) -> Descriptions:
    """Send an encoder to the nodes of some clients and collect what it makes of each client's data.

    Args:
        grid: Flower's grid.
        setting: Nodes and run.
        server_round: The round in which this is done.
        encoder: Its parameters, keyed `encoder/name`.
        clients: Whose descriptors.
        dimension: Length d of a descriptor.

    Raises:
        RunFailedError: If a node's process died twice in a row.
    """
    messages, asked = [], []
    for node in setting.federation.nodes:
        if mine := [client for client in node.clients if client in clients]:
            request = Request(
                round=server_round,
                experiment=setting.experiment,
                run_directory=setting.run_directory,
                clients=mine,
                versions=[INITIAL] * len(mine),
                kept_versions=[INITIAL] * len(mine),
            )
            content = RecordDict({ARRAYS: encoder, CONFIG: request.to_record()})
            messages.append(Message(content, dst_node_id=node.id, message_type=DESCRIBE))
            asked.append(mine)
    found = Descriptions(bytes_on_wire=content_bytes(message.content for message in messages))
    expected = {DESCRIPTOR: np.zeros((1, dimension), np.float32)}
    for answer, mine in zip(exchange(grid, messages, setting.config.round_timeout), asked, strict=True):
        try:
            if answer.content is None:
                raise ValueError(answer.problem)
            found.bytes_on_wire += content_bytes([answer.content])
            report, own = read_descriptions(answer.content, mine, expected)
        except ValueError as error:
            found.failures += [Failure(client=client, reason=str(error)) for client in mine]
            continue
        found.descriptors |= own
        found.failures += report.failures
    return found
