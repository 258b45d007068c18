"""FedRep: the feature extractor is averaged, the classifiers stay on the clients.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, algorithm 1.
"""

from collections.abc import Mapping

from torch import Tensor

from hyperfl_flwr.models.initialisation import initial_model
from strategies.engine.base import BaseStrategy


class FedRep(BaseStrategy):
    """Averages the shared group `extractor`."""

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the extractor's initial values, drawn with its usual initialisation."""
        return {"extractor": initial_model(self.new_target().extractor, self.context.config.seed)}
