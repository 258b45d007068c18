"""Base of clients that share one part of the target network and keep the other, and train both together."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor

from clients.engine.base import BaseClient
from hyperfl_flwr.models.groups import initial_groups
from hyperfl_flwr.training.local_sgd import ParameterSet, train_epochs


class PartialClient(BaseClient):
    """Trains the whole network as FedAvg does, from FedAvg's initial values.

    A method names a shared and a private group that together are the target network, see
    `hyperfl_flwr.models.groups.groups_of`.
    """

    can_join: ClassVar[bool] = True

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the private group's values in FedAvg's initial model, from which all clients start."""
        return dict(initial_groups(self.new_target(), self.private, self.context.config.seed))

    def join(self, rounds: int, rng: np.random.Generator) -> None:
        """Train the private group in place; the shared one is constant."""
        self.model.requires_grad_(False)
        kept = [self.groups[name].train().requires_grad_(True) for name in self.private]
        parameters = [parameter for group in kept for parameter in group.parameters()]
        part = ParameterSet(parameters=parameters, learning_rate=self.steps.learning_rate)
        epochs = self.epochs().over(rounds)
        train_epochs(self.model, [part], self.context.data, epochs, rng)
