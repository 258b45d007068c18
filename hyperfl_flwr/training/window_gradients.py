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
    # [B groups, H' W', O / groups], the order of channels-last outputs.
    sides = (
        outputs.reshape(batch, groups, -1, rows, cols).permute(0, 1, 3, 4, 2).reshape(batch * groups, rows * cols, -1)
    )
    if inputs.stride(1) == 1 and channels > 1:
        # Channels lie side by side, so this copy moves whole rows of kw C / groups numbers.
        columns = windows.permute(0, 1, 3, 4, 5, 6, 2).reshape(batch * groups, rows * cols, -1)
        weights = torch.bmm(sides.transpose(1, 2), columns)
        return weights.reshape(batch, -1, height, width, channels).permute(0, 1, 4, 2, 3), outputs.sum((2, 3))
    # Pixels lie side by side: rows of W' numbers.
    columns = windows.permute(0, 1, 2, 5, 6, 3, 4).reshape(batch * groups, -1, rows * cols)
    weights = torch.bmm(columns, sides).reshape(batch, groups, channels, height, width, -1)
    return weights.permute(0, 1, 5, 2, 3, 4).flatten(1, 2), outputs.sum((2, 3))


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
