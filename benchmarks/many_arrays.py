"""A network of many small arrays, for the rounds of a deployment: every array costs a message something."""

import math

import torch
from torch import Tensor, nn

DEPTH, WIDTH = 30, 32
"""Number and size of the hidden layers, each of which has two arrays."""


class ManyArrays(nn.Module):
    """A residual network of small linear layers."""

    def __init__(self, num_inputs: int, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(num_inputs, WIDTH)
        self.hidden = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
        self.classifier = nn.Linear(WIDTH, num_classes)

    def forward(self, samples: Tensor) -> Tensor:
        """Return the logits, [B, K], of samples."""
        values = torch.relu(self.first(samples.flatten(1)))
        for layer in self.hidden:
            values = values + torch.relu(layer(values)) / DEPTH
        logits: Tensor = self.classifier(values)
        return logits


def build(input_shape: tuple[int, ...], num_classes: int) -> ManyArrays:
    """Build the network, of 64 arrays, for samples of the given shape."""
    return ManyArrays(math.prod(input_shape), num_classes)
