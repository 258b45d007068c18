"""Grids in one process that disturb a federation: other names and orders, repeated messages, a killed server."""

import random
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from flwr.app import ArrayRecord, Message, MessageType, RecordDict

from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.folders import files_below
from hyperfl_flwr.contract.leaks import sent_bytes
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.protocol.messages import CONFIG, Request, record_of
from hyperfl_flwr.protocol.packing import unpack_arrays
from hyperfl_flwr.server.in_process_grid import InProcessGrid

Settings = dict[str, Scalar]
"""All settings of a run by dotted key."""


def plain_grid(num_nodes: int, settings: Settings) -> InProcessGrid:
    """Return an in-process grid without disturbances."""
    return InProcessGrid(app, num_nodes, settings, {"simulated": True})


def round_of(message: Message) -> int:
    """Return the round of a TRAIN or EVALUATE message, or 0 for a message of the handshake."""
    return Request.of(message.content).round if CONFIG in message.content else 0


class KilledError(Exception):
    """Simulates the end of the server's process."""


class KilledGrid(InProcessGrid):
    """Kills the server in a round, after the first node has trained its clients, or in round 0 during the handshake."""

    def __init__(self, num_nodes: int, settings: Settings, *, in_round: int) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.in_round = in_round

    def answer(self, message: Message) -> Message:
        """Run the receiver of one message, see `InProcessGrid`."""
        reply = super().answer(message)
        if round_of(message) == self.in_round and message.metadata.message_type != MessageType.EVALUATE:
            raise KilledError
        return reply


class PermutedGrid(InProcessGrid):
    """Gives the nodes random ids, lists them backwards, and runs them out of order before any reply is fetched."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self._random = random.Random(7)  # noqa: S311 - an order, no secret
        self._replies: dict[str, Message] = {}
        ids = self._random.sample(range(1, 2**62), num_nodes)
        self._contexts = dict(zip(ids, reversed(self._contexts.values()), strict=True))
        for number, context in self._contexts.items():
            context.node_id = number

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        """Accept messages and return their ids."""
        ids = super().push_messages(messages)
        order = ids[::-1] if self._sent % 2 else self._random.sample(ids, len(ids))
        self._replies |= {name: self.answer(self._waiting.pop(name)) for name in order}
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        """Return the replies that are there."""
        return [self._replies.pop(name) for name in message_ids if name in self._replies]


class RecordingGrid(InProcessGrid):
    """Keeps the bytes of all messages, and the clients' files before and after the training of every round."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.sent: set[bytes] = set()
        self.rounds: dict[int, tuple[list[int], dict[str, bytes], dict[str, bytes]]] = {}
        self._clients = Path(str(settings["output"])) / "clients"

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        """Accept messages and return their ids."""
        messages = list(messages)
        self._keep(messages)
        if messages and messages[0].metadata.message_type == MessageType.TRAIN:
            asked = [Request.of(message.content).clients for message in messages]
            trained = sorted(client for clients in asked for client in clients)
            before = files_below(self._clients)
            self.rounds[round_of(messages[0])] = (trained, before, before)
        return super().push_messages(messages)

    def answer(self, message: Message) -> Message:
        """Run the receiver of one message, see `InProcessGrid`."""
        reply = super().answer(message)
        self._keep([reply])
        if message.metadata.message_type == MessageType.TRAIN:
            trained, before, _ = self.rounds[round_of(message)]
            self.rounds[round_of(message)] = (trained, before, files_below(self._clients))
        return reply

    def _keep(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.has_error():
                self.sent.add(str(message.error.reason).encode())
            else:
                self.sent.add(sent_bytes(message.content))


class ForgetfulGrid(InProcessGrid):
    """Counts the replies to earlier training messages that are still in memory each time a node has trained."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self._given: list[weakref.ref[RecordDict]] = []
        self.held: list[int] = []

    def answer(self, message: Message) -> Message:
        """Run the receiver of one message, see `InProcessGrid`."""
        reply = super().answer(message)
        if message.metadata.message_type == MessageType.TRAIN:
            self.held.append(sum(content() is not None for content in self._given))
            self._given.append(weakref.ref(reply.content))
        return reply


class RepeatingGrid(InProcessGrid):
    """Delivers every message twice, returns the second reply, and keeps the arrays of both if it is for training."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.pairs: list[tuple[dict[str, bytes], dict[str, bytes]]] = []

    def answer(self, message: Message) -> Message:
        """Run the receiver of one message, see `InProcessGrid`."""
        replies = [super(RepeatingGrid, self).answer(message) for _ in range(2)]
        if message.metadata.message_type == MessageType.TRAIN:
            first, second = (
                {k: v.tobytes() for k, v in unpack_arrays(record_of(r.content, "arrays", ArrayRecord)).items()}
                for r in replies
            )
            self.pairs.append((first, second))
        return replies[1]
