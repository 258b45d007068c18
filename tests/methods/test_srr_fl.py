"""Runs of SRR-FL: what leaves a client, what is stated about it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import small_settings
from test_privacy_budget import limited_grid

from hyperfl_flwr.app.methods import check_run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import last_checkpoint, metrics
from hyperfl_flwr.contract.grids import RepeatingGrid, Settings
from hyperfl_flwr.core.errors import ConfigError, RunFailedError
from hyperfl_flwr.privacy.budget import FILE, read_record
from hyperfl_flwr.privacy.spent import spent
from hyperfl_flwr.runs.observation import load_observation, observation_path

WEIGHTS = 22_602
"""Number of parameters of the CNN for the digits."""

EPSILON = 2 * 5.0 * WEIGHTS
"""Of two rounds with the default settings."""


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "privacy.jsonl").read_text().splitlines()]


def test_a_run_sends_points_of_the_grid_and_states_their_epsilon(federate: Federate) -> None:
    """The server's statement, the line before the first round and the node's record have the same total."""
    run = federate("srr-fl", num_clients=2, **{"audit.clients": "all", "audit.rounds": "all"})
    for number in (1, 2):
        for client in (0, 1):
            reply = load_observation(observation_path(run, number, client)).reply
            sent = np.concatenate([np.ravel(value) for value in reply.values()])
            assert sent.size == WEIGHTS
            steps = np.rint(sent.astype(np.float64) * 1e4)
            assert np.abs(steps).max() <= 750
            assert (sent == (steps / 1e4).astype(np.float32)).all()
            assert len(np.unique(steps)) > 1400  # of 1501
    entry = json.loads((run / "summary.json").read_text())["privacy"]
    assert entry == entry | {
        "unit": "client", "epsilon": EPSILON, "delta": 0.0, "horizon": 2, "weights": WEIGHTS, "weight_epsilon": 5.0,
        "crowd": 1, "noise_multiplier": None, "reason": None,
    }  # fmt: skip
    log = (run / "server.log").read_text()
    assert f"planned epsilon {EPSILON:.2f} of clients over 2 rounds: 5 for each of {WEIGHTS} weights and round" in log
    assert f"privacy: epsilon {EPSILON:.2f} at delta 0 of clients over 2 releases (5 for each of {WEIGHTS}" in log
    rows = [row for row in spent(read_record(run / "clients" / FILE), 1e-5) if not row.experiment]
    found = [(row.client_epsilon, row.record_epsilon, row.bounded_by) for row in rows]
    assert found == [(EPSILON, EPSILON, "client")] * 2
    assert [line["weights"] * line["weight_epsilon"] for line in lines(run)] == [EPSILON / 2] * 2


def test_messages_that_are_sent_again_and_repeated_rounds_count(federate: Federate) -> None:
    run = federate("srr-fl", grid=RepeatingGrid, num_clients=2, num_rounds=1)
    (row, _) = (row for row in spent(read_record(run / "clients" / FILE), 1e-5) if not row.experiment)
    assert (row.releases, row.client_epsilon) == (2, EPSILON)


def test_the_owners_budget_counts_all_weights(federate: Federate) -> None:
    """What suffices for one weight does not suffice for a round: nothing is trained."""
    with pytest.raises(RunFailedError, match=r"epsilon of client 0 for one client to 1\.13e\+05 .* max-epsilon = 500"):
        federate("srr-fl", grid=limited_grid(500.0), num_clients=2)


@pytest.mark.parametrize(("limit", "rounds"), [(EPSILON / 2, {1}), (EPSILON, {1, 2})])
def test_the_owners_budget_counts_all_rounds(limit: float, rounds: set[int], federate: Federate) -> None:
    plan: dict[str, Any] = {"num_clients": 2, "max_failed_rounds": 5, "failure_budget": 1.0}
    run = federate("srr-fl", grid=limited_grid(limit), **plan)
    assert {entry.round for entry in read_record(run / "clients" / FILE)} == rounds
    assert {row["round"] for row in metrics(run) if row["kind"] == "train" and row["clients"]} == rounds
    if len(rounds) < 2:
        reasons = [path.read_text() for path in (run / "failures").rglob("*") if path.is_file()]
        assert any(f"max-epsilon = {limit:g}" in reason for reason in reasons)


def test_equal_weights_in_secure_sums(federate: Federate) -> None:
    """The opened mean is a mean of points of the grid: multiples of 10^-4 / 4, up to the rounding of the sum."""
    run = federate("srr-fl", 4, num_clients=4, num_rounds=1, **{"secagg.enabled": True})
    mean = np.concatenate([np.ravel(value) for value in last_checkpoint(run)[0].values()]).astype(np.float64)
    off = np.abs(mean * 4e4 - np.rint(mean * 4e4))
    assert np.abs(mean).max() <= 0.075
    assert np.median(off) < 0.01


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"privacy.clip-norm": 2.0}, r"privacy\.clip-norm = 2 must not be set with srr-fl: .* set srr-fl\.epsilon"),
        ({"privacy.unit": "client", "privacy.clip-norm": 1.0}, r"privacy\.unit = client must not be set with srr-fl"),
        ({"dp.epsilon": 4.0}, r"dp\.epsilon must be 0 with srr-fl, got 4"),
        ({"srr-fl.growth": 40}, r"srr-fl\.growth is too large: 10 groups .*, each 40 points larger"),
        ({"srr-fl.radius": 1e-6}, r"srr-fl\.growth needs a grid of 3 to 1048576 points, .*; got 1"),
        ({"srr-fl.epsilon": 21.0}, r"srr-fl\.epsilon must be less than or equal to 20; got 21"),
        ({"target": "own_networks:with_batchnorm"}, r"running statistics \(BatchNorm\), which are not on the grid"),
    ],
)
def test_what_would_not_hold_is_refused(changes: Settings, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_run(RunConfig.from_flat(small_settings(method="srr-fl") | changes), (1, 8, 8), 10)
