"""FedAvg: the whole model is shared and averaged.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, algorithm 1.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor

from hyperfl_flwr.models.initialisation import initial_model
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import group_of
from strategies.engine.base import BaseStrategy


class FedAvg(BaseStrategy):
    """Averages the shared group `model`."""

    novel_modes: ClassVar[tuple[str, ...]] = ("global",)

    def models(self, arrays: SharedArrays) -> SharedArrays:
        """Return the global model as the only candidate (M = 1)."""
        return {key: value[np.newaxis] for key, value in arrays.items() if group_of(key) == "model"}

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the target network's initial values, drawn with its usual initialisation."""
        return {"model": initial_model(self.new_target(), self.context.config.seed)}

    def moved(self, means: SharedArrays, rate: float) -> SharedArrays:
        """Return the group `model` after a share of the way from what was sent to the mean.

        Running statistics are the mean whatever the share: beyond it, a variance can be negative.

        Args:
            means: The reduced groups; without `model` if no client finished.
            rate: The share, above 0; 1 is the mean without further rounding.
        """
        model = {key: mean for key, mean in means.items() if group_of(key) == "model"}
        if rate == 1.0 or not model:
            return model
        for name, _ in self.new_target().named_parameters():
            sent, mean = self.sent[f"model/{name}"], model[f"model/{name}"]
            model[f"model/{name}"] = (sent + rate * (mean - sent)).astype(mean.dtype)
        return model
