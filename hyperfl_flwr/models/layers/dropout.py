"""Dropout with reproducible random numbers, a function of (seed, client, round).

torch's layer draws from the global generator, so that its numbers depend on other work in the process.
"""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hyperfl_flwr.core.device import send


class Dropout(nn.Module):
    """In training, sets each unit to 0 with probability p and multiplies the others by 1 / (1 - p).

    It has the distribution of torch's nn.Dropout, or with `maps` of nn.Dropout2d. In evaluation it returns its input.
    It has no parameters and no state.

    Attributes:
        generator: CPU generator of the random numbers, set by `seed_dropout`; all devices get the same numbers.

    Args:
        probability: Dropout probability p in [0, 1).
        maps: Whether all units of a channel of inputs [B, C, ...] are dropped together.

    Raises:
        ValueError: If the probability is out of range.
    """

    def __init__(self, probability: float, *, maps: bool = False) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"a dropout probability must be at least 0 and below 1, got {probability}")
        self.probability, self.maps = probability, maps
        self.generator: torch.Generator | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs [...] of any shape with units dropped.

        Raises:
            RuntimeError: If the layer is in training mode and has no generator.
        """
        if not self.training:
            return inputs
        if self.generator is None:
            raise RuntimeError("Dropout has no generator; call seed_dropout before training, or switch to eval()")
        shape = (*inputs.shape[:2], *[1] * (inputs.ndim - 2)) if self.maps else inputs.shape
        kept = torch.rand(shape, generator=self.generator) >= self.probability
        return inputs * send(kept, inputs.device) / (1 - self.probability)

    def extra_repr(self) -> str:
        """Return p, as torch's layers do."""
        return f"p={self.probability}"


def seed_dropout(networks: Iterable[nn.Module], generator: torch.Generator) -> None:
    """Set the CPU generator of all `Dropout` layers of some networks."""
    for layer in itertools.chain.from_iterable(network.modules() for network in networks):
        if isinstance(layer, Dropout):
            layer.generator = generator


def has_dropout(module: nn.Module) -> bool:
    """Return whether a network has `Dropout` layers."""
    return any(isinstance(layer, Dropout) for layer in module.modules())


def without_dropout(module: nn.Module) -> nn.Module:
    """Replace a network's `Dropout` layers by identities, in place; returns the network."""
    for name, layer in list(module.named_modules(remove_duplicate=False)):  # one layer may be used in several places
        if isinstance(layer, Dropout):
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, nn.Identity())
    return module
