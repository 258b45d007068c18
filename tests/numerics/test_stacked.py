"""Clients that are trained as stacked tensors have the results that they have alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from hyperfl_flwr.core.lockstep import run_in_lockstep
from hyperfl_flwr.data.augmentation import Augmentation
from hyperfl_flwr.models import stacked
from hyperfl_flwr.models.layers.dropout import Dropout
from hyperfl_flwr.models.stacked import CONVOLUTIONS, StackedNetwork, activations_of, is_stackable
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training import stacked_sgd
from hyperfl_flwr.training.fedrep import FedRepRates, train_fedrep
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, RandomChange
from hyperfl_flwr.training.stacked_sgd import StackedTraining, form_of, train_in_cohort

pytestmark = pytest.mark.usefixtures("float64")

SIZES = (7, 50, 123)
EPOCHS = Epochs(epochs=2, batch_size=10, momentum=0.5, weight_decay=5e-3)


@dataclass
class Data:
    """Training samples of one client."""

    train_images: Tensor
    train_labels: Tensor
    augmentation: RandomChange | None = None
    train_weights: NDArray[np.float64] | None = None


def data_of(client: int, shape: Sequence[int] = (1, 8, 8), **changes: object) -> Data:
    generator = torch.Generator().manual_seed(client)
    images = torch.randn(SIZES[client], *shape, generator=generator)
    labels = torch.randint(10, (SIZES[client],), generator=generator)
    return Data(images, labels, **changes)  # type: ignore[arg-type]


def network_of(client: int, target: str = "cnn", shape: tuple[int, ...] = (1, 8, 8)) -> Target:
    network = build_target(target, shape, 10).to_empty(device="cpu").to(torch.float64)
    generator = torch.Generator().manual_seed(100 + client)
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return network


@dataclass
class Counted:
    """Counts how many clients each training has stacked, without those that ended with an error."""

    sizes: list[int] = field(default_factory=list)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found, train = Counted(), stacked_sgd._train

    def counting(requests: Sequence[StackedTraining]) -> list[float]:
        losses = train(requests)
        found.sizes.append(len(requests))
        return losses

    monkeypatch.setattr(stacked_sgd, "_train", counting)
    return found


Work = Callable[[Target, Data, np.random.Generator], float]


def compared(
    work: Work, counted: Counted, *, target: str = "cnn", shape: tuple[int, ...] = (1, 8, 8), **changes: object
) -> None:
    """Train each client alone and all of them stacked, and compare losses, parameters and used random numbers."""
    clients = range(len(SIZES))
    alone, together = ([network_of(client, target, shape) for client in clients] for _ in range(2))
    datas = [data_of(client, shape, **changes) for client in clients]
    expected = [work(alone[client], datas[client], np.random.default_rng(client)) for client in clients]
    assert counted.sizes == []
    rngs = [np.random.default_rng(client) for client in clients]
    losses = run_in_lockstep(
        [partial(work, together[client], datas[client], rngs[client]) for client in clients], stacks_training=True
    )
    assert losses == pytest.approx(expected, rel=1e-12)
    for client in clients:
        for value, reference in zip(together[client].parameters(), alone[client].parameters(), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)
        other = np.random.default_rng(client)
        work(network_of(client, target, shape), datas[client], other)
        assert rngs[client].random() == other.random()


def plain(network: Target, data: Data, rng: np.random.Generator, epochs: Epochs = EPOCHS) -> float:
    part = ParameterSet(parameters=list(network.parameters()), learning_rate=0.05, clip_norm=0.8)
    return train_in_cohort(network, [part], data, epochs, rng)


@pytest.mark.parametrize("convolution", CONVOLUTIONS)
@pytest.mark.parametrize(
    ("target", "shape"), [("cnn", (1, 8, 8)), ("cnn", (3, 20, 20)), ("lenet", (1, 16, 16)), ("mlp", (5,))]
)
def test_every_target_is_trained_as_alone(
    target: str, shape: tuple[int, ...], convolution: str, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of unequal sizes, with clipped steps; the last batches are short."""
    monkeypatch.setattr(stacked_sgd, "convolution_for", lambda _: CONVOLUTIONS[convolution])
    compared(plain, counted, target=target, shape=shape)
    assert counted.sizes == [3]


def test_steps_in_place_of_epochs(counted: Counted) -> None:
    """Nine steps: more than one pass for two clients, less than one for the third."""
    compared(partial(plain, epochs=replace(EPOCHS, steps=9)), counted)
    assert counted.sizes == [3]


def test_augmented_samples(counted: Counted) -> None:
    compared(plain, counted, augmentation=Augmentation(padding=2, pad_value=(0.25,)))
    assert counted.sizes == [3]


def test_weighted_samples(counted: Counted) -> None:
    def work(network: Target, data: Data, rng: np.random.Generator) -> float:
        return plain(network, replace(data, train_weights=np.arange(len(data.train_labels)) % 3.0), rng)

    compared(work, counted)
    assert counted.sizes == [3]


def test_samples_of_weight_zero_are_not_computed(counted: Counted) -> None:
    """The first sample of each client is no number, and is never drawn: not to fill up a short batch either."""

    def work(network: Target, data: Data, rng: np.random.Generator) -> float:
        images, weights = data.train_images.clone(), np.ones(len(data.train_labels))
        images[0], weights[0] = torch.nan, 0.0
        return plain(network, replace(data, train_images=images, train_weights=weights), rng)

    compared(work, counted)
    assert counted.sizes == [3]


@pytest.mark.parametrize("how", ["frozen", "hooked", "hooked afterwards"])
def test_a_frozen_or_hooked_parameter_is_trained_alone(how: str, counted: Counted) -> None:
    """Its gradient is not the plain one that stacked steps take."""

    def work(network: Target, data: Data, rng: np.random.Generator) -> float:
        first = next(iter(network.parameters()))
        if how == "frozen":
            first.requires_grad_(False)
        elif how == "hooked":
            first.register_hook(torch.zeros_like)
        else:
            first.register_post_accumulate_grad_hook(lambda _: None)
        return plain(network, data, rng)

    compared(work, counted)
    assert counted.sizes == []


def test_two_sets_with_force_pull_and_their_own_decay(counted: Counted) -> None:
    """Classifier and extractor have rates of their own; one has a force, the other is pulled."""

    def work(network: Target, data: Data, rng: np.random.Generator) -> float:
        head, body = list(network.classifier.parameters()), list(network.extractor.parameters())
        size = len(data.train_labels)
        sets = [
            ParameterSet(
                parameters=head, learning_rate=0.1, weight_decay=0.0,
                force=[torch.full_like(each, size / 1000) for each in head],
            ),
            ParameterSet(
                parameters=body, learning_rate=0.02, clip_norm=0.5, pull=0.3,
                anchor=[torch.full_like(each, 0.01 * size) for each in body],
            ),
        ]  # fmt: skip
        return train_in_cohort(network, sets, data, replace(EPOCHS, momentum=0.0), rng)

    compared(work, counted)
    assert counted.sizes == [3]


def test_fedrep_s_two_phases(counted: Counted) -> None:
    """The classifier on a constant extractor, then the extractor under a constant classifier."""
    rates = FedRepRates(classifier=0.1, extractor=0.05, clip_norm=1.0, weight_decay=1e-3)

    def work(network: Target, data: Data, rng: np.random.Generator) -> float:
        return train_fedrep(network.extractor, network.classifier, data, EPOCHS, rates, rng)

    compared(work, counted)
    assert counted.sizes == [3, 3]


def test_clients_of_other_forms_are_trained_apart(counted: Counted) -> None:
    """Two with one rate, one with another: two trainings, each as alone."""

    def work(network: Target, data: Data, rng: np.random.Generator) -> float:
        rate = 0.05 if len(data.train_labels) > SIZES[0] else 0.01
        part = ParameterSet(parameters=list(network.parameters()), learning_rate=rate)
        return train_in_cohort(network, [part], data, EPOCHS, rng)

    compared(work, counted)
    assert sorted(counted.sizes) == [1, 2]


def test_the_form_has_what_the_text_of_a_layer_leaves_out() -> None:
    """Two networks of which torch prints the same have other results, and are not one form."""
    one, other = (
        nn.Sequential(nn.AvgPool2d(2, ceil_mode=ceil), nn.Flatten(), nn.Linear(4, 3)) for ceil in (True, False)
    )
    assert str(one) == str(other)
    values = dict(one.named_parameters())
    assert form_of(one, values) != form_of(other, values)
    again = nn.Sequential(nn.AvgPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(4, 3)).train(False)
    assert form_of(one, values) == form_of(again, values)
    assert len({form_of(nn.AvgPool2d([size, 1]), {}) for size in (1, 2)}) == 2  # users' lists count, too


def test_numbers_that_are_not_finite_stay_with_their_client(counted: Counted) -> None:
    alone, together = ([network_of(client) for client in range(3)] for _ in range(2))
    datas = [data_of(client) for client in range(3)]
    datas[1].train_images[3] = float("nan")
    expected = [plain(alone[client], datas[client], np.random.default_rng(client)) for client in range(3)]
    works = [partial(plain, together[client], datas[client], np.random.default_rng(client)) for client in range(3)]
    losses = run_in_lockstep(works, stacks_training=True)
    assert counted.sizes == [3]
    assert losses == pytest.approx(expected, rel=1e-12, nan_ok=True)
    assert np.isnan(losses[1])
    for client in (0, 2):
        for value, reference in zip(together[client].parameters(), alone[client].parameters(), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)


def test_after_an_error_each_client_is_trained_alone(counted: Counted) -> None:
    """One has a label of no class: it fails by itself, the others have the results that they have alone."""
    alone, together = ([network_of(client) for client in range(3)] for _ in range(2))
    datas = [data_of(client) for client in range(3)]
    datas[1].train_labels[3] = 10
    works = [partial(plain, together[client], datas[client], np.random.default_rng(client)) for client in range(3)]
    losses = run_in_lockstep(works, stacks_training=True)
    assert isinstance(losses[1], IndexError)
    assert counted.sizes == []
    for client in (0, 2):
        assert losses[client] == pytest.approx(plain(alone[client], datas[client], np.random.default_rng(client)))
        for value, reference in zip(together[client].parameters(), alone[client].parameters(), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)


def test_a_network_that_stacks_to_another_shape_is_trained_alone(counted: Counted) -> None:
    """A linear layer on the rows of images is known, but its stacked form is for features; torch says so."""
    together, alone = (nn.Sequential(nn.Linear(8, 3), nn.Flatten(), nn.Linear(24, 10)) for _ in range(2))
    alone.load_state_dict(together.state_dict())
    data = data_of(1)
    assert is_stackable(together)

    def work(some: nn.Module) -> float:
        part = ParameterSet(parameters=list(some.parameters()), learning_rate=0.05)
        return train_in_cohort(some, [part], data, EPOCHS, np.random.default_rng(1))

    assert run_in_lockstep([partial(work, together)], stacks_training=True) == [work(alone)]
    assert counted.sizes == []
    for value, reference in zip(together.parameters(), alone.parameters(), strict=True):
        assert torch.equal(value, reference)


def test_other_trainings_are_not_stacked(counted: Counted) -> None:
    """With another objective, with a function in place of a network, and outside of a cohort."""
    network, data = network_of(0), data_of(0)
    part = ParameterSet(parameters=list(network.parameters()), learning_rate=0.05)

    def objective(images: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        return nn.functional.cross_entropy(network(images), labels), None

    for predict, minimised in ((network, objective), (network.forward, None)):
        work = partial(train_in_cohort, predict, [part], data, EPOCHS, np.random.default_rng(0), minimised)
        assert np.isfinite(run_in_lockstep([work], stacks_training=True)[0])
        assert np.isfinite(run_in_lockstep([work])[0])
    plain(network, data, np.random.default_rng(0))
    run_in_lockstep([partial(plain, network, data, np.random.default_rng(0))])
    assert counted.sizes == []


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4), Dropout(0.5), nn.Flatten(0), nn.Conv2d(4, 4, 3, groups=2), nn.Softmax(dim=1), nn.PReLU(),
        nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, padding_mode="reflect", padding=1),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_stacked(layer: nn.Module) -> None:
    assert not is_stackable(nn.Sequential(nn.Linear(4, 4), layer))


def test_a_layer_that_is_computed_otherwise_cannot_be_stacked() -> None:
    """By a hook, by a replaced method (as `precision = bf16` does), and by a subclass."""

    class Doubled(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * super().forward(inputs)

    assert is_stackable(nn.Sequential(nn.Linear(4, 4)))
    assert not is_stackable(nn.Sequential(Doubled(4, 4)))
    hooked, replaced = nn.Linear(4, 4), nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = lambda inputs: inputs  # type: ignore[method-assign]
    assert not is_stackable(hooked)
    assert not is_stackable(replaced)


@pytest.mark.parametrize("form", CONVOLUTIONS)
def test_a_convolution_with_stride_padding_and_dilation(form: str) -> None:
    layer = nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(2, 1), bias=False)
    network = nn.Sequential(layer, nn.AvgPool2d(2), nn.Flatten(), nn.LazyLinear(3))
    images = torch.randn(2, 5, 2, 9, 8, requires_grad=True)
    network(images[0])
    values = [{name: torch.randn(each.shape) for name, each in network.named_parameters()} for _ in range(2)]
    together = {name: torch.stack([some[name] for some in values]) for name in values[0]}
    plain_linear = nn.Linear(*reversed(network[3].weight.shape))
    found = StackedNetwork(nn.Sequential(*network[:3], plain_linear), CONVOLUTIONS[form])(together, images)
    (gradient,) = torch.autograd.grad(found.square().sum(), images)
    for number, some in enumerate(values):
        expected = functional_call(network, some, (images[number],))
        torch.testing.assert_close(found[number], expected)
        (of_images,) = torch.autograd.grad(expected.square().sum(), images)
        torch.testing.assert_close(gradient[number], of_images[number])


@pytest.mark.parametrize("form", CONVOLUTIONS)
def test_a_layer_that_comes_twice_and_layers_in_place(form: str) -> None:
    """Users' networks reuse one activation, and let activations change what they receive."""
    again, in_place = nn.Tanh(), nn.ReLU(inplace=True)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), in_place, nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), in_place, nn.Flatten(),
        nn.Linear(20, 8), again, nn.Linear(8, 8), again, nn.Linear(8, 3),
    )  # fmt: skip
    assert is_stackable(network)
    images = torch.randn(2, 5, 1, 6, 6)
    values = [{name: torch.randn(each.shape) for name, each in network.named_parameters()} for _ in range(2)]
    together = {name: torch.stack([some[name] for some in values]).requires_grad_() for name in values[0]}
    found = StackedNetwork(network, CONVOLUTIONS[form])(together, images)
    gradients = torch.autograd.grad(found.square().sum(), list(together.values()))
    for number, some in enumerate(values):
        leaves = {name: value.requires_grad_() for name, value in some.items()}
        expected = functional_call(network, leaves, (images[number],))
        torch.testing.assert_close(found[number], expected)
        alone = torch.autograd.grad(expected.square().sum(), list(leaves.values()))
        torch.testing.assert_close([gradient[number] for gradient in gradients], list(alone))


def test_the_activations_are_counted() -> None:
    """8x8 images: 2 x 9 and 2 x 144 numbers in the windows of 64 and 16 places, three of each output, input, linear.

    Each image has a copy of the convolutions' weights and their gradient.
    """
    weights = 2 * (16 * 9 + 32 * 144)
    windows = 2 * (9 * 64 + 144 * 16)
    outputs = 3 * (16 * 64 + 32 * 16 + 128 + 10 + 64)
    assert activations_of(build_target("cnn", (1, 8, 8), 10), (1, 8, 8)) == windows + weights + outputs


def test_the_form_of_convolutions_is_that_of_the_device() -> None:
    assert stacked.convolution_for(torch.device("cpu")) is CONVOLUTIONS["grouped"]
    assert stacked.convolution_for(torch.device("cuda")) is CONVOLUTIONS["product"]
