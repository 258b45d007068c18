"""pFedHN's clients: train the parameters that the server's hypernetwork generated, and upload their change.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021, algorithm 1.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from numpy.typing import NDArray

from clients.engine.base import BaseClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods.pfedhn import PFedHNConfig
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.public_training import LocalSteps


class PFedHNClient(BaseClient):
    """Trains all layers with one learning rate and uploads the model's change, before minus after."""

    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.PER_CLIENT}
    is_generated: ClassVar[bool] = True

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return the local epochs, or `pfedhn.local-steps` local steps if it is above 0."""
        method = config.section(PFedHNConfig)
        return replace(super().local_steps(config), steps=method.local_steps, clip_norm=method.clip_norm)

    def reply(self, received: list[NDArray[Any]], trained: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the change delta = theta - theta', from received to trained parameters, protected."""
        uploaded = self.protected(received, trained)
        return [before - after for before, after in zip(received, uploaded, strict=True)]


class PFedHNPCClient(PFedHNClient):
    """Trains a private classifier jointly with the received extractor; uploads the extractor's change."""

    shared: ClassVar[Mapping[str, Reduction]] = {"extractor": Reduction.PER_CLIENT}
    private: ClassVar[tuple[str, ...]] = ("classifier",)
