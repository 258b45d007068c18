"""What clients share that keep the classifier of their target network to themselves."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from clients.base import BaseClient
from hyperfl_flwr.models.initial import ordinary_parameters
from hyperfl_flwr.rng import torch_generator
from hyperfl_flwr.training.sgd import Predict


class SplitClient(BaseClient):
    """Has the groups `extractor` and `classifier`, the latter private."""

    private: ClassVar[tuple[str, ...]] = ("classifier",)

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the two parts of the target network."""
        self.model = self.new_target()
        return {"extractor": self.model.extractor, "classifier": self.model.classifier}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the classifier that all clients start from, which is HyperFL's."""
        generator = torch_generator(self.setting.config.seed, "classifier")
        return {"classifier": ordinary_parameters(self.model.classifier, generator)}

    def predictor(self) -> Predict:
        """Return the target network."""
        return self.model

    def target_state(self) -> Mapping[str, Tensor]:
        """Return the target network's values."""
        return self.model.state_dict()
