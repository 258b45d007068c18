"""What clients share that keep the classifier of their target network to themselves."""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from clients.engine.base import BaseClient
from hyperfl_flwr.training.finetune_private import join_classifier


class SplitClient(BaseClient):
    """Has the groups `extractor` and `classifier`, the latter private."""

    private: ClassVar[tuple[str, ...]] = ("classifier",)

    def train_classifier(self, rate: float, rounds: int, rng: np.random.Generator) -> None:
        """Train the classifier in place: as many passes as the local epochs of so many rounds."""
        epochs = self.epochs()
        self.model.extractor.requires_grad_(False)
        self.model.classifier.requires_grad_(True)
        passes = replace(epochs, epochs=rounds * epochs.epochs)
        join_classifier(self.model, self.model.classifier, rate, self.setting.data, passes, rng)
