"""FedAvg's client: shares the whole model (McMahan et al., AISTATS 2017, algorithm 1, ClientUpdate)."""

from collections.abc import Mapping
from typing import ClassVar

from clients.engine.base import BaseClient
from hyperfl_flwr.protocol.messages import Reduction


class FedAvgClient(BaseClient):
    """Trains all layers with one learning rate, without gradient clipping; with `dp.epsilon` by noisy steps."""

    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.MEAN_BY_EXAMPLES}
    has_noisy_steps: ClassVar[bool] = True
    has_global_model: ClassVar[bool] = True
