"""pFedHN's clients: train what the server's hypernetwork generated for them and return the change.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021, algorithm 1.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from clients.engine.split import SplitClient
from clients.fedavg import FedAvgClient
from hyperfl_flwr.methods.pfedhn import PFedHNConfig
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, train_epochs


class PFedHNClient(FedAvgClient):
    """Trains all layers with one rate and returns the model before minus after."""

    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.PER_CLIENT}
    generated: ClassVar[bool] = True

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Run the local steps or epochs; reports `train-loss`."""
        method = self.setting.config.section(PFedHNConfig)
        everything = ParameterSet(
            parameters=list(self.model.parameters()),
            learning_rate=self.setting.learning_rate,
            clip_norm=method.clip_norm,
        )
        return {"train-loss": train_epochs(self.model, [everything], self.setting.data, self.epochs(), rng)}

    def epochs(self) -> Epochs:
        """Return the local epochs, or the number of local steps that the settings ask for."""
        return replace(super().epochs(), steps=self.setting.config.section(PFedHNConfig).local_steps)

    def reply(self, received: list[NDArray[Any]], trained: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the change delta = theta - theta'."""
        uploaded = self.protected(received, trained)
        return [before - after for before, after in zip(received, uploaded, strict=True)]


class PFedHNPCClient(SplitClient, PFedHNClient):
    """Has a classifier of its own, which is trained jointly with what was received."""

    shared: ClassVar[Mapping[str, Reduction]] = {"extractor": Reduction.PER_CLIENT}
