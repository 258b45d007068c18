"""What PRIV-HFL's messages reveal: to a client of the chain about its neighbours, and to the server about all."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MessageType
from test_priv_hfl import (
    CHAIN,
    FOUR,
    counted_models,
    history,
    keep_versions,
    lose_replies,
    model_vector,
    record_forces,
    start_vector,
)
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.attacks.base import build_structure
from hyperfl_flwr.attacks.dual_difference import read_change
from hyperfl_flwr.attacks.ig import _simulation
from hyperfl_flwr.audit.history import ObservationHistory, require_history
from hyperfl_flwr.audit.record_round import AttackedRound, recorded_round
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.grids import KilledError, KilledGrid, Settings
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.data.federated_data import ClientData, load_federated_data
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.arrays import by_number
from hyperfl_flwr.protocol.messages import PER_CLIENT_ARRAYS, Request, record_of
from hyperfl_flwr.protocol.packing import unpack_arrays
from hyperfl_flwr.runs.run_directory import read_manifest
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from hyperfl_flwr.training.dual_averaging import DualRule
from hyperfl_flwr.training.dual_stability import dual_rule

LAST = 3
RATE = 0.05
PLAN: dict[str, Any] = {
    **FOUR, **CHAIN, "num_rounds": 4, "checkpoint_every": 1, "priv-hfl.dual-step": 0.4, "priv-hfl.sigma": 0.5,
    "priv-hfl.local-steps": 1, "batch-size": 100, "learning-rate": RATE, "weight-decay": 0.0,
}  # fmt: skip
"""Each step uses all samples of a client."""


class ForcesGrid(InProcessGrid):
    """Keep the force that each client is sent in each round, read from the messages."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.forces: dict[tuple[int, int], np.ndarray] = {}

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == MessageType.TRAIN:
                own = by_number(unpack_arrays(record_of(message.content, PER_CLIENT_ARRAYS, ArrayRecord)))
                for client, arrays in own.items():
                    force = arrays["force/theta"].astype(np.float64)
                    self.forces[Request.of(message.content).round, client] = force
        return super().push_messages(messages)


def run_chain(
    federate: Federate, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> tuple[Path, dict[tuple[int, int], np.ndarray], DualRule]:
    keep_versions(monkeypatch)
    grids: list[ForcesGrid] = []

    def make(num_nodes: int, settings: Settings) -> ForcesGrid:
        grids.append(ForcesGrid(num_nodes, settings))
        return grids[-1]

    run = federate("priv-hfl", grid=make, **PLAN | changes)
    return run, grids[0].forces, dual_rule(resolved(RunConfig.from_flat(read_manifest(run)["settings"])).priv_hfl)


def data_of(run: Path, client: int) -> ClientData:
    return load_federated_data(RunConfig.from_flat(read_manifest(run)["settings"]).data_settings()).client(client)


def gradient(run: Path, client: int, theta: np.ndarray) -> np.ndarray:
    """Return the autograd gradient [m] of a client's loss on all of its samples."""
    data = data_of(run, client)
    target = build_target("cnn", (1, 8, 8), 10)
    shapes = {name: parameter.shape for name, parameter in target.named_parameters()}
    parts = torch.split(torch.from_numpy(theta).float(), [shape.numel() for shape in shapes.values()])
    values = {n: p.view(s).clone().requires_grad_() for (n, s), p in zip(shapes.items(), parts, strict=True)}
    loss = functional.cross_entropy(functional_call(target, values, (data.train_images,)), data.train_labels)
    found = torch.autograd.grad(loss, list(values.values()))
    return torch.cat([each.flatten() for each in found]).double().numpy()


@pytest.mark.parametrize(("me", "neighbour", "sign"), [(LAST, LAST - 1, -1), (0, 1, 1)])
def test_an_end_of_the_chain_rebuilds_its_neighbours_model(
    me: int, neighbour: int, sign: int, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The force is sign mu, and mu_t - D mu_(t-1) = 2 beta d with d the difference of the two models after round t - 1.

    The client uses its forces and own models only; the first change is the neighbour's gradient, as no force acts yet.
    """
    run, forces, rule = run_chain(federate, monkeypatch)
    stored, found = history(run), {}
    for number in (2, 3, 4):
        newest = sign * (forces[number, me] - rule.decay * forces[number - 1, me])
        difference = newest / (2 * rule.step)  # theta_i - theta_(i+1)
        found[number - 1] = model_vector(stored[me][number - 1]) - sign * difference
        truth = model_vector(stored[neighbour][number - 1])
        np.testing.assert_allclose(found[number - 1], truth, rtol=0, atol=1e-6)
        assert np.abs(truth - model_vector(stored[me][number - 1])).max() > 1e-3
    expected = gradient(run, neighbour, start_vector())
    np.testing.assert_allclose((start_vector() - found[1]) / RATE, expected, rtol=0, atol=2e-5)
    assert np.abs(expected).max() > 0.01


def test_one_of_two_clients_rebuilds_every_gradient_of_the_other(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The force on the other client is the negative of its own force."""
    run, forces, rule = run_chain(federate, monkeypatch, **{"num-clients": 2})
    stored = history(run)

    def other(number: int) -> np.ndarray:
        newest = -(forces[number + 1, 1] - rule.decay * forces[number, 1]) / (2 * rule.step)
        return model_vector(stored[1][number]) + newest

    found = (other(2) - other(3)) / RATE + forces[3, 1]
    np.testing.assert_allclose(found, gradient(run, 0, other(2)), rtol=0, atol=5e-5)
    assert np.abs(forces[3, 1]).max() > 1e-3


def test_within_the_chain_a_client_sees_a_combination(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns 2 theta_i - theta_(i-1) - theta_(i+1): the sum of its neighbours' models, but neither of them."""
    run, forces, rule = run_chain(federate, monkeypatch)
    left, mine, right = (model_vector(history(run)[client][1]) for client in (0, 1, 2))
    newest = (forces[2, 1] - rule.decay * forces[1, 1]) / (2 * rule.step)
    np.testing.assert_allclose(2 * mine - newest, left + right, rtol=0, atol=2e-6)
    assert np.abs(left - right).max() > 1e-3


def followed(run: Path) -> tuple[AttackedRound, ObservationHistory]:
    target, observed = recorded_round(run, {})
    require_history(target)
    return target, ObservationHistory(observed.paths, run)


def flat(tensors: Mapping[str, Tensor]) -> np.ndarray:
    return torch.cat([value.flatten() for value in tensors.values()]).double().numpy()


WATCHED: dict[str, Any] = {
    **PLAN, "audit.clients": "all", "audit.rounds": "all", "momentum": 0.5, "weight-decay": 0.03,
}  # fmt: skip
SAMPLED: dict[str, Any] = {**WATCHED, "fraction_train": 0.5, "num_rounds": 6, "failure_budget": 1.0}


@pytest.mark.parametrize("order", ["alternating", "published"])
@pytest.mark.parametrize("realisation", ["mean", "chain"])
def test_the_server_rebuilds_every_model_force_and_gradient(
    realisation: str, order: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half of the clients per round and a lost reply, the server's records suffice to rebuild all in round 6."""
    keep_versions(monkeypatch)
    plan = SAMPLED | {"priv-hfl.realisation": realisation, "priv-hfl.order": order}
    lost = min(client for client, versions in history(federate("priv-hfl", **plan)).items() if 3 in versions)
    lose_replies(monkeypatch, {(lost, 3)})
    forces = record_forces(monkeypatch)
    run = federate("priv-hfl", **plan)
    models, (target, observed) = counted_models(run, 5), followed(run)
    assert [each.client for each in observed] == [0, 1, 2, 3]
    for client, observation in enumerate(observed):
        reading = read_change(observation, target.knowledge())
        np.testing.assert_allclose(flat(reading.parameters), models[client], rtol=0, atol=1e-6)
        np.testing.assert_allclose(flat(reading.force), forces[6, client], rtol=0, atol=1e-6)
        expected = gradient(run, client, models[client])
        np.testing.assert_allclose(flat(reading.gradient), expected, rtol=0, atol=2e-5)
        assert min(np.abs(forces[6, client]).max(), np.abs(expected).max()) > 1e-3
    lost_rounds = [each.round for each in observed[lost].earlier]
    assert lost_rounds
    assert 3 not in lost_rounds


def test_a_resumed_run_keeps_no_record_of_what_did_not_count(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in round 4 and resumed from round 2: a reply of round 3, lost this time, leaves no old record."""
    keep_versions(monkeypatch)
    plan = WATCHED | {"num_rounds": 5, "checkpoint_every": 2, "failure_budget": 1.0}
    plan["output"] = str(federate("priv-hfl", **plan | {"audit.clients": ""}).parent / "run-111")
    with pytest.raises(KilledError):
        federate("priv-hfl", grid=partial(KilledGrid, in_round=4), **plan)
    observed = Path(plan["output"]) / "observations"
    assert (observed / "round-000003-client-00000.npz").exists()
    lose_replies(monkeypatch, {(0, 3)})
    run = federate("priv-hfl", resume=plan["output"], **plan)
    assert not (observed / "round-000003-client-00000.npz").exists()
    target, seen = followed(run)
    reading = read_change(seen[0], target.knowledge())
    assert [each.round for each in seen[0].earlier] == [1, 2, 4]
    np.testing.assert_allclose(flat(reading.parameters), model_vector(history(run)[0][4]), rtol=0, atol=1e-6)


def test_several_steps_under_a_force_are_simulated(federate: Federate) -> None:
    """With three steps, momentum, decay and a force, the true images give the mean gradient that was read off."""
    run = federate("priv-hfl", **WATCHED | {"priv-hfl.local-steps": 3})
    target, observed = followed(run)
    knowledge, data = target.knowledge(), data_of(run, 1)
    reading = read_change(observed[1], knowledge)
    constants = dict(reading.parameters) | {"labels": data.train_labels}
    forces = {f"force/{name}": value for name, value in reading.force.items()}
    simulate = _simulation(build_structure(knowledge), knowledge, reading.num_steps)
    found, without = (flat(simulate({"images": data.train_images}, constants | each)) for each in (forces, {}))
    expected = flat(reading.gradient)
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)
    assert np.linalg.norm(without - expected) > 1e-3 * np.linalg.norm(expected)


def test_a_run_that_recorded_some_rounds_only_is_refused(federate: Federate) -> None:
    """A client's model is the sum of all its changes, so a missing round is an error and not a zero change."""
    run = federate("priv-hfl", **{"audit.clients": "1,3", "audit.rounds": "2"})
    with pytest.raises(ConfigError, match=r"not all rounds before round 2 .*audit.clients=1,3 --set audit.rounds=all"):
        followed(run)
