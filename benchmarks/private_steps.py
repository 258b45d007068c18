"""Measure noisy steps of local training (DP-SGD) against plain ones, on the same data and network."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.workload import NUM_CLASSES, Workload, client_data
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, train_epochs
from hyperfl_flwr.training.private_sgd import StepNoise, train_private_epochs

NOISE = StepNoise(clip_norm=1.0, noise_multiplier=1.0)


@dataclass(frozen=True, kw_only=True)
class PrivateSteps:
    """Median CPU seconds of a step, over rounds of local training in which plain and noisy training take turns.

    Attributes:
        target: Name of the target network.
        shape: Shape of an image.
        parameters: Number of parameters.
        plain: Seconds of a plain step.
        noisy: Seconds of a noisy step, with the network's test at the start of a round.
        ratio: Median of the ratios of consecutive rounds.
        vmap_ratio: The same ratio where the gradients have no closed form, so that `torch.func.vmap` computes them.
    """

    target: str
    shape: tuple[int, int, int]
    parameters: int
    plain: float
    noisy: float
    ratio: float
    vmap_ratio: float


class Scaled(nn.Module):
    """A network with one more parameter, a factor of its logits, for which there is no closed form."""

    def __init__(self, network: Target) -> None:
        super().__init__()
        self.network, self.factor = network, nn.Parameter(torch.ones(()))
        network.extractor.layout = nn.Identity()  # vmap has no channels-last layout

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits times the factor."""
        logits: Tensor = self.factor * self.network(images)
        return logits


def measure_private_steps(work: Workload, target: str, repetitions: int) -> PrivateSteps:
    """Measure the local training of one client, `repetitions` rounds of each kind after one that is not counted."""
    data, size = client_data(work), build_target(target, work.shape, NUM_CLASSES)
    epochs = Epochs(epochs=work.epochs, batch_size=work.batch_size)
    steps = epochs.num_steps(work.train)

    def plain() -> None:
        network = _network(work, target)
        train_epochs(network, [_all_of(network, work)], data, epochs, np.random.default_rng(0))

    def noisy() -> None:
        network = _network(work, target)
        train_private_epochs(network, [_all_of(network, work)], data, epochs, NOISE)

    def by_vmap() -> None:
        network = Scaled(_network(work, target))
        train_private_epochs(network, [_all_of(network, work)], data, epochs, NOISE)

    turns = [[_seconds(action) / steps for action in (plain, noisy, by_vmap)] for _ in range(1 + repetitions)][1:]
    return PrivateSteps(
        target=target,
        shape=work.shape,
        parameters=sum(parameter.numel() for parameter in size.parameters()),
        plain=statistics.median(turn[0] for turn in turns),
        noisy=statistics.median(turn[1] for turn in turns),
        ratio=statistics.median(turn[1] / turn[0] for turn in turns),
        vmap_ratio=statistics.median(turn[2] / turn[0] for turn in turns),
    )


def _network(work: Workload, target: str) -> Target:
    network = build_target(target, work.shape, NUM_CLASSES)
    network.load_state_dict(initial_state(network, torch_generator(0, "model")), assign=True)
    return network


def _all_of(network: nn.Module, work: Workload) -> ParameterSet:
    return ParameterSet(parameters=list(network.parameters()), learning_rate=work.learning_rate)


def _seconds(action: Callable[[], None]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began
