"""Base of clients that share the feature extractor of their target network and keep its classifier private."""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from clients.engine.base import BaseClient
from hyperfl_flwr.training.finetune_private import join_classifier


class SplitClient(BaseClient):
    """A client with the groups `extractor`, which is shared, and `classifier`, which is private."""

    private: ClassVar[tuple[str, ...]] = ("classifier",)

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
        join_classifier(self.model, self.model.classifier, rate, self.context.data, passes, rng)
