"""Measure the checks of a node's owner: largest values in honest runs, of forged networks, and time.

`python -m benchmarks node-checks` measures what docs/privacy/node-checks.md shows. Runs are in this process.
`benchmarks.forged_networks` has the forged networks.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from flwr.app import Message, MessageType
from torch import Tensor, nn

from benchmarks.forged_networks import Forgery, generate
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.files.storage import read_arrays
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.models.initialisation import initial_model
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.node.received_models import PATTERN
from hyperfl_flwr.privacy.received_network import STATISTICS, Measured, ReceivedNetwork, Statistic, measured_network
from hyperfl_flwr.server.in_process_grid import InProcessGrid

SHORT: Mapping[str, Scalar] = {
    "feddf.steps": 20, "fedftg.iterations": 2, "fedftg.student-steps": 5, "fedgen.generator-steps": 5,
    "fedakd.samples": 200,
}  # fmt: skip
"""Less distillation, which would take most of the time."""

OF_METHOD: Mapping[str, Mapping[str, Scalar]] = {"fedbn": {"target": "resnet18", "local-epochs": 1}}
"""Settings that a method needs."""

LIMITS: Mapping[Statistic, float] = {
    statistic: getattr(NodeConfig(), f"max_{statistic.replace('-', '_')}") for statistic in STATISTICS
}
"""The default limits of a node."""

Largest = dict[Statistic, float]


class MeasuringGrid(InProcessGrid):
    """Runs nodes whose owners check everything, and remembers the largest value of each statistic.

    Args:
        settings: The run's settings.
    """

    def __init__(self, settings: Mapping[str, Scalar]) -> None:
        checks = {f"check-{statistic}": "warn" for statistic in STATISTICS}
        super().__init__(app, 1, settings, {"simulated": True, **checks})
        self._folder = Path(str(settings["output"]))
        self.largest: Largest = {}

    def answer(self, message: Message) -> Message:
        """Run the receiver of one message, and read what its clients have measured."""
        reply = super().answer(message)
        if message.metadata.message_type == MessageType.TRAIN:
            for file in self._folder.rglob(PATTERN):
                for statistic, value, _ in read_arrays(file)[1]["facts"]["measured"]:
                    self.largest[statistic] = max(value, self.largest.get(statistic, value))
        return reply


def honest(method: str, changes: Mapping[str, Scalar]) -> Largest:
    """Return the largest value of each statistic over all clients and rounds of a run without a forger."""
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Scalar] = {"dataset": "digits", "num-clients": 5, "num-rounds": 20, "device": "cpu"}
        settings = {
            **default_settings(method),
            **SHORT,
            **sizes,
            **OF_METHOD.get(method, {}),
            **changes,
            "method": method,
            "output": f"{folder}/run",
        }
        grid = MeasuringGrid(settings)
        run(grid, RunConfig.from_flat(settings), plots=False)
    return grid.largest


def digits(client: int) -> tuple[Tensor, Tensor]:
    """Return the training samples of a client of five, and their labels."""
    data = load_federated_data(RunConfig.from_flat(default_settings("fedavg") | {"dataset": "digits", "num-clients": 5})
                               .data_settings())  # fmt: skip
    found = data.client(client, torch.device("cpu"))
    return found.train_images, found.train_labels


def forged(forgery: Forgery, method: str = "") -> Sequence[Measured]:
    """Return what client 0 measures of a forged network after an honest one; the forger knows client 1's samples.

    Args:
        forgery: Changes the honest network.
        method: Method whose server has generated the honest network; empty for the common initial one.
    """
    (images, labels), (public, _) = digits(0), digits(1)
    network = build_target("cnn", tuple(images.shape[1:]), 10)
    network.load_state_dict(initial_model(network, 0), assign=True)
    if method:
        generate(network, method)
    last = _measured(network, images, labels, None)
    forgery(network.eval(), public, torch.Generator().manual_seed(0))
    return _measured(network, images, labels, last).measured


def seconds(target: str, shape: tuple[int, ...], repeats: int) -> float:
    """Return the median CPU time of the checks of a target network with 200 samples, the most that are used."""
    images, labels = torch.randn(200, *shape), torch.arange(200) % 10
    network = build_target(target, shape, 10)
    network.load_state_dict(initial_model(network, 0), assign=True)
    last, times = None, []
    for _ in range(repeats):
        began = time.process_time()
        last = _measured(network, images, labels, last)
        times.append(time.process_time() - began)
    return sorted(times)[repeats // 2]


def _measured(network: nn.Module, images: Tensor, labels: Tensor, last: ReceivedNetwork | None) -> ReceivedNetwork:
    names = {name for name, _ in network.named_parameters()}
    return measured_network(network.eval(), images[:200], labels[:200], received=names, last=last, batch_size=50)
