"""SCAFFOLD's client: FedAvg's client, with control variates that correct the gradient of each local step.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, algorithm 1 with option II. `hyperfl_flwr.training.scaffold` has the formulas. A lost reply takes back the
client's change, since it starts from the version of c_i that the server has counted.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
from torch import nn
from torch.nn.utils import parameters_to_vector

from clients.fedavg import FedAvgClient
from hyperfl_flwr.models.vector import Vector, pieces
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.local_sgd import ParameterSet
from hyperfl_flwr.training.scaffold import control_change, reach_of


class ScaffoldClient(FedAvgClient):
    """Receives the model x and the control variate c, keeps its own c_i, and uploads its model y and the change of c_i.

    Both control variates are vectors over the parameters, not over the buffers. They are 0 at first.
    """

    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.MEAN, "control": Reduction.SUM}
    private: ClassVar[tuple[str, ...]] = ("own-control",)
    has_noisy_steps: ClassVar[bool] = False
    keeps_upload: ClassVar[bool] = True
    unclippable: ClassVar[str] = (
        "server and client must add the same upload to their states, so that it may be neither clipped nor noised"
    )

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the target network and the two control variates."""
        model = super().build_groups()
        self.control, self.own_control = (Vector.like_parameters(self.model) for _ in range(2))
        return model | {"control": self.control, "own-control": self.own_control}

    def parameter_sets(self) -> list[ParameterSet]:
        """Return the parameters of the target network, with c - c_i added to the gradient of each step."""
        (everything,) = super().parameter_sets()
        force = self.control.theta - self.own_control.theta
        return [replace(everything, force=pieces(force, everything.parameters))]

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the model in place, and replace the received c by the change of c_i."""
        received = parameters_to_vector(self.model.parameters()).detach()
        numbers = super().train(rng)
        trained = parameters_to_vector(self.model.parameters()).detach()
        reach = reach_of(self.steps, len(self.context.data.train_labels))
        self.control.theta = control_change(received, trained, self.control.theta, reach)
        self.own_control.theta = self.own_control.theta + self.control.theta
        return numbers
