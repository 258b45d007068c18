"""FedALA's client: FedAvg's local training from a mixture of the client's last model and the received one.

Zhang et al., AAAI 2023, see `hyperfl_flwr.training.fedala`. The client stores its last model and the weights.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from clients.engine.personal import PersonalClient
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.methods.fedala import FedALAConfig
from hyperfl_flwr.models.vector import Vector, pieces
from hyperfl_flwr.node.private_state import INITIAL
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.training.fedala import Mixture, learn_weights
from hyperfl_flwr.training.local_sgd import pass_order


class FedALAClient(PersonalClient):
    """Mixes the last layers' parameters; others, and all buffers, start as received."""

    private: ClassVar[tuple[str, ...]] = ("personal", "weights")
    copies_of_uploads: ClassVar[tuple[str, ...]] = ("personal",)

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the groups `model`, `personal` (the last model), and `weights`, one per number of the last layers."""
        groups = super().build_groups()
        mixed = self._mixed(self.model)
        self.weights = Vector(sum(parameter.numel() for parameter in mixed), mixed[0].dtype)
        return {**groups, "weights": self.weights}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return FedAvg's initial model, which is not used, and weights 1."""
        return super().initial_private() | {"weights": {"theta": torch.ones(self.weights.theta.shape)}}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the model in place, the first time as received and then from the mixture; keep it as the last one."""
        if self.version != INITIAL and self.context.config.section(FedALAConfig).rate:
            self.model.eval()
            self._start()
            self.model.train()
        metrics = super().train(rng)
        self._keep_model()
        return metrics

    def undo(self, received: SharedArrays, version: int) -> None:
        """Replace the groups, see `BaseClient.undo`; after the first round the received model is the last one."""
        super().undo(received, version)
        if version == INITIAL:
            self._keep_model()

    def _keep_model(self) -> None:
        """Make the model the client's last one."""
        values = {f"personal/{name}": value.clone() for name, value in self.model.state_dict().items()}
        self.load_group("personal", values)

    def _start(self) -> None:
        """Learn the weights on some of the client's samples, and move the model to the mixture."""
        method, context = self.context.config.section(FedALAConfig), self.context
        parameters, last = self._mixed(self.model), self._mixed(self.personal)
        mixture = Mixture(
            parameters=parameters,
            last=[value.detach() for value in last],
            received=[value.detach().clone() for value in parameters],
            weights=pieces(self.weights.theta, parameters),
        )
        size = len(context.data.train_labels)
        rng = numpy_generator(context.config.seed, "aggregation", context.client, self.round)
        chosen = torch.from_numpy(pass_order(context.data, rng)[: max(1, int(method.share * size))]).to(context.device)
        batches = [
            (context.data.train_images[index], context.data.train_labels[index])
            for index in torch.split(chosen, context.config.batch_size)
        ]
        untouched = bool((self.weights.theta == 1).all())
        learn_weights(self.model, mixture, batches, method.rate, until_steady=untouched)

    def _mixed(self, model: nn.Module) -> list[Tensor]:
        """Return the parameters of the last layers."""
        named = list(model.named_parameters())
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in named))
        last = set(layers[-self.context.config.section(FedALAConfig).layers :])
        return [parameter for name, parameter in named if name.rpartition(".")[0] in last]
