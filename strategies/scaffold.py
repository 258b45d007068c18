"""SCAFFOLD's server: steps along the mean of the clients' changes, and keeps the mean of their control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, algorithm 1. The control variate c travels as a shared group, so the server needs no state besides it: it sends c
and receives the sum of the changes of the c_i.
"""

from collections.abc import Mapping

from torch import Tensor

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.methods.scaffold import ScaffoldConfig
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.models.vector import Vector
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.training.scaffold import next_control
from strategies.fedavg import FedAvg

CONTROL = "control/theta"


class Scaffold(FedAvg):
    """Averages the shared group `model` with equal weights, and adds the sum of the changes in `control` to c."""

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return FedAvg's initial model, and c = 0."""
        zeros = initial_state(Vector.like_parameters(self.new_target()), torch_generator(self.context.config.seed))
        return {**super().initial_parameters(), "control": zeros}

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the model after a step of the rate eta_g, and c plus the changes' sum over the number N of clients."""
        if not means:
            return means
        model = self.moved(means, self.context.config.section(ScaffoldConfig).server_learning_rate)
        control = next_control(self.sent[CONTROL], means[CONTROL], self.context.config.num_clients)
        return {**model, CONTROL: control}
