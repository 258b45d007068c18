"""Which units of a network are active for which samples, whatever the network's code is.

`hyperfl_flwr.privacy.received_network` computes from it how a received network treats a client's samples.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_ACTIVATIONS = {
    functional.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, functional.leaky_relu, functional.elu,
    functional.gelu, functional.silu, functional.relu6,
}  # fmt: skip
"""Functions that let pass what is above 0 and nothing, or little, of what is below."""


def outputs_and_active_units(
    network: nn.Module, batches: Sequence[Tensor], layers: Collection[str]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the outputs for all samples, and for each activation which units are active, bool [n, U] on the CPU.

    An activation has the name of the last layer with parameters before it; several after one are numbered.

    Args:
        network: The network, in evaluation mode.
        batches: The samples.
        layers: Names of the received layers; activations before the first of them are left out.
    """
    seen = _Activations()
    hooks = []
    for name, module in network.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            hooks.append(module.register_forward_hook(seen.after(name, is_received=name in layers)))
    try:
        with seen:
            outputs = [network(seen.next(batch)) for batch in batches]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(outputs), {name: torch.cat(parts) for name, parts in seen.found.items()}


class _Activations(TorchFunctionMode):
    """Records which units are active at each call of an activation function, whether of a module or of a function.

    Attributes:
        found: For each activation, whether its units are active for the samples of each batch, bool [b, U].
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[Tensor]] = {}
        self._calls: Counter[str] = Counter()
        self._layer, self._channels_first = "", False

    def next(self, batch: Tensor) -> Tensor:
        """Forget the layers that the batch before has passed; returns the batch."""
        self._calls.clear()
        self._layer = ""
        return batch

    def after(self, layer: str, *, is_received: bool) -> Callable[[nn.Module, object, object], None]:
        """Return a hook that names the activations after a layer; those before the first received one are left out."""

        def hook(module: nn.Module, _inputs: object, _output: object) -> None:
            if is_received or self._layer:
                self._layer = layer
                self._channels_first = not isinstance(module, nn.Linear | nn.LayerNorm)

        return hook

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's signature
        """Record the input of an activation function, and call it."""
        if self._layer and func in _ACTIVATIONS:
            inputs = args[0] if args else (kwargs or {})["input"]
            if inputs.ndim > 1:  # otherwise of a network's own numbers, not of samples
                self._record(inputs)
        return func(*args, **(kwargs or {}))

    def _record(self, inputs: Tensor) -> None:
        units = 1 if self._channels_first else inputs.ndim - 1
        others = [axis for axis in range(1, inputs.ndim) if axis != units]
        self._calls[self._layer] += 1
        number = self._calls[self._layer]
        name = f"{self._layer}#{number}" if number > 1 else self._layer
        self.found.setdefault(name, []).append(((inputs.amax(dim=others) if others else inputs) > 0).cpu())
