"""Small federations in one process, grids that disturb them, and functions that compare their run folders."""

import json
import os
import random
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp import Grid

import hyperfl_flwr.app.server
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig, default_settings
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.storage import read_arrays
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.protocol.messages import CONFIG, Request, record_of
from hyperfl_flwr.runs.checkpoint import Checkpoints, Progress
from hyperfl_flwr.runs.run_directory import read_metrics
from hyperfl_flwr.server.federation import handshake
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from strategies.engine.context import ServerContext

Settings = dict[str, Scalar]
MakeGrid = Callable[[int, Settings], Grid]
Federate = Callable[..., Path]
Call = Callable[..., tuple[int, str, str]]
"""Runs `hyperfl`: words -> (exit code, stdout, stderr)."""

NUM_CLIENTS = 5
SMALL: Settings = {
    "num-clients": NUM_CLIENTS,
    "num-rounds": 2,
    "local-epochs": 1,
    "batch-size": 20,
    "device": "cpu",
    "data.train-samples": 40,
    "data.test-samples": 20,
    "hyperfl.hidden-width": 8,
    "hyperfl.embedding-dim": 4,
    "pfedhn.hidden-width": 8,
    "pfedhn.hidden-layers": 1,
    "it-pfl.fine-tune-rounds": 1,
    "fedgen.generator-width": 8,
    "fedgen.generator-steps": 2,
    "fedgen.generated-samples": 8,
    "fedftg.iterations": 1,
    "fedftg.student-steps": 2,
    "fedftg.batch-size": 6,
    "fedftg.generator-width": 2,
    "feddf.steps": 2,
    "feddf.batch-size": 8,
    "priv-hfl.local-steps": 2,
    "fedakd.samples": 30,
    "priv-hfl.distill": True,
    "priv-hfl.generator-width": 2,
    "priv-hfl.pseudo-samples": 8,
}
"""Settings of a small federation. An epoch has two steps, so that the order of the samples matters."""

REPRESENTATIVES = ("local", "fedavg", "hyperfl", "pfedhn", "it-pfl", "priv-hfl", "fedgen")
"""Methods that together have every kind of group, reduction and phase; they stand for all where the code under test is
that of the engine."""

of_every_method = pytest.mark.parametrize("method", METHODS)
of_representatives = pytest.mark.parametrize("method", REPRESENTATIVES)

OF_METHOD: Mapping[str, Settings] = {"fedbn": {"target": "own_networks:with_batchnorm"}}
"""Settings that a method needs besides `SMALL`."""

TIMES = {"seconds", "client_seconds", "train_seconds", "peak_memory_mb"}
"""Fields in which two equal runs may differ."""


def small_settings(**changes: Scalar) -> Settings:
    """Return the settings of a small federation; `num_rounds` stands for `num-rounds`."""
    of_method = OF_METHOD.get(str(changes.get("method")), {})
    return default_settings() | SMALL | of_method | {key.replace("_", "-"): value for key, value in changes.items()}


def plain_grid(num_nodes: int, settings: Settings) -> InProcessGrid:
    """Return an in-process grid without disturbances."""
    return InProcessGrid(app, num_nodes, settings, {"simulated": True})


def trained(settings: Settings) -> Path:
    """Run a federation on one node to its end, without figures and without waiting for the disk; return its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hyperfl_flwr.app.server, "plot_run", lambda _: None)
        patch.setattr(os, "fsync", lambda _: None)
        return hyperfl_flwr.app.server.run(plain_grid(1, settings), RunConfig.from_flat(settings))


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
        reply = super().answer(message)
        if round_of(message) == self.in_round and message.metadata.message_type != MessageType.EVALUATE:
            raise KilledError
        return reply


class PermutedGrid(InProcessGrid):
    """Gives the nodes random ids, lists them backwards, and runs them out of order before any reply is fetched."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self._random = random.Random(7)
        self._replies: dict[str, Message] = {}
        ids = self._random.sample(range(1, 2**62), num_nodes)
        self._contexts = dict(zip(ids, reversed(self._contexts.values()), strict=True))
        for number, context in self._contexts.items():
            context.node_id = number

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        ids = super().push_messages(messages)
        order = ids[::-1] if self._sent % 2 else self._random.sample(ids, len(ids))
        self._replies |= {name: self.answer(self._waiting.pop(name)) for name in order}
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]


class RecordingGrid(InProcessGrid):
    """Keeps the bytes of all messages, and the clients' files before and after the training of every round."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.sent: set[bytes] = set()
        self.rounds: dict[int, tuple[list[int], dict[str, bytes], dict[str, bytes]]] = {}
        self._clients = Path(str(settings["output"])) / "clients"

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        messages = list(messages)
        self._keep(messages)
        if messages and messages[0].metadata.message_type == MessageType.TRAIN:
            asked = [Request.of(message.content).clients for message in messages]
            trained = sorted(client for clients in asked for client in clients)
            before = files_below(self._clients)
            self.rounds[round_of(messages[0])] = (trained, before, before)
        return super().push_messages(messages)

    def answer(self, message: Message) -> Message:
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
                self.sent.add(recorddict_to_proto(message.content).SerializeToString())


class ForgetfulGrid(InProcessGrid):
    """Counts the replies to earlier training messages that are still in memory each time a node has trained."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self._given: list[weakref.ref[RecordDict]] = []
        self.held: list[int] = []

    def answer(self, message: Message) -> Message:
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
        replies = [super(RepeatingGrid, self).answer(message) for _ in range(2)]
        if message.metadata.message_type == MessageType.TRAIN:
            first, second = (
                {k: v.data for k, v in record_of(r.content, "arrays", ArrayRecord).items()} for r in replies
            )
            self.pairs.append((first, second))
        return replies[1]


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def last_checkpoint(run: Path) -> tuple[dict[str, np.ndarray], Progress]:
    """Return the newest checkpoint of a run."""
    checkpoints = Checkpoints(run / "checkpoints")
    return checkpoints.load(checkpoints.rounds()[-1])


def exact(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return each array's dtype, shape and bytes, so that two results are equal only if all bits are."""
    return {key: (str(value.dtype), value.shape, value.tobytes()) for key, value in arrays.items()}


def private_arrays(run: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return all stored private arrays of a simulation: file -> name -> array."""
    clients = run / "clients"
    return {str(path.relative_to(clients)): read_arrays(path)[0] for path in sorted(clients.rglob("*.npz"))}


def current_private(run: Path) -> dict[int, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Return the private arrays that each client has after the last checkpoint."""
    _, progress = last_checkpoint(run)
    stored = private_arrays(run)
    names = {client: f"client-{client:05d}/round-{version:06d}.npz" for client, version in progress.versions.items()}
    return {client: exact(stored[name]) for client, name in names.items() if name in stored}


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times and memory."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in read_metrics(run)]


def outcome(run: Path) -> dict[str, Any]:
    """Return everything in which two equal runs agree: shared and private arrays, progress, metrics and accuracies."""
    arrays, progress = last_checkpoint(run)
    summary = json.loads((run / "summary.json").read_text())
    return {
        "arrays": exact(arrays),
        "progress": progress,
        "private": current_private(run),
        "metrics": metrics(run),
        "accuracies": {key: value for key, value in summary.items() if key.startswith("test_accuracy")},
    }


def setting_of(config: RunConfig, grid: InProcessGrid) -> ServerContext:
    federation = handshake(grid, config.hosted_clients, 10.0)
    return ServerContext(
        config=resolved(config), federation=federation, reductions={}, experiment="0" * 16, run_directory=config.output
    )
