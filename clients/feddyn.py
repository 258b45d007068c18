"""FedDyn's client: FedAvg's client on a loss with a linear term and a pull, which it changes from round to round.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic Regularization", ICLR
2021, algorithm 1. In every step -h_i + alpha (y - x) is added to the gradient; after the last one h_i decreases by
alpha (y - x). h_i, which is 0 at first, tends to the gradient of the client's loss at the common minimum.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
from torch import nn
from torch.nn.utils import parameters_to_vector

from clients.fedavg import FedAvgClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods.feddyn import FedDynConfig
from hyperfl_flwr.models.vector import Vector, pieces
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.local_sgd import ParameterSet
from hyperfl_flwr.training.public_training import LocalSteps


class FedDynClient(FedAvgClient):
    """Keeps h_i, a vector over the parameters and not over the buffers, and uploads its model y."""

    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.MEAN}
    private: ClassVar[tuple[str, ...]] = ("own-correction",)
    has_noisy_steps: ClassVar[bool] = False
    keeps_upload: ClassVar[bool] = True
    unclippable: ClassVar[str] = (
        "server and client must add the same upload to their states, so that it may be neither clipped nor noised"
    )

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return FedAvg's local steps with the pull `feddyn.alpha` towards the received model."""
        return replace(super().local_steps(config), pull=config.section(FedDynConfig).alpha)

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the target network and h_i."""
        model = super().build_groups()
        self.correction = Vector.like_parameters(self.model)
        return model | {"own-correction": self.correction}

    def parameter_sets(self) -> list[ParameterSet]:
        """Return the parameters of the target network, with -h_i and the pull added to the gradient of each step."""
        (everything,) = super().parameter_sets()
        return [replace(everything, force=pieces(-self.correction.theta, everything.parameters))]

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the model in place, then h_i."""
        received = parameters_to_vector(self.model.parameters()).detach()
        numbers = super().train(rng)
        change = parameters_to_vector(self.model.parameters()).detach() - received
        self.correction.theta = self.correction.theta - self.steps.pull * change
        return numbers
