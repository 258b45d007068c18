"""The membership game on the noisy steps of local training, in which canaries are records.

It is played on `train_private_epochs`, the function that clients train with, and checks the noisy steps and their
accounting alone: not how data are read and normalised, what else a client sends (metrics, numbers of samples), the
rounds of a run and what is repeated in them, nor private classifiers.

Canary i is a sample of which only feature i is not zero; a canary that does not take part is a sample of zeros, so that
the number of samples stays the same. The network is one linear layer without biases: the gradients of the canaries are
orthogonal, those of zeros are zero, and all others are longer than the clipping norm. What the auditor sees is the
change of the parameters, which is the sum of all noisy gradients; the score of a canary is its component in the
direction of the canary's gradient.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyperfl_flwr.audit.membership.dp_games import Game
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet
from hyperfl_flwr.training.private_sgd import StepNoise, sample_rate, train_private_epochs

_LENGTH = 4.0
"""Length of a canary. With two classes and parameters near 0 its gradient has the length 4 / sqrt(2), above 1."""

_MOVEMENT = 1e-3
"""About the largest change of a parameter: the predictions, and so the gradients, stay as at the beginning."""


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """The samples of a game, as training data."""

    train_images: Tensor
    train_labels: Tensor
    augmentation: None = None
    train_weights: None = None


@dataclass(frozen=True, kw_only=True)
class RecordGame(Game):
    """A game on the noisy steps of one client, whose samples are the canaries.

    Attributes:
        batch_size: Expected size of a batch.
        steps: Number of steps.
    """

    unit: ClassVar[str] = "record"

    batch_size: int
    steps: int

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a number is out of range.
        """
        super().__post_init__()
        if self.batch_size < 1 or self.steps < 1:
            raise ConfigError(
                f"a membership game on records needs a batch of at least 1 and at least 1 step, got {self.batch_size} "
                f"and {self.steps}"
            )

    @property
    def length(self) -> dict[str, int]:
        """Number of noisy steps."""
        return {"steps": self.steps}

    def scores(self, takes_part: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the component of all noisy gradients in the direction of each canary's [m]."""
        samples = _Samples(
            train_images=torch.diag(_LENGTH * torch.from_numpy(takes_part).float()),
            train_labels=torch.zeros(self.canaries, dtype=torch.int64),
        )
        network = nn.Linear(self.canaries, 2, bias=False)
        nn.init.zeros_(network.weight)
        rate = sample_rate(self.canaries, self.batch_size)
        # The sum of T noisy gradients reaches about q T + 4 sigma sqrt(T), in units of the clipping norm 1.
        learning_rate = _MOVEMENT * self.batch_size / (rate * self.steps + 4 * self.noise * math.sqrt(self.steps))
        train_private_epochs(
            network,
            [ParameterSet(parameters=list(network.parameters()), learning_rate=learning_rate)],
            samples,
            Epochs(epochs=0, batch_size=self.batch_size, steps=self.steps),
            StepNoise(clip_norm=1.0, noise_multiplier=self.noise),
        )
        # The clipped gradient of a canary of class 0 is (-1, 1) / sqrt(2) in its two weights; steps go the other way.
        change: NDArray[np.float64] = network.weight.detach().double().numpy()
        scores: NDArray[np.float64] = (change[0] - change[1]) * self.batch_size / (math.sqrt(2) * learning_rate)
        return scores
