"""Networks as users would write them: valid ones, and ones that each break a rule."""

import math
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class Patches(nn.Module):
    """A network with parts that no built-in target has.

    They are a norm without statistics, a parameter, a buffer, dropout, and a layer that no gradient reaches.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, p: float = 0.1) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("weights", torch.arange(1.0, 5.0).view(4, 1, 1))
        self.maps = nn.Dropout2d(p)
        self.units = nn.Dropout(p)
        self.idle = nn.Linear(2, 1)
        self.head = nn.Linear(4 * height * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.maps(torch.relu(self.norm(self.conv(images)))) * self.scale * self.weights
        return self.head(self.units(maps.flatten(1)))


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Patches(input_shape, num_classes)


def smooth(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The network of Zhu et al. (2019) with fewer layers: sigmoids, strides instead of pooling, weights in +-0.5."""
    channels, *sides = input_shape
    network = nn.Sequential(
        nn.Conv2d(channels, 12, 5, padding=2, stride=2), nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(12 * math.prod(-(-side // 2) for side in sides), num_classes),
    )  # fmt: skip
    for value in network.parameters():
        nn.init.uniform_(value, -0.5, 0.5)
    return network


def with_batchnorm(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(16, num_classes, bias=False),
    )  # fmt: skip


def with_batchnorm1d(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    inputs = int(np.prod(input_shape))
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, num_classes)
    )  # fmt: skip


def perceptron(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the built-in target `mlp` as a sequence, with the same layers, names and values."""
    inputs = int(np.prod(input_shape))
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(), fc1=nn.Linear(inputs, 12), act1=nn.ReLU(), fc2=nn.Linear(12, 12), act2=nn.ReLU(),
            last=nn.Linear(12, num_classes),
        )
    )  # fmt: skip


def without_bias(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 6), nn.ReLU(), nn.Linear(6, num_classes, bias=False)
    )  # fmt: skip


class Attention(nn.Module):
    """A small transformer over an image's rows."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.embed = nn.Linear(channels * width, 8)
        self.place = nn.Parameter(torch.randn(height, 8) * 0.02)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.permute(0, 2, 1, 3).flatten(2)
        return self.head(self.layer(self.embed(rows) + self.place).mean(dim=1))


def attention(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Attention(input_shape, num_classes)


class _Rows(nn.Module):
    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(width, 8, batch_first=True)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.rnn(images[:, 0])[0][:, -1])


def recurrent(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return _Rows(input_shape[-1], num_classes)


NUMBER = 3


def fails(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    raise KeyError("no such thing")


def returns_text(input_shape: tuple[int, ...], num_classes: int) -> str:
    return "a network"


def no_parameters(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Flatten()


def only_a_classifier(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes))


def _sequence(input_shape: tuple[int, ...], *layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 8), *layers)


def other_outputs(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return _sequence(input_shape, nn.Linear(8, num_classes + 1))


def ends_with_a_norm(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return _sequence(input_shape, nn.Linear(8, num_classes), nn.LayerNorm(num_classes))


def ends_with_softmax(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return _sequence(input_shape, nn.Linear(8, num_classes), nn.Softmax(dim=1))


def wrong_shape(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[-1], 8), nn.Linear(8, num_classes))


def cannot_take_them(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(7, 8), nn.Linear(8, num_classes))


def tied(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.weight = one.weight
    return _sequence(input_shape, one, other, nn.Linear(8, num_classes))


def doubles(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return _sequence(input_shape, nn.Linear(8, num_classes)).double()


def frozen(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    network = _sequence(input_shape, nn.Linear(8, num_classes))
    network[1].weight.requires_grad_(False)
    return network


def lazy(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.Linear(8, num_classes))


def own_random_numbers(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    network = _sequence(input_shape, nn.Linear(8, num_classes))
    with torch.no_grad():
        network[1].bias.copy_(torch.from_numpy(np.random.default_rng().normal(size=8)))
    return network


class _Functional(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return functional.dropout(features, 0.5, self.training)


def functional_dropout(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return _sequence(input_shape, _Functional(), nn.Linear(8, num_classes))


def argument_dropout(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Attention(input_shape, num_classes, dropout=0.5)


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        self.count += 1
        return features


def counts(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return _sequence(input_shape, _Counter(), nn.Linear(8, num_classes))


def batch_statistics(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return _sequence(input_shape, nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, num_classes))


def cumulative_statistics(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return _sequence(input_shape, nn.BatchNorm1d(8, momentum=None), nn.Linear(8, num_classes))


def changes_its_input(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    inputs = int(np.prod(input_shape))
    return nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(inputs, 8), nn.Linear(8, num_classes))


class _Keeps(nn.Module):
    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.below, self.head = nn.Linear(width, 8), nn.Linear(8, num_classes)
        self.kept = [self.below.weight]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(functional.linear(images.flatten(1), self.kept[0]))


def keeps_references(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return _Keeps(int(np.prod(input_shape)), num_classes)
