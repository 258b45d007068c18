"""FedAvg's client: the whole model is shared (McMahan et al., AISTATS 2017, algorithm 1, ClientUpdate)."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from clients.engine.base import BaseClient
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.local_sgd import ParameterSet, Predict, train_epochs


class FedAvgClient(BaseClient):
    """Trains all layers with one rate; FedAvg itself does not clip."""

    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.MEAN_BY_EXAMPLES}

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the target network as the group `model`."""
        self.model = self.new_target()
        return {"model": self.model}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return no groups."""
        return {}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Run the local epochs or steps; reports `train-loss`, the mean of the last one."""
        everything = ParameterSet(
            parameters=list(self.model.parameters()),
            learning_rate=self.steps.learning_rate,
            clip_norm=self.steps.clip_norm,
        )
        loss = train_epochs(self.model, [everything], self.setting.data, self.epochs(), rng)
        return {"train-loss": loss}

    def predictor(self) -> Predict:
        """Return the target network."""
        return self.model

    def target_state(self) -> Mapping[str, Tensor]:
        """Return the target network's values."""
        return self.model.state_dict()
