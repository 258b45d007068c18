"""The target networks: parameter counts of HyperFL's table, and the layers' outputs."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from hyperfl_flwr.models.hypernetwork import Hypernetwork
from hyperfl_flwr.models.initialisation import fan_in, ordinary_parameters, weighted_layers
from hyperfl_flwr.models.layers.dropout import Dropout
from hyperfl_flwr.models.targets import build_target

GREY, COLOUR, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)
TABLE = [(GREY, 115_776, 14_943_424), (COLOUR, 106_400, 13_733_920)]
"""Image shape, extractor parameters and hypernetwork parameters (Guo et al., appendix D.1)."""


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("shape", "of_extractor", "of_hypernetwork"), TABLE)
def test_parameter_counts_are_the_papers(shape, of_extractor, of_hypernetwork):
    """Counts equal the paper's table, and 129 P + 64 * 128 + 128 for a hypernetwork with P outputs."""
    target = build_target("cnn", shape, 10)
    assert count(target.extractor) == of_extractor
    assert count(Hypernetwork(target.extractor)) == of_hypernetwork == 129 * of_extractor + 64 * 128 + 128


@pytest.mark.parametrize("num_classes", [2, 10, 62])
def test_the_classifier_has_one_row_per_class_and_a_bias(num_classes):
    """It has 128 K + K parameters."""
    target = build_target("cnn", GREY, num_classes)
    assert count(target.classifier) == 129 * num_classes
    assert target.classifier.weight.shape == (num_classes, 128)


LAYERS = {
    GREY: {"conv1": (16, 1, 5, 5), "conv2": (32, 16, 5, 5), "fc": (128, 800)},
    COLOUR: {"conv1": (16, 3, 5, 5), "conv2": (32, 16, 5, 5), "conv3": (64, 32, 3, 3), "fc": (128, 576)},
    DIGITS: {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "fc": (128, 128)},
}
"""Weight shapes; sides: 28 - 4 = 24, 12, 12 + 2 - 4 = 10, 5: 32 * 25 = 800; 32 - 4 = 28, 14; 12, 6; 6, 3: 576."""


@pytest.mark.parametrize("shape", list(LAYERS))
def test_layer_shapes_and_their_order(shape):
    """Each layer of the paper has weight and then bias, in the order in which images pass the layers."""
    parameters = build_target("cnn", shape, 10).extractor.named_parameters()
    expected = {}
    for layer, weight in LAYERS[shape].items():
        expected |= {f"{layer}.weight": weight, f"{layer}.bias": weight[:1]}
    assert [(name, tuple(parameter.shape)) for name, parameter in parameters] == list(expected.items())


@pytest.mark.parametrize("shape", list(LAYERS))
@pytest.mark.usefixtures("float64")
def test_forward_pass_is_the_papers(shape):
    """Outputs equal those with torch.nn.functional: paddings 0, 1, 1 (8x8: 1, 1), LeakyReLU 0.01 after each layer."""
    target = build_target("cnn", shape, 10)
    generator = torch.Generator().manual_seed(0)
    values = ordinary_parameters(target, generator)
    target.load_state_dict(values, assign=True)
    images = torch.randn(3, *shape, generator=generator)
    paddings = {"conv1": 1 if shape == DIGITS else 0, "conv2": 1, "conv3": 1}
    hidden = images
    for layer in LAYERS[shape]:
        weight, bias = values[f"extractor.{layer}.weight"], values[f"extractor.{layer}.bias"]
        if layer == "fc":
            hidden = functional.leaky_relu(hidden.flatten(1) @ weight.T + bias, 0.01)
        else:
            hidden = functional.leaky_relu(functional.conv2d(hidden, weight, bias, padding=paddings[layer]), 0.01)
            hidden = functional.max_pool2d(hidden, 2)
    torch.testing.assert_close(target.extractor(images), hidden, rtol=1e-12, atol=1e-12)
    expected = hidden @ values["classifier.weight"].T + values["classifier.bias"]
    torch.testing.assert_close(target(images), expected, rtol=1e-12, atol=1e-12)


def test_features_pass_a_leaky_relu():
    """With all weights zero and fc's bias -1, features are max(-1, -0.01) = -0.01 exactly."""
    extractor = build_target("cnn", GREY, 10).extractor
    values = {name: torch.zeros(value.shape) for name, value in extractor.named_parameters()}
    values["fc.bias"] -= 1
    extractor.load_state_dict(values, assign=True)
    features = extractor(torch.randn(2, *GREY, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(features, torch.full((2, 128), -1.0) * 0.01)


@pytest.mark.parametrize("shape", [(1, 7, 8), (3, 8, 7)])
def test_images_must_have_eight_pixels(shape):
    with pytest.raises(ValueError, match="at least 8x8"):
        build_target("cnn", shape, 10)


@pytest.mark.parametrize("size", range(8, 41))
def test_every_image_size_gets_a_network_that_takes_it(size):
    """A forward pass on the meta device gives one row of logits per image."""
    target = build_target("cnn", (1, size, size + 3), 5)
    with torch.device("meta"):
        assert target(torch.zeros(2, 1, size, size + 3)).shape == (2, 5)


def test_ordinary_parameters_are_torchs_defaults():
    """Bounds equal those of torch's reset_parameters, and standard deviations agree to 3 % (n > 4000)."""
    target = build_target("cnn", GREY, 10)
    drawn = ordinary_parameters(target, torch.Generator().manual_seed(0))
    assert list(drawn) == [name for name, _ in target.named_parameters()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target.to_empty(device="cpu")
        for layer in weighted_layers(target).values():
            layer.reset_parameters()
    for name, torchs in target.named_parameters():
        ours = drawn[name]
        assert ours.shape == torchs.shape
        bound = 1 / np.sqrt(fan_in(target.get_submodule(name.rpartition(".")[0])))
        assert ours.abs().max() <= bound
        assert torchs.abs().max() <= bound
        if ours.numel() > 4000:
            assert float(ours.std()) == pytest.approx(float(torchs.detach().std()), rel=0.03)


def test_fan_in_counts_the_summands():
    """A 5x5 convolution over 16 channels sums 400 products, fc of the 28x28 network 800, conv1 25."""
    layers = weighted_layers(build_target("cnn", GREY, 10).extractor)
    assert {name: fan_in(layer) for name, layer in layers.items()} == {"conv1": 25, "conv2": 400, "fc": 800}


@pytest.mark.parametrize(("shape", "parameters"), [(COLOUR, 121_182), (GREY, 85_822), ((1, 16, 16), 28_222)])
@pytest.mark.usefixtures("float64")
def test_lenet_is_pfedhns(shape, parameters):
    """5x5 convolutions 16, 32 without padding, linear 120, 84, 10; ReLU, then pooling: as in torch.nn.functional.

    32: 28, 14, 10, 5: 32 * 25 = 800 inputs; 28: 24, 12, 8, 4: 512; 16: 12, 6, 2, 1: 32.
    """
    target = build_target("lenet", shape, 10)
    values = ordinary_parameters(target, torch.Generator().manual_seed(0))
    values = {name: value.double() for name, value in values.items()}
    target.load_state_dict(values, assign=True)
    assert count(target) == parameters
    images = torch.randn(3, *shape, dtype=torch.float64)
    hidden = images
    for layer in ("conv1", "conv2"):
        weight, bias = values[f"extractor.{layer}.weight"], values[f"extractor.{layer}.bias"]
        hidden = functional.max_pool2d(functional.relu(functional.conv2d(hidden, weight, bias)), 2)
    hidden = hidden.flatten(1)
    for layer in ("extractor.fc1", "extractor.fc2"):
        hidden = functional.relu(hidden @ values[f"{layer}.weight"].T + values[f"{layer}.bias"])
    expected = hidden @ values["classifier.weight"].T + values["classifier.bias"]
    torch.testing.assert_close(target(images), expected)


def test_lenet_needs_sixteen_pixels():
    with pytest.raises(ValueError, match="needs images of at least 16x16 pixels, got 15x28"):
        build_target("lenet", (1, 15, 28), 10)


def test_images_of_any_layout_are_computed_channels_last_on_the_cpu():
    """Torch's pooling is fast in this layout; with one channel, a tensor's strides do not distinguish the layouts."""
    for shape in (GREY, COLOUR, DIGITS):
        target = build_target("cnn", shape, 10).to_empty(device="cpu")
        pooled = target.extractor[:3](torch.zeros(2, *shape))
        assert pooled.stride(1) == 1
        assert pooled.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.usefixtures("float64")
def test_the_mlp_is_fedavgs():
    """It has 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10 = 199,210 parameters (the paper's) and equal outputs."""
    target = build_target("mlp", GREY, 10)
    assert count(target) == 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10 == 199_210
    values = {
        name: value.double() for name, value in ordinary_parameters(target, torch.Generator().manual_seed(0)).items()
    }
    target.load_state_dict(values, assign=True)
    images = torch.randn(3, *GREY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hidden = images.reshape(3, 784)
    for layer in ("extractor.fc1", "extractor.fc2"):
        hidden = (hidden @ values[f"{layer}.weight"].T + values[f"{layer}.bias"]).clamp(min=0)
    expected = hidden @ values["classifier.weight"].T + values["classifier.bias"]
    torch.testing.assert_close(target(images), expected)


@pytest.mark.usefixtures("float64")
def test_the_perceptron_for_features_is_it_pfls():
    """It has 1280 * 500 + 500 + 500 * 500 + 500 + 500 * 10 + 10 parameters; outputs without dropout are equal."""
    target = build_target("mlp-500", (1280,), 10)
    assert count(target) == 1280 * 500 + 500 + 500 * 500 + 500 + 500 * 10 + 10 == 896_010
    assert [layer.probability for layer in target.modules() if isinstance(layer, Dropout)] == [0.2]
    assert isinstance(target.extractor[-1], Dropout)
    values = {
        name: value.double() for name, value in ordinary_parameters(target, torch.Generator().manual_seed(0)).items()
    }
    target.load_state_dict(values, assign=True)
    hidden = vectors = torch.randn(3, 1280, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for layer in ("extractor.fc1", "extractor.fc2"):
        hidden = (hidden @ values[f"{layer}.weight"].T + values[f"{layer}.bias"]).clamp(min=0)
    expected = hidden @ values["classifier.weight"].T + values["classifier.bias"]
    torch.testing.assert_close(target.eval()(vectors), expected)


@pytest.mark.parametrize("name", ["cnn", "lenet", "resnet18"])
def test_convolutions_refuse_vectors(name):
    """The error names the target and the shape."""
    with pytest.raises(ValueError, match=rf"the {name} target needs images .*, got vectors of the shape \(1280,\)"):
        build_target(name, (1280,), 10)
