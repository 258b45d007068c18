"""FedProx's client: FedAvg's client with a proximal term that pulls the model towards the received one.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020: client i
trains on f_i(y) + mu/2 |y - x|^2, where x is the received model (equation 2). All clients run the same number of local
epochs: the paper's partial work of slow clients is not implemented. The server is FedAvg's.
"""

from dataclasses import replace

from clients.fedavg import FedAvgClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods.fedprox import FedProxConfig
from hyperfl_flwr.training.public_training import LocalSteps


class FedProxClient(FedAvgClient):
    """Adds mu (y - x) to the gradient of each step; mu = 0 is FedAvg. BatchNorm's buffers are not pulled."""

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return FedAvg's local steps with the pull `fedprox.mu` towards the received model."""
        return replace(super().local_steps(config), pull=config.section(FedProxConfig).mu)
