"""Gradients of convolutions and linear layers for each sample, from a layer's input and its output's gradient."""

import torch
from torch import Tensor, nn
from torch.nn import functional


def convolution_gradients(layer: nn.Conv2d, inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a convolution's weight and bias for each sample.

    Args:
        layer: A convolution with any stride, padding, dilation and number of groups.
        inputs: Its inputs [B, C, H, W].
        outputs: Gradients of each sample's loss with respect to the outputs, [B, O, H', W'].

    Returns:
        Gradients [B, O, C / groups, kh, kw] and [B, O].
    """
    batch, groups = len(inputs), layer.groups
    (height, width), (down, across) = layer.kernel_size, layer.dilation
    padded = _padded(layer, inputs)
    # [B, C, H', W', kh, kw], a view: the input of each output position and each weight.
    windows = padded.unfold(2, down * (height - 1) + 1, layer.stride[0])[..., ::down]
    windows = windows.unfold(3, across * (width - 1) + 1, layer.stride[1])[..., ::across]
    windows = windows.unflatten(1, (groups, -1))
    # [B, groups, H' W', O / groups]; this order is that of channels-last outputs.
    inner = outputs.unflatten(1, (groups, -1)).permute(0, 1, 3, 4, 2).reshape(batch * groups, -1, layer.out_channels // groups)
    columns = windows.permute(0, 1, 3, 4, 5, 6, 2).reshape(batch * groups, inner.shape[1], -1)
    weights = torch.bmm(inner.transpose(1, 2), columns)
    weights = weights.reshape(batch, layer.out_channels, height, width, -1).permute(0, 1, 4, 2, 3)
    return weights, outputs.sum((2, 3))


def linear_gradients(layer: nn.Linear, inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a linear layer's weight and bias for each sample.

    Args:
        layer: The layer.
        inputs: Its inputs [B, ..., I].
        outputs: Gradients of each sample's loss with respect to the outputs, [B, ..., O].

    Returns:
        Gradients [B, O, I] and [B, O].
    """
    rows = inputs.reshape(len(inputs), -1, layer.in_features)
    inner = outputs.reshape(len(outputs), -1, layer.out_features)
    return torch.bmm(inner.transpose(1, 2), rows), inner.sum(1)


def _padded(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """Return a convolution's inputs with its padding."""
    if layer.padding == "same":
        totals = [step * (size - 1) for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    elif layer.padding == "valid":
        sides = [(0, 0), (0, 0)]
    else:
        sides = [(int(side), int(side)) for side in layer.padding]
    if not any(map(any, sides)):
        return inputs
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return functional.pad(inputs, (*sides[1], *sides[0]), mode=mode)
