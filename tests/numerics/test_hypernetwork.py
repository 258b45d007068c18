"""The hypernetwork: what it generates, its initialisation, and its health metrics."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.hypernetwork import (
    Hypernetwork,
    common_embedding,
    health,
    initial_embedding,
    initial_hypernetwork,
)
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training.hyperfl import HyperFLModel

GREY = (1, 28, 28)
FAN_IN = {"conv1": 25, "conv2": 400, "fc": 800}


def filled(hypernetwork, seed=0):
    """Return the hypernetwork with parameters drawn from a normal distribution with standard deviation 1/4."""
    generator = torch.Generator().manual_seed(seed)
    values = {
        name: torch.randn(value.shape, generator=generator) / 4 for name, value in hypernetwork.state_dict().items()
    }
    hypernetwork.load_state_dict(values, assign=True)
    return hypernetwork


def initial(extractor, initialisation, seed, *, hidden_width=128):
    """Return (embedding, initial parameters, hypernetwork that has them)."""
    hypernetwork = Hypernetwork(extractor, hidden_width=hidden_width)
    embedding = common_embedding(64, initialisation, seed)
    values = initial_hypernetwork(
        hypernetwork, extractor, initialisation, embedding, torch_generator(seed, "hypernetwork")
    )
    hypernetwork.load_state_dict(values, assign=True)
    return embedding, values, hypernetwork


@pytest.mark.usefixtures("float64")
def test_generated_weights_are_the_extractors():
    """Predictions equal those of the extractor with the generated weights loaded."""
    target = build_target("cnn", (1, 8, 8), 10)
    hypernetwork = filled(Hypernetwork(target.extractor, embedding_dim=6, hidden_width=5))
    generator = torch.Generator().manual_seed(1)
    embedding, images = torch.randn(6, generator=generator), torch.randn(4, 1, 8, 8, generator=generator)
    classifier = nn.Linear(128, 10)
    model = HyperFLModel(
        extractor=target.extractor, classifier=classifier, hypernetwork=hypernetwork, embedding=embedding
    )
    loaded = build_target("cnn", (1, 8, 8), 10).extractor
    loaded.load_state_dict(hypernetwork.split(hypernetwork(embedding)), assign=True)
    expected = classifier(loaded(images))
    torch.testing.assert_close(model.predict(images), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.fixed()(images), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_one_matrix_is_one_linear_head_per_tensor():
    """The output equals nn.Linear(64, 128), ReLU and an nn.Linear(128, numel) per tensor with the same numbers."""
    extractor = build_target("cnn", (1, 8, 8), 10).extractor
    hypernetwork = filled(Hypernetwork(extractor))
    embedding = torch.randn(64, generator=torch.Generator().manual_seed(1))
    generated = hypernetwork.split(hypernetwork(embedding))
    first = nn.Linear(64, 128)
    first.load_state_dict({"weight": hypernetwork.hidden.weight, "bias": hypernetwork.hidden.bias})
    hidden, start = torch.relu(first(embedding)), 0
    assert list(generated) == [name for name, _ in extractor.named_parameters()]
    for name, parameter in extractor.named_parameters():
        stop = start + parameter.numel()
        head = nn.Linear(128, parameter.numel())
        head.load_state_dict(
            {"weight": hypernetwork.head_weight[:, start:stop].T, "bias": hypernetwork.head_bias[start:stop]}
        )
        torch.testing.assert_close(generated[name], head(hidden).reshape(parameter.shape), rtol=1e-12, atol=1e-12)
        start = stop
    assert start == hypernetwork.head_bias.numel()


def test_split_returns_views_in_order():
    """For theta = 0, 1, 2, ... each tensor starts where the previous one ends and shares theta's memory."""
    extractor = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2))
    hypernetwork = Hypernetwork(extractor, embedding_dim=1, hidden_width=1)
    theta = torch.arange(float(24 + 3 + 6 + 2))
    parts = hypernetwork.split(theta)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "0.weight": (3, 2, 2, 2),
        "0.bias": (3,),
        "2.weight": (2, 3),
        "2.bias": (2,),
    }
    assert torch.equal(torch.cat([part.flatten() for part in parts.values()]), theta)
    theta.zero_()
    assert not any(part.any() for part in parts.values())


def test_gradient_of_theta_is_the_chain_rule():
    """For a linear loss g . theta, in numpy: dL/dH = z g^T, dL/dc = g, dL/dv = W1^T ((H g) [z > 0])."""
    extractor = nn.Linear(3, 2, dtype=torch.float64)
    hypernetwork = filled(Hypernetwork(extractor, embedding_dim=4, hidden_width=7)).double()
    embedding = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    g = torch.randn(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (hypernetwork(embedding) @ g).backward()
    weight, bias = hypernetwork.hidden.weight.detach().numpy(), hypernetwork.hidden.bias.detach().numpy()
    before = weight @ embedding.detach().numpy() + bias
    z, active = np.maximum(before, 0), before > 0
    assert 0 < active.sum() < 7
    of_z = (hypernetwork.head_weight.detach().numpy() @ g.numpy()) * active
    np.testing.assert_allclose(hypernetwork.head_weight.grad, np.outer(z, g), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(hypernetwork.head_bias.grad, g, rtol=1e-12)
    np.testing.assert_allclose(hypernetwork.hidden.bias.grad, of_z, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(embedding.grad, weight.T @ of_z, rtol=1e-12)


def test_torchs_initialisation_generates_too_large_weights():
    """Weights are about 2, 9 and 13 times the ordinary 1/sqrt(3 fan_in), as measured in the paper's public code.

    Entries of H and c are uniform in +-1/sqrt(128), so the variance of theta is (1 + |z|^2) / (3 * 128): the factor is
    sqrt(fan_in (1 + |z|^2) / 128). That closed form must hold to 3 % (the smallest layer has 416 entries and |z|^2 is
    measured), the three factors to a fifth on average over three seeds.
    """
    extractor = build_target("cnn", GREY, 10).extractor
    factors = {layer: [] for layer in FAN_IN}
    for seed in range(3):
        embedding, values, hypernetwork = initial(extractor, "torch", seed)
        with torch.no_grad():
            generated = hypernetwork.split(hypernetwork(embedding))
        z = np.maximum(values["hidden.weight"].numpy() @ embedding.numpy() + values["hidden.bias"].numpy(), 0)
        for layer, inputs in FAN_IN.items():
            factor = float(generated[f"{layer}.weight"].std()) * math.sqrt(3 * inputs)
            tolerance = 0.15 if layer == "conv1" else 0.03
            assert factor == pytest.approx(math.sqrt(inputs * (1 + z @ z) / 128), rel=tolerance)
            factors[layer].append(factor)
    for layer, expected in {"conv1": 2, "conv2": 9, "fc": 13}.items():
        assert np.mean(factors[layer]) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(
    ("initialisation", "of_head", "of_bias"), [("hyperfan-bias", 0.1, 1), ("hyperfan-weight", 1, 0)]
)
def test_hyperfan_generates_ordinary_weights(initialisation, of_head, of_bias):
    """Each layer has standard deviation 1/sqrt(3 fan_in), to 2 %; with `hyperfan-bias` a tenth of it comes from H.

    Pooled over 40 draws, since conv1 alone has 400 weights; a hidden layer of 16 makes that fast and changes nothing:
    the scale of H is chosen by |z|.
    """
    extractor = build_target("cnn", GREY, 10).extractor
    squares = {(part, layer): [] for part in ("theta", "head", "bias") for layer in FAN_IN}
    for seed in range(40):
        embedding, values, hypernetwork = initial(extractor, initialisation, seed, hidden_width=16)
        with torch.no_grad():
            theta = hypernetwork(embedding)
        for part, flat in (("theta", theta), ("head", theta - values["head_bias"]), ("bias", values["head_bias"])):
            for layer in FAN_IN:
                squares[part, layer].append(float(hypernetwork.split(flat)[f"{layer}.weight"].square().mean()))
    for (part, layer), values in squares.items():
        expected = {"theta": 1, "head": of_head, "bias": of_bias}[part]
        measured = math.sqrt(np.mean(values) * 3 * FAN_IN[layer])
        assert measured == pytest.approx(expected, rel=0.02), (part, layer)


@pytest.mark.parametrize("initialisation", ["hyperfan-bias", "hyperfan-weight"])
def test_the_bias_parts_are_ordinary_too(initialisation):
    """A bias has its layer's standard deviation: 1/sqrt(3 * 800) for fc, to 10 % (1,280 numbers)."""
    extractor = build_target("cnn", GREY, 10).extractor
    draws = []
    for seed in range(10):
        embedding, _, hypernetwork = initial(extractor, initialisation, seed, hidden_width=16)
        with torch.no_grad():
            draws.append(hypernetwork.split(hypernetwork(embedding))["fc.bias"])
    assert float(torch.cat(draws).std()) * math.sqrt(3 * 800) == pytest.approx(1, rel=0.1)


def test_squared_norm_of_the_hidden_layer_at_the_start():
    """|z|^2 is 21.7 on average, near the public code's 26; a dead layer has 0, an unscaled first layer 1/64 of it.

    On the unit sphere a unit's input has variance 64 * 1/192 + 1/192 = 0.3385; half of the units are on, so that
    |z|^2 = 128 * 0.3385 / 2 = 21.7 on average, with a standard deviation of 4.3 per draw: 0.7 over 40 draws.
    """
    extractor = nn.Linear(2, 1)
    found = []
    for seed in range(40):
        embedding, _, hypernetwork = initial(extractor, "hyperfan-bias", seed)
        found.append(health(hypernetwork, embedding).squared_norm)
    assert np.mean(found) == pytest.approx(128 * 65 / 192 / 2, abs=2.5)
    assert 8 < min(found) < max(found) < 45


def test_embeddings_start_on_the_unit_sphere_except_torchs():
    """|v| = 1 with hyperfan, by division; with torch's initialisation |v|^2 of 64 standard normals is 64 +- 11."""
    for seed in range(5):
        for initialisation in ("hyperfan-bias", "hyperfan-weight"):
            assert float(common_embedding(64, initialisation, seed).norm()) == pytest.approx(1, abs=1e-6)
        assert 20 < float(common_embedding(64, "torch", seed).square().sum()) < 120


def test_initial_values_are_functions_of_the_seed():
    """Equal seeds give equal numbers, and other seeds other numbers."""
    extractor = nn.Linear(3, 2)
    one, same, other = (initial(extractor, "hyperfan-bias", seed)[:2] for seed in (4, 4, 5))
    assert torch.equal(one[0], same[0])
    assert not torch.equal(one[0], other[0])
    for name, value in one[1].items():
        assert torch.equal(value, same[1][name])
        assert not torch.equal(value, other[1][name])
    drawn = initial_embedding(64, "torch", torch_generator(4, "embedding"))
    torch.testing.assert_close(one[0], drawn / drawn.norm())


def test_health_by_hand():
    """W1 = ((3, 0), (0, -1), (0, 0)), b1 = (-1, 0, 2), v = (1, 1): z = (2, 0, 2), |z|^2 = 8, two units on.

    H = ((1, 0), (9, 9), (0, 2)) and c = (1, -4): theta = (2 + 1, 4 - 4) = (3, 0), norm 3.
    """
    hypernetwork = Hypernetwork(nn.Linear(1, 1), embedding_dim=2, hidden_width=3)
    values = {
        "hidden.weight": torch.tensor([[3.0, 0], [0, -1], [0, 0]]),
        "hidden.bias": torch.tensor([-1.0, 0, 2]),
        "head_weight": torch.tensor([[1.0, 0], [9, 9], [0, 2]]),
        "head_bias": torch.tensor([1.0, -4]),
    }
    hypernetwork.load_state_dict(values, assign=True)
    embedding = torch.ones(2)
    found = health(hypernetwork, embedding)
    assert (found.squared_norm, found.active_units, found.weight_norm) == (8.0, 2, 3.0)
    assert (
        functional_call(nn.Linear(1, 1), hypernetwork.split(hypernetwork(embedding)), (torch.ones(1, 1),)).item() == 3
    )
    hypernetwork.hidden.bias.data -= 10
    dead = health(hypernetwork, embedding)
    assert (dead.squared_norm, dead.active_units) == (0.0, 0)
    assert dead.weight_norm == pytest.approx(math.sqrt(17))


@pytest.mark.parametrize("initialisation", ["hyperfan-bias", "hyperfan-weight"])
def test_a_layer_that_is_off_at_the_common_embedding_gives_finite_heads(initialisation):
    """With one hidden unit and a seed at which it is off, the scale of H would otherwise divide by zero."""
    extractor = build_target("cnn", (1, 8, 8), 10).extractor
    for seed in range(50):
        embedding, values, hypernetwork = initial(extractor, initialisation, seed, hidden_width=1)
        if not bool(hypernetwork.activation(embedding).any()):
            break
    else:
        pytest.fail("no seed switches the unit off")
    assert all(bool(value.isfinite().all()) for value in values.values())
    torch.testing.assert_close(hypernetwork(embedding).detach(), values["head_bias"])
