"""Adam on the server against its formula, and its state."""

import numpy as np
import torch

from hyperfl_flwr.training.server_adam import ServerAdam

SHAPES = {"weight": (3, 2), "bias": (3,)}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for name, shape in SHAPES.items()}


def test_steps_are_those_of_the_formula():
    """Steps equal Kingma and Ba's algorithm 1 in float64; the gradient is the sent value minus the returned mean."""
    rate, current = 0.01, drawn(0)
    server = ServerAdam(current, rate)
    first = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    second = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    wanted = {name: value.numpy().astype(np.float64) for name, value in current.items()}
    for step in range(1, 5):
        changes = {name: 1e-3 * value for name, value in drawn(step).items()}
        mean = {name: current[name] - changes[name] for name in SHAPES}
        gradients = {name: (current[name] - mean[name]).double().numpy() for name in SHAPES}
        current = server.step(current, mean)
        for name, gradient in gradients.items():
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.99 * second[name] + 0.01 * gradient**2
            root = np.sqrt(second[name] / (1 - 0.99**step)) + 1e-8
            wanted[name] = wanted[name] - rate * first[name] / (1 - 0.9**step) / root
            np.testing.assert_allclose(current[name].numpy(), wanted[name], rtol=1e-5, atol=1e-6)


def test_a_loaded_state_goes_on_bit_by_bit():
    current, mean = drawn(0), drawn(1)
    one, other = ServerAdam(current, 0.01), ServerAdam(current, 0.01)
    assert one.state() == {}
    current = one.step(current, mean)
    other.load({name: value.clone() for name, value in one.state().items()})
    going, resumed = one.step(current, mean), other.step(current, mean)
    assert all(torch.equal(going[name], resumed[name]) for name in SHAPES)
    other.load({})
    fresh = other.step(current, mean)
    assert not all(torch.equal(going[name], fresh[name]) for name in SHAPES)
