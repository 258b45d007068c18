"""Record the calls of a network's layers, from whose inputs and output gradients those of single samples follow."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True)
class Use:
    """A call of a trained layer: its inputs, and where the gradients of its outputs are found in the graph."""

    layer: nn.Module
    inputs: Tensor
    edge: GradientEdge


@contextmanager
def recording(layers: Mapping[nn.Module, Any]) -> Iterator[list[Use]]:
    """Record all calls of some layers within the context."""
    uses: list[Use] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        inputs = (args[0] if args else kwargs["input"]).detach()
        # The edge of the graph, not the tensor: a later layer may change the output in place.
        uses.append(Use(layer, inputs, get_gradient_edge(output)))

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(record, with_kwargs=True).remove)
        yield uses
