"""PRIV-HFL's generator and distillation against written-out formulas, finite differences and a plain optimiser."""

import numpy as np
import pytest
import torch
from plain import Sgd, cross_entropy, digits_cnn, leaves
from test_priv_hfl_client import OneClient, assert_equal, vector
from torch.nn import functional

from clients.priv_hfl import PrivHFLClient
from hyperfl_flwr.models.generator import Generator
from hyperfl_flwr.models.initialisation import initial_state, ordinary_parameters
from hyperfl_flwr.models.layers.batchnorm import preserve_running_statistics
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training.distillation import PseudoData, label_probabilities


def normalised(maps, scale=1.0, shift=0.0):
    """Return maps [B, C, H, W] with mean 0 and variance 1 in each channel, then scaled and shifted."""
    mean, variance = maps.mean(dim=(0, 2, 3), keepdim=True), maps.var(dim=(0, 2, 3), keepdim=True, unbiased=False)
    return (maps - mean) / (variance + 1e-5).sqrt() * scale + shift


def doubled(maps, sides):
    """Enlarge maps to the given sides by nearest-neighbour repetition."""
    rows, columns = (torch.arange(side) * maps.shape[2 + axis] // side for axis, side in enumerate(sides))
    return maps[:, :, rows][:, :, :, columns]


def by_hand(values, noise, labels, sides, width):
    """Return the images of DFAD's generator with a label branch, written out; `sides` are those of the image."""
    quarter, half = ([-(-side // part) for side in sides] for part in (4, 2))
    one_hot = torch.eye(values["label.weight"].shape[1], dtype=noise.dtype)[labels]
    parts = [noise @ values["noise.weight"].T + values["noise.bias"]]
    parts += [one_hot @ values["label.weight"].T + values["label.bias"]]
    hidden = torch.cat([part.reshape(len(noise), width, *quarter) for part in parts], dim=1)
    norms = [name.removesuffix(".weight") for name in values if name.startswith("body") and values[name].ndim == 1]
    norms = [name for name in norms if f"{name}.bias" in values]
    scale = [(values[f"{name}.weight"].view(1, -1, 1, 1), values[f"{name}.bias"].view(1, -1, 1, 1)) for name in norms]
    kernels = [name.removesuffix(".weight") for name in values if values[name].ndim == 4]
    hidden = normalised(hidden, *scale[0])
    for number, to in enumerate((half, sides)):
        weight, bias = values[f"{kernels[number]}.weight"], values[f"{kernels[number]}.bias"]
        hidden = functional.conv2d(doubled(hidden, to), weight, bias, padding=1)
        hidden = normalised(hidden, *scale[number + 1])
        hidden = torch.where(hidden > 0, hidden, 0.2 * hidden)
    last = functional.conv2d(hidden, values[f"{kernels[2]}.weight"], values[f"{kernels[2]}.bias"], padding=1)
    return normalised(torch.tanh(last))


def drawn_generator(shape, num_classes, width, seed=0):
    """Return a generator in float64 whose BatchNorm scales and shifts are not trivial, and its values."""
    generator = Generator(shape, num_classes, width)
    rng = torch.Generator().manual_seed(seed)
    values = {name: value.double() for name, value in ordinary_parameters(generator, rng).items()}
    for name, value in values.items():
        if value.ndim == 1:
            values[name] = value + 0.3 * torch.randn(value.shape, generator=rng, dtype=torch.float64)
    generator.load_state_dict(values, assign=True)
    return generator, values


@pytest.mark.parametrize(("shape", "count"), [((1, 28, 28), 573_825), ((3, 32, 32), 682_499)])
def test_the_generator_has_the_size_of_its_source(shape, count):
    """Parameters: 112 * 64 s^2 + 2 * 128 + (9 * 128 + 1) (128 + 64) + 2 * 128 + 2 * 64 + (9 * 64 + 1) C."""
    sides = 64 * (shape[1] // 4) ** 2
    by_hand = 112 * sides + 256 + 1153 * 128 + 256 + 1153 * 64 + 128 + 577 * shape[0]
    assert sum(parameter.numel() for parameter in Generator(shape, 10).parameters()) == by_hand == count
    assert list(Generator(shape, 10).buffers()) == []


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 10, 13)])
@pytest.mark.usefixtures("float64")
def test_the_generator_is_its_sources(shape):
    """The layers equal the written-out ones, also for sides that are not multiples of four; images are normalised."""
    generator, values = drawn_generator(shape, 4, width=3)
    noise = torch.randn(6, 100, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 2, 3, 3, 0])
    images = generator(noise, labels)
    assert images.shape == (6, *shape)
    torch.testing.assert_close(images, by_hand(values, noise, labels, shape[1:], 3))
    torch.testing.assert_close(images.mean(dim=(0, 2, 3)), torch.zeros(shape[0]), atol=1e-9, rtol=0)
    assert not torch.allclose(images, generator(noise, labels.flip(0)))  # the label matters


def test_rare_classes_get_more_pseudo_data():
    """p(y) of (4, 1, 0) samples with c = 2: R = 8, so (4, 7, 8) / 19; of (0, 5) it is (2, 1) / 3."""
    got = label_probabilities(torch.tensor([4, 1, 0]), 2.0)
    torch.testing.assert_close(got, torch.tensor([4, 7, 8], dtype=torch.float64) / 19)
    torch.testing.assert_close(label_probabilities(torch.tensor([0, 5]), 2.0).tolist(), [2 / 3, 1 / 3])
    generator, _ = drawn_generator((1, 8, 8), 3, width=2)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        labels = PseudoData.draw(generator.float(), torch.tensor([4, 1, 0]), number=20_000, balance=2.0, rng=rng).labels
    shares = torch.bincount(labels, minlength=3) / len(labels)
    torch.testing.assert_close(shares.double(), got, atol=0.015, rtol=0)  # four standard deviations


@pytest.mark.usefixtures("float64")
def test_the_generators_gradient_is_that_of_finite_differences():
    """The largest entries equal (f(omega + e) - f(omega - e)) / 2e, f the cross-entropy on the same z and y."""
    generator, values = drawn_generator((1, 8, 8), 4, width=2)
    model = build_target("mlp", (1, 8, 8), 4)
    rng = torch.Generator().manual_seed(0)
    model.load_state_dict({n: v.double() for n, v in ordinary_parameters(model, rng).items()}, assign=True)

    def loss(changed):
        generator.load_state_dict(changed, assign=True)
        pseudo = PseudoData.draw(
            generator, torch.tensor([3, 1, 0, 2]), number=7, balance=2.0, rng=torch.Generator().manual_seed(5)
        )
        return pseudo, cross_entropy(model(pseudo.images), pseudo.labels)

    pseudo, expected = loss(values)
    gradients, found = pseudo.gradients(model)
    assert found == pytest.approx(float(expected.detach()), rel=1e-12)
    assert list(gradients) == [name for name, _ in generator.named_parameters()]
    for name, value in values.items():
        entry, step = int(gradients[name].abs().argmax()), 1e-6
        ends = []
        for sign in (1, -1):
            moved = value.clone()
            moved[np.unravel_index(entry, moved.shape)] += sign * step
            ends.append(float(loss({**values, name: moved})[1].detach()))
        assert float(gradients[name].flatten()[entry]) == pytest.approx(
            (ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-8
        )


def test_running_statistics_are_those_of_private_data():
    """Pseudo-data leave a ResNet's buffers unchanged, and training batches update them."""
    model = build_target("resnet18", (1, 8, 8), 10)
    model.load_state_dict(initial_state(model, torch.Generator().manual_seed(0)), assign=True)
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with preserve_running_statistics(model):
        within = model(images)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert torch.equal(within, model(images))
    mean = dict(model.named_buffers())["extractor.bn1.running_mean"]
    batch_mean = functional.conv2d(images, model.extractor.conv1.weight, padding=1).mean(dim=(0, 2, 3))
    torch.testing.assert_close(mean, 0.1 * batch_mean)


CHANGES = {
    "priv-hfl.distill": True, "priv-hfl.pseudo-samples": 4, "priv-hfl.generator-width": 2,
    "priv-hfl.class-balance": 1.5,
}  # fmt: skip


def fit_and_catch(one, received, monkeypatch):
    """Return reply, stored model, two equal draws of pseudo-data, numbers and keys of a first round."""
    caught, draw = [], PseudoData.draw

    def catching(generator, *arguments, **options):
        state = options["rng"].get_state()
        for copy in (Generator((1, 8, 8), 10, 2), generator):
            copy.load_state_dict(generator.state_dict(), assign=True)
            options["rng"].set_state(state)
            caught.append(draw(copy, *arguments, **options))
        return caught[-1]

    monkeypatch.setattr(PseudoData, "draw", catching)
    client = PrivHFLClient(one.context)
    reply, _, numbers = client.fit([array.copy() for array in received], {"round": 1, "version": 0, "kept-version": 0})
    stored = one.context.state.load(1)
    model = {name: torch.from_numpy(stored[f"model/{name}"]) for name in one.values}
    return [torch.from_numpy(array) for array in reply], model, caught, numbers, client.keys()


def received_by(one):
    generator = Generator((1, 8, 8), 10, 2)
    values = ordinary_parameters(generator, torch.Generator().manual_seed(3))
    nothing = np.zeros(len(vector(one.values)), np.float32)
    return [nothing, *(values[name].numpy() for name in generator.state_dict())], values


def test_a_client_trains_on_private_and_pseudo_data_and_sends_the_generators_gradient(tmp_path, monkeypatch):
    """Steps follow the sum of both cross-entropies (all four pseudo-images); it sends d CE(theta', G(z, y)) / dw.

    w are the generator's parameters (omega in the paper), and theta' is the trained model.
    """
    one = OneClient(tmp_path, "mean", CHANGES)
    received, values = received_by(one)
    reply, stored, (again, pseudo), numbers, keys = fit_and_catch(one, received, monkeypatch)
    x, y = pseudo.images.detach(), pseudo.labels
    torch.testing.assert_close(again.images, x)

    def logits(images, at):
        short = {name.removeprefix("extractor."): value for name, value in at.items()}
        return digits_cnn(images, short) @ at["classifier.weight"].T + at["classifier.bias"]

    model, optimiser = one.values, Sgd(0.05, 0.5, 0.03)
    for images, labels in one.samples.batches(one.samples.seen):
        model = leaves(model, list(model))
        loss = cross_entropy(logits(images, model), labels) + cross_entropy(logits(x, model), y)
        model = optimiser.step(model, loss, list(model))
    assert_equal(stored, model)
    torch.testing.assert_close(reply[0], vector(model) - vector(one.values), rtol=1e-4, atol=1e-6)
    assert keys[1:] == [f"generator/{name}" for name in values]
    at_trained = cross_entropy(logits(again.images, stored), y)
    assert numbers["pseudo-loss"] == pytest.approx(float(at_trained.detach()), rel=1e-5)
    wanted = torch.autograd.grad(at_trained, list(again.generator.parameters()))
    for part, gradient in zip(reply[1:], wanted, strict=True):
        torch.testing.assert_close(part, gradient, rtol=1e-3, atol=1e-6)
    assert max(float(gradient.abs().max()) for gradient in wanted) > 1e-4


def test_change_and_gradient_are_clipped_together(tmp_path, monkeypatch):
    """The whole reply has the allowed norm and keeps its direction."""
    free, *_ = fit_and_catch(OneClient(tmp_path / "a", "mean", CHANGES), *received_by_one(tmp_path), monkeypatch)
    bound = {"privacy.clip-norm": 0.01}
    one = OneClient(tmp_path / "b", "mean", CHANGES | bound)
    clipped, stored, *_ = fit_and_catch(one, *received_by_one(tmp_path), monkeypatch)
    whole, short = (torch.cat([part.flatten() for part in parts]) for parts in (free, clipped))
    assert short.norm() == pytest.approx(0.01, rel=1e-5)
    torch.testing.assert_close(short, 0.01 * whole / whole.norm(), rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(vector(stored) - vector(one.values), clipped[0], rtol=1e-3, atol=1e-7)


def received_by_one(folder):
    return (received_by(OneClient(folder / "c", "mean", CHANGES))[0],)
