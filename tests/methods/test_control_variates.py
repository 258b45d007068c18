"""SCAFFOLD and FedDyn: the server's state is always the mean of the clients', and what would break that is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import metrics, private_arrays
from hyperfl_flwr.contract.grids import KilledError, KilledGrid, Settings
from hyperfl_flwr.core.errors import ConfigError, RunFailedError
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.checkpoint import SERVER, Checkpoints

NUM_CLIENTS = 5
LOST = 2
"""Round in which one reply is lost after its client has stored the round; round 3 has no reply at all."""


def of_clients(run: Path, method: str, number: int) -> np.ndarray:
    """Return the mean over all clients of their state [m] that the server has counted up to a round."""
    group = client_of(method).private[0]
    stored, (_, progress) = private_arrays(run), Checkpoints(run / "checkpoints").load(number)
    rows = [
        stored[f"client-{client:05d}/round-{version:06d}.npz"][f"{group}/theta"].astype(np.float64)
        for client, version in progress.versions.items()
        if version
    ]
    return np.sum(rows, axis=0) / NUM_CLIENTS


def of_server(run: Path, method: str, number: int) -> np.ndarray:
    """Return the server's state [m] after a round."""
    arrays, _ = Checkpoints(run / "checkpoints").load(number)
    if method == "scaffold":
        return arrays["control/theta"].astype(np.float64)
    names = [f"{SERVER}model/{name}" for name, _ in build_target("cnn", (1, 8, 8), 10).named_parameters()]
    return np.concatenate([arrays[name].ravel() for name in names])


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_the_servers_state_is_the_mean_of_the_clients(
    method: str, federate: Federate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rounds with three of five clients, a lost reply, a round without replies, and a run that is killed and resumed.

    The states are equal up to the rounding of float32. A client with a lost reply has stored the round all the same.
    """
    monkeypatch.setattr("hyperfl_flwr.node.private_state.PrivateState.forget_before", lambda *_, **__: None)
    monkeypatch.setattr("hyperfl_flwr.runs.checkpoint.KEPT", 99)
    client_class = client_of(method)
    fit, lost = client_class.fit, []

    def failing(self: Any, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        reply, number = fit(self, parameters, config), config["round"]
        if number == 3 or (number == LOST and lost in ([], [self.context.client])):
            lost[:] = lost or [self.context.client]
            raise RuntimeError("the line is cut")
        return reply

    monkeypatch.setattr(client_class, "fit", failing)
    plan: Settings = {"num_rounds": 7, "fraction_train": 0.6, "checkpoint_every": 1, "failure_budget": 1.0}
    plan["output"] = str(tmp_path / "killed")
    with pytest.raises(KilledError):
        federate(method, grid=partial(KilledGrid, in_round=5), **plan)
    run = federate(method, resume=plan["output"], **plan)
    failed = [row["failed"] for row in metrics(run) if row["kind"] == "train"]
    assert failed[LOST - 1] == lost
    assert f"client-{lost[0]:05d}/round-{LOST:06d}.npz" in private_arrays(run)
    assert len(failed[2]) == 3
    for number in range(1, 8):
        mean, server = of_clients(run, method, number), of_server(run, method, number)
        assert np.abs(server).max() > 1e-5
        np.testing.assert_allclose(server, mean, rtol=0, atol=1e-5 * np.abs(server).max())


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_it_is_so_with_secure_sums(method: str, federate: Federate) -> None:
    """Two rounds of five nodes; the difference is the rounding of the masked sums, and nothing is cut off."""
    run = federate(method, NUM_CLIENTS, target="cnn", **{"secagg.enabled": True})
    mean, server = of_clients(run, method, 2), of_server(run, method, 2)
    assert np.abs(server).max() > 1e-5
    np.testing.assert_allclose(server, mean, rtol=0, atol=1e-5 * np.abs(server).max())


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "priv-hfl"])
def test_a_client_beyond_the_range_of_a_secure_sum_fails(method: str, federate: Federate) -> None:
    """Its state would have what is cut off from the sum."""
    changes: Settings = {"secagg.enabled": True, "secagg.range": 0.1, "num-rounds": 1}
    with pytest.raises(RunFailedError, match="5 of 5 client trainings failed"):
        federate(method, NUM_CLIENTS, **changes)


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"privacy.clip-norm": 1.0}, r"privacy\.clip-norm = 1 must not be set with {}: .*; take one of .*fedavg, "),
        ({"privacy.unit": "client"}, r"privacy\.unit = client must not be set with {}: server and client must add"),
        (
            {"privacy.unit": "client", "privacy.clip-norm": 1.0, "privacy.noise-multiplier": 1.0},
            r"privacy\.clip-norm = 1 must not be set with {}",
        ),
        ({"dp.epsilon": 8.0}, r"dp\.epsilon must be 0 with {}"),
    ],
    ids=["clip", "unit", "client", "record"],
)
def test_noise_and_clipping_are_refused(
    method: str, changes: Settings, problem: str, federate: Federate, tmp_path: Path
) -> None:
    """They would make the server's state differ from the clients'; nothing is written."""
    with pytest.raises(ConfigError, match=problem.format(method)):
        federate(method, **changes)
    assert not list(tmp_path.iterdir())
