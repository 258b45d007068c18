"""MOON's client: FedAvg's client with a model-contrastive term.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021, algorithm 1 and equation 3: a sample's features are to
be closer to those of the received model than to those of the client's previous one. The server is FedAvg's. Features
are the inputs of the classifier: the projection head of the paper's networks, two layers in between, is not added to a
target network. Both teachers are in evaluation mode.
"""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from clients.fedavg import FedAvgClient
from hyperfl_flwr.methods.moon import MoonConfig
from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.node.private_state import INITIAL
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.training.local_sgd import Objective


def contrast(features: Tensor, received: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """Return the mean contrastive loss of features, in nats; log 2 if both teachers agree.

    Args:
        features: Features [B, F] of the model that is trained.
        received: Those of the received model, the positive pair.
        previous: Those of the client's previous model, the negative pair.
        temperature: Divisor of the cosine similarities.
    """
    teachers = (received, previous)
    pairs = torch.stack([functional.cosine_similarity(features, teacher) for teacher in teachers], dim=1)
    return functional.cross_entropy(pairs / temperature, torch.zeros_like(pairs[:, 0], dtype=torch.int64))


class MoonClient(FedAvgClient):
    """Keeps the model of its last local training in the private group `previous`; `moon.mu` = 0 is FedAvg.

    In a client's first round its previous model is the received one. The term is constant then and is left out.
    """

    private: ClassVar[tuple[str, ...]] = ("previous",)
    copies_of_uploads: ClassVar[tuple[str, ...]] = ("previous",)
    model_group: ClassVar[str] = "previous"
    has_noisy_steps: ClassVar[bool] = False

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the groups `model` and `previous`, two target networks."""
        groups = super().build_groups()
        self.previous = self.new_target()
        return {**groups, "previous": self.previous}

    def objective(self) -> Objective | None:
        """Return the cross-entropy plus mu times the contrastive loss; None where that is FedAvg's."""
        settings = self.context.config.section(MoonConfig)
        if self.version == INITIAL or not settings.mu:
            return None
        model, received, previous = self.model, self.copied_model().eval(), self.previous.eval()

        def objective(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            features = model.extractor(images)
            with torch.no_grad():
                positive, negative = received.extractor(images), previous.extractor(images)
            loss = loss_of(model.classifier(features), labels)
            return loss, settings.mu * contrast(features, positive, negative, settings.temperature)

        return objective

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the model in place, which then is the previous one; reports `train-loss`, the cross-entropy alone."""
        numbers = super().train(rng)
        self.previous.load_state_dict(self.model.state_dict())
        return numbers

    def undo(self, received: SharedArrays, version: int) -> None:
        """Replace both models, see `BaseClient.undo`; after the first round the received model is the previous one."""
        super().undo(received, version)
        if version == INITIAL:
            self.previous.load_state_dict(self.model.state_dict())
