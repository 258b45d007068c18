"""Base of clients that share the feature extractor of their target network and keep its classifier private."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from clients.engine.base import BaseClient
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.training.finetune_private import join_classifier
from hyperfl_flwr.training.local_sgd import Predict


class SplitClient(BaseClient):
    """A client with the groups `extractor`, which is shared, and `classifier`, which is private."""

    private: ClassVar[tuple[str, ...]] = ("classifier",)

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the two parts of the target network."""
        self.model = self.new_target()
        return {"extractor": self.model.extractor, "classifier": self.model.classifier}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the classifier that all clients start from, the same as in HyperFL."""
        generator = torch_generator(self.setting.config.seed, "classifier")
        return {"classifier": ordinary_parameters(self.model.classifier, generator)}

    def train_classifier(self, rate: float, rounds: int, rng: np.random.Generator) -> None:
        """Train the classifier in place, with as many passes as the local epochs of `rounds` rounds.

        Args:
            rate: Step size.
            rounds: Number of rounds.
            rng: Order of the samples and augmentation.
        """
        epochs = self.epochs()
        self.model.extractor.requires_grad_(False)
        self.model.classifier.requires_grad_(True)
        passes = replace(epochs, epochs=rounds * epochs.epochs)
        join_classifier(self.model, self.model.classifier, rate, self.setting.data, passes, rng)

    def predictor(self) -> Predict:
        """Return the target network."""
        return self.model

    def target_state(self) -> Mapping[str, Tensor]:
        """Return the target network's values."""
        return self.model.state_dict()
