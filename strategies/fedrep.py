"""FedRep: the feature extractor is shared and averaged, classifiers stay with the clients.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, algorithm 1.
"""

from collections.abc import Mapping

from torch import Tensor

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import initial_state
from strategies.engine.base import BaseStrategy


class FedRep(BaseStrategy):
    """Shares the group `extractor`."""

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the ordinary initial values of the feature extractor."""
        generator = torch_generator(self.context.config.seed, "model")
        return {"extractor": initial_state(self.new_target().extractor, generator)}
