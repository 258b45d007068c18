"""FedRep's client: shares the extractor, keeps the classifier private (Collins et al., ICML 2021, algorithm 1)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from clients.engine.split import SplitClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods.fedrep import FedRepConfig
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.fedrep import FedRepRates
from hyperfl_flwr.training.public_training import LocalSteps


class FedRepClient(SplitClient):
    """Trains the classifier on the received extractor, then the extractor under the new classifier."""

    shared: ClassVar[Mapping[str, Reduction]] = {"extractor": Reduction.MEAN_BY_EXAMPLES}
    can_join: ClassVar[bool] = True

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return the local steps that train the extractor."""
        return replace(super().local_steps(config), clip_norm=config.section(FedRepConfig).clip_norm)

    def join(self, rounds: int, rng: np.random.Generator) -> None:
        """Train the private classifier in place; the received extractor is constant."""
        self.train_classifier(self.context.config.section(FedRepConfig).classifier_learning_rate, rounds, rng)

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train classifier and extractor in place; reports `train-loss`."""
        method = self.context.config.section(FedRepConfig)
        rates = FedRepRates(
            classifier=method.classifier_learning_rate,
            extractor=self.steps.learning_rate,
            classifier_epochs=method.classifier_epochs,
            clip_norm=self.steps.clip_norm,
        )
        return self.train_parts(rates, rng)
