"""Build the target networks that clients train and use.

Every target is split as in HyperFL (Guo et al., AAAI 2025, section 3.2): a feature `extractor` with parameters theta
and a linear `classifier` with parameters phi. The CNNs are those of the paper's experiments (appendix D.1) with the
shapes of its public code. Perceptrons take feature vectors (D,) as well as images (C, H, W).
"""

import importlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hyperfl_flwr.models.custom.network import build_custom
from hyperfl_flwr.models.layers.dropout import Dropout
from hyperfl_flwr.models.names import TARGETS
from hyperfl_flwr.models.pretrained.names import NAMED, is_pretrained
from hyperfl_flwr.models.pretrained.network import build_pretrained
from hyperfl_flwr.models.resnet import RESNET_FEATURES, RESNET_SMALLEST, resnet18_extractor
from hyperfl_flwr.models.target import Target

NUM_FEATURES = 128
"""Width of the CNNs' features: the extractor's output and the classifier's input."""

_CONVOLUTIONS: Mapping[int, Sequence[tuple[int, int, int]]] = {
    # smallest image side: (output channels, kernel size, padding) of each convolution, a 2x2 max pooling after each
    32: ((16, 5, 0), (32, 5, 1), (64, 3, 1)),
    20: ((16, 5, 0), (32, 5, 1)),
    8: ((16, 3, 1), (32, 3, 1)),
}


class ChannelsLast(nn.Module):
    """Changes the memory layout of images to channels-last, on the CPU; the convolutions after it keep the layout.

    On the CPU, torch vectorises max pooling over adjacent channels only: with this layout the published CNN's step
    takes 0.6 of the time and its forward pass a third. On other devices images are returned unchanged.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Return the same images [B, C, H, W]."""
        # Tensor.contiguous would not change images of one channel, as their two layouts differ in the strides only.
        return images.to(memory_format=torch.channels_last) if images.device.type == "cpu" else images


def _image_shape(target: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(input_shape) != 3:
        raise ValueError(
            f"the {target} target needs images (channels, height, width), got vectors of the shape {input_shape}, "
            f"which {' and '.join(sorted(PERCEPTRONS))} take (target=mlp)"
        )
    channels, height, width = input_shape
    return channels, height, width


def build_cnn(input_shape: tuple[int, ...], num_classes: int) -> Target:
    """Build the CNN of HyperFL's experiments for an image size.

    28x28: two 5x5 convolutions of 16 and 32 channels (padding 0 and 1), 2x2 max pooling and LeakyReLU 0.01 after each,
    a linear layer 800 -> 128 with LeakyReLU; 115,776 extractor parameters. 32x32 with three channels: a third
    convolution (3x3, 64 channels), 576 -> 128; 106,400 parameters. Images of 8 to 19 pixels, which the paper does not
    use, get two 3x3 convolutions with padding 1.

    Args:
        input_shape: (channels, height, width).
        num_classes: Number of classes K.

    Returns:
        The target on the meta device; `initial_state` draws its values.

    Raises:
        ValueError: If the samples are not images, or smaller than 8x8.
    """
    channels, height, width = _image_shape("cnn", input_shape)
    side = min(height, width)
    convolutions = next((layers for smallest, layers in _CONVOLUTIONS.items() if side >= smallest), None)
    if convolutions is None:
        raise ValueError(f"the cnn target needs images of at least 8x8 pixels, got {height}x{width}")
    layers: list[tuple[str, nn.Module]] = [("layout", ChannelsLast())]
    with torch.device("meta"):
        for number, (out_channels, kernel, padding) in enumerate(convolutions, start=1):
            layers += [
                (f"conv{number}", nn.Conv2d(channels, out_channels, kernel, padding=padding)),
                (f"pool{number}", nn.MaxPool2d(2)),
                (f"act{number}", nn.LeakyReLU(0.01)),
            ]
            channels = out_channels
            height, width = ((side + 2 * padding - kernel + 1) // 2 for side in (height, width))
        layers += [
            ("flatten", nn.Flatten()),
            ("fc", nn.Linear(channels * height * width, NUM_FEATURES)),
            ("act", nn.LeakyReLU(0.01)),
        ]
        extractor = nn.Sequential()
        for name, layer in layers:
            extractor.add_module(name, layer)
        return Target(extractor, nn.Linear(NUM_FEATURES, num_classes))


LENET_SMALLEST = 16
"""Smallest image side of the LeNet target."""


def build_lenet(input_shape: tuple[int, ...], num_classes: int) -> Target:
    """Build the LeNet of pFedHN's experiments (Shamsian et al., ICML 2021, appendix C, and its public code).

    Two 5x5 convolutions of 16 and 32 channels without padding, ReLU and 2x2 max pooling after each, linear layers of
    120 and 84 units with ReLU, and the classifier 84 -> K. At 3x32x32 with ten classes it has 121,182 parameters.

    Args:
        input_shape: (channels, height, width).
        num_classes: Number of classes K.

    Returns:
        The target on the meta device.

    Raises:
        ValueError: If the samples are not images, or smaller than 16x16.
    """
    channels, height, width = _image_shape("lenet", input_shape)
    if min(height, width) < LENET_SMALLEST:
        raise ValueError(f"the lenet target needs images of at least 16x16 pixels, got {height}x{width}")
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    with torch.device("meta"):
        extractor = nn.Sequential(
            OrderedDict(
                layout=ChannelsLast(),
                conv1=nn.Conv2d(channels, 16, 5),
                act1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(16, 32, 5),
                act2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(32 * rows * columns, 120),
                act3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                act4=nn.ReLU(),
            )
        )
        return Target(extractor, nn.Linear(84, num_classes))


MLP_WIDTH = 200
"""Number of units in each hidden layer of the `mlp` target."""

WIDE_MLP_WIDTH = 500
"""Number of units in each hidden layer of the `mlp-500` target."""

WIDE_MLP_DROPOUT = 0.2
"""Dropout probability of the `mlp-500` target."""


def build_mlp(input_shape: tuple[int, ...], num_classes: int) -> Target:
    """Build the multi-layer perceptron "2NN" of FedAvg's experiments (McMahan et al., AISTATS 2017, section 3).

    Two hidden layers of 200 units with ReLU. At 1x28x28 with ten classes it has 199,210 parameters.

    Args:
        input_shape: (channels, height, width), or (D,) of feature vectors.
        num_classes: Number of classes K.

    Returns:
        The target on the meta device.
    """
    return _perceptron(math.prod(input_shape), MLP_WIDTH, num_classes)


def build_mlp_500(input_shape: tuple[int, ...], num_classes: int) -> Target:
    """Build the network for feature vectors of IT-PFL-HN (under review at ICLR 2022, section 6.4 and appendix C).

    "Two Dense layers of size 500 each, followed by a Dropout layer with a dropout probability of 0.2", and the
    classifier. The paper does not name the layers' activation, which is ReLU here. With vectors of length 1280 and ten
    classes it has 896,010 parameters.

    Args:
        input_shape: (D,) of feature vectors, or (channels, height, width).
        num_classes: Number of classes K.

    Returns:
        The target on the meta device.
    """
    return _perceptron(math.prod(input_shape), WIDE_MLP_WIDTH, num_classes, {"drop": Dropout(WIDE_MLP_DROPOUT)})


def _perceptron(inputs: int, width: int, num_classes: int, last: Mapping[str, nn.Module] | None = None) -> Target:
    """Build a perceptron: two hidden layers with ReLU, then the layers `last`, then the classifier."""
    with torch.device("meta"):
        extractor = nn.Sequential(
            OrderedDict(
                flatten=nn.Flatten(),
                fc1=nn.Linear(inputs, width),
                act1=nn.ReLU(),
                fc2=nn.Linear(width, width),
                act2=nn.ReLU(),
                **(last or {}),
            )
        )
        return Target(extractor, nn.Linear(width, num_classes))


def build_resnet18(input_shape: tuple[int, ...], num_classes: int) -> Target:
    """Build the ResNet-18 of experiments on CIFAR-10 (He et al., CVPR 2016), see `hyperfl_flwr.models.resnet`.

    At 3x32x32 with ten classes it has 11,173,962 parameters, and running statistics.

    Args:
        input_shape: (channels, height, width).
        num_classes: Number of classes K.

    Returns:
        The target on the meta device.

    Raises:
        ValueError: If the samples are not images, or smaller than 8x8.
    """
    channels, height, width = _image_shape("resnet18", input_shape)
    if min(height, width) < RESNET_SMALLEST:
        raise ValueError(f"the resnet18 target needs images of at least 8x8 pixels, got {height}x{width}")
    with torch.device("meta"):
        return Target(resnet18_extractor(channels), nn.Linear(RESNET_FEATURES, num_classes))


PERCEPTRONS = frozenset({"mlp", "mlp-500"})
"""Names of the target networks that take feature vectors."""


def build_target(name: str, input_shape: tuple[int, ...], num_classes: int) -> Target:
    """Build a target network on the meta device.

    Args:
        name: One of `hyperfl_flwr.models.names.TARGETS`, a name of a network on a pre-trained body, see
            `hyperfl_flwr.models.pretrained.names`, or `package.module:factory` of a user-supplied network, see
            `hyperfl_flwr.models.custom.network`.
        input_shape: (channels, height, width), or (D,) of feature vectors.
        num_classes: Number of classes K.

    Raises:
        ValueError: If the name is unknown or the network cannot take such inputs.
        ConfigError: If a user-supplied network cannot be made or split, or a library is not installed.
    """
    if is_pretrained(name):
        return build_pretrained(name, input_shape, num_classes)
    if ":" in name:
        return build_custom(name, input_shape, num_classes)
    if name not in TARGETS:
        raise ValueError(f"unknown target network {name!r}; known: {', '.join([*TARGETS, *NAMED])}")
    module, _, function = TARGETS[name].partition(":")
    built: Target = getattr(importlib.import_module(module), function)(input_shape, num_classes)
    return built
