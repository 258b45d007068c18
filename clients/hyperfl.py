"""HyperFL's client: shares the hypernetwork, keeps embedding and classifier (Guo et al., AAAI 2025, algorithm 1)."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from clients.base import BaseClient
from hyperfl_flwr.messages import Reduction
from hyperfl_flwr.models.hypernetwork import Hypernetwork, common_embedding, health, initial_embedding
from hyperfl_flwr.models.targets import ordinary_parameters
from hyperfl_flwr.rng import torch_generator
from hyperfl_flwr.training.hyperfl import HyperFLModel, HyperFLRates, train_hyperfl
from hyperfl_flwr.training.sgd import Predict


class Embedding(nn.Module):
    """Holds the embedding v [d].

    Args:
        embedding_dim: Its length d.
    """

    def __init__(self, embedding_dim: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.empty(embedding_dim, device="meta"))


class HyperFLClient(BaseClient):
    """Step 1 trains the classifier, step 2 the hypernetwork and the embedding."""

    shared: ClassVar[Mapping[str, Reduction]] = {"hypernetwork": Reduction.MEAN_BY_EXAMPLES}
    private: ClassVar[tuple[str, ...]] = ("embedding", "classifier")

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the groups `hypernetwork`, `embedding` and `classifier`."""
        method = self.setting.config.hyperfl
        target = self.new_target()
        self.extractor, self.classifier = target.extractor, target.classifier
        self.embedding = Embedding(method.embedding_dim)
        self.hypernetwork = Hypernetwork(
            self.extractor, embedding_dim=method.embedding_dim, hidden_width=method.hidden_width
        )
        return {"hypernetwork": self.hypernetwork, "embedding": self.embedding, "classifier": self.classifier}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the classifier that all clients start from and, unless `embedding = own`, the common embedding."""
        seed, method = self.setting.config.seed, self.setting.config.hyperfl
        if method.embedding == "own":
            generator = torch_generator(seed, "own-embedding", self.setting.client)
            v = initial_embedding(method.embedding_dim, method.initialisation, generator)
        else:
            v = common_embedding(method.embedding_dim, method.initialisation, seed)
        classifier = ordinary_parameters(self.classifier, torch_generator(seed, "classifier"))
        return {"embedding": {"v": v}, "classifier": classifier}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Run the local round; reports `train-loss` and the health of the received hypernetwork after it."""
        method = self.setting.config.hyperfl
        rate, embedding_rate = self.setting.learning_rate, method.embedding_learning_rate
        rates = HyperFLRates(
            classifier=method.classifier_learning_rate,
            hypernetwork=rate,
            embedding=rate if embedding_rate == "auto" else embedding_rate,
            clip_norm=method.clip_norm,
            factored=method.head_optimiser == "factored",
        )
        loss = train_hyperfl(self._model(), self.setting.data, self.epochs(), rates, rng)
        state = health(self.hypernetwork, self.embedding.v)
        return {
            "train-loss": loss,
            "hidden-squared-norm": state.squared_norm,
            "hidden-active-units": float(state.active_units),
            "theta-norm": state.weight_norm,
        }

    def predictor(self) -> Predict:
        """Return the target network with theta generated once."""
        return self._model().fixed()

    def _model(self) -> HyperFLModel:
        return HyperFLModel(
            extractor=self.extractor,
            classifier=self.classifier,
            hypernetwork=self.hypernetwork,
            embedding=self.embedding.v,
            frozen=self.setting.config.hyperfl.embedding == "common-frozen",
        )
