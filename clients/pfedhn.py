"""pFedHN's clients: train what the server's hypernetwork generated for them and return the change.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021, algorithm 1.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from numpy.typing import NDArray

from clients.engine.base import BaseClient
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet


class PFedHNClient(BaseClient):
    """Trains all layers with one rate and returns the model before minus after."""

    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.PER_CLIENT}
    generated: ClassVar[bool] = True

    def parameter_sets(self) -> list[ParameterSet]:
        """Return the whole target network, clipped."""
        return [replace(part, clip_norm=self.setting.config.pfedhn.clip_norm) for part in super().parameter_sets()]

    def epochs(self) -> Epochs:
        """Return the local epochs, or the number of local steps that the settings ask for."""
        return replace(super().epochs(), steps=self.setting.config.pfedhn.local_steps)

    def reply(self, received: list[NDArray[Any]], trained: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the change delta = theta - theta'."""
        uploaded = self.protected(received, trained)
        return [before - after for before, after in zip(received, uploaded, strict=True)]


class PFedHNPCClient(PFedHNClient):
    """Has a classifier of its own, which is trained jointly with what was received."""

    shared: ClassVar[Mapping[str, Reduction]] = {"extractor": Reduction.PER_CLIENT}
    private: ClassVar[tuple[str, ...]] = ("classifier",)
