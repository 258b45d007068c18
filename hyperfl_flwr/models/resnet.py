"""ResNet-18 for small images, and what BatchNorm's running statistics need in a federation.

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016; torchvision's network with the stem that
is usual for images of 32x32 pixels: a 3x3 convolution without stride, and no max pooling.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

RESNET_SMALLEST = 8
"""Smallest image side: three strides of 2 leave one pixel of it."""

RESNET_FEATURES = 512
"""Width of the extractor's output."""


class BatchNorm(nn.BatchNorm2d):
    """torch's BatchNorm2d without its counter of batches, which nothing reads where `momentum` is a number."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.num_batches_tracked = None

    def _load_from_state_dict(self, *args: Any) -> None:  # noqa: ANN401 - as torch has it
        nn.Module._load_from_state_dict(self, *args)  # torch's own would ask for the counter


def resnet18_extractor(channels: int) -> nn.Module:
    """Return the network below its classifier: images [B, C, H, W] -> features [B, 512].

    Args:
        channels: C.
    """
    from torchvision.models import resnet18  # takes a second, which runs of other targets need not wait

    network: nn.Module = resnet18(norm_layer=BatchNorm)
    network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    network.fc = nn.Identity()
    return network


def has_statistics(module: nn.Module) -> bool:
    """Say whether a network has state that is no parameter: BatchNorm's running statistics."""
    return any(True for _ in module.buffers())


@contextlib.contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Let BatchNorm normalise by each batch's own statistics in here, and leave the running ones as they are."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d) and layer.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
