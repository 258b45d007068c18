"""A network with the values of its parameters given apart from it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True, eq=False)
class AppliedNetwork:
    """A function from samples to outputs: a network with other values than its own.

    Attributes:
        network: The network; its own parameters are not used.
        values: A tensor for each parameter, by name.
    """

    network: nn.Module
    values: Mapping[str, Tensor]

    def __call__(self, samples: Tensor) -> Tensor:
        """Return the outputs [B, ...] of samples [B, ...]."""
        outputs: Tensor = functional_call(self.network, dict(self.values), (samples,))
        return outputs
