"""The head-gradient attack on adapters in a pre-trained body."""

from pathlib import Path

import pytest
import torch
from pretrained_bodies import CIFAR, built, timm_weights
from torch import nn

from hyperfl_flwr.attacks.head_gradient import least_squares_cotangents
from hyperfl_flwr.attacks.last_layer import last_layer_of
from hyperfl_flwr.models.pretrained.network import build_pretrained
from hyperfl_flwr.models.pretrained.weights import choose

pytestmark = pytest.mark.usefixtures("resnet18_chosen")


@pytest.mark.parametrize("number", [1, 3])
def test_the_attack_simulates_the_gradient_of_adapters(number: int) -> None:
    """At the true images it is that of the clients, although the attack knows no label, classifier and projection."""
    target = built("lpm-resnet18").double()
    extractor = target.extractor
    generator = torch.Generator().manual_seed(1)
    for value in extractor.parameters():
        value.data += 0.1 * torch.randn(value.shape, generator=generator).double()
    images = torch.randn(number, *CIFAR, generator=generator).double()
    loss = nn.functional.cross_entropy(target(images), torch.arange(number))
    parameters = dict(extractor.named_parameters())
    gradient = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    values = {name: value.detach() for name, value in parameters.items()}

    last = last_layer_of(extractor)
    rows = last.rows(values, gradient)
    inputs, pulled = last.forward(values, images)
    delta = rows[:, -1:].T if number == 1 else least_squares_cotangents(inputs, rows)
    found = pulled(delta)
    assert found.keys() == gradient.keys()
    for name, value in gradient.items():
        assert (found[name] - value).norm() < (1e-9 if number == 1 else 1e-2) * value.norm(), name


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("lpm-resnet18-fixed", "adapters of maps"),
        ("lpm-resnet18-projection", "no trained layer"),
        ("lpm:timm/test_vit@64", "adapters of maps"),
        ("lpm:timm/test_convnext@64", "mean over positions"),
    ],
)
def test_bodies_that_the_attack_cannot_use(name: str, problem: str, tmp_path: Path) -> None:
    if "timm" in name:
        choose(str(timm_weights(name.removeprefix("lpm:timm/").partition("@")[0], tmp_path)))
    with pytest.raises(ValueError, match=problem):
        last_layer_of(build_pretrained(name, CIFAR, 10).extractor)
