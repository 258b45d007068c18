"""Gradients of convolutions and linear layers for each sample, from a layer's input and its output's gradient."""

import torch
from torch import Tensor, nn
from torch.nn import functional

CACHED = 2**18
"""Number of values of a convolution's windows that are copied at a time, so that they stay in the processor's cache."""


def convolution_gradients(layer: nn.Conv2d, inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a convolution's weight and bias for each sample.

    Args:
        layer: A convolution with any stride, padding, dilation and number of groups.
        inputs: Its inputs [B, C, H, W].
        outputs: Gradients of each sample's loss with respect to the outputs, [B, O, H', W'].

    Returns:
        Gradients [B, O, C / groups, kh, kw], in any order in memory, and [B, O].
    """
    batch, groups, channels = len(inputs), layer.groups, layer.in_channels // layer.groups
    (height, width), (down, across) = layer.kernel_size, layer.dilation
    padded = _padded(layer, inputs)
    # [B, C, H', W', kh, kw], a view: the input of each output position and each weight.
    windows = padded.unfold(2, down * (height - 1) + 1, layer.stride[0])[..., ::down]
    windows = windows.unfold(3, across * (width - 1) + 1, layer.stride[1])[..., ::across]
    windows = windows.view(batch, groups, channels, *windows.shape[2:])
    rows, cols = outputs.shape[2:]
    # [B, groups, H' W', O / groups], the order of channels-last outputs.
    sides = outputs.reshape(batch, groups, -1, rows, cols).permute(0, 1, 3, 4, 2).flatten(2, 3)
    inner, outer = height * width * channels, sides.shape[3]
    # The columns are copies; whole rows are copied if channels lie side by side in memory, or else pixels.
    by_channels = inputs.stride(1) == 1 and channels > 1
    weights = inputs.new_empty(batch, groups, *((outer, inner) if by_channels else (inner, outer)))
    size = max(1, CACHED // (groups * inner * rows * cols)) if inputs.device.type == "cpu" else batch
    for part, side, out in zip(*(torch.split(each, size) for each in (windows, sides, weights)), strict=True):
        if by_channels:
            columns = part.permute(0, 1, 3, 4, 5, 6, 2).reshape(-1, rows * cols, inner)
            torch.bmm(side.flatten(0, 1).transpose(1, 2), columns, out=out.flatten(0, 1))
        else:
            columns = part.permute(0, 1, 2, 5, 6, 3, 4).reshape(-1, inner, rows * cols)
            torch.bmm(columns, side.flatten(0, 1), out=out.flatten(0, 1))
    if by_channels:
        found = weights.reshape(batch, -1, height, width, channels).permute(0, 1, 4, 2, 3)
    else:
        found = weights.reshape(batch, groups, channels, height, width, -1).permute(0, 1, 5, 2, 3, 4).flatten(1, 2)
    return found, outputs.sum((2, 3))


def linear_gradients(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a linear layer's weight and bias for each sample.

    Args:
        inputs: Its inputs [B, ..., I].
        outputs: Gradients of each sample's loss with respect to the outputs, [B, ..., O].

    Returns:
        Gradients [B, O, I] and [B, O].
    """
    rows = inputs.reshape(len(inputs), -1, inputs.shape[-1])
    inner = outputs.reshape(len(outputs), -1, outputs.shape[-1])
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
