"""Base of clients that share the whole model and keep a second one."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from clients.engine.base import BaseClient
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import initial_model
from hyperfl_flwr.models.layers.dropout import seed_dropout
from hyperfl_flwr.node.private_state import INITIAL
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.local_sgd import ParameterSet, Predict, train_epochs


class PersonalClient(BaseClient):
    """Client with the shared group `model` and the private group `personal`, another target network.

    The metrics `aggregate` are of the received model alone, `personalized` of the private one. A client that is sent
    the model without having been trained, because it joins a finished run or has no labels, uses the received model.
    """

    model_group: ClassVar[str] = "personal"
    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.MEAN_BY_EXAMPLES}
    private: ClassVar[tuple[str, ...]] = ("personal",)
    can_join: ClassVar[bool] = True

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the groups `model` and `personal`."""
        groups = super().build_groups()
        self.personal = self.new_target()
        return {**groups, "personal": self.personal}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return FedAvg's initial model, from which the private models of all clients start."""
        return {"personal": initial_model(self.personal, self.context.config.seed)}

    def receive(self, received: SharedArrays, version: int) -> None:
        """Load the received model, and the private one; without a version of it, the received model in its place."""
        super().receive(received, version)
        if version == INITIAL:
            values = {f"personal/{name}": value.clone() for name, value in self.model.state_dict().items()}
            self.load_group("personal", values)

    def seed_personal_dropout(self) -> None:
        """Give the private model the dropout that `local` has in this round, apart from the shared model's."""
        path = (self.context.client, self.round)
        seed_dropout([self.personal], torch_generator(self.context.config.seed, "dropout", *path))

    def join(self, rounds: int, rng: np.random.Generator) -> None:
        """Train the private model in place, from the received one."""
        self.personal.train()
        epochs = self.epochs().over(rounds)
        train_epochs(self.predictor(), [self.personal_set(self.as_received())], self.context.data, epochs, rng)

    def personal_set(self, received: Sequence[Tensor]) -> ParameterSet:
        """Return the private model's parameters and their rate.

        Args:
            received: The received model's parameters.
        """
        return ParameterSet(parameters=list(self.personal.parameters()), learning_rate=self.steps.learning_rate)

    def predictor(self) -> Predict:
        """Return the private model."""
        return self.personal

    def received_predictor(self) -> Predict:
        """Return the received model."""
        return self.model

    def target_state(self) -> Mapping[str, Tensor]:
        """Return the private model."""
        return self.personal.state_dict()

    def received_state(self) -> Mapping[str, Tensor]:
        """Return the received model."""
        return self.model.state_dict()
