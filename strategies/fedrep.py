"""FedRep: the feature extractor is averaged, the classifiers stay on the clients.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, algorithm 1.
"""

from collections.abc import Mapping

from torch import Tensor

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import initial_state
from strategies.engine.base import BaseStrategy


class FedRep(BaseStrategy):
    """Averages the shared group `extractor`."""

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the extractor's initial values, drawn with its usual initialisation."""
        generator = torch_generator(self.context.config.seed, "model")
        return {"extractor": initial_state(self.new_target().extractor, generator)}
