"""What a node measures of a received network, on networks of which the values are known."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hyperfl_flwr.privacy.received_network import (
    FEWEST_SAMPLES,
    MOST_UNITS,
    ReceivedNetwork,
    Statistic,
    measured_network,
    nested_share,
    parallel_share,
    rare_share,
)


def measured(
    network: nn.Module, samples: Tensor, labels: Tensor, last: ReceivedNetwork | None = None, batch_size: int = 7
) -> ReceivedNetwork:
    names = {name for name, _ in network.named_parameters()}
    return measured_network(network, samples, labels, received=names, last=last, batch_size=batch_size)


def values(found: ReceivedNetwork) -> Mapping[Statistic, tuple[str, float]]:
    return {each.statistic: (each.layer, each.value) for each in found.measured}


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], len(weight))
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def staircase(units: int) -> Tensor:
    """Return the sets of bins: unit j is active for the samples above j."""
    return torch.arange(FEWEST_SAMPLES)[:, None] > torch.arange(units)


def test_rows_are_parallel_whatever_their_length_and_sign() -> None:
    row, other = torch.tensor([1.0, 2, 3, 4]), torch.tensor([4.0, -3, 2, -1])
    assert parallel_share(torch.stack([row, 2 * row, -0.1 * row, other])) == 0.75
    assert parallel_share(torch.stack([row, row + 0.1, other])) == 0.0  # at a cosine of 0.9998
    assert parallel_share(torch.stack([torch.zeros(4), torch.zeros(4), row, other])) == 0.5
    assert parallel_share(torch.stack([torch.zeros(4), row, other])) == 0.0


def test_bins_are_one_chain() -> None:
    """The order of units and samples and the number of units with the same set do not matter."""
    bins = staircase(12)
    assert nested_share(bins) == 1.0
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert nested_share(bins[torch.randperm(FEWEST_SAMPLES)][:, order].repeat(1, 3)) == 1.0


def test_independent_sets_are_not_nested() -> None:
    sets = torch.rand(200, 60, generator=torch.Generator().manual_seed(0)) < 0.5
    assert nested_share(sets) == 1 / 60
    two = torch.cat([staircase(8), ~staircase(8)], dim=1)  # two chains; no set lies in one of the other
    assert nested_share(two) == 0.5


def test_sets_that_say_nothing_are_not_counted() -> None:
    bins, none = staircase(12), torch.zeros(FEWEST_SAMPLES, 5, dtype=torch.bool)
    assert nested_share(torch.cat([bins, none, ~none], dim=1)) == 1.0
    assert nested_share(staircase(7)) == 0.0  # too few
    assert nested_share(none) == 0.0


def test_rare_units_are_active_for_one_sample_in_twenty() -> None:
    active = torch.zeros(40, 5, dtype=torch.bool)
    active[:2, 0], active[:3, 1], active[5, 2] = True, True, True
    assert rare_share(active) == pytest.approx(2 / 3)  # units 0 and 2; units 3 and 4 are dead
    assert rare_share(torch.zeros(40, 5, dtype=torch.bool)) == 0.0


def test_change_is_relative_and_of_the_layer_with_weights_and_biases() -> None:
    network = nn.Sequential(linear(torch.eye(4), torch.zeros(4)), linear(2 * torch.eye(4), torch.zeros(4)))
    samples, labels = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    first = measured(network, samples, labels)
    assert "change" not in values(first)
    with torch.no_grad():
        network[0].bias += 3.0
        network[1].weight[0, 0] += 1.0
    layer, change = values(measured(network, samples, labels, first))["change"]
    assert (layer, change) == ("0", 3.0)  # |(3, 3, 3, 3)| / |I_4|, and of layer 1 it is 1 / 4


def test_change_is_by_the_smaller_norm_and_of_layers_of_one_size() -> None:
    """After a layer a hundred times as large, which a first round may send, any other one would be near."""
    small, large, samples, labels = torch.eye(4), 100 * torch.ones(4, 4), torch.zeros(3, 4), torch.zeros(3).long()
    before, after = (measured(linear(weight, torch.zeros(4)), samples, labels) for weight in (large, small))
    for network, last in ((small, before), (large, after)):
        change = values(measured(linear(network, torch.zeros(4)), samples, labels, last))["change"][1]
        assert change == pytest.approx(float((large - small).norm() / 2))
    other = measured(linear(torch.ones(5, 4), torch.zeros(5)), samples, labels, before)
    assert values(other)["change"][1] == math.inf


def test_which_units_of_a_wide_layer_are_compared_cannot_be_foreseen() -> None:
    """Every second row is parallel to the others of them; at equal distances the other half alone was looked at."""
    rows = torch.randn(2 * MOST_UNITS, 8, generator=torch.Generator().manual_seed(0))
    rows[1::2] = rows[1]
    state = torch.get_rng_state()
    shares = [parallel_share(rows) for _ in range(3)]
    assert all(0.4 < share < 0.6 for share in shares)
    assert len(set(shares)) > 1
    assert torch.equal(state, torch.get_rng_state())


def test_activations_of_a_network_s_own_numbers_are_left_out() -> None:
    """A network may bound a parameter by relu: no sample is active there, and the check must not fail."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale = nn.Conv2d(1, 2, 1), nn.Parameter(torch.ones(2))

        def forward(self, images: Tensor) -> Tensor:
            return self.first(images).amax(dim=(2, 3)) * functional.relu(self.scale)

    samples, labels = torch.rand(20, 1, 2, 2), torch.zeros(20, dtype=torch.int64)
    assert measured(Scaled(), samples, labels).dead == {}


def test_dead_units_are_those_beyond_the_last_network_s() -> None:
    network = nn.Sequential(linear(torch.ones(4, 4), torch.tensor([-9.0, 1, 1, 1])), nn.ReLU(), nn.Linear(4, 2))
    samples, labels = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)
    first = measured(network, samples, labels)
    assert values(first)["dead"] == ("0", 0.25)
    assert values(measured(network, samples, labels, first))["dead"] == ("0", 0.0)
    with torch.no_grad():
        network[0].bias.fill_(-9.0)
    assert values(measured(network, samples, labels, first))["dead"] == ("0", 0.75)


def test_loss_is_compared_with_the_last_network_s() -> None:
    """All logits 0 have the loss ln 2; one that is certain of the wrong class has its logit as the loss."""
    network = nn.Sequential(linear(torch.zeros(2, 4), torch.zeros(2)))
    samples, labels = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)
    first = measured(network, samples, labels)
    assert "loss-jump" not in values(first)
    with torch.no_grad():
        network[0].bias[1] = 50.0
    assert values(measured(network, samples, labels, first))["loss-jump"][1] == pytest.approx(50 / math.log(2) - 1)


def test_numbers_that_are_not_finite_are_the_largest() -> None:
    network = nn.Sequential(linear(torch.full((2, 4), math.nan), torch.zeros(2)))
    samples, labels = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)
    first = measured(network, samples, labels)
    found = values(measured(network, samples, labels, first))
    assert math.isnan(found["loss-jump"][1])
    assert math.isnan(found["change"][1])


class Functional(nn.Module):
    """Two convolutions with activations that are functions, the first used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(1, 9, 1), nn.Conv2d(9, 9, 1), nn.Linear(9, 2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.leaky_relu(functional.relu(self.first(images)) - 1)
        return self.last(torch.relu(self.second(hidden)).amax(dim=(2, 3)))


def test_activations_may_be_functions_and_units_be_channels() -> None:
    network = Functional()
    samples, labels = torch.rand(20, 1, 2, 2), torch.zeros(20, dtype=torch.int64)
    assert list(measured(network, samples, labels).dead) == ["first", "first#2", "second"]
    with torch.no_grad():
        network.second.weight.zero_()
        network.second.bias.copy_(torch.tensor([1.0] * 3 + [-1.0] * 6))
    assert measured(network, samples, labels).dead["second"] == pytest.approx(6 / 9)


def test_layers_before_the_first_received_one_are_left_out() -> None:
    network = Functional()
    samples, labels = torch.rand(20, 1, 2, 2), torch.zeros(20, dtype=torch.int64)
    found = measured_network(network, samples, labels, received={"second.bias"}, last=None, batch_size=20)
    assert (list(found.dead), list(found.layers)) == (["second"], ["second"])


def test_batches_do_not_matter_and_nothing_is_changed() -> None:
    network = Functional()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    samples, labels = torch.rand(20, 1, 2, 2), torch.zeros(20, dtype=torch.int64)
    state = torch.get_rng_state()
    one, many = (measured(network, samples, labels, batch_size=size) for size in (20, 3))
    assert one.dead == many.dead
    assert one.loss == pytest.approx(many.loss)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(module._forward_hooks for module in network.modules())


def test_of_few_samples_no_sets_are_compared() -> None:
    network = Functional()
    labels = torch.zeros(FEWEST_SAMPLES, dtype=torch.int64)
    samples = torch.rand(FEWEST_SAMPLES, 1, 2, 2)
    few = values(measured(network, samples[1:], labels[1:]))
    assert {"nested", "rare"} == values(measured(network, samples, labels)).keys() - few.keys()
