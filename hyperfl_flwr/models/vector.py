"""A group of arrays that holds one vector, for example with an entry for each parameter of a network."""

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor, nn

from hyperfl_flwr.models.initialisation import SelfInitialised


class Vector(nn.Module, SelfInitialised):
    """Holds one vector [m], initially zero, or nothing.

    Attributes:
        theta: The vector; missing if `size` is 0, or if it has another name.

    Args:
        size: Length m of the vector; 0 for nothing.
        dtype: Type of its numbers.
        name: Its name.
    """

    theta: Tensor

    def __init__(self, size: int, dtype: torch.dtype = torch.float32, name: str = "theta") -> None:
        super().__init__()
        if size:
            self.register_buffer(name, torch.empty(size, dtype=dtype, device="meta"))

    @classmethod
    def like_parameters(cls, module: nn.Module) -> Self:
        """Return a vector with an entry for each parameter of a network, in their type."""
        parameters = list(module.parameters())
        return cls(num_parameters(module), parameters[0].dtype)

    def draw_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return a vector of zeros on the CPU."""
        return {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in self.named_buffers()}


def num_parameters(module: nn.Module) -> int:
    """Return the number m of a network's parameters; buffers are not counted."""
    return sum(parameter.numel() for parameter in module.parameters())


def pieces(vector: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parts of a vector [m] that belong to each parameter, as views in the parameter's shape."""
    shaped = list(parameters)
    parts = torch.split(vector, [parameter.numel() for parameter in shaped])
    return [part.view_as(parameter) for part, parameter in zip(parts, shaped, strict=True)]
