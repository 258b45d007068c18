"""Clipped sums of per-example gradients equal a loop of autograd over the examples, for many networks."""

import math

import pytest
import torch
from own_networks import Attention
from torch import nn
from torch.nn import functional

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.models.layers.dropout import Dropout, seed_dropout
from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training import per_example, window_gradients
from hyperfl_flwr.training.per_example import PerExampleGradients

pytestmark = [  # torch's remarks on speed
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]

CLASSES = 5
TOLERANCE = 1e-5
"""Largest relative difference of two sums, in the Euclidean norm; float32 has 6e-8 per operation."""


class Residual(nn.Module):
    """Two convolutions with a sum around them, activations in place, and a sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second, self.third = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.Conv2d(6, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, images):
        out = self.relu(self.first(images))
        inner = self.third(self.relu(self.second(out)))
        inner += out
        return self.last(self.relu(inner).mean((2, 3)))


class Twice(nn.Module):
    """A convolution and a linear layer that are used twice each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 3), nn.Linear(3, CLASSES)

    def forward(self, images):
        features = torch.tanh(self.conv(torch.tanh(self.conv(images)))).mean((2, 3))
        return self.last(torch.tanh(self.linear(torch.tanh(self.linear(features)))))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, CLASSES)
        self.other.weight = self.one.weight

    def forward(self, images):
        return self.last(torch.tanh(self.other(torch.tanh(self.one(images.mean((2, 3)))))))


class Aside(nn.Module):
    """A layer whose weight is also used without calling the layer, which no hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), nn.Linear(3, CLASSES)

    def forward(self, images):
        features = torch.tanh(self.layer(images.mean((2, 3))))
        return self.last(functional.linear(features, self.layer.weight))


class Unused(nn.Module):
    """A layer that does not change the output, and one whose output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.dropped, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, CLASSES)

    def forward(self, images):
        features = images.mean((2, 3))
        self.dropped(features)
        return self.last(features)


class Rows(nn.Module):
    """All rows of all images as one batch of a layer, whose first dimension is then not that of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(10, 4), nn.Linear(27 * 4, CLASSES)

    def forward(self, images):
        return self.last(torch.tanh(self.inner(images.reshape(-1, 10))).reshape(len(images), -1))


class TimeFirst(nn.Module):
    """The three channels as the first dimension of a layer's input, as many as there are random test samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(90, 4), nn.Linear(4, CLASSES)

    def forward(self, images):
        return self.last(torch.tanh(self.inner(images.transpose(0, 1).flatten(2))).sum(0))


def odd_convolutions():
    """Strides, paddings, dilations and groups of all kinds; 3x9x10 images."""
    return nn.Sequential(
        nn.Conv2d(3, 6, (3, 2), stride=(2, 1), padding=(1, 2), groups=3), nn.ReLU(),
        nn.Conv2d(6, 8, 3, dilation=(1, 2), padding="same", groups=2), nn.Tanh(),
        nn.Conv2d(8, 4, (2, 4), padding="same", bias=False), nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.Tanh(),
        nn.Conv2d(4, 4, 1, padding="valid", groups=4), nn.Tanh(),
        nn.Conv2d(4, 3, 2, stride=3, padding_mode="circular", padding=1), nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )  # fmt: skip


def rows():
    """Linear layers on inputs with an extra dimension: the rows of an image."""
    return nn.Sequential(
        nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 3, bias=False), nn.Flatten(), nn.Linear(3 * 9 * 3, CLASSES)
    )


def normalised():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES))


NETWORKS = {
    "residual": (Residual, True), "twice": (Twice, True), "odd": (odd_convolutions, True), "rows": (rows, True),
    "unused": (Unused, True), "tied": (Tied, False), "aside": (Aside, False), "norm": (normalised, False),
    "flattened": (Rows, False), "time first": (TimeFirst, False),
    "attention": (lambda: Attention((3, 9, 10), CLASSES), False),
}  # fmt: skip
"""Networks for images 3x9x10, and whether they have a closed form."""


def built(name):
    torch.manual_seed(0)
    network = NETWORKS[name][0]()
    network(torch.zeros(1, 3, 9, 10))  # lazy layers
    return network


def target(name, shape):
    network = build_target(name, shape, CLASSES)
    network.load_state_dict(initial_state(network, torch_generator(0, "model")), assign=True)
    return network


def samples(number, shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    # Of different sizes, so that some gradients are clipped and others are not.
    scale = torch.linspace(0.2, 3, number).reshape(-1, *[1] * len(shape)) if number else 1.0
    return torch.randn((number, *shape), generator=generator) * scale, torch.arange(number) % CLASSES


def looped(network, parameters, images, labels):
    """Return each sample's gradients, [n][parameter], and its norm, by autograd."""
    gradients = []
    for image, label in zip(images, labels, strict=True):
        loss = functional.cross_entropy(network(image[None]), label[None])
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradients.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)])
    return gradients, [math.sqrt(sum(float(g.double().square().sum()) for g in each)) for each in gradients]


def clipped(gradients, norms, clip_norm):
    scales = [min(1.0, clip_norm / norm) if norm else 1.0 for norm in norms]
    return [
        sum(scale * g.double() for scale, g in zip(scales, column, strict=True))
        for column in zip(*gradients, strict=True)
    ]


def assert_equal(found, expected, like=None):
    difference = math.sqrt(sum(float((one - two).square().sum()) for one, two in zip(found, expected, strict=True)))
    length = math.sqrt(sum(float(each.double().square().sum()) for each in like or expected))
    assert difference <= TOLERANCE * length
    assert all(one.shape == two.shape for one, two in zip(found, expected, strict=True))


def assert_as_autograd(network, parameters, shape, *, closed, number=7):
    images, labels = samples(number, shape)
    gradients, norms = looped(network, parameters, images, labels)
    examples = PerExampleGradients(network, parameters, images[:1])
    assert examples.in_closed_form == closed
    for clip_norm in (sorted(norms)[number // 2], 1e9, min(norms) / 2):
        found = examples.clipped_sums(images, labels, clip_norm)
        assert_equal(found.sums, clipped(gradients, norms, clip_norm))
    losses = functional.cross_entropy(network(images), labels, reduction="none")
    torch.testing.assert_close(found.losses, losses.detach())


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cnn", (1, 28, 28)), ("cnn", (3, 32, 32)), ("cnn", (1, 8, 8)), ("lenet", (3, 32, 32)), ("mlp", (1, 8, 8))],
)
def test_built_in_targets_have_closed_forms(name, shape):
    network = target(name, shape)
    assert_as_autograd(network, list(network.parameters()), shape, closed=True)
    assert_as_autograd(network, list(network.extractor.parameters()), shape, closed=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_other_networks_are_as_in_autograd(name):
    network = built(name)
    assert_as_autograd(network, list(network.parameters()), (3, 9, 10), closed=NETWORKS[name][1])


@pytest.mark.parametrize("name", ["residual", "norm"])
def test_some_parameters_in_any_order(name):
    """Constant parameters do not count: a normalisation that is not trained leaves the closed form."""
    network = built(name)
    parameters = list(network.parameters())
    network.requires_grad_(False)
    chosen = [parameters[-1], parameters[0]]
    for parameter in chosen:
        parameter.requires_grad_(True)
    assert_as_autograd(network, chosen, (3, 9, 10), closed=True)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["odd", "norm"])
def test_sums_on_cuda_are_those_on_the_cpu(name):
    images, labels = samples(6, (3, 9, 10))
    found = []
    for device in ("cpu", "cuda"):
        network = built(name).to(device)
        examples = PerExampleGradients(network, list(network.parameters()), images[:1].to(device))
        sums = examples.clipped_sums(images.to(device), labels.to(device), 1.0).sums
        found.append(torch.cat([each.flatten().cpu() for each in sums]))
    assert float((found[0] - found[1]).norm()) <= 1e-3 * float(found[0].norm())  # TF32


@pytest.mark.parametrize("name", ["odd", "norm"])
def test_a_single_sample_and_none(name):
    network = built(name)
    parameters = list(network.parameters())
    assert_as_autograd(network, parameters, (3, 9, 10), closed=NETWORKS[name][1], number=1)
    images, labels = samples(0, (3, 9, 10))
    empty = PerExampleGradients(network, parameters, torch.zeros(1, 3, 9, 10)).clipped_sums(images, labels, 1.0)
    assert all(torch.equal(total, torch.zeros_like(one)) for total, one in zip(empty.sums, parameters, strict=True))
    assert empty.losses.shape == (0,)


@pytest.mark.parametrize("name", ["odd", "norm"])
def test_a_large_batch_is_computed_in_parts(name, monkeypatch):
    """A limit of three samples' gradients gives the same sums."""
    network = built(name)
    size = sum(parameter.numel() for parameter in network.parameters())
    monkeypatch.setattr(per_example, "LARGEST", 3 * size)
    assert_as_autograd(network, list(network.parameters()), (3, 9, 10), closed=NETWORKS[name][1], number=8)


@pytest.mark.parametrize("name", ["odd", "residual"])
def test_windows_are_copied_in_parts(name, monkeypatch):
    """With room for the windows of two samples of the smallest layer, the sums are the same."""
    monkeypatch.setattr(window_gradients, "CACHED", 500)
    network = built(name)
    assert_as_autograd(network, list(network.parameters()), (3, 9, 10), closed=True)


@pytest.mark.parametrize("name", ["residual", "norm"])
def test_no_sample_exceeds_the_clipping_norm(name):
    """The sum over one sample has the norm min(|g|, C), in the direction of g."""
    network = built(name)
    parameters = list(network.parameters())
    examples = PerExampleGradients(network, parameters, torch.zeros(1, 3, 9, 10))
    images, labels = samples(6, (3, 9, 10))
    gradients, norms = looped(network, parameters, images, labels)
    clip_norm = sorted(norms)[3]
    for row, norm in enumerate(norms):
        found = examples.clipped_sums(images[row : row + 1], labels[row : row + 1], clip_norm).sums
        length = math.sqrt(sum(float(part.double().square().sum()) for part in found))
        assert length == pytest.approx(min(norm, clip_norm), rel=1e-6)
        assert_equal(found, [g.double() * min(1.0, clip_norm / norm) for g in gradients[row]])


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30])
@pytest.mark.parametrize("name", ["residual", "rows", "norm"])
def test_a_gradient_that_is_not_finite_counts_as_zero(name, value):
    """The sums are finite and equal to those without the sample; nothing tells of it."""
    network = built(name)
    parameters = list(network.parameters())
    examples = PerExampleGradients(network, parameters, torch.zeros(1, 3, 9, 10))
    images, labels = samples(5, (3, 9, 10))
    rest = [0, 1, 3, 4]
    expected = examples.clipped_sums(images[rest], labels[rest], 0.5).sums
    images[2, 0, 4, 4] = value
    found = examples.clipped_sums(images, labels, 0.5).sums
    if value == 1e30 and name != "norm":  # a finite gradient: it may count, up to the clipping norm
        length = math.sqrt(sum(float((one - two).square().sum()) for one, two in zip(found, expected, strict=True)))
        assert length <= 0.5 * (1 + 1e-5)
    elif value != 1e30:
        assert_equal(found, expected)
    assert all(part.isfinite().all() for part in found)


def test_dropout_drops_units_of_each_sample():
    """With the same random numbers, the sums are those of autograd on the same batch."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 20), nn.ReLU(), Dropout(0.4), nn.Linear(20, CLASSES))
    parameters = list(network.parameters())
    images, labels = samples(6, (3, 2, 2))
    seed_dropout([network], torch.Generator().manual_seed(3))
    examples = PerExampleGradients(network, parameters, images[:1])
    assert examples.in_closed_form
    assert network[3].training
    seed_dropout([network], torch.Generator().manual_seed(4))
    found = examples.clipped_sums(images, labels, 1.0).sums
    seed_dropout([network], torch.Generator().manual_seed(4))
    losses = functional.cross_entropy(network(images), labels, reduction="none")
    gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    norms = [math.sqrt(sum(float(g.square().sum()) for g in each)) for each in gradients]
    assert_equal(found, clipped(gradients, norms, 1.0))


def test_dropout_by_vmap_drops_other_units_of_each_sample():
    """Four equal samples have four different gradients."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 20), Dropout(0.5), nn.Linear(20, CLASSES))
    seed_dropout([network], torch.Generator().manual_seed(3))
    image, labels = torch.randn(1, 3, 2, 2), torch.zeros(4, dtype=torch.int64)
    examples = PerExampleGradients(network, list(network.parameters()), image)
    assert not examples.in_closed_form
    losses = examples.clipped_sums(image.expand(4, -1, -1, -1), labels, 1.0).losses
    assert len({round(float(loss), 5) for loss in losses}) == 4


class Centred(nn.Module):
    """Subtracts the batch's mean."""

    def forward(self, features):
        return features - features.mean(0)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm1d(4), "BatchNorm normalises a sample by the other samples of its batch"),
        (nn.BatchNorm1d(4, track_running_stats=False), "BatchNorm normalises a sample by the other samples"),
        (Centred(), "depend on the other samples of its batch, or are random"),
        (nn.Dropout(0.5), "depend on the other samples of its batch, or are random"),
    ],
)
def test_layers_that_mix_samples_are_refused(layer, reason):
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), layer, nn.Linear(4, CLASSES))
    with pytest.raises(ValueError, match=reason):
        PerExampleGradients(network, list(network.parameters()), torch.zeros(1, 3, 2, 2))


def test_batch_normalisation_by_running_statistics_is_allowed():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(270, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).eval()
    assert_as_autograd(network, list(network.parameters()), (3, 9, 10), closed=False)


def test_what_vmap_cannot_do_is_refused():
    """A recurrent layer has no rule for vmap, and the error names the way out."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(10, 8, batch_first=True), nn.Linear(8, CLASSES)

        def forward(self, images):
            return self.head(self.rnn(images[:, 0])[0][:, -1])

    network = Recurrent()
    with pytest.raises(ValueError, match=r"vmap cannot compute .* use layers that it supports"):
        PerExampleGradients(network, list(network.parameters()), torch.zeros(1, 3, 9, 10))


def test_a_clipping_norm_must_be_positive():
    network = built("residual")
    examples = PerExampleGradients(network, list(network.parameters()), torch.zeros(1, 3, 9, 10))
    with pytest.raises(ValueError, match="clip_norm must be above 0, got 0"):
        examples.clipped_sums(*samples(2, (3, 9, 10)), 0)


class UsedTwice(nn.Module):
    """Uses the weight of a layer once more, outside of the layer, and has K outputs."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, outputs)

    def forward(self, images):
        return self.last(torch.tanh(torch.tanh(self.first(images)) @ self.first.weight.t()))


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [(1, torch.randn(8, 1)), (3, torch.randn(8, 3)), (3, torch.rand(8, 3) > 0.5), (1, torch.rand(8, 1) > 0.5)],
)
def test_gradients_of_other_tasks_are_those_of_autograd(outputs, labels):
    """A single output would make the cross-entropy of the network's own test, and all its gradients, zero."""
    torch.manual_seed(0)
    network, images = UsedTwice(outputs), torch.randn(8, 6)
    parameters = list(network.parameters())
    examples = PerExampleGradients(network, parameters, images[:1])
    assert not examples.in_closed_form
    found = examples.clipped_sums(images, labels, 1e9)
    expected = torch.autograd.grad(loss_of(network(images), labels, "sum"), parameters)
    assert_equal(found.sums, [each.double() for each in expected])
    torch.testing.assert_close(found.losses, loss_of(network(images), labels, "none").detach())
