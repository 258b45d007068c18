"""Local-only training: FedAvg's client, but its model is private."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from clients.fedavg import FedAvgClient
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.protocol.messages import Reduction


class LocalClient(FedAvgClient):
    """Trains alone; all clients start from the model that FedAvg starts from."""

    shared: ClassVar[Mapping[str, Reduction]] = {}
    private: ClassVar[tuple[str, ...]] = ("model",)

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the target network's ordinary initial values."""
        return {"model": initial_state(self.model, torch_generator(self.setting.config.seed, "model"))}
