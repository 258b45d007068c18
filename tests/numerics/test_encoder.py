"""IT-PFL-HN's encoder against its formulas in torch.nn.functional, as a function of a set, and its training."""

import numpy as np
import pytest
import torch
from plain import Sgd, leaves, random_samples
from torch.nn import functional

import hyperfl_flwr.models.encoder
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.encoder import build_encoder
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.models.targets import PERCEPTRONS, build_target
from hyperfl_flwr.training.encoder import train_encoder
from hyperfl_flwr.training.local_sgd import Epochs

DIM = 3
SHAPES = {"cnn": (1, 8, 8), "lenet": (3, 16, 16), "mlp": (1, 4, 5)}
POOLINGS = ("mean-max", "mean")


def encoder(target, pooling, shape=None):
    """Return an encoder with values in float64."""
    made = build_encoder(target, shape or SHAPES[target], DIM, pooling)
    made.load_state_dict(ordinary_parameters(made, torch_generator(3, "encoder")), assign=True)
    return made.double()


def samples(target, number=7, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((number, *SHAPES[target])))


def linear(values, inputs, name):
    return inputs @ values[f"{name}.weight"].T + values[f"{name}.bias"]


def wanted_phi(target, values, inputs):
    """Return the features before the pooling; only the layers' numbers in `body` are taken from the code."""
    if target == "mlp":
        return linear(values, inputs.flatten(1), "body.1").clamp(min=0)
    for number in (1, 4):
        weight, bias = values[f"body.{number}.weight"], values[f"body.{number}.bias"]
        inputs = functional.conv2d(inputs, weight, bias, padding=int(target == "cnn"))
        inputs = activation(target, functional.max_pool2d(inputs, 2))
    return activation(target, linear(values, inputs.flatten(1), "body.8"))


def activation(target, inputs):
    return torch.where(inputs > 0, inputs, inputs * (0.01 if target == "cnn" else 0))


def standardised(vector):
    """Return the vector standardised over its units; 1e-5 is torch's epsilon of layer normalisation."""
    centred = vector - vector.mean()
    return centred / (centred.square().mean() + 1e-5).sqrt()


def wanted_descriptor(target, pooling, values, inputs):
    phi = wanted_phi(target, values, inputs)
    if pooling == "mean":
        pooled = (phi / phi.square().sum(dim=1, keepdim=True).sqrt()).mean(dim=0)
    else:
        half = phi.shape[1] // 2
        pooled = torch.cat([phi[:, :half].mean(dim=0), phi[:, half:].max(dim=0).values])
    pooled = standardised(pooled)
    names = sorted({name.rpartition(".")[0] for name in values if name.startswith("head")})
    for name in names[:-1]:
        pooled = activation(target, linear(values, pooled, name))
    return linear(values, pooled, names[-1])


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("target", SHAPES)
def test_the_descriptor_is_that_of_the_formula(target, pooling):
    """Both ways to compute the descriptor equal the layers written with torch.nn.functional."""
    made, inputs = encoder(target, pooling), samples(target)
    wanted = wanted_descriptor(target, pooling, dict(made.named_parameters()), inputs)
    assert wanted.shape == (DIM,)
    torch.testing.assert_close(made(inputs), wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(made.descriptor(inputs), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("target", "shape", "units", "head"),
    [
        ("cnn", (1, 28, 28), 200, (128, DIM)),
        ("cnn", (3, 32, 32), 200, (128, DIM)),
        ("lenet", (3, 32, 32), 200, (120, 84, DIM)),
        ("mlp", (1280, 1, 1), 500, (500, 500, DIM)),
        ("mlp", (1280,), 500, (500, 500, DIM)),
        ("mlp-500", (1280,), 500, (500, 500, DIM)),
    ],
)
def test_the_layers_are_the_papers(target, shape, units, head):
    """Widths are those of appendix C, and convolutions those of the target network."""
    made = build_encoder(target, shape, DIM, "mean-max")
    linears = [layer for layer in made.body if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in linears] == [units]
    assert tuple(layer.out_features for layer in made.head if isinstance(layer, torch.nn.Linear)) == head
    if target not in PERCEPTRONS:
        extractor = dict(build_target(target, shape, 2).extractor.named_parameters())
        assert linears[0].in_features == extractor["fc.weight" if target == "cnn" else "fc1.weight"].shape[1]
        convolutions = [value.shape for name, value in extractor.items() if name.startswith("conv")]
        assert [value.shape for value in list(made.body.parameters())[:-2]] == convolutions


def test_feature_vectors_may_have_one_axis():
    """Samples [n, D] and [n, 1, 4, 5] with the same numbers have the same descriptor."""
    made, inputs = encoder("mlp", "mean-max"), samples("mlp")
    assert torch.equal(made.descriptor(inputs), made.descriptor(inputs.flatten(1)))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_order_of_the_samples_does_not_matter(pooling):
    """A permutation keeps the descriptor, and other samples change it."""
    made, inputs = encoder("cnn", pooling), samples("cnn", 20)
    order = torch.from_numpy(np.random.default_rng(1).permutation(20))
    torch.testing.assert_close(made.descriptor(inputs[order]), made.descriptor(inputs), rtol=1e-12, atol=1e-13)
    assert (made.descriptor(samples("cnn", 20, seed=2)) - made.descriptor(inputs)).abs().max() > 1e-3


@pytest.mark.parametrize("pooling", POOLINGS)
def test_how_the_samples_are_batched_does_not_matter(pooling, monkeypatch):
    """Batches of 20, 7 and 1 give the same descriptor, which is not the mean of the batches' descriptors."""
    made, inputs = encoder("cnn", pooling), samples("cnn", 20)
    found = []
    for size in (20, 7, 1):
        monkeypatch.setattr(hyperfl_flwr.models.encoder, "BATCH", size)
        found.append(made.descriptor(inputs))
        torch.testing.assert_close(found[-1], found[0], rtol=1e-12, atol=1e-13)
    parts = torch.stack([made(part) for part in torch.split(inputs, 7)]).mean(dim=0)
    assert (parts - found[0]).abs().max() > 1e-6


def test_one_sample_moves_a_mean_of_unit_vectors_by_two_nths():
    """|phi| = 1, and 200 replacements of a sample move the pooled vector by at most 2/n; zero features stay 0."""
    made, inputs = encoder("cnn", "mean"), samples("cnn", 5)
    torch.testing.assert_close(made.phi(inputs).norm(dim=1), torch.ones(5).double())
    pooled, others, moved = made.pooled(inputs), samples("cnn", 200, seed=4) * 10, []
    for other in others:
        moved.append(float((made.pooled(torch.cat([inputs[:4], other[None]])) - pooled).norm()))
    assert 0.01 < max(moved) <= 2 / 5
    with torch.no_grad():
        made.body[-2].weight.zero_()
        made.body[-2].bias.zero_()
    assert torch.equal(made.phi(inputs), torch.zeros(5, 200).double())


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_training_is_gradient_descent_on_the_distance_to_the_embedding(clip):
    """Two epochs with batches of 4 and 3 equal autograd steps on |g(B) - e|^2 / d; labels are not used."""
    made, data, embedding = encoder("mlp", "mean-max"), random_samples(7, SHAPES["mlp"], 3), torch.randn(DIM).double()
    values = {name: value.detach().clone() for name, value in made.named_parameters()}
    epochs = Epochs(epochs=2, batch_size=4, momentum=0.5, weight_decay=0.03)
    loss = train_encoder(made, embedding, data, epochs, np.random.default_rng(0), learning_rate=0.05, clip_norm=clip)
    optimiser, losses = Sgd(0.05, 0.5, 0.03, clip or float("inf")), []
    for images, _ in data.batches(data.seen):
        values = leaves(values, list(values))
        distance = (wanted_descriptor("mlp", "mean-max", values, images) - embedding).square().mean()
        losses.append((float(distance.detach()), len(images)))
        values = optimiser.step(values, distance, list(values))
    assert loss == pytest.approx(sum(each * number for each, number in losses[2:]) / 7)
    for name, value in made.named_parameters():
        torch.testing.assert_close(value.detach(), values[name].detach(), rtol=1e-8, atol=1e-10)


def test_a_target_without_an_encoder_is_refused():
    with pytest.raises(ValueError, match="no encoder is defined for the resnet18 target"):
        build_encoder("resnet18", (3, 32, 32), DIM, "mean")
