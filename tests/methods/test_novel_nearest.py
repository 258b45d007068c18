"""The training client nearest to a novel one, found by A-distances in a federation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import setting_of
from torch import Tensor

from clients.engine import adapter
from clients.engine.base import BaseClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.grids import Settings, plain_grid
from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.federated_data import ClientData, FederatedData, load_federated_data
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.queries import CLASSIFIERS, ERRORS, GRADIENTS, RATES, QuerySpec
from hyperfl_flwr.training.a_distance import a_distance, split
from strategies.novel.nearest import find_distances

GROUPS = 3
"""Number of groups of classes (two each) and of clients (three each) in the data set."""


@pytest.fixture
def groups(make_settings: Callable[..., Settings], tmp_path: Path) -> tuple[RunConfig, FederatedData]:
    """Return nine clients, three to a pair of classes, two of them novel; images are a class pattern with noise."""
    rng = np.random.default_rng(5)
    clients = np.repeat(np.arange(3 * GROUPS), 40)
    labels = 2 * (clients % GROUPS) + rng.integers(0, 2, len(clients))
    patterns = rng.integers(60, 200, (2 * GROUPS, 8, 8))
    images = (patterns[labels] + rng.normal(0, 25, (len(labels), 8, 8))).clip(0, 255).astype(np.uint8)
    np.savez(tmp_path / "groups.npz", images=images, labels=labels, clients=clients)
    settings = make_settings("pfedhn", dataset=f"npz:{tmp_path}/groups.npz", **{
        "num_clients": 7, "novel.clients": 2, "data.partition": "natural", "data.train-samples": "auto",
        "data.test-samples": "auto", "target": "mlp",
    })  # fmt: skip
    config = RunConfig.from_flat(settings)
    return config, load_federated_data(config.data_settings())


def distances_in(config: RunConfig, num_nodes: int = 2) -> Any:
    grid = plain_grid(num_nodes, config.flat())
    return find_distances(grid, setting_of(config, grid), "none")


def test_the_nearest_client_has_the_same_classes(groups: tuple[RunConfig, FederatedData]) -> None:
    """The A-distances equal those of classifiers trained by gradient descent on all samples in one place."""
    config, data = groups
    found = distances_in(config)
    assert found.failures == []
    classes = [set(np.flatnonzero(counts)) for counts in data.label_counts()[0]]
    for novel in (7, 8):
        assert classes[found.nearest(novel)] == classes[novel]
        far = [found.between[novel][other] for other in range(7) if classes[other] != classes[novel]]
        assert min(far) > found.between[novel][found.nearest(novel)] + 0.5
        for other in (0, 3):
            halves = [split(data.client(i).train_images, numpy_generator(0, "a-distance", i)) for i in (other, novel)]
            assert found.between[novel][other] == pytest.approx(central(halves, config), abs=1e-6)


def central(halves: list[tuple[Tensor, Tensor]], config: RunConfig) -> float:
    """Return the A-distance by autograd of two clients' samples [(to train on, to evaluate on)]."""
    weights = torch.zeros(65, requires_grad=True)
    sides = [-1.0, 1.0]
    for _ in range(config.novel.a_distance_rounds):
        loss = torch.zeros(())
        for side, (samples, _) in zip(sides, halves, strict=True):
            scores = samples @ weights[:-1] / 8 + weights[-1]
            loss = loss + torch.nn.functional.softplus(-side * scores).mean() / 2
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = (weights - config.novel.a_distance_learning_rate * gradient).detach().requires_grad_()
    rates = [
        float((side * (samples @ weights[:-1] / 8 + weights[-1]) <= 0).double().mean())
        for side, (_, samples) in zip(sides, halves, strict=True)
    ]
    return a_distance(*rates)


def test_clients_that_fail_are_left_out_of_the_comparison(
    groups: tuple[RunConfig, FederatedData], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training client 2 fails at once and novel client 8 in the second round; client 7 keeps its other distances."""
    config, _ = groups
    straight, calls, client_data = distances_in(config, 3), [], FederatedData.client

    def broken(self: FederatedData, client: int, device: object = "cpu") -> ClientData:
        calls.append(client)
        if client == 2 or (client == 8 and calls.count(8) > 1):
            raise RuntimeError("the camera is broken")
        return client_data(self, client)

    monkeypatch.setattr(FederatedData, "client", broken)
    found = distances_in(config, 3)
    assert [(failure.client, failure.reason) for failure in found.failures] == [
        (2, "RuntimeError: the camera is broken"),
        (8, "RuntimeError: the camera is broken"),
    ]
    assert found.between == {7: {other: straight.between[7][other] for other in (0, 1, 3, 4, 5, 6)}}
    row, rounds = 4 * 65, config.novel.a_distance_rounds
    assert found.bytes_down[7] == row * (7 + 6 * rounds)
    assert found.bytes_of_others[7] == row * (7 + 6 * rounds) + row * 6 * rounds + 8 * 6


def test_natural_novel_clients_are_drawn(groups: tuple[RunConfig, FederatedData]) -> None:
    """All clients of the data set take part; the data's seed decides which two are novel."""
    config, data = groups
    without = load_federated_data(replace(config.data_settings(), novel_clients=0))
    order = [data.train_indices(client).tolist() for client in range(9)]
    plain = [without.train_indices(client).tolist() for client in range(9)]
    assert sorted(order) == sorted(plain) == plain
    for client in range(9):
        assert set(data.dataset.test.clients[data.test_indices(client)]) == {plain.index(order[client])}
    drawn = set()
    for seed in range(10):
        other = load_federated_data(replace(config.data_settings(), seed=seed))
        places = [plain.index(other.train_indices(client).tolist()) for client in range(9)]
        assert places[:7] == sorted(places[:7])
        drawn.add(tuple(places[7:]))
    assert len(drawn) > 5
    with pytest.raises(DataError, match=r"num-clients \+ novel.clients must be the number of client ids .* 9, got 10"):
        load_federated_data(replace(config.data_settings(), num_clients=10))


def test_a_client_with_impossible_error_rates_is_never_nearest(
    groups: tuple[RunConfig, FederatedData], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training client 0 reports error rates of 1e9, which would give the lowest A-distance; it is refused."""
    honest = adapter._WORK[ERRORS]

    def falsify(member: BaseClient, received: SharedArrays, question: QuerySpec) -> tuple[SharedArrays, int]:
        arrays, number = honest(member, received, question)
        return ({RATES: np.full_like(arrays[RATES], 1e9)} if member.context.client == 0 else arrays), number

    monkeypatch.setitem(adapter._WORK, ERRORS, falsify)
    found = distances_in(groups[0], 1)
    assert [(failure.client, failure.reason) for failure in found.failures] == [
        (0, "error rates must be between 0 and 1")
    ]
    assert all(0 not in distances for distances in found.between.values())


def test_a_client_with_impossible_gradients_is_left_out_alone(
    groups: tuple[RunConfig, FederatedData], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are finite, and would make the classifiers infinite that novel clients are sent."""
    honest = adapter._WORK[GRADIENTS]

    def falsify(member: BaseClient, received: SharedArrays, question: QuerySpec) -> tuple[SharedArrays, int]:
        arrays, number = honest(member, received, question)
        large = {CLASSIFIERS: np.full_like(arrays[CLASSIFIERS], 3e38)}
        return (large if member.context.client == 1 else arrays), number

    monkeypatch.setitem(adapter._WORK, GRADIENTS, falsify)
    found = distances_in(groups[0], 9)  # a node for each client
    assert [failure.client for failure in found.failures] == [1]
    assert "has numbers beyond 1e+06" in found.failures[0].reason
    assert sorted(found.between) == [7, 8]
    assert all(sorted(distances) == [0, 2, 3, 4, 5, 6] for distances in found.between.values())
