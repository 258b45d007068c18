"""FedProx's client: FedAvg's, with a pull towards the model that was received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020: client i
trains on f_i(y) + mu/2 |y - x|^2, where x is the received model (equation 2). All clients take the same number of local
epochs: the partial work of slow ones, the paper's second subject, is left out. The server is FedAvg's.
"""

from dataclasses import replace

from clients.fedavg import FedAvgClient
from hyperfl_flwr.training.local_sgd import ParameterSet


class FedProxClient(FedAvgClient):
    """Adds mu (y - x) to the gradient of each step; with mu = 0 it is FedAvg's. Buffers of BatchNorm are not pulled."""

    def parameter_sets(self) -> list[ParameterSet]:
        """Return FedAvg's, anchored to copies of the received parameters."""
        mu = self.setting.config.fedprox.mu
        return [
            replace(part, pull=mu, anchor=[parameter.detach().clone() for parameter in part.parameters])
            for part in super().parameter_sets()
        ]
