"""Dropout with its own generator: torch's distribution, repeatable, and the same on every device."""

import math

import pytest
import torch
from torch import nn

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.layers.dropout import Dropout, has_dropout, seed_dropout, without_dropout
from hyperfl_flwr.models.names import TARGETS
from hyperfl_flwr.models.targets import PERCEPTRONS, build_target


def layer(seed: int = 0, probability: float = 0.2) -> Dropout:
    made = Dropout(probability)
    seed_dropout([made], torch_generator(seed, "dropout"))
    return made


def test_units_are_left_out_with_the_probability_and_the_rest_grows() -> None:
    """Of 10^6 units 0.2 are dropped, within five standard deviations sqrt(0.2 * 0.8 / 10^6); others become 1 / 0.8."""
    made = layer()(torch.ones(1000, 1000))
    assert made.unique().tolist() == [0.0, 1.25]
    assert abs(float((made == 0).float().mean()) - 0.2) < 5 * math.sqrt(0.2 * 0.8 / 1e6)


def test_two_calls_and_two_seeds_leave_out_other_units() -> None:
    made, ones = layer(), torch.ones(10, 100)
    first, second = made(ones), made(ones)
    assert not torch.equal(first, second)
    again = layer()
    assert torch.equal(again(ones), first)
    assert torch.equal(again(ones), second)
    assert not torch.equal(layer(seed=1)(ones), first)


def test_the_global_generator_rests_and_has_no_influence() -> None:
    before, ones = torch.get_rng_state(), torch.ones(10, 100)
    made = layer()(ones)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert torch.equal(layer()(ones), made)


def test_the_gradient_goes_through_what_is_kept() -> None:
    inputs = torch.randn(20, 30, generator=torch_generator(0, "inputs")).requires_grad_()
    made = layer()(inputs)
    made.sum().backward()
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad, torch.where(made == 0, 0.0, 1.25))


def test_it_does_nothing_in_evaluation_and_needs_a_generator_to_train() -> None:
    made, ones = Dropout(0.2), torch.ones(10, 100)
    with pytest.raises(RuntimeError, match=r"has no generator; call seed_dropout .* or switch to eval"):
        made(ones)
    assert torch.equal(made.eval()(ones), ones)
    assert not made.state_dict()
    with pytest.raises(ValueError, match="at least 0 and below 1, got 1"):
        Dropout(1.0)


def test_a_layer_that_is_used_twice_is_removed_twice() -> None:
    again = Dropout(0.5)
    network = nn.Sequential(nn.Linear(3, 3), again, nn.Sequential(nn.Linear(3, 3), again), again)
    assert not has_dropout(without_dropout(network))
    assert [type(layer) for layer in network] == [nn.Linear, nn.Identity, nn.Sequential, nn.Identity]


def test_only_one_target_has_it() -> None:
    shapes = {name: (64,) if name in PERCEPTRONS else (1, 28, 28) for name in TARGETS}
    found = {name for name, shape in shapes.items() if has_dropout(build_target(name, shape, 2))}
    assert found == {"mlp-500"}
    assert not has_dropout(nn.Linear(2, 3))


@pytest.mark.cuda
def test_it_leaves_out_the_same_units_on_cuda() -> None:
    ones = torch.ones(10, 100)
    assert torch.equal(layer()(ones.cuda()).cpu(), layer()(ones))
