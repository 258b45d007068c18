"""Base of clients that share the target network's feature extractor and keep its classifier private."""

from typing import ClassVar

import numpy as np

from clients.engine.base import BaseClient
from clients.engine.local_training import noisy_metrics
from hyperfl_flwr.training.fedrep import FedRepRates, train_centaur, train_fedrep
from hyperfl_flwr.training.finetune_private import join_classifier


class SplitClient(BaseClient):
    """Client with the shared group `extractor` and the private group `classifier`."""

    private: ClassVar[tuple[str, ...]] = ("classifier",)
    heads: ClassVar[tuple[str, ...]] = private
    has_noisy_steps: ClassVar[bool] = True

    def train_parts(self, rates: FedRepRates, rng: np.random.Generator) -> dict[str, float]:
        """Train classifier and extractor in place, and return the metrics; with `dp.epsilon` as CENTAUR does.

        Args:
            rates: Step sizes.
            rng: Random numbers for the order of the samples and for augmentation.
        """
        model, data, noise = self.model, self.context.data, self.step_noise()
        if noise is None:
            return {"train-loss": train_fedrep(model.extractor, model.classifier, data, self.epochs(), rates, rng)}
        noised_head = self.context.config.dp.heads == "noised"
        return noisy_metrics(train_centaur(model, data, self.epochs(), rates, noise, rng, noised_head=noised_head))

    def train_classifier(self, rate: float, rounds: int, rng: np.random.Generator) -> None:
        """Train the classifier in place, with as many passes as the local epochs of `rounds` rounds.

        Args:
            rate: Learning rate of the classifier.
            rounds: Number of rounds.
            rng: Random numbers for the order of the samples and for augmentation.
        """
        self.model.extractor.requires_grad_(False)
        self.model.classifier.requires_grad_(True)
        epochs = self.epochs().over(rounds)
        join_classifier(self.model, self.model.classifier, rate, self.context.data, epochs, rng)
