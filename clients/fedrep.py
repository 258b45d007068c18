"""FedRep's client: shares the feature extractor, keeps the classifier (Collins et al., ICML 2021, algorithm 1)."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from clients.base import BaseClient
from hyperfl_flwr.messages import Reduction
from hyperfl_flwr.models.targets import ordinary_parameters
from hyperfl_flwr.rng import torch_generator
from hyperfl_flwr.training.fedrep import FedRepRates, train_fedrep
from hyperfl_flwr.training.sgd import Predict


class FedRepClient(BaseClient):
    """Trains the classifier with the received extractor, then the extractor."""

    shared: ClassVar[Mapping[str, Reduction]] = {"extractor": Reduction.MEAN_BY_EXAMPLES}
    private: ClassVar[tuple[str, ...]] = ("classifier",)

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the two parts of the target network as the groups `extractor` and `classifier`."""
        self.model = self.new_target()
        return {"extractor": self.model.extractor, "classifier": self.model.classifier}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the classifier that all clients start from, which is HyperFL's."""
        generator = torch_generator(self.setting.config.seed, "classifier")
        return {"classifier": ordinary_parameters(self.model.classifier, generator)}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Run the local round; reports `train-loss`."""
        method = self.setting.config.fedrep
        rates = FedRepRates(
            classifier=method.classifier_learning_rate,
            extractor=self.setting.learning_rate,
            classifier_epochs=method.classifier_epochs,
            clip_norm=method.clip_norm,
        )
        extractor, classifier = self.model.extractor, self.model.classifier
        return {"train-loss": train_fedrep(extractor, classifier, self.setting.data, self.epochs(), rates, rng)}

    def predictor(self) -> Predict:
        """Return the target network."""
        return self.model
