"""FedDyn's server: averages the models, and moves the mean by the mean correction of all clients.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic Regularization", ICLR
2021, algorithm 1: h <- h - alpha / N sum of (y - x) over the clients that took part, x <- mean of y - h / alpha. The
server needs the mean only, so h stays here and h_i on the client.
"""

import numpy as np

from hyperfl_flwr.methods.feddyn import FedDynConfig
from hyperfl_flwr.protocol.arrays import SharedArrays
from strategies.engine.context import ServerContext
from strategies.fedavg import FedAvg


class FedDyn(FedAvg):
    """Averages the shared group `model` with equal weights and keeps h, the mean of all clients' h_i.

    `remembered` holds h in float64, keyed `model/name`, for the parameters and not for the buffers.
    """

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        parameters = self.new_target().named_parameters()
        self.remembered = {f"model/{name}": np.zeros(tuple(value.shape)) for name, value in parameters}

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Step h along the changes of the clients that finished, and return the mean model minus h / alpha."""
        if not means:
            return means
        alpha = self.context.config.section(FedDynConfig).alpha
        share = len(self.outcome.finished) / self.context.config.num_clients
        model = dict(means)
        for key, correction in self.remembered.items():
            change = np.subtract(means[key], self.sent[key], dtype=np.float64)
            self.remembered[key] = correction - alpha * share * change
            model[key] = (means[key] - self.remembered[key] / alpha).astype(means[key].dtype)
        return model
