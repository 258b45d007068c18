"""pFedHN's server against autograd from a client's loss through its network to the hypernetwork."""

import copy
import math

import numpy as np
import pytest
import torch
from plain import Sgd, cross_entropy, random_samples
from torch import nn

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.server_hypernetwork import DeepHypernetwork, ServerHypernetwork, ServerRates
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, train_epochs

NUM_CLIENTS, RATE = 4, 0.05
"""Number of clients, and the rate of their one step on all of their data."""


def generated():
    """Return a network with one hidden layer, four inputs and three classes."""
    with torch.device("meta"):
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def server(**changes):
    """Return a server in float64."""
    network = DeepHypernetwork(generated(), embedding_dim=3, hidden_width=6, hidden_layers=2)
    settings = {"learning_rate": 0.3, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0} | changes
    made = ServerHypernetwork({"a": network}, ["a"], NUM_CLIENTS, ServerRates(**settings), torch_generator(0, "pfedhn"))
    for parameter in (made.embeddings, *network.parameters()):
        parameter.data = parameter.data.double()
    return made


def generate(values, client):
    """Return a client's network: the MLP and a head per tensor, written out."""
    hidden = values["embeddings"][client]
    for layer in (0, 2, 4):
        hidden = values[f"body.{layer}.weight"] @ hidden + values[f"body.{layer}.bias"]
        hidden = hidden.clamp(min=0) if layer < 4 else hidden
    theta, tensors, begin = hidden @ values["head_weight"] + values["head_bias"], {}, 0
    for name, parameter in generated().named_parameters():
        tensors[name] = theta[begin : begin + parameter.numel()].reshape(parameter.shape)
        begin += parameter.numel()
    assert begin == len(theta)
    return tensors


def loss_of(tensors, client):
    data = random_samples(8, (1, 2, 2), 3, seed=client)
    hidden = torch.tanh(data.train_images.flatten(1) @ tensors["1.weight"].T + tensors["1.bias"])
    return cross_entropy(hidden @ tensors["3.weight"].T + tensors["3.bias"], data.train_labels)


def change(tensors, client):
    """Train with the project's loop, one step on all data of the client; return before minus after."""
    network, data = generated(), random_samples(8, (1, 2, 2), 3, seed=client)
    network.load_state_dict({name: value.clone() for name, value in tensors.items()}, assign=True)
    network.requires_grad_(True)
    one = ParameterSet(parameters=list(network.parameters()), learning_rate=RATE)
    train_epochs(network, [one], data, Epochs(epochs=1, batch_size=8), np.random.default_rng(0))
    return {name: tensors[name] - value.detach() for name, value in network.named_parameters()}


def values_of(one):
    return {name: value.clone() for name, value in one.state().items() if not name.startswith("momentum/")}


def assert_equal(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_networks_are_those_of_the_formula():
    """Any selection of clients gets networks equal to the written-out MLP and linear heads."""
    one = server()
    for client, tensors in one.generate([3, 1]).items():
        assert_equal(tensors, generate(one.state(), client))


def test_initial_values_are_torchs():
    """By their moments, embeddings are standard normal and linear layers uniform in +-1/sqrt(fan-in)."""
    network = DeepHypernetwork(build_target("cnn", (1, 8, 8), 10), embedding_dim=50, hidden_width=100, hidden_layers=3)
    rates = ServerRates(learning_rate=0.1, momentum=0.0, weight_decay=0.0, clip_norm=0.0)
    state = ServerHypernetwork({"cnn": network}, ["cnn"], 200, rates, torch_generator(0, "pfedhn")).state()
    assert float(state["embeddings"].std()) == pytest.approx(1, rel=0.02)
    for name, fan_in in (("head_weight", 100), ("head_bias", 100), ("body.0.weight", 50), ("body.6.weight", 100)):
        assert float(state[name].abs().max()) <= 1 / math.sqrt(fan_in)
        assert float(state[name].std()) == pytest.approx(1 / math.sqrt(3 * fan_in), rel=0.02)


@pytest.mark.parametrize("combine", ["sum", "mean"])
@pytest.mark.parametrize("clients", [[2], [0, 1, 3]])
@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_one_round_is_end_to_end_gradient_descent(clients, combine, clip):
    """From changes of one local step, the server steps along RATE times the gradient of summed (or mean) losses."""
    one = server(combine=combine, clip_norm=clip)
    values = values_of(one)
    one.update({client: change(tensors, client) for client, tensors in one.generate(clients).items()})
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    loss = RATE * sum(loss_of(generate(leaves, client), client) for client in clients)
    loss = loss / len(clients) if combine == "mean" else loss
    wanted = Sgd(0.3, clip=clip or math.inf).step(leaves, loss, list(leaves))
    assert_equal(values_of(one), {name: value.detach() for name, value in wanted.items()})
    moved = (one.embeddings - values["embeddings"]).detach().abs().sum(dim=1) > 0
    assert moved.nonzero().flatten().tolist() == clients


def test_two_rounds_with_momentum_and_decay():
    """Three updates of varying clients equal b <- m b + clip(g) + w p on all parameters, unsampled rows included."""
    one = server(momentum=0.9, weight_decay=0.01, clip_norm=1e-3)
    values, optimiser = values_of(one), Sgd(0.3, 0.9, 0.01, 1e-3)
    for clients in ([1], [1, 2], [0]):
        one.update({client: change(tensors, client) for client, tensors in one.generate(clients).items()})
        values = {name: value.detach().requires_grad_() for name, value in values.items()}
        loss = RATE * sum(loss_of(generate(values, client), client) for client in clients) / len(clients)
        values = optimiser.step(values, loss, list(values))
    assert_equal(values_of(one), {name: value.detach() for name, value in values.items()})


def small():
    """Return a network with four inputs and three classes, and parameters of other names and shapes."""
    with torch.device("meta"):
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def hetero(**changes):
    """Return a server in float64: clients 0 and 2 have the network `generated`, clients 1 and 3 `small`."""
    networks = {
        name: DeepHypernetwork(network, embedding_dim=3, hidden_width=6, hidden_layers=2)
        for name, network in (("large", generated()), ("small", small()))
    }
    settings = {"learning_rate": 0.3, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0} | changes
    rates = ServerRates(**settings)
    made = ServerHypernetwork(networks, ["large", "small"], NUM_CLIENTS, rates, torch_generator(0, "pfedhn"))
    for parameter in made._parameters.values():
        parameter.data = parameter.data.double()
    return made


def generate_flat(values, client):
    """Return a client's flat network under the common body and the heads of its network, written out."""
    hidden, name = values["embeddings"][client], ("large", "small")[client % 2]
    for layer in (0, 2, 4):
        hidden = values[f"body.{layer}.weight"] @ hidden + values[f"body.{layer}.bias"]
        hidden = hidden.clamp(min=0) if layer < 4 else hidden
    return hidden @ values[f"{name}/head_weight"] + values[f"{name}/head_bias"]


def flat(tensors):
    return torch.cat([value.flatten() for value in tensors.values()])


@pytest.mark.parametrize("combine", ["sum", "mean"])
@pytest.mark.parametrize("clients", [[3, 0, 1], [1], [2, 0]])
def test_networks_of_two_kinds_share_a_body(clients, combine):
    """Two rounds along the products <delta_i, theta_i> of all clients: clipped together, with momentum and decay.

    The heads of a network that no client of a round has do not change, nor does their momentum.
    """
    one = hetero(combine=combine, momentum=0.9, weight_decay=0.01, clip_norm=0.5)
    values, optimiser = values_of(one), Sgd(0.3, 0.9, 0.01, 0.5)
    for asked in (clients, [0, 3]):
        changes = {}
        for client, tensors in one.generate(asked).items():
            torch.testing.assert_close(flat(tensors), generate_flat(values, client), rtol=1e-9, atol=1e-12)
            draw = torch_generator(client, "change")
            changes[client] = {
                name: torch.randn(value.shape, generator=draw, dtype=torch.float64) for name, value in tensors.items()
            }
        before = {name: value.clone() for name, value in one.state().items()}
        one.update(changes)
        values = {name: value.detach().requires_grad_() for name, value in values.items()}
        product = sum(generate_flat(values, client) @ flat(delta) for client, delta in changes.items())
        idle = [f"{name}/" for row, name in enumerate(("large", "small")) if row not in {c % 2 for c in asked}]
        moving = [name for name in values if not name.startswith(tuple(idle))]
        values |= optimiser.step(values, product / len(asked) if combine == "mean" else product, moving)
        values = {name: value.detach() for name, value in values.items()}
        assert_equal(values_of(one), values)
        after = one.state()
        for name in before:
            still = any(name.removeprefix("momentum/").startswith(prefix) for prefix in idle)
            assert torch.equal(after[name], before[name]) == still, name


def test_a_loaded_state_goes_on_exactly():
    """Momentum is part of the state: the next round after loading is bit-equal."""
    one, other = (server(momentum=0.9, weight_decay=0.01, clip_norm=1.0) for _ in range(2))

    def play(which, clients):
        which.update({client: change(tensors, client) for client, tensors in which.generate(clients).items()})

    play(one, [0, 2])
    saved = copy.deepcopy(one.state())
    assert {name for name in saved if name.startswith("momentum/")} == {f"momentum/{name}" for name in values_of(one)}
    play(other, [3])
    other.load(saved)
    for which in (one, other):
        play(which, [1, 2])
    for name, value in one.state().items():
        assert torch.equal(value, other.state()[name]), name
    fresh = server(momentum=0.9)
    other.load(fresh.state())
    assert not [name for name in other.state() if name.startswith("momentum/")]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_constant_inputs_train_the_hypernetwork_alone(momentum):
    """Two rounds on descriptors c_i descend on loss(h(c_i)) by h only; embeddings do not change."""
    one = server(momentum=momentum, weight_decay=0.01, clip_norm=1e-3)
    values, clients = values_of(one), [0, 2]
    rows = torch.randn(2, values["embeddings"].shape[1], generator=torch_generator(1, "rows")).to(one.embeddings.dtype)
    rows.requires_grad_()
    optimiser, names = Sgd(0.3, momentum, 0.01, 1e-3), [name for name in values if name != "embeddings"]
    for _ in range(2):
        generated = one.generate(clients, rows)
        one.update({client: change(generated[client], client) for client in clients}, rows)
        values = {name: value.detach().requires_grad_() for name, value in values.items()}
        table = {
            **values,
            "embeddings": torch.zeros_like(values["embeddings"]).index_copy(0, torch.tensor(clients), rows),
        }
        loss = RATE * sum(loss_of(generate(table, client), client) for client in clients) / len(clients)
        values = optimiser.step(values, loss, names)
    assert rows.grad is None
    assert_equal(values_of(one), {name: value.detach() for name, value in values.items()})
    assert "momentum/embeddings" not in one.state()
    one.forget_momentum()
    assert not [name for name in one.state() if name.startswith("momentum/")]
