"""pFedMe's server: moves the global model by the share beta of the way to the clients' mean.

T. Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, algorithm 1.
"""

from hyperfl_flwr.methods.pfedme import PFedMeConfig
from hyperfl_flwr.protocol.arrays import SharedArrays
from strategies.fedavg import FedAvg


class PFedMe(FedAvg):
    """Averages the shared group `model` with equal weights."""

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return (1 - beta) times the model that was sent plus beta times the mean."""
        return self.moved(means, self.context.config.section(PFedMeConfig).server_rate)
