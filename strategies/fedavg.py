"""FedAvg: the whole model is shared and averaged.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, algorithm 1.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import initial_state
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
        return {"model": initial_state(self.new_target(), torch_generator(self.context.config.seed, "model"))}
