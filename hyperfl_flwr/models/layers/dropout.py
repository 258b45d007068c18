"""Dropout whose random numbers are a function of (seed, client, round), as all randomness here.

torch's own layer draws from the global generator, which other work in the process moves on.
"""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Sets each unit to 0 with probability p in training, and multiplies the rest by 1 / (1 - p); else does nothing.

    The distribution of torch's nn.Dropout, or with `maps` of nn.Dropout2d. It has no parameters and no state that
    travels.

    Attributes:
        generator: A CPU generator, which `seed_dropout` sets; every device gets the same numbers.

    Args:
        probability: p in [0, 1).
        maps: Whether all units of a channel of inputs [B, C, ...] are left out together.
    """

    def __init__(self, probability: float, *, maps: bool = False) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"a probability of dropout must be at least 0 and below 1, got {probability}")
        self.probability, self.maps = probability, maps
        self.generator: torch.Generator | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs [...] of any shape with units left out.

        Raises:
            RuntimeError: If the layer trains and has no generator.
        """
        if not self.training:
            return inputs
        if self.generator is None:
            raise RuntimeError("Dropout must be given a generator (seed_dropout) before it trains, or be set to eval()")
        shape = (*inputs.shape[:2], *[1] * (inputs.ndim - 2)) if self.maps else inputs.shape
        kept = torch.rand(shape, generator=self.generator) >= self.probability
        return inputs * kept.to(inputs.device) / (1 - self.probability)

    def extra_repr(self) -> str:
        """Return p, as torch's layers do."""
        return f"p={self.probability}"


def seed_dropout(networks: Iterable[nn.Module], generator: torch.Generator) -> None:
    """Let all `Dropout` layers of some networks draw from one CPU generator."""
    for layer in itertools.chain.from_iterable(network.modules() for network in networks):
        if isinstance(layer, Dropout):
            layer.generator = generator


def has_dropout(module: nn.Module) -> bool:
    """Say whether a network has `Dropout` layers."""
    return any(isinstance(layer, Dropout) for layer in module.modules())


def without_dropout(module: nn.Module) -> nn.Module:
    """Put identities in the places of a network's `Dropout` layers; returns the network."""
    for layer in list(module.modules()):
        for name, child in layer.named_children():
            if isinstance(child, Dropout):
                setattr(layer, name, nn.Identity())
    return module
