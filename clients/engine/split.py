"""Base of clients that share the target network's feature extractor and keep its classifier private."""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from clients.engine.base import BaseClient
from hyperfl_flwr.training.finetune_private import join_classifier


class SplitClient(BaseClient):
    """Client with the shared group `extractor` and the private group `classifier`."""

    private: ClassVar[tuple[str, ...]] = ("classifier",)

    def train_classifier(self, rate: float, rounds: int, rng: np.random.Generator) -> None:
        """Train the classifier in place, with as many passes as the local epochs of `rounds` rounds.

        Args:
            rate: Learning rate of the classifier.
            rounds: Number of rounds.
            rng: Random numbers for the order of the samples and for augmentation.
        """
        epochs = self.epochs()
        self.model.extractor.requires_grad_(False)
        self.model.classifier.requires_grad_(True)
        passes = replace(epochs, epochs=rounds * epochs.epochs)
        join_classifier(self.model, self.model.classifier, rate, self.context.data, passes, rng)
