"""Target networks on a pre-trained body: sizes, adapters, bodies of several families, and weights."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import mobilenet_v3_small, resnet18

from hyperfl_flwr.attacks.head_gradient import least_squares_cotangents
from hyperfl_flwr.attacks.last_layer import last_layer_of
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.hypernetwork import Hypernetwork, common_embedding, initial_hypernetwork
from hyperfl_flwr.models.initialisation import initial_model
from hyperfl_flwr.models.lowered import in_bfloat16
from hyperfl_flwr.models.pretrained.adapters import MapAdapter, TokenAdapter
from hyperfl_flwr.models.pretrained.bodies import plan_body
from hyperfl_flwr.models.pretrained.names import Body, parse
from hyperfl_flwr.models.pretrained.network import PretrainedExtractor, PretrainedTarget, build_pretrained
from hyperfl_flwr.models.pretrained.together import run_together
from hyperfl_flwr.models.pretrained.weights import choose, load_body
from hyperfl_flwr.models.targets import build_target

CIFAR, GREY = (3, 32, 32), (1, 28, 28)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.fixture(autouse=True)
def chosen(weights: Path) -> Iterator[None]:
    choose(str(weights))
    yield
    choose("auto")


def built(name: str, shape: tuple[int, ...] = CIFAR, *, seed: int = 0) -> PretrainedTarget:
    target = build_pretrained(name, shape, 10)
    target.load_state_dict(initial_model(target, seed), assign=True)
    return target


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
def test_without_adapters_it_is_the_body(weights: Path, shape: tuple[int, ...]) -> None:
    """With adapters that are identities, the features are those of torchvision's network."""
    target = built("lpm-resnet18", shape)
    values = {name: torch.zeros_like(value) if "weight" in name or "shift" in name else value
              for name, value in target.extractor.state_dict().items()}  # fmt: skip
    target.extractor.load_state_dict(values, assign=True)
    network = resnet18()
    network.load_state_dict(torch.load(weights, weights_only=True))
    network.fc = nn.Identity()
    images = torch.randn(4, *shape)
    expected = network.eval()(images.expand(-1, 3, -1, -1))
    extractor = target.extractor
    found = extractor.body_features(images, [4], [list(extractor.adapters.parameters())])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("lpm-resnet18", MapAdapter), ("lpm:timm/test_vit@64", TokenAdapter)])
def test_all_generated_numbers_matter(name: str, kind: type[nn.Module], weights: Path) -> None:
    """A hypernetwork generates the adapters; a change of any of their tensors changes the logits."""
    choose(str(timm_weights("test_vit", weights.parent))) if "timm" in name else None
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


def test_positions_are_resized_with_the_images(tmp_path: Path) -> None:
    """The weights of a transformer for images of 160 pixels fit one for 64; the hash is that of the file's values."""
    choose(str(timm_weights("test_vit", tmp_path)))
    bodies = [load_body(parse(f"lpm:timm/test_vit@{side}").body) for side in (64, 160)]
    assert bodies[0].sha256 == bodies[1].sha256
    at_64, at_160 = (body.network for body in bodies)
    shapes = [tuple(network.pos_embed.shape) for network in (at_64, at_160)]
    assert [shape[1] for shape in shapes] == [17, 101]
    assert torch.equal(at_64.patch_embed.proj.weight, at_160.patch_embed.proj.weight)


def timm_weights(name: str, folder: Path) -> Path:
    import timm

    torch.manual_seed(1)
    path = folder / f"{name}.safetensors"
    save_file(timm.create_model(name).state_dict(), path)
    return path


def test_weights_are_compared_by_their_values(weights: Path, tmp_path: Path) -> None:
    """The form of the file and the classifier have no effect on the hash; each value of the body has."""
    body, values = parse("lpm-resnet18").body, torch.load(weights, weights_only=True)
    first = load_body(body).sha256
    without = {name: value for name, value in values.items() if not name.startswith("fc.")}
    save_file(without, tmp_path / "body.safetensors")
    torch.save({"state_dict": values}, tmp_path / "training.pth")
    for name in ("body.safetensors", "training.pth"):
        choose(str(tmp_path / name))
        assert load_body(body).sha256 == first
    values["layer4.1.bn2.running_var"][3] += 1e-3
    torch.save(values, tmp_path / "training.pth")
    assert load_body(body).sha256 != first  # of the changed file, although its name is the same


class Command:
    """What prints a word when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("run",)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda values: values.pop("conv1.weight"), "lacks conv1.weight"),
        (lambda values: values.update(other=torch.zeros(1)), "unknown names: other"),
        (
            lambda values: values.update({"conv1.weight": torch.zeros(2, 3, 7, 7)}),
            r"conv1.weight has \(2, 3, 7, 7\) instead of \(64, 3, 7, 7\)",
        ),
        (lambda values: values.update(epoch=3), "no state dict"),
        (lambda values: values["conv1.weight"].fill_(float("nan")), "conv1.weight has values that are no finite"),
        (lambda values: values.update(epoch=Command()), "holds more than tensors"),
    ],
)
def test_other_files_are_refused(change, problem: str, weights: Path, tmp_path: Path, capsys) -> None:
    values = dict(torch.load(weights, weights_only=True))
    change(values)
    path = tmp_path / "other.pth"
    torch.save(values, path)
    choose(str(path))
    with pytest.raises(ConfigError, match=f"lpm.weights = {path}, for torchvision/resnet18: .*{problem}"):
        load_body(parse("lpm-resnet18").body)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps([1])])
def test_what_is_no_file_of_torch(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.pth"
    choose(str(path))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_body(parse("lpm-resnet18").body)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="does not have its weights"):
        load_body(parse("lpm-resnet18").body)


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


def test_in_float64(weights: Path) -> None:
    target = built("lpm-resnet18").double()
    images = torch.randn(2, *CIFAR)
    torch.testing.assert_close(target(images.double()).float(), target.float()(images), rtol=1e-4, atol=1e-5)


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


def training(target: PretrainedTarget, seed: int, steps: int, sizes: tuple[int, ...] = (4,)) -> Callable[[], float]:
    """Return SGD of a number of steps with batches of the given sizes, with a pass without gradients before each."""
    generator = torch.Generator().manual_seed(seed)

    def work() -> float:
        optimiser = torch.optim.SGD(target.parameters(), lr=0.05)
        loss = torch.zeros(())
        for step in range(steps):
            size = sizes[step % len(sizes)]
            images = torch.randn(size, *CIFAR, generator=generator)
            with torch.no_grad():
                target.extractor(images)
            if step == FAILS_AT and seed == FAILING:
                raise FloatingPointError("this client fails")
            loss = nn.functional.cross_entropy(target(images), torch.arange(size))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return loss.item()

    return work


FAILS_AT, FAILING = 1, 7
"""Step at which the client with this seed fails."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clients_that_pass_the_body_together(dtype: torch.dtype) -> None:
    """Clients with other numbers and sizes of batches, of which one fails, have the results that they have alone."""
    works = {1: (3, (4,)), 2: (1, (2,)), FAILING: (3, (4,)), 4: (4, (5, 1))}
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        together, alone = ([built("lpm-resnet18").to(dtype) for _ in works] for _ in range(2))
        results = run_together([training(each, seed, *works[seed]) for each, seed in zip(together, works, strict=True)])
        for target, other, seed, result in zip(together, alone, works, results, strict=True):
            if seed == FAILING:
                assert isinstance(result, FloatingPointError)
                continue
            assert result == pytest.approx(training(other, seed, *works[seed])(), rel=1e-5)
            for value, expected in zip(target.parameters(), other.parameters(), strict=True):
                tolerance = 1e-12 if dtype == torch.float64 else 1e-5
                torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    finally:
        torch.set_default_dtype(default)


def test_precision_reaches_the_shared_pass() -> None:
    """With bfloat16, clients have the same results together and alone, and others than with float32."""
    images = torch.randn(4, *CIFAR)
    target, plain = in_bfloat16(built("lpm-resnet18")), built("lpm-resnet18")
    (together,) = run_together([lambda: target.extractor(images).detach()])
    assert isinstance(together, torch.Tensor)
    assert torch.equal(together, target.extractor(images))
    assert not torch.equal(together, plain.extractor(images))


def test_no_graph_is_kept_for_a_pass_without_gradients() -> None:
    target = built("lpm-resnet18")

    def work() -> bool:
        with torch.no_grad():
            return bool(target.extractor(torch.randn(2, *CIFAR)).requires_grad)

    assert run_together([work, work]) == [False, False]


def test_a_client_may_step_before_others_ask_for_their_gradients() -> None:
    """One client is a forward pass ahead of the other, so that their backward passes come at different times."""
    results = []
    for run in (run_together, lambda works: [work() for work in works]):
        targets = [built("lpm-resnet18") for _ in range(2)]
        results.append(run([ahead(target, number) for number, target in enumerate(targets)]))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def ahead(target: PretrainedTarget, passes: int) -> Callable[[], float]:
    """Return two steps, with further forward passes between the forward and the backward pass of the first."""
    images = torch.randn(3, *CIFAR, generator=torch.Generator().manual_seed(5))

    def work() -> float:
        optimiser = torch.optim.SGD(target.parameters(), lr=0.05)
        for _ in range(2):
            loss = target(images).square().mean()
            for _ in range(passes):
                target(images)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return float(target(images).square().mean().detach())

    return work


def test_threads_end_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption during a shared pass leaves no waiting thread behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    target = built("lpm-resnet18")
    monkeypatch.setattr(PretrainedExtractor, "body_features", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_together([training(target, 1, 1), training(target, 2, 1)])
    for thread in [thread for thread in threading.enumerate() if thread is not threading.current_thread()]:
        thread.join(5)
    assert threading.active_count() <= before
