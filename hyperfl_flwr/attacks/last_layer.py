"""The last layer of an extractor with parameters, whose gradient gives that of all layers below.

See `hyperfl_flwr.attacks.head_gradient`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from hyperfl_flwr.attacks.optimisation import Tensors
from hyperfl_flwr.models.pretrained.adapters import MapAdapter
from hyperfl_flwr.models.pretrained.network import PretrainedExtractor

_SIDE = 32
"""Side of the image with which a body without a fixed size is checked, in pixels."""


class LastLayer(Protocol):
    """The last layer of an extractor, of which the inputs u [B, D] and outputs a [B, F] are known for images."""

    def rows(self, parameters: Tensors, gradient: Tensors) -> Tensor:
        """Return [dL/dW | dL/db], [F, D + 1], from the extractor's parameters and their gradient."""

    def forward(self, parameters: Tensors, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Mapping[str, Tensor]]]:
        """Return u, and the function from dL/da [B, F] to the gradient of all parameters of the extractor."""


def last_layer_of(extractor: nn.Module) -> LastLayer:
    """Return the last layer of an extractor.

    Raises:
        ValueError: If the attack cannot use the extractor, see `LastLinear` and `LastAdapter`.
    """
    if isinstance(extractor, PretrainedExtractor):
        return LastAdapter(extractor)
    return LastLinear(extractor)


class LastLinear:
    """A linear layer, the last one with parameters in a sequence.

    Args:
        extractor: The sequence.

    Raises:
        ValueError: If it is another one.
    """

    def __init__(self, extractor: nn.Module) -> None:
        children = list(extractor.named_children())
        weighted = [number for number, (_, child) in enumerate(children) if any(True for _ in child.parameters())]
        is_sequence = isinstance(extractor, nn.Sequential)
        if not weighted or not is_sequence or not isinstance(children[weighted[-1]][1], nn.Linear):
            raise ValueError("head-gradient needs an extractor in which the last layer with parameters is linear")
        self.below = nn.Sequential(OrderedDict(children[: weighted[-1]]))
        self.name = children[weighted[-1]][0]
        self._names = [name for name, _ in self.below.named_parameters()]

    def rows(self, parameters: Tensors, gradient: Tensors) -> Tensor:
        """Return [dL/dW | dL/db], see `LastLayer`."""
        return torch.cat([gradient[f"{self.name}.weight"], gradient[f"{self.name}.bias"][:, None]], dim=1)

    def forward(self, parameters: Tensors, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Mapping[str, Tensor]]]:
        """Return the inputs and the gradient of all parameters, see `LastLayer`."""

        def inputs_of(values: dict[str, Tensor]) -> Tensor:
            inputs: Tensor = functional_call(self.below, values, (images,))
            return inputs

        inputs: Tensor
        inputs, pull, *_ = vjp(inputs_of, {name: parameters[name] for name in self._names})
        weight = f"{self.name}.weight"

        def gradient(delta: Tensor) -> Mapping[str, Tensor]:
            found: dict[str, Tensor] = pull(delta @ parameters[weight])[0] if self._names else {}
            return {**found, weight: delta.T @ inputs, f"{self.name}.bias": delta.sum(dim=0)}

        return inputs, gradient


class LastAdapter:
    """The last adapter of maps in a pre-trained body, of which the features are means over positions.

    Args:
        extractor: The body with its adapters; its own projection, if any, must be constant.

    Raises:
        ValueError: If it is another one.
    """

    def __init__(self, extractor: PretrainedExtractor) -> None:
        adapters = list(extractor.adapters)
        if not adapters or not isinstance(adapters[-1], MapAdapter) or extractor.name.trains_projection:
            raise ValueError(
                "head-gradient needs a pre-trained body with adapters of maps [B, C, H, W], and no trained layer "
                "after them"
            )
        self._extractor, self._adapter = extractor, adapters[-1]
        self._prefix = f"adapters.{len(adapters) - 1}"
        self._names = [name for name, _ in extractor.named_parameters()]
        self._check_mean()

    def rows(self, parameters: Tensors, gradient: Tensors) -> Tensor:
        """Return [dL/dW | dL/db] with b = s2 t2, see `LastLayer`."""
        scale = parameters[f"{self._prefix}.scale_out"]
        shift = scale * gradient[f"{self._prefix}.shift_out"]
        return torch.cat([gradient[f"{self._prefix}.weight"], shift[:, None]], dim=1)

    def forward(self, parameters: Tensors, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Mapping[str, Tensor]]]:
        """Return the inputs and the gradient of all parameters, see `LastLayer`."""
        seen: list[Tensor] = []

        def features_of(values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            hook = self._adapter.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
            try:
                ordered = [values[name] for name in self._names]
                features = self._extractor.body_features(images, [len(images)], [ordered])
            finally:
                hook.remove()
            scale, shift = (values[f"{self._prefix}.{name}"][:, None, None] for name in ("scale_in", "shift_in"))
            return features, (scale * seen.pop() + shift).mean(dim=(2, 3))

        values = {name: parameters[name] for name in self._names}
        _, pull, inputs = vjp(features_of, values, has_aux=True)  # type: ignore[misc] # torch's type has no aux
        scale = parameters[f"{self._prefix}.scale_out"]

        def gradient(delta: Tensor) -> Mapping[str, Tensor]:
            found: dict[str, Tensor] = pull(delta / scale)[0]
            return found

        return inputs, gradient

    def _check_mean(self) -> None:
        """Check that the features are means over positions of what the last adapter returns."""
        seen: list[Tensor] = []
        hook = self._adapter.register_forward_hook(lambda _, __, output: seen.append(output))
        side = self._extractor.plan.side or _SIDE
        images = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
        values = self._extractor.draw_values(torch.Generator().manual_seed(0))
        try:
            with torch.no_grad():
                features = self._extractor.body_features(images, [1], [[values[name] for name in self._names]])
        finally:
            hook.remove()
        if not torch.allclose(features, seen.pop().mean(dim=(2, 3)), rtol=1e-4, atol=1e-5):
            raise ValueError("head-gradient needs a pre-trained body with the mean over positions after its last stage")
