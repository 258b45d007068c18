"""Adapters: small trainable layers inside a frozen body, and a layer on its features.

The forms are those of HyperFL's experiments (Guo et al., AAAI 2025, appendix D.1, and its public code):

- Maps [B, C, H, W] of a convolutional network, after a stage: `y = s2 (x + W (s1 x + t1)) + t2` with a 1x1
  convolution W and scales s and shifts t per channel. In the public code these are BatchNorm layers, which never use
  the statistics of a batch, so that they only scale and shift.
- Tokens [B, N, C] of a transformer, after the MLP of a block: `y = x + LN(U relu(D x))` with D: C -> 24, U: 24 -> C.

Initial values keep the adapters close to the identity: W and the scale of LN are a tenth of torch's defaults.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from hyperfl_flwr.models.initialisation import SelfInitialised, ordinary_parameters

Layout = Literal["maps", "tokens"]
"""Axis of the channels in a body's activations: the second [B, C, H, W], or the last [B, ..., C]."""

BOTTLENECK = 24
"""Width of a token adapter's hidden layer."""

INITIAL_SCALE = 0.1
"""Size of an adapter's initial effect, relative to torch's default values."""

_EPSILON = 1e-5


class MapAdapter(nn.Module, SelfInitialised):
    """Adapts maps [B, C, H, W]; it has C^2 + 4 C parameters.

    Args:
        channels: Number of channels C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.scale_in = nn.Parameter(torch.empty(channels))
            self.shift_in = nn.Parameter(torch.empty(channels))
            self.weight = nn.Parameter(torch.empty(channels, channels))
            self.scale_out = nn.Parameter(torch.empty(channels))
            self.shift_out = nn.Parameter(torch.empty(channels))

    def forward(self, maps: Tensor) -> Tensor:
        """Return adapted maps [B, C, H, W]."""
        weight = self.weight[:, :, None, None]
        inner = functional.conv2d(maps * _per_channel(self.scale_in) + _per_channel(self.shift_in), weight)
        return (maps + inner) * _per_channel(self.scale_out) + _per_channel(self.shift_out)

    def draw_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return scales of 1, shifts of 0, and a small random convolution."""
        bound = INITIAL_SCALE / math.sqrt(self.weight.shape[1])
        values = {name: torch.full(value.shape, float("scale" in name)) for name, value in self.named_parameters()}
        values["weight"].uniform_(-bound, bound, generator=generator)
        return values


class TokenAdapter(nn.Module, SelfInitialised):
    """Adapts tokens [B, ..., C]; it has 51 C + 24 parameters.

    Args:
        channels: Number of channels C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.down = nn.Linear(channels, BOTTLENECK)
            self.up = nn.Linear(BOTTLENECK, channels)
            self.norm = nn.LayerNorm(channels, eps=_EPSILON)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return adapted tokens [B, ..., C]."""
        inner: Tensor = self.norm(self.up(torch.relu(self.down(tokens))))
        return tokens + inner

    def draw_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return torch's defaults for the linear layers, and a small scale of the normalisation."""
        values: dict[str, Tensor] = {}
        for part in ("down", "up"):
            drawn = ordinary_parameters(self.get_submodule(part), generator)
            values |= {f"{part}.{name}": value for name, value in drawn.items()}
        values["norm.weight"] = torch.full(self.norm.weight.shape, INITIAL_SCALE)
        values["norm.bias"] = torch.zeros(self.norm.bias.shape)
        return {name: values[name] for name, _ in self.named_parameters()}


ADAPTERS: dict[Layout, type[MapAdapter | TokenAdapter]] = {"maps": MapAdapter, "tokens": TokenAdapter}
"""Adapter of each layout."""


def _per_channel(values: Tensor) -> Tensor:
    return values[:, None, None]
