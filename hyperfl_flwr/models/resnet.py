"""ResNet-18 for small images.

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016. It is torchvision's network with the
usual stem for images of 32x32 pixels: a 3x3 convolution without stride, and no max pooling.
"""

from torch import nn

from hyperfl_flwr.models.layers.batchnorm import BatchNorm2d

RESNET_SMALLEST = 8
"""Smallest image side: three strides of 2 reduce it to one pixel."""

RESNET_FEATURES = 512
"""Width of the extractor's output."""


def resnet18_extractor(channels: int) -> nn.Module:
    """Build the network below the classifier: images [B, C, H, W] -> features [B, 512].

    Args:
        channels: Number of image channels C.
    """
    from torchvision.models import resnet18  # imported here as it takes a second, which other targets do not need

    network: nn.Module = resnet18(norm_layer=BatchNorm2d)
    network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    network.fc = nn.Identity()
    return network
