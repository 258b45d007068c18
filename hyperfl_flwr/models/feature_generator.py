"""FedGen's generator of features of a given class.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, section 4.
"""

import torch
from torch import Tensor, nn

from hyperfl_flwr.models.layers.batchnorm import BatchNorm1d

NOISE_DIM = 32
"""Length of the noise vector e."""


class FeatureGenerator(nn.Module):
    """Generates features g = G(e, y): a linear layer of noise and one-hot label, BatchNorm, ReLU, a linear layer.

    Args:
        num_features: Number F of features.
        num_classes: Number of classes K.
        width: Number of hidden units.
    """

    def __init__(self, num_features: int, num_classes: int, width: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        with torch.device("meta"):
            self.body = nn.Sequential(
                nn.Linear(NOISE_DIM + num_classes, width),
                BatchNorm1d(width),
                nn.ReLU(),
                nn.Linear(width, num_features),
            )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return features [B, F] of noise [B, 32] and labels [B]; in training mode B must be at least 2."""
        one_hot = (labels[:, None] == torch.arange(self.num_classes, device=labels.device)).to(noise.dtype)
        features: Tensor = self.body(torch.cat([noise, one_hot], dim=1))
        return features
