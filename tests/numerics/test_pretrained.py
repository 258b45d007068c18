"""Target networks on a pre-trained body: sizes, adapters, and bodies of several families."""

import copy
from pathlib import Path

import pytest
import torch
from pretrained_bodies import CIFAR, GREY, built, timm_weights
from torch import nn
from torchvision.models import mobilenet_v3_small, resnet18

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.launch.engine_choice import sample_operations
from hyperfl_flwr.models.hypernetwork import Hypernetwork, common_embedding, initial_hypernetwork
from hyperfl_flwr.models.pretrained.adapters import MapAdapter, TokenAdapter
from hyperfl_flwr.models.pretrained.bodies import plan_body
from hyperfl_flwr.models.pretrained.names import Body, parse
from hyperfl_flwr.models.pretrained.network import build_pretrained
from hyperfl_flwr.models.pretrained.weights import choose, load_body
from hyperfl_flwr.models.targets import build_target

pytestmark = pytest.mark.usefixtures("resnet18_chosen")


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "extractor", "classifier", "hypernetwork"),
    [
        ("lpm-resnet18", 352_000, 1_290, 45_416_320),
        ("lpm-resnet18-projection", 352_000 + 65_664, 1_290, None),
        ("lpm-resnet18-fixed", 65_664, 1_290, None),
        ("lpm-vit-s16", 235_296, 3_850, 30_361_504),
        ("lpm-vit-s16-fixed", 0, 3_850, None),
    ],
)
def test_sizes_are_those_of_the_paper(name: str, extractor: int, classifier: int, hypernetwork: int | None) -> None:
    target = build_target(name, CIFAR, 10)
    assert (count(target.extractor), count(target.classifier)) == (extractor, classifier)
    assert len(target.state_dict()) == len(list(target.parameters()))  # neither the body nor statistics
    if hypernetwork is not None:
        assert count(Hypernetwork(target.extractor)) == hypernetwork


@pytest.mark.parametrize("shape", [CIFAR, GREY])
def test_without_adapters_it_is_the_body(resnet18_weights: Path, shape: tuple[int, ...]) -> None:
    """With adapters that are identities, the features are those of torchvision's network."""
    target = built("lpm-resnet18", shape)
    values = {name: torch.zeros_like(value) if "weight" in name or "shift" in name else value
              for name, value in target.extractor.state_dict().items()}  # fmt: skip
    target.extractor.load_state_dict(values, assign=True)
    network = resnet18()
    network.load_state_dict(torch.load(resnet18_weights, weights_only=True))
    network.fc = nn.Identity()
    images = torch.randn(4, *shape)
    expected = network.eval()(images.expand(-1, 3, -1, -1))
    extractor = target.extractor
    found = extractor.body_features(images, [4], [list(extractor.adapters.parameters())])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("lpm-resnet18", MapAdapter), ("lpm:timm/test_vit@64", TokenAdapter)])
def test_all_generated_numbers_matter(name: str, kind: type[nn.Module], resnet18_weights: Path) -> None:
    """A hypernetwork generates the adapters; a change of any of their tensors changes the logits."""
    choose(str(timm_weights("test_vit", resnet18_weights.parent))) if "timm" in name else None
    target = built(name)
    hypernetwork = Hypernetwork(target.extractor, hidden_width=4, embedding_dim=3)
    v = common_embedding(3, "hyperfan-bias", 0)
    generator = torch_generator(0, "hypernetwork")
    hypernetwork.load_state_dict(
        initial_hypernetwork(hypernetwork, target.extractor, "hyperfan-bias", v, generator), assign=True
    )
    theta = hypernetwork.split(hypernetwork(v).detach())
    target.extractor.load_state_dict(theta, assign=True)
    assert len(target.extractor.adapters) > 0
    assert all(isinstance(adapter, kind) for adapter in target.extractor.adapters)
    images = torch.randn(3, *CIFAR)
    with torch.no_grad():
        before = target(images)
        for key, value in theta.items():
            value += 0.5 * torch.randn(value.shape, generator=generator)
            after = target(images)
            assert (after - before).abs().max() > 1e-6, key
            before = after


def test_the_body_is_shared_frozen_and_always_evaluates() -> None:
    one, other = built("lpm-resnet18"), copy.deepcopy(built("lpm-resnet18-fixed"))
    body = load_body(parse("lpm-resnet18").body).network
    before = copy.deepcopy(body.state_dict())
    images = torch.randn(4, *CIFAR)
    for target in (one, other):
        target.train()
        target(images).square().sum().backward()
        assert all(parameter.grad is not None for parameter in target.parameters())
    assert not body.training
    assert not any(parameter.requires_grad for parameter in body.parameters())
    assert load_body(parse("lpm-resnet18-fixed").body).network is body
    assert all(torch.equal(value, before[name]) for name, value in body.state_dict().items())


def test_samples_of_a_batch_do_not_affect_each_other() -> None:
    target = built("lpm-resnet18").train()
    images = torch.randn(4, *CIFAR)
    torch.testing.assert_close(target(images)[:1], target(images[:1]), rtol=1e-4, atol=1e-5)


def test_adapters_start_near_the_identity() -> None:
    target, other = built("lpm-resnet18"), built("lpm-resnet18-projection")
    images = torch.randn(8, *CIFAR)
    with torch.no_grad():
        adapted = target.extractor.body_features(images, [8], [list(target.extractor.adapters.parameters())])
        plain = built("lpm-resnet18-fixed").extractor.body_features(images, [8], [[]])
    assert 0 < (adapted - plain).norm() < 0.5 * plain.norm()
    assert torch.equal(target(images), built("lpm-resnet18", seed=0)(images))
    assert not torch.equal(target(images), other(images))  # another projection


FAMILIES = [
    ("torchvision/resnet34@64", 4, "maps", 512),
    ("torchvision/mobilenet_v2@64", 5, "maps", 1280),
    ("torchvision/convnext_tiny@64", 4, "maps", 768),
    ("torchvision/efficientnet_b0@64", 5, "maps", 1280),
    ("torchvision/vgg11@64", 6, "maps", 4096),
    ("torchvision/densenet121@64", 5, "maps", 1024),
    ("torchvision/regnet_y_400mf@64", 4, "maps", 440),
    ("torchvision/swin_t@64", 4, "tokens", 768),
    ("torchvision/vit_b_16@64", 12, "tokens", 768),
    ("timm/resnet26@64", 4, "maps", 2048),
    ("timm/convnext_tiny@64", 4, "maps", 768),
    ("timm/vit_small_patch14_dinov2@56", 12, "tokens", 384),
    ("timm/swin_tiny_patch4_window7_224", 4, "tokens", 768),
    ("timm/mobilenetv3_small_100@64", 5, "maps", 1024),
]


@pytest.mark.parametrize(("name", "places", "layout", "features"), FAMILIES)
def test_places_of_adapters_in_many_families(name: str, places: int, layout: str, features: int) -> None:
    plan = plan_body(parse(f"lpm:{name}").body, (32, 32))
    assert len({place.module for place in plan.places}) == len(plan.places) == places
    assert {place.layout for place in plan.places} == {layout}
    assert plan.features == features
    assert plan.activations > 0


@pytest.mark.parametrize("name", ["test_resnet@32", "test_vit@64", "test_convnext@64", "test_efficientnet@32"])
def test_bodies_of_four_families_train(name: str, tmp_path: Path) -> None:
    """Gradients reach all adapters, and a step lowers the loss."""
    choose(str(timm_weights(name.partition("@")[0], tmp_path)))
    target = built(f"lpm:timm/{name}", GREY)
    images, labels = torch.randn(6, *GREY), torch.arange(6)
    optimiser = torch.optim.SGD(target.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(target(images), labels)
        optimiser.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in target.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("lpm-resnet19", CIFAR, "must be one of lpm-resnet18"),
        ("lpm:torchvision/resnet18@2000", CIFAR, "up to 1024"),
        ("lpm:keras/resnet18", CIFAR, "lpm:torchvision/NAME"),
        ("lpm:torchvision/../x", CIFAR, "must be one of"),
        ("lpm:torchvision/deeplabv3_resnet50", CIFAR, "no image classifier"),
        ("lpm:timm/nothing_like_it", CIFAR, "timm has no model"),
        ("lpm:torchvision/squeezenet1_1@64", CIFAR, "no linear classifier"),
        ("lpm:torchvision/vgg11@16", CIFAR, "cannot take images of 16x16"),
        ("lpm:torchvision/vit_b_16@100", CIFAR, "cannot be built"),
        ("lpm:timm/resnet18.nothing", CIFAR, "timm has no model"),
        ("lpm-resnet18", (4, 32, 32), "one or three channels"),
        ("lpm-resnet18", (20,), "one or three channels"),
    ],
)
def test_names_and_images_that_are_refused(name: str, shape: tuple[int, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        build_pretrained(name if name != "lpm-resnet19" else "lpm:resnet19", shape, 10)


def test_a_body_for_a_classifier_elsewhere() -> None:
    """A MobileNet's classifier has two layers, of which the last is replaced."""
    plan = plan_body(Body(library="torchvision", model="mobilenet_v3_small", side=64), (28, 28))
    assert plan.features == mobilenet_v3_small().classifier[-1].in_features


def test_in_float64(resnet18_weights: Path) -> None:
    target = built("lpm-resnet18").double()
    images = torch.randn(2, *CIFAR)
    torch.testing.assert_close(target(images.double()).float(), target.float()(images), rtol=1e-4, atol=1e-5)


def test_operations_are_counted_in_the_body() -> None:
    """ResNet-18 halves images of 32 pixels at once, and has fewer operations than its form for CIFAR; no hook stays."""
    found = sample_operations("lpm-resnet18", CIFAR, 10)
    assert 5e7 < found < 2e8
    assert found == sample_operations("lpm-resnet18", CIFAR, 10)
    body = load_body(parse("lpm-resnet18").body).network
    assert not any(layer._forward_hooks for layer in body.modules())
