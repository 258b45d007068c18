"""pFedHN's clients: train what the server's hypernetwork generated for them and return the change.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021, algorithm 1.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from clients.base import BaseClient
from hyperfl_flwr.messages import Reduction
from hyperfl_flwr.models.targets import ordinary_parameters
from hyperfl_flwr.rng import torch_generator
from hyperfl_flwr.training.sgd import Epochs, ParameterSet, Predict, train_epochs


class PFedHNClient(BaseClient):
    """Trains all layers with one rate and returns the model before minus after."""

    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.PER_CLIENT}

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the target network as the group `model`."""
        self.model = self.new_target()
        return {"model": self.model}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return no groups."""
        return {}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Run the local steps or epochs; reports `train-loss`."""
        method = self.setting.config.pfedhn
        everything = ParameterSet(
            parameters=list(self.model.parameters()),
            learning_rate=self.setting.learning_rate,
            clip_norm=method.clip_norm,
        )
        return {"train-loss": train_epochs(self.model, [everything], self.setting.data, self.epochs(), rng)}

    def epochs(self) -> Epochs:
        """Return the local epochs, or the number of local steps that the settings ask for."""
        return replace(super().epochs(), steps=self.setting.config.pfedhn.local_steps)

    def reply(self, received: list[NDArray[Any]], trained: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the change delta = theta - theta'."""
        return [before - after for before, after in zip(received, trained, strict=True)]

    def predictor(self) -> Predict:
        """Return the target network."""
        return self.model


class PFedHNPCClient(PFedHNClient):
    """Has a classifier of its own, which is trained jointly with what was received."""

    shared: ClassVar[Mapping[str, Reduction]] = {"extractor": Reduction.PER_CLIENT}
    private: ClassVar[tuple[str, ...]] = ("classifier",)

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the two parts of the target network as the groups `extractor` and `classifier`."""
        self.model = self.new_target()
        return {"extractor": self.model.extractor, "classifier": self.model.classifier}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the classifier that all clients start from, which is HyperFL's."""
        generator = torch_generator(self.setting.config.seed, "classifier")
        return {"classifier": ordinary_parameters(self.model.classifier, generator)}
