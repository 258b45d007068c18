"""Factored heads against torch.optim.SGD and clip_grad_norm_, which form the full gradients."""

import numpy as np
import pytest
import torch
from torch import nn

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.models.hypernetwork import Hypernetwork, common_embedding, initial_hypernetwork
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training import factored_sgd as factored_module
from hyperfl_flwr.training.factored_sgd import FactoredHeads
from hyperfl_flwr.training.hyperfl import HyperFLModel, HyperFLRates, train_hyperfl
from hyperfl_flwr.training.local_sgd import Epochs

WIDTH, SIZE, DIM = 8, 30, 5
RATE = 0.05

CASES = {
    "as published": {"momentum": 0.5, "weight_decay": 5e-4, "clip": 1.0},
    "without momentum": {"momentum": 0.0, "weight_decay": 5e-4, "clip": 1.0},
    "without decay": {"momentum": 0.9, "weight_decay": 0.0, "clip": 1.0},
    "strong decay": {"momentum": 0.9, "weight_decay": 0.5, "clip": 1.0},
    "without clipping": {"momentum": 0.5, "weight_decay": 5e-4, "clip": 0.0},
}


def problem(dtype, bias, seed=0):
    """Return heads H and c, a first layer W, v, and a loss of theta that differs in every step."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    targets = draw(60, SIZE)

    def loss(theta, step):
        return ((theta - targets[step]).abs() ** 1.5).mean() + (theta * targets[step]).sin().mean()

    return draw(WIDTH, SIZE), draw(SIZE) if bias else None, draw(WIDTH, DIM), draw(DIM), loss


def plain(dtype, steps, bias, momentum, weight_decay, clip):
    weight, offset, first, v, loss = problem(dtype, bias)
    heads = [nn.Parameter(tensor) for tensor in (weight, offset) if tensor is not None]
    first = nn.Parameter(first)
    optimiser = torch.optim.SGD([*heads, first], lr=RATE, momentum=momentum, weight_decay=weight_decay)
    for step in range(steps):
        optimiser.zero_grad()
        theta = torch.relu(first @ v) @ heads[0] + (heads[1] if bias else 0)
        loss(theta, step).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([*heads, first], clip)
        optimiser.step()
    return [tensor.detach() for tensor in (*heads, first)]


def factored(dtype, steps, bias, momentum, weight_decay, clip, rows=None):
    weight, offset, first, v, loss = problem(dtype, bias)
    heads = FactoredHeads(weight, offset, learning_rate=RATE, momentum=momentum, weight_decay=weight_decay, rows=rows)
    first = nn.Parameter(first)
    optimiser = torch.optim.SGD([first], lr=RATE, momentum=momentum, weight_decay=weight_decay)
    for step in range(steps):
        hidden = torch.relu(first @ v)
        theta = heads.forward(hidden.detach()).requires_grad_()
        (gradient,) = torch.autograd.grad(loss(theta, step), theta)
        (of_first,) = torch.autograd.grad(hidden, first, heads.backward(gradient))
        hidden, scale = hidden.detach(), 1.0
        if clip:
            norm = (heads.squared_norm(hidden, gradient) + of_first.square().sum()).sqrt()
            scale = torch.clamp(clip / (norm + 1e-6), max=1.0)
        heads.step(hidden, gradient, scale)
        first.grad = of_first * scale
        optimiser.step()
    heads.materialise()
    return [tensor.detach() for tensor in (weight, offset, first) if tensor is not None]


def movement(dtype, bias, result):
    start = [tensor for tensor in problem(dtype, bias)[:3] if tensor is not None]
    return [float((after - before).abs().max()) for before, after in zip(start, result, strict=True)]


@pytest.mark.parametrize("rows", [None, 60, 7, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_float64_over_60_steps(case, bias, rows):
    """Weights equal torch.optim.SGD's to 1e-12 of the movement, folded after 8 (the width), 7 or 1 steps, or never."""
    wanted = plain(torch.float64, 60, bias, **CASES[case])
    got = factored(torch.float64, 60, bias, **CASES[case], rows=rows)
    for one, other, moved in zip(got, wanted, movement(torch.float64, bias, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * moved)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_float32_over_10_steps(case, bias):
    """Weights equal torch.optim.SGD's to 1e-4 of the movement or 4 ulp, whichever is larger."""
    wanted = plain(torch.float32, 10, bias, **CASES[case])
    got = factored(torch.float32, 10, bias, **CASES[case])
    for one, other, moved in zip(got, wanted, movement(torch.float32, bias, wanted), strict=True):
        ulp = torch.from_numpy(np.spacing(np.abs(other.numpy())))
        assert bool(((one - other).abs() <= torch.maximum(4 * ulp, torch.full_like(ulp, 1e-4 * moved))).all())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rows", [40, 7, 1])
def test_units_that_come_and_go(rows, momentum, monkeypatch):
    """Rows of H equal SGD's also if their unit becomes active early, late or never, since they are read on first use.

    There is room for only one spare unit, so that the rows have to move.
    """
    monkeypatch.setattr(factored_module, "SPARE_UNITS", 1)
    weight, offset, _, _, loss = problem(torch.float64, bias=True)
    awake = {0: [1, 4], 9: [1, 6], 10: [6, 2, 0], 23: [4, 7], 30: []}
    generator, now = torch.Generator().manual_seed(1), []
    hidden = torch.zeros(40, WIDTH, dtype=torch.float64)
    for step in range(40):
        now = awake.get(step, now)
        hidden[step, now] = torch.rand(len(now), generator=generator, dtype=torch.float64) + 0.1
    start, plain_weight, plain_offset = weight.clone(), nn.Parameter(weight.clone()), nn.Parameter(offset.clone())
    settings = {"momentum": momentum, "weight_decay": 0.1}
    optimiser = torch.optim.SGD([plain_weight, plain_offset], lr=RATE, **settings)
    heads = FactoredHeads(weight, offset, learning_rate=RATE, **settings, rows=rows, skip_zeros=True)
    for step in range(40):
        optimiser.zero_grad()
        z = hidden[step].clone().requires_grad_()
        wanted = z @ plain_weight + plain_offset
        loss(wanted, step).backward()
        theta = heads.forward(hidden[step]).requires_grad_()
        torch.testing.assert_close(theta, wanted, rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(loss(theta, step), theta)
        used = hidden[step] > 0
        torch.testing.assert_close(heads.backward(gradient)[used], z.grad[used], rtol=1e-11, atol=1e-12)
        heads.step(hidden[step], gradient)
        optimiser.step()
    heads.materialise()
    moved = float((plain_weight.detach() - start).abs().max())
    torch.testing.assert_close(weight, plain_weight.detach(), rtol=0, atol=1e-12 * moved)
    torch.testing.assert_close(offset, plain_offset.detach(), rtol=1e-12, atol=1e-12)


def hyperfl_round(factor, dtype, device, epochs):
    """Train the 8x8 network for 12 + 12 * epochs steps; return all parameters and the loss."""
    target = build_target("cnn", (1, 8, 8), 10)
    network = Hypernetwork(target.extractor)
    v = common_embedding(64, "hyperfan-bias", 0)
    values = initial_hypernetwork(network, target.extractor, "hyperfan-bias", v, torch_generator(0, "h"))
    network.load_state_dict({name: value.to(device, dtype) for name, value in values.items()}, assign=True)
    phi = ordinary_parameters(target.classifier, torch_generator(0, "c"))
    target.classifier.load_state_dict({name: value.to(device, dtype) for name, value in phi.items()}, assign=True)
    model = HyperFLModel(
        extractor=target.extractor, classifier=target.classifier, hypernetwork=network,
        embedding=nn.Parameter(v.to(device, dtype)),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(120, 1, 8, 8, generator=generator).to(device, dtype)
    labels = torch.randint(10, (120,), generator=generator).to(device)
    data = ClientData(
        train_images=images, train_labels=labels, test_images=images, test_labels=labels,
        augmentation=None, num_classes=10,
    )  # fmt: skip
    rates = HyperFLRates(classifier=0.1, hypernetwork=0.02, embedding=0.02, clip_norm=2.0, factored=factor)
    settings = Epochs(epochs=epochs, batch_size=10, momentum=0.5, weight_decay=5e-4)
    loss = train_hyperfl(model, data, settings, rates, np.random.default_rng(0))
    return {**network.state_dict(), "v": model.embedding.detach()}, loss


def assert_same_round(dtype, device, epochs, share):
    start, _ = hyperfl_round(True, dtype, device, 0)
    got, got_loss = hyperfl_round(True, dtype, device, epochs)
    wanted, wanted_loss = hyperfl_round(False, dtype, device, epochs)
    for name, value in wanted.items():
        moved = float((value - start[name]).abs().max())
        assert moved > 0
        torch.testing.assert_close(got[name], value, rtol=0, atol=share * moved)
    if epochs:
        assert got_loss == pytest.approx(wanted_loss, rel=share)


def test_a_whole_round_in_float64():
    """After 60 steps on a real network, some clipped, parameters equal the plain loop's to 1e-12 of the movement."""
    assert_same_round(torch.float64, "cpu", 5, 1e-12)


@pytest.mark.cuda
def test_a_whole_round_in_float64_on_cuda():
    """The same holds on CUDA."""
    assert_same_round(torch.float64, "cuda", 5, 1e-12)


def test_another_layer_between_is_refused():
    class Normalised(Hypernetwork):
        def forward(self, embedding):
            return super().forward(embedding) / 2

    network = Normalised(build_target("cnn", (1, 8, 8), 10).extractor)
    with pytest.raises(ValueError, match="but Normalised computes theta differently"):
        FactoredHeads.of(network, torch.optim.SGD(network.parameters(), lr=0.1), steps=1)


def test_an_optimiser_whose_step_is_not_linear_is_refused():
    network = Hypernetwork(build_target("cnn", (1, 8, 8), 10).extractor)
    with pytest.raises(ValueError, match=r"one group of a torch.optim.SGD, got Adam"):
        FactoredHeads.of(network, torch.optim.Adam(network.parameters()), steps=1)
    with pytest.raises(ValueError, match=r"one group of a torch.optim.SGD"):
        FactoredHeads.of(network, torch.optim.SGD(network.hidden.parameters(), lr=0.1), steps=1)
    nesterov = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    with pytest.raises(ValueError, match="cannot be factored with nesterov"):
        FactoredHeads.of(network, nesterov, steps=1)


@pytest.mark.parametrize(("shape", "bias", "rows"), [((3, 4), (3,), None), ((3,), (3,), None), ((3, 4), (4,), 0)])
def test_shapes_that_do_not_belong_together(shape, bias, rows):
    with pytest.raises(ValueError, match=r"got"):
        FactoredHeads(torch.zeros(shape), torch.zeros(bias), learning_rate=0.1, rows=rows)
