"""Fixtures of the numerical tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from hyperfl_flwr.models.pretrained.weights import choose


@pytest.fixture
def float64() -> Iterator[None]:
    """Make new tensors, and thus the project's models and clients, use double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def resnet18_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random values of a whole ResNet-18, with running statistics that are not those of initialisation."""
    torch.manual_seed(0)
    network = resnet18()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.1, 0.1)
            layer.running_var.uniform_(0.8, 1.2)
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(network.state_dict(), path)
    return path


@pytest.fixture
def resnet18_chosen(resnet18_weights: Path) -> Iterator[None]:
    """Let bodies of ResNet-18 have these values."""
    choose(str(resnet18_weights))
    yield
    choose("auto")
