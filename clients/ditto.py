"""Ditto's client: FedAvg's local training, and then that of a private model with a pull towards the received one.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, algorithm 1 with
FedAvg as its G: client i keeps v, trained on f_i(v) + lambda/2 |v - x|^2, where x is the received model.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from clients.engine.personal import PersonalClient
from hyperfl_flwr.methods.ditto import DittoConfig
from hyperfl_flwr.training.local_sgd import ParameterSet


class DittoClient(PersonalClient):
    """Trains the shared model as FedAvg does, and the private one on the same batches. Buffers are not pulled."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train both models in place; reports the shared model's `train-loss`."""
        # Before the shared model moves: the pull is towards x as received. A copy of the stream gives equal batches.
        received, same_batches = self.as_received(), copy.deepcopy(rng)
        self.seed_personal_dropout()
        metrics = super().train(rng)
        self.train_sets(self.personal, [self.personal_set(received)], same_batches)
        return metrics

    def personal_set(self, received: Sequence[Tensor]) -> ParameterSet:
        """Return the private model's parameters, which are pulled towards the received ones."""
        pull = self.context.config.section(DittoConfig).pull
        return replace(super().personal_set(received), pull=pull, anchor=received)
