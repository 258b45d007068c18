"""PriFedSync's client: trains a model of its own, which it keeps, sends, and moves towards the mean of all.

Zheng, Chen, Long, Su: "Federated f-Differential Privacy", AISTATS 2021, algorithms 1 and 2: after each round every
client moves its model by theta_i <- theta_i + pull (mean - theta_i). Here a client does so when it takes part again,
towards the mean that it receives then. If all clients take part in every round, that is the same. The paper's local
training is that of `dp.*`: clipped gradients of single records, and noise.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from clients.fedavg import FedAvgClient
from hyperfl_flwr.methods.prifedsync import PriFedSyncConfig
from hyperfl_flwr.models.initialisation import initial_model

OWN = "own"
"""The private group: the client's model as it was when it was last trained, which is what the client has sent."""


class PriFedSyncClient(FedAvgClient):
    """Receives the mean model and trains its own one; pull = 1 is FedAvg."""

    private: ClassVar[tuple[str, ...]] = (OWN,)
    copies_of_uploads: ClassVar[tuple[str, ...]] = (OWN,)
    model_group: ClassVar[str] = OWN

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the groups `model`, received and sent, and `own`."""
        return {**super().build_groups(), OWN: self.new_target()}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return FedAvg's initial model, from which all clients start."""
        return {OWN: initial_model(self.model, self.context.config.seed)}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Move the own model towards the received one, train it in place of that, and keep it."""
        pull, own = self.context.config.section(PriFedSyncConfig).pull, self.groups[OWN].state_dict()
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                if value.is_floating_point():  # counters of BatchNorm are those received
                    value.copy_(torch.lerp(own[name], value, pull))  # exact for 1
        metrics = super().train(rng)
        trained = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.groups[OWN].load_state_dict(trained, assign=True)
        return metrics
