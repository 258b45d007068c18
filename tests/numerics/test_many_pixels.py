"""The forger's linear algebra where an image has more pixels than there are public images."""

import torch
from attacked import public_digits
from test_malicious_server import knowledge_of

from hyperfl_flwr.attacks.forging import Decoder, first_component, first_linear, normalised, pass_through


def test_the_first_component_is_the_same_from_either_matrix() -> None:
    rows = torch.randn(40, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.cat([rows, 3 * rows[:, :1]], dim=1)
    few, all_rows = rows[:20], rows
    for chosen in (few, all_rows):
        expected = torch.linalg.eigh(torch.cov(chosen.T))[1][:, -1]
        found = first_component(chosen)
        torch.testing.assert_close(found * (found @ expected).sign(), expected)


def test_the_decoder_is_the_same_from_either_system() -> None:
    """Ridge regression from few images, against its definition: the normal equations of the inputs."""
    knowledge = knowledge_of("cnn", shape=(1, 16, 16))
    layer, images = first_linear(knowledge), normalised(public_digits(16).images, knowledge)
    values = pass_through(layer, images)
    inputs = layer.inputs(values, images).double()
    few = inputs.shape[1] // 2
    assert few < inputs.shape[1] < len(images)
    for number in (few, len(images)):
        centered = inputs[:number] - inputs[:number].mean(dim=0)
        flat = images[:number].flatten(1).double()
        products = centered.T @ centered
        ridge = 0.1 * products.diagonal().mean() * torch.eye(len(products)).double()
        weight = torch.linalg.solve(products + ridge, centered.T @ (flat - flat.mean(dim=0)))
        expected = (inputs - inputs[:number].mean(dim=0)) @ weight + flat.mean(dim=0)
        found = Decoder(layer, values, images[:number]).images(inputs)
        torch.testing.assert_close(found.flatten(1), expected.float(), atol=1e-4, rtol=1e-4)
