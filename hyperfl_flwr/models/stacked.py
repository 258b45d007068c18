"""Apply K networks of one form, each with parameters of its own, to a batch of samples each, in one pass.

A GPU computes a small network's step in microseconds, but needs several for each operator that is started. One operator
for K networks costs little more than for one. Linear layers are batched matrix products. A convolution is one of two
forms with equal results up to rounding, see `Convolution`: which is faster depends on the device, see
`python -m benchmarks.stacked`.

Between the layers, images are [K, B, C, H, W] and features [K, B, F]. K networks are independent: numbers that are not
finite stay in their own network.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import ChannelsLast

Convolution = Callable[[nn.Conv2d, Tensor, Tensor, Tensor | None], Tensor]
"""Maps (layer, images [K, B, C, H, W], weight [K, O, C, h, w], bias [K, O]) to images [K, B, O, H', W']."""

ELEMENTWISE = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardtanh, nn.Identity,
    ChannelsLast,
)  # fmt: skip
"""Layers without parameters that map each number by itself."""

POOLING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
"""Layers without parameters that map each channel of an image by itself."""

NESTED = (nn.Sequential, Target)
"""Layers that apply their children one after the other."""


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a layer keeps functions that are called when it is applied; torch has no public names for these."""


GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where a parameter keeps functions that are called with its gradient; torch has no public names for these."""


CHILDREN = "_modules"
"""Where a layer keeps its children by name, in their order; torch has no public name for it."""


def has_plain_gradient(parameter: Tensor) -> bool:
    """Return whether a parameter is trained, and by its gradient as it is: it is not frozen and has no hooks."""
    return parameter.requires_grad and not any(getattr(parameter, name, None) for name in GRADIENT_HOOKS)


def is_stackable(network: nn.Module) -> bool:
    """Return whether `StackedNetwork` can apply a network: it has only layers of the kinds above, in their plain form.

    Layers whose samples depend on each other (batch statistics) or on random numbers (dropout) are not among them.
    """
    return all(_is_known(layer) for layer in network.modules())


def _is_known(layer: nn.Module) -> bool:
    """Return whether a layer is of a known kind, is computed as its class does, and has no hooks."""
    if "forward" in vars(layer) or any(getattr(layer, name) for name in HOOKS):
        return False
    if isinstance(layer, nn.Conv2d):
        return (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.padding_mode == "zeros"
            and (not isinstance(layer.padding, str))
        )
    if isinstance(layer, nn.Flatten):
        return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
    return type(layer) in (nn.Linear, *ELEMENTWISE, *POOLING, *NESTED)


@dataclass(frozen=True)
class StackedNetwork:
    """A network of a form that `is_stackable`, with K sets of parameters.

    Attributes:
        network: The form; its own parameters are not used.
        convolution: How convolutions are computed.
    """

    network: nn.Module
    convolution: Convolution

    def __call__(self, values: Mapping[str, Tensor], samples: Tensor) -> Tensor:
        """Return the outputs [K, B, ...] for samples [K, B, ...].

        Args:
            values: The parameters [K, *shape], by the name that they have in the network.
            samples: K batches of images [K, B, C, H, W] or feature vectors [K, B, D].
        """
        return self._apply(self.network, "", values, samples)

    def _apply(self, layer: nn.Module, prefix: str, values: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        if isinstance(layer, NESTED):
            for name, child in vars(layer)[CHILDREN].items():  # `named_children` leaves out one that comes again
                inputs = self._apply(child, f"{prefix}{name}.", values, inputs)
            return inputs
        if isinstance(layer, nn.Flatten):
            return inputs.flatten(2)
        if isinstance(layer, POOLING):
            return _each_channel(layer, inputs)
        if isinstance(layer, ELEMENTWISE):
            outputs: Tensor = layer(inputs) if not isinstance(layer, ChannelsLast) else inputs
            return outputs
        weight, bias = values[f"{prefix}weight"], values.get(f"{prefix}bias")
        if isinstance(layer, nn.Conv2d):
            return self.convolution(layer, inputs, weight, bias)
        products = torch.bmm(inputs, weight.transpose(1, 2))
        return products if bias is None else products + bias[:, None]


def _each_channel(layer: nn.Module, images: Tensor) -> Tensor:
    """Apply a layer to each channel of images [K, B, C, H, W]."""
    pooled: Tensor = layer(images.flatten(0, 1))
    return pooled.view(*images.shape[:2], *pooled.shape[1:])


def grouped_convolution(layer: nn.Conv2d, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute K convolutions as one with K groups of channels; see `Convolution`."""
    number, batch, channels, height, width = images.shape
    grouped = images.transpose(0, 1).reshape(batch, number * channels, height, width)
    found = functional.conv2d(
        grouped, weight.flatten(0, 1), None if bias is None else bias.flatten(),
        layer.stride, layer.padding, layer.dilation, number,
    )  # fmt: skip
    return found.view(batch, number, -1, *found.shape[2:]).transpose(0, 1)


def product_convolution(layer: nn.Conv2d, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute K convolutions as matrix products with the windows of each image ("im2col"); see `Convolution`."""
    found: Tensor = _ProductConvolution.apply(images, weight, bias, layer)
    # A view outside of the function, since a layer that follows may change it in place.
    return found.view(*images.shape[:2], -1, *(_places(layer, images.shape, axis) for axis in (0, 1)))


class _ProductConvolution(torch.autograd.Function):
    """A product for each image: one for all images of a network would reduce over too many numbers in one place.

    Its outputs are [K B, O, H' W'].
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Conv2d) -> Tensor:  # noqa: ANN401
        number, batch = images.shape[:2]
        columns = _windows(layer, images)
        matrix = weight.flatten(2)
        each = matrix[:, None].expand(-1, batch, -1, -1).flatten(0, 1)
        found = torch.bmm(each, columns)
        if bias is not None:
            found.view(number, batch, *found.shape[1:]).add_(bias[:, None, :, None])
        ctx.layer, ctx.shapes, ctx.has_bias = layer, (images.shape, weight.shape), bias is not None
        ctx.save_for_backward(columns, each)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        columns, each = ctx.saved_tensors
        layer, (shape, of_weight) = ctx.layer, ctx.shapes
        number, batch = shape[:2]
        of_images = of_bias = None
        products = torch.bmm(gradient, columns.transpose(1, 2)).view(number, batch, *of_weight[1:])
        if ctx.has_bias:
            of_bias = gradient.reshape(number, batch, *gradient.shape[1:]).sum(dim=(1, 3))
        if ctx.needs_input_grad[0]:
            of_images = _from_windows(layer, torch.bmm(each.transpose(1, 2), gradient), shape)
        return of_images, products.sum(dim=1), of_bias, None


def _windows(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """Return what a convolution sees at each place of each image [K B, C h w, H' W']."""
    windows = images.flatten(0, 1)
    if any(_padding(layer)):
        vertical, horizontal = _padding(layer)
        windows = functional.pad(windows, (horizontal, horizontal, vertical, vertical))
    for axis in (0, 1):
        windows = windows.unfold(2 + axis, _span(layer, axis), layer.stride[axis])
    windows = windows[..., :: layer.dilation[0], :: layer.dilation[1]]  # [K B, C, H', W', h, w]
    return windows.permute(0, 1, 4, 5, 2, 3).reshape(len(windows), -1, windows.shape[2] * windows.shape[3])


def _from_windows(layer: nn.Conv2d, windows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the sum over all places of gradients by window [K B, C h w, H' W'], as images of a shape [K, B, C, H, W].

    torch's `fold` does the same, but takes 2.5 times as long on a GPU.
    """
    number, batch, channels, height, width = shape
    size = [_places(layer, shape, axis) for axis in (0, 1)]
    vertical, horizontal = _padding(layer)
    padded = (height + 2 * vertical, width + 2 * horizontal)
    gradient = windows.view(number * batch, channels, *layer.kernel_size, *size).permute(0, 1, 4, 5, 2, 3)
    if layer.dilation != (1, 1):
        dilated = gradient.new_zeros(*gradient.shape[:4], _span(layer, 0), _span(layer, 1))
        dilated[..., :: layer.dilation[0], :: layer.dilation[1]] = gradient
        gradient = dilated
    images, back = [number * batch, channels], torch.ops.aten.unfold_backward
    by_column = [*images, padded[0], size[1], gradient.shape[5]]
    columns = back(gradient.transpose(4, 5), by_column, 2, gradient.shape[4], layer.stride[0])
    whole: Tensor = back(columns, [*images, *padded], 3, gradient.shape[5], layer.stride[1])
    inner = whole[:, :, vertical : vertical + height, horizontal : horizontal + width]
    return inner.reshape(number, batch, channels, height, width)


def _padding(layer: nn.Conv2d) -> tuple[int, int]:
    """Return the padding of a layer that `is_stackable`."""
    return (0, 0) if isinstance(layer.padding, str) else (layer.padding[0], layer.padding[1])


def _places(layer: nn.Conv2d, shape: Sequence[int], axis: int) -> int:
    """Return at how many places along an axis a convolution is computed, of images [K, B, C, H, W]."""
    return int((shape[3 + axis] + 2 * _padding(layer)[axis] - _span(layer, axis)) // layer.stride[axis] + 1)


def _span(layer: nn.Conv2d, axis: int) -> int:
    """Return how many pixels a window covers along an axis."""
    return layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1


def convolution_for(device: torch.device) -> Convolution:
    """Return the form of convolutions that was measured to be faster on a type of device."""
    return CONVOLUTIONS["grouped" if device.type == "cpu" else "product"]


CONVOLUTIONS: Mapping[str, Convolution] = {"grouped": grouped_convolution, "product": product_convolution}


KEPT = 3
"""Upper bound of the tensors that training keeps for each output of a layer: the output, its activation, a gradient."""


def activations_of(network: nn.Module, shape: Sequence[int]) -> int:
    """Return the number of numbers that a training step keeps of one sample, with their gradients.

    Args:
        network: A network that `is_stackable`, on the meta device.
        shape: Shape of a sample.
    """
    total = 0

    def counted(layer: nn.Conv2d, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        nonlocal total
        found = grouped_convolution(layer, images, weight, bias)
        # The windows and their gradient; in the form of products each image has a copy of the weight, and its gradient.
        total += KEPT * found.numel() + 2 * weight[0, 0].numel() * found[0, 0, 0].numel() + 2 * weight[0].numel()
        return found

    samples = torch.empty(1, 1, *shape, device="meta")
    values = {name: value.new_empty(1, *value.shape) for name, value in network.named_parameters()}
    StackedNetwork(network, counted)(values, samples)
    linear = sum(layer.out_features for layer in network.modules() if isinstance(layer, nn.Linear))
    return total + KEPT * (linear + samples.numel())


def stacked(tensors: Iterable[Tensor]) -> Tensor:
    """Return tensors of one shape as [K, *shape], without their graphs."""
    return torch.stack([tensor.detach() for tensor in tensors])
