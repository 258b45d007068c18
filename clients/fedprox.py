"""FedProx's client: FedAvg's, with a pull towards the model that was received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020: client i
trains on f_i(y) + mu/2 |y - x|^2, where x is the received model (equation 2). All clients take the same number of local
epochs: the partial work of slow ones, the paper's second subject, is left out. The server is FedAvg's.
"""

from dataclasses import replace

from clients.fedavg import FedAvgClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods.fedprox import FedProxConfig
from hyperfl_flwr.training.public_training import LocalSteps


class FedProxClient(FedAvgClient):
    """Adds mu (y - x) to the gradient of each step; with mu = 0 it is FedAvg's. Buffers of BatchNorm are not pulled."""

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return FedAvg's steps, pulled to the received model."""
        return replace(super().local_steps(config), pull=config.section(FedProxConfig).mu)
