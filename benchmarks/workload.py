"""The measured workloads: the project's classes and the plain loops, on the same data and initial parameters."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from flwr.app import Message, MessageType
from torch import Tensor

from benchmarks.plain import PLAIN, PlainSettings, State, plain_round
from clients.engine.context import ClientContext
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import client_of, new_strategy
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.core.setting_types import Precision, Scalar
from hyperfl_flwr.data.federated_data import ClientData, load_federated_data
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.hosting import clients_of_node
from hyperfl_flwr.protocol.packing import unpack_arrays
from hyperfl_flwr.runs.run_directory import read_metrics
from hyperfl_flwr.server.federation import Federation
from hyperfl_flwr.server.handshake import Node
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid
from strategies.engine.base import BaseStrategy

LEARNING_RATES = {28: 0.01, 32: 0.02}
"""HyperFL's learning rates by image side."""

NUM_CLASSES = 10
NUM_NODES = 2
Round = Callable[[], float]
"""Runs a whole round and returns the training loss of its last epoch."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The size of a round.

    Attributes:
        method: Name of the project's method.
        shape: Shape of an image, (channels, height, width).
        train: Number of training samples per client.
        test: Number of test samples per client.
        batch_size: Number of samples per step.
        epochs: Number of local epochs.
        clients: Number of clients; a federated round trains all of them.
        device: Device of this project's clients, `cpu` or `cuda`; the plain loops run on the CPU.
    """

    method: str
    shape: tuple[int, int, int]
    train: int = 600
    test: int = 300
    batch_size: int = 50
    epochs: int = 5
    clients: int = 20
    device: str = "cpu"

    def as_json(self) -> dict[str, object]:
        """Return the fields, from which `from_json` makes an equal workload."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, object]) -> "Workload":
        """Build a workload from the result of `as_json`."""
        return cls(**{**document, "shape": tuple(document["shape"])})  # type: ignore[arg-type]

    @property
    def learning_rate(self) -> float:
        """Step size of the model or hypernetwork."""
        return LEARNING_RATES[self.shape[1]]

    def settings(self) -> dict[str, Scalar]:
        """Return the project's settings for this workload."""
        return default_settings() | {
            "method": self.method, "local-epochs": self.epochs, "batch-size": self.batch_size, "device": self.device,
            "threads": 1, "num-clients": self.clients, "learning-rate": self.learning_rate,
            "data.train-samples": self.train, "data.test-samples": self.test, "data.partition": "iid",
        }  # fmt: skip

    def config(self) -> RunConfig:
        """Return the validated run configuration of these settings."""
        return resolved(RunConfig.from_flat(self.settings()))

    def plain_settings(self) -> PlainSettings:
        """Return the plain loop's settings."""
        return PlainSettings(epochs=self.epochs, batch_size=self.batch_size, learning_rate=self.learning_rate)


def client_data(work: Workload, client: int = 0) -> ClientData:
    """Return standard normal images with random labels; the time of a step does not depend on their values."""
    rng = np.random.default_rng(client)
    sizes = (work.train, work.test)
    images = [torch.from_numpy(rng.standard_normal((num, *work.shape), dtype=np.float32)) for num in sizes]
    labels = [torch.from_numpy(rng.integers(0, NUM_CLASSES, num)) for num in sizes]
    return ClientData(
        train_images=images[0],
        train_labels=labels[0],
        test_images=images[1],
        test_labels=labels[1],
        augmentation=None,
        num_classes=NUM_CLASSES,
    )


def write_dataset(work: Workload, file: Path) -> None:
    """Write random images and labels for all clients, in the format of `npz:FILE`."""
    rng = np.random.default_rng(0)
    num = work.clients * (work.train + work.test)
    channels, height, width = work.shape
    size = (num, height, width) if channels == 1 else (num, height, width, channels)
    labels = np.arange(num) % NUM_CLASSES
    np.savez(file, images=rng.integers(0, 256, size, dtype=np.uint8), labels=labels)


def strategy(work: Workload, num_nodes: int = 1) -> BaseStrategy:
    """Return the project's strategy for nodes that host all clients."""
    properties = {"input-shape": list(work.shape), "num-classes": NUM_CLASSES}
    nodes = [
        Node(
            id=FIRST_NODE_ID + number,
            partition=number,
            clients=clients_of_node(number, num_nodes, work.clients),
            properties=properties,
        )
        for number in range(num_nodes)
    ]
    return new_strategy(work.config(), Federation(nodes), experiment="0" * 16, run_directory="/nowhere")


def initial_arrays(work: Workload) -> SharedArrays:
    """Return the shared parameters that a run of the project starts from."""
    return unpack_arrays(strategy(work).initial_arrays())


def client_round(work: Workload, program: str, folder: Path, precision: Precision = "fp32") -> Round:
    """Return a function that runs one client's round, as a node does for one of its clients.

    It loads the received parameters, evaluates, trains and evaluates again; only the project's client also stores the
    private parameters. Every call starts from the same parameters.

    Args:
        work: The workload.
        program: `ours` or `plain`.
        folder: Folder of the private state.
        precision: Arithmetic of this project's client, see `hyperfl_flwr.core.arithmetic`.
    """
    received, data = initial_arrays(work), client_data(work)
    config, device = work.config().model_copy(update={"precision": precision}), torch.device(work.device)
    context = ClientContext(
        config=config,
        client=0,
        data=data.to(device),
        device=device,
        state=PrivateState(folder, "benchmark", 0),
    )

    def ours() -> float:
        client = client_of(work.method)(context)
        parameters = [received[key] for key in client.keys()]  # noqa: SIM118 - a client is not a dict
        _, _, metrics = client.fit(parameters, {"round": 1, "version": 0, "kept-version": 0})
        return float(metrics["train-loss"])

    if program == "ours":
        return ours
    model = PLAIN[work.method](work.shape, NUM_CLASSES, work.plain_settings())
    state, private = model.state_of(_tensors(received)), _private(work, data)

    def plain() -> float:
        model.load(state, private)
        return model.train(data, numpy_generator(config.seed, "training", 0, 1))

    return plain


def _training_rng(number: int, client: int) -> np.random.Generator:
    return numpy_generator(0, "training", client, number)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Timings of federated rounds.

    Attributes:
        wall: Wall seconds of each round after the first.
        cpu: CPU seconds of each round after the first.
        losses: Mean training loss of each round, including the first.
    """

    wall: Sequence[float]
    cpu: Sequence[float]
    losses: Sequence[float]


def plain_rounds(work: Workload, num_rounds: int, dataset: Path) -> Rounds:
    """Run a plain loop's federation, with the project's data, initial parameters and sample order."""
    model = PLAIN[work.method](work.shape, NUM_CLASSES, work.plain_settings())
    data = load_federated_data(_on(work, dataset).data_settings())
    clients = [data.client(number) for number in range(work.clients)]
    state = model.state_of(_tensors(initial_arrays(work)))
    privates = [_private(work, clients[0]) for _ in clients]
    times, losses = [_now()], []
    for number in range(1, num_rounds + 1):
        state, loss = plain_round(model, state, privates, clients, functools.partial(_training_rng, number))
        times.append(_now())
        losses.append(loss)
    return _rounds(times, losses)


class TimedGrid(InProcessGrid):
    """A grid that records when each phase's messages are sent: those of the rounds, and finally of the evaluation.

    Attributes:
        times: Wall and CPU time of each phase.
        answered: Wall and CPU time of the last reply.
    """

    def __init__(self, settings: dict[str, Scalar]) -> None:
        super().__init__(app, NUM_NODES, settings, {"simulated": True})
        self.times: list[tuple[float, float]] = []
        self.answered: tuple[float, float] = (0.0, 0.0)

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        """Send messages and record the time of a train or evaluate phase."""
        messages = list(messages)
        if messages and messages[0].metadata.message_type in (MessageType.TRAIN, MessageType.EVALUATE):
            self.times.append(_now())
        return super().push_messages(messages)

    def answer(self, message: Message) -> Message:
        """Run the receiver of a message, and record the time of its reply."""
        reply = super().answer(message)
        self.answered = _now()
        return reply


def in_process_rounds(work: Workload, num_rounds: int, dataset: Path, folder: Path) -> Rounds:
    """Run the project's federation in this process."""
    config = _on(work, dataset, {"num-rounds": num_rounds, "checkpoint-every": num_rounds, "output": str(folder)})
    grid = TimedGrid(config.flat())
    run(grid, config)
    losses = [row["train_loss"] for row in read_metrics(folder) if row["kind"] == "train"]
    return _rounds(grid.times, losses)


def _on(work: Workload, dataset: Path, changes: dict[str, Scalar] | None = None) -> RunConfig:
    return RunConfig.from_flat(work.settings() | {"dataset": f"npz:{dataset}"} | (changes or {}))


def _rounds(times: Sequence[tuple[float, float]], losses: Sequence[float]) -> Rounds:
    spans = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in itertools.pairwise(times[1:])]
    return Rounds(wall=[wall for wall, _ in spans], cpu=[cpu for _, cpu in spans], losses=losses)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _tensors(arrays: SharedArrays) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value.copy()) for key, value in arrays.items()}


def _private(work: Workload, data: ClientData) -> State:
    context = ClientContext(
        config=work.config(), client=0, data=data, device=torch.device("cpu"),
        state=PrivateState(Path(), "", 0),
    )  # fmt: skip
    groups = client_of(work.method)(context).initial_private()
    return {f"{group}/{name}": value for group, tensors in groups.items() for name, value in tensors.items()}
