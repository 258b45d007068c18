"""FedDF's client: FedAvg's client, of which the server gets the model alone and not as a part of a sum.

Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020.
"""

from collections.abc import Mapping
from typing import ClassVar

from clients.fedavg import FedAvgClient
from hyperfl_flwr.protocol.messages import Reduction


class FedDFClient(FedAvgClient):
    """Trains as FedAvg's client."""

    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.EACH}
    has_noisy_steps: ClassVar[bool] = False
