"""Ditto's client: FedAvg's local training, and then that of a private model with a pull towards the received one.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, algorithm 1 with
FedAvg as its G: client i keeps v, trained on f_i(v) + lambda/2 |v - x|^2, where x is the received model.
"""

import copy
from dataclasses import replace
from typing import ClassVar

import numpy as np
from torch import Tensor

from clients.engine.personal import PersonalClient
from hyperfl_flwr.methods.ditto import DittoConfig
from hyperfl_flwr.training.local_sgd import ParameterSet, train_epochs


class DittoClient(PersonalClient):
    """Trains the shared model as FedAvg does, and the private one on the same batches. Buffers are not pulled."""

    can_join: ClassVar[bool] = True

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train both models in place; reports the shared model's `train-loss`."""
        # Before the shared model moves: the pull is towards x as received. A copy of the stream gives equal batches.
        received, same_batches = self.as_received(), copy.deepcopy(rng)
        metrics = super().train(rng)
        self.train_sets(self.personal, [self._pulled(received)], same_batches)
        return metrics

    def join(self, rounds: int, rng: np.random.Generator) -> None:
        """Train the private model in place from the received one, towards which it is pulled."""
        epochs = self.epochs()
        self.personal.train()
        passes = replace(epochs, epochs=rounds * epochs.epochs)
        train_epochs(self.personal, [self._pulled(self.as_received())], self.context.data, passes, rng)

    def _pulled(self, received: list[Tensor]) -> ParameterSet:
        return ParameterSet(
            parameters=list(self.personal.parameters()),
            learning_rate=self.steps.learning_rate,
            pull=self.context.config.section(DittoConfig).pull,
            anchor=received,
        )
