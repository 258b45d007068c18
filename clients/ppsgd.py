"""PPSGD's client: shares the whole model and adds a private classifier to the common one.

Bietti, Wei, Dudik, Langford, Wu: "Personalization Improves Privacy-Accuracy Tradeoffs in Federated Learning", ICML
2022, algorithm 1 (personalized private SGD) in its additive form: the logits of client i are (w + a_i)^T f(x), with the
shared extractor f and classifier w, and a private a_i that starts at 0. Both classifiers have the same gradient. The
paper averages after each step and protects whole clients; here a round has local epochs, as in HyperFL's experiments,
and `dp.*` protects single samples.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from clients.fedavg import FedAvgClient
from hyperfl_flwr.methods.ppsgd import PPSGDConfig
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.training.finetune_private import join_classifier
from hyperfl_flwr.training.local_sgd import ParameterSet, Predict
from hyperfl_flwr.training.private_sgd import Companion


class WithOffset(nn.Module):
    """The target network with a second classifier that is added to its own.

    Args:
        model: The target network.
        offset: Maps features [B, F] to logits [B, K], as the network's classifier does.
    """

    def __init__(self, model: Target, offset: nn.Linear) -> None:
        super().__init__()
        self.model, self.offset = model, offset

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [B, K] of images [B, C, H, W]."""
        features = self.model.extractor(images)
        logits: Tensor = self.model.classifier(features) + self.offset(features)
        return logits


class PPSGDClient(FedAvgClient):
    """Trains the shared model and the private classifier `offset` in the same steps, each at its own rate."""

    private: ClassVar[tuple[str, ...]] = ("offset",)
    heads: ClassVar[tuple[str, ...]] = private
    can_join: ClassVar[bool] = True

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the groups `model` and `offset`."""
        groups, classifier = super().build_groups(), self.model.classifier
        bias = classifier.bias is not None
        offset = nn.Linear(classifier.in_features, classifier.out_features, bias=bias, device="meta")
        self.network = WithOffset(self.model, offset)
        return {**groups, "offset": offset}

    def initial_private(self) -> dict[str, Mapping[str, Tensor]]:
        """Return zeros: all clients start from the shared model."""
        return {"offset": _zeros(self.network.offset)}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train both groups in place.

        With `dp.epsilon`, the shared model takes noisy steps. The private classifier takes the same noisy gradient as
        the shared one (`dp.heads = noised`), or the plain gradient of the same batch (`published`).
        """
        dp = self.context.config.dp
        noised = dp.epsilon and dp.heads == "noised"
        companion = Companion(part=self.offset_set(), like=list(self.model.classifier.parameters()) if noised else None)
        return self.train_sets(self.network, self.parameter_sets(), rng, [companion])

    def join(self, rounds: int, rng: np.random.Generator) -> None:
        """Train the private classifier in place; the shared model is constant."""
        rate = self.offset_set().learning_rate
        self.model.requires_grad_(False)
        epochs = self.epochs().over(rounds)
        join_classifier(self.network, self.network.offset, rate, self.context.data, epochs, rng)

    def predictor(self) -> Predict:
        """Return the shared model with the private classifier."""
        return self.network

    def target_state(self) -> Mapping[str, Tensor]:
        """Return the shared model with the sum of both classifiers."""
        offset = {f"classifier.{name}": value for name, value in self.network.offset.state_dict().items()}
        return {
            name: value + offset[name] if name in offset else value for name, value in self.model.state_dict().items()
        }

    def offset_set(self) -> ParameterSet:
        """Return the parameters of the private classifier, and their rate."""
        rate = self.context.config.section(PPSGDConfig).classifier_learning_rate
        return ParameterSet(parameters=list(self.network.offset.parameters()), learning_rate=rate)


def _zeros(module: nn.Module) -> dict[str, Tensor]:
    """Return zeros for the parameters of a module, on the CPU."""
    return {name: torch.zeros(value.shape) for name, value in module.named_parameters()}
