"""One client's round: the project's own client classes against the same loop in plain PyTorch."""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.plain import PlainFedAvg, PlainHyperFL
from clients.base import BaseClient, ClientSetting
from hyperfl_flwr.arrays import SharedArrays, unpack_arrays
from hyperfl_flwr.config import RunConfig, default_settings
from hyperfl_flwr.data.client_data import ClientData
from hyperfl_flwr.grid import Federation, Node
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.rng import numpy_generator
from hyperfl_flwr.state import PrivateState
from strategies.base import Setting

SHAPES: dict[tuple[int, int, int], float] = {(1, 28, 28): 0.01, (3, 32, 32): 0.02}
"""Image shapes of HyperFL's experiments and their learning rates."""

NUM_CLASSES = 10
Round = Callable[[], float]
"""Runs a whole round from the same start and returns the training loss of its last epoch."""


@dataclass(frozen=True, kw_only=True)
class ClientTiming:
    """Medians over the repetitions.

    Attributes:
        method: Of the project.
        shape: Images (channels, height, width).
        ours_cpu: CPU seconds of the project's client.
        ours_wall: Wall seconds of it.
        plain_cpu: CPU seconds of the plain loop.
        plain_wall: Wall seconds of it.
        cpu_ratio: Median over the repetitions of ours / plain, of two rounds run one right after the other.
        wall_ratio: The same for wall seconds.
        loss_difference: Relative difference of the two training losses: whether both did the same work.
    """

    method: str
    shape: tuple[int, int, int]
    ours_cpu: float
    ours_wall: float
    plain_cpu: float
    plain_wall: float
    cpu_ratio: float
    wall_ratio: float
    loss_difference: float


def synthetic(shape: tuple[int, int, int], num_train: int, num_test: int) -> ClientData:
    """Return standard normal images with random labels; how long a step takes does not depend on them."""
    rng = np.random.default_rng(0)
    images = [torch.from_numpy(rng.standard_normal((num, *shape), dtype=np.float32)) for num in (num_train, num_test)]
    labels = [torch.from_numpy(rng.integers(0, NUM_CLASSES, num)) for num in (num_train, num_test)]
    return ClientData(
        train_images=images[0],
        train_labels=labels[0],
        test_images=images[1],
        test_labels=labels[1],
        augmentation=None,
        num_classes=NUM_CLASSES,
    )


def measure_clients(
    *,
    repetitions: int,
    epochs: int,
    num_train: int = 600,
    num_test: int = 300,
    batch_size: int = 50,
    shapes: Sequence[tuple[int, int, int]] = tuple(SHAPES),
) -> Iterator[ClientTiming]:
    """Measure every method at every shape on one thread; ours and plain take turns.

    A round is what a node does for one of its clients: load what was received, evaluate it, train, evaluate, and (the
    project's client alone) store the private parameters.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for shape in shapes:
            data = synthetic(shape, num_train, num_test)
            for method in ("fedavg", "hyperfl"):
                changes = {"method": method, "local-epochs": epochs, "batch-size": batch_size, "device": "cpu"}
                config = RunConfig.from_flat(default_settings() | changes)
                with tempfile.TemporaryDirectory() as folder:
                    ours, plain = _rounds(config, data, SHAPES[shape], Path(folder))
                    yield _compare(method, shape, ours, plain, repetitions)
    finally:
        torch.set_num_threads(threads)


def _rounds(config: RunConfig, data: ClientData, rate: float, folder: Path) -> tuple[Round, Round]:
    received = _initial_arrays(config, data)
    state = PrivateState(folder, "benchmark", 0)
    cpu = torch.device("cpu")
    setting = ClientSetting(config=config, client=0, data=data, device=cpu, state=state, learning_rate=rate)
    arrays = {key: torch.from_numpy(value.copy()) for key, value in received.items()}
    settings = {"epochs": config.local_epochs, "batch_size": config.batch_size}
    client = METHODS[config.method].client(setting)
    plain: PlainFedAvg | PlainHyperFL
    if config.method == "fedavg":
        plain = PlainFedAvg(data, arrays, learning_rate=rate, **settings)
    else:
        plain = PlainHyperFL(data, arrays, client.initial_private(), learning_rate=rate, **settings)

    def ours() -> float:
        return _fit(METHODS[config.method].client(setting), received)

    return ours, lambda: plain(numpy_generator(config.seed, "training", 0, 1))


def _initial_arrays(config: RunConfig, data: ClientData) -> SharedArrays:
    method = METHODS[config.method]
    properties = {"input-shape": list(data.train_images.shape[1:]), "num-classes": data.num_classes}
    node = Node(id=0, partition=0, clients=[0], properties=properties)
    setting = Setting(
        config=config,
        federation=Federation([node]),
        reductions=method.client.shared,
        experiment="benchmark",
        run_directory="",
    )
    return unpack_arrays(method.strategy(setting).initial_arrays())


def _fit(client: BaseClient, received: SharedArrays) -> float:
    parameters = [received[key] for key in client.keys()]  # noqa: SIM118 - a client is no dict
    _, _, metrics = client.fit(parameters, {"round": 1, "version": 0, "kept-version": 0})
    return float(metrics["train-loss"])


def _compare(method: str, shape: tuple[int, int, int], ours: Round, plain: Round, repetitions: int) -> ClientTiming:
    pairs = []
    losses = ours(), plain()  # the first of each also warms up
    for number in range(repetitions):
        if number % 2:
            right, left = _timed(plain), _timed(ours)
        else:
            left, right = _timed(ours), _timed(plain)
        pairs.append((*left, *right))
    ours_cpu, ours_wall, plain_cpu, plain_wall = (statistics.median(column) for column in zip(*pairs, strict=True))
    return ClientTiming(
        method=method,
        shape=shape,
        ours_cpu=ours_cpu,
        ours_wall=ours_wall,
        plain_cpu=plain_cpu,
        plain_wall=plain_wall,
        cpu_ratio=statistics.median(pair[0] / pair[2] for pair in pairs),
        wall_ratio=statistics.median(pair[1] / pair[3] for pair in pairs),
        loss_difference=abs(losses[0] - losses[1]) / max(abs(losses[1]), math.ulp(1.0)),
    )


def _timed(action: Round) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - cpu, time.perf_counter() - wall
