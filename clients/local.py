"""Local-only training: FedAvg's client with a private model."""

from typing import ClassVar

import numpy as np

from clients.engine.base import BaseClient
from hyperfl_flwr.methods.local import LocalConfig
from hyperfl_flwr.training.local_sgd import ParameterSet


class LocalClient(BaseClient):
    """Trains its private model alone, or only its classifier; all clients start from FedAvg's initial model."""

    private: ClassVar[tuple[str, ...]] = ("model",)

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the model in place; with `local.trains = classifier` the extractor is a constant."""
        if self._trains_classifier:
            self.model.extractor.requires_grad_(False)
            self.model.extractor.eval()  # neither dropout nor batch statistics
        return super().train(rng)

    def parameter_sets(self) -> list[ParameterSet]:
        """Return the parameters to train: all, or those of the classifier."""
        if not self._trains_classifier:
            return super().parameter_sets()
        parameters = list(self.model.classifier.parameters())
        return [ParameterSet(parameters=parameters, learning_rate=self.steps.learning_rate)]

    @property
    def _trains_classifier(self) -> bool:
        return self.context.config.section(LocalConfig).trains == "classifier"
