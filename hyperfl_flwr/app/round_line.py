"""One line about each round for the log of a node, which its owner reads."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.node.evaluations import Evaluations
from hyperfl_flwr.node.private_state import client_folder
from hyperfl_flwr.protocol.messages import Request
from hyperfl_flwr.protocol.sizes import content_bytes

MOST_CLIENTS = 10
"""Largest number of clients in a line."""


def round_line(states: Path, message: Message, reply: Message, seconds: float) -> str:
    """Describe how a node has trained or evaluated its clients.

    Args:
        states: Folder with the private state of the run's clients, where the node has stored their evaluations.
        message: The message.
        reply: The node's reply.
        seconds: Time between both.

    Returns:
        Such as `round 3: client 0: accuracy personalized 93.10 %, received model 91.20 %; 6.3 s, received 0.104 MB,
        sends 0.104 MB`.
    """
    request, failed = Request.of(message.content), _failed(reply.content)
    # In a training, clients first evaluate the received model, which is the global state after the round before.
    rounds = {"aggregate": request.round}
    if message.metadata.message_type == MessageType.TRAIN:
        rounds = {"personalized": request.round, "aggregate": request.round - 1}
    shown, others = request.clients[:MOST_CLIENTS], request.clients[MOST_CLIENTS:]
    parts = [
        f"client {client}: {'failed' if client in failed else _scores(client_folder(states, client), rounds)}"
        for client in shown
    ]
    if others:
        parts.append(f"and {len(others)} more clients, {len(failed.intersection(others))} of them failed")
    came, left = (content_bytes([each.content]) / 1e6 for each in (message, reply))
    costs = f"{seconds:.1f} s, received {came:.3f} MB, sends {left:.3f} MB"
    return f"round {request.round}: {'; '.join(parts)}; {costs}"


def _failed(content: RecordDict) -> set[int]:
    """Return the clients that a reply, with or without secure sums, reports as failed."""
    records = [record for record in content.values() if isinstance(record, ConfigRecord)]
    return {client for record in records for client in cast(Iterable[int], record.get("failed", []))}


def _scores(folder: Path, rounds: Mapping[str, int]) -> str:
    """Return the scores of each kind of model after a round."""
    kept = Evaluations.read(folder)
    if kept is None:
        return "not evaluated"
    task, names = TASKS[kept.task], {"personalized": "personalized", "aggregate": "received model"}
    found = {
        kind: entry.score
        for kind, number in rounds.items()
        if (entry := kept.newest(kind)) is not None and entry.round == number
    }
    if not found or any(map(math.isnan, found.values())):
        return "no test samples" if found else "not evaluated"
    shown = (f"{names[kind]} {task.text(score)}" for kind, score in found.items())
    return f"{task.score_title} " + ", ".join(shown)
